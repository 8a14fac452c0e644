"""Loads a model and runs its steps."""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from branchline.engine.attention.base import AttentionBackend
from branchline.engine.config import EngineConfig
from branchline.engine.errors import ConfigError, CorruptModelError
from branchline.engine.model.config import ModelConfig
from branchline.engine.model.gguf_file import GGUFFile
from branchline.engine.model.gguf_weights import GGUFSource, read_gguf_config
from branchline.engine.model.hf_config import read_hf_config
from branchline.engine.model.resolve import ModelFiles, resolve_model
from branchline.engine.model.safetensors_weights import SafetensorsSource
from branchline.engine.model.weights import TensorSource, WeightReader
from branchline.engine.models.base import Decoder
from branchline.engine.models.find import find_architecture
from branchline.engine.step import Step

TIED_HEAD = frozenset({"lm_head.weight"})
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory.

    Attributes:
        model_config: its shapes; the context length is the engine's bound, if that has one.
        files: where it came from; the tokenizer is read from there.
        name: short name.
        dtype, device: of weights and K/V.
    """

    decoder: Decoder
    model_config: ModelConfig
    files: ModelFiles
    name: str
    num_parameters: int
    dtype: torch.dtype
    device: torch.device


def load_model(config: EngineConfig) -> LoadedModel:
    """Find the model that the settings name and read its weights, for torch whatever `compute` says.

    Raises:
        ModelNotFoundError, CorruptModelError, UnsupportedModelError: their texts name file and tensor, key or field.
        ConfigError: `context_length` is above the model's, or `device` isn't there.
    """
    files, model_config, source = find_model(config)
    return load_torch(config, files, model_config, source)


def find_model(config: EngineConfig) -> tuple[ModelFiles, ModelConfig, TensorSource]:
    """The files that the settings name, the model's shapes, and its tensors, of which none is read yet. Raises like
    `load_model`."""
    _device(config)
    files = resolve_model(config.model)
    try:
        model_config, source = _open(files)
    except OSError as err:
        raise CorruptModelError(f"{files.path}: can't be read ({err})") from err
    return files, _bound_context(model_config, config), source


def load_torch(config: EngineConfig, files: ModelFiles, model_config: ModelConfig, source: TensorSource) -> LoadedModel:
    """Read the weights of a model that `find_model` found. Raises like `load_model`."""
    began = time.perf_counter()
    weights = WeightReader(source, DTYPES[config.dtype], _device(config))
    decoder = find_architecture(model_config.architecture).decoder.load(model_config, weights)
    weights.finish(optional=TIED_HEAD if model_config.tied_embeddings else frozenset())
    logger.info("%s: %.1f M parameters in %.2f s", files.name, decoder.num_parameters / 1e6, time.perf_counter() - began)
    return LoadedModel(
        decoder=decoder,
        model_config=model_config,
        files=files,
        name=files.name,
        num_parameters=decoder.num_parameters,
        dtype=decoder.dtype,
        device=decoder.device,
    )


def _open(files: ModelFiles) -> tuple[ModelConfig, TensorSource]:
    if files.kind == "hf":
        return read_hf_config(files.path), SafetensorsSource(files.path)
    gguf = GGUFFile(files.path)
    config = read_gguf_config(gguf)
    return config, GGUFSource(gguf, config)


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device = 'cuda': torch finds no CUDA device; use device = 'cpu' or a CUDA build of torch", param="device"
        )
    return torch.device(config.device)


def _bound_context(model_config: ModelConfig, config: EngineConfig) -> ModelConfig:
    if config.context_length is None:
        return model_config
    if config.context_length > model_config.context_length:
        raise ConfigError(
            f"context_length = {config.context_length}: the model's is {model_config.context_length}", param="context_length"
        )
    return dataclasses.replace(model_config, context_length=config.context_length)


class Runner(Protocol):
    """Runs a model's steps. Belongs to one engine and its thread.

    Attributes:
        copied_bytes: K/V bytes moved by copy-on-write since the start.
    """

    copied_bytes: int

    def copy_page(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy at least the first tokens' K/V of one page to another, between two steps."""

    def run(self, step: Step, logit_tokens: npt.NDArray[np.integer]) -> torch.Tensor:
        """Compute a step: its copies, its K/V and the logits that are wanted. Modifies the pool.

        Args:
            step: borrowed for the call.
            logit_tokens: [N] packed indices of the tokens whose logits are wanted; N may be 0.

        Returns:
            [N, vocab_size] float32. The caller may change it; the next call may overwrite it.
        """


class ModelRunner(Runner):
    """Runs a torch model's forward over the steps that the core planned."""

    def __init__(self, model: LoadedModel, attention: AttentionBackend) -> None:
        self._decoder = model.decoder
        self._device = model.device
        self._attention = attention
        self.copied_bytes = 0

    def copy_page(self, source: int, destination: int, num_tokens: int) -> None:
        self._attention.copy_page(source, destination, num_tokens)

    def run(self, step: Step, logit_tokens: npt.NDArray[np.integer]) -> torch.Tensor:
        if len(step.copy_src):
            self.copied_bytes += self._attention.copy_pages(step)
        self._attention.plan(step)
        return self._decoder.forward(
            self._tensor(step.token_ids), self._tensor(step.positions), self._attention, self._tensor(logit_tokens)
        )

    def _tensor(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        """A copy: the core's arrays change with its next plan, and a GPU may still be reading then."""
        return torch.from_numpy(array.astype(np.int64)).to(self._device)
