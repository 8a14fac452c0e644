"""Calls everything that the core's module has with arguments drawn at random, right and wrong. Nothing but an exception of the
known classes may come of it. `python -m tests.properties.fuzz_bindings --calls 1000000` for long runs."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import numpy as np

from branchline.engine import _core

EXPECTED = (_core.CoreError, ValueError, TypeError, MemoryError, BufferError)
PROPERTIES = [
    "next_tokens", "num_tokens", "num_rows", "num_levels", "num_copies", "token_ids", "positions", "write_slots", "row_indptr",
    "row_slots", "copy_src", "copy_dst", "copy_tokens", "num_free_pages", "num_pages", "num_branches", "num_segments",
    "page_tokens", "num_used_pages", "num_cached_pages", "counters", "table", "table_lengths",
]  # fmt: skip
METHODS = [
    "root", "fork", "fork_many", "release", "release_many", "truncate", "length", "shared_length", "tokens", "pages",
    "describe", "pages_needed", "join", "leave", "prefill", "plan", "commit", "rollback", "level", "lend", "lend_many",
    "give_back", "give_back_many", "leased_pages", "tenant_pages", "tenant_cached_pages", "take_used", "match", "peek", "graft",
    "extend", "insert", "evict", "private_part", "check", "nop",
]  # fmt: skip


class Arguments:
    """Values of all kinds: live handles, stale ones, those of other trees; numbers at the edges; arrays of any dtype."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.handles: list[int] = []

    def number(self) -> int:
        small, edge = int(self.rng.integers(-2, 20)), int(self.rng.integers(0, 66))
        pick = self.rng.integers(0, 4)
        if pick < 2:
            return small
        if pick == 2 and self.handles:
            return self.handles[int(self.rng.integers(0, len(self.handles)))]
        return int((1 << edge) + small) * int(self.rng.choice([-1, 1]))

    def array(self) -> np.ndarray[Any, Any]:
        dtype = self.rng.choice(["int32", "uint64", "int64", "float32", "uint8", "bool"])
        size = int(self.rng.integers(0, 30))
        with np.errstate(all="ignore"):
            array = self.rng.integers(0, 40, size).astype(dtype)
        if dtype == "uint64" and self.handles:
            array[:] = self.rng.choice(np.array(self.handles, np.uint64), size)
        shape = self.rng.integers(0, 5)
        if shape == 0:
            return array[::2]
        if shape == 1:
            return array.reshape(1, -1)
        return array

    def any(self) -> Any:
        pick = self.rng.integers(0, 10)
        if pick < 5:
            return self.number()
        if pick < 8:
            return self.array()
        return [None, "text", 1.5, float("nan"), b"bytes", [1, 2], {}, object(), True, np.int64(3), np.uint64(2**63)][
            int(self.rng.integers(0, 11))
        ]


def _sensible(tree: _core.BranchTree, arguments: Arguments) -> Any:
    rng = arguments.rng
    pick, slot = int(rng.integers(0, 10)), int(rng.integers(0, 6))
    if pick == 0:
        return tree.root()
    if pick == 1:
        return tree.fork(arguments.number())
    if pick == 2:
        return tree.join(arguments.number(), slot, 1)
    if pick == 3:
        return tree.prefill(arguments.number(), slot, np.arange(5, dtype=np.int32))
    if pick == 4:
        return tree.plan()
    if pick == 5:
        return tree.commit()
    tokens = np.arange(rng.integers(0, 30), dtype=np.int32)
    if pick == 6:
        return tree.match(tokens, int(rng.integers(0, 3)))
    if pick == 7:
        return tree.insert(arguments.number())
    return (tree.graft if pick == 8 else tree.extend)(arguments.number(), tokens)


def fuzz(seed: int, calls: int) -> Counter[str]:
    """Returns how often each outcome was met."""
    rng = np.random.default_rng(seed)
    arguments = Arguments(rng)
    outcomes: Counter[str] = Counter()
    pool = np.zeros((4, 2, 2, 1, 4, 2), np.float32)
    tree = _core.BranchTree(8)
    for i in range(calls):
        if i % 2000 == 0:
            levels = int(rng.integers(1, 4))
            tree = _core.BranchTree(
                int(rng.integers(1, 60)), page_tokens=int(rng.integers(1, 8)), max_branches=30, max_batch=6, max_step_tokens=40,
                max_levels=levels, table_width=8 if levels == 1 and rng.random() < 0.5 else 0, zero_used=rng.random() < 0.3,
            )  # fmt: skip
            arguments.handles = arguments.handles[-5:]
        kind = rng.integers(0, 20)
        try:
            result: Any = None
            if kind == 0:
                result = getattr(tree, PROPERTIES[int(rng.integers(0, len(PROPERTIES)))])
                if isinstance(result, np.ndarray) and rng.random() < 0.3:
                    result[...] = arguments.number() % (2**31)
            elif kind == 1:
                pages = arguments.any() if rng.random() < 0.5 else 5
                if not (isinstance(pages, int) and 100_000 < pages < 2**31):  # that would really be allocated
                    _core.BranchTree(pages, page_tokens=arguments.any(), max_batch=4)
            elif kind == 2:
                _core.copy_pages(pool if rng.random() < 0.7 else arguments.any(), *(arguments.any() for _ in range(3)))
            elif kind == 3:
                three = (rng.integers(-1, 5, 2).astype(np.int32) for _ in range(3))
                _core.copy_pages(pool, *three)
            elif kind < 8:  # a call that mostly makes sense, so that there is something to break
                result = _sensible(tree, arguments)
            else:
                method = getattr(tree, METHODS[int(rng.integers(0, len(METHODS)))])
                result = method(*(arguments.any() for _ in range(int(rng.integers(0, 4)))))
            outcomes["returned"] += 1
            if isinstance(result, int):
                arguments.handles.append(result)
            elif isinstance(result, np.ndarray) and result.dtype == np.uint64:
                arguments.handles += result.tolist()
            arguments.handles = arguments.handles[-40:]
        except EXPECTED as err:
            outcomes[type(err).__name__] += 1
        if i % 500 == 0:
            tree.check()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"seed {options.seed}: {dict(fuzz(options.seed, options.calls))}")


if __name__ == "__main__":
    main()
