"""Branchline's native engine as a contestant: the branch tree's plan, one native call, the likeliest tokens, commit."""

from __future__ import annotations

from typing import Any

from branchline.engine._core import BranchTree
from branchline.engine.attention.base import PagePool
from branchline.engine.attention.native import Backend
from branchline.engine.config import DEFAULT_MODEL, EngineConfig
from branchline.engine.model.native import NativeModel, NativeRunner, open_model
from branchline.engine.step import step_of
from branchline.engine.threads import set_compute_threads
from branchline.load.measure import BenchmarkError
from branchline.load.peers.base import CHUNK, GROUP_SEED, PREFIX_SEED, TAIL_SEED, Case, Contestant, Tokens, clock_for, tokens


class Peer(Contestant):
    """Settings are the product's defaults."""

    def __init__(self, threads: int, num_tokens: int, branches: int) -> None:
        """`num_tokens`, `branches`: of the largest case."""
        set_compute_threads(threads)  # torch's, which look for the likeliest tokens
        config = EngineConfig(model=DEFAULT_MODEL, compute="native", threads=threads)
        model = open_model(config)
        if not isinstance(model, NativeModel):
            raise BenchmarkError(f"{DEFAULT_MODEL} is not computed by the native engine, but by {type(model).__name__}")
        self._page_tokens = config.page_tokens
        self._num_pages = num_tokens // self._page_tokens + 2 * branches + 64
        spec = model.attention_spec(self._page_tokens)
        pool = PagePool(spec, self._num_pages)
        attention = Backend(spec, pool, threads=model.threads)
        self._max_levels, self._branches = attention.max_levels, branches
        self._runner = NativeRunner(model, attention)
        self._clock = clock_for(threads)
        self._children: list[int] = []

    def prefill(self, prefix: int) -> float:
        self._tree = BranchTree(
            self._num_pages,
            page_tokens=self._page_tokens,
            max_batch=self._branches,
            max_step_tokens=max(CHUNK, self._branches),
            max_levels=self._max_levels,
        )
        self._children = []
        self._root = self._tree.root()
        began = self._clock()
        self._compute(self._root, tokens(prefix, PREFIX_SEED))
        return self._clock() - began

    def branch(self, case: dict[str, Any]) -> dict[str, Any]:
        what, tree = Case(**case), self._tree
        for child in self._children:
            tree.release(child)
        self._children = []
        for _ in range(what.groups):
            group = tree.fork(self._root)
            if what.group_tail:
                self._compute(group, tokens(what.group_tail, GROUP_SEED))
            self._children += [int(child) for child in tree.fork_many(group, what.branches // what.groups)]
            tree.release(group)
        for child in self._children:
            if what.tail:
                self._compute(child, tokens(what.tail, TAIL_SEED))
        for slot, child in enumerate(self._children):
            tree.join(child, slot, 100 + slot)
        return {"pages": tree.num_pages - tree.num_free_pages, "tails": "computed for each branch"}

    def step(self) -> float:
        began = self._clock()
        self._step()
        return self._clock() - began

    def _step(self) -> None:
        tree = self._tree
        planned = step_of(tree, tree.plan())
        logits = self._runner.run(planned, planned.row_indptr[1:] - 1)
        tree.next_tokens[planned.row_slots] = logits.argmax(dim=-1).numpy()
        tree.commit()

    def _compute(self, branch: int, what: Tokens) -> None:
        for begin in range(0, len(what), CHUNK):
            self._tree.prefill(branch, 0, what[begin : begin + CHUNK])
            self._step()
