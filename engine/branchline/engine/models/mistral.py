"""Mistral 7B and its kin: Llama with a sliding window in v0.1 (Jiang et al. 2023, arXiv:2310.06825). In GGUF it is "llama"."""

from branchline.engine.models.base import Architecture
from branchline.engine.models.llama import LlamaDecoder

ARCHITECTURE = Architecture(decoder=LlamaDecoder, gguf=False)
