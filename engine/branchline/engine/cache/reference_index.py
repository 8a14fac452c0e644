"""The twin's prefix index: runs of full pages, found by going through all of them. See `reference.py`."""

from __future__ import annotations

import abc

from branchline.engine.cache.reference_step import Run


class PrefixIndex(abc.ABC):
    """`_index` is in the order of use, oldest first; a parent always comes after its children."""

    page_tokens: int

    def __init__(self) -> None:
        self._index: list[Run] = []

    @abc.abstractmethod
    def _drop(self, run: Run | None) -> None:
        """Give up a run that nobody holds."""

    def _child(self, parent: Run | None, tenant: int, page: list[int]) -> Run | None:
        for run in self._index:
            if run.parent is parent and run.tenant == tenant and run.tokens[: self.page_tokens] == page:
                return run
        return None

    def _walk(self, tokens: list[int], tenant: int) -> list[tuple[Run, int]]:
        """The runs of the longest indexed prefix, with how many of their pages are in it; all but the last wholly."""
        size = self.page_tokens
        found: list[tuple[Run, int]] = []
        parent: Run | None = None
        while len(tokens) >= size:
            run = self._child(parent, tenant, tokens[:size])
            if run is None:
                break
            same = 0
            while (
                same < len(run.pages) and tokens[same * size : (same + 1) * size] == run.tokens[same * size : (same + 1) * size]
            ):
                same += 1
            found.append((run, same))
            if same < len(run.pages):
                break
            tokens = tokens[same * size :]
            parent = run
        return found

    def _find_prefix(self, tokens: list[int], tenant: int) -> Run | None:
        walked = self._walk(tokens, tenant)
        if not walked:
            return None
        found, same = walked[-1]
        if same < len(found.pages):
            found = self._cut(found, same)
        self._touch(found)
        return found

    def _peek_prefix(self, tokens: list[int], tenant: int) -> tuple[int, int]:
        walked = self._walk(tokens, tenant)
        idle = self._idle()
        return sum(same for _, same in walked) * self.page_tokens, sum(same for run, same in walked if run in idle)

    def _half_page(self, parent: Run | None, tenant: int, tokens: list[int]) -> tuple[Run | None, int]:
        """The indexed run whose first page begins with most of `tokens`, and how many."""
        best: tuple[Run | None, int] = (None, 0)
        for run in self._index:
            if run.parent is not parent or run.tenant != tenant:
                continue
            pairs = zip(run.tokens[: self.page_tokens], tokens, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(self.page_tokens, len(tokens)))
            if same > best[1]:
                best = run, same
        return best

    def _index_chain(self, chain: list[Run]) -> int:
        last: Run | None = None
        end = 0
        for part in chain:
            run = part
            cuts = run.boundary != "aligned"
            if not run.indexed:
                pages = len(run.tokens) // self.page_tokens
                if pages == 0 or self._child(last, run.tenant, run.tokens[: self.page_tokens]) is not None:
                    break
                if cuts:
                    run = self._split(run, pages)
                run.indexed = True
                run.holders += 1
                self._index.append(run)
            last = run
            end += len(run.tokens)
            if cuts:
                break
        self._touch(last)
        return end

    def _split(self, run: Run, pages: int) -> Run:
        size = pages * self.page_tokens
        upper = Run(run.parent, 0, run.tokens[:size], run.pages[:pages], 1, "aligned", False, run.tenant)
        run.parent, run.tokens, run.pages = upper, run.tokens[size:], run.pages[pages:]
        return upper

    def _cut(self, run: Run, pages: int) -> Run:
        upper = self._split(run, pages)
        upper.indexed = True
        upper.holders += 1
        self._index.insert(self._index.index(run) + 1, upper)
        return upper

    def _touch(self, run: Run | None) -> None:
        while run is not None:
            self._index.remove(run)
            self._index.append(run)
            run = run.parent

    def _evict(self, num_pages: int) -> int:
        given = 0
        for run in list(self._index):
            if given < num_pages and run.holders == 1:
                self._index.remove(run)
                run.indexed = False
                run.holders = 0
                given += len(run.pages)
                self._drop(run)
        return given

    def _idle(self) -> set[Run]:
        """Runs that only the index and idle runs hold."""
        idle: set[Run] = set()
        for run in self._index:
            if run.holders - 1 == sum(child.parent is run for child in idle):
                idle.add(run)
        return idle

    def _count_evictable(self) -> int:
        return sum(len(run.pages) for run in self._idle())
