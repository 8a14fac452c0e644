"""Hugging Face folders: what is read, what is refused, and with which words."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.model.conftest import edit_config, load
from tests.numerics import tiny_hf
from tests.numerics.rows import Rows

from branchline.engine.errors import CorruptModelError, UnsupportedModelError
from branchline.engine.model.hf_config import read_hf_config
from branchline.engine.model.safetensors_weights import INDEX, SINGLE, SafetensorsSource

UP = "model.layers.1.mlp.up_proj.weight"


def edit_weights(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """Replace tensors ("__" for "."), or drop those given as None. Returns the folder."""
    weights: dict[str, Any] = load_file(folder / SINGLE) | {name.replace("__", "."): value for name, value in tensors.items()}
    save_file({name: value for name, value in weights.items() if value is not None}, folder / SINGLE)
    return folder


# --- what is read -------------------------------------------------------------------------------------------------------


def test_shapes_and_ids(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    config = read_hf_config(folder)
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 3, 4, 2)
    assert (config.head_dim, config.hidden_size, config.intermediate_size, config.context_length) == (16, 64, 96, 512)
    assert (config.bos_id, config.eos_ids, config.tied_embeddings) == (1, (2, 5), False)


def test_older_configs_name_things_differently(folder: Path) -> None:
    edit_config(
        folder, rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2}, head_dim=None,
        num_key_value_heads=None, rms_norm_eps=None, eos_token_id=[7, 8],
    )  # fmt: skip
    (folder / "generation_config.json").unlink()
    config = read_hf_config(folder)
    assert (config.rope.theta, config.rope.kind, config.rope.factor) == (5e5, "linear", 2.0)
    assert (config.head_dim, config.num_kv_heads, config.rms_norm_eps, config.eos_ids) == (16, 4, 1e-6, (7, 8))


def test_shards_give_the_same_model(saved: Path, tmp_path: Path) -> None:
    reference = tiny_hf.make("llama")
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / INDEX).exists()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompt = tiny_hf.prompts()[-1]
    sharded, whole = (Rows(load(path), "reference").logits(prompt) for path in (tmp_path, saved))
    assert torch.equal(sharded, whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_load_as_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    reference = tiny_hf.make("llama")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(dtype))
    copy.deepcopy(reference).to(dtype).save_pretrained(tmp_path)
    prompt = tiny_hf.prompts()[-1]
    expected = tiny_hf.reference_logits(reference, prompt)
    torch.testing.assert_close(Rows(load(tmp_path), "reference").logits(prompt), expected, atol=2e-5, rtol=1e-5)


def test_a_tied_model_may_carry_its_head(tmp_path: Path) -> None:
    tiny_hf.make("llama-tied").save_pretrained(tmp_path)
    head = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"].clone()
    tied = load(edit_weights(tmp_path, lm_head__weight=head))
    assert tied.num_parameters == load(edit_weights(tmp_path, lm_head__weight=None)).num_parameters


def test_rope_buffers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    assert load(edit_weights(folder, **{name: torch.ones(8)})).num_parameters > 0


# --- sliding windows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "context_length"),
    [
        ({"model_type": "mistral", "sliding_window": 128}, 128),
        ({"model_type": "mistral", "sliding_window": 4096}, 512),
        ({"model_type": "mistral"}, 512),
        ({"model_type": "qwen2", "sliding_window": 128}, 512),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}, 128),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3}, 512),
        (
            {"model_type": "qwen3", "sliding_window": 128, "use_sliding_window": True, "layer_types": ["full_attention"] * 3},
            512,
        ),
    ],
)
def test_the_context_never_exceeds_a_sliding_window(
    folder: Path, fields: dict[str, Any], context_length: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = read_hf_config(edit_config(folder, **fields))
    assert config.context_length == context_length
    assert ("bounded to 128 of 512" in caplog.text) == (context_length == 128)


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model_type": "gpt_neox"}, "architecture 'gpt_neox' isn't supported. There are: llama, mistral, qwen2, qwen3"),
        ({"model_type": "base"}, "architecture 'base' isn't supported"),
        ({"model_type": "../llama"}, "architecture '../llama' isn't supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' isn't supported. There is: silu"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "'yarn' isn't supported. There are: default, linear, llama3",
        ),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2}}, "rope type 'dynamic' isn't supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope settings per kind of layer (full_attention)"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 isn't supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial_rotary_factor = 0.25"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq' aren't supported"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layer_types linear_attention aren't"),
        ({"head_dim": 15}, "head_dim = 15: rotary positions need an even one"),
    ],
)
def test_settings_that_are_not_implemented(folder: Path, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load(edit_config(folder, **fields))
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"hidden_size": None}, "missing required field `hidden_size`"),
        ({"model_type": None}, "missing required field `model_type`"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_layers = 0: expected at least 1"),
        ({"num_attention_heads": 0}, "num_heads = 0: expected at least 1"),
        ({"num_key_value_heads": 3}, "4 query heads can't be shared out over 3"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
    ],
)
def test_settings_that_cannot_be(folder: Path, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(CorruptModelError) as caught:
        load(edit_config(folder, **fields))
    assert text in caught.value.message
    assert "config.json" in caught.value.message


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[1, 2]"])
def test_garbage_instead_of_config(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CorruptModelError, match=r"config\.json"):
        load(folder)


def test_a_tensor_is_missing(folder: Path) -> None:
    with pytest.raises(CorruptModelError, match=rf"{UP} is missing: expected shape \[96, 64\]"):
        load(edit_weights(folder, **{UP.replace(".", "__"): None}))


def test_a_tensor_has_another_shape(folder: Path) -> None:
    with pytest.raises(CorruptModelError, match=rf"{SINGLE}: tensor {UP} has shape \[64, 96\]: expected \[96, 64\]"):
        load(edit_weights(folder, **{UP.replace(".", "__"): torch.zeros(64, 96)}))


def test_tensors_too_many(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=2)
    with pytest.raises(
        CorruptModelError, match=r"9 tensors \(30848 numbers\) that this architecture doesn't have: model.layers.2"
    ):
        load(folder)


def test_a_bias_that_the_configuration_does_not_announce(folder: Path) -> None:
    """It would be dropped silently."""
    bias = {"model__layers__0__self_attn__q_proj__bias": torch.zeros(64)}
    with pytest.raises(CorruptModelError, match=r"1 tensors \(64 numbers\).*q_proj\.bias"):
        load(edit_weights(folder, **bias))


def test_a_tensor_of_integers(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{UP} has type I32"):
        load(edit_weights(folder, **{UP.replace(".", "__"): torch.zeros(96, 64, dtype=torch.int32)}))


@pytest.mark.parametrize("keep", [0, 4, 100, -1000])
def test_truncated_weights(folder: Path, keep: int) -> None:
    data = (folder / SINGLE).read_bytes()[:keep]
    (folder / SINGLE).write_bytes(data)
    with pytest.raises(CorruptModelError, match=rf"{SINGLE}: truncated or damaged, {len(data)} bytes"):
        load(folder)


def test_garbage_instead_of_weights(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"\xff" * 4096)
    with pytest.raises(CorruptModelError, match=SINGLE):
        load(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / SINGLE).unlink()
    with pytest.raises(CorruptModelError, match="the download is incomplete"):
        load(folder)


def test_weights_of_another_format(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin aren't supported: convert them to safetensors"):
        load(folder)


@pytest.mark.parametrize("index", [b"{", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"a": ["b"]}}'])
def test_garbage_instead_of_an_index(folder: Path, index: bytes) -> None:
    (folder / INDEX).write_bytes(index)
    with pytest.raises(CorruptModelError, match=INDEX):
        load(folder)


@pytest.mark.parametrize(
    ("weight_map", "text"),
    [
        ({"x": "model-00001-of-00002.safetensors"}, r"shard model-00001-of-00002\.safetensors \(1 of 1\) is missing"),
        ({"x": SINGLE}, "tensor x is missing, which the index says is there"),
        ({"x": "../other/model.safetensors"}, "no name of a file in this folder"),
        ({"x": 3}, "3 is no name"),
    ],
)
def test_an_index_that_does_not_fit_its_shards(folder: Path, weight_map: dict[str, Any], text: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CorruptModelError, match=text):
        SafetensorsSource(folder)
