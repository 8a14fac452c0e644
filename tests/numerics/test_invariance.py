"""A token's logits are functions of the tokens before it, bit for bit: not of who else is in the batch, how the work was cut
into steps, where the branch was forked, or how many threads there are. Preemption that computes K/V again relies on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from tests.numerics import tiny_hf
from tests.numerics.rows import PAGE_TOKENS, Rows
from tests.numerics.tiny_gguf import write_gguf

from branchline.engine import _kernels
from branchline.engine._core import BranchTree
from branchline.engine.config import EngineConfig
from branchline.engine.model.native import load_native
from branchline.engine.model.runner import find_model

LENGTH = 600  # more than one split of 512 tokens
CHUNKS = (1, 7, 16, 64, 256)
TYPES = [("int8", "bfloat16"), ("int8", "float32"), ("int8", "int8"), ("float32", "bfloat16"), ("float32", "float32")]
Open = Callable[[int], Rows]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reference = tiny_hf.make("llama-gqa3", hidden_size=192, max_position_embeddings=1024)
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", reference, GGMLQuantizationType.Q4_1)


@pytest.fixture(params=TYPES, ids="-".join)
def opened(request: pytest.FixtureRequest, path: Path) -> Open:
    """Rows of the tiny model on so many threads."""
    return opener(path, activations=request.param[0], kv_dtype=request.param[1])


def opener(model: str | Path, **settings: Any) -> Open:
    def of(threads: int) -> Rows:
        config = EngineConfig.from_dict({"model": str(model), "compute": "native", "threads": threads, **settings})
        rows = Rows.native(load_native(config, *find_model(config)), num_pages=1024)
        rows.tree = BranchTree(1024, page_tokens=PAGE_TOKENS, max_batch=64, max_step_tokens=2048, max_levels=8)
        return rows

    return of


def sequence(length: int = LENGTH, vocab_size: int = tiny_hf.VOCAB_SIZE, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, vocab_size, length)]


def decode(rows: Rows, branches: Sequence[int], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
    """[steps, branches, vocab]: the logits of branches that decode given tokens, all in one batch."""
    for slot, (branch, own) in enumerate(zip(branches, tokens, strict=True)):
        rows.tree.join(branch, slot, own[0])
    found = []
    for step in range(len(tokens[0])):
        for slot, own in enumerate(tokens):
            rows.tree.next_tokens[slot] = own[step]
        logits = rows.step()
        found.append(logits[np.argsort(rows.slots)].clone())
    for branch in branches:
        rows.tree.leave(branch)
    return torch.stack(found)


def prefilled(rows: Rows, tokens: Sequence[int]) -> int:
    """A root that holds `tokens`."""
    branch: int = rows.tree.root()
    rows.tree.prefill(branch, 0, np.array(tokens, np.int32))
    rows.step()
    return branch


@pytest.mark.parametrize("threads", [1, 2])
def test_a_prompt_in_chunks_of_any_size(opened: Open, threads: int) -> None:
    tokens = sequence()
    expected = opened(1).logits(tokens)
    assert torch.isfinite(expected).all()
    rows = opened(threads)
    for chunk in CHUNKS:
        assert torch.equal(rows.logits(tokens, chunk=chunk), expected), f"chunks of {chunk}"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_decode_alone_and_in_a_batch(opened: Open, batch: int, threads: int) -> None:
    """Neighbours of other lengths, of which some fork off the same prefix."""
    tokens = sequence()
    expected = opened(1).logits(tokens)
    rows = opened(threads)
    start, count = 505, 12  # across the end of a split and of a page
    root = prefilled(rows, tokens[:start])
    others = [rows.tree.fork(root) if i % 2 else prefilled(rows, sequence(3 + i % 40, seed=i)) for i in range(1, batch)]
    own = [tokens[start : start + count], *(sequence(count, seed=100 + i) for i in range(1, batch))]
    assert torch.equal(decode(rows, [root, *others], own)[:, 0], expected[start : start + count])


@pytest.mark.parametrize("cuts", [[16], [5, 37, 130, 140], [512], [511, 513], [1, 2, 3, 4, 300], list(range(20, 280, 20))])
def test_forks_and_fresh_sequences(opened: Open, cuts: list[int]) -> None:
    """Cut into segments anywhere, deeper than the attention has levels too (then a page is copied)."""
    tokens = sequence()
    expected = opened(1).logits(tokens)
    rows = opened(2)
    branch, beside = rows.tree.root(), 0
    for begin, end in zip([0, *cuts], [*cuts, LENGTH - 2], strict=True):
        count = end - begin
        rows.tree.prefill(branch, 0, np.array(tokens[begin:end], np.int32))
        logits = rows.step(range(count + beside))
        own = logits[:count] if rows.slots[0] == 0 else logits[beside:]
        assert torch.equal(own, expected[begin:end]), f"tokens {begin} to {end}"
        sibling, branch = rows.tree.fork(branch), rows.tree.fork(branch)
        beside = 9
        rows.tree.prefill(sibling, 1, np.array(sequence(beside, seed=end), np.int32))
    rows.step()
    assert torch.equal(decode(rows, [branch], [tokens[-2:]])[:, 0], expected[-2:])


def test_what_a_preempted_branch_computes_again(opened: Open) -> None:
    """K/V from decode steps in a batch, against K/V of the same tokens from one prefill: the tokens after them say the same."""
    prompt, tokens = sequence(40), sequence(120, seed=1)
    rows = opened(2)
    root = prefilled(rows, prompt)
    branches = [int(branch) for branch in rows.tree.fork_many(root, 3)]
    going = decode(rows, branches, [tokens, sequence(120, seed=2), sequence(120, seed=3)])[:, 0]
    again = prefilled(rows, prompt + tokens[:100])
    assert torch.equal(decode(rows, [again], [tokens[100:]])[:, 0], going[100:])


@pytest.mark.parametrize("isa", _kernels.available_isas())
def test_every_instruction_set(path: Path, monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv("BRANCHLINE_ISA", isa)
    tokens = sequence(150)
    rows = opener(path)(1)
    expected = rows.logits(tokens)
    for chunk in (1, 7, 64):
        assert torch.equal(rows.logits(tokens, chunk=chunk), expected)


def test_the_default_model(smollm2: str) -> None:
    tokens = sequence(160, vocab_size=40_000)
    expected = opener(smollm2)(1).logits(tokens)
    rows = opener(smollm2)(2)
    for chunk in (7, 64):
        assert torch.equal(rows.logits(tokens, chunk=chunk), expected)
    root = prefilled(rows, tokens[:100])
    children = [int(branch) for branch in rows.tree.fork_many(root, 33)]
    own = [tokens[100:110], *(sequence(10, vocab_size=40_000, seed=i) for i in range(1, 33))]
    assert torch.equal(decode(rows, children, own)[:, 0], expected[100:110])
