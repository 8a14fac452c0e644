"""Chooses the next token of every row of a step.

A row's token depends on its own logits, parameters, stream key and position, and on the tokens that were sampled on its slot
before: never on the other rows, nor on how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from branchline.engine.errors import InvalidParameterError
from branchline.engine.model.rng import uniform
from branchline.engine.types import SamplingParams

Int32Array = npt.NDArray[np.int32]
# Probabilities are summed block by block, so that drawing needs a running sum over blocks and over one block only.
_BLOCK = 256
# Probabilities are worked on in parts that stay in the processor's cache.
_ELEMENTS_AT_ONCE = 1 << 20
# Below it, drawing is greedy but for ties; dividing by less could overflow.
_MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Natural-log probabilities at one position, under the model itself: before penalties, bias, temperature and filters.

    Attributes:
        chosen: of the sampled token.
        top_ids, top_logprobs: [k] of the k most likely tokens, likeliest first.
    """

    chosen: float
    top_ids: Int32Array
    top_logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen in one step of N rows.

    Attributes:
        tokens: [N] int32; 0 where `bad`.
        bad: [N] bool: the row's logits hold NaN or +inf, or nothing above -inf: no token can be chosen. Other rows are as
            ever, and the slot's state is as before.
        logprobs: by row, for the rows whose parameters ask for it and that aren't bad.
    """

    tokens: Int32Array
    bad: npt.NDArray[np.bool_]
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlotState:
    """A generation's sampling state, taken off its slot: see `Sampler.save`."""

    params: SamplingParams
    stream_key: int
    adjustment: _Adjustment | None


