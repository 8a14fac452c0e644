"""What the SDK's contract suite needs: a scripted engine, and a way to it over each transport."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from branchline.agents.client import Connection
from branchline.engine.errors import ContextLengthError
from branchline.engine.types import EngineStats

TIMEOUT_S = 20.0


def reply(prompt: str) -> str | Iterable[str]:
    """Answers by the last word: "endless" goes on for ever, "bad" fails; else it counts the prompt's words."""
    words = prompt.split()
    last = words[-1] if words else ""
    if last == "endless":
        return (f" {i}" for i in itertools.count())
    if last == "bad":
        raise ContextLengthError("no room for this", param="max_tokens")
    return f" heard {len(words)} words, the last is {last}."


class HasStats(Protocol):
    """An engine, near or far."""

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True)
class Way:
    """A way to one scripted engine, and how to break it off (None: it is shared, and stays)."""

    name: str
    engine: HasStats
    connect: Callable[[], Connection]
    break_off: Callable[[], None] | None


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run in a fresh loop, with a bound on time."""

    async def bounded() -> Any:
        return await asyncio.wait_for(main, TIMEOUT_S)

    return asyncio.run(bounded())


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait until a condition holds."""
    for _ in range(1000):
        if condition():
            return
        gc.collect(0)
        await asyncio.sleep(0.01)
    raise AssertionError(f"never came true: {what}")
