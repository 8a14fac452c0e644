"""`branchline bench fork`: what it costs to fork off a long prefix, called from Python."""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer

from branchline.engine._core import BranchTree
from branchline.load.measure import median_ns, run_cases
from branchline.load.receipt import Line, emit, show

PREFIX_TOKENS = 32768
PAGE_TOKENS = 16
BRANCHES = 500
LAYERS, KV_HEADS, HEAD_DIM = 22, 4, 64  # TinyLlama's shape
PAGE_BYTES = LAYERS * 2 * KV_HEADS * PAGE_TOKENS * HEAD_DIM * 2  # bfloat16
TABLE_2 = (1, 10, 50, 100, 500)


def _prefix(*, max_batch: int = BRANCHES) -> tuple[BranchTree, int]:
    """A tree with one branch of PREFIX_TOKENS tokens."""
    pages = PREFIX_TOKENS // PAGE_TOKENS + 2 * BRANCHES + 64
    tree = BranchTree(pages, page_tokens=PAGE_TOKENS, max_batch=max_batch, max_step_tokens=PREFIX_TOKENS)
    root = tree.root()
    tree.prefill(root, 0, np.arange(PREFIX_TOKENS, dtype=np.int32))
    tree.plan()
    tree.commit()
    tree.release(tree.fork(root))  # the first fork makes the prefix a segment
    return tree, root


def empty_call() -> dict[str, Any]:
    """A bound method of the same extension that does nothing; and a plain copy of one page's bytes."""
    nop = BranchTree(1).nop

    def loop(_: object) -> None:
        for _i in range(1000):
            nop()

    src, dst = np.ones(PAGE_BYTES, np.uint8), np.zeros(PAGE_BYTES, np.uint8)
    memcpy = median_ns(lambda _: np.copyto(dst, src), repetitions=500)
    return {"empty_call_ns": median_ns(loop, repetitions=300) / 1000, "memcpy_us": memcpy / 1000}


def fork_one() -> dict[str, Any]:
    """One call a fork, in a loop of 1,000, the loop's own cost included."""
    tree, root = _prefix()
    fork = tree.fork
    made: list[int] = [0] * 1000

    def loop(_: object) -> None:
        for i in range(1000):
            made[i] = fork(root)

    def clear() -> None:
        if made[0]:
            tree.release_many(np.array(made, np.uint64))

    return {"fork_one_ns": median_ns(loop, before=clear, repetitions=300) / 1000}


def fork_500() -> dict[str, Any]:
    """500 forks in one call, their release in one call."""
    tree, root = _prefix()
    return {
        "fork_500_total_us": _fork_us(tree, root, BRANCHES),
        "release_500_us": median_ns(tree.release_many, before=lambda: tree.fork_many(root, BRANCHES), repetitions=2000) / 1000,
    }


def fork_500_objects() -> dict[str, Any]:
    """500 forks as 500 calls and 500 Python integers."""
    tree, root = _prefix()
    fork = tree.fork
    made: list[list[int]] = []

    def clear() -> None:
        if made:
            tree.release_many(np.array(made.pop(), np.uint64))

    return {
        "fork_500_objects_us": median_ns(
            lambda _: made.append([fork(root) for _ in range(BRANCHES)]), before=clear, repetitions=500
        )
        / 1000
    }


def first_append() -> dict[str, Any]:
    """The first tokens of 500 children, in one step: time of its plan and commit a child; the pages that they took, and the
    K/V bytes that had to be copied for it."""
    tree, root = _prefix()
    made: list[Any] = []

    def fork() -> None:
        if made:
            tree.release_many(made.pop())
        made.append(tree.fork_many(root, BRANCHES))
        for slot, child in enumerate(made[0].tolist()):
            tree.join(child, slot, slot)

    def step(_: object) -> None:
        tree.plan()
        tree.commit()

    before, copies = tree.num_free_pages, tree.counters["copies"]
    took = median_ns(step, before=fork, repetitions=300)
    token_bytes = PAGE_BYTES // PAGE_TOKENS
    return {
        "first_append_ns": took / BRANCHES,
        "kv_bytes_copied": (tree.counters["copies"] - copies) * token_bytes,
        "pages_added": before - tree.num_free_pages,
    }


def first_step() -> dict[str, Any]:
    """One child beside 8 that decode already: its fork, its first append and the plan of the step, all of it."""
    tree, root = _prefix()
    for slot, child in enumerate(tree.fork_many(root, 8).tolist()):
        tree.join(child, slot, slot)
    made = [0]

    def clear() -> None:
        if made[0]:
            tree.release(made[0])
        tree.plan()
        tree.rollback()

    def step(_: object) -> None:
        made[0] = child = tree.fork(root)
        tree.join(child, 8, 1)
        tree.plan()

    def commit_and_clear() -> None:
        if made[0]:
            tree.rollback()
        clear()

    alone_tree, alone_root = _prefix()
    alone = [0]

    def alone_clear() -> None:
        if alone[0]:
            alone_tree.rollback()
            alone_tree.release(alone[0])

    def alone_step(_: object) -> None:
        alone[0] = child = alone_tree.fork(alone_root)
        alone_tree.join(child, 0, 1)
        alone_tree.plan()

    return {
        "first_step_ns": median_ns(alone_step, before=alone_clear, repetitions=2000),
        "first_step_beside_8_ns": median_ns(step, before=commit_and_clear, repetitions=2000),
    }


