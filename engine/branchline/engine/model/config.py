"""A model's shapes and settings, as its files give them, whatever their format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from branchline.engine.errors import CorruptModelError, UnsupportedModelError

RopeKind = Literal["default", "linear", "llama3", "divisors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions.

    Attributes:
        theta: base of the frequencies.
        kind: "default"; "linear": all frequencies divided by `factor`; "llama3": Llama 3.1's scaling by the four numbers
            below; "divisors": each frequency divided by its own of `divisors` (how GGUF files store any scaling).
        divisors: [head_dim / 2].
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and settings of a decoder-only model.

    Attributes:
        architecture: module name in `branchline.engine.models`.
        num_heads, num_kv_heads: of the queries; of keys and values (grouped-query attention if fewer).
        context_length: most tokens in a sequence; never more than a sliding window.
        qkv_bias, out_bias: biases of the q, k, v projections; of the attention's output projection.
        mlp_bias: biases of gate, up and down.
        qk_norm: q and k are RMS-normalised per head before rope.
        tied_embeddings: the output head is the embedding.
        bos_id: the beginning token, if the model has one.
        eos_ids: tokens that end a generation.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    activation: Literal["silu"] = "silu"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def validate(self, source: str) -> ModelConfig:
        """Return self. Raises CorruptModelError that names `source` and the first number that can't be."""
        sizes = (
            "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size",
            "context_length",
        )  # fmt: skip
        for name in sizes:
            if getattr(self, name) < 1:
                raise CorruptModelError(f"{source}: {name} = {getattr(self, name)}: expected at least 1")
        if self.num_heads % self.num_kv_heads:
            raise CorruptModelError(
                f"{source}: {self.num_heads} query heads can't be shared out over {self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"{source}: head_dim = {self.head_dim}: rotary positions need an even one")
        if self.rms_norm_eps <= 0 or self.rope.theta <= 0 or self.rope.factor <= 0:
            raise CorruptModelError(
                f"{source}: rms_norm_eps = {self.rms_norm_eps}, rope theta = {self.rope.theta}, rope factor = "
                f"{self.rope.factor}: expected numbers above 0"
            )
        if self.rope.kind == "divisors" and len(self.rope.divisors) != self.head_dim // 2:
            raise CorruptModelError(
                f"{source}: {len(self.rope.divisors)} rope divisors for head_dim {self.head_dim}: expected {self.head_dim // 2}"
            )
        return self
