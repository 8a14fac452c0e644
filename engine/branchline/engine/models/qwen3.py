"""Qwen3, dense: Llama with q and k normalised per head (Yang et al. 2025, arXiv:2505.09388)."""

from branchline.engine.models.base import Architecture
from branchline.engine.models.llama import LlamaDecoder

ARCHITECTURE = Architecture(decoder=LlamaDecoder, qk_norm=True, window_needs_flag=True)
