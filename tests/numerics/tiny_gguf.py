"""Writes a transformers model as a GGUF file, the way llama.cpp's converter lays it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, suffix = name.rpartition(".")
    if stem in whole:
        return f"{whole[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{suffix}"


def permute(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's order of q and k in "llama" files: a head's dimensions i and i + D/2 lie side by side."""
    heads = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def write_gguf(
    path: Path,
    model: Any,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    arch: str | None = None,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray[Any, Any] | None] | None = None,
) -> Path:
    """Write `model` with its matrices as `kind`; its vectors stay float32.

    Modifies `model`: its matrices become what the file holds, so that it is the reference for the file.

    Args:
        arch: `general.architecture`; None: the model's type.
        metadata: keys (without the architecture) to add or replace; None as a value leaves one out.
        tensors: tensors to add or replace, by GGUF name; None leaves one out.
    """
    config = model.config
    arch = arch or config.model_type
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    writer = gguf.GGUFWriter(path, arch)
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if getattr(config, "head_dim", None) is not None:
        keys |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    for key, value in (keys | (metadata or {})).items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_bos_token_id(config.bos_token_id)
    extra = dict(tensors or {})
    for hf_name, parameter in model.named_parameters():
        name = gguf_name(hf_name)
        values = parameter.detach().numpy()
        if name in extra:
            continue
        if arch == "llama" and (num_heads := heads.get(name.split(".")[-2])):
            values = permute(values, num_heads)
        if parameter.ndim == 1:
            writer.add_tensor(name, values)
            continue
        data = quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        quantised = quantize(parameter.detach().numpy(), kind)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.array(dequantize(quantised, kind)).reshape(parameter.shape)))
    for name, data in extra.items():
        if data is not None:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
