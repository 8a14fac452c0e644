"""What only the whole engine shows: the share of its time outside the native call, and the time to the first tokens."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

from branchline.engine.config import DEFAULT_MODEL, EngineConfig
from branchline.engine.engine import Engine
from branchline.engine.model.native import NativeRunner
from branchline.engine.types import Context, Delta, Event, Failed, Fork, Generate, Release, SamplingParams, TokenIds
from branchline.load.measure import BenchmarkError
from branchline.load.peers.base import PREFIX_SEED, tokens

STEPS = 24
SKIPPED = 4  # first steps of a generation that aren't counted
PATIENCE_S = 300


class _Arrivals:
    """When each step's tokens came: one call of the sink a step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.times: list[float] = []
        self._count = 0
        self._failed: Failed | None = None

    def __call__(self, events: Sequence[Event]) -> None:
        count = sum(len(event.tokens) for event in events if isinstance(event, Delta))
        with self._changed:
            self._failed = self._failed or next((event for event in events if isinstance(event, Failed)), None)
            if count:
                self._count += count
                self.times += [time.perf_counter()] * count
            self._changed.notify_all()

    def wait(self, count: int) -> list[float]:
        """The times of the first `count` tokens. Raises BenchmarkError."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._failed is not None or self._count >= count, PATIENCE_S)
            if self._failed is not None or not came:
                raise BenchmarkError(f"{self._count} of {count} tokens came: {self._failed or 'no more within 300 s'}")
            return self.times[:count]

    def forget(self) -> None:
        """Start to count anew."""
        with self._changed:
            self.times, self._count = [], 0


class _Timed:
    """Adds up the seconds in `NativeRunner.run`."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def install(self) -> None:
        run = NativeRunner.run

        def timed(runner: NativeRunner, *args: Any) -> Any:
            began = time.perf_counter()
            logits = run(runner, *args)
            self.spent_s += time.perf_counter() - began
            return logits

        setattr(NativeRunner, "run", timed)  # noqa: B010  (this process measures and ends)


class Peer:
    """The product's engine with its defaults, but as many threads as asked for and room for the branches."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._native = _Timed()
        self._native.install()

    def close(self) -> None:
        """Nothing is left open between calls."""

    def outside(self, prefix: int, branches: int) -> dict[str, float]:
        """Share of the step loop's busy time (plan, compute, sample, publish) outside the native call, in greedy decode."""
        arrivals = _Arrivals()
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=STEPS)
        with self._engine(prefix, branches) as engine:
            session = engine.open_session(arrivals)
            engine.submit(session, [Context(0, TokenIds(tuple(tokens(prefix, PREFIX_SEED).tolist())))])
            ids = range(1, branches + 1)
            engine.submit(session, [Fork(0, 1, branches), *(Generate(i, i, params) for i in ids)])
            arrivals.wait(SKIPPED * branches)
            before, native_s = engine.stats(), self._native.spent_s
            arrivals.wait((STEPS - SKIPPED) * branches)
            after, native_s = engine.stats(), self._native.spent_s - native_s
        busy_s = sum(getattr(after, name) - getattr(before, name) for name in ("tensor_s", "plan_s", "python_s"))
        return {"share": 1 - native_s / busy_s, "busy_s": busy_s, "native_s": native_s}

    def first_token(self, prefix: int, branches: int, repetitions: int = 5) -> dict[str, float]:
        """From the submission of a fork with its generations until each branch has its first token, against a later step."""
        arrivals = _Arrivals()
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=STEPS // 2)
        first, steps = [], []
        with self._engine(prefix, branches) as engine:
            session = engine.open_session(arrivals)
            engine.submit(session, [Context(0, TokenIds(tuple(tokens(prefix, PREFIX_SEED).tolist()))), Generate(0, 0, params)])
            arrivals.wait(STEPS // 2)
            for repetition in range(repetitions):
                arrivals.forget()
                ids = range(1 + repetition * branches, 1 + (repetition + 1) * branches)
                began = time.perf_counter()
                engine.submit(session, [Fork(0, ids[0], branches), *(Generate(i, i, params) for i in ids)])
                times = arrivals.wait(STEPS // 2 * branches)
                each = [times[(i + 1) * branches - 1] for i in range(STEPS // 2)]
                first.append(each[0] - began)
                steps += [after - before for before, after in itertools.pairwise(each[1:])]
                engine.submit(session, [Release(tuple(ids))])
        first_s, step_s = statistics.median(first), statistics.median(steps)
        return {"first_token_ms": first_s * 1e3, "step_ms": step_s * 1e3, "ratio": first_s / step_s}

    def _engine(self, prefix: int, branches: int) -> Engine:
        room = prefix + (branches + 2) * (STEPS + 2 * 16) + 1024
        return Engine.load(
            EngineConfig(model=DEFAULT_MODEL, compute="native", threads=self._threads, max_batch=branches + 1, pool_tokens=room)
        )
