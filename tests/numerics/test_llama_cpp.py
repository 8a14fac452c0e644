"""The native engine against llama.cpp on the same file: both round inputs of quantised matrices to 8 bits, each its own way."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.numerics.rows import Rows
from tests.numerics.test_native import STARTS, native

from branchline.engine.model.resolve import resolve_model
from branchline.engine.model.tokenizer import load_tokenizer

LICENSE = Path(__file__).parents[2] / "LICENSE"
NUM_TOKENS = 2000
MAX_PERPLEXITY_DIFFERENCE = 0.005
# llama.cpp's two best logits are closer than this: its rounding may decide otherwise than ours.
TIE = 1.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama.cpp isn't installed: make bench-peers"),
]
Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def llama_cpp(smollm2: str) -> Iterator[Callable[[list[int]], Logits]]:
    """Logits at every position of a sequence: [T, vocab]."""
    module: Any = importlib.import_module("llama_cpp")
    path = str(resolve_model(smollm2).path)
    llama = module.Llama(path, n_ctx=NUM_TOKENS + 64, n_batch=512, logits_all=True, verbose=False)

    def logits(tokens: list[int]) -> Logits:
        llama.reset()
        llama.eval(tokens)
        return np.array(llama.scores[: len(tokens)], np.float32)

    yield logits
    llama.close()


@pytest.fixture(scope="module")
def encode(smollm2: str) -> Callable[[str], list[int]]:
    files = resolve_model(smollm2)
    tokenizer = load_tokenizer(files.kind, files.path)
    return lambda text: tokenizer.encode(text, add_bos=False)


@pytest.fixture(scope="module")
def ours(smollm2: str) -> Rows:
    return Rows.native(native(smollm2, threads=2))


def perplexity(logits: Logits, tokens: list[int]) -> float:
    """exp of the mean negative log-likelihood of tokens 1 … n - 1, each given those before it."""
    scores = logits[:-1].astype(np.float64)
    largest = scores.max(axis=-1, keepdims=True)
    log_sum = largest[:, 0] + np.log(np.exp(scores - largest).sum(axis=-1))
    return float(np.exp((log_sum - scores[np.arange(len(scores)), tokens[1:]]).mean()))


def test_a_text_is_as_likely(ours: Rows, llama_cpp: Callable[[list[int]], Logits], encode: Callable[[str], list[int]]) -> None:
    tokens = encode(LICENSE.read_text())[:NUM_TOKENS]
    theirs = perplexity(llama_cpp(tokens), tokens)
    assert perplexity(ours.logits(tokens).numpy(), tokens) == pytest.approx(theirs, rel=MAX_PERPLEXITY_DIFFERENCE)


def test_the_likeliest_token_is_the_same_where_it_is_clear(
    ours: Rows, llama_cpp: Callable[[list[int]], Logits], encode: Callable[[str], list[int]]
) -> None:
    """At each of the 128 positions of our own greedy continuation of twenty prompts."""
    clear = 0
    for start in STARTS:
        tokens = encode(start)
        first = len(tokens) - 1
        (continuation,) = ours.greedy([tokens], 128)
        tokens = [*tokens, *continuation]
        theirs, mine = llama_cpp(tokens)[first:-1], ours.logits(tokens).numpy()[first:-1]
        best = np.sort(theirs, axis=-1)[:, -2:]
        leads = best[:, 1] - best[:, 0] > TIE
        assert (theirs.argmax(axis=-1) == mine.argmax(axis=-1))[leads].all(), start
        clear += int(leads.sum())
    assert clear > len(STARTS) * 128 // 2
