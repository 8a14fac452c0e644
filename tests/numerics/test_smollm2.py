"""The default model, dequantised, computes what transformers computes from the same GGUF file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.numerics.conftest import CPU_BACKENDS
from tests.numerics.rows import Rows
from tests.numerics.tiny_hf import reference_logits

from branchline.engine.config import EngineConfig
from branchline.engine.model.resolve import resolve_model
from branchline.engine.model.runner import LoadedModel, load_model
from branchline.engine.model.tokenizer import load_tokenizer

NUM_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who",
    "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
    "水は",
)


@pytest.fixture(scope="module")
def model(smollm2: str) -> LoadedModel:
    return load_model(EngineConfig(model=smollm2))


@pytest.fixture(scope="module")
def prompts(smollm2: str) -> list[list[int]]:
    files = resolve_model(smollm2)
    tokenizer = load_tokenizer(files.kind, files.path)
    ids = [tokenizer.encode(text, add_bos=False) for text in PROMPTS]
    assert ids[0] == [504, 3575, 282, 4649, 314]
    return ids


@pytest.fixture(scope="module")
def reference(smollm2: str) -> Any:
    """transformers' model from the same file: about 20 s."""
    from transformers import AutoModelForCausalLM

    path = resolve_model(smollm2).path
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
    ).eval()


@pytest.fixture(scope="module")
def continuations(model: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    return Rows(model, "cpu" if "cpu" in CPU_BACKENDS else "reference").greedy(prompts, NUM_TOKENS)


def test_greedy_continuations_equal_transformers(
    model: LoadedModel, reference: Any, prompts: list[list[int]], continuations: list[list[int]]
) -> None:
    """If transformers, given our first n tokens, always takes our next one, then its own greedy run is ours."""
    rows = Rows(model, "reference")
    for prompt, continuation in zip(prompts, continuations, strict=True):
        whole = prompt + continuation
        expected = reference_logits(reference, whole)
        assert expected[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == continuation
        torch.testing.assert_close(rows.logits(whole), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_backends_agree_on_the_tokens(
    model: LoadedModel, prompts: list[list[int]], continuations: list[list[int]], backend: str
) -> None:
    count = 16
    assert Rows(model, backend).greedy(prompts, count) == [tokens[:count] for tokens in continuations]


def test_a_known_continuation(continuations: list[list[int]]) -> None:
    """ " Paris.\\n\\nThe answer is: 2018-01-22 12:12:53.", recorded from transformers' generate."""
    assert continuations[0][:30] == [
        7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42, 33, 34, 42, 37,
        35, 30, 2,
    ]  # fmt: skip
