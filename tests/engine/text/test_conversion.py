"""Conversions by transformers: small GGUF files made here, and a folder without a tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer as Backend

from branchline.engine.errors import CorruptModelError, UnsupportedModelError
from branchline.engine.model.tokenizer import load_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers' own imports

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(file: Path, model: str | None, tokens: list[str], types: list[int], **more: object) -> Path:
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(1)
    if model is not None:
        writer.add_tokenizer_model(model)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
    for key, value in more.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "f",
        "o",
        "x",
        "fo",
        "fox",
        "▁fox",
        "<|eot_id|>",
    ]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 7, CONTROL]
    file = write(
        tmp_path / "m.gguf",
        "llama",
        pieces,
        types,
        token_scores=[0.0] * 260 + [-4.0, -4.0, -4.0, -3.0, -2.0, -1.0, 0.0],
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
    )
    tokenizer = load_tokenizer("gguf", file)
    ids = tokenizer.encode("fox fox", add_bos=True)
    fox = pieces.index("▁fox")
    assert ids == [1, fox, fox]
    assert tokenizer.decode(ids) == "fox fox"
    assert tokenizer.eos_ids == {2, len(pieces) - 1}  # the turn's end too, though the metadata name the document's
    assert tokenizer.decode(tokenizer.encode("fox 你", add_bos=True)) == "fox 你"
    assert tokenizer.id_to_text(fox) == " fox"


def test_kinds_that_cannot_be_converted(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="can't be converted"):
        load_tokenizer("gguf", write(tmp_path / "a.gguf", "rwkv", ["a"], [NORMAL]))
    with pytest.raises(CorruptModelError, match="has no tokenizer"):
        load_tokenizer("gguf", write(tmp_path / "b.gguf", None, [], []))
    assert not (tmp_path / "cache").exists()


def test_folder_with_a_vocabulary_and_merges(tmp_path: Path, byte_level_backend: Backend) -> None:
    model = json.loads(byte_level_backend.to_str())["model"]
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(merge) for merge in model["merges"]) + "\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "</s>"})
    )
    tokenizer = load_tokenizer("hf", folder)
    text = "The quick brown fox, 你好"
    assert tokenizer.encode(text, add_bos=False) == byte_level_backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.eos_ids == {1}
    again = load_tokenizer("hf", folder)
    assert again.encode(text, add_bos=False) == tokenizer.encode(text, add_bos=False)
    assert len(list((tmp_path / "cache" / "branchline" / "tokenizers").iterdir())) == 1
