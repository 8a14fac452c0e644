"""Arrivals that are made up: by name, the same for the same seed. One request a second on average; see `Trace.at_rate`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from branchline.engine.errors import ConfigError
from branchline.engine.types import DEFAULT_SERVICE, Service
from branchline.load.simulate.trace import NO_PARENT, Floats, Ints, Trace, make_trace

PAGE_TOKENS = 16
TENANTS = ("amber", "birch", "cedar", "dune")
SERVICES = (Service(qos="interactive"), DEFAULT_SERVICE, Service(qos="batch"))
STORM_AGENTS, STORM_BRANCHES = 50, 100
# What a client asks for that doesn't know how long the answer will be, in multiples of it.
_MAX_TOKENS_FACTOR = 2
_NUM_PREAMBLES, _PREAMBLE_BLOCKS = 32, 16


def workload_names() -> list[str]:
    """What `make_workload` knows."""
    return list(_WORKLOADS)


def make_workload(name: str, count: int, *, seed: int = 0) -> Trace:
    """`count` requests. Raises ConfigError that names the workloads."""
    if name not in _WORKLOADS:
        raise ConfigError(f"no workload {name!r}: there are {', '.join(_WORKLOADS)}", param="workload")
    if count < 1:
        raise ConfigError(f"requests = {count}: expected at least 1", param="requests")
    return _WORKLOADS[name](count, np.random.default_rng(seed))


def poisson(count: int, rng: np.random.Generator) -> Trace:
    """Independent arrivals of four tenants; half of the prompts begin with one of 32 preambles, some of them often."""
    return _chats("poisson", np.cumsum(rng.exponential(1.0, count)), _lengths(rng, count, 192, 0.7), rng)


def bursts(count: int, rng: np.random.Generator) -> Trace:
    """The same, arriving in bursts: gaps vary four times as much as a Poisson process's."""
    return _chats("bursts", np.cumsum(rng.gamma(1 / 16, 16.0, count)), _lengths(rng, count, 192, 0.7), rng)


def heavy(count: int, rng: np.random.Generator) -> Trace:
    """Lengths with a heavy tail (Pareto, index 1.2), so that a few requests take most of the time."""
    prompts = np.minimum(48 * (1 + rng.pareto(1.2, count)), 6144).astype(np.int64)
    outputs = np.minimum(16 * (1 + rng.pareto(1.2, count)), 1536).astype(np.int64)
    return _chats("heavy", np.cumsum(rng.exponential(1.0, count)), prompts, rng, outputs)


