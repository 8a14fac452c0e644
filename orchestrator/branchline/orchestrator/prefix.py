"""Prefixes of contents as hashes: what a replica's prefix cache probably holds, and how much of a new content that is.

A content is hashed at lengths that grow by a quarter (256 bytes, 320, 400, …), from its text: whoever places a request has no
tokenizer at hand. Two contents share the hash of a length when they are the same up to there, so the longest length that
both have tells, to a quarter, what they share. This is a guide for placement alone: which K/V are used again is decided in
the engine, by token.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Container, Iterator
from typing import Annotated, Final

import msgspec

from branchline.engine.types import Chat, Content, Text, TokenIds

BYTES_PER_TOKEN: Final = 4
"""Of text, about; token ids are hashed as four bytes each."""
GROWTH: Final = 1.25
FIRST_BYTES: Final = 256
MAX_BYTES: Final = 4 << 20
HASH_BYTES: Final = 8
MAX_KEY_BYTES: Final = 64
MAX_HASHES: Final = 2048
"""Most hashes that a replica publishes: 16 KiB, some 60 contents of 100,000 tokens that share nothing."""


def _lengths() -> Iterator[int]:
    length = float(FIRST_BYTES)
    while length <= MAX_BYTES:
        yield int(length)
        length *= GROWTH


LENGTHS: Final = tuple(_lengths())


class Prefix(msgspec.Struct, frozen=True, array_like=True):
    """A content as placement sees it: its hashes at `LENGTHS`, as far as it reaches, and its length in bytes."""

    hashes: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=len(LENGTHS))] = ()
    num_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        """About so many tokens."""
        return self.num_bytes // BYTES_PER_TOKEN

    def of_tenant(self, tenant: str) -> Prefix:
        """The same content as this tenant's: prefix caches keep tenants apart."""
        if not tenant:
            return self
        key = tenant.encode()[:MAX_KEY_BYTES]
        hashes = tuple([hashlib.blake2b(given, digest_size=HASH_BYTES, key=key).digest() for given in self.hashes])
        return Prefix(hashes, self.num_bytes)

    def shared_tokens(self, held: Container[bytes]) -> int:
        """About how many of the tokens are in what somebody holds."""
        for i in range(len(self.hashes) - 1, -1, -1):
            if self.hashes[i] in held:
                return min(LENGTHS[i], self.num_bytes) // BYTES_PER_TOKEN
        return 0


NO_PREFIX: Final = Prefix()


def prefix_of(content: Content) -> Prefix:
    """Hash a content.

    For chats the messages are hashed in order, so that a longer conversation goes on with the hashes of a shorter one.
    """
    running = hashlib.blake2b(digest_size=HASH_BYTES)
    hashes: list[bytes] = []
    total = 0
    for part in _parts(content):
        start = 0
        while len(hashes) < len(LENGTHS) and total + len(part) - start >= LENGTHS[len(hashes)]:
            end = start + LENGTHS[len(hashes)] - total
            running.update(part[start:end])
            total += end - start
            start = end
            hashes.append(running.digest())
        if len(hashes) < len(LENGTHS):
            running.update(part[start:])
        total += len(part) - start
    return Prefix(tuple(hashes), total)


def _parts(content: Content) -> Iterator[bytes]:
    match content:
        case Text():
            yield content.text.encode("utf-8", "surrogatepass")
        case TokenIds():
            yield array("I", [i & 0xFFFFFFFF for i in content.ids]).tobytes()
        case Chat():
            if content.tools:
                yield msgspec.json.encode(content.tools)
            for message in content.messages:
                yield f"\0{message.role}\0{message.name or ''}\0".encode()
                yield (message.content or "").encode("utf-8", "surrogatepass")
                if message.tool_calls:
                    yield msgspec.json.encode(message.tool_calls)


class PrefixDigest:
    """What a replica's prefix cache probably holds: hashes of the contents that it computed lately.

    Forgets what was used longest ago when the contents together no longer fit the pool, ends before beginnings, as the cache
    does. It can't see what the cache gave up earlier than that: then a request is placed for a prefix that must be computed
    again, which costs time, no more.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens * BYTES_PER_TOKEN
        self._held: OrderedDict[bytes, int] = OrderedDict()
        self._total = 0

    def note(self, prefix: Prefix) -> None:
        """A content is computed here."""
        # Its beginning comes last: it is then the most recent.
        for i in range(len(prefix.hashes) - 1, -1, -1):
            key = prefix.hashes[i]
            if key in self._held:
                self._held.move_to_end(key)
            else:
                own = LENGTHS[i] - (LENGTHS[i - 1] if i else 0)
                self._held[key] = own
                self._total += own
        while self._held and (self._total > self._capacity or len(self._held) > MAX_HASHES):
            self._total -= self._held.popitem(last=False)[1]

    def pack(self) -> bytes:
        """All hashes, one after the other."""
        return b"".join(self._held)


def unpack(packed: bytes) -> frozenset[bytes]:
    """The hashes that `PrefixDigest.pack` joined."""
    return frozenset(packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES))
