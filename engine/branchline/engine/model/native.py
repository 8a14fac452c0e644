"""The native engine: the weights packed for the CPU kernels as the model's files have them, and one native call a step."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

from branchline.engine import _kernels
from branchline.engine.attention.base import AttentionSpec
from branchline.engine.attention.native import Backend
from branchline.engine.config import EngineConfig
from branchline.engine.errors import UnsupportedModelError
from branchline.engine.model.config import ModelConfig
from branchline.engine.model.packed_file import pack_mapped, packed_path
from branchline.engine.model.resolve import ModelFiles
from branchline.engine.model.rope import rope_table
from branchline.engine.model.runner import DTYPES, TIED_HEAD, LoadedModel, Runner, find_model, load_model, load_torch
from branchline.engine.model.weights import Bytes, TensorSource, WeightReader
from branchline.engine.models.find import find_architecture
from branchline.engine.models.llama import LlamaDecoder
from branchline.engine.step import Step
from branchline.engine.threads import available_cores

DENSE = ("F32", "F16", "BF16")
FORMATS = (*DENSE, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # what `_kernels.Matrix.pack` takes
QUANTIZE_ROWS = 4096  # rows that are quantised at once, so that their float32 values don't double the model
Precision = Literal["int8", "exact"]
KvDtype = Literal["float32", "bfloat16", "int8"]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeModel:
    """A model packed for the CPU kernels.

    Attributes:
        model_config, files, name, num_parameters: as in `LoadedModel`.
        llama: the packed weights and the steps' scratch memory; one engine's.
        threads: that the steps run on.
        formats: of the weights' numbers, the commonest first, e.g. "q4_1/q8_0".
        kv_dtype: of the page pool.
    """

    llama: _kernels.LlamaModel
    threads: _kernels.ThreadPool
    model_config: ModelConfig
    files: ModelFiles
    name: str
    num_parameters: int
    formats: str
    kv_dtype: torch.dtype

    def attention_spec(self, page_tokens: int) -> AttentionSpec:
        """What the page pool must be built for."""
        config = self.model_config
        return AttentionSpec(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_tokens=page_tokens,
            scale=config.head_dim**-0.5,
            dtype=self.kv_dtype,
            device=torch.device("cpu"),
        )


def open_model(config: EngineConfig) -> LoadedModel | NativeModel:
    """Load the model that the settings name, for the native engine where `compute` lets it and the kernels can.

    If the native engine can't take the model or a setting and `compute` is "auto", one line of the log says why.

    Raises:
        UnsupportedModelError: `compute` is "native" and the kernels lack something; the text says what.
        others: like `load_torch`.
    """
    if config.compute == "torch" or config.why_not_native() is not None:
        return load_model(config)
    files, model_config, source = find_model(config)
    reason = why_not_native(model_config, source, config)
    if reason is None:
        return load_native(config, files, model_config, source)
    if config.compute == "native" or config.quantize is not None:
        setting = "compute = 'native'" if config.compute == "native" else f"quantize = {config.quantize!r}"
        raise UnsupportedModelError(f"{files.path}: {setting}: {reason}; compute = 'torch' can")
    logger.info("%s: computed by torch, since %s", files.name, reason)
    return load_torch(config, files, model_config, source)


def why_not_native(model_config: ModelConfig, source: TensorSource, config: EngineConfig) -> str | None:
    """What the kernels lack for this model, or None."""
    if find_architecture(model_config.architecture).decoder is not LlamaDecoder:
        return f"the native engine has no architecture {model_config.architecture!r}"
    try:
        _kernels.TreeAttention(
            num_layers=model_config.num_layers,
            num_heads=model_config.num_heads,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            page_tokens=config.page_tokens,
            scale=1.0,
            kv_dtype=_kv_dtype(source, config),
        )
    except ValueError as err:
        return f"its attention can't: {err}"
    shapes = source.shapes()
    for name, shape in shapes.items():
        if len(shape) == 2 and (reason := _why_not_packed(name, shape[1], source, config.quantize)):
            return reason
        up = name.replace("gate_proj.weight", "up_proj.weight")
        if up != name and up in shapes and source.format(up) != source.format(name):
            return f"{source.describe(name)} has type {source.format(name)} and {up} {source.format(up)}, which it fuses"
    return None


def _kv_dtype(source: TensorSource, config: EngineConfig) -> KvDtype:
    if config.kv_dtype != "auto":
        return config.kv_dtype
    matrices = (name for name, shape in source.shapes().items() if len(shape) == 2)
    is_exact = config.quantize is None and all(source.format(name) == "F32" for name in matrices)
    return "float32" if is_exact else "bfloat16"


def _why_not_packed(name: str, cols: int, source: TensorSource, quantize_to: str | None) -> str | None:
    form = source.format(name)
    if form not in FORMATS:
        return f"{source.describe(name)} has type {form}. The native engine reads {', '.join(FORMATS)}"
    kept = quantize_to.upper() if quantize_to is not None and form in DENSE else form
    block = GGML_QUANT_SIZES[GGMLQuantizationType[kept]][0]
    if cols % block:
        return f"{source.describe(name)} has rows of {cols} numbers, which can't be cut into {kept}'s blocks of {block}"
    return None


def load_native(config: EngineConfig, files: ModelFiles, model_config: ModelConfig, source: TensorSource) -> NativeModel:
    """Pack a model's weights. The source's files can be closed afterwards: nothing is kept of them.

    Raises CorruptModelError (a tensor is missing, misshapen or left over).
    """
    began = time.perf_counter()
    threads = _kernels.ThreadPool(config.threads or available_cores())
    kv_dtype = _kv_dtype(source, config)
    precision: Precision = "int8" if config.activations == "int8" else "exact"

    def pack(arena: _kernels.Arena) -> tuple[_Packer, _kernels.LlamaModel]:
        weights = WeightReader(source, torch.float32, torch.device("cpu"))
        packer = _Packer(model_config, weights, config.quantize, arena)
        llama = packer.pack(threads, config.page_tokens, kv_dtype, precision)
        weights.finish(optional=TIED_HEAD if model_config.tied_embeddings else frozenset())
        return packer, llama

    if config.weights == "mapped":
        packer, llama = pack_mapped(packed_path(files, config), pack)
    else:
        packer, llama = pack(_kernels.Arena())
    logger.info(
        "%s: %.1f M parameters, %.1f MB of %s, packed in %.2f s",
        files.name, packer.num_parameters / 1e6, llama.nbytes / 1e6, packer.formats, time.perf_counter() - began,
    )  # fmt: skip
    return NativeModel(
        llama=llama,
        model_config=model_config,
        files=files,
        name=files.name,
        num_parameters=packer.num_parameters,
        formats=packer.formats,
        threads=threads,
        kv_dtype=DTYPES[kv_dtype],
    )


class _Packer:
    """Reads and packs the tensors of one model of the Llama family.

    Attributes:
        num_parameters: numbers read so far.
    """

    def __init__(self, config: ModelConfig, weights: WeightReader, quantize_to: str | None, arena: _kernels.Arena) -> None:
        self._config = config
        self._weights = weights
        self._quantize_to = quantize_to
        self._arena = arena
        self._bytes_of: Counter[str] = Counter()
        self.num_parameters = 0

    @property
    def formats(self) -> str:
        """Formats of the matrices, those with the most bytes first."""
        return "/".join(name.lower() for name, _ in self._bytes_of.most_common())

    def pack(
        self, threads: _kernels.ThreadPool, page_tokens: int, kv_dtype: KvDtype, precision: Precision
    ) -> _kernels.LlamaModel:
        """Reads every tensor. Raises CorruptModelError if one is missing or misshapen."""
        config = self._config
        embedding = self._matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size, vocabulary=True)
        head = embedding
        if not config.tied_embeddings:
            head = self._matrix("lm_head.weight", config.vocab_size, config.hidden_size, vocabulary=True)
        return _kernels.LlamaModel(
            threads,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            embedding=embedding,
            layers=[self._layer(index) for index in range(config.num_layers)],
            norm=self._vector(["model.norm.weight"], [config.hidden_size]),
            head=head,
            rope=rope_table(config, torch.device("cpu")).numpy(),
            page_tokens=page_tokens,
            kv_dtype=kv_dtype,
            precision=precision,
        )

    def _layer(self, index: int) -> _kernels.LlamaLayer:
        config, prefix = self._config, f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        qkv, sizes = [f"{attention}{name}_proj" for name in "qkv"], [q_size, kv_size, kv_size]
        gate_up = [mlp + "gate_proj", mlp + "up_proj"]
        return _kernels.LlamaLayer(
            attention_norm=self._vector([prefix + "input_layernorm.weight"], [hidden]),
            qkv=self._matrices(qkv, sizes, hidden),
            qkv_bias=self._biases(qkv, sizes, config.qkv_bias),
            q_norm=self._vector([attention + "q_norm.weight"], [head_dim]) if config.qk_norm else None,
            k_norm=self._vector([attention + "k_norm.weight"], [head_dim]) if config.qk_norm else None,
            out=self._matrix(attention + "o_proj.weight", hidden, q_size),
            out_bias=self._biases([attention + "o_proj"], [hidden], config.out_bias),
            mlp_norm=self._vector([prefix + "post_attention_layernorm.weight"], [hidden]),
            gate_up=self._gate_up(gate_up, intermediate, hidden),
            gate_up_bias=self._biases(gate_up, [intermediate] * 2, config.mlp_bias),
            down=self._matrix(mlp + "down_proj.weight", hidden, intermediate),
            down_bias=self._biases([mlp + "down_proj"], [hidden], config.mlp_bias),
        )

    def _matrices(self, stems: list[str], sizes: list[int], cols: int) -> list[_kernels.Matrix]:
        """One matrix below the other; neighbours of one format become one."""
        parts = [self._stored(f"{stem}.weight", size, cols) for stem, size in zip(stems, sizes, strict=True)]
        groups = itertools.groupby(parts, key=lambda part: part[0])
        return [self._pack(form, [data for _, data in group], cols) for form, group in groups]

    def _gate_up(self, stems: list[str], rows: int, cols: int) -> _kernels.Matrix:
        (form, gate), (_, up) = (self._stored(f"{stem}.weight", rows, cols) for stem in stems)
        return self._pack(form, [gate, up], cols, interleave_halves=True)

    def _matrix(self, name: str, rows: int, cols: int, *, vocabulary: bool = False) -> _kernels.Matrix:
        form, data = self._stored(name, rows, cols, vocabulary=vocabulary)
        return self._pack(form, [data], cols)

    def _pack(self, form: str, parts: list[Bytes], cols: int, *, interleave_halves: bool = False) -> _kernels.Matrix:
        return _kernels.Matrix.pack(form, [part.reshape(-1) for part in parts], cols, interleave_halves, self._arena)

    def _stored(self, name: str, rows: int, cols: int, *, vocabulary: bool = False) -> tuple[str, Bytes]:
        """(format, bytes) that the packed matrix shall have. `vocabulary`: 4 bits would be too few."""
        form, data = self._weights.raw(name, (rows, cols))
        if self._quantize_to is not None and form in DENSE:
            wanted = "Q8_0" if vocabulary else self._quantize_to.upper()
            data = _quantized_sizes(data, form, wanted) if self._arena.is_filled else _quantized(form, data, wanted)
            form = wanted
        self.num_parameters += rows * cols
        self._bytes_of[form] += data.nbytes
        return form, data

    def _vector(self, names: list[str], sizes: list[int]) -> npt.NDArray[np.float32]:
        self.num_parameters += sum(sizes)
        joined = self._weights.fused([(name, (size,)) for name, size in zip(names, sizes, strict=True)])
        values: npt.NDArray[np.float32] = joined.numpy()
        return values

    def _biases(self, stems: list[str], sizes: list[int], has: bool) -> npt.NDArray[np.float32] | None:
        return self._vector([f"{stem}.bias" for stem in stems], sizes) if has else None


def _quantized(form: str, data: Bytes, wanted: str) -> Bytes:
    kind = GGMLQuantizationType[wanted]
    parts = []
    for begin in range(0, len(data), QUANTIZE_ROWS):
        rows = data[begin : begin + QUANTIZE_ROWS]
        if form == "BF16":
            values = (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = rows.view(np.float32 if form == "F32" else np.float16).astype(np.float32)
        parts.append(quantize(values, kind))
    return np.concatenate(parts)


def _quantized_sizes(data: Bytes, form: str, wanted: str) -> Bytes:
    """What `_quantized` gives, but for the contents: nobody reads them where the packed weights are there already."""
    cols = data.shape[1] // (4 if form == "F32" else 2)
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[wanted]]
    return np.empty((len(data), cols // block * block_bytes), np.uint8)


class NativeRunner(Runner):
    """Runs a native model's steps. The logits of a step lie where those of the last one lay."""

    def __init__(self, model: NativeModel, attention: Backend) -> None:
        """`attention`: over the page pool, which it knows how to copy; the steps attend by themselves."""
        self._llama = model.llama
        self._vocab_size = model.model_config.vocab_size
        self._attention = attention
        self._kv = attention.pool.data.view(-1).view(torch.uint8).numpy()
        self._logits = np.empty((0, self._vocab_size), np.float32)
        self.copied_bytes = 0

    def copy_page(self, source: int, destination: int, num_tokens: int) -> None:
        self._attention.copy_page(source, destination, num_tokens)

    def run(self, step: Step, logit_tokens: npt.NDArray[np.integer]) -> torch.Tensor:
        if len(step.copy_src):
            self.copied_bytes += self._attention.copy_pages(step)
        if len(logit_tokens) > len(self._logits):
            self._logits = np.empty((len(logit_tokens), self._vocab_size), np.float32)
        logits = self._logits[: len(logit_tokens)]
        self._llama.step(
            step.token_ids,
            step.positions,
            step.write_slots,
            step.row_indptr,
            [(level.qo_indptr, level.kv_indptr, level.kv_indices, level.last_page_len) for level in step.levels],
            logit_tokens.astype(np.int64, copy=False),
            self._kv,
            logits,
        )
        return torch.from_numpy(logits)
