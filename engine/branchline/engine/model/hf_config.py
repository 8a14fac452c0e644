"""Reads a Hugging Face config.json into a `ModelConfig`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from branchline.engine.errors import CorruptModelError, UnsupportedModelError
from branchline.engine.model.config import ModelConfig, RopeConfig, RopeKind
from branchline.engine.models.base import Architecture
from branchline.engine.models.find import find_architecture

SUPPORTED_ROPE_KINDS: Mapping[str, RopeKind] = {"default": "default", "linear": "linear", "llama3": "llama3"}
logger = logging.getLogger(__name__)
T = TypeVar("T")


class RopeScaling(msgspec.Struct):
    """`rope_scaling` (transformers 4) or `rope_parameters` (transformers 5)."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None


class HFConfig(msgspec.Struct, kw_only=True):
    """The fields of config.json that are read; others are ignored. Names are Hugging Face's."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int | None = None
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


class _ModelType(msgspec.Struct):
    model_type: str


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def read_hf_config(folder: Path) -> ModelConfig:
    """The model's configuration from config.json (and end tokens from generation_config.json, if it is there).

    Raises CorruptModelError, UnsupportedModelError; both name the file and the field.
    """
    path = folder / "config.json"
    raw = _read_json(path)
    # the type first: what another architecture calls its fields is no damage
    architecture = find_architecture(_convert(raw, _ModelType, path).model_type)
    config = _convert(raw, HFConfig, path)
    _refuse_unsupported(config, path)
    generation = _GenerationConfig()
    generation_path = folder / "generation_config.json"
    if generation_path.exists():
        generation = _convert(_read_json(generation_path), _GenerationConfig, generation_path)
    biased = config.attention_bias and not architecture.qkv_bias
    return ModelConfig(
        architecture=config.model_type,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // max(config.num_attention_heads, 1),
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        context_length=_context_length(config, architecture, path),
        rms_norm_eps=architecture.rms_norm_eps if config.rms_norm_eps is None else config.rms_norm_eps,
        rope=_rope(config, architecture, path),
        qkv_bias=architecture.qkv_bias or biased,
        out_bias=biased,
        mlp_bias=config.mlp_bias,
        qk_norm=architecture.qk_norm,
        tied_embeddings=config.tie_word_embeddings,
        bos_id=config.bos_token_id,
        eos_ids=tuple(dict.fromkeys(_ids(config.eos_token_id) + _ids(generation.eos_token_id))),
    ).validate(str(path))


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except ValueError as err:  # JSONDecodeError and UnicodeDecodeError
        raise CorruptModelError(f"{path}: not JSON ({err}): download the model again") from err


def _convert(raw: object, kind: type[T], path: Path) -> T:
    try:
        return msgspec.convert(raw, kind, strict=False)
    except msgspec.ValidationError as err:
        raise CorruptModelError(f"{path}: {err}") from err


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _refuse_unsupported(config: HFConfig, path: Path) -> None:
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"{path}: weights quantised with {method!r} aren't supported: use the float16/bfloat16/float32 model or a GGUF file"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(f"{path}: hidden_act = {config.hidden_act!r} isn't supported. There is: silu")


def _rope(config: HFConfig, architecture: Architecture, path: Path) -> RopeConfig:
    raw = config.rope_parameters or config.rope_scaling or {}
    if any(isinstance(value, dict) for value in raw.values()):
        raise UnsupportedModelError(f"{path}: rope settings per kind of layer ({', '.join(raw)}) aren't supported")
    scaling = _convert(raw, RopeScaling, path)
    for factor in (config.partial_rotary_factor, scaling.partial_rotary_factor):
        if factor not in (None, 1.0):
            raise UnsupportedModelError(f"{path}: partial_rotary_factor = {factor} isn't supported: only 1.0 is")
    kind = scaling.rope_type or scaling.type or "default"
    if kind not in SUPPORTED_ROPE_KINDS:
        raise UnsupportedModelError(
            f"{path}: rope type {kind!r} isn't supported. There are: {', '.join(sorted(SUPPORTED_ROPE_KINDS))}"
        )
    return RopeConfig(
        theta=scaling.rope_theta or config.rope_theta or architecture.rope_theta,
        kind=SUPPORTED_ROPE_KINDS[kind],
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_context=scaling.original_max_position_embeddings or config.max_position_embeddings,
    )


def _context_length(config: HFConfig, architecture: Architecture, path: Path) -> int:
    """Within the window every layer sees all tokens, so a shorter context is exact."""
    window = config.sliding_window
    if architecture.window_needs_flag and not config.use_sliding_window:
        window = None
    if config.layer_types is not None:
        if unknown := set(config.layer_types) - {"full_attention", "sliding_attention"}:
            raise UnsupportedModelError(f"{path}: layer_types {', '.join(sorted(unknown))} aren't supported")
        if "sliding_attention" not in config.layer_types:
            window = None
    elif architecture.window_needs_flag and (config.max_window_layers or 0) >= config.num_hidden_layers:
        window = None  # the first max_window_layers layers see everything
    if window is None or window >= config.max_position_embeddings:
        return config.max_position_embeddings
    logger.warning(
        "%s: the model slides its attention over a window of %d tokens, which isn't supported beyond the window: the context "
        "is bounded to %d of %d tokens",
        path, window, window, config.max_position_embeddings,
    )  # fmt: skip
    return window
