"""What one forward pass works on: a view of the core's arrays. See `_core.pyi` for who fills them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from branchline.engine._core import BranchTree

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the branch tree, as cascade attention takes it.

    Query tokens `qo_indptr[g] : qo_indptr[g + 1]` (of the step's packed tokens) attend to the K/V of group g: pages
    `kv_indices[kv_indptr[g] : kv_indptr[g + 1]]`, in order, of which the last holds `last_page_len[g]` tokens and all others
    are full. A group without pages (`last_page_len` 0) covers tokens that have nothing at this level. The groups cover all
    tokens of the step, in order.

    In all levels but the last, every query of a group sees all the K/V of the group. In the last level each group is one
    row (one branch), its K/V ends with the row's own new tokens, and it is causal: of a row's n new tokens, the i-th sees all
    but the last n - 1 - i.

    Shapes: qo_indptr, kv_indptr [groups + 1]; last_page_len [groups]; all int32. The arrays are borrowed from the core and
    valid until its next plan.
    """

    qo_indptr: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array
    last_page_len: Int32Array


@dataclass(frozen=True, slots=True)
class Step:
    """The arrays of one step. T tokens in R rows; a row is one branch: a decode row has one token, a prefill row several.

    Attributes:
        token_ids, positions: [T] int32.
        write_slots: [T] int32: page * page_tokens + offset: where each token's K/V goes.
        row_indptr: [R + 1] int32: row r's tokens are `row_indptr[r] : row_indptr[r + 1]`.
        row_slots: [R] int32: the request slot that joined as this row.
        levels: root first, the rows' own tails last; at least one.
        copy_src, copy_dst, copy_tokens: [C] int32: pages whose first `copy_tokens` tokens must be copied before the step.

    All arrays are borrowed from the core and valid until its next plan.
    """

    token_ids: Int32Array
    positions: Int32Array
    write_slots: Int32Array
    row_indptr: Int32Array
    row_slots: Int32Array
    levels: tuple[Level, ...]
    copy_src: Int32Array
    copy_dst: Int32Array
    copy_tokens: Int32Array


def step_of(tree: BranchTree, num_tokens: int) -> Step:
    """The arrays of the core's last plan, which returned `num_tokens`. Borrows them."""
    rows, copies = tree.num_rows, tree.num_copies
    return Step(
        token_ids=tree.token_ids[:num_tokens],
        positions=tree.positions[:num_tokens],
        write_slots=tree.write_slots[:num_tokens],
        row_indptr=tree.row_indptr[: rows + 1],
        row_slots=tree.row_slots[:rows],
        levels=tuple(Level(*tree.level(index)) for index in range(tree.num_levels)),
        copy_src=tree.copy_src[:copies],
        copy_dst=tree.copy_dst[:copies],
        copy_tokens=tree.copy_tokens[:copies],
    )
