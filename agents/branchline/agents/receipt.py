"""What a fan-out cost, beside the same work without forks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec
from rich.table import Table

from branchline.agents.patterns.fan_out import Answer
from branchline.engine.types import EngineStats, ModelInfo, Ready

MIB = 2**20


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run.

    Attributes:
        answers: one a branch.
        total_s: wall time from the first command to the last token, the computing of the context included.
        before, after: the engine's counters around it.
    """

    answers: Sequence[Answer]
    total_s: float
    before: EngineStats
    after: EngineStats

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """The generated ids of each branch."""
        return [answer.result.tokens for answer in self.answers]

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all branches."""
        return sum(answer.result.usage.completion_tokens for answer in self.answers)

    @property
    def outside_tensor_work(self) -> float:
        """Share of the engine's working time (not of its waiting) in planning, commands, sampling's bookkeeping and events."""
        tensor_s = self.after.tensor_s - self.before.tensor_s
        other_s = self.after.plan_s + self.after.python_s - self.before.plan_s - self.before.python_s
        return other_s / (tensor_s + other_s) if tensor_s + other_s else 0.0

    @property
    def prefill_tokens(self) -> int:
        """Tokens of contexts and questions that were computed."""
        return self.after.prefill_tokens - self.before.prefill_tokens


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """A fan-out, and the same questions asked apart (None: that wasn't run).

    Attributes:
        prefix: how the shared context was computed.
    """

    info: ModelInfo
    prefix: Ready
    forked: Run
    apart: Run | None

    def bytes_taken(self) -> int:
        """K/V bytes that all branches take together: what they share once, and what each has alone."""
        infos = [answer.info for answer in self.forked.answers]
        pages = max((info.shared_pages for info in infos), default=0) + sum(info.private_pages for info in infos)
        return pages * self.info.page_bytes

    def bytes_unshared(self) -> int:
        """K/V bytes that as many separate contexts of the same lengths would take."""
        tokens = [answer.info.num_tokens for answer in self.forked.answers]
        return sum(-(-count // self.info.page_tokens) for count in tokens) * self.info.page_bytes

    def identical(self) -> int | None:
        """How many answers are the same, token for token, in both runs; None without the second."""
        if self.apart is None:
            return None
        return sum(one == other for one, other in zip(self.forked.tokens, self.apart.tokens, strict=True))

    def table(self) -> Table:
        """The receipt for a terminal."""
        run, answers = self.forked, self.forked.answers
        firsts = [answer.first_token_s for answer in answers]
        forks = [answer.fork_s for answer in answers if answer.fork_s is not None]
        taken, unshared = self.bytes_taken(), self.bytes_unshared()
        shared_pages = max((answer.info.shared_pages for answer in answers), default=0)
        private_pages = sum(answer.info.private_pages for answer in answers)
        table = Table(title="Receipt", title_justify="left", show_header=False, pad_edge=False)
        table.add_column("what", style="bold", overflow="fold")
        table.add_column("figure", overflow="fold")
        rows = [
            ("model", f"{self.info.name}, {self.info.dtype}, {self.info.attention} attention on {self.info.device}"),
            ("prefix", f"{self.prefix.num_tokens} tokens, computed once in {self.prefix.prefill_s:.2f} s"),
            ("branches", f"{len(answers)}, {run.num_tokens} tokens generated"),
            ("pages shared", f"{shared_pages} of {self.info.page_tokens} tokens"),
            ("pages private", f"{private_pages} in all branches together"),
            ("K/V taken", f"{taken / MIB:.1f} MiB"),
            ("K/V without sharing", f"{unshared / MIB:.1f} MiB ({unshared / taken:.1f} times as much)" if taken else "0 MiB"),
            ("time of the fork", f"{forks[0] * 1e6:.0f} µs for all branches, no K/V copied" if forks else "-"),
            ("first text after the fork", f"{median(firsts):.2f} s median, {max(firsts):.2f} s last" if firsts else "-"),
            ("tokens/s in total", f"{run.num_tokens / run.total_s:.1f}, the prefix's time included"),
            ("outside tensor work", f"{run.outside_tensor_work:.1%} of the time worked: (plan + python) / (these + tensor)"),
            ("whole run", f"{run.total_s:.2f} s, {run.prefill_tokens} tokens prefilled"),
        ]  # fmt: skip
        timings = [answer.result.timing for answer in answers]
        if preemptions := sum(timing.preemptions for timing in timings):
            waited = sum(timing.preempted_s for timing in timings)
            rows.append(("preemptions", f"{preemptions}, for which the branches waited {waited:.2f} s in all"))
        if self.apart is not None:
            ratio = self.apart.total_s / run.total_s
            rows.append(
                ("the same without forking", f"{self.apart.total_s:.2f} s, {self.apart.prefill_tokens} tokens prefilled")
            )
            rows.append(
                ("forking is", f"{ratio:.1f} times as fast" if ratio >= 1 else f"slower: {1 / ratio:.1f} times the time")
            )
            rows.append(("answers", self._comparison()))
        for row in rows:
            table.add_row(*row)
        return table

    def _comparison(self) -> str:
        same, count = self.identical(), len(self.forked.answers)
        if same == count:
            return f"all {count} identical, token for token"
        assert self.apart is not None
        pairs = list(zip(self.forked.tokens, self.apart.tokens, strict=True))
        where = [f"{i + 1} from token {_first_difference(*pair)}" for i, pair in enumerate(pairs) if pair[0] != pair[1]]
        return f"{same} of {count} identical, token for token; NOT the same: {', '.join(where)}"


def _first_difference(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
