"""The SDK on the real engine with a tiny random model: what only a real one shows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.agents.harness import run, until

from branchline.agents import connect
from branchline.agents.patterns.fan_out import ask_apart, fan_out
from branchline.engine.config import EngineConfig, SchedulingConfig
from branchline.engine.engine import Engine
from branchline.engine.errors import ConfigError, ContextLengthError, FailedBranchError, ModelNotFoundError, PoolTooSmallError

PREFIX = "the quick brown fox jumps over the lazy dog " * 5
QUESTIONS = [f"and then number {i} " for i in range(8)]


@pytest.fixture(scope="module")
def real(tiny_model: Path) -> Iterator[Engine]:
    # Without the prefix cache, so that separate contexts are separate.
    scheduling = SchedulingConfig(prefix_cache=False)
    with Engine.load(EngineConfig(model=str(tiny_model), pool_tokens=8192, threads=1, scheduling=scheduling)) as engine:
        yield engine


def test_forked_answers_are_the_separate_ones(real: Engine) -> None:
    async def main() -> None:
        async with connect(real) as session:
            before = await session.stats()
            root = await session.context(PREFIX).ready()
            forked = await fan_out(root, QUESTIONS, temperature=0, max_tokens=12, ignore_eos=True)
            middle = await session.stats()
            apart = await ask_apart(
                session, [PREFIX + question for question in QUESTIONS], temperature=0, max_tokens=12, ignore_eos=True
            )
            after = await session.stats()
            assert [answer.result.tokens for answer in forked] == [answer.result.tokens for answer in apart]
            assert all(answer.fork_s is not None for answer in forked)
            assert all(answer.info.shared_pages > 0 for answer in forked)
            assert middle.prefill_tokens - before.prefill_tokens < (after.prefill_tokens - middle.prefill_tokens) / 2

    run(main())
    real.check()


def room(engine: Engine) -> int:
    """Pages that nobody holds."""
    stats = engine.stats()
    return stats.pages_free + stats.pages_cached


def test_all_pages_return_when_the_session_ends(real: Engine) -> None:
    async def main() -> None:
        free = room(real)
        async with connect(real) as session:
            root = session.context(PREFIX)
            streams = [child.stream(max_tokens=200, ignore_eos=True) for child in root.fork(16)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            assert room(real) < free
        await until(lambda: room(real) == free, "the pages returned")
        assert real.stats().running == 0

    run(main())
    real.check()


def test_what_does_not_fit_is_a_typed_error_and_nothing_leaks(real: Engine, tiny_model: Path) -> None:
    async def main() -> None:
        free = room(real)
        async with connect(real) as session:
            length = session.info.context_length
            root = session.context([1] * (length + 1))
            with pytest.raises(ContextLengthError):
                await root.ready()
            with pytest.raises(FailedBranchError):
                await root.generate()
            with pytest.raises(ContextLengthError):
                await session.context([1] * 10).generate(max_tokens=length)
        await until(lambda: room(real) == free, "the pages returned")
        async with connect(config=EngineConfig(model=str(tiny_model), pool_tokens=64, threads=1)) as small:
            with pytest.raises(PoolTooSmallError):
                await small.context([1] * 100).ready()

    run(main())


def test_a_model_that_is_not_there_and_misplaced_settings(real: Engine, tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ModelNotFoundError):
            await connect(config=EngineConfig(model=str(tmp_path / "nothing.gguf")))
        with pytest.raises(ConfigError, match="config is for an engine that is loaded here"):
            await connect(real, config=EngineConfig())

    run(main())


def test_an_engine_that_was_loaded_here_ends_with_its_session(tiny_model: Path) -> None:
    async def main() -> list[str]:
        steps: list[str] = []
        config = EngineConfig(model=str(tiny_model), pool_tokens=512, threads=1)
        async with connect(config=config, progress=steps.append) as session:
            engine = session._transport._engine  # type: ignore[attr-defined]
            result = await session.context("hello").generate(max_tokens=4, ignore_eos=True)
            assert (result.reason, len(result.tokens)) == ("length", 4)
        assert not engine._thread.is_alive()
        return steps

    assert len(run(main())) >= 2
