"""Both samplers against a naive reference, and what a row may and may not depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.engine.errors import InvalidParameterError
from branchline.engine.model.rng import uniform
from branchline.engine.model.sampler import Sampled, Sampler
from branchline.engine.types import SamplingParams

from .statistics import assert_fits

Make = Callable[[int, int], Sampler]
VOCAB = 40
Floats = np.ndarray[Any, np.dtype[np.float64]]


def adjusted(logits: Floats, params: SamplingParams, prompt: list[int], output: list[int]) -> Floats:
    result = logits.copy()
    for token in set(prompt) | set(output):
        result[token] = (
            result[token] / params.repetition_penalty if result[token] > 0 else result[token] * params.repetition_penalty
        )
    for token in set(output):
        result[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for token, bias in (params.logit_bias or {}).items():
        result[token] += bias
    return result


def distribution(logits: Floats, params: SamplingParams) -> Floats:
    """Temperature, then top-k, then top-p of what is left, then min-p; one token at a time."""
    scaled = (logits - logits.max()) / params.temperature
    probabilities = np.exp(scaled) / np.exp(scaled).sum()
    order = sorted(range(len(logits)), key=lambda i: -probabilities[i])
    kept = set(order[: params.top_k] if params.top_k else order)
    mass, total, nucleus = 0.0, sum(probabilities[i] for i in kept), set()
    for i in order:
        if i in kept and (mass < params.top_p * total or params.top_p == 1.0):
            mass += probabilities[i]
            nucleus.add(i)
    final = {i for i in nucleus if probabilities[i] >= params.min_p * probabilities.max()}
    result = np.array([probabilities[i] if i in final else 0.0 for i in range(len(logits))])
    return np.asarray(result / result.sum())


params_strategy = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(0.05, 3.0)),
    top_k=st.one_of(st.just(0), st.integers(1, VOCAB + 5)),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 0.9)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2.0)),
    presence_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    logit_bias=st.one_of(st.none(), st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3)),
)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(params_strategy, min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_against_the_naive_reference(make: Make, rows: list[SamplingParams], seed: int) -> None:
    rng = np.random.default_rng(seed)
    sampler = make(VOCAB, 16)
    slots = rng.permutation(16)[: len(rows)].astype(np.int32)
    prompts = [rng.integers(0, VOCAB, 5).astype(np.int32) for _ in rows]
    outputs: list[list[int]] = [[] for _ in rows]
    for slot, params, prompt in zip(slots, rows, prompts, strict=True):
        sampler.add(int(slot), params, int(slot) + 1, prompt)
    for position in range(4):
        logits = rng.normal(0, 2, (len(rows), VOCAB)).astype(np.float32)
        positions = np.full(len(rows), position, np.int32)
        sampled = sampler.sample(torch.from_numpy(logits.copy()), slots, positions)
        uniforms = uniform((slots + 1).astype(np.uint64), positions)
        for i, params in enumerate(rows):
            token = int(sampled.tokens[i])
            final = adjusted(logits[i].astype(np.float64), params, prompts[i].tolist(), outputs[i])
            if params.temperature == 0:
                assert final[token] >= final.max() - 1e-5
            else:
                assert drawn_rightly(final, params, token, float(uniforms[i]))
            outputs[i].append(token)


def drawn_rightly(logits: Floats, params: SamplingParams, token: int, drawn: float) -> bool:
    """`drawn` falls on the token's stretch of the running sum, for a top-p within rounding of the one asked for."""
    for nudge in (0.0, -1e-5, 1e-5):
        nudged = SamplingParams(
            temperature=params.temperature, top_k=params.top_k, min_p=params.min_p, top_p=min(1.0, params.top_p + nudge)
        )
        running = np.cumsum(distribution(logits, nudged if params.top_p < 1.0 else params))
        if (running[token - 1] if token else 0.0) - 1e-5 <= drawn <= running[token] + 1e-5:
            return True
    return False


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.5),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=10, top_p=0.8, min_p=0.1, temperature=1.5),
        SamplingParams(logit_bias={3: 4.0, 5: -100.0}),
    ],
    ids=str,
)
def test_frequencies_of_every_filter(make: Make, params: SamplingParams) -> None:
    draws, vocab = 8000, 12
    logits = np.random.default_rng(3).normal(0, 0.6, vocab).astype(np.float32)
    sampler = make(vocab, 100)
    for slot in range(100):
        sampler.add(slot, params, slot * 7919 + 1)
    counts = np.zeros(vocab)
    for position in range(draws // 100):
        sampled = sampler.sample(torch.from_numpy(np.tile(logits, (100, 1))), np.arange(100), np.full(100, position))
        counts += np.bincount(sampled.tokens, minlength=vocab)
    expected = distribution(adjusted(logits.astype(np.float64), params, [], []), params)
    expected[expected < 1e-9] = 0
    assert_fits(counts, expected)


MIX = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_p=0.9, temperature=0.7),
    SamplingParams(top_k=40, min_p=0.02),
    SamplingParams(top_k=50, top_p=0.95, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5, logprobs=3),
    SamplingParams(logit_bias={7: 3.0}, logprobs=2),
]


