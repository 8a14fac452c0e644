"""Weights and configuration from a GGUF file. Quantised tensors are dequantised while they are read."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from branchline.engine.errors import CorruptModelError, UnsupportedModelError
from branchline.engine.model.config import ModelConfig, RopeConfig
from branchline.engine.model.gguf_file import GGUFFile
from branchline.engine.model.weights import Bytes, TensorSource
from branchline.engine.models.base import Architecture
from branchline.engine.models.find import architecture_names, find_architecture

# Numbers that are dequantised at once. Measured: 131,072 take 0.2 s for a model of 135 M parameters, the library's own
# grouping by 16 rows 0.9 s.
CHUNK_NUMBERS = 131_072
ROPE_DIVISORS = "rope_freqs.weight"
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
logger = logging.getLogger(__name__)


def _hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; one that has none keeps its own."""
    if match := _LAYER_NAME.fullmatch(name):
        layer, stem, suffix = match.groups()
        return f"model.layers.{layer}.{_LAYER[stem]}.{suffix}" if stem in _LAYER else name
    stem, _, suffix = name.rpartition(".")
    return f"{_WHOLE[stem]}.{suffix}" if stem in _WHOLE else name


def _gguf_name(name: str) -> str:
    """The inverse of `_hf_name`."""
    stem, _, suffix = name.rpartition(".")
    for gguf, hf in _WHOLE.items():
        if stem == hf:
            return f"{gguf}.{suffix}"
    for gguf, hf in _LAYER.items():
        if stem.endswith(f".{hf}"):
            return f"blk.{stem.split('.')[2]}.{gguf}.{suffix}"
    return name


