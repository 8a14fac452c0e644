"""Tokenizers from GGUF files and from Hugging Face folders, and the cache of conversions."""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from branchline.engine.errors import CorruptModelError, InvalidParameterError, ModelNotFoundError, UnsupportedModelError
from branchline.engine.model import tokenizer_gguf
from branchline.engine.model.tokenizer import Tokenizer, load_tokenizer

from .conftest import SAMPLE, id_of

TEXTS = [
    *SAMPLE,
    "",
    " ",
    "   leading and trailing   ",
    "a  2018\t\t12   34",
    "3.14159 and 1,000,000 and x1y2",
    "²³ ½ ٣ Ⅷ",
    "👩‍🚀👨‍👩‍👧‍👦 🇩🇪",
    "I'll we've they'd it's don't",
    "line\r\nline\n\n\n  line",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b",
    "\u200b\u00a0\ufeff",
    "x" * 500,
]


def test_gguf_splits_as_the_vocabulary_was_trained(smollm: Tokenizer, gguf: Path) -> None:
    """Against SmolLM2's published rule (each digit alone, then GPT-2's) over the file's own vocabulary and merges."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    expected = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    expected.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == 3])
    expected.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(
                Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    expected.decoder = decoders.ByteLevel()
    for text in TEXTS:
        ids = smollm.encode(text, add_bos=False)
        assert ids == expected.encode(text, add_special_tokens=False).ids, text
        assert smollm.decode(ids, skip_special=False) == text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers' own imports
def test_gguf_agrees_with_transformers_where_its_converter_knows_the_rule(smollm: Tokenizer, gguf: Path) -> None:
    """transformers 5 takes GPT-2's rule for "smollm": the same ids unless several spaces or a non-ASCII digit meet a digit."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    for text in TEXTS:
        if text not in ("a  2018\t\t12   34", "²³ ½ ٣ Ⅷ"):
            assert smollm.encode(text, add_bos=True) == theirs(text).input_ids, text


def test_gguf_metadata(smollm: Tokenizer) -> None:
    assert smollm.vocab_size == 49152
    assert smollm.bos_id == 1
    assert {2, 0} <= smollm.eos_ids <= smollm.special_ids
    assert smollm.special_texts["eos_token"] == "<|im_end|>"
    assert smollm.chat_template is not None
    assert "You are a helpful AI assistant named SmolLM" in smollm.chat_template
    assert smollm.encode("Hi", add_bos=True) == smollm.encode("Hi", add_bos=False)  # this model wants no beginning token


def test_second_load_takes_the_cache_and_is_quick(
    smollm: Tokenizer, gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = (
        "import sys, time; began = time.process_time()\n"
        "from branchline.engine.model.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer('gguf', {str(gguf)!r})\n"
        "seconds = time.process_time() - began\n"
        "print(seconds, 'transformers' in sys.modules, 'torch' in sys.modules, tokenizer.encode('Hi 12', True))"
    )
    environment = {"XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache"), "PYTHONPATH": ":".join(sys.path)}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    ).stdout
    seconds, transformers, torch, ids = printed.split(maxsplit=3)
    assert transformers == torch == "False"
    assert json.loads(ids) == smollm.encode("Hi 12", True)
    assert float(seconds) < 2  # of processor time; 0.3 s as a rule, a conversion takes 6 to 10 s


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, byte_level_backend: Backend) -> list[Path]:
    """Conversions that were done; instead of the real one, a small tokenizer."""
    done: list[Path] = []

    def convert(file: Path) -> tokenizer_gguf.TokenizerRecord:
        done.append(file)
        return tokenizer_gguf.TokenizerRecord(
            tokenizer=byte_level_backend.to_str(), add_bos=False, eos_ids=(1,), special_texts={}, chat_template=None
        )

    monkeypatch.setattr(tokenizer_gguf, "_convert_gguf", convert)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return done


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "branchline" / "tokenizers").iterdir())


