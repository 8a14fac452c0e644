"""Drives core, attention backend and runner as the step loop does, for tests that need logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from branchline.engine._core import BranchTree
from branchline.engine.attention.base import PagePool
from branchline.engine.attention.find import find_backend
from branchline.engine.attention.native import Backend as NativeAttention
from branchline.engine.model.native import NativeModel, NativeRunner
from branchline.engine.model.runner import LoadedModel, ModelRunner, Runner
from branchline.engine.step import step_of

PAGE_TOKENS = 16


class Rows:
    """Some branches of one model, all in the same batch."""

    def __init__(self, model: LoadedModel, backend: str, *, num_pages: int = 256, max_levels: int | None = None) -> None:
        """`max_levels`: None: as many as the backend takes."""
        spec = model.decoder.attention_spec(PAGE_TOKENS, model.dtype, model.device)
        pool = PagePool(spec, num_pages)
        pool.data.fill_(float("nan"))  # whoever reads what nobody wrote shows
        attention = find_backend(backend, model.device)(spec, pool)
        self._start(ModelRunner(model, attention), num_pages, max_levels or attention.max_levels)

    @classmethod
    def native(cls, model: NativeModel, *, num_pages: int = 256) -> Self:
        """The same over the native engine."""
        rows = cls.__new__(cls)
        spec = model.attention_spec(PAGE_TOKENS)
        pool = PagePool(spec, num_pages)
        pool.data.view(-1).view(torch.uint8).fill_(0xFF)  # not a number, in any dtype
        rows._start(
            NativeRunner(model, NativeAttention(spec, pool, threads=model.threads)), num_pages, NativeAttention.max_levels
        )
        return rows

    def _start(self, runner: Runner, num_pages: int, max_levels: int) -> None:
        self.runner = runner
        self.max_levels = max_levels
        self.tree = BranchTree(
            num_pages, page_tokens=PAGE_TOKENS, max_batch=64, max_step_tokens=1024, max_levels=self.max_levels
        )

    def step(self, wanted: Sequence[int] | None = None) -> torch.Tensor:
        """Plan, run and commit. `wanted`: packed tokens whose logits to return; None: those of every row's last token."""
        tree = self.tree
        num_tokens = tree.plan()
        step = step_of(tree, num_tokens)
        last = step.row_indptr[1:] - 1
        logits = self.runner.run(step, last if wanted is None else np.array(wanted, np.int64))
        self.slots = step.row_slots.tolist()
        tree.commit()
        return logits

    def logits(self, tokens: Sequence[int], *, chunk: int = 1024) -> torch.Tensor:
        """[tokens, vocab]: the logits after every token of a new branch, computed `chunk` tokens at a time."""
        branch = self.tree.root()
        parts = []
        for begin in range(0, len(tokens), chunk):
            piece = np.array(tokens[begin : begin + chunk], np.int32)
            self.tree.prefill(branch, 0, piece)
            parts.append(self.step(range(len(piece))).clone())
        self.tree.release(branch)
        return torch.cat(parts)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """The `count` likeliest next tokens of each prompt, all prompts in one batch."""
        branches = [self.tree.root() for _ in prompts]
        for slot, (branch, prompt) in enumerate(zip(branches, prompts, strict=True)):
            self.tree.prefill(branch, slot, np.array(prompt, np.int32))
        generated: list[list[int]] = [[] for _ in prompts]
        for index in range(count):
            likeliest = self.step().argmax(dim=-1).tolist()
            for slot, token in zip(self.slots, likeliest, strict=True):
                generated[slot].append(token)
                if index == 0:
                    self.tree.join(branches[slot], slot, token)
                else:
                    self.tree.next_tokens[slot] = token
        for branch in branches:
            self.tree.release(branch)
        return generated
