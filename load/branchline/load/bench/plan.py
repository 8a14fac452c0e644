"""`branchline bench plan`: what it costs to build the arrays of a decode step, called from Python."""

from __future__ import annotations

import statistics
from time import perf_counter_ns
from typing import Annotated, Any

import numpy as np
import typer

from branchline.engine._core import BranchTree
from branchline.engine.config import SchedulingConfig
from branchline.engine.errors import BranchlineError
from branchline.engine.scheduler.scheduler import Scheduler
from branchline.engine.scheduler.strand import Strand
from branchline.engine.scheduler.work import Work
from branchline.load.bench.fork import PAGE_TOKENS, PREFIX_TOKENS, empty_call
from branchline.load.measure import run_cases
from branchline.load.receipt import Line, emit, show

STREAMS = (1, 9, 40, 96, 192, 500, 1000)
STEPS = 96  # in a row, so that every stream crosses into a new page six times
SEQUENCE_PAGES = 64
REFERENCE_US = {1: 1.01, 9: 2.02, 40: 5.20, 96: 9.66, 192: 17.68}
CASCADE_GOALS = dict(zip(STREAMS, (0.15, 0.2, 0.4, 0.7, 1.3, 3.5, 8.0), strict=True))
TABLE_GOALS = dict(zip(STREAMS, (0.15, 0.2, 0.3, 0.4, 0.7, 2.0, 5.0), strict=True))
FLAT_GOALS = {192: 3.5}


def _step_us(tree: BranchTree, branches: list[int], *, repetitions: int = 25) -> float:
    """Median over the repetitions of the mean time of STEPS steps in a row: plan and commit, all arrays of the step in place,
    after the sampler's tokens. The branches start anew for each repetition, at 1 to 16 tokens beyond their length."""
    plan, commit = tree.plan, tree.commit
    lengths = [tree.length(branch) for branch in branches]
    rng = np.random.default_rng(0)
    phases = rng.integers(1, PAGE_TOKENS + 1, len(branches))
    times = []
    for _ in range(repetitions):
        for slot, (branch, phase) in enumerate(zip(branches, phases.tolist(), strict=True)):
            tree.prefill(branch, slot, rng.integers(0, 1000, phase).astype(np.int32))
        plan()
        commit()
        for slot, branch in enumerate(branches):
            tree.join(branch, slot, slot)
        plan()
        commit()
        start = perf_counter_ns()
        for _ in range(STEPS):
            plan()
            commit()
        times.append((perf_counter_ns() - start) / STEPS / 1000)
        for branch, length in zip(branches, lengths, strict=True):
            tree.leave(branch)
            tree.truncate(branch, length)
    return statistics.median(times)


def _children(streams: int, **form: Any) -> tuple[BranchTree, list[int]]:
    """Branches on one prefix of PREFIX_TOKENS tokens."""
    pages = PREFIX_TOKENS // PAGE_TOKENS + streams * (STEPS // PAGE_TOKENS + 3)
    tree = BranchTree(pages, page_tokens=PAGE_TOKENS, max_batch=streams, max_step_tokens=PREFIX_TOKENS, **form)
    root = tree.root()
    tree.prefill(root, 0, np.arange(PREFIX_TOKENS, dtype=np.int32))
    tree.plan()
    tree.commit()
    return tree, [int(child) for child in tree.fork_many(root, streams)]


def cascade() -> dict[str, Any]:
    """Branches on one prefix: the prefix is a level of its own, each branch's own pages are the last."""
    return {"cascade_us": {str(n): _step_us(*_children(n)) for n in STREAMS}}


def table() -> dict[str, Any]:
    """The same branches, in a padded table that stays from step to step."""
    width = PREFIX_TOKENS // PAGE_TOKENS + STEPS // PAGE_TOKENS + 3
    return {"table_us": {str(n): _step_us(*_children(n, max_levels=1, table_width=width)) for n in STREAMS}}


def flat() -> dict[str, Any]:
    """Independent sequences of SEQUENCE_PAGES pages, as flat lists of pages."""
    results = {}
    for streams in STREAMS:
        tokens = SEQUENCE_PAGES * PAGE_TOKENS
        pages = streams * (SEQUENCE_PAGES + STEPS // PAGE_TOKENS + 3)
        tree = BranchTree(pages, page_tokens=PAGE_TOKENS, max_batch=streams, max_step_tokens=max(tokens, PREFIX_TOKENS))
        branches = []
        for _ in range(streams):
            branches.append(tree.root())
            tree.prefill(branches[-1], 0, np.zeros(tokens, np.int32))
            tree.plan()
            tree.commit()
        results[str(streams)] = _step_us(tree, branches)
    return {"flat_us": results}


class _Nobody:
    """Listens to the scheduler, and does nothing."""

    def admitted(self, work: Work) -> None: ...
    def yielded(self, work: Work, slot: int) -> None: ...
    def computed(self, work: Work) -> None: ...
    def dropped(self, work: Work, slot: int | None, err: BranchlineError) -> None: ...


def scheduled() -> dict[str, Any]:
    """The same branches in the scheduler's hands, with all that it can do switched on: admission, fair shares of four tenants,
    preemption, prefix cache, a target time between tokens. A step is `begin` and `end`, the plan and the commit included."""
    results = {}
    for streams in STREAMS:
        tree, branches = _children(streams)
        config = SchedulingConfig(policy="fair", itl_target_ms=50.0)
        scheduler = Scheduler(
            tree, config, _Nobody(), max_batch=streams, max_step_tokens=PREFIX_TOKENS, copy_page=lambda *_: None
        )
        for i, branch in enumerate(branches):
            tenant = scheduler.tenants.get(f"tenant {i % 4}")
            strand = Strand(node=branch, pending=np.array([i], np.int32), tenant=tenant.number)
            scheduler.add(Work(strand=strand, tenant=tenant, submitted=0.0, max_tokens=STEPS), 0.0)
        times = []
        tokens = np.zeros(streams, np.int32)
        for step in range(STEPS // 2):
            start = perf_counter_ns()
            plan = scheduler.begin(step * 0.01)
            assert plan is not None
            scheduler.end(plan, tokens, step * 0.01 + 0.009)
            times.append((perf_counter_ns() - start) / 1000)
        results[str(streams)] = statistics.median(times)
    return {"scheduled_us": results}


def run(
    json: Annotated[str | None, typer.Option(help="Write one JSON object to this file; - is standard output.")] = None,
) -> None:
    """What it costs to plan a decode step, token ids and write slots included."""
    results = run_cases("branchline.load.bench.fork", [empty_call])
    results |= run_cases("branchline.load.bench.plan", [cascade, table, flat, scheduled])
    if json is None:
        for key, title, goals in (
            ("cascade_us", f"Plan a step: branches on one prefix of {PREFIX_TOKENS:,} tokens, cascade levels", CASCADE_GOALS),
            ("table_us", "The same, padded table", TABLE_GOALS),
            ("flat_us", f"Plan a step: independent sequences of {SEQUENCE_PAGES} pages, flat lists", FLAT_GOALS),
            ("scheduled_us", "A step of the scheduler, its Python and the cascade plan and commit included", {}),
        ):
            show(title, [Line(f"{n} streams", results[key][str(n)], "µs", REFERENCE_US.get(n), goals.get(n)) for n in STREAMS])
    emit("plan", results, json)


def main() -> None:
    typer.run(run)


if __name__ == "__main__":
    main()
