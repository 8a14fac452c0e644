"""What the native engine's steps take: measured, and fitted to `StepTime`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from branchline.engine._core import BranchTree
from branchline.engine.attention.base import PagePool
from branchline.engine.attention.native import Backend
from branchline.engine.config import DEFAULT_MODEL, EngineConfig
from branchline.engine.model.native import NativeModel, NativeRunner, open_model
from branchline.engine.step import step_of
from branchline.load.measure import BenchmarkError
from branchline.load.simulate.step_time import StepTime, kv_tokens_read

PREFIXES, ROWS, CHUNKS = (64, 512, 1536), (0, 1, 8, 32, 64), (0, 32, 128)
_REPETITIONS = 3


@dataclass(frozen=True, slots=True)
class Calibration:
    """`largest_error`: of a step's fitted time, relative to what it took; `median_error` likewise."""

    step_time: StepTime
    num_steps: int
    median_error: float
    largest_error: float


def calibrate(model_name: str = DEFAULT_MODEL) -> Calibration:
    """Run steps of many shapes on the native engine, and fit: least squares of the relative error, no coefficient below 0.

    Raises BenchmarkError if the native engine can't compute the model.
    """
    config = EngineConfig(model=model_name, compute="native")
    model = open_model(config)
    if not isinstance(model, NativeModel):
        raise BenchmarkError(f"{model_name} is not computed by the native engine, but by {type(model).__name__}")
    shapes, seconds = _measure(model, config.page_tokens)
    coefficients = _fit(shapes / seconds[:, None], np.ones(len(seconds)))
    errors = np.abs(shapes @ coefficients / seconds - 1)
    base, row, token, read = coefficients.tolist()
    return Calibration(
        StepTime(base_s=base, per_row_s=row, per_token_s=token, per_read_s=read),
        len(seconds),
        float(np.median(errors)),
        float(errors.max()),
    )


def _measure(model: NativeModel, page_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """([S, 4] what multiplies the coefficients, [S] seconds): the best of the repetitions, since others disturb."""
    most = max(PREFIXES) + max(CHUNKS)
    num_pages = -(-most // page_tokens) + max(ROWS) * 4 + 64
    spec = model.attention_spec(page_tokens)
    attention = Backend(spec, PagePool(spec, num_pages), threads=model.threads)
    runner = NativeRunner(model, attention)
    shapes, seconds = [], []
    for prefix, rows, chunk in itertools.product(PREFIXES, ROWS, CHUNKS):
        if rows + chunk == 0:
            continue
        tree = BranchTree(
            num_pages,
            page_tokens=page_tokens,
            max_batch=max(ROWS) + 1,
            max_step_tokens=max(PREFIXES) + max(CHUNKS),
            max_levels=attention.max_levels,
        )
        root = tree.root()
        tree.prefill(root, 0, np.arange(prefix, dtype=np.int32))
        _step(tree, runner)
        for slot in range(rows):
            tree.join(tree.fork(root), slot, slot)
        best: tuple[float, int] | None = None
        for _ in range(_REPETITIONS):
            other = None
            if chunk:
                other = tree.fork(root)
                tree.prefill(other, max(ROWS), np.arange(chunk, dtype=np.int32))
            measured = _step(tree, runner)
            best = measured if best is None else min(best, measured)
            if other is not None:
                tree.release(other)
        assert best is not None
        shapes.append((1.0, rows, chunk, best[1]))
        seconds.append(best[0])
    return np.array(shapes), np.array(seconds)


def _step(tree: BranchTree, runner: NativeRunner) -> tuple[float, int]:
    """(seconds, K/V tokens read). Each row wants its last token's logits."""
    began = perf_counter()
    step = step_of(tree, tree.plan())
    reads = kv_tokens_read(tree)
    runner.run(step, step.row_indptr[1:] - 1)
    tree.commit()
    return perf_counter() - began, reads


def _fit(shapes: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Least squares over all sets of coefficients that may be above 0; the best without a negative one."""
    best, answer = np.inf, np.zeros(shapes.shape[1])
    for kept in itertools.product((False, True), repeat=shapes.shape[1]):
        chosen = np.flatnonzero(kept)
        solution = np.linalg.lstsq(shapes[:, chosen], targets, rcond=None)[0]
        error = float(((shapes[:, chosen] @ solution - targets) ** 2).sum())
        if (solution >= 0).all() and error < best:
            best, answer = error, np.zeros(shapes.shape[1])
            answer[chosen] = solution
    return answer
