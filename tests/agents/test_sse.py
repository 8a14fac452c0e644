"""Server-Sent Events, as the HTTP transport reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from branchline.agents.transport.http import sse_messages


def read(chunks: list[bytes]) -> list[bytes]:
    async def source() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def main() -> list[bytes]:
        return [message async for message in sse_messages(source())]

    return asyncio.run(main())


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8")).map(str.encode), max_size=5),
    st.sampled_from([b"\n", b"\r\n"]),
    st.lists(st.integers(1, 40), max_size=30),
)
def test_messages_survive_any_cut_and_any_line_end(messages: list[bytes], end: bytes, cuts: list[int]) -> None:
    raw = b"".join(b": note" + end + b"id: 1" + end + b"data: " + message + end + end for message in messages)
    chunks, position = [], 0
    for cut in cuts:
        chunks.append(raw[position : position + cut])
        position += cut
    assert read([*chunks, raw[position:]]) == messages


def test_data_on_several_lines_is_joined_and_comments_are_none() -> None:
    assert read([b"data: a\ndata:b\n\n:beat\n\n\n\ndata: c\n"]) == [b"a\nb"]
