"""From text to token ids and back, over the `tokenizers` library. `transformers` is imported only to convert, once a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import tokenizers

from branchline.engine.errors import CorruptModelError, InvalidParameterError, ModelNotFoundError, UnsupportedModelError
from branchline.engine.model.tokenizer_gguf import TokenizerRecord, converted_folder, converted_gguf

# How files spell the role of a special token; chat templates see the same names.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer. `encode`, `decode` and the look-ups may be called from any thread.

    Attributes:
        bos_id: the beginning token, or None.
        eos_ids: tokens that end a generation.
        special_ids: tokens that are markup, not text.
        special_texts: role ("bos_token", …) to the token's text, for chat templates.
        chat_template: the model's own, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        add_bos: bool | None,
        eos_ids: Iterable[int],
        special_texts: dict[str, str],
        chat_template: str | None,
    ) -> None:
        """Takes `backend`. `add_bos` None: as its post-processor does. Raises CorruptModelError on ids out of range."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_texts = special_texts
        self.chat_template = chat_template
        self.bos_id = backend.token_to_id(special_texts["bos_token"]) if "bos_token" in special_texts else None
        self.eos_ids = frozenset(eos_ids)
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        outside = sorted(i for i in self.eos_ids if not 0 <= i < self.vocab_size)
        if outside:
            raise CorruptModelError(f"end tokens {outside} are outside the tokenizer's vocabulary of {self.vocab_size}")
        if add_bos is None:
            add_bos = self.bos_id is not None and backend.encode("").ids[:1] == [self.bos_id]
        self._add_bos = add_bos and self.bos_id is not None

    def encode(self, text: str, add_bos: bool) -> list[int]:
        """Token ids of `text`; special tokens written in it are parsed.

        Args:
            add_bos: put the beginning token first, if the model wants one and the text doesn't begin with it already.

        Raises InvalidParameterError if `text` holds half of a surrogate pair, which no token can stand for.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError as err:
            at = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
            if at is None:
                raise
            raise InvalidParameterError(
                f"the text isn't valid Unicode: character {at} is half of a surrogate pair", param="text"
            ) from err
        if add_bos and self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`. Bytes that make no character become U+FFFD."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special)
        return text

    def id_to_text(self, token: int) -> str:
        """Text of one token as it stands within a text: a leading space stays, a part of a character is U+FFFD."""
        text = self.decode((token,), skip_special=False)
        spelled = self._backend.id_to_token(token) or ""
        # SentencePiece decoders drop the space in front of the first token
        return f" {text}" if spelled.startswith("▁") and not text.startswith(" ") else text


def load_tokenizer(kind: Literal["gguf", "hf"], path: str | Path) -> Tokenizer:
    """Load a model's tokenizer.

    Args:
        kind: "gguf": `path` is a .gguf file, converted once and kept in the user's cache; "hf": a Hugging Face folder.

    Raises:
        ModelNotFoundError: there is no such file or folder, or the folder has no tokenizer.
        CorruptModelError: its files can't be read.
        UnsupportedModelError: a tokenizer of a kind that can't be converted.
    """
    path = Path(path)
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such file or folder")
    if kind == "gguf":
        return _from_record(converted_gguf(path), str(path))
    if (path / "tokenizer.json").is_file():
        return _from_record(_read_folder(path), str(path))
    if any((path / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")):
        return _from_record(converted_folder(path), str(path))
    raise ModelNotFoundError(f"{path}: no tokenizer.json (nor tokenizer.model, vocab.json) in this folder")


def _from_record(record: TokenizerRecord, where: str) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(record.tokenizer)
    except Exception as err:  # the library raises plain Exception
        raise CorruptModelError(f"{where}: the tokenizer can't be read: {err}") from err
    eos_ids = set(record.eos_ids)
    eos = backend.token_to_id(record.special_texts["eos_token"]) if "eos_token" in record.special_texts else None
    if eos is not None:
        eos_ids.add(eos)
    return Tokenizer(
        backend,
        add_bos=record.add_bos,
        eos_ids=eos_ids,
        special_texts=record.special_texts,
        chat_template=record.chat_template,
    )


def _read_folder(folder: Path) -> TokenizerRecord:
    settings = _read_json(folder / "tokenizer_config.json")
    texts = {}
    for source in (_read_json(folder / "special_tokens_map.json"), settings):
        for name in SPECIAL_NAMES:
            token = source.get(name)
            token = token.get("content") if isinstance(token, dict) else token  # an AddedToken, or its text alone
            if isinstance(token, str):
                texts[name] = token
    eos_ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(folder / name).get("eos_token_id")
        eos_ids.update([eos] if isinstance(eos, int) else eos or [])
        if eos_ids:
            break
    add_bos = settings.get("add_bos_token")
    return TokenizerRecord(
        tokenizer=(folder / "tokenizer.json").read_text(encoding="utf-8"),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        eos_ids=tuple(sorted(eos_ids)),
        special_texts=texts,
        chat_template=_chat_template(folder, settings),
    )


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, named
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise UnsupportedModelError(f"{folder}: chat_template is a {type(template).__name__}, expected a string or a list")
    return template


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, OSError) as err:
        raise CorruptModelError(f"{file}: not a JSON object: {err}") from err
