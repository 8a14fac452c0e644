"""A branch's tokens, of which the tree may hold the K/V of the first ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from branchline.engine._core import BranchTree

Tokens = npt.NDArray[np.int32]
NO_TOKENS: Tokens = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Swapped:
    """K/V that lies in swap space: of the first `num_tokens` pending tokens, on `places` of the space, in order."""

    places: npt.NDArray[np.int64]
    num_tokens: int


@dataclass(slots=True, eq=False, kw_only=True)
class Strand:
    """What is known of one branch's tokens. The K/V is a cache of them: it may be given up whenever nobody computes on it.

    Attributes:
        node: the core's handle; None: no K/V is held and all tokens are pending.
        pending: tokens at the end whose K/V the node doesn't hold. Once work is done it is never empty on a strand with
            tokens: the last one stays pending, because whoever generates needs that token's logits. Arrays are shared
            between strands: never written to.
        tenant: whom the core counts its pages for, and whose cached prefixes it may use (16 bits).
        pinned: its K/V stays while the strand lives.
        computed: most tokens whose K/V was ever there; what is computed below it again was lost.
        inherited: tokens at its beginning that it didn't compute: its parent's, or found in the prefix cache.
        cached: tokens that the prefix cache had for it, in all.
        swapped: where the K/V of the first pending tokens lies, if not in the pool.
    """

    node: int | None = None
    pending: Tokens = field(default_factory=lambda: NO_TOKENS)
    tenant: int = 0
    pinned: bool = False
    computed: int = 0
    inherited: int = 0
    cached: int = 0
    swapped: Swapped | None = None

    def held(self, tree: BranchTree) -> int:
        """Tokens whose K/V its node holds."""
        return 0 if self.node is None else tree.length(self.node)

    def length(self, tree: BranchTree) -> int:
        """All its tokens."""
        return self.held(tree) + len(self.pending)

    def tokens(self, tree: BranchTree) -> Tokens:
        """All its tokens. A copy, unless nothing is held."""
        return self.pending if self.node is None else np.concatenate((tree.tokens(self.node), self.pending))
