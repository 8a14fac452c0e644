"""The twin's parts: runs of tokens, and the arrays of a step. See `reference.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from branchline.engine._core import BatchError

Int32Array = npt.NDArray[np.int32]


@dataclass(eq=False)
class Run:
    """Tokens that follow `parent`, with the pages that hold them. `lead` tokens before them are on the first page as a copy."""

    parent: Run | None = None
    lead: int = 0
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    holders: int = 0
    boundary: str = ""  # of a frozen one: "aligned", "hard" or "copied"
    indexed: bool = False  # held by the prefix index too
    tenant: int = 0

    def chain(self) -> list[Run]:
        """The runs from the root to this one."""
        runs: list[Run] = []
        run: Run | None = self
        while run is not None:
            runs.append(run)
            run = run.parent
        return runs[::-1]

    @property
    def stored(self) -> int:
        return self.lead + len(self.tokens)


@dataclass
class Row:
    handle: int
    slot: int
    tokens: list[int] | None  # None: a decode row
    undo: int = 0  # own tokens before the plan


def _column(rows: list[tuple[int, int, int]], index: int) -> Int32Array:
    return np.array([row[index] for row in rows], np.int32)


class StepArrays:
    """The arrays of the last plan. No two rows share a group, so that the levels say only what each row reads."""

    _levels: list[list[tuple[list[int], int]]]  # level -> row -> (pages, last_page_len)

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._clear_step()

    @property
    def num_tokens(self) -> int:
        return len(self._step_tokens)

    @property
    def num_rows(self) -> int:
        return len(self._row_slots)

    @property
    def num_levels(self) -> int:
        return len(self._levels)

    @property
    def num_copies(self) -> int:
        return len(self._copies)

    @property
    def token_ids(self) -> Int32Array:
        return _column(self._step_tokens, 0)

    @property
    def positions(self) -> Int32Array:
        return _column(self._step_tokens, 1)

    @property
    def write_slots(self) -> Int32Array:
        return _column(self._step_tokens, 2)

    @property
    def row_indptr(self) -> Int32Array:
        return np.array(self._row_indptr, np.int32)

    @property
    def row_slots(self) -> Int32Array:
        return np.array(self._row_slots, np.int32)

    @property
    def copy_src(self) -> Int32Array:
        return _column(self._copies, 0)

    @property
    def copy_dst(self) -> Int32Array:
        return _column(self._copies, 1)

    @property
    def copy_tokens(self) -> Int32Array:
        return _column(self._copies, 2)

    def level(self, index: int) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
        if not 0 <= index < len(self._levels):
            raise BatchError(f"level {index}: there are {len(self._levels)}")
        tables = self._levels[index]
        indptr = np.cumsum([0, *(len(pages) for pages, _ in tables)], dtype=np.int32)
        indices = np.array([p for pages, _ in tables for p in pages], np.int32)
        return self.row_indptr, indptr, indices, np.array([last for _, last in tables], np.int32)

    def _build_levels(self, rows: list[list[tuple[Run, list[int]]]]) -> list[list[tuple[list[int], int]]]:
        """Cut each row's pages after its hard boundaries. A level is a list with one (pages, last_page_len) a row."""
        cut: list[list[tuple[list[int], int]]] = []
        for parts in rows:
            tables: list[tuple[list[int], int]] = []
            pages: list[int] = []
            for run, part in parts:
                pages = pages + part
                last = (run.stored - 1) % self.page_tokens + 1
                if run.boundary == "hard" or run is parts[-1][0]:
                    tables.append((pages, last))
                    pages = []
            cut.append(tables)
        depth = max([1, *(len(tables) for tables in cut)])
        for tables in cut:
            tables[-1:-1] = [([], 0)] * (depth - len(tables))
        return [[tables[level] for tables in cut] for level in range(depth)]

    def _clear_step(self) -> None:
        self._step_tokens: list[tuple[int, int, int]] = []
        self._row_indptr = [0]
        self._row_slots: list[int] = []
        self._copies: list[tuple[int, int, int]] = []
        self._levels = [[]]
