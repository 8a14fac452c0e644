"""Text as it comes, token by token: whole characters, no part of a stop string, the same as all at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from branchline.engine.model.detokenizer import Detokenizer, StopFilter
from branchline.engine.model.tokenizer import Tokenizer

from .conftest import id_of

HARD = [
    "Plain words, and more of them.",
    "👩‍🚀👨‍👩‍👧‍👦🇩🇪 emoji",
    "你好，世界。今天天气怎么样？",
    "e\u0301 a\u0308\u0304 combining, and the mark alone \u0301",
    "नमस्ते دنیا שלום ไทย",
    "  two leading spaces, \t a tab\n\n",
    "a literal \ufffd in the text\ufffd",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff",
]


@pytest.fixture(params=["byte_level", "byte_fallback", "smollm"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def stream(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = (), context: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, stop, context or [])
    pieces = [detokenizer.push([token]) for token in ids]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("text", HARD)
def test_joined_pieces_are_the_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_bos=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", HARD)
def test_several_tokens_at_once_give_the_same(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_bos=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(ids[i : i + 3]) for i in range(0, len(ids), 3)]
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(ids)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=40))
def test_any_bytes(byte_level: Tokenizer, data: bytes) -> None:
    """Invalid bytes, also at the end, become what the decode of all tokens at once makes of them."""
    spelled = {byte: id_of(byte_level, char) for byte, char in _byte_alphabet().items()}
    ids = [spelled[byte] for byte in data]
    assert "".join(stream(byte_level, ids)) == data.decode("utf-8", errors="replace") == byte_level.decode(ids)


def test_first_bytes_of_a_character_at_the_end_come_out_at_the_end_only(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("fox👩", add_bos=False)[:-1]
    pieces = stream(byte_level, ids)
    assert "".join(pieces[:-1]) == "fox"
    assert pieces[-1] == "\ufffd"


def test_an_invalid_byte_does_not_take_back_a_character(byte_fallback: Tokenizer) -> None:
    """The byte-fallback decoder turns a run of bytes into nothing but U+FFFD if any of it is invalid."""
    ids = [3 + byte for byte in "你".encode()] + [3 + 0xFF, 3 + 0xFF, *byte_fallback.encode("a", add_bos=False)]
    pieces = stream(byte_fallback, ids)
    assert "".join(pieces).startswith("你\ufffd")
    assert "".join(pieces).endswith("a")


def test_endless_invalid_bytes_are_given_out_in_time(byte_level: Tokenizer) -> None:
    spelled = id_of(byte_level, _byte_alphabet()[0xFF])
    pieces = stream(byte_level, [spelled] * 1000)
    assert "".join(pieces) == "\ufffd" * 1000
    assert sum(len(piece) for piece in pieces[:200]) > 100


def test_leading_space_depends_on_the_context(byte_fallback: Tokenizer) -> None:
    fox = id_of(byte_fallback, "▁fox")
    the = id_of(byte_fallback, "▁The")
    assert "".join(stream(byte_fallback, [fox, fox])) == "fox fox"
    assert "".join(stream(byte_fallback, [fox, fox], context=[1, the])) == " fox fox"


def test_a_character_begun_in_the_context_is_given_out_whole(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("fox👩", add_bos=False)
    assert "".join(stream(byte_level, ids[-1:], context=ids[:-1])) == "👩"


def test_special_tokens_are_no_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>The<|im_end|> fox</s>", add_bos=True)
    assert "".join(stream(byte_level, ids)) == "The fox"
    assert stream(byte_level, [3] * 1000) == [""] * 1001


def test_text_ends_before_the_stop_string(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("quick fox.\nquick", add_bos=False)
    detokenizer = Detokenizer(tokenizer, ["x.\nq"])
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces).lstrip() == "quick fo"
    assert detokenizer.stopped == "x.\nq"
    assert detokenizer.push(ids) == ""
    assert detokenizer.finish() == ""


def test_what_could_have_begun_a_stop_string_comes_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("quick fox", add_bos=False)
    detokenizer = Detokenizer(tokenizer, ["oxen", "fog"])
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces).lstrip() == "quick f"
    assert detokenizer.finish() == "ox"
    assert detokenizer.stopped is None


def first_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """By trying every end in turn."""
    for end in range(len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_stop_filter_against_the_naive_one(text: str, stop: list[str], seed: int) -> None:
    rng = random.Random(seed)
    filtered, given_out, at = StopFilter(stop), "", 0
    expected, found = first_stop(text, stop)
    while at < len(text):
        step = rng.randint(1, 4)
        given_out += filtered.push(text[at : at + step])
        at += step
        assert expected.startswith(given_out)
        so_far = text[:at]
        if filtered.stopped is None:  # nothing is held back that couldn't begin a stop string
            held = so_far[len(given_out) :]
            assert not held or any(string.startswith(held) for string in stop)
    assert filtered.stopped == found
    assert given_out + filtered.finish() == expected


def test_a_long_stop_string_costs_no_more_than_a_short_one() -> None:
    filtered = StopFilter(["a" * 100_000 + "b"] * 4)
    text = "a" * 50_000
    assert filtered.push(text) == ""
    assert filtered.push("c") == text + "c"


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
