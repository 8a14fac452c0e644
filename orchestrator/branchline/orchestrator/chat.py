"""A chat in the terminal over a running server. The conversation is one branch; every turn appends only what is new."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from rich.console import Console
from rich.markup import escape

from branchline.agents import Branch, Message, Session, connect
from branchline.engine.errors import BranchlineError

MAX_FORKS: Final = 16
HELP: Final = """\
/fork N QUESTION   ask N forks of this conversation, at temperature 1; the conversation itself doesn't change
/size              tokens of the conversation, and pages of its own and shared ones
/reset             start anew
/quit              or Ctrl-D"""


async def run_chat(
    url: str, *, system: str | None, temperature: float, max_tokens: int, console: Console | None = None
) -> None:
    """Talk until the input ends. Raises ConnectError when nothing answers at `url`."""
    out = console or Console(highlight=False)
    async with connect(url, client="chat") as session:
        out.print(f"{session.info.name} at {url}. /help tells what else there is.", style="dim")
        await Chat(session, out, system=system, temperature=temperature, max_tokens=max_tokens).run()


class Chat:
    """The loop of one chat."""

    def __init__(self, session: Session, console: Console, *, system: str | None, temperature: float, max_tokens: int) -> None:
        self._session = session
        self._console = console
        self._system = system
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._branch: Branch | None = None

    async def run(self) -> None:
        """Read lines and answer them until the input ends."""
        async for line in self._lines():
            command, _, rest = line.partition(" ")
            try:
                if command in ("/quit", "/exit"):
                    return
                if command == "/help":
                    self._console.print(HELP, style="dim", markup=False)
                elif command == "/reset":
                    self._reset()
                elif command == "/size":
                    await self._size()
                elif command == "/fork":
                    await self._fork(rest)
                elif command.startswith("/"):
                    self._console.print(f"{command} isn't a command; /help lists them", style="yellow", markup=False)
                else:
                    await self._answer(line)
            except BranchlineError as err:
                self._console.print(err.message, style="red", markup=False)
                self._reset()

    async def _lines(self) -> AsyncIterator[str]:
        while True:
            try:
                line = await asyncio.to_thread(self._console.input, "[bold cyan]> [/]")
            except (EOFError, KeyboardInterrupt):
                return
            if line.strip():
                yield line.strip()

    def _extended(self, question: str) -> Branch:
        """The conversation with a question at its end."""
        asked = Message(role="user", content=question)
        if self._branch is None:
            system = [Message(role="system", content=self._system)] if self._system else []
            self._branch = self._session.context([*system, asked])
            return self._branch
        return self._branch.append(asked)

    async def _answer(self, question: str) -> None:
        branch = self._extended(question)
        async with branch.stream(temperature=self._temperature, max_tokens=self._max_tokens) as stream:
            try:
                async for text in stream:
                    self._console.print(text, end="", markup=False, soft_wrap=True)
            finally:
                self._console.print()
            result = await stream.result()
        timing, usage = result.timing, result.usage
        rate = usage.completion_tokens / max(timing.total_s - timing.first_token_s, 1e-9)
        self._console.print(
            f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, first after {timing.first_token_s:.2f} s, "
            f"{rate:.0f} tokens/s",
            style="dim",
        )

    async def _fork(self, rest: str) -> None:
        count, _, question = rest.partition(" ")
        if not count.isdecimal() or not 1 <= int(count) <= MAX_FORKS or not question.strip():
            self._console.print(f"/fork N QUESTION, with N from 1 to {MAX_FORKS}", style="yellow", markup=False)
            return
        asked = Message(role="user", content=question.strip())
        root = self._branch or self._session.context(
            [Message(role="system", content=self._system or "You are a helpful assistant.")], add_generation_prompt=False
        )
        forks = root.fork(int(count))
        generations = [fork.append(asked).generate(temperature=1.0, max_tokens=self._max_tokens) for fork in forks]
        for i, result in enumerate(await asyncio.gather(*generations), 1):
            self._console.print(f"[bold]{i}.[/] {escape(result.text.strip())}", soft_wrap=True)
        self._session.release(*forks)
        if self._branch is None:
            root.release()

    async def _size(self) -> None:
        if self._branch is None:
            self._console.print("empty", style="dim")
            return
        info = await self._branch.inspect()
        self._console.print(
            f"{info.num_tokens} tokens, {info.private_pages} pages of its own and {info.shared_pages} shared", style="dim"
        )

    def _reset(self) -> None:
        branch, self._branch = self._branch, None
        if branch is not None and not branch.released:
            branch.release()