def table_2() -> dict[str, Any]:
    """The reference's Table 2 on a real pool: a prefix of 704 MB that is really there, its forks, and copies of it."""
    tree, root = _prefix()
    pages = tree.pages(root)
    words = PAGE_BYTES // 8
    pool = np.empty((len(pages), words), np.uint64)
    for i in range(len(pages)):  # every word says which page and word it is
        pool[i] = np.arange(words, dtype=np.uint64) + (i << 32)
    fits = max(1, min(BRANCHES, _available_bytes() // 4 // pool.nbytes))
    rows = []
    naive_s: dict[int, float] = {}
    for count in TABLE_2:
        copies = min(count, fits)
        if copies not in naive_s:
            naive_s[copies] = _naive_copy_s(pool, copies)
        fork_us = _fork_us(tree, root, count)
        gc.collect()
        before, free = _resident_bytes(), tree.num_free_pages
        children = tree.fork_many(root, count)
        for child in children.tolist():
            theirs = tree.pages(child)
            page = child * 2654435761 % len(theirs)
            if not (np.array_equal(theirs, pages) and (pool[theirs[page]] >> 32 == page).all()):
                raise RuntimeError(f"branch {child} reads other bytes than its parent")
        rows.append(
            {
                "branches": count,
                "fork_us": fork_us,
                "naive_copies": copies,
                "naive_copy_s": naive_s[copies],
                "pages_added": free - tree.num_free_pages,
                "resident_bytes_before": before,
                "resident_bytes_after": _resident_bytes(),
                "branches_verified": count,
            }
        )
        tree.release_many(children)
    return {"table_2": {"prefix_bytes": int(pool.nbytes), "prefix_pages": len(pages), "rows": rows}}


def _fork_us(tree: BranchTree, root: int, count: int) -> float:
    made: list[Any] = []

    def clear() -> None:
        if made:
            tree.release_many(made.pop())

    def fork(_: object) -> None:
        made.append(tree.fork_many(root, count))

    took = median_ns(fork, before=clear, repetitions=1000) / 1000
    clear()
    return took


def _naive_copy_s(pool: np.ndarray[Any, np.dtype[np.uint64]], copies: int) -> float:
    start = perf_counter()
    held = [pool.copy() for _ in range(copies)]
    took = perf_counter() - start
    if not all(int(copy[-1, -1]) == int(pool[-1, -1]) for copy in held):
        raise RuntimeError("a copy differs from its source")
    return took


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 << 30


def run(
    json: Annotated[str | None, typer.Option(help="Write one JSON object to this file; - is standard output.")] = None,
    real_pool: Annotated[bool, typer.Option(help="Also fork a prefix of 704 MB that is really there.")] = True,
) -> None:
    """What it costs to fork off 32,768 tokens, called from Python."""
    cases = [empty_call, fork_one, fork_500, fork_500_objects, first_append, first_step, *([table_2] if real_pool else [])]
    results: dict[str, Any] = {"prefix_tokens": PREFIX_TOKENS, "page_tokens": PAGE_TOKENS}
    results |= run_cases("branchline.load.bench.fork", cases)
    if json is None:
        show(
            f"Fork off {PREFIX_TOKENS:,} tokens ({PREFIX_TOKENS // PAGE_TOKENS:,} pages)",
            [
                Line("an empty call", results["empty_call_ns"], "ns"),
                Line("fork one branch", results["fork_one_ns"], "ns", 1580, 65, "vLLM 106 µs, SGLang 58–69 µs"),
                Line("fork 500, one call", results["fork_500_total_us"], "µs", 1200, 1, "vLLM 62 ms, SGLang 29–35 ms"),
                Line("fork 500, 500 calls", results["fork_500_objects_us"], "µs", 1200, 40),
                Line("release 500, one call", results["release_500_us"], "µs", None, 2, "vLLM 47 ms"),
                Line("first append, of 500 in a step", results["first_append_ns"], "ns", 13040, 70),
                Line("fork, append, plan, one branch", results["first_step_ns"], "ns", 13040, 500),
                Line("the same beside 8 that decode", results["first_step_beside_8_ns"], "ns", 13040),
                Line("K/V bytes copied", results["kv_bytes_copied"], "bytes"),
                Line("pages added by 500 branches", results["pages_added"], "pages"),
            ],
        )
        for row in results.get("table_2", {}).get("rows", ()):
            show(
                f"{row['branches']} branches off a real prefix of {results['table_2']['prefix_bytes'] >> 20} MB",
                [
                    Line("fork", row["fork_us"], "µs"),
                    Line(f"naive copy of {row['naive_copies']}", row["naive_copy_s"], "s"),
                    Line("pages added", row["pages_added"], "pages"),
                    Line("resident memory added", row["resident_bytes_after"] - row["resident_bytes_before"], "bytes"),
                    Line("branches that read the same bytes", row["branches_verified"], "branches"),
                ],
            )
    emit("fork", results, json)


def main() -> None:
    typer.run(run)


if __name__ == "__main__":
    main()
