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


# Where a block has its float16 factor, and its factor of minimums with what makes the numbers' mean about 0.
K_QUANTS: dict[gguf.GGMLQuantizationType, tuple[int, tuple[int, float] | None]] = {
    gguf.GGMLQuantizationType.Q4_K: (0, (2, 7.5)),
    gguf.GGMLQuantizationType.Q5_K: (0, (2, 15.5)),
    gguf.GGMLQuantizationType.Q6_K: (208, None),
}


def random_blocks(like: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Random numbers of `kind` with the deviation of `like` [rows, cols]: the gguf library reads K-quants but writes none."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, cols = like.shape
    blocks = np.random.default_rng(cols).integers(0, 256, (rows, cols // block_size, block_bytes), np.uint8)
    factor_at, minimum = K_QUANTS[kind]

    def with_factor(factor: float) -> np.ndarray[Any, Any]:
        blocks[..., factor_at : factor_at + 2] = np.array([factor], np.float16).view(np.uint8)
        if minimum is not None:
            blocks[..., minimum[0] : minimum[0] + 2] = np.array([factor * minimum[1]], np.float16).view(np.uint8)
        return blocks.reshape(rows, -1)

    deviation = float(np.std(dequantize(with_factor(0.01), kind)))
    return with_factor(0.01 * float(np.std(like)) / deviation)


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

    Modifies `model`: its matrices become what the file holds, so that it is the reference for the file. K-quants: random ones.

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
        num_heads = heads.get(name.split(".")[-2]) if arch == "llama" else None
        if parameter.ndim == 1:
            writer.add_tensor(name, permute(values, num_heads) if num_heads else values)
            continue
        data = random_blocks(values, kind) if kind in K_QUANTS else quantize(values, kind)
        writer.add_tensor(name, permute(data, num_heads) if num_heads else data, raw_dtype=kind)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.array(dequantize(data, kind)).reshape(parameter.shape)))
    for name, data in extra.items():
        if data is not None:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
