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

    def _find_prefix(self, tokens: list[int], tenant: int) -> Run | None:
        size = self.page_tokens
        found: Run | None = None
        while len(tokens) >= size:
            run = self._child(found, tenant, tokens[:size])
            if run is None:
                break
            same = 0
            while (
                same < len(run.pages) and tokens[same * size : (same + 1) * size] == run.tokens[same * size : (same + 1) * size]
            ):
                same += 1
            tokens = tokens[same * size :]
            if same < len(run.pages):
                found = self._cut(run, same)
                break
            found = run
        self._touch(found)
        return found

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

    def _count_evictable(self) -> int:
        evictable: set[Run] = set()
        for run in self._index:
            if run.holders - 1 == sum(child.parent is run for child in evictable):
                evictable.add(run)
        return sum(len(run.pages) for run in evictable)
