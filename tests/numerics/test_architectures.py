"""Every architecture computes what transformers computes, on every backend of the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.numerics import tiny_hf
from tests.numerics.conftest import CPU_BACKENDS, Pair
from tests.numerics.rows import Rows

from branchline.engine.config import EngineConfig
from branchline.engine.model.runner import load_model

NUM_TOKENS = 64


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("variant", tiny_hf.VARIANTS)
def test_logits_equal_transformers(pair: Callable[[str], Pair], variant: str, backend: str) -> None:
    reference, model = pair(variant)
    rows = Rows(model, backend)
    for prompt in tiny_hf.prompts():
        torch.testing.assert_close(
            rows.logits(prompt), tiny_hf.reference_logits(reference, prompt).to(torch.float32), atol=2e-5, rtol=1e-5
        )


@pytest.mark.parametrize("variant", ["llama", "llama-llama3-rope", "mistral", "qwen2", "qwen3"])
def test_greedy_continuation_equals_transformers(pair: Callable[[str], Pair], variant: str) -> None:
    reference, model = pair(variant)
    prompts = tiny_hf.prompts()
    expected = [tiny_hf.reference_greedy(reference, prompt, NUM_TOKENS) for prompt in prompts]
    for backend in CPU_BACKENDS:
        assert Rows(model, backend).greedy(prompts, NUM_TOKENS) == expected, backend


@pytest.mark.parametrize("chunk", [1, 16, 33])
def test_prefill_in_chunks_gives_the_same_logits(pair: Callable[[str], Pair], chunk: int) -> None:
    _, model = pair("qwen3")
    prompt = tiny_hf.prompts()[-1]
    rows = Rows(model, "reference")
    torch.testing.assert_close(rows.logits(prompt, chunk=chunk), rows.logits(prompt), atol=2e-5, rtol=1e-5)


def test_a_step_may_want_no_logits(pair: Callable[[str], Pair]) -> None:
    _, model = pair("llama")
    rows = Rows(model, "reference")
    rows.tree.prefill(rows.tree.root(), 0, rows.tree.token_ids[:5] * 0 + 7)
    assert rows.step([]).shape == (0, tiny_hf.VOCAB_SIZE)


def test_logits_are_float32_and_only_of_the_wanted_tokens(pair: Callable[[str], Pair]) -> None:
    reference, model = pair("llama")
    prompt = tiny_hf.prompts()[-1]
    rows = Rows(model, "reference")
    branch = rows.tree.root()
    rows.tree.prefill(branch, 0, torch.tensor(prompt, dtype=torch.int32).numpy())
    logits = rows.step([69, 3])
    assert logits.dtype == torch.float32
    expected = tiny_hf.reference_logits(reference, prompt)[[69, 3]]
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.15), ("float16", 0.02)])
def test_low_precision_stays_near_float32(pair: Callable[[str], Pair], dtype: str, tolerance: float) -> None:
    reference, model = pair("qwen3")
    low = load_model(EngineConfig.from_dict({"model": str(model.files.path), "dtype": dtype}))
    assert low.decoder.dtype == low.dtype != torch.float32
    prompt = tiny_hf.prompts()[-1]
    expected = tiny_hf.reference_logits(reference, prompt)
    error = (Rows(low, "reference").logits(prompt) - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 0 < error < tolerance


def test_number_of_parameters_equals_transformers(pair: Callable[[str], Pair]) -> None:
    for variant in tiny_hf.VARIANTS:
        reference, model = pair(variant)
        assert model.num_parameters == sum(parameter.numel() for parameter in reference.parameters()), variant
