"""OpenAI's response bodies, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from typing import Any, Literal

import msgspec

from branchline.engine.types import PositionLogprobs, TokenLogprob
from branchline.orchestrator.gateway.generation import Counts, Piece

Kind = Literal["chat", "text"]


class CachedTokens(msgspec.Struct, frozen=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


def usage_body(counts: Counts) -> UsageBody:
    """The counts as OpenAI names them. A prompt of n choices counts once: it was computed once."""
    total = counts.prompt + counts.completion
    return UsageBody(counts.prompt, counts.completion, total, CachedTokens(counts.cached))


class ChunkWriter:
    """Makes the chunks of one streamed response, each as the text after `data: `."""

    def __init__(self, kind: Kind, model: str, *, logprobs: bool, include_usage: bool) -> None:
        self._head = _head(kind, model, streamed=True)
        self._kind = kind
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._offsets: dict[int, int] = {}

    def opening(self, num_choices: int) -> list[bytes]:
        """What comes before any text: for chats each choice's role."""
        if self._kind == "text":
            return []
        return [self._chunk(i, {"role": "assistant", "content": ""}, None, None) for i in range(num_choices)]

    def pieces(self, pieces: list[Piece]) -> list[bytes]:
        """The chunks of a step. A choice's end is a chunk of its own; a piece with nothing to show gives none."""
        chunks = []
        for piece in pieces:
            if piece.text or piece.logprobs:
                chunks.append(self._chunk(piece.index, {"content": piece.text}, self._logprobs_of(piece), None))
            if piece.reason is not None:
                chunks.append(self._chunk(piece.index, {}, None, piece.reason))
        return chunks

    def usage(self, counts: Counts) -> list[bytes]:
        """The last chunk, which has the usage and no choices, if it was asked for."""
        if not self._include_usage:
            return []
        return [msgspec.json.encode({**self._head, "choices": [], "usage": usage_body(counts)})]

    def _logprobs_of(self, piece: Piece) -> Any:
        if not self._logprobs:
            return None
        offset = self._offsets.get(piece.index, 0)
        self._offsets[piece.index] = offset + sum(len(position.chosen.text) for position in piece.logprobs)
        return _logprobs(self._kind, piece.logprobs, offset)

    def _chunk(self, index: int, delta: dict[str, str], logprobs: Any, reason: str | None) -> bytes:
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": delta} if self._kind == "chat" else {"text": delta.get("content", "")}
        choice |= {"logprobs": logprobs, "finish_reason": reason}
        body: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        return msgspec.json.encode(body)


class Collector:
    """Joins the pieces of one response that isn't streamed."""

    def __init__(self, kind: Kind, model: str, num_choices: int, *, logprobs: bool) -> None:
        self._head = _head(kind, model, streamed=False)
        self._kind = kind
        self._choices = [Piece(index) for index in range(num_choices)]
        self._logprobs = logprobs

    def add(self, pieces: list[Piece]) -> None:
        """Take a step's pieces."""
        for piece in pieces:
            choice = self._choices[piece.index]
            choice.text += piece.text
            choice.logprobs += piece.logprobs
            choice.reason = piece.reason or choice.reason

    def body(self, counts: Counts) -> bytes:
        """The response as JSON."""
        choices = []
        for piece in self._choices:
            choice: dict[str, Any] = {"index": piece.index}
            if self._kind == "chat":
                choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
            else:
                choice["text"] = piece.text
            choice["logprobs"] = _logprobs(self._kind, piece.logprobs, 0) if self._logprobs else None
            choice["finish_reason"] = piece.reason
            choices.append(choice)
        return msgspec.json.encode({**self._head, "choices": choices, "usage": usage_body(counts)})


def _head(kind: Kind, model: str, *, streamed: bool) -> dict[str, Any]:
    prefix, name = ("chatcmpl", "chat.completion") if kind == "chat" else ("cmpl", "text_completion")
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": f"{name}.chunk" if streamed and kind == "chat" else name,
        "created": int(time.time()),
        "model": model,
    }


def _logprobs(kind: Kind, positions: list[PositionLogprobs], offset: int) -> dict[str, Any]:
    if kind == "chat":
        content = [
            {**_token(position.chosen), "top_logprobs": [_token(token) for token in position.top]} for position in positions
        ]
        return {"content": content, "refusal": None}
    offsets = []
    for position in positions:
        offsets.append(offset)
        offset += len(position.chosen.text)
    return {
        "tokens": [position.chosen.text for position in positions],
        "token_logprobs": [position.chosen.logprob for position in positions],
        "top_logprobs": [{token.text: token.logprob for token in position.top} for position in positions],
        "text_offset": offsets,
    }


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode())}
