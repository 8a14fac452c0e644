"""A generation that is taken off its slot and put on another one goes on as if nothing had happened."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from branchline.engine.model.sampler import Sampler
from branchline.engine.types import SamplingParams

VOCAB = 97
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_k=9, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.9),
    SamplingParams(temperature=1.3, frequency_penalty=1.5, logit_bias={3: 4.0, 5: -100.0}, logprobs=3),
]


def step(sampler: Sampler, slot: int, position: int) -> tuple[int, list[float]]:
    logits = torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(position // 3))
    sampled = sampler.sample(logits, np.array([slot]), np.array([position]))
    row = sampled.logprobs.get(0)
    return int(sampled.tokens[0]), [] if row is None else [row.chosen, *row.top_logprobs.tolist()]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("every", [1, 7])
def test_moving_between_slots_changes_no_token(params: SamplingParams, every: int) -> None:
    prompt = np.array([1, 2, 3, 4], np.int32)
    still, moving = Sampler(VOCAB, 8), Sampler(VOCAB, 8)
    still.add(0, params, 42, prompt)
    moving.add(0, params, 42, prompt)
    slot = 0
    for position in range(60):
        if position % every == 0:
            state = moving.save(slot)
            moving.add(slot, SamplingParams(frequency_penalty=2.0, logit_bias={0: 100.0}), 7)  # somebody else takes the slot
            step(moving, slot, position)
            moving.remove(slot)
            slot = (slot + 3) % 8
            moving.restore(slot, state)
        assert step(moving, slot, position) == step(still, 0, position)


def test_an_empty_slot_has_nothing_to_save() -> None:
    sampler = Sampler(VOCAB, 2)
    sampler.add(1, PARAMS[0], 1)
    sampler.save(1)
    for slot in (0, 1):
        with pytest.raises(KeyError):
            sampler.save(slot)
