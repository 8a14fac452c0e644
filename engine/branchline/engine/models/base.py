"""The contract of a model architecture. Adding one is one file beside this one: `models/<model_type>.py` with an
`ARCHITECTURE`; the file's name is config.json's `model_type` or, of a GGUF file, `general.architecture`."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from branchline.engine.attention.base import AttentionBackend, AttentionSpec

if TYPE_CHECKING:
    from branchline.engine.model.config import ModelConfig
    from branchline.engine.model.weights import WeightReader


class Decoder(abc.ABC):
    """A model's weights and its forward pass. Inference only. Holds no K/V: that is the attention backend's.

    Attributes:
        config: the model's shapes.
        dtype, device: of the weights and the hidden states.
        num_parameters: numbers in the weights; a tied head counts once.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    num_parameters: int

    @classmethod
    @abc.abstractmethod
    def load(cls, config: ModelConfig, weights: WeightReader) -> Decoder:
        """Read every tensor that the architecture has from `weights`, in the reader's dtype and device.

        Raises CorruptModelError (a tensor is missing or misshapen), UnsupportedModelError (a tensor's type is unknown).
        """

    @abc.abstractmethod
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend, logit_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Run the packed tokens of one step through all layers.

        `attention` must have planned the step; its pool is modified, nothing else is.

        Args:
            token_ids, positions: [T] int32 or int64, T >= 1.
            attention: writes the step's K/V and attends. It gets views that may be strided.
            logit_tokens: [N] int32 or int64: packed indices of the tokens whose logits are wanted; N may be 0.

        Returns:
            [N, vocab_size] float32, the caller's own: it may change it in place.
        """

    def attention_spec(self, page_tokens: int, dtype: torch.dtype, device: torch.device) -> AttentionSpec:
        """What an attention backend and a page pool for this model must be built for."""
        return AttentionSpec(
            num_layers=self.config.num_layers,
            num_heads=self.config.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            page_tokens=page_tokens,
            scale=self.config.head_dim**-0.5,
            dtype=dtype,
            device=device,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What distinguishes one architecture of the decoder-only kind from another.

    Attributes:
        decoder: the class that holds and runs it.
        qkv_bias: the q, k and v projections always have a bias. Else config.json's `attention_bias` says whether they and
            the output projection do.
        qk_norm: q and k are RMS-normalised per head before rope (Qwen3).
        gguf: GGUF files may have this architecture.
        gguf_permuted_qk: rows of q and k are stored interleaved in GGUF files (llama.cpp's rope convention for "llama").
        window_needs_flag: `sliding_window` counts only if `use_sliding_window` is true (Qwen).
        rms_norm_eps, rope_theta: what holds when config.json doesn't say.
    """

    decoder: type[Decoder]
    qkv_bias: bool = False
    qk_norm: bool = False
    gguf: bool = True
    gguf_permuted_qk: bool = False
    window_needs_flag: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