def mixed_sampler(make: Make, vocab: int, count: int) -> Sampler:
    sampler = make(vocab, count)
    for slot in range(count):
        sampler.add(slot, MIX[slot % len(MIX)], 1000 + slot, np.arange(slot % 9, dtype=np.int32))
    return sampler


@pytest.mark.parametrize("vocab", [1000, 49152])
def test_a_row_does_not_depend_on_the_others(make: Make, vocab: int) -> None:
    count = 14
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(5)) * 3
    positions = np.arange(count) * 11
    slots = np.arange(count)
    whole = mixed_sampler(make, vocab, count).sample(logits.clone(), slots, positions)
    rng = np.random.default_rng(1)
    for size in (1, 1, 2, 5, count):
        some = rng.permutation(count)[:size]
        part = mixed_sampler(make, vocab, count).sample(logits[some].clone(), slots[some], positions[some])
        assert part.tokens.tolist() == whole.tokens[some].tolist()
        for i, row in enumerate(some.tolist()):
            assert (i in part.logprobs) == (row in whole.logprobs)
            if i in part.logprobs:
                assert part.logprobs[i].chosen == whole.logprobs[row].chosen
                assert part.logprobs[i].top_logprobs.tolist() == whole.logprobs[row].top_logprobs.tolist()


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_both_samplers_choose_the_same_of_a_large_vocabulary(make: Make, spread: float) -> None:
    """But for numbers on the border of two tokens, where sums of float32 round otherwise."""
    vocab, wanted = 49152, [
        SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_k=1000),
        SamplingParams(top_k=40_000), SamplingParams(top_p=0.3), SamplingParams(top_p=0.9999), SamplingParams(min_p=0.05),
        SamplingParams(top_k=900, top_p=0.8, min_p=0.001, temperature=1.5), SamplingParams(top_k=20, top_p=0.5),
    ]  # fmt: skip
    logits = torch.randn(len(wanted), vocab, generator=torch.Generator().manual_seed(8)) * spread
    logits[:, 100:140] = logits.amax(-1, keepdim=True) - 1.0  # ties
    found = []
    for sampler in (Sampler(vocab, len(wanted)), make(vocab, len(wanted))):
        for slot, params in enumerate(wanted):
            sampler.add(slot, params, 1000 + slot)
        found.append(np.stack([sample(sampler, logits.clone(), position).tokens for position in range(25)]))
    assert (found[0] != found[1]).mean() < 0.01


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), "all -inf"])
def test_a_row_without_a_finite_maximum_is_bad_and_poisons_no_other(make: Make, poison: float | str) -> None:
    count = len(MIX) * 2
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(5))
    clean = mixed_sampler(make, VOCAB, count).sample(logits.clone(), np.arange(count), np.arange(count))
    for row in range(count):
        spoilt = logits.clone()
        if isinstance(poison, str):
            spoilt[row] = float("-inf")
        else:
            spoilt[row, 3] = poison
        sampler = mixed_sampler(make, VOCAB, count)
        sampled = sampler.sample(spoilt, np.arange(count), np.arange(count))
        assert np.flatnonzero(sampled.bad).tolist() == [row]
        assert row not in sampled.logprobs
        others = np.arange(count) != row
        assert sampled.tokens[others].tolist() == clean.tokens[others].tolist()
        # the bad row's state is as before: the same step, done again without the poison, gives the same token
        again = sampler.sample(logits[row : row + 1].clone(), np.array([row]), np.array([row]))
        assert again.tokens[0] == clean.tokens[row]


def test_forbidden_tokens_are_never_drawn(make: Make) -> None:
    logits = torch.full((64, 700), float("-inf"))
    logits[:, [5, 300, 650]] = torch.tensor([0.0, 1.0, 2.0])
    sampler = make(700, 64)
    for slot in range(64):
        sampler.add(slot, SamplingParams(top_p=0.9999), slot)
    seen: set[int] = set()
    for position in range(30):
        seen.update(sampler.sample(logits.clone(), np.arange(64), np.full(64, position)).tokens.tolist())
    assert seen == {5, 300, 650}


def test_greedy_takes_the_lowest_of_equal_ids(make: Make) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [30, 7, 12]] = 1.0
    logits[1, [VOCAB - 1, 8]] = 5.0
    sampler = make(VOCAB, 3)
    for slot in range(3):
        sampler.add(slot, SamplingParams(temperature=0.0), 1)
    assert sample(sampler, logits).tokens.tolist() == [7, 8, 0]