def test_a_file_is_converted_once(counted: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF one")
    assert load_tokenizer("gguf", file).encode("a fox", False) == load_tokenizer("gguf", file).encode("a fox", False)
    assert counted == [file]
    assert [entry.suffix for entry in entries(tmp_path)] == [".json"]  # no temporary file is left


def test_a_changed_file_is_converted_again(counted: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF one")
    load_tokenizer("gguf", file)
    file.write_bytes(b"GGUF two")
    load_tokenizer("gguf", file)
    assert len(counted) == 2


@pytest.mark.parametrize("damage", [b"", b"\n", b"not json", "flip", "cut"])
def test_a_damaged_entry_is_made_again(counted: list[Path], tmp_path: Path, damage: bytes | str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF one")
    load_tokenizer("gguf", file)
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    if damage == "flip":
        damage = whole.replace(b'"fox"', b'"fix"') if b'"fox"' in whole else whole.replace(b"a", b"b", 1)
    elif damage == "cut":
        damage = whole[: len(whole) // 2]
    assert isinstance(damage, bytes)
    entry.write_bytes(damage)
    load_tokenizer("gguf", file)
    assert len(counted) == 2
    assert entry.read_bytes() == whole
    load_tokenizer("gguf", file)
    assert len(counted) == 2


def test_a_cache_that_cannot_be_written_is_only_slow(
    counted: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF one")
    (tmp_path / "cache").write_bytes(b"a file where the folder should be")
    assert load_tokenizer("gguf", file).encode("a fox", False)
    assert "converted at every start" in caplog.text


def test_missing_and_corrupt_files_are_typed_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ModelNotFoundError, match="no such file"):
        load_tokenizer("gguf", tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\3\0\0\0" + b"and then not really, " * 20)
    with pytest.raises(CorruptModelError, match=r"bad\.gguf"):
        load_tokenizer("gguf", tmp_path / "bad.gguf")
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        load_tokenizer("hf", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptModelError, match="can't be read"):
        load_tokenizer("hf", tmp_path)


def folder(path: Path, backend: Backend, **files: Any) -> Path:
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_hf_folder(tmp_path: Path, byte_level_backend: Backend) -> None:
    model = folder(
        tmp_path / "m",
        byte_level_backend,
        tokenizer_config={
            "bos_token": {"content": "<s>", "__type": "AddedToken"},
            "eos_token": "<|im_end|>",
            "add_bos_token": True,
            "chat_template": "{{ messages }}",
        },
        generation_config={"eos_token_id": [1, 3]},
    )
    tokenizer = load_tokenizer("hf", model)
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_ids == {1, 3}
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert tokenizer.special_texts == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert tokenizer.chat_template == "{{ messages }}"
    ids = tokenizer.encode("The fox<|im_end|>", add_bos=True)
    assert ids[0] == 0
    assert ids[-1] == 3
    assert tokenizer.encode("The fox<|im_end|>", add_bos=False) == ids[1:]
    assert tokenizer.encode("<s>The fox<|im_end|>", add_bos=True) == ids  # not twice
    assert tokenizer.decode(ids) == "The fox"


def test_chat_template_may_be_a_file_of_its_own_or_one_of_several(tmp_path: Path, byte_level_backend: Backend) -> None:
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    model = folder(tmp_path / "m", byte_level_backend, tokenizer_config={"chat_template": several})
    assert load_tokenizer("hf", model).chat_template == "D"
    (model / "chat_template.jinja").write_text("J")
    assert load_tokenizer("hf", model).chat_template == "J"
    wrong = folder(tmp_path / "w", byte_level_backend, tokenizer_config={"chat_template": 5})
    with pytest.raises(UnsupportedModelError, match="chat_template is a int"):
        load_tokenizer("hf", wrong)


@pytest.mark.parametrize("explicit", [None, False])
def test_beginning_token_is_as_the_post_processor_says_unless_the_settings_do(
    tmp_path: Path, byte_level_backend: Backend, explicit: bool | None
) -> None:
    backend = Backend.from_str(byte_level_backend.to_str())
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])
    settings: dict[str, object] = {"bos_token": "<s>"}
    if explicit is not None:
        settings["add_bos_token"] = explicit
    tokenizer = load_tokenizer("hf", folder(tmp_path / "m", backend, tokenizer_config=settings))
    assert (tokenizer.encode("fox", add_bos=True)[0] == 0) is (explicit is None)
    assert tokenizer.encode("fox", add_bos=False)[0] != 0


def test_end_token_outside_the_vocabulary_is_a_corrupt_model(tmp_path: Path, byte_level_backend: Backend) -> None:
    model = folder(tmp_path / "m", byte_level_backend, generation_config={"eos_token_id": 5000})
    with pytest.raises(CorruptModelError, match="5000"):
        load_tokenizer("hf", model)


def test_text_of_single_tokens(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    assert byte_fallback.id_to_text(byte_fallback.encode("▁", False)[0]) == " "
    word = id_of(byte_fallback, "▁fox")
    assert byte_fallback.id_to_text(word) == " fox"
    assert byte_fallback.id_to_text(2) == "</s>"
    assert byte_fallback.id_to_text(3 + 0xE4) == "\ufffd"
    assert byte_level.id_to_text(3) == "<|im_end|>"


def test_half_a_surrogate_pair_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidParameterError, match="character 2 is half of a surrogate pair"):
        byte_level.encode("ab\ud83d", add_bos=False)


def test_many_threads_encode_at_once(byte_level: Tokenizer) -> None:
    texts = [text * 20 for text in TEXTS]
    alone = [byte_level.encode(text, add_bos=True) for text in texts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert list(pool.map(lambda text: byte_level.encode(text, add_bos=True), texts)) == alone
