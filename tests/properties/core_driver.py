"""Drives the compiled core and its plain-Python twin side by side, and verifies every step's arrays by themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from branchline.engine import _core
from branchline.engine.cache import reference

Core = _core.BranchTree
Twin = reference.BranchTree


@dataclass(frozen=True)
class Sizes:
    num_pages: int
    page_tokens: int
    max_branches: int
    max_batch: int
    max_step_tokens: int
    max_levels: int
    level_cost_pages: int
    table: bool = False  # the core keeps a padded table instead of levels
    zero_used: bool = False

    def build(self, cls: Callable[..., Any]) -> Any:
        return cls(
            self.num_pages,
            page_tokens=self.page_tokens,
            max_branches=self.max_branches,
            max_batch=self.max_batch,
            max_step_tokens=self.max_step_tokens,
            max_levels=self.max_levels,
            level_cost_pages=self.level_cost_pages,
            table_width=self.num_pages + 64 if self.table else 0,  # what passes it passes the pool too
            zero_used=self.zero_used,
        )


def slots_of(pages: np.ndarray, last_page_len: int, page_tokens: int) -> list[int]:
    """K/V slots of a table: all pages full but the last."""
    slots = [int(p) * page_tokens + i for p in pages for i in range(page_tokens)]
    return slots[: len(slots) - page_tokens + last_page_len] if len(pages) else []


def row_reads(core: Core) -> list[list[int]]:
    """For each row of the last plan the K/V slots that it reads, in order. Asserts that the levels are well formed."""
    rows = core.row_indptr[: core.num_rows + 1].tolist()
    if core.num_levels == 0:
        lengths = core.table_lengths[: core.num_rows].tolist()
        return [slots_of(core.table[r], core.page_tokens, core.page_tokens)[:length] for r, length in enumerate(lengths)]
    reads: list[list[int]] = [[] for _ in range(core.num_rows)]
    row_at = {first: r for r, first in enumerate(rows)}
    for index in range(core.num_levels):
        qo, kv, ids, last = core.level(index)
        assert len(qo) == len(kv) == len(last) + 1
        assert qo[0] == kv[0] == 0
        assert len(last) == 0 or qo[-1] == core.num_tokens
        assert kv[-1] == len(ids)
        for g in range(len(last)):
            pages = ids[kv[g] : kv[g + 1]]
            assert qo[g] < qo[g + 1], "a group has no query"
            assert (1 <= last[g] <= core.page_tokens) if len(pages) else last[g] == 0
            group = slots_of(pages, int(last[g]), core.page_tokens)
            first, end = row_at[int(qo[g])], row_at[int(qo[g + 1])]
            if index == core.num_levels - 1:
                assert end == first + 1, "a group of the last level isn't one row"
                assert len(pages) > 0
            for r in range(first, end):
                reads[r] += group
    return reads


class Driver:
    """Operations on both trees. Branches are named by the index at which they were made; `pairs` are the live ones'
    (core handle, twin handle). Each operation verifies that both did the same, or both refused with the same class."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.core: Core = sizes.build(Core)
        self.twin: Twin = sizes.build(Twin)
        self.pairs: dict[int, tuple[int, int]] = {}
        self.stale: list[int] = []
        self.made = 0
        self.leases: list[tuple[int, int]] = []
        self.kv: dict[int, int] = {}  # slot -> hash of the token history whose K/V was written there

    def both(self, call: Callable[[Any, int], Any]) -> tuple[Any, Any] | None:
        """Run `call(tree, which)` on core (0) and twin (1). None if both refused."""
        results: list[Any] = []
        for which, tree in enumerate((self.core, self.twin)):
            try:
                results.append(call(tree, which))
            except (_core.CoreError, ValueError) as err:
                results.append(err)
        a, b = results
        assert isinstance(a, Exception) == isinstance(b, Exception), f"core: {a!r}, twin: {b!r}"
        if isinstance(a, Exception):
            assert type(a) is type(b), f"core: {a!r}, twin: {b!r}"
            return None
        return a, b

    def _add(self, core_handle: int, twin_handle: int) -> int:
        assert core_handle not in {c for c, _ in self.pairs.values()}
        assert core_handle not in self.stale
        self.pairs[self.made] = (core_handle, twin_handle)
        self.made += 1
        return self.made - 1

    def root(self, tenant: int = 0) -> None:
        made = self.both(lambda tree, _: tree.root(tenant))
        if made is not None:
            self._add(*made)

    def fork(self, name: int) -> None:
        made = self.both(lambda tree, which: tree.fork(self.pairs[name][which]))
        if made is not None:
            self._add(*made)

    def fork_many(self, name: int, count: int) -> None:
        made = self.both(lambda tree, which: tree.fork_many(self.pairs[name][which], count))
        if made is not None:
            assert len(made[0]) == count
            for core_handle, twin_handle in zip(made[0].tolist(), made[1].tolist(), strict=True):
                self._add(core_handle, twin_handle)

    def release(self, name: int) -> None:
        assert self.both(lambda tree, which: tree.release(self.pairs[name][which])) is not None
        self._forget(name)

    def release_many(self, names: list[int]) -> None:
        done = self.both(lambda tree, which: tree.release_many(np.array([self.pairs[n][which] for n in names], np.uint64)))
        if done is None:
            assert len(set(names)) < len(names)
        else:
            for name in names:
                self._forget(name)

    def _forget(self, name: int) -> None:
        self.stale = [*self.stale[-20:], self.pairs.pop(name)[0]]

    def use_stale(self) -> None:
        for handle in self.stale[-3:]:
            for call in (self.core.length, self.core.fork, self.core.release, self.core.leave):
                try:
                    call(handle)
                except _core.ReleasedHandleError:
                    continue
                raise AssertionError(f"{call.__name__} took a stale handle")

    def truncate(self, name: int, num_tokens: int) -> None:
        self.both(lambda tree, which: tree.truncate(self.pairs[name][which], num_tokens))

    def join(self, name: int, slot: int, token: int) -> None:
        self.both(lambda tree, which: tree.join(self.pairs[name][which], slot, token))

    def leave(self, name: int) -> None:
        self.both(lambda tree, which: tree.leave(self.pairs[name][which]))

    def prefill(self, name: int, slot: int, tokens: list[int]) -> None:
        self.both(lambda tree, which: tree.prefill(self.pairs[name][which], slot, np.array(tokens, np.int32)))

    def lend(self, count: int, num_pages: int, tenant: int) -> None:
        made = self.both(lambda tree, _: tree.lend_many(count, num_pages, tenant))
        if made is not None:
            self.leases += zip(made[0].tolist(), made[1].tolist(), strict=True)

    def give_back(self, count: int, *, twice: bool = False) -> None:
        leases = self.leases[:count]
        given = leases + leases[:1] * twice
        done = self.both(lambda tree, which: tree.give_back_many(np.array([lease[which] for lease in given], np.uint64)))
        if done is None:
            assert twice
        elif leases:
            del self.leases[:count]
            assert self.both(lambda tree, which: tree.give_back(leases[0][which])) is None

    def match(self, name: int, keep: int, others: list[int], tenant: int) -> None:
        """Look for the first `keep` tokens of a branch and others after them."""
        tokens = np.array([*self.core.tokens(self.pairs[name][0])[:keep].tolist(), *others], np.int32)
        peeked = self.both(lambda tree, _: tree.peek(tokens, tenant))
        assert peeked is not None
        assert peeked[0] == peeked[1]
        cached = self.core.num_cached_pages
        made = self.both(lambda tree, _: tree.match(tokens, tenant))
        if made is not None:
            found = self.core.length(made[0])
            assert found % self.core.page_tokens == 0
            assert self.core.tokens(made[0]).tolist() == tokens[:found].tolist()
            assert (found, cached - self.core.num_cached_pages) == peeked[0]
            grafted = self.both(lambda tree, which: tree.graft(made[which], tokens[found:]))
            assert grafted is not None
            src, dst, count = grafted[0]
            assert count == grafted[1][2]
            for i in range(count):
                self.kv[dst * self.core.page_tokens + i] = self.kv[src * self.core.page_tokens + i]
            assert self.core.tokens(made[0]).tolist() == tokens[: found + count].tolist()
            self._add(*made)

    def swap(self, name: int) -> None:
        """Cut off a branch's tail and put it back on other pages, as a swap does."""
        core, pair, size = self.core, self.pairs[name], self.core.page_tokens
        if self.both(lambda tree, which: tree.extend(pair[which], np.empty(0, np.int32))) is None:
            return  # it's in the batch
        shared = core.shared_length(pair[0])
        tail = core.tokens(pair[0])[shared:]
        pages = core.pages(pair[0])[len(core.pages(pair[0])) - core.describe(pair[0])[3] :].tolist()
        kept = [self.kv.get(page * size + i, 0) for page in pages for i in range(size)]
        self.truncate(name, shared)
        done = self.both(lambda tree, which: tree.extend(pair[which], tail))
        if done is None:
            assert self.sizes.zero_used
            return
        assert len(done[0]) == len(done[1]) == len(pages)
        for page, i in itertools.product(range(len(pages)), range(size)):
            self.kv[int(done[0][page]) * size + i] = kept[page * size + i]

    def insert(self, name: int) -> None:
        """Index a branch; what is indexed of it must be found afterwards."""
        done = self.both(lambda tree, which: tree.insert(self.pairs[name][which]))
        assert done is not None
        assert done[0] == done[1]

    def evict(self, num_pages: int) -> None:
        done = self.both(lambda tree, _: tree.evict(num_pages))
        assert done is not None
        assert done[0] == done[1]

    def take_used(self) -> None:
        done = self.both(lambda tree, _: tree.take_used())
        assert done is not None
        assert len(done[0]) == len(done[1])

    def sample(self, seed: int) -> None:
        """Set the next token of every slot."""
        tokens = np.random.default_rng(seed).integers(0, 1000, self.sizes.max_batch).astype(np.int32)
        self.core.next_tokens[:] = tokens
        self.twin.next_tokens[:] = tokens

    def step(self, *, commit: bool) -> None:
        """Plan, verify the arrays, commit or roll back, verify again."""
        before = {name: self._state(name) for name in self.pairs} if not commit else {}
        held = self._held()
        planned = self.both(lambda tree, _: tree.plan())
        if planned is None:
            # Where used pages have to be zeroed first, evicting comes before the refusal.
            assert self._held() == held or self.sizes.zero_used
            return
        assert planned[0] == planned[1] == self.core.num_tokens
        core, twin = self.core, self.twin
        assert core.num_rows == twin.num_rows
        assert core.num_copies == twin.num_copies
        assert core.num_levels <= 2 * self.sizes.max_levels
        reads = row_reads(core)
        self._write(commit=commit)
        rows = core.row_indptr[: core.num_rows + 1].tolist()
        done = self.both(lambda tree, _: tree.commit() if commit else tree.rollback())
        assert done is not None
        if commit:
            self._verify_rows(reads, rows)
        else:
            assert {name: self._state(name) for name in self.pairs} == before

    def _held(self) -> int:
        return self.core.num_pages - self.core.num_free_pages - self.core.num_used_pages

    def _state(self, name: int) -> tuple[Any, ...]:
        """What a rollback must restore."""
        handle = self.pairs[name][0]
        return self.core.tokens(handle).tolist(), self.core.pages(handle).tolist()

    def _write(self, *, commit: bool) -> None:
        """Do to `kv` what the model would do to the pool: copies, then the new tokens (whose value follows the histories)."""
        core = self.core
        size = core.page_tokens
        for src, dst, count in zip(
            core.copy_src[: core.num_copies].tolist(),
            core.copy_dst[: core.num_copies].tolist(),
            core.copy_tokens[: core.num_copies].tolist(),
            strict=True,
        ):
            for i in range(count):
                self.kv[dst * size + i] = self.kv[src * size + i]
        slots = core.write_slots[: core.num_tokens].tolist()
        assert len(set(slots)) == len(slots), "two tokens are written to one slot"
        reads = row_reads(core)
        rows = core.row_indptr[: core.num_rows + 1].tolist()
        tokens = core.token_ids[: core.num_tokens].tolist()
        positions = core.positions[: core.num_tokens].tolist()
        for r in range(core.num_rows):
            for t in range(rows[r], rows[r + 1]):
                position = positions[t]
                assert reads[r][position] == slots[t], "a new token isn't read where it is written"
                value = hash((self.kv[reads[r][position - 1]] if position else 0, tokens[t]))
                self.kv[slots[t]] = value
            assert len(reads[r]) == positions[rows[r + 1] - 1] + 1

    def _verify_rows(self, reads: list[list[int]], rows: list[int]) -> None:
        """Each row read exactly its own history, and wrote to no page that another branch reads."""
        core = self.core
        slots = core.row_slots[: core.num_rows].tolist()
        assert len(set(slots)) == len(slots)
        pages = {name: set(core.pages(handle).tolist()) for name, (handle, _) in self.pairs.items()}
        histories = {tuple(self.kv[s] for s in read): read for read in reads}
        assert len(reads) == core.num_rows
        written: dict[int, int] = {}
        for r in range(core.num_rows):
            for slot in core.write_slots[rows[r] : rows[r + 1]].tolist():
                page = slot // core.page_tokens
                assert written.setdefault(page, r) == r, "two rows write to one page"
        for page in written:
            assert sum(page in held for held in pages.values()) == 1, "a page is written that two branches read"
        expected = set()
        for handle, _ in self.pairs.values():
            value, history = 0, []
            for token in core.tokens(handle).tolist():
                value = hash((value, token))
                history.append(value)
            expected.add(tuple(history))
        assert set(histories) <= expected, "a row reads what no branch holds"

    def verify(self) -> None:
        """Both trees agree on everything that can be asked, and every invariant holds."""
        core, twin = self.core, self.twin
        core.check()
        twin.check()
        assert core.num_free_pages == twin.num_free_pages
        assert core.num_branches == twin.num_branches == len(self.pairs)
        assert core.num_segments == twin.num_segments
        assert core.num_cached_pages == twin.num_cached_pages
        assert core.num_used_pages == twin.num_used_pages
        assert [core.tenant_pages(t) for t in range(3)] == [twin.tenant_pages(t) for t in range(3)]
        assert [core.tenant_cached_pages(t) for t in range(3)] == [twin.tenant_cached_pages(t) for t in range(3)]
        assert sum(core.tenant_pages(t) for t in range(3)) == self._held()
        forward: dict[int, int] = {}
        backward: dict[int, int] = {}
        held: set[int] = set()
        for a, b in self.leases:
            lent = core.leased_pages(a).tolist()
            assert len(lent) == len(twin.leased_pages(b)) == len(set(lent))
            assert not held & set(lent)
            held |= set(lent)
        lent_pages = set(held)
        for a, b in self.pairs.values():
            assert core.describe(a) == twin.describe(b)
            assert core.private_part(a) == twin.private_part(b)
            assert core.length(a) == twin.length(b)
            assert core.shared_length(a) == twin.shared_length(b)
            assert core.tokens(a).tolist() == twin.tokens(b).tolist()
            core_pages, twin_pages = core.pages(a).tolist(), twin.pages(b).tolist()
            assert len(core_pages) == len(twin_pages)
            held |= set(core_pages)
            assert not lent_pages & set(core_pages)
            for p, q in zip(core_pages, twin_pages, strict=True):
                assert forward.setdefault(p, q) == q
                assert backward.setdefault(q, p) == p
            for count in (0, 1, core.page_tokens):
                assert core.pages_needed(a, count) == twin.pages_needed(b, count)
        assert len(held) <= self._held()