class GGUFSource(TensorSource):
    """Tensors of a GGUF file."""

    def __init__(self, gguf: GGUFFile, config: ModelConfig) -> None:
        self.file = str(gguf.path)
        self._gguf = gguf
        self._config = config
        self._permuted = find_architecture(config.architecture).gguf_permuted_qk
        self._tensors = {_hf_name(name): tensor for name, tensor in gguf.tensors.items() if name != ROPE_DIVISORS}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def name_in_file(self, name: str) -> str:
        return _gguf_name(name)

    def read(self, name: str, out: torch.Tensor) -> None:
        tensor = self._tensors[name]
        raw = self.raw(name)
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        blocks = raw.reshape(-1, block_bytes)
        flat = out.view(-1)
        step = max(1, CHUNK_NUMBERS // block)
        for begin in range(0, len(blocks), step):
            piece = blocks[begin : begin + step]
            try:
                values = dequantize(piece.reshape(1, -1), tensor.kind)
            except NotImplementedError as err:
                raise UnsupportedModelError(
                    f"{self.describe(name)} has type {tensor.kind.name}, which the gguf library can't dequantise"
                ) from err
            if not values.flags.writeable:  # a view of the file; torch takes none
                values = values.copy()
            flat[begin * block : (begin + len(piece)) * block].copy_(torch.from_numpy(values.reshape(-1)))

    def format(self, name: str) -> str:
        return str(self._tensors[name].kind.name)

    def raw(self, name: str) -> Bytes:
        tensor = self._tensors[name]
        data = self._gguf.raw(tensor)
        if self._permuted and ".self_attn." in name:
            num_heads = {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}.get(name.split(".")[-2])
            if num_heads is not None:
                rows = data.reshape(tensor.shape[0], -1)  # of a bias, one number is one row here
                data = _unpermute(rows, num_heads).reshape(data.shape)
        return data


def _unpermute(rows: Bytes, num_heads: int) -> Bytes:
    """Undo llama.cpp's order of q and k: within a head, the two halves of rotate-half lie interleaved. Moves whole rows."""
    half = len(rows) // num_heads // 2
    return rows.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def read_gguf_config(gguf: GGUFFile) -> ModelConfig:
    """The model's configuration from the file's metadata and the tensors that are there.

    Raises CorruptModelError, UnsupportedModelError; both name the file and the key.
    """
    return _GGUFConfigReader(gguf).read()


class _GGUFConfigReader:
    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf
        self._name = ""

    def read(self) -> ModelConfig:
        gguf, path = self._gguf, self._gguf.path
        self._name = self._get("general.architecture", str)
        architecture = self._architecture()
        if (parts := self._get("split.count", int, 1)) > 1:
            raise UnsupportedModelError(f"{path}: one of {parts} parts: join them with `llama-gguf-split --merge` first")
        if (experts := self._own("expert_count", int, 0)) > 0:
            raise UnsupportedModelError(f"{path}: a mixture of {experts} experts isn't supported: dense models are")
        hidden_size = self._own("embedding_length", int)
        num_heads = self._own("attention.head_count", int)
        head_dim = self._own("attention.key_length", int, hidden_size // max(num_heads, 1))
        value_dim = self._own("attention.value_length", int, head_dim)
        rotated = self._own("rope.dimension_count", int, head_dim)
        if value_dim != head_dim or rotated != head_dim:
            raise UnsupportedModelError(
                f"{path}: head sizes {head_dim} (key), {value_dim} (value), {rotated} (rotated): only equal ones are supported"
            )
        embedding = gguf.tensors.get("token_embd.weight")
        if embedding is None:
            raise CorruptModelError(f"{path}: tensor token_embd.weight is missing: not a language model, or damaged")
        return ModelConfig(
            architecture=self._name,
            hidden_size=hidden_size,
            num_layers=self._own("block_count", int),
            num_heads=num_heads,
            num_kv_heads=self._own("attention.head_count_kv", int, num_heads),
            head_dim=head_dim,
            intermediate_size=self._own("feed_forward_length", int),
            vocab_size=embedding.shape[0],
            context_length=self._context_length(),
            rms_norm_eps=self._own("attention.layer_norm_rms_epsilon", float),
            rope=self._rope(architecture),
            qkv_bias=architecture.qkv_bias or "blk.0.attn_q.bias" in gguf.tensors,
            out_bias="blk.0.attn_output.bias" in gguf.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in gguf.tensors,
            qk_norm=architecture.qk_norm,
            tied_embeddings="output.weight" not in gguf.tensors,
            bos_id=self._get("tokenizer.ggml.bos_token_id", int, None),
            eos_ids=self._eos_ids(),
        ).validate(str(path))

    def _architecture(self) -> Architecture:
        supported = [name for name in architecture_names() if find_architecture(name).gguf]
        if self._name not in supported:
            raise UnsupportedModelError(
                f"{self._gguf.path}: architecture {self._name!r} isn't supported. There are: {', '.join(supported)}"
            )
        return find_architecture(self._name)

    def _get(self, key: str, kind: type[Any], *default: Any) -> Any:
        value = self._gguf.metadata.get(key)
        if value is None:
            if default:
                return default[0]
            raise CorruptModelError(f"{self._gguf.path}: metadata key {key} is missing: the file is damaged or not a model")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind):
            raise CorruptModelError(f"{self._gguf.path}: {key} = {str(value)[:60]}: expected {kind.__name__}")
        return value

    def _own(self, key: str, kind: type[Any], *default: Any) -> Any:
        return self._get(f"{self._name}.{key}", kind, *default)

    def _context_length(self) -> int:
        length: int = self._own("context_length", int)
        window: int = self._own("attention.sliding_window", int, 0)
        if not 0 < window < length:
            return length
        logger.warning(
            "%s: the model slides its attention over a window of %d tokens, which isn't supported beyond the window: the "
            "context is bounded to %d of %d tokens",
            self._gguf.path, window, window, length,
        )  # fmt: skip
        return window

    def _rope(self, architecture: Architecture) -> RopeConfig:
        theta = self._own("rope.freq_base", float, architecture.rope_theta)
        factor = self._own("rope.scaling.factor", float, self._own("rope.scale_linear", float, 1.0))
        kind = self._own("rope.scaling.type", str, "linear")
        if kind not in ("none", "linear"):
            raise UnsupportedModelError(f"{self._gguf.path}: rope scaling {kind!r} isn't supported. There are: none, linear")
        divisors = self._gguf.tensors.get(ROPE_DIVISORS)
        if divisors is not None:
            values = dequantize(self._gguf.raw(divisors), divisors.kind).reshape(-1)
            return RopeConfig(theta=theta, kind="divisors", divisors=tuple(values.tolist()))
        if kind == "none" or factor == 1.0:
            return RopeConfig(theta=theta)
        return RopeConfig(theta=theta, kind="linear", factor=factor)

    def _eos_ids(self) -> tuple[int, ...]:
        keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        return tuple(dict.fromkeys(i for key in keys if (i := self._get(key, int, None)) is not None))