def sample(sampler: Sampler, logits: torch.Tensor, position: int = 0) -> Sampled:
    return sampler.sample(logits, np.arange(len(logits)), np.full(len(logits), position))


def test_tiny_temperature_is_greedy_and_no_overflow(make: Make) -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(2)) * 1000
    sampler = make(VOCAB, 5)
    for slot in range(5):
        sampler.add(slot, SamplingParams(temperature=1e-30), slot)
    sampled = sample(sampler, logits)
    assert sampled.tokens.tolist() == logits.argmax(-1).tolist()
    assert not sampled.bad.any()


def test_same_key_and_position_give_the_same_token_on_any_slot(make: Make) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    tokens = []
    for slot in (0, 3, 9):
        sampler = make(VOCAB, 10)
        sampler.add(slot, SamplingParams(), 77)
        tokens.append([int(sampler.sample(logits.clone(), np.array([slot]), np.array([p])).tokens[0]) for p in range(30)])
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(set(tokens[0])) > 5


def test_logprobs_are_the_models_own_before_anything_else(make: Make) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    expected = torch.log_softmax(logits.double(), -1)
    sampler = make(VOCAB, 2)
    sampler.add(0, SamplingParams(temperature=3.0, top_k=1, logit_bias={9: 100.0}, logprobs=4), 1)
    sampler.add(1, SamplingParams(logprobs=0), 1)
    sampled = sample(sampler, logits.clone())
    assert sampled.tokens[0] == 9
    assert sampled.logprobs[0].chosen == pytest.approx(float(expected[0, 9]), abs=1e-5)
    top = expected[0].topk(4)
    assert sampled.logprobs[0].top_ids.tolist() == top.indices.tolist()
    assert sampled.logprobs[0].top_logprobs.tolist() == pytest.approx(top.values.tolist(), abs=1e-5)
    assert sampled.logprobs[1].top_ids.tolist() == []
    assert sampled.logprobs[1].chosen == pytest.approx(float(expected[1, sampled.tokens[1]]), abs=1e-5)


def test_logprobs_of_rows_that_did_not_ask_are_absent(make: Make) -> None:
    sampler = make(VOCAB, 2)
    sampler.add(0, SamplingParams(logprobs=1), 1)
    sampler.add(1, SamplingParams(), 1)
    assert list(sample(sampler, torch.zeros(2, VOCAB)).logprobs) == [0]


def test_a_slot_forgets_what_was_there(make: Make) -> None:
    sampler = make(VOCAB, 1)
    logits = torch.zeros(1, VOCAB)
    logits[0, :2] = torch.tensor([5.0, 4.5])
    penal = SamplingParams(temperature=0.0, presence_penalty=1.0)
    sampler.add(0, penal, 1)
    assert [int(sample(sampler, logits.clone()).tokens[0]) for _ in range(3)] == [0, 1, 0]
    sampler.remove(0)
    sampler.add(0, penal, 1)
    assert sample(sampler, logits.clone()).tokens[0] == 0
    sampler.add(0, SamplingParams(temperature=0.0), 1)
    assert [int(sample(sampler, logits.clone()).tokens[0]) for _ in range(3)] == [0, 0, 0]
    sampler.remove(0)
    sampler.remove(0)


def test_penalties_count_hundreds_of_different_tokens(make: Make) -> None:
    vocab = 500
    sampler = make(vocab, 1)
    sampler.add(0, SamplingParams(temperature=0.0, presence_penalty=2.0), 1)
    logits = torch.linspace(1.0, 0.0, vocab)[None]
    assert [int(sample(sampler, logits.clone()).tokens[0]) for _ in range(vocab)] == list(range(vocab))


def test_no_rows_at_all(make: Make) -> None:
    sampled = make(VOCAB, 1).sample(torch.zeros(0, VOCAB), np.zeros(0, np.int32), np.zeros(0, np.int32))
    assert len(sampled.tokens) == len(sampled.bad) == 0


def test_bias_outside_the_vocabulary_is_refused_and_changes_nothing(make: Make) -> None:
    sampler = make(VOCAB, 1)
    sampler.add(0, SamplingParams(temperature=0.0), 1)
    with pytest.raises(InvalidParameterError, match=f"token {VOCAB}: expected ids from 0 to {VOCAB - 1}"):
        sampler.add(0, SamplingParams(logit_bias={VOCAB: 1.0}), 1)
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 1.0
    assert sample(sampler, logits).tokens[0] == 4


def test_greedy_rows_leave_the_logits_alone(make: Make) -> None:
    """64 greedy rows of a large vocabulary: nothing is divided, copied or masked on the way to the likeliest token."""
    logits = torch.randn(64, 49152, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    sampler = make(49152, 64)
    for slot in range(64):
        sampler.add(slot, SamplingParams(temperature=0.0), 1)
    assert sample(sampler, logits).tokens.tolist() == before.argmax(dim=-1).tolist()
    assert torch.equal(logits, before)
