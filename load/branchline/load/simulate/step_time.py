"""How long a step takes, on the virtual clock."""

from __future__ import annotations

from dataclasses import dataclass

from branchline.engine._core import BranchTree


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """seconds = base + per_row * decode rows + per_token * prefill tokens + per_read * K/V tokens read.

    Each token reads all that lie before it on its branch. On the native engine these reads are arithmetic more than memory
    traffic, so that sharing doesn't make them fewer. The defaults are what `branchline bench schedule --calibrate` found for
    SmolLM2-135M (Q4_1) on the native engine, on two cores of an AMD EPYC (Zen 4); docs/simulator.md has how well they fit.
    """

    base_s: float = 3.94e-3
    per_row_s: float = 9.07e-4
    per_token_s: float = 7.90e-4
    per_read_s: float = 4.64e-7

    def seconds(self, decode_rows: int, prefill_tokens: int, kv_tokens: int) -> float:
        """Of one step."""
        return self.base_s + self.per_row_s * decode_rows + self.per_token_s * prefill_tokens + self.per_read_s * kv_tokens


def kv_tokens_read(tree: BranchTree) -> int:
    """K/V tokens that the tokens of the planned step read, each its own included."""
    count = tree.num_tokens
    return int(tree.positions[:count].sum()) + count
