"""K/V as a cache of tokens: given up, found again, copied away, and taken from branches that nobody uses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from branchline.engine._core import BranchTree, OutOfPagesError
from branchline.engine.scheduler.strand import Strand, Swapped
from branchline.engine.swap import SwapSpace

# (page to copy from, page to copy to, number of tokens)
CopyPage = Callable[[int, int, int], None]


class KvCache:
    """Moves K/V of strands into the prefix index and out of it. Belongs to the engine's thread.

    Attributes:
        cached_tokens: tokens that were found, so that they weren't computed.
    """

    def __init__(self, tree: BranchTree, *, keep: bool, copy_page: CopyPage, swap: SwapSpace | None = None) -> None:
        """`keep`: whether what is given up stays in the prefix index until its pages are needed."""
        self._tree = tree
        self._keep = keep
        self._copy_page = copy_page
        self._swap = swap
        self._parked: OrderedDict[Strand, None] = OrderedDict()
        self.cached_tokens = 0

    @property
    def available(self) -> int:
        """Pages that nobody holds, those that only the prefix index holds included."""
        return self._tree.num_free_pages + self._tree.num_cached_pages

    @property
    def num_parked(self) -> int:
        """Strands that would give up their K/V."""
        return len(self._parked)

    @property
    def swapped_pages(self) -> int:
        """Pages that were copied to swap space since the start."""
        return 0 if self._swap is None else self._swap.saved_pages

    def peek(self, strand: Strand) -> tuple[int, int]:
        """(tokens that `bring_back` would find, pages among theirs that only the index holds)."""
        if strand.node is not None or not self._keep or len(strand.pending) < 2:
            return 0, 0
        return self._tree.peek(strand.pending[:-1], strand.tenant)

    def bring_back(self, strand: Strand) -> None:
        """Give a strand a node that holds as much of its K/V as can be found; the rest, and the last token, stay pending.

        Raises OutOfBranchesError.
        """
        if strand.node is None:
            self._find(strand)
        elif strand.swapped is not None:
            self._swap_in(strand)

    def insert(self, strand: Strand) -> None:
        """Let others find the full pages that the strand holds."""
        if self._keep and strand.node is not None:
            self._tree.insert(strand.node)

    def give_up(self, strand: Strand) -> None:
        """Give the pages back; all tokens are pending then. The strand must not be in the batch."""
        self.drop_swapped(strand)
        if strand.node is None:
            return
        node, strand.pending = strand.node, strand.tokens(self._tree)
        strand.computed = max(strand.computed, self._tree.length(node))
        strand.node = None
        self._let_go(node)

    def copy_away(self, strand: Strand, seconds_to_compute: Callable[[int], float]) -> bool:
        """Copy the strand's own tail to swap space, where that is quicker than computing it again, and give its pages back.
        What it shares stays. Returns whether it did.

        Args:
            seconds_to_compute: of so many tokens.
        """
        if self._swap is None or strand.node is None or strand.swapped is not None:
            return False
        tree, node = self._tree, strand.node
        length, shared, _, num_pages, _ = tree.describe(node)
        if num_pages == 0 or self._swap.seconds(num_pages) >= seconds_to_compute(length - shared):
            return False
        places = self._swap.save(tree.pages(node)[-num_pages:])
        if places is None:
            return False
        tail = tree.tokens(node)[shared:]
        tree.truncate(node, shared)
        strand.computed = max(strand.computed, length)
        strand.pending = np.concatenate((tail, strand.pending))
        strand.swapped = Swapped(places, len(tail))
        return True

    def drop_swapped(self, strand: Strand) -> None:
        """Forget what lies in swap space."""
        if strand.swapped is not None and self._swap is not None:
            self._swap.drop(strand.swapped.places)
        strand.swapped = None

    def release(self, strand: Strand) -> None:
        """The strand ends: its tokens are forgotten, its K/V is the index's."""
        self.unpark(strand)
        self.drop_swapped(strand)
        if strand.node is not None:
            node, strand.node = strand.node, None
            self._let_go(node)

    def rewind(self, strand: Strand, num_tokens: int) -> None:
        """Cut a strand that is in no batch down to its first tokens; the last of them is pending then."""
        keep, node = num_tokens - 1, strand.node
        if node is not None and self._tree.shared_length(node) <= keep < self._tree.length(node):
            self.drop_swapped(strand)
            strand.pending = self._tree.tokens(node)[keep:num_tokens]
            self._tree.truncate(node, keep)
        else:
            pinned = strand.pinned
            self.give_up(strand)
            strand.pending, strand.pinned = strand.pending[:num_tokens], pinned
        strand.computed = min(strand.computed, num_tokens)

    def park(self, strand: Strand) -> None:
        """Nobody computes on the strand now: its K/V may be given up, the longest parked first."""
        if strand.node is not None and not strand.pinned:
            self._parked[strand] = None
            self._parked.move_to_end(strand)

    def unpark(self, strand: Strand) -> None:
        """Its K/V must stay."""
        self._parked.pop(strand, None)

    def reclaim(self, num_pages: int) -> bool:
        """Have parked strands give up K/V until so many pages are available. Returns whether they are."""
        while self.available < num_pages and self._parked:
            strand, _ = self._parked.popitem(last=False)
            self.give_up(strand)
        return self.available >= num_pages

    def reclaim_from(self, tenant: int, keep: Strand) -> bool:
        """Have the tenant's longest parked strand but `keep` give up its K/V. Returns whether there was one."""
        for strand in self._parked:
            if strand.tenant == tenant and strand is not keep:
                del self._parked[strand]
                self.give_up(strand)
                return True
        return False

    def _let_go(self, node: int) -> None:
        if self._keep:
            self._tree.insert(node)
        self._tree.release(node)

    def _find(self, strand: Strand) -> None:
        tree, wanted = self._tree, strand.pending[:-1]
        if not self._keep:
            strand.node = tree.root(strand.tenant)
            return
        node = strand.node = tree.match(wanted, strand.tenant)
        found = tree.length(node)
        if found < len(wanted):
            source, destination, num_tokens = tree.graft(node, wanted[found:])
            if num_tokens:
                self._copy_page(source, destination, num_tokens)
                found += num_tokens
        strand.pending = strand.pending[found:]
        if found > strand.computed:
            strand.cached += found - strand.computed
            self.cached_tokens += found - strand.computed
            strand.computed = strand.inherited = found

    def _swap_in(self, strand: Strand) -> None:
        swapped = strand.swapped
        assert swapped is not None
        assert strand.node is not None
        assert self._swap is not None
        try:
            pages = self._tree.extend(strand.node, strand.pending[: swapped.num_tokens])
        except OutOfPagesError:  # then it is computed again
            self.drop_swapped(strand)
            return
        self._swap.load(swapped.places, pages)
        strand.pending = strand.pending[swapped.num_tokens :]
        strand.swapped = None
