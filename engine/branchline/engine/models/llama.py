"""Llama (SmolLM2, TinyLlama, Llama 2 and 3.x) and the decoder that the architectures of its family share.

RMS norm, rotary positions (rotate-half convention), grouped-query attention, SwiGLU; Touvron et al. 2023, arXiv:2307.09288.
q, k and v are one matrix, and so are gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from branchline.engine.attention.base import AttentionBackend
from branchline.engine.model.config import ModelConfig
from branchline.engine.model.rope import apply_rope, rope_factors, rope_table
from branchline.engine.model.weights import WeightReader
from branchline.engine.models.base import Architecture, Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. With H query and K key/value heads of size D, hidden size E and intermediate size I.

    Shapes: attention_norm, mlp_norm [E]; qkv [(H + 2K) · D, E]; qk_norm [H + K, D]; out [E, H · D]; gate_up [2I, E];
    down [E, I]; a bias has its matrix's first size. None: the model has none.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class LlamaDecoder(Decoder):
    """The Llama family's decoder."""

    def __init__(
        self, config: ModelConfig, embedding: torch.Tensor, layers: list[LayerWeights], norm: torch.Tensor, head: torch.Tensor
    ) -> None:
        """Takes the tensors. `embedding` and `head` are [vocab, E] and may be the same tensor; `norm` is [E]."""
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._rope = rope_table(config, self.device)
        tensors = [getattr(layer, name) for layer in layers for name in LayerWeights.__slots__ if name != "qk_norm"]
        tensors += [embedding, norm] + ([] if head is embedding else [head])
        self.num_parameters = sum(tensor.numel() for tensor in tensors if tensor is not None)
        if config.qk_norm:
            self.num_parameters += 2 * config.num_layers * config.head_dim

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightReader) -> LlamaDecoder:
        hidden = config.hidden_size
        embedding = weights.tensor("model.embed_tokens.weight", (config.vocab_size, hidden))
        norm = weights.tensor("model.norm.weight", (hidden,))
        head = embedding if config.tied_embeddings else weights.tensor("lm_head.weight", (config.vocab_size, hidden))
        layers = weights.map(lambda index: _load_layer(config, weights, index), config.num_layers)
        return cls(config, embedding, layers, norm, head)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend, logit_tokens: torch.Tensor
    ) -> torch.Tensor:
        hidden = self._run_layers(token_ids, positions, attention, logit_tokens)
        # outside inference mode, so that the sampler may change the logits in place
        return functional.linear(hidden, self._head).float()

    @torch.inference_mode()
    def _run_layers(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend, logit_tokens: torch.Tensor
    ) -> torch.Tensor:
        """[N, hidden_size]: the normed last hidden states of the wanted tokens."""
        eps = self.config.rms_norm_eps
        hidden_shape = (self.config.hidden_size,)
        cos, sin = rope_factors(self._rope, positions)
        x = functional.embedding(token_ids, self._embedding)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            normed = functional.rms_norm(x, hidden_shape, layer.attention_norm, eps)
            q, k, v = self._project(layer, normed, cos, sin)
            attended = attention.attend(index, q, k, v).flatten(1)
            if index == last:  # the K/V are written; from here on only the wanted tokens matter
                attended, x = attended.index_select(0, logit_tokens), x.index_select(0, logit_tokens)
            x = _add_projection(x, attended, layer.out, layer.out_bias)
            normed = functional.rms_norm(x, hidden_shape, layer.mlp_norm, eps)
            gate, up = functional.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x = _add_projection(x, functional.silu(gate).mul_(up), layer.down, layer.down_bias)
        return functional.rms_norm(x, hidden_shape, self._norm, eps)

    def _project(
        self, layer: LayerWeights, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = functional.linear(normed, layer.qkv, layer.qkv_bias).view(len(normed), -1, config.head_dim)
        rotated, v = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.qk_norm is not None:
            rotated = functional.rms_norm(rotated, (config.head_dim,), None, config.rms_norm_eps) * layer.qk_norm
        rotated = apply_rope(rotated, cos, sin)
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], v


def _add_projection(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x + y weightᵀ + bias, the sum inside the matrix product where it can be."""
    return torch.addmm(x if bias is None else x + bias, y, weight.t())


def _load_layer(config: ModelConfig, weights: WeightReader, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    gate_up = {"gate_proj": intermediate, "up_proj": intermediate}

    def bias(has: bool, names: dict[str, int], folder: str) -> torch.Tensor | None:
        return weights.fused([(f"{folder}{name}.bias", (size,)) for name, size in names.items()]) if has else None

    qk_norm = None
    if config.qk_norm:
        q_norm = weights.tensor(attention + "q_norm.weight", (head_dim,))
        k_norm = weights.tensor(attention + "k_norm.weight", (head_dim,))
        qk_norm = torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)))
    return LayerWeights(
        attention_norm=weights.tensor(prefix + "input_layernorm.weight", (hidden,)),
        qkv=weights.fused([(f"{attention}{name}.weight", (size, hidden)) for name, size in qkv.items()]),
        qkv_bias=bias(config.qkv_bias, qkv, attention),
        qk_norm=qk_norm,
        out=weights.tensor(attention + "o_proj.weight", (hidden, q_size)),
        out_bias=bias(config.out_bias, {"o_proj": hidden}, attention),
        mlp_norm=weights.tensor(prefix + "post_attention_layernorm.weight", (hidden,)),
        gate_up=weights.fused([(f"{mlp}{name}.weight", (size, hidden)) for name, size in gate_up.items()]),
        gate_up_bias=bias(config.mlp_bias, gate_up, mlp),
        down=weights.tensor(mlp + "down_proj.weight", (hidden, intermediate)),
        down_bias=bias(config.mlp_bias, {"down_proj": hidden}, mlp),
    )


ARCHITECTURE = Architecture(decoder=LlamaDecoder, gguf_permuted_qk=True)
