"""One context, many questions at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol, Unpack

import msgspec

from branchline.agents.branch import Branch
from branchline.agents.content import ContentLike, Generating, split_settings
from branchline.agents.generation import Stream
from branchline.agents.result import Result
from branchline.agents.session import Session
from branchline.engine.types import Info, SamplingParams


class Watcher(Protocol):
    """Is told about each piece of text; `agents.view.FanOutView` shows it."""

    def piece(self, index: int, text: str, stream: Stream) -> None: ...
    def ended(self, index: int, result: Result) -> None: ...


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one branch gave.

    Attributes:
        first_token_s: from the start of the fan-out until its first text was here, the way from the engine included.
        fork_s: the time that the core took for this fork (of all its children together); None without a fork.
        info: its sizes at the end.
    """

    result: Result
    first_token_s: float
    fork_s: float | None
    info: Info


async def fan_out(
    root: Branch,
    prompts: Sequence[ContentLike],
    params: SamplingParams | None = None,
    /,
    *,
    watcher: Watcher | None = None,
    **settings: Unpack[Generating],
) -> list[Answer]:
    """Fork `root` once for each prompt, append the prompt to its child and generate on all of them at once.

    The children are released at the end; `root` stays. If one fails, the others are cancelled and its error is raised, alone.

    Args:
        root: holds what all prompts share.
        prompts: what to append, one a child.
        params, settings: as in `Branch.generate`; `priority`, `qos` and `deadline_ms` are the appended prompts' too.
        watcher: is told about each piece of text.

    Raises what `Branch.generate` and awaiting it raise.
    """
    if not prompts:
        return []
    began = time.perf_counter()
    _, service = split_settings(settings)
    children = root.fork(len(prompts))
    for child, prompt in zip(children, prompts, strict=True):
        child.append(prompt, **service)
    return await _answers(root.session, children, began, params, watcher, settings)


async def ask_apart(
    session: Session,
    contexts: Sequence[ContentLike],
    params: SamplingParams | None = None,
    /,
    *,
    watcher: Watcher | None = None,
    **settings: Unpack[Generating],
) -> list[Answer]:
    """The same without forks, to compare: each context is made and computed on its own, all at once."""
    began = time.perf_counter()
    _, service = split_settings(settings)
    branches = [session.context(content, **service) for content in contexts]
    return await _answers(session, branches, began, params, watcher, settings)


async def _answers(
    session: Session,
    branches: list[Branch],
    began: float,
    params: SamplingParams | None,
    watcher: Watcher | None,
    settings: Generating,
) -> list[Answer]:
    try:
        streams = [branch.stream(params, **settings) for branch in branches]
        tasks = [asyncio.ensure_future(_read(index, stream, began, watcher)) for index, stream in enumerate(streams)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        session.release(*[branch for branch in branches if not branch.released])


async def _read(index: int, stream: Stream, began: float, watcher: Watcher | None) -> Answer:
    first_token_s = None
    async for text in stream:
        first_token_s = first_token_s or time.perf_counter() - began
        if watcher is not None:
            watcher.piece(index, text, stream)
    result = await stream.result()
    ended = time.perf_counter() - began
    if watcher is not None:
        watcher.ended(index, result)
    info = await stream.branch.inspect()
    forked = stream.branch.forked
    return Answer(
        result=result,
        first_token_s=first_token_s if first_token_s is not None else ended,
        fork_s=None if forked is None else forked.fork_s,
        info=info,
    )
