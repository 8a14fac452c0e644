"""Tiny random models of every architecture, made by transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 160
SHAPES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def rope(theta: float, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, "rope_type": "default", **settings}}


LLAMA3_ROPE = rope(
    500000.0,
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-gqa3": ("llama", {"hidden_size": 96, "num_attention_heads": 6}),
    "llama-gqa4": ("llama", {"num_key_value_heads": 1}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("llama", LLAMA3_ROPE),
    "llama-linear-rope": ("llama", rope(10000.0, rope_type="linear", factor=4.0)),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32, "rms_norm_eps": 1e-5}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, **rope(1e6)}),
    "qwen3": ("qwen3", {"head_dim": 32, **rope(1e6)}),
}


def make(variant: str, **overrides: Any) -> Any:
    """A model in float32 whose every parameter is random: a norm or bias that is left out, or swapped, shows."""
    model_type, settings = VARIANTS[variant]
    config_class, model_class = CLASSES[model_type]
    torch.manual_seed(len(variant))
    model = model_class(config_class(**{**SHAPES, **settings, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
            else:
                parameter.normal_(std=1.2 / parameter.shape[-1] ** 0.5)
    return model


def prompts(count: int = 5, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Random prompts of lengths around the page size, one longer than a step's chunk in the tests that chunk."""
    generator = torch.Generator().manual_seed(7)
    lengths = (1, 15, 16, 17, 70)[:count]
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab] by transformers."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@torch.no_grad()
def reference_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The likeliest continuation by transformers' own `generate`, which is told to ignore end tokens."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    continuation: list[int] = out[0, len(prompt) :].tolist()
    return continuation