class Sampler:
    """Sampling state of all slots. Belongs to the engine's thread."""

    def __init__(self, vocab_size: int, max_batch: int) -> None:
        self.vocab_size = vocab_size
        self._keys = np.zeros(max_batch, np.uint64)
        self._temperature = np.zeros(max_batch, np.float32)
        self._top_k = np.zeros(max_batch, np.int64)
        self._top_p = np.ones(max_batch, np.float32)
        self._min_p = np.zeros(max_batch, np.float32)
        self._logprobs = np.full(max_batch, -1, np.int64)  # -1: none
        self._is_adjusted = np.zeros(max_batch, np.bool_)
        self._adjustments: dict[int, _Adjustment] = {}
        self._params: dict[int, tuple[SamplingParams, int]] = {}  # by slot, with the stream's key

    def check(self, params: SamplingParams) -> None:
        """Raises InvalidParameterError if `params` name a token outside the vocabulary."""
        outside = [token for token in params.logit_bias or {} if not 0 <= token < self.vocab_size]
        if outside:
            raise InvalidParameterError(
                f"logit_bias names token {outside[0]}: expected ids from 0 to {self.vocab_size - 1}", param="logit_bias"
            )

    def add(self, slot: int, params: SamplingParams, stream_key: int, prompt_tokens: Int32Array | None = None) -> None:
        """Begin a generation on `slot`, whatever was there.

        Args:
            stream_key: of the branch's random stream, from `rng.stream_key`.
            prompt_tokens: needed for `repetition_penalty` only.

        Raises InvalidParameterError as `check` does; then nothing has changed.
        """
        self.check(params)
        self._params[slot] = params, stream_key
        self._keys[slot] = stream_key
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k if params.top_k < self.vocab_size else 0
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._logprobs[slot] = -1 if params.logprobs is None else min(params.logprobs, self.vocab_size)
        adjusts = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or bool(params.logit_bias)
        )
        self._is_adjusted[slot] = adjusts
        self._adjustments.pop(slot, None)
        if adjusts:
            self._adjustments[slot] = _Adjustment(params, prompt_tokens)

    def remove(self, slot: int) -> None:
        """The generation on `slot` ended. Does nothing if there is none."""
        self._is_adjusted[slot] = False
        self._adjustments.pop(slot, None)
        self._params.pop(slot, None)

    def save(self, slot: int) -> SlotState:
        """Take the generation off `slot`, with the tokens that its penalties have counted. Raises KeyError if none is there."""
        params, stream_key = self._params[slot]
        state = SlotState(params, stream_key, self._adjustments.get(slot))
        self.remove(slot)
        return state

    def restore(self, slot: int, state: SlotState) -> None:
        """Go on with a saved generation on `slot`, whatever was there. Takes `state`."""
        self.add(slot, state.params, state.stream_key)
        if state.adjustment is not None:
            self._adjustments[slot] = state.adjustment

    def sample(self, logits: torch.Tensor, slots: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]) -> Sampled:
        """Choose a token for each row, and count it on the row's slot.

        Args:
            logits: [N, vocab_size] float32. Modified in rows with penalties or bias.
            slots: [N]: each row's slot, no slot twice.
            positions: [N]: the position on its branch that each token will have.
        """
        slots = slots.astype(np.int64)
        if not len(slots):
            return Sampled(np.zeros(0, np.int32), np.zeros(0, np.bool_))
        asking = np.flatnonzero(self._logprobs[slots] >= 0)
        raw = torch.log_softmax(logits[torch.from_numpy(asking)], dim=-1) if len(asking) else None
        adjusted = np.flatnonzero(self._is_adjusted[slots])
        if len(adjusted):
            _adjust(logits, adjusted, [self._adjustments[slot] for slot in slots[adjusted].tolist()])
        tokens, bad = self._choose(logits, slots, positions)
        for row in adjusted[~bad[adjusted]].tolist():
            self._adjustments[int(slots[row])].count(int(tokens[row]))
        logprobs = self._row_logprobs(raw, asking, slots, tokens, bad) if raw is not None else {}
        return Sampled(tokens, bad, logprobs)

    def _choose(
        self, logits: torch.Tensor, slots: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]
    ) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
        """(tokens, bad) of adjusted logits."""
        # The first of equal maxima; a NaN anywhere in a row is its maximum.
        peaks, best = logits.max(dim=-1)
        bad = ~torch.isfinite(peaks).cpu().numpy()
        tokens = best.cpu().numpy().astype(np.int32)
        drawing = np.flatnonzero((self._temperature[slots] > 0) & ~bad)
        if len(drawing):
            tokens[drawing] = self._draw(logits, drawing, slots[drawing], positions[drawing])
        tokens[bad] = 0
        return tokens, bad

    def _draw(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.integer],
        slots: npt.NDArray[np.integer],
        positions: npt.NDArray[np.integer],
    ) -> Int32Array:
        uniforms = uniform(self._keys[slots], positions)
        tokens = np.empty(len(rows), np.int32)
        at_once = max(1, _ELEMENTS_AT_ONCE // self.vocab_size)
        for start in range(0, len(rows), at_once):
            part = slice(start, start + at_once)
            temperature = torch.from_numpy(self._temperature[slots[part]].clip(min=_MIN_TEMPERATURE)).to(logits.device)
            scaled = logits[torch.from_numpy(rows[part]).to(logits.device)].div_(temperature[:, None])
            probabilities = torch.softmax(scaled, dim=-1)
            self._filter(probabilities, slots[part])
            tokens[part] = _draw_by_inverse(probabilities, uniforms[part])
        return tokens

    def _filter(self, probabilities: torch.Tensor, slots: npt.NDArray[np.integer]) -> None:
        """Set what top-k, top-p and min-p drop to 0, in place.

        Each keeps the tokens above a threshold of probability, so that their conjunction is the highest of the three. Tokens
        that are exactly as likely as the last one that is kept are kept too. Top-p counts the mass that top-k leaves.
        """
        top_k, top_p, min_p = self._top_k[slots], self._top_p[slots], self._min_p[slots]
        rows = np.flatnonzero((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
        if not len(rows):
            return
        index = torch.from_numpy(rows).to(probabilities.device)
        everything = len(rows) == len(probabilities)
        some = probabilities if everything else probabilities[index]
        thresholds = some.amax(dim=-1).mul_(torch.from_numpy(min_p[rows]).to(some.device))
        least: dict[int, float] = {}
        with_k = np.flatnonzero(top_k[rows] > 0)
        if len(with_k):
            at = torch.from_numpy(with_k).to(some.device)
            counts = torch.from_numpy(top_k[rows[with_k]]).to(some.device)
            last = some[at].topk(int(counts.max()), dim=-1).values.gather(1, counts[:, None] - 1)[:, 0]
            thresholds[at] = thresholds[at].maximum(last)
            least = dict(zip(with_k.tolist(), last.tolist(), strict=True))
        with_p = np.flatnonzero(top_p[rows] < 1.0)
        if len(with_p):
            at = torch.from_numpy(with_p).to(some.device)
            ranked = some[at].cpu().numpy()
            nuclei = [_nucleus_threshold(ranked[j], float(top_p[rows[i]]), least.get(i)) for j, i in enumerate(with_p.tolist())]
            thresholds[at] = thresholds[at].maximum(torch.tensor(nuclei, dtype=torch.float32, device=some.device))
        some.masked_fill_(some < thresholds[:, None], 0.0)
        if not everything:
            probabilities[index] = some

    def _row_logprobs(
        self,
        raw: torch.Tensor,
        asking: npt.NDArray[np.integer],
        slots: npt.NDArray[np.integer],
        tokens: Int32Array,
        bad: npt.NDArray[np.bool_],
    ) -> dict[int, RowLogprobs]:
        counts = self._logprobs[slots[asking]]
        chosen = raw.gather(1, torch.from_numpy(tokens[asking].astype(np.int64)).to(raw.device)[:, None])[:, 0].tolist()
        top = raw.topk(int(counts.max()), dim=-1)
        values, ids = top.values.cpu().numpy(), top.indices.cpu().numpy().astype(np.int32)
        found = {}
        for i, (row, count) in enumerate(zip(asking.tolist(), counts.tolist(), strict=True)):
            if not bad[row]:
                order = np.lexsort((ids[i], -values[i]))[:count]  # of equal ones, the lowest id first
                found[row] = RowLogprobs(chosen[i], ids[i][order], values[i][order])
        return found


class _Adjustment:
    """Penalties and bias of one slot: what is added to the logits of which tokens."""

    def __init__(self, params: SamplingParams, prompt_tokens: Int32Array | None) -> None:
        self.repetition = params.repetition_penalty
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        bias = params.logit_bias or {}
        self.bias_ids = np.array(list(bias), np.int64)
        self.bias = np.array(list(bias.values()), np.float32)
        seen: list[int] = []
        if self.repetition != 1.0 and prompt_tokens is not None:
            seen = np.unique(prompt_tokens).tolist()
        self._place = {token: i for i, token in enumerate(seen)}  # of each seen token in the two arrays
        self._ids = np.array(seen, np.int64)
        self._counts = np.zeros(len(seen), np.float32)  # how often it was generated

    def count(self, token: int) -> None:
        """`token` was generated."""
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._ids):
                room = max(32, 2 * place)
                self._ids, self._counts = np.resize(self._ids, room), np.resize(self._counts, room)
            self._ids[place], self._counts[place] = token, 0.0
        self._counts[place] += 1.0

    @property
    def seen(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Ids that the penalties look at, and how often each was generated (0: it stands in the prompt only). Views."""
        return self._ids[: len(self._place)], self._counts[: len(self._place)]


def _adjust(logits: torch.Tensor, rows: npt.NDArray[np.integer], adjustments: list[_Adjustment]) -> None:
    """Apply penalties, then bias, to `rows` of `logits` in place: one gather and one scatter for all of them."""
    seen = [adjustment.seen for adjustment in adjustments]
    sizes = [len(ids) for ids, _ in seen]
    if any(sizes):

        def each(values: list[float]) -> torch.Tensor:
            return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(logits.device)

        at = torch.from_numpy(np.repeat(rows, sizes)).to(logits.device)
        ids = torch.from_numpy(np.concatenate([ids for ids, _ in seen])).to(logits.device)
        counts = torch.from_numpy(np.concatenate([counts for _, counts in seen])).to(logits.device)
        repetition = each([a.repetition for a in adjustments])
        values = logits[at, ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= each([a.frequency for a in adjustments]) * counts
        values -= each([a.presence for a in adjustments]) * (counts > 0)
        logits[at, ids] = values
    sizes = [len(a.bias_ids) for a in adjustments]
    if any(sizes):
        at = torch.from_numpy(np.repeat(rows, sizes)).to(logits.device)
        ids = torch.from_numpy(np.concatenate([a.bias_ids for a in adjustments])).to(logits.device)
        logits[at, ids] += torch.from_numpy(np.concatenate([a.bias for a in adjustments])).to(logits.device)


def _nucleus_threshold(row: npt.NDArray[np.float32], top_p: float, least: float | None) -> float:
    """Probability of the last token of the smallest set that reaches `top_p`.

    Only tokens above a floor are sorted: the highest of a few floors that leaves enough of them. All tokens below
    (1 - top_p) / n together have less than 1 - top_p, so the set lies above that (half of it, as probabilities are rounded).

    Args:
        row: [n] probabilities that add up to 1.
        least: count only tokens at or above it, and `top_p` as a share of theirs.
    """
    floors = (1e-3, 1e-5, 0.5 * (1.0 - top_p) / len(row)) if least is None else (least,)
    for floor in floors:
        candidates = row[row >= floor]
        if candidates.sum(dtype=np.float64) >= top_p:
            break
    ordered = np.sort(candidates)[::-1]
    mass = ordered.cumsum(dtype=np.float64)
    wanted = top_p if least is None else top_p * mass[-1]
    return float(ordered[min(int(np.searchsorted(mass, wanted)), len(ordered) - 1)])


def _draw_by_inverse(probabilities: torch.Tensor, uniforms: npt.NDArray[np.float64]) -> Int32Array:
    """The token of each row at which the running sum of probabilities, in order of ids, passes uniform * total."""
    num_rows, vocab_size = probabilities.shape
    if vocab_size % _BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, _BLOCK - vocab_size % _BLOCK))
    blocks = probabilities.view(num_rows, -1, _BLOCK)
    running = blocks.sum(dim=-1).double().cumsum(dim=-1)
    targets = torch.from_numpy(uniforms).to(probabilities.device) * running[:, -1]
    # Rounding must not carry it past the last block, nor below past the last token, that has any probability.
    block = (running <= targets[:, None]).sum(dim=-1).minimum((running < running[:, -1:]).sum(dim=-1))
    rows = torch.arange(num_rows, device=probabilities.device)
    before = torch.where(block > 0, running[rows, (block - 1).clamp(min=0)], 0.0)
    inside = blocks[rows, block].double()
    within = inside.cumsum(dim=-1)
    place = (within <= (targets - before)[:, None]).sum(dim=-1)
    order = torch.arange(_BLOCK, device=probabilities.device)
    last = torch.where(inside > 0, order, 0).amax(dim=-1)
    chosen: Int32Array = (block * _BLOCK + torch.minimum(place, last)).cpu().numpy().astype(np.int32)
    return chosen
