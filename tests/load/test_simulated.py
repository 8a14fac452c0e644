"""The simulated engine: the real one around a model of no size, at a steady rate."""

from __future__ import annotations

import asyncio
import math
import string

import pytest

from branchline.agents import connect
from branchline.engine.config import EngineConfig
from branchline.engine.errors import ConfigError
from branchline.load.simulated import SimulatedEngine


def test_it_writes_letters_and_the_same_ones_each_time() -> None:
    async def texts() -> list[str]:
        with SimulatedEngine.load(EngineConfig(threads=1, pool_tokens=4096)) as engine:
            async with connect(engine) as session:
                root = session.context("what all share")
                children = root.fork(4)
                results = await asyncio.gather(
                    *(child.append(f" {i}").generate(temperature=0, max_tokens=20) for i, child in enumerate(children))
                )
                assert [result.reason for result in results] == ["length"] * 4
                return [result.text for result in results]

    first = asyncio.run(texts())
    assert asyncio.run(texts()) == first
    assert len(set(first)) == 4
    assert all(len(text) == 20 and set(text) <= set(string.ascii_lowercase) for text in first)


def test_its_steps_take_as_long_as_was_asked() -> None:
    """At least so long: how much longer is the machine's affair."""

    async def seconds(min_step_s: float) -> float:
        with SimulatedEngine.load(EngineConfig(threads=1, pool_tokens=4096, min_step_s=min_step_s)) as engine:
            async with connect(engine) as session:
                result = await session.context("x").generate(temperature=0, max_tokens=11)
                return result.timing.total_s - result.timing.first_token_s

    assert asyncio.run(seconds(0.05)) >= 10 * 0.05 - 0.01


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_step_of_no_length_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="min_step_s") as caught:
        EngineConfig(min_step_s=value).validate()
    assert caught.value.param == "min_step_s"
