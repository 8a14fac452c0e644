"""A model of random weights, so small that a step costs next to nothing: the engine around it is the real one.

`engine_factory="branchline.load.simulated:SimulatedEngine"` and `min_step_s` make a replica that steps at a steady rate,
however many branches run: what is measured then is everything but the model.
"""

from __future__ import annotations

import json
import string
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from branchline.engine.config import EngineConfig
from branchline.engine.engine import Engine

FACTORY = "branchline.load.simulated:SimulatedEngine"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, INTERMEDIATE, HEAD_DIM, HEADS = 32, 32, 32, 1
CONTEXT_LENGTH = 1 << 17


class SimulatedEngine(Engine):
    """`load` ignores the settings' model and makes this one. It answers nonsense, the same nonsense each time."""

    @classmethod
    def load(cls, config: EngineConfig, progress: Callable[[str], None] | None = None) -> Engine:
        """See `Engine.load`."""
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder))
            name = config.served_name or "simulated"
            return Engine.load(msgspec.structs.replace(config, model=folder, served_name=name), progress)


def write_model(folder: Path) -> None:
    """A Llama of one layer over bytes, as a Hugging Face folder. What it finds likeliest is always a letter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocab_size = int(tokenizer.get_vocab_size())
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab_size,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)

    def matrix(rows: int, cols: int) -> npt.NDArray[np.float32]:
        return random.standard_normal((rows, cols), dtype=np.float32) * np.float32(1.5 / cols**0.5)

    layer = "model.layers.0."
    ones = np.ones(HIDDEN, np.float32)
    head = matrix(vocab_size, HIDDEN)
    letters = set(string.ascii_lowercase)
    head[[i for i in range(vocab_size) if tokenizer.id_to_token(i) not in letters]] = 0.0
    weights = {
        "model.embed_tokens.weight": matrix(vocab_size, HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": head,
        layer + "input_layernorm.weight": ones,
        layer + "post_attention_layernorm.weight": ones,
        layer + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.k_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.v_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        layer + "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
        layer + "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
        layer + "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
    }
    save_file(weights, folder / "model.safetensors")
