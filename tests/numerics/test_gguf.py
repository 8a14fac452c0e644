"""GGUF files give the same model as the transformers model that was written into them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from tests.numerics import tiny_hf
from tests.numerics.rows import Rows
from tests.numerics.tiny_gguf import write_gguf

from branchline.engine.config import EngineConfig
from branchline.engine.model import gguf_weights
from branchline.engine.model.gguf_file import GGUFFile
from branchline.engine.model.gguf_weights import GGUFSource, read_gguf_config
from branchline.engine.model.runner import LoadedModel, load_model

DEQUANTISABLE = [
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0",
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS",
]  # fmt: skip


def load(path: Path) -> LoadedModel:
    return load_model(EngineConfig(model=str(path)))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("variant", ["llama", "llama-tied", "llama-biases", "qwen2", "qwen3"])
def test_logits_equal_transformers_with_the_same_weights(tmp_path: Path, variant: str, kind: str) -> None:
    reference = tiny_hf.make(variant)
    path = write_gguf(tmp_path / "tiny.gguf", reference, GGMLQuantizationType[kind])
    rows = Rows(load(path), "reference")
    for prompt in tiny_hf.prompts():
        torch.testing.assert_close(rows.logits(prompt), tiny_hf.reference_logits(reference, prompt), atol=5e-5, rtol=1e-5)


def test_mistral_is_a_llama_file(tmp_path: Path) -> None:
    reference = tiny_hf.make("mistral")
    path = write_gguf(tmp_path / "tiny.gguf", reference, arch="llama", metadata={"rope.dimension_count": 32})
    prompt = tiny_hf.prompts()[-1]
    torch.testing.assert_close(
        Rows(load(path), "reference").logits(prompt), tiny_hf.reference_logits(reference, prompt), atol=2e-5, rtol=1e-5
    )


def test_llama3_rope_scaling_comes_from_the_divisors(tmp_path: Path) -> None:
    reference = tiny_hf.make("llama-llama3-rope")
    plain = 1.0 / reference.config.rope_parameters["rope_theta"] ** (torch.arange(0, 16, 2).float() / 16)
    divisors = (plain / reference.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() > 7
    path = write_gguf(tmp_path / "tiny.gguf", reference, tensors={"rope_freqs.weight": divisors})
    prompt = tiny_hf.prompts()[-1]
    torch.testing.assert_close(
        Rows(load(path), "reference").logits(prompt), tiny_hf.reference_logits(reference, prompt), atol=2e-5, rtol=1e-5
    )


def test_linear_rope_scaling(tmp_path: Path) -> None:
    reference = tiny_hf.make("llama-linear-rope")
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    path = write_gguf(tmp_path / "tiny.gguf", reference, metadata=scaling)
    prompt = tiny_hf.prompts()[-1]
    torch.testing.assert_close(
        Rows(load(path), "reference").logits(prompt), tiny_hf.reference_logits(reference, prompt), atol=2e-5, rtol=1e-5
    )


def test_bfloat16_file_loads_into_bfloat16(tmp_path: Path) -> None:
    reference = tiny_hf.make("qwen3")
    path = write_gguf(tmp_path / "tiny.gguf", reference, GGMLQuantizationType.BF16)
    low = load_model(EngineConfig(model=str(path), dtype="bfloat16"))
    prompt = tiny_hf.prompts()[-1]
    expected = tiny_hf.reference_logits(reference, prompt)
    error = (Rows(low, "reference").logits(prompt) - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 0 < error < 0.15


def write_embedding(path: Path, kind: GGMLQuantizationType, num_blocks: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """A model file whose embedding is `num_blocks` blocks of random bytes in each of 4 rows. Returns the bytes."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (4, num_blocks * block_bytes), np.uint8)
    raw[:, 1::2] &= 0x3B  # no exponent of ones, wherever a float16 or bfloat16 may lie
    write_gguf(path, tiny_hf.make("llama"), tensors={"token_embd.weight": None})
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 1)
    writer.add_uint32("llama.embedding_length", num_blocks * block)
    writer.add_uint32("llama.attention.key_length", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return raw


@pytest.mark.parametrize("kind", DEQUANTISABLE)
def test_chunks_dequantise_to_what_the_library_makes_of_the_whole(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_weights, "CHUNK_NUMBERS", 600)  # several chunks, the last one short
    quantisation = GGMLQuantizationType[kind]
    raw = write_embedding(tmp_path / "m.gguf", quantisation, 3 if GGML_QUANT_SIZES[quantisation][0] > 1 else 700)
    file = GGUFFile(tmp_path / "m.gguf")
    source = GGUFSource(file, read_gguf_config(file))
    out = torch.empty(source.shapes()["model.embed_tokens.weight"])
    source.read("model.embed_tokens.weight", out)
    with np.errstate(all="ignore"):
        expected = dequantize(raw, quantisation)
    np.testing.assert_array_equal(out.numpy(), expected.reshape(out.shape))
