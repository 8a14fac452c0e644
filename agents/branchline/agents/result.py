"""What a generation gives."""

from __future__ import annotations

import msgspec

from branchline.engine.types import FinishReason, PositionLogprobs, Timing, Usage


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A generation's whole output.

    Attributes:
        text: the generated text, without the stop string.
        tokens: the generated token ids.
        reason: "stop" (an end token or a stop string), "length" (`max_tokens` or the context) or "cancelled".
        stop: the stop string, or the id of the stop token, that ended it.
        usage, timing: as the engine counted them.
        logprobs: one entry a token, if they were asked for.
    """

    text: str
    tokens: tuple[int, ...]
    reason: FinishReason
    usage: Usage
    timing: Timing
    stop: str | int | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None

    def __str__(self) -> str:
        return self.text
