"""Converts the tokenizer of a GGUF file (or of an old folder) to a `tokenizer.json`, once, and keeps it in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from branchline.engine.errors import CorruptModelError, UnsupportedModelError
from branchline.engine.model.gguf_file import GGUFFile

log = logging.getLogger(__name__)

CONVERSION = 1  # raise it when the same file would convert to something else
_HASHED_BYTES = 1 << 20

# Pre-tokenizers that split off every digit and then work as GPT-2's (llama.cpp's table); transformers' converter doesn't
# know them and would take GPT-2's alone, which joins spaces and digits differently.
DIGITS_THEN_GPT2 = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
# Texts of control tokens that end a turn or a document, whichever of them the metadata names as the end token.
_END_TEXTS = frozenset(
    {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>"}
)
_CONTROL = 3  # token_type of control tokens
_SPECIAL_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class TokenizerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a tokenizer is made of. `tokenizer` is the text of a tokenizer.json; `add_bos` None: as that says."""

    tokenizer: str
    add_bos: bool | None
    eos_ids: tuple[int, ...]
    special_texts: dict[str, str]
    chat_template: str | None


def converted_gguf(file: Path) -> TokenizerRecord:
    """The tokenizer of a GGUF file, from the cache if it is there. Raises CorruptModelError, UnsupportedModelError."""
    return _cached(file, lambda: _convert_gguf(file))


def converted_folder(folder: Path) -> TokenizerRecord:
    """The tokenizer of a Hugging Face folder without tokenizer.json. Raises CorruptModelError, UnsupportedModelError."""
    named = [folder / name for name in ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")]
    return _cached(next(file for file in named if file.is_file()), lambda: _convert_folder(folder))


def cache_folder() -> Path:
    """Where converted tokenizers are kept. Not made here."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "branchline" / "tokenizers"


def _cached(source: Path, convert: Callable[[], TokenizerRecord]) -> TokenizerRecord:
    entry = cache_folder() / f"{_key(source)}.json"
    try:
        digest, _, raw = entry.read_bytes().partition(b"\n")
        if hashlib.sha256(raw).hexdigest().encode() == digest:
            return msgspec.json.decode(raw, type=TokenizerRecord)
        log.warning("%s is damaged; converting the tokenizer again", entry)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.DecodeError) as err:
        log.warning("%s can't be read (%s); converting the tokenizer again", entry, err)
    record = convert()
    raw = msgspec.json.encode(record)
    try:
        _write_atomically(entry, hashlib.sha256(raw).hexdigest().encode() + b"\n" + raw)
    except OSError as err:
        log.warning("the converted tokenizer can't be kept in %s (%s); it will be converted at every start", entry.parent, err)
    return record


def _key(source: Path) -> str:
    """Names a file's content without reading all of it: size, time of change and first MiB (GGUF's metadata come first)."""
    stat = source.stat()
    digest = hashlib.sha256(f"{CONVERSION} {version('transformers')} {stat.st_size} {stat.st_mtime_ns}".encode())
    with source.open("rb") as opened:
        digest.update(opened.read(_HASHED_BYTES))
    return digest.hexdigest()


def _write_atomically(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.stem[:16], suffix=".part")
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(data)
        Path(temporary).replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def _convert_gguf(file: Path) -> TokenizerRecord:
    metadata = _gguf_metadata(file)
    tokens: list[str] = metadata["tokens"]
    fast = _auto_tokenizer(file, directory=file.parent, gguf_file=file.name)
    backend = fast.backend_tokenizer
    pre = metadata.get("pre")
    if metadata["model"] == "gpt2" and pre in DIGITS_THEN_GPT2:
        from tokenizers import pre_tokenizers

        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    ends = {metadata[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in metadata}
    types = metadata.get("token_type", [])
    ends.update(i for i, (text, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL and text in _END_TEXTS)
    texts = {
        name: tokens[metadata[f"{key}_token_id"]]
        for name, key in _SPECIAL_KEYS.items()
        if metadata.get(f"{key}_token_id", len(tokens)) < len(tokens)
    }
    # A SentencePiece vocabulary that doesn't say otherwise begins with its beginning token.
    add_bos = metadata.get("add_bos_token", metadata["model"] == "llama")
    return TokenizerRecord(
        tokenizer=backend.to_str(),
        add_bos=bool(add_bos),
        eos_ids=tuple(sorted(ends)),
        special_texts=texts,
        chat_template=metadata.get("chat_template"),
    )


def _gguf_metadata(file: Path) -> dict[str, Any]:
    """The metadata under "tokenizer.", by the last part of their names."""
    wanted = (
        "model", "pre", "tokens", "token_type", "add_bos_token", "chat_template",
        *(f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding")),
    )  # fmt: skip
    found: dict[str, Any] = {}
    metadata = GGUFFile(file).metadata
    for name in wanted:
        key = f"tokenizer.{name}" if name == "chat_template" else f"tokenizer.ggml.{name}"
        if key in metadata:
            found[name] = metadata[key]
    if "model" not in found or "tokens" not in found:
        raise CorruptModelError(f"{file}: the GGUF file has no tokenizer (tokenizer.ggml.model, tokenizer.ggml.tokens)")
    return found


def _convert_folder(folder: Path) -> TokenizerRecord:
    fast = _auto_tokenizer(folder, directory=folder)
    add_bos = getattr(fast, "add_bos_token", None)
    texts = {name: str(token) for name, token in fast.special_tokens_map.items() if isinstance(token, str)}
    return TokenizerRecord(
        tokenizer=fast.backend_tokenizer.to_str(),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        eos_ids=(),
        special_texts=texts,
        chat_template=fast.chat_template if isinstance(fast.chat_template, str) else None,
    )


def _auto_tokenizer(source: Path, directory: Path, **options: str) -> Any:
    log.info("converting the tokenizer of %s (once; a few seconds)", source)
    from transformers import AutoTokenizer

    try:
        fast = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, **options)
    except Exception as err:  # whatever the converter meets in the file
        raise UnsupportedModelError(f"{source}: the tokenizer can't be converted: {err}") from err
    if not hasattr(fast, "backend_tokenizer"):
        raise UnsupportedModelError(f"{source}: {type(fast).__name__} has no form that the tokenizers library can run")
    return fast
