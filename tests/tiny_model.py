"""A tiny random Llama with a byte-level tokenizer and a ChatML template, written as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> int:
    """Write a tokenizer whose tokens are the 256 bytes and three special tokens. Returns the vocabulary's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "add_bos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return int(tokenizer.get_vocab_size())


def write_tiny_model(folder: Path, *, seed: int = 0, context_length: int = 4096) -> Path:
    """Write a Llama of 2 layers, hidden size 64, 4 query and 2 key/value heads. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(folder)
    hidden, intermediate, num_layers, head_dim, num_heads, num_kv_heads = 64, 128, 2, 16, 4, 2
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(float(1.5 / shape[-1] ** 0.5))

    weights = {
        "model.embed_tokens.weight": torch.randn((vocab_size, hidden), generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": random(vocab_size, hidden),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
            prefix + "self_attn.q_proj.weight": random(num_heads * head_dim, hidden),
            prefix + "self_attn.k_proj.weight": random(num_kv_heads * head_dim, hidden),
            prefix + "self_attn.v_proj.weight": random(num_kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": random(hidden, num_heads * head_dim),
            prefix + "mlp.gate_proj.weight": random(intermediate, hidden),
            prefix + "mlp.up_proj.weight": random(intermediate, hidden),
            prefix + "mlp.down_proj.weight": random(hidden, intermediate),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": vocab_size - 1,
        "bos_token_id": None,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