def storm(count: int, rng: np.random.Generator) -> Trace:
    """Fan-outs of the first tenant, one after the other: a context, 50 agents that are forked off it at once, each with 100
    branches; beside them a thin stream of the second tenant's interactive requests."""
    per_storm = 1 + STORM_AGENTS * (1 + STORM_BRANCHES)
    num_storms = max(round(count / (per_storm * 1.05)), 1) if count > per_storm else 1
    parents, prompts, outputs, arrivals = [], [], [], []
    at = 0
    left = count
    for i in range(num_storms):
        size = min(per_storm, left)
        agents = 1 + np.arange(min(STORM_AGENTS, size - 1))
        branches = size - 1 - len(agents)
        parent = np.concatenate(([NO_PARENT], np.zeros(len(agents), np.int64), 1 + np.arange(branches) // STORM_BRANCHES))
        parents.append(np.where(parent == NO_PARENT, NO_PARENT, parent + at))
        prompts.append(np.concatenate(([2048], np.full(len(agents), 96), rng.integers(8, 48, branches))))
        outputs.append(np.concatenate((np.zeros(1 + len(agents), np.int64), _lengths(rng, branches, 32, 0.5))))
        arrivals.append(np.full(size, i * per_storm * 1.05))
        at += size
        left -= size
    others = max(left, 0)
    interactive = np.sort(rng.uniform(0, num_storms * per_storm * 1.05, others))
    every = np.concatenate([*outputs, _lengths(rng, others, 32, 0.5)])
    return make_trace(
        "storm",
        arrival_s=np.concatenate([*arrivals, interactive]),
        prompt_tokens=np.concatenate([*prompts, _lengths(rng, others, 64, 0.5)]),
        output_tokens=every,
        max_tokens=_MAX_TOKENS_FACTOR * every,
        tenant=np.concatenate((np.zeros(at, np.int64), np.ones(others, np.int64))),
        tenants=TENANTS[:2],
        service=np.concatenate((np.ones(at, np.int64), np.zeros(others, np.int64))),
        services=SERVICES,
        parent=np.concatenate([*parents, np.full(others, NO_PARENT)]),
    )


def mixed(count: int, rng: np.random.Generator) -> Trace:
    """Interactive chats, standard requests in bursts and long batch jobs of three tenants, and fan-outs of a fourth: a
    context of 512 tokens, of which 40 branches are forked."""
    branches = 40
    fans = max(count // (4 * (branches + 1)), 1)
    in_fans = min(fans * (branches + 1), count)
    sizes = [(count - in_fans + i) // 3 for i in (2, 1, 0)]
    chat, burst, batch = sizes
    arrivals: list[Floats] = [
        np.sort(rng.uniform(0, count, chat)),
        _spread(np.cumsum(rng.gamma(1 / 16, 16.0, burst)), count),
        np.sort(rng.uniform(0, count, batch)),
        np.repeat(np.sort(rng.uniform(0, count, fans)), branches + 1)[:in_fans],
    ]
    within = np.arange(in_fans) % (branches + 1)
    is_context = within == 0
    outputs = np.concatenate(
        (
            _lengths(rng, chat, 32, 0.6),
            _lengths(rng, burst, 48, 0.6),
            _lengths(rng, batch, 128, 0.8),
            np.where(is_context, 0, _lengths(rng, in_fans, 32, 0.5)),
        )
    )
    first_fan = count - in_fans
    own_place = first_fan + np.arange(in_fans)
    return make_trace(
        "mixed",
        arrival_s=np.concatenate(arrivals),
        prompt_tokens=np.concatenate(
            (
                _lengths(rng, chat, 96, 0.6),
                _lengths(rng, burst, 128, 0.6),
                _lengths(rng, batch, 384, 0.8),
                np.where(is_context, 512, rng.integers(8, 48, in_fans)),
            )
        ),
        output_tokens=outputs,
        max_tokens=_MAX_TOKENS_FACTOR * outputs,
        tenant=np.repeat(np.arange(4), (chat, burst, batch, in_fans)),
        tenants=("chat", "api", "jobs", "agents"),
        service=np.repeat((0, 1, 2, 1), (chat, burst, batch, in_fans)),
        services=SERVICES,
        parent=np.concatenate((np.full(first_fan, NO_PARENT), np.where(is_context, NO_PARENT, own_place - within))),
    )


_WORKLOADS: dict[str, Callable[[int, np.random.Generator], Trace]] = {
    make.__name__: make for make in (poisson, bursts, heavy, storm, mixed)
}


def _chats(name: str, arrivals: Floats, prompts: Ints, rng: np.random.Generator, outputs: Ints | None = None) -> Trace:
    count = len(arrivals)
    outputs = _lengths(rng, count, 48, 0.7) if outputs is None else outputs
    popular = 1 / np.arange(1, _NUM_PREAMBLES + 1)
    preamble = rng.choice(_NUM_PREAMBLES, count, p=popular / popular.sum())
    has_preamble = rng.random(count) < 0.5
    none = np.empty(0, np.int64)
    return make_trace(
        name,
        arrival_s=arrivals,
        prompt_tokens=prompts + np.where(has_preamble, _PREAMBLE_BLOCKS * PAGE_TOKENS, 0),
        output_tokens=outputs,
        max_tokens=_MAX_TOKENS_FACTOR * outputs,
        tenant=rng.integers(0, len(TENANTS), count),
        tenants=TENANTS,
        service=rng.choice(len(SERVICES), count, p=(0.3, 0.5, 0.2)),
        services=SERVICES,
        block_tokens=PAGE_TOKENS,
        blocks=[
            which * _PREAMBLE_BLOCKS + np.arange(_PREAMBLE_BLOCKS) if has else none
            for which, has in zip(preamble.tolist(), has_preamble.tolist(), strict=True)
        ],
    )


def _lengths(rng: np.random.Generator, count: int, median: int, sigma: float) -> Ints:
    """Log-normal, at most 16 times the median."""
    return np.clip(np.rint(rng.lognormal(np.log(median), sigma, count)), 1, 16 * median).astype(np.int64)


def _spread(arrivals: Floats, span: float) -> Floats:
    return arrivals * (span / arrivals[-1]) if len(arrivals) else arrivals
