"""Hashes of prefixes: equal exactly as far as contents are, and what a replica remembers of them is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from branchline.engine.types import Chat, Content, Message, Text, TokenIds
from branchline.orchestrator.prefix import (
    BYTES_PER_TOKEN,
    GROWTH,
    HASH_BYTES,
    LENGTHS,
    MAX_HASHES,
    NO_PREFIX,
    PrefixDigest,
    prefix_of,
    unpack,
)


def digest_of(*contents: Content, capacity_tokens: int = 10**6) -> frozenset[bytes]:
    digest = PrefixDigest(capacity_tokens)
    for content in contents:
        digest.note(prefix_of(content))
    return unpack(digest.pack())


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_two_texts_share_what_is_equal_to_a_quarter(shared: int, one: int, other: int) -> None:
    first, second = Text("s" * shared + "a" * one), Text("s" * shared + "b" * other)
    guess = prefix_of(second).shared_tokens(digest_of(first)) * BYTES_PER_TOKEN
    truth = shared if one and other else shared + min(one, other) if one == other == 0 else shared
    assert guess <= truth
    if truth >= LENGTHS[0]:
        assert guess > truth / GROWTH - BYTES_PER_TOKEN - 1


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=600)), min_size=1, max_size=6))
def test_a_longer_conversation_goes_on_with_the_hashes_of_the_shorter(messages: list[tuple[str, str]]) -> None:
    made = tuple(Message(role=role, content=content) for role, content in messages)
    for n in range(1, len(made)):
        shorter, longer = prefix_of(Chat(messages=made[:n])), prefix_of(Chat(messages=made))
        assert longer.hashes[: len(shorter.hashes)] == shorter.hashes
        assert longer.num_bytes > shorter.num_bytes


def test_what_isnt_equal_has_other_hashes() -> None:
    contents: list[Content] = [
        Text("x" * 400),
        TokenIds(tuple(range(100))),
        TokenIds((2**63, *range(99))),
        Chat(messages=(Message(role="user", content="x" * 400),)),
        Chat(messages=(Message(role="system", content="x" * 400),)),
        Chat(messages=(Message(role="user", content="x" * 400),), tools=({"name": "f"},)),
    ]
    firsts = [prefix_of(content).hashes[0] for content in contents]
    firsts.append(prefix_of(contents[0]).of_tenant("a").hashes[0])
    firsts.append(prefix_of(contents[0]).of_tenant("b").hashes[0])
    assert len(set(firsts)) == len(firsts)
    assert prefix_of(contents[0]).of_tenant("") == prefix_of(contents[0])
    assert prefix_of(Text("short")).hashes == ()
    assert NO_PREFIX.shared_tokens(digest_of(contents[0])) == 0


def test_a_digest_forgets_what_was_used_longest_ago_and_ends_before_beginnings() -> None:
    old, new = Text("a" * 4000), Text("b" * 4000)
    held = digest_of(old, new, old, capacity_tokens=1200)
    assert prefix_of(old).shared_tokens(held) > 900
    assert 0 < prefix_of(new).shared_tokens(held) < 250
    tiny = digest_of(old, capacity_tokens=100)
    assert prefix_of(old).shared_tokens(tiny) == LENGTHS[2] // BYTES_PER_TOKEN


def test_a_digest_is_bounded() -> None:
    digest = PrefixDigest(10**9)
    for i in range(300):
        digest.note(prefix_of(Text(f"{i}|" * 500)))
    assert len(digest.pack()) == MAX_HASHES * HASH_BYTES
