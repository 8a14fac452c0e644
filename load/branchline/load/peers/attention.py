"""Tree attention alone, against what the machine can do: its own matrix product and its own reading of memory."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any, Literal

import torch

from branchline.engine import _kernels
from branchline.engine._core import BranchTree
from branchline.engine.attention.base import AttentionSpec, PagePool
from branchline.engine.attention.native import Backend
from branchline.engine.step import step_of
from branchline.engine.threads import set_compute_threads
from branchline.load.peers.base import clock_for

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 30, 9, 3, 64, 16  # of the default model
KvDtype = Literal["float32", "bfloat16", "int8"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
SGEMM = 1024  # rows and columns of the square product that is taken for the machine's rate
REPETITIONS = 9


class Peer:
    """Branches on one prefix, as the default model has them: 9 heads on 3 K/V heads of 64, 30 layers."""

    def __init__(self, threads: int) -> None:
        set_compute_threads(threads)
        self._threads = threads
        self._pool = _kernels.ThreadPool(threads)
        self._clock = clock_for(threads)

    def attend(self, prefix: int, branches: int, kv_dtype: KvDtype) -> dict[str, Any]:
        """A decode step's attention in all layers, and in turn with it a product of the machine's and a look at as many bytes.

        Returns:
            step_ms; gflops, sgemm_gflops: 10⁹ operations a second (4 × queries × head_dim × tokens: two products);
            gb_s, read_gb_s: 10⁹ bytes of K/V, and of plain memory, a second; of_sgemm, of_read: the shares.
        """
        dtype = DTYPES[kv_dtype]
        spec = AttentionSpec(
            num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            page_tokens=PAGE, scale=HEAD_DIM**-0.5, dtype=dtype, device=torch.device("cpu"),
        )  # fmt: skip
        num_pages = prefix // PAGE + branches + 2
        pool = PagePool(spec, num_pages)
        generator = torch.Generator().manual_seed(0)
        kv = torch.randn((num_pages, LAYERS, 2, KV_HEADS, PAGE, HEAD_DIM), generator=generator)
        Backend(spec, pool).write_pages(torch.arange(num_pages), kv if dtype == torch.int8 else kv.to(dtype))
        tree = BranchTree(num_pages, page_tokens=PAGE, max_batch=branches, max_step_tokens=max(prefix, branches), max_levels=4)
        root = tree.root()
        tree.prefill(root, 0, torch.zeros(prefix, dtype=torch.int32).numpy())
        tree.plan()
        tree.commit()
        for slot, child in enumerate(tree.fork_many(root, branches)):
            tree.join(int(child), slot, 1)
        step = step_of(tree, tree.plan())
        attention = _kernels.TreeAttention(
            num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            page_tokens=PAGE, scale=spec.scale, kv_dtype=kv_dtype,
        )  # fmt: skip
        levels = [(level.qo_indptr, level.kv_indptr, level.kv_indices, level.last_page_len) for level in step.levels]
        pages = pool.data.view(-1).view(torch.uint8)
        q = torch.randn((branches, HEADS, HEAD_DIM), generator=generator)
        attended = torch.empty_like(q)
        k, v = (torch.randn((branches, KV_HEADS, HEAD_DIM), generator=generator) for _ in range(2))

        def attend() -> None:
            attention.plan(step.write_slots, step.row_indptr, levels, num_pages)
            for layer in range(LAYERS):
                attention.attend(layer, q, k, v, attended, pages, self._pool)

        left, right = (torch.randn((SGEMM, SGEMM), generator=generator) for _ in range(2))
        out = torch.empty((SGEMM, SGEMM))
        read_bytes = prefix // PAGE * PagePool.page_bytes(spec)
        plain = torch.ones(read_bytes // 4, dtype=torch.int32)
        step_s, sgemm_s, read_s = self._in_turn(attend, lambda: torch.mm(left, right, out=out), lambda: torch.max(plain))
        operations = 4 * branches * HEADS * HEAD_DIM * (prefix + 1) * LAYERS
        rates = {
            "gflops": operations / step_s / 1e9,
            "sgemm_gflops": 2 * SGEMM**3 / sgemm_s / 1e9,
            "gb_s": read_bytes / step_s / 1e9,
            "read_gb_s": read_bytes / read_s / 1e9,
        }
        return {
            "prefix": prefix, "branches": branches, "kv_dtype": kv_dtype, "threads": self._threads, "step_ms": step_s * 1e3,
            **rates, "of_sgemm": rates["gflops"] / rates["sgemm_gflops"], "of_read": rates["gb_s"] / rates["read_gb_s"],
        }  # fmt: skip

    def close(self) -> None:
        """Nothing to give back."""

    def _in_turn(self, *works: Callable[[], object]) -> list[float]:
        """Median seconds of each, after one turn to warm up."""
        times: list[list[float]] = [[] for _ in works]
        for turn, (mine, work) in itertools.product(range(REPETITIONS + 1), zip(times, works, strict=True)):
            began = self._clock()
            work()
            took = self._clock() - began
            if turn:
                mine.append(took)
        return [statistics.median(each) for each in times]
