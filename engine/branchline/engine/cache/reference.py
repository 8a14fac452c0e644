"""The branch tree in plain Python: the same interface as the compiled core's, written to be obviously right, not fast.

Tests drive both side by side. It makes the same decisions about pages (where a fork starts a fresh page, where it copies) but
its own, simpler ones about levels: no two rows share a group, so that its tables say only what each row reads.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from branchline.engine._core import BatchError, CoreError, OutOfBranchesError, OutOfPagesError, ReleasedHandleError
from branchline.engine.cache.reference_index import PrefixIndex
from branchline.engine.cache.reference_step import Row, Run, StepArrays

Int32Array = npt.NDArray[np.int32]


class BranchTree(PrefixIndex, StepArrays):
    """See `branchline.engine._core.BranchTree`. It has no padded table: `table_width` changes nothing."""

    def __init__(
        self,
        num_pages: int,
        *,
        page_tokens: int = 16,
        max_branches: int = 65536,
        max_batch: int = 512,
        max_step_tokens: int = 1024,
        max_levels: int = 8,
        level_cost_pages: int = 32,
        table_width: int = 0,
        zero_used: bool = False,
    ) -> None:
        PrefixIndex.__init__(self)
        StepArrays.__init__(self, page_tokens)
        sizes = (num_pages, page_tokens, max_branches, max_batch, max_step_tokens, max_levels, level_cost_pages + 1)
        if min(sizes) < 1:
            raise ValueError("every size must be at least 1")
        self.num_pages = num_pages
        self.next_tokens = np.zeros(max_batch, np.int32)
        self._max_branches = max_branches
        self._max_batch = max_batch
        self._max_step_tokens = max_step_tokens
        self._max_levels = max_levels
        self._free = list(range(num_pages - 1, -1, -1))
        self._branches: dict[int, Run] = {}
        self._handles = itertools.count(1)
        self._decode: dict[int, Row] = {}
        self._queue: dict[int, Row] = {}
        self._planned: list[Row] | None = None
        self._zero_used = zero_used
        self._used: list[int] = []
        self._leases: dict[int, tuple[list[int], int]] = {}

    # --- branches ---

    def root(self, tenant: int = 0) -> int:
        self._require_idle()
        self._require_tenant(tenant)
        self._require_branches(1)
        return self._open(None, tenant)

    def fork(self, branch: int) -> int:
        return int(self.fork_many(branch, 1)[0])

    def fork_many(self, branch: int, count: int) -> npt.NDArray[np.uint64]:
        tail = self._get(branch)
        if count < 0:
            raise ValueError(f"count = {count}: expected at least 0")
        self._require_branches(count)
        if count > 0 and tail.tokens:
            hard_above = sum(run.boundary == "hard" for run in tail.chain())
            if tail.stored % self.page_tokens == 0:
                tail.boundary = "aligned"
            else:
                tail.boundary = "hard" if hard_above + 1 < self._max_levels else "copied"
            tail.holders = 1
            self._branches[branch] = Run(parent=tail, tenant=tail.tenant)
        parent = self._branches[branch].parent
        return np.array([self._open(parent, tail.tenant) for _ in range(count)], np.uint64)

    def release(self, branch: int) -> None:
        run = self._get(branch)
        self._decode.pop(branch, None)
        self._queue.pop(branch, None)
        del self._branches[branch]
        self._drop(run)

    def release_many(self, branches: npt.NDArray[np.uint64]) -> None:
        handles = [int(h) for h in branches]
        for handle in handles:
            self._get(handle)
        if len(set(handles)) < len(handles):
            raise ReleasedHandleError("a handle is given twice; none was released")
        for handle in handles:
            self.release(handle)

    def truncate(self, branch: int, num_tokens: int) -> None:
        tail = self._get(branch)
        own = num_tokens - self._shared(tail)
        if not 0 <= own <= len(tail.tokens):
            raise ValueError(f"num_tokens = {num_tokens}: not between the shared part and the length")
        self._shorten(tail, own)

    def length(self, branch: int) -> int:
        tail = self._get(branch)
        return self._shared(tail) + len(tail.tokens)

    def shared_length(self, branch: int) -> int:
        return self._shared(self._get(branch))

    def tokens(self, branch: int) -> Int32Array:
        return np.array([t for run in self._get(branch).chain() for t in run.tokens], np.int32)

    def pages(self, branch: int) -> Int32Array:
        return np.array([p for _, pages in self._parts(self._get(branch)) for p in pages], np.int32)

    def describe(self, branch: int) -> tuple[int, int, int, int, int]:
        tail = self._get(branch)
        shared = self._shared(tail)
        pages = sum(len(p) for run, p in self._parts(tail) if run is not tail)
        return shared + len(tail.tokens), shared, pages, len(tail.pages), len(tail.chain()) - 1

    def pages_needed(self, branch: int, num_tokens: int) -> int:
        tail = self._get(branch)
        if num_tokens < 0:
            raise ValueError(f"num_tokens = {num_tokens}: expected at least 0")
        return self._needed(tail, num_tokens)

    # --- loans and tenants ---

    def lend(self, num_pages: int, tenant: int) -> int:
        return int(self.lend_many(1, num_pages, tenant)[0])

    def lend_many(self, count: int, num_pages: int, tenant: int) -> npt.NDArray[np.uint64]:
        self._require_idle()
        self._require_tenant(tenant)
        if count < 0 or num_pages < 0:
            raise ValueError("expected at least 0")
        self._require_pages(count * num_pages)
        if len(self._leases) + count > self._max_branches:
            raise OutOfBranchesError(f"need {count} more leases")
        handles = [next(self._handles) for _ in range(count)]
        for handle in handles:
            self._leases[handle] = ([self._free.pop() for _ in range(num_pages)], tenant)
        return np.array(handles, np.uint64)

    def give_back(self, lease: int) -> None:
        self.give_back_many(np.array([lease], np.uint64))

    def give_back_many(self, leases: npt.NDArray[np.uint64]) -> None:
        self._require_idle()
        handles = [int(h) for h in leases]
        if len(set(handles)) < len(handles) or not set(handles) <= self._leases.keys():
            raise ReleasedHandleError("no such lease, or given twice")
        for handle in handles:
            self._give(self._leases.pop(handle)[0])

    def leased_pages(self, lease: int) -> Int32Array:
        try:
            return np.array(self._leases[int(lease)][0], np.int32)
        except KeyError:
            raise ReleasedHandleError(f"{lease} names no lease") from None

    def tenant_pages(self, tenant: int) -> int:
        self._require_tenant(tenant)
        runs = [*self._segments(), *self._branches.values()]
        lent = sum(len(pages) for pages, of in self._leases.values() if of == tenant)
        return lent + sum(len(run.pages) for run in runs if run.tenant == tenant)

    def tenant_cached_pages(self, tenant: int) -> int:
        self._require_tenant(tenant)
        return sum(len(run.pages) for run in self._idle() if run.tenant == tenant)

    def take_used(self) -> Int32Array:
        self._require_idle()
        used, self._used = self._used, []
        self._free += used
        return np.array(used, np.int32)

    # --- the prefix index ---

    def match(self, tokens: Int32Array, tenant: int = 0) -> int:
        self._require_idle()
        self._require_tenant(tenant)
        self._require_branches(1)
        return self._open(self._find_prefix([int(t) for t in tokens], tenant), tenant)

    def peek(self, tokens: Int32Array, tenant: int = 0) -> tuple[int, int]:
        self._require_tenant(tenant)
        return self._peek_prefix([int(t) for t in tokens], tenant)

    def graft(self, branch: int, tokens: Int32Array) -> tuple[int, int, int]:
        tail = self._get(branch)
        self._require_out(branch)
        full = tail.parent is None or tail.parent.boundary == "aligned"
        if tail.tokens or not full or not self._free:
            return 0, 0, 0
        source, same = self._half_page(tail.parent, tail.tenant, [int(t) for t in tokens])
        if source is None:
            return 0, 0, 0
        tail.pages.append(self._free.pop())
        tail.tokens += source.tokens[:same]
        return source.pages[0], tail.pages[0], same

    def extend(self, branch: int, tokens: Int32Array) -> Int32Array:
        tail = self._get(branch)
        self._require_out(branch)
        lead = tail.lead
        if len(tokens) and not tail.tokens and tail.parent is not None and tail.parent.boundary == "copied":
            lead = tail.parent.stored % self.page_tokens
        stored = lead + len(tail.tokens) + len(tokens)
        need = -(-stored // self.page_tokens) - len(tail.pages) if len(tokens) else 0
        self._require_pages(need)
        tail.lead = lead
        tail.tokens += [int(t) for t in tokens]
        tail.pages += [self._free.pop() for _ in range(need)]
        return np.array(tail.pages, np.int32)

    def private_part(self, branch: int) -> tuple[int, int]:
        tail = self._get(branch)
        idle = self._idle()
        pages, tokens = len(tail.pages), len(tail.tokens)
        for run in tail.chain()[-2::-1]:
            if run.holders - run.indexed - sum(child.parent is run for child in idle) > 1:
                break
            pages += len(run.pages)
            tokens += len(run.tokens)
        return pages, tokens

    def insert(self, branch: int) -> int:
        tail = self._get(branch)
        chain = tail.chain()[:-1]
        rest = len(tail.tokens) % self.page_tokens
        full = len(tail.tokens) - rest
        if full > 0 and all(run.boundary == "aligned" for run in chain):
            pages = full // self.page_tokens
            below = Run(parent=tail, tokens=tail.tokens[full:], pages=tail.pages[pages:], tenant=tail.tenant)
            tail.tokens, tail.pages, tail.boundary, tail.holders = tail.tokens[:full], tail.pages[:pages], "aligned", 1
            self._branches[branch] = below
            chain.append(tail)
        return self._index_chain(chain)

    def evict(self, num_pages: int) -> int:
        self._require_idle()
        return self._evict(num_pages)

    # --- the batch ---

    def join(self, branch: int, slot: int, next_token: int) -> None:
        self._get(branch)
        self._require_outside(branch, slot)
        self.next_tokens[slot] = next_token
        self._decode[branch] = Row(branch, slot, None)

    def leave(self, branch: int) -> None:
        self._get(branch)
        if self._decode.pop(branch, None) is None and self._queue.pop(branch, None) is None:
            raise BatchError("the branch isn't in the batch")

    def prefill(self, branch: int, slot: int, tokens: Int32Array) -> None:
        self._get(branch)
        self._require_outside(branch, slot)
        queued = sum(len(row.tokens or ()) for row in self._queue.values())
        if not 1 <= len(tokens) <= self._max_step_tokens - queued:
            raise BatchError(f"{len(tokens)} tokens beside {queued} queued ones")
        self._queue[branch] = Row(branch, slot, [int(t) for t in tokens])

    def plan(self) -> int:
        self._require_idle()
        rows = [*self._decode.values(), *self._queue.values()]
        counts = [1 if row.tokens is None else len(row.tokens) for row in rows]
        if sum(counts) > self._max_step_tokens:
            raise BatchError(f"{sum(counts)} tokens, max_step_tokens is {self._max_step_tokens}")
        need = sum(self._needed(self._branches[row.handle], n) for row, n in zip(rows, counts, strict=True))
        self._require_pages(need)
        self._clear_step()
        for row in rows:
            self._append(row)
        self._levels = self._build_levels([self._parts(self._branches[row.handle]) for row in rows])
        self._planned = rows
        return len(self._step_tokens)

    def commit(self) -> None:
        if self._planned is None:
            raise BatchError("no plan is open")
        self._planned = None
        self._queue.clear()

    def rollback(self) -> None:
        if self._planned is None:
            raise BatchError("no plan is open")
        for row in self._planned:
            self._shorten(self._branches[row.handle], row.undo)
        self._planned = None
        self._queue.clear()

    # --- state ---

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    @property
    def num_cached_pages(self) -> int:
        return self._count_evictable()

    @property
    def num_branches(self) -> int:
        return len(self._branches)

    @property
    def num_segments(self) -> int:
        return len(self._segments())

    def check(self) -> None:
        """Raises CoreError if a page has no owner or two, or a run's count isn't that of its holders."""
        runs = [*self._segments(), *self._branches.values()]
        lent = [p for pages, _ in self._leases.values() for p in pages]
        owned = sorted([p for run in runs for p in run.pages] + self._free + self._used + lent)
        if owned != list(range(self.num_pages)):
            raise CoreError("a page has no owner or more than one")
        for run in runs:
            if run.holders != sum(other.parent is run for other in runs) + run.indexed:
                raise CoreError("a count isn't that of its holders")
            if len(run.pages) != (-(-run.stored // self.page_tokens) if run.tokens else 0):
                raise CoreError("a run's pages don't fit its tokens")

    @property
    def num_used_pages(self) -> int:
        return len(self._used)

    # --- parts ---

    def _give(self, pages: list[int]) -> None:
        (self._used if self._zero_used else self._free).extend(pages)

    def _drop(self, run: Run | None) -> None:
        """Give up what nobody holds any more, upwards."""
        while run is not None and run.holders == 0:
            self._give(run.pages)
            run = run.parent
            if run is not None:
                run.holders -= 1

    def _require_pages(self, need: int) -> None:
        missing = need - len(self._free)
        if missing > 0 and self._count_evictable() >= missing:
            self._evict(missing)
        if need > len(self._free):
            raise OutOfPagesError(f"need {need} pages, {len(self._free)} are free")

    @staticmethod
    def _require_tenant(tenant: int) -> None:
        if not 0 <= tenant < 2**16:
            raise ValueError(f"tenant = {tenant}: expected 16 bits")

    def _require_idle(self) -> None:
        if self._planned is not None:
            raise BatchError("a plan is open")

    def _require_branches(self, count: int) -> None:
        if len(self._branches) + count > self._max_branches:
            raise OutOfBranchesError(f"need {count} more branches")

    def _require_out(self, branch: int) -> None:
        if branch in self._decode or branch in self._queue:
            raise BatchError("the branch is in the batch already")

    def _require_outside(self, branch: int, slot: int) -> None:
        self._require_out(branch)
        taken = {row.slot for row in (*self._decode.values(), *self._queue.values())}
        if not 0 <= slot < self._max_batch or slot in taken:
            raise BatchError(f"slot {slot} is out of range or taken")

    def _open(self, parent: Run | None, tenant: int) -> int:
        handle = next(self._handles)
        self._branches[handle] = Run(parent=parent, tenant=tenant)
        if parent is not None:
            parent.holders += 1
        return handle

    def _get(self, branch: int) -> Run:
        self._require_idle()
        try:
            return self._branches[int(branch)]
        except KeyError:
            raise ReleasedHandleError(f"{branch} names no live branch") from None

    def _segments(self) -> set[Run]:
        tails = self._branches.values()
        return {run for tail in tails for run in tail.chain()[:-1]} | {run for top in self._index for run in top.chain()}

    @staticmethod
    def _shared(tail: Run) -> int:
        return sum(len(run.tokens) for run in tail.chain()[:-1])

    def _parts(self, tail: Run) -> list[tuple[Run, list[int]]]:
        """Each run of the branch with those of its pages that the branch reads: a copied half page is read as the copy."""
        runs = tail.chain()
        if not tail.tokens:
            runs = runs[:-1]
        parts = []
        for run in runs:
            followed = run is not runs[-1]
            full = run.stored // self.page_tokens
            parts.append((run, run.pages[:full] if followed and run.boundary == "copied" else run.pages))
        return parts

    def _needed(self, tail: Run, count: int) -> int:
        if count == 0:
            return 0
        stored, pages, parent = tail.stored, len(tail.pages), tail.parent
        if not tail.tokens and parent is not None:
            if parent.holders == 1:
                stored, pages = parent.stored, len(parent.pages)
            elif parent.boundary == "copied":
                stored = parent.stored % self.page_tokens
        return -(-(stored + count) // self.page_tokens) - pages

    def _append(self, row: Row) -> None:
        tail = self._branches[row.handle]
        parent = tail.parent
        if not tail.tokens and parent is not None:
            if parent.holders == 1:
                tail = self._branches[row.handle] = parent
                tail.holders = 0
                tail.boundary = ""
            elif parent.boundary == "copied":
                tail.lead = parent.stored % self.page_tokens
                tail.pages.append(self._free.pop())
                self._copies.append((parent.pages[-1], tail.pages[-1], tail.lead))
        row.undo = len(tail.tokens)
        position = self._shared(tail) + len(tail.tokens)
        for token in [int(self.next_tokens[row.slot])] if row.tokens is None else row.tokens:
            if tail.stored == len(tail.pages) * self.page_tokens:
                tail.pages.append(self._free.pop())
            self._step_tokens.append((token, position, tail.pages[-1] * self.page_tokens + tail.stored % self.page_tokens))
            tail.tokens.append(token)
            position += 1
        self._row_indptr.append(len(self._step_tokens))
        self._row_slots.append(row.slot)

    def _shorten(self, tail: Run, own: int) -> None:
        del tail.tokens[own:]
        if own == 0:
            tail.lead = 0
        keep = -(-tail.stored // self.page_tokens)
        self._give(tail.pages[keep:])
        del tail.pages[keep:]
