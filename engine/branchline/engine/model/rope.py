"""Rotary position tables (Su et al. 2021, arXiv:2104.09864), in the rotate-half layout of Hugging Face's models."""

from __future__ import annotations

import math

import torch

from branchline.engine.model.config import ModelConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, [head_dim / 2] float32, scaled as `rope.kind` says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "divisors":
            return frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
        case "llama3":
            return _llama3(rope, frequencies)


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones stay, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    blend = (rope.original_context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def rope_table(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """[context_length, head_dim] float32: for each position the cosines of its pairs, then the sines."""
    positions = torch.arange(config.context_length, dtype=torch.int64).float()
    angles = torch.outer(positions, inverse_frequencies(config.rope, config.head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def rope_factors(table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of the positions, each [T, 1, head_dim] float32, for `apply_rope`.

    The first half of `sin` is negated, so that rotating is `x · cos + swap_halves(x) · sin`.
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, head_dim] by factors from `rope_factors`; the arithmetic is float32. Does not modify x."""
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
