"""What a fan-out looks like in a terminal: steps that take a while, and a live tree of all branches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from rich.tree import Tree

from branchline.agents.generation import Stream
from branchline.agents.result import Result

FRAMES_PER_S = 12
MOST_TEXT_LINES = 2


class Steps:
    """Shows what is being done, and how long it took: `steps("loading")`, `steps("reading")`, `steps.done()`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._text = ""
        self._began = 0.0

    def __call__(self, text: str) -> None:
        """The former step is done; this one begins."""
        self.done()
        self._text, self._began = text, time.perf_counter()
        if self._console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task(escape(text))
            self._progress.start()

    def done(self) -> None:
        """The step is done, and none begins."""
        self._end("✓")

    def _end(self, mark: str) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._text:
            seconds = time.perf_counter() - self._began
            self._console.print(f"{mark} {escape(self._text)} [dim]{seconds:.1f} s[/dim]", highlight=False)
            self._text = ""

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self._end("✓" if kind is None else "✗")


class FanOutView:
    """A live tree: the root, and each branch with its question and the last lines of its answer. A `fan_out` watcher.

    Where the console isn't a terminal, nothing moves; the answers are printed when all is done.

    Args:
        title: the root's line.
        questions: one a branch.
    """

    def __init__(self, console: Console, title: str, questions: Sequence[str]) -> None:
        self._console = console
        self._title = title
        self._questions = list(questions)
        self._texts = [""] * len(questions)
        self._counts = [0] * len(questions)
        self._states = ["waits"] * len(questions)
        self._live = Live(
            console=console,
            get_renderable=self._tree,
            refresh_per_second=FRAMES_PER_S,
            vertical_overflow="crop",
            transient=True,
        )

    def piece(self, index: int, text: str, stream: Stream) -> None:
        """New text on a branch."""
        self._texts[index] += text
        self._counts[index] = stream.num_tokens
        self._states[index] = "writes"

    def ended(self, index: int, result: Result) -> None:
        """A branch is done."""
        self._texts[index] = result.text
        self._counts[index] = len(result.tokens)
        self._states[index] = "done" if result.reason == "stop" else result.reason

    def __enter__(self) -> FanOutView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._live.stop()
        self._console.print(self._tree(whole=True))

    def _tree(self, whole: bool = False) -> RenderableType:
        tree = Tree(Text(self._title, style="bold"), guide_style="dim")
        for question, text, count, state in zip(self._questions, self._texts, self._counts, self._states, strict=True):
            head = Text.assemble(
                (question, "cyan"), "  ", (f"{state}, {count} tokens", "green" if state == "done" else "yellow")
            )
            if whole:
                tree.add(Group(head, Text(text.strip())))
                continue
            head.no_wrap, head.overflow = True, "ellipsis"
            tree.add(Group(head, *self._last_lines(text)))
        return tree

    def _last_lines(self, text: str) -> list[Text]:
        width = max(self._console.width - 6, 20)
        lines = [line for part in text.strip().splitlines() for line in Text(part).wrap(self._console, width)]
        return [Text(line.plain, no_wrap=True, overflow="crop") for line in lines[-self._text_lines() :]] or [
            Text("…", style="dim")
        ]

    def _text_lines(self) -> int:
        """Lines of text a branch, so that the whole tree fits the terminal's height where it can."""
        room = (self._console.height - 2) // max(len(self._questions), 1) - 1
        return min(max(room, 1), MOST_TEXT_LINES)
