"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v (Yang et al. 2024, arXiv:2407.10671)."""

from branchline.engine.models.base import Architecture
from branchline.engine.models.llama import LlamaDecoder

ARCHITECTURE = Architecture(decoder=LlamaDecoder, qkv_bias=True, window_needs_flag=True)
