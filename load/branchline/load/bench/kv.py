"""`branchline bench kv`: what the page pool costs, called from Python."""

from __future__ import annotations

import statistics
from time import perf_counter_ns
from typing import Annotated, Any

import numpy as np
import typer

from branchline.engine._core import BranchTree, copy_bytes, copy_pages
from branchline.load.bench.fork import HEAD_DIM, KV_HEADS, LAYERS, PAGE_BYTES, PAGE_TOKENS, PREFIX_TOKENS, empty_call
from branchline.load.measure import median_ns, run_cases
from branchline.load.receipt import Line, emit, show

SEQUENCES = 10_000
SEQUENCE_PAGES = 16
POOL_PAGES = 262_144
COPY_PAGES = 256  # pages of the pool that the copies go round in: 92 MB, more than a cache holds


def pages() -> dict[str, Any]:
    """Take and give back 16 pages for each of 10,000 sequences: a call each, and all in one call."""
    tree = BranchTree(POOL_PAGES)
    lend, give_back = tree.lend, tree.give_back
    leases = [0] * SEQUENCES

    def lend_all(_: object) -> None:
        for i in range(SEQUENCES):
            leases[i] = lend(SEQUENCE_PAGES, 0)

    def give_all(_: object) -> None:
        for lease in leases:
            give_back(lease)

    one_lend, one_give, many_lend, many_give = [], [], [], []
    for _ in range(60):
        one_lend.append(median_ns(lend_all, repetitions=1, warm_up=0))
        one_give.append(median_ns(give_all, repetitions=1, warm_up=0))
        start = perf_counter_ns()
        many = tree.lend_many(SEQUENCES, SEQUENCE_PAGES, 0)
        middle = perf_counter_ns()
        tree.give_back_many(many)
        end = perf_counter_ns()
        many_lend.append(middle - start)
        many_give.append(end - middle)
    num_pages = SEQUENCES * SEQUENCE_PAGES
    return {
        "alloc_call_ns_per_seq": statistics.median(one_lend) / SEQUENCES,
        "alloc_batch_ns_per_page": statistics.median(many_lend) / num_pages,
        "free_call_ns_per_seq": statistics.median(one_give) / SEQUENCES,
        "free_batch_ns_per_page": statistics.median(many_give) / num_pages,
    }


def copy_on_write() -> dict[str, Any]:
    """A page of 352 KB whose tokens were written just now, copied to a page that no cache holds: by `copy_pages` as a step
    calls it, and the same bytes by plain and by non-temporal copies. Interleaved, so that noise meets all alike."""
    pool = np.zeros((COPY_PAGES, LAYERS, 2, KV_HEADS, PAGE_TOKENS, HEAD_DIM), np.uint16)
    flat = pool.reshape(COPY_PAGES, -1).view(np.uint8)
    filled = np.array([PAGE_TOKENS], np.int32)
    src, dst = np.zeros(1, np.int32), np.zeros(1, np.int32)
    times: dict[str, list[int]] = {"cow_us": [], "memcpy_us": [], "stream_copy_us": []}
    page = 0
    for i in range(1200):
        for name, taken in times.items():
            page = (page + 2) % COPY_PAGES
            flat[page] = i & 0xFF
            src[0], dst[0] = page, page + 1
            a, b = flat[page], flat[page + 1]
            start = perf_counter_ns()
            if name == "cow_us":
                copy_pages(pool, src, dst, filled)
            elif name == "memcpy_us":
                np.copyto(b, a)
            else:
                copy_bytes(b, a)
            taken.append(perf_counter_ns() - start)
            if not (b[0] == b[-1] == i & 0xFF):
                raise RuntimeError("the copy differs from its source")
    return {name: statistics.median(taken[50:]) / 1000 for name, taken in times.items()}


def prefix_index() -> dict[str, Any]:
    """Look for a prompt of 32,768 tokens in an index that holds it, and for one that leaves it at its last page."""
    tree = BranchTree(PREFIX_TOKENS // PAGE_TOKENS + 64, max_step_tokens=PREFIX_TOKENS)
    prompt = np.random.default_rng(0).integers(0, 32000, PREFIX_TOKENS).astype(np.int32)
    root = tree.root()
    tree.prefill(root, 0, prompt)
    tree.plan()
    tree.commit()
    tree.insert(root)
    made = [0]

    def clear() -> None:
        if made[0]:
            tree.release(made[0])

    def look_for(tokens: np.ndarray[Any, np.dtype[np.int32]]) -> float:
        def match(_: object) -> None:
            made[0] = tree.match(tokens)

        return median_ns(match, before=clear, repetitions=1000) / 1000

    hit = look_for(prompt)
    found = tree.length(made[0])
    late, early = prompt.copy(), prompt.copy()
    late[-1] += 1
    early[0] += 1
    results = {"match_hit_us": hit, "match_late_miss_us": look_for(late), "match_miss_us": look_for(early)}
    if found != PREFIX_TOKENS or tree.length(made[0]) != 0:
        raise RuntimeError(f"{found} tokens were found, expected {PREFIX_TOKENS}")
    return results


def run(
    json: Annotated[str | None, typer.Option(help="Write one JSON object to this file; - is standard output.")] = None,
) -> None:
    """What taking, giving back, copying and finding pages costs."""
    results = run_cases("branchline.load.bench.fork", [empty_call])
    results |= run_cases("branchline.load.bench.kv", [pages, copy_on_write, prefix_index])
    if json is None:
        vllm = "vLLM's BlockPool 2.3 µs a sequence"
        best = min(results["memcpy_us"], results["stream_copy_us"])
        show(
            f"Pages: {SEQUENCES:,} sequences of {SEQUENCE_PAGES}",
            [
                Line("an empty call", results["empty_call_ns"], "ns"),
                Line("allocate, a call a sequence", results["alloc_call_ns_per_seq"], "ns/seq", 119.1, 70, vllm),
                Line("allocate, one call", results["alloc_batch_ns_per_page"], "ns/page", 7.44, 0.4),
                Line("release, a call a sequence", results["free_call_ns_per_seq"], "ns/seq", 67.0, 50, "vLLM 4.7 µs"),
                Line("release, one call", results["free_batch_ns_per_page"], "ns/page", 4.19, 0.4),
                Line(f"copy a page of {PAGE_BYTES >> 10} KB", results["cow_us"], "µs", 13.30, 1.15 * best),
                Line("the same bytes, memcpy", results["memcpy_us"], "µs"),
                Line("the same bytes, non-temporal", results["stream_copy_us"], "µs"),
                Line("match 32,768 tokens, hit", results["match_hit_us"], "µs", None, 30, "SGLang 58–69 µs"),
                Line("match, miss at the last page", results["match_late_miss_us"], "µs", None, 30),
                Line("match, miss at the first page", results["match_miss_us"], "µs", None, 30),
            ],
        )
    emit("kv", results, json)


def main() -> None:
    typer.run(run)


if __name__ == "__main__":
    main()
