"""From a sampler's rows to what clients see."""

from __future__ import annotations

from typing import Protocol

from branchline.engine.model.sampler import RowLogprobs
from branchline.engine.types import PositionLogprobs, TokenLogprob


class NamesTokens(Protocol):
    """What is needed of a tokenizer."""

    def id_to_text(self, token: int) -> str: ...


def position_logprobs(row: RowLogprobs, token: int, tokenizer: NamesTokens) -> PositionLogprobs:
    """The log-probabilities of one generated token, with the texts of the tokens."""

    def named(token: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token, tokenizer.id_to_text(token), logprob)

    top = zip(row.top_ids.tolist(), row.top_logprobs.tolist(), strict=True)
    return PositionLogprobs(named(token, row.chosen), tuple(named(other, logprob) for other, logprob in top))
