"""What a replica says of its load: rates from the engine's counters, and what its prefix cache probably holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from branchline.engine.types import Command, Context, EngineStats, Finished, ModelInfo
from branchline.orchestrator.placement import ASSUMED
from branchline.orchestrator.prefix import PrefixDigest, prefix_of
from branchline.orchestrator.protocol import LoadReply

SHARE_OF_NEW: Final = 0.3
SHARE_OF_ONE_OUTPUT: Final = 0.05


class LoadMeter:
    """Of one engine. Used from one loop."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._digest = PrefixDigest(info.num_pages * info.page_tokens)
        self._prefill_token_s = ASSUMED.prefill_token_s
        self._decode_token_s = ASSUMED.decode_token_s
        self._output_tokens = ASSUMED.output_tokens
        self._has_prefilled = self._has_decoded = self._has_finished = False
        self._last: EngineStats | None = None

    def submitted(self, commands: Sequence[Command], tenant: str) -> None:
        """Commands were accepted from a session of this tenant."""
        for command in commands:
            if isinstance(command, Context):
                self._digest.note(prefix_of(command.content).of_tenant(command.tenant or tenant))

    def finished(self, event: Finished) -> None:
        """A generation ended."""
        if event.reason != "cancelled":
            self._has_finished = True
            self._output_tokens += SHARE_OF_ONE_OUTPUT * (event.usage.completion_tokens - self._output_tokens)

    def measure(self, stats: EngineStats) -> None:
        """Bring the rates up to date.

        Prompts and outputs share steps, so the time of an interval is split between them in the proportion that the rates
        known so far give (one step of expectation maximisation an interval).
        """
        last, self._last = self._last, stats
        if last is None:
            return
        seconds = stats.tensor_s - last.tensor_s
        prefill, decode = stats.prefill_tokens - last.prefill_tokens, stats.decode_tokens - last.decode_tokens
        expected_s = prefill * self._prefill_token_s + decode * self._decode_token_s
        if seconds <= 0 or expected_s <= 0:
            return
        # Both rates are off by the same factor in this interval, as far as can be told.
        factor = 1 + SHARE_OF_NEW * (seconds / expected_s - 1)
        self._has_prefilled |= prefill > 0
        self._has_decoded |= decode > 0
        if prefill:
            self._prefill_token_s *= 1 + (factor - 1) * prefill * self._prefill_token_s / expected_s
        if decode:
            self._decode_token_s *= 1 + (factor - 1) * decode * self._decode_token_s / expected_s

    def reply(self, replica: str, stats: EngineStats, *, draining: bool) -> LoadReply:
        """What the replica says of itself now."""
        self.measure(stats)
        return LoadReply(
            replica=replica,
            draining=draining,
            running=stats.running,
            waiting=stats.waiting,
            branches=stats.branches,
            sessions=stats.sessions,
            pages_free=stats.pages_free + stats.pages_cached,
            pages_total=stats.pages_total,
            page_tokens=self._info.page_tokens,
            prefill_token_s=self._prefill_token_s if self._has_prefilled else None,
            decode_token_s=self._decode_token_s if self._has_decoded else None,
            output_tokens=self._output_tokens if self._has_finished else None,
            prefixes=self._digest.pack(),
        )
