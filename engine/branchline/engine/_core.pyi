"""The compiled core: page pool and branch tree. No K/V lives here: it deals in page numbers and token counts.

A **page** holds `page_tokens` tokens. A **segment** is an immutable run of tokens with its own pages, a parent segment and a
reference count. A **branch** is a pointer to a segment plus a growing tail. Every page has exactly one owner: a segment or
the tail of a branch. A branch handle is a 64-bit integer that carries a generation: one that was released is refused with
ReleasedHandleError for ever, and never names another branch.

Not thread-safe: one thread drives it. `counters` alone may be read from any thread.
"""

from typing import final

import numpy as np
import numpy.typing as npt

class CoreError(Exception):
    """Base of the core's errors."""

class ReleasedHandleError(CoreError):
    """The handle names a branch that was released, or none that ever was."""

class OutOfPagesError(CoreError):
    """Not enough free pages. Nothing was changed. The text has the numbers (need, free, total)."""

class OutOfBranchesError(CoreError):
    """`max_branches` (or the segments that go with them) are in use. Nothing was changed."""

class BatchError(CoreError, ValueError):
    """A slot is out of range or taken, a branch is in the batch already or not at all, a plan is not committed, …"""

@final
class BranchTree:
    """Pages, segments and branches of one engine, and the arrays of its steps."""

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
        """All memory is allocated here.

        `max_levels`: most *hard* levels in one chain (boundaries that lie inside a page without a copy). A branch whose
        first append would pass that copies the filled part of the parent's last page instead (copy-on-write). 1: every
        unaligned fork copies, so that each row's K/V is one flat table and `num_levels` may still be > 1 at page-aligned
        sharing points.

        `level_cost_pages`: what a level costs, in page reads. Runs of pages that several rows share are read once, in a level
        of their own, where that level saves at least so many reads in all; else with each row's own pages. At most max_levels
        such levels are kept, those that save most; with the hard ones a step has at most 2 * max_levels levels.

        `table_width`: above 0 each row's pages are kept in the padded `table` of so many columns, and there are no levels
        (`num_levels` is 0). Needs max_levels 1.

        `zero_used`: pages that are given back are not free before `take_used` has told which they are, so that the caller can
        zero them (no tenant sees another's K/V).

        Raises ValueError on a size below 1 (level_cost_pages: below 0) or if num_pages * page_tokens passes 32 bits.
        """
    # --- branches (effects are immediate; none of these may be called between plan() and commit()/rollback()) ---
    def nop(self) -> None:
        """Do nothing: what a call costs."""

    def root(self, tenant: int = 0) -> int:
        """Make an empty branch. Its pages, and those of all branches that are forked from it, are counted for `tenant` (16
        bits). Raises OutOfBranchesError."""

    def fork(self, branch: int, /) -> int:
        """Make a child: shares every token of `branch`. O(1); copies nothing. `branch` itself can go on."""

    def fork_many(self, branch: int, count: int, /) -> npt.NDArray[np.uint64]:
        """Make `count` children at once. O(1) per child. All or none."""

    def release(self, branch: int, /) -> None:
        """Give up a branch. Its tail's pages return, and those of segments that nobody holds any more."""

    def release_many(self, branches: npt.NDArray[np.uint64]) -> None:
        """Give up many. Checks all handles first (also for duplicates): all or none."""

    def truncate(self, branch: int, num_tokens: int, /) -> None:
        """Shorten a branch's own tail to `num_tokens` in total. ValueError below its shared part or above its length."""

    def length(self, branch: int, /) -> int:
        """Tokens of the branch, the shared ones included."""

    def shared_length(self, branch: int, /) -> int:
        """Tokens in the segments above the branch's tail. A branch whose segment nobody else holds takes it back as its tail
        when it next appends, so this can shrink after others were released."""

    def tokens(self, branch: int) -> npt.NDArray[np.int32]:
        """All token ids of the branch, root first. A copy."""

    def pages(self, branch: int) -> npt.NDArray[np.int32]:
        """Numbers of the pages that the branch reads, root first, shared ones included. A copy."""

    def describe(self, branch: int) -> tuple[int, int, int, int, int]:
        """(num_tokens, shared_tokens, shared_pages, private_pages, depth in segments)."""

    def pages_needed(self, branch: int, num_tokens: int, /) -> int:
        """New pages that appending `num_tokens` would take now (a copied half page included)."""
    # --- pages that are lent out, tenants, zeroing ---
    def lend(self, num_pages: int, tenant: int, /) -> int:
        """Take pages for somebody outside the tree (a transfer, a swap). Returns the lease's handle. Raises OutOfPagesError, or
        OutOfBranchesError when `max_branches` leases are out."""

    def lend_many(self, count: int, num_pages: int, tenant: int, /) -> npt.NDArray[np.uint64]:
        """`count` leases of `num_pages` each. All or none."""

    def give_back(self, lease: int, /) -> None:
        """End a lease. Raises ReleasedHandleError."""

    def give_back_many(self, leases: npt.NDArray[np.uint64]) -> None:
        """End many. All or none."""

    def leased_pages(self, lease: int, /) -> npt.NDArray[np.int32]:
        """Numbers of a lease's pages. A copy."""

    def tenant_pages(self, tenant: int, /) -> int:
        """Pages that a tenant's branches, segments (cached ones too) and leases own."""

    def tenant_cached_pages(self, tenant: int, /) -> int:
        """Those among a tenant's pages that only the prefix index holds."""

    def take_used(self) -> npt.NDArray[np.int32]:
        """With `zero_used`: pages that were given back since the last call. They are free afterwards: zero them before the
        next plan. A copy."""
    # --- the prefix index (to pin what it holds, or any branch's pages: keep a fork) ---
    def match(self, tokens: npt.NDArray[np.int32], tenant: int = 0) -> int:
        """Make a branch on the longest indexed prefix of `tokens`, in whole pages, of the same tenant; its `length` says how
        long (0: nothing was found). Raises OutOfBranchesError."""

    def peek(self, tokens: npt.NDArray[np.int32], tenant: int = 0) -> tuple[int, int]:
        """(tokens that `match` would find, how many of their pages nobody but the index holds). Modifies nothing."""

    def graft(self, branch: int, tokens: npt.NDArray[np.int32]) -> tuple[int, int, int]:
        """After `match`: the rest of a page. If an indexed page that follows on what the branch holds begins with some of
        `tokens` (those that come after it), the branch takes a page and these tokens, and their K/V must be copied before
        anything else is done: returns (page to copy from, page to copy to, number of tokens). 0 tokens: there is no such page,
        or no free one, or the branch has a tail; nothing was changed. BatchError if the branch is in the batch."""

    def extend(self, branch: int, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Append outside a step, for K/V that comes from elsewhere. Returns the pages of the branch's whole tail: where tokens
        begin on them is what it was when a tail that followed on the same shared part was cut off by `truncate`. Raises
        OutOfPagesError; BatchError if the branch is in the batch."""

    def private_part(self, branch: int, /) -> tuple[int, int]:
        """(pages, tokens) that only this branch holds, the prefix index apart: what a release gives back, or leaves to the
        index alone."""

    def insert(self, branch: int, /) -> int:
        """Index the full pages of a branch, as far as they follow on each other without a half page and no other segment holds
        the same. Returns how many tokens of the branch can be matched now. Their pages outlive the branch until they are
        evicted. Does not change what the branch holds; its tail may become shared."""

    def evict(self, num_pages: int, /) -> int:
        """Give up indexed segments that nobody else holds, least recently used leaf first, until `num_pages` pages were given
        back or none is left. Returns how many were. `plan` and `lend` do so by themselves when pages are short."""
    # --- the batch: decode rows stay from step to step ---
    def join(self, branch: int, slot: int, next_token: int, /) -> None:
        """Put a branch into the batch as a decode row with request slot `slot` (0 <= slot < max_batch)."""

    def leave(self, branch: int, /) -> None:
        """Take a branch out of the batch, or drop its queued prefill row. `release` and `release_many` do so by themselves."""

    def prefill(self, branch: int, slot: int, tokens: npt.NDArray[np.int32]) -> None:
        """Add a row of one or more tokens to the next plan only. The branch must not be in the batch. Takes a copy. BatchError
        if the queued rows alone pass max_step_tokens."""

    @property
    def next_tokens(self) -> npt.NDArray[np.int32]:
        """[max_batch], by slot: the token that the decode row of that slot takes in the next plan. The sampler writes it."""

    def plan(self) -> int:
        """Take the pages that every row needs, append each row's new tokens, fill the step's arrays. Returns the number of
        tokens T. Raises OutOfPagesError (after evicting what the prefix index alone holds, if that is enough), or BatchError
        over max_step_tokens or table_width; then nothing has changed and the prefill rows are still queued. With `zero_used`
        evicted pages must be zeroed first: on OutOfPagesError call `take_used` and try again."""

    def commit(self) -> None:
        """The step's K/V are computed: keep the new lengths. Prefill rows are gone from the batch."""

    def rollback(self) -> None:
        """The step failed: take the new tokens and pages back. Prefill rows are gone from the batch, decode rows stay."""
    # --- arrays of the last plan: allocated once, views of the same memory for ever; only the first N entries count ---
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_levels(self) -> int: ...
    @property
    def num_copies(self) -> int: ...
    @property
    def token_ids(self) -> npt.NDArray[np.int32]: ...
    @property
    def positions(self) -> npt.NDArray[np.int32]: ...
    @property
    def write_slots(self) -> npt.NDArray[np.int32]: ...
    @property
    def row_indptr(self) -> npt.NDArray[np.int32]: ...
    @property
    def row_slots(self) -> npt.NDArray[np.int32]: ...
    @property
    def copy_src(self) -> npt.NDArray[np.int32]: ...
    @property
    def copy_dst(self) -> npt.NDArray[np.int32]: ...
    @property
    def copy_tokens(self) -> npt.NDArray[np.int32]: ...
    def level(
        self, index: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Level `index` of the last plan: (qo_indptr, kv_indptr, kv_indices, last_page_len), cut to size. Views. The meaning
        is in `branchline.engine.step.Level`."""
    @property
    def table(self) -> npt.NDArray[np.int32]:
        """[max_batch, table_width], by row of the last plan: the numbers of its pages, in order. Only the first
        ceil(length / page_tokens) entries of a row count."""

    @property
    def table_lengths(self) -> npt.NDArray[np.int32]:
        """[max_batch], by row: tokens of its branch with this plan's."""
    # --- state ---
    @property
    def counters(self) -> dict[str, int]:
        """A snapshot: pages_total, pages_free, pages_used, branches, segments now; forks, steps, step_tokens, copies,
        evicted_pages, matched_tokens since the start; pages_cached now. May be read from any thread."""

    @property
    def num_used_pages(self) -> int: ...
    @property
    def num_free_pages(self) -> int: ...
    @property
    def num_cached_pages(self) -> int:
        """Pages that only the prefix index holds: `evict` can give them back."""

    @property
    def num_pages(self) -> int: ...
    @property
    def num_branches(self) -> int: ...
    @property
    def num_segments(self) -> int: ...
    @property
    def page_tokens(self) -> int: ...
    def check(self) -> None:
        """Verify every invariant: free + held = total, each page has one owner, each count equals its holders. Raises
        CoreError that says which failed."""

def copy_bytes(dst: npt.NDArray[np.uint8], src: npt.NDArray[np.uint8]) -> None:
    """Copy bytes past the caches where the machine can. Both one-dimensional, contiguous, of one size, not overlapping."""

def copy_pages(pool: object, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32]) -> int:
    """Copy the first `tokens[i]` tokens of page `src[i]` to page `dst[i]`, past the caches where the machine can.

    `pool`: a contiguous array or tensor of any dtype in main memory, [pages, layers, 2, kv_heads, page_tokens, head_dim]. Its
    destination pages are modified. Releases the GIL. Returns the bytes copied. Raises ValueError on an index out of range,
    TypeError on another kind of array.
    """
