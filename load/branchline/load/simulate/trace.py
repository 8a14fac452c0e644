"""What arrives: requests with their lengths, their tenants, and what their prompts share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from branchline.engine.types import DEFAULT_SERVICE, Service

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int32]

NO_PARENT = -1
# Tokens of blocks are below this, a prompt's own are not.
_OWN = 1 << 30
# Odd: prompts differ from each other at every position.
_SPREAD = 0x9E3779B1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests in the order of their arrival; arrays are [N].

    Attributes:
        arrival_s: seconds from the beginning; never falls.
        prompt_tokens: of a branch: what it adds to its parent's tokens.
        output_tokens: that the model generates before it ends by itself; 0: a context that others are forked from.
        max_tokens: that the client lets it generate (>= output_tokens).
        tenant: index into `tenants`.
        service: index into `services`.
        parent: the earlier request whose end it is forked from, or NO_PARENT. It starts when that one has ended.
        cancel_s: seconds after its arrival when its client takes it back; infinite: never.
        block_tokens: tokens of a block. Two prompts that have the same block share all tokens up to its end.
        block_start: [N + 1] where each prompt's blocks begin in `block_ids`. What lies beyond them is the prompt's own.
        block_ids: [M].
    """

    name: str
    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    max_tokens: Ints
    tenant: Ints
    tenants: tuple[str, ...]
    service: Ints
    services: tuple[Service, ...]
    parent: Ints
    cancel_s: Floats
    block_tokens: int
    block_start: Ints
    block_ids: Ints

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """Seconds from the beginning to the last arrival."""
        return float(self.arrival_s[-1]) if len(self) else 0.0

    def prompt(self, request: int) -> Tokens:
        """The token ids: [prompt_tokens]. The same whenever it is asked for."""
        length = int(self.prompt_tokens[request])
        # Of 32 bits on purpose: wraps around.
        own = (np.arange(length, dtype=np.uint32) + np.uint32(request * _SPREAD & 0xFFFFFFFF)) & np.uint32(_OWN - 1)
        tokens = (own | np.uint32(_OWN)).astype(np.int32)
        blocks = self.block_ids[self.block_start[request] : self.block_start[request + 1]]
        shared = (blocks[:, None] * self.block_tokens + np.arange(self.block_tokens)).ravel()[:length]
        tokens[: len(shared)] = shared
        return tokens

    def outputs(self, requests: Ints, positions: npt.NDArray[np.integer]) -> Tokens:
        """A token for each pair: a function of the two alone."""
        return ((requests * _SPREAD + positions * 40503 + 1) & (_OWN - 1)).astype(np.int32) | np.int32(_OWN)

    def first(self, count: int) -> Trace:
        """The first `count` requests."""
        if count >= len(self):
            return self
        names = ("arrival_s", "prompt_tokens", "output_tokens", "max_tokens", "tenant", "service", "parent", "cancel_s")
        parts = {name: getattr(self, name)[:count] for name in names}
        blocks = self.block_ids[: self.block_start[count]]
        return replace(self, **parts, block_start=self.block_start[: count + 1], block_ids=blocks)

    def at_rate(self, requests_per_s: float) -> Trace:
        """The same requests, so many of them a second on average; as they are if all come at once."""
        return self.faster(requests_per_s * self.span_s / len(self)) if self.span_s else self

    def faster(self, factor: float) -> Trace:
        """The same requests, arriving `factor` times as fast."""
        return replace(self, arrival_s=self.arrival_s / factor)

    def unlimited_hits(self) -> int:
        """Prompt tokens that were there already, if nothing that was ever computed were given up and every prompt were
        computed at once. The last token of a prompt is always computed: its logits are wanted."""
        seen: set[int] = set()
        ids, start = self.block_ids.tolist(), self.block_start.tolist()
        found = 0
        for request, length in enumerate(self.prompt_tokens.tolist()):
            blocks = ids[start[request] : start[request + 1]]
            known = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
            found += max(min(known * self.block_tokens, length - 1), 0)
            seen.update(blocks)
        return found


def make_trace(
    name: str,
    *,
    arrival_s: Floats,
    prompt_tokens: Ints,
    output_tokens: Ints,
    max_tokens: Ints | None = None,
    tenant: Ints | None = None,
    tenants: tuple[str, ...] = ("default",),
    service: Ints | None = None,
    services: tuple[Service, ...] = (DEFAULT_SERVICE,),
    parent: Ints | None = None,
    cancel_s: Floats | None = None,
    block_tokens: int = 16,
    blocks: list[Ints] | None = None,
) -> Trace:
    """A trace in the order of its arrivals, whatever order the requests are given in. `blocks`: one array a request."""
    count = len(arrival_s)
    order = np.argsort(arrival_s, kind="stable")
    zeros = np.zeros(count, np.int64)
    parent = np.full(count, NO_PARENT, np.int64) if parent is None else parent
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    has_parent = parent >= 0
    moved = np.where(has_parent, place[np.where(has_parent, parent, 0)], NO_PARENT)[order]
    ordered = [np.empty(0, np.int64)] * count if blocks is None else [blocks[i] for i in order.tolist()]
    return Trace(
        name=name,
        arrival_s=arrival_s[order],
        prompt_tokens=prompt_tokens[order],
        output_tokens=output_tokens[order],
        max_tokens=(output_tokens if max_tokens is None else max_tokens)[order],
        tenant=(zeros if tenant is None else tenant)[order],
        tenants=tenants,
        service=(zeros if service is None else service)[order],
        services=services,
        parent=moved,
        cancel_s=(np.full(count, np.inf) if cancel_s is None else cancel_s)[order],
        block_tokens=block_tokens,
        block_start=np.concatenate((zeros[:1], np.cumsum([len(ids) for ids in ordered], dtype=np.int64))),
        block_ids=np.concatenate(ordered) if count else zeros,
    )
