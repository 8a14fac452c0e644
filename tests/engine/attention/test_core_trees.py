"""Every backend over the steps of the compiled core: random trees of forks, appends and releases, with and without
copy-on-write, against dense attention over each branch's own tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from branchline.engine.attention.base import AttentionBackend, PagePool
from branchline.engine.attention.find import backend_names, find_backend
from branchline.engine.step import step_of

from .trees import PAGE_TOKENS, dense_row, spec_of

core = pytest.importorskip("branchline.engine._core", reason="the compiled core isn't built")

VOCAB, LONGEST, SLOTS = 50, 400, 32


class Grove:
    """A tree of the core, a pool and a backend, beside the plain token lists of every branch.

    A token's K/V depends on its id and position, so a branch's are known from its tokens. Pages that no branch reads hold NaN.
    """

    def __init__(self, backend: type[AttentionBackend], max_levels: int, seed: int) -> None:
        self.spec = spec_of(num_heads=6, num_kv_heads=2)
        generator = torch.Generator().manual_seed(seed)
        shape = (self.spec.num_layers, 2, self.spec.num_kv_heads, self.spec.head_dim)
        self.of_token = torch.randn((VOCAB, *shape), generator=generator)
        self.of_position = torch.randn((LONGEST, *shape), generator=generator)
        self.generator = generator
        self.rng = np.random.default_rng(seed)
        self.tree = core.BranchTree(
            200, page_tokens=PAGE_TOKENS, max_branches=64, max_batch=SLOTS, max_step_tokens=256, max_levels=max_levels
        )
        self.pool = PagePool(self.spec, 200)
        self.backend = backend(self.spec, self.pool)
        self.tokens: dict[int, list[int]] = {}
        self.num_copies = self.most_levels = 0
        self.poison()

    def poison(self) -> None:
        """NaN into every page that no branch reads."""
        read = {page for branch in self.tokens for page in self.tree.pages(branch).tolist()}
        free = [page for page in range(self.pool.num_pages) if page not in read]
        self.pool.data[free] = float("nan")
        self.tree.check()

    def kv(self, tokens: list[int]) -> torch.Tensor:
        return self.of_token[tokens] + self.of_position[: len(tokens)]

    def step(self, new: dict[int, list[int]]) -> None:
        """Append tokens to branches in one step; compare every row of every layer with dense attention."""
        slot_of = dict(zip(new, self.rng.permutation(SLOTS).tolist(), strict=False))
        branch_of = {slot: branch for branch, slot in slot_of.items()}
        for branch, tokens in new.items():
            if len(tokens) == 1:
                self.tree.join(branch, slot_of[branch], tokens[0])
            else:
                self.tree.prefill(branch, slot_of[branch], np.array(tokens, np.int32))
        num_tokens = self.tree.plan()
        step = step_of(self.tree, num_tokens)
        self.backend.copy_pages(step)
        self.num_copies += len(step.copy_src)
        self.most_levels = max(self.most_levels, len(step.levels))
        self.backend.plan(step)
        written = self.of_token[step.token_ids.tolist()] + self.of_position[step.positions.tolist()]
        for branch, tokens in new.items():
            self.tokens[branch] += tokens
        for layer in range(self.spec.num_layers):
            q = torch.randn((num_tokens, self.spec.num_heads, self.spec.head_dim), generator=self.generator)
            out = self.backend.attend(layer, q, written[:, layer, 0], written[:, layer, 1])
            for row, slot in enumerate(step.row_slots.tolist()):
                begin, end = step.row_indptr[row : row + 2].tolist()
                dense = dense_row(self.spec, self.kv(self.tokens[branch_of[slot]])[:, layer], q[begin:end])
                torch.testing.assert_close(out[begin:end].double(), dense, atol=1e-4, rtol=1e-4)
        self.tree.commit()
        for branch, tokens in new.items():
            if len(tokens) == 1:
                self.tree.leave(branch)
            assert self.tree.tokens(branch).tolist() == self.tokens[branch]

    def root(self) -> int:
        branch = int(self.tree.root())
        self.tokens[branch] = []
        return branch

    def fork(self, parent: int, count: int) -> list[int]:
        children = [int(child) for child in self.tree.fork_many(parent, count)]
        for child in children:
            self.tokens[child] = list(self.tokens[parent])
        return children

    def release(self, branch: int) -> None:
        self.tree.release(branch)
        del self.tokens[branch]
        self.poison()

    def some_tokens(self, count: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, VOCAB, count)]


def backends() -> list[str]:
    return [name for name in backend_names() if name != "flashinfer" or torch.cuda.is_available()]


@pytest.fixture(params=backends())
def backend(request: pytest.FixtureRequest) -> type[AttentionBackend]:
    return find_backend(request.param, "cpu")


@pytest.mark.parametrize("max_levels", [1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_random_trees(backend: type[AttentionBackend], max_levels: int, seed: int) -> None:
    grove = Grove(backend, min(max_levels, backend.max_levels), seed)
    rng = grove.rng
    first = grove.root()
    grove.step({first: grove.some_tokens(int(rng.integers(2, 60)))})
    for _ in range(14):
        branches = list(grove.tokens)
        choice = rng.random()
        if choice < 0.3 and len(branches) < 20:
            parents = [branch for branch in branches if grove.tokens[branch]]
            if parents:
                grove.fork(int(rng.choice(np.array(parents, np.uint64))), int(rng.integers(1, 5)))
        elif choice < 0.4 and len(branches) > 2:
            grove.release(int(rng.choice(np.array(branches, np.uint64))))
        elif choice < 0.45:
            grove.root()
        else:
            lengths = rng.choice([0, 1, 1, 1, 1, 2, 15, 16, 17], len(branches))
            new = {branch: grove.some_tokens(int(n)) for branch, n in zip(branches, lengths, strict=True) if n}
            if new:
                grove.step(new)


@pytest.mark.parametrize("shared", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("max_levels", [1, 8])
def test_siblings_of_a_fork_at_every_side_of_a_page_boundary(
    backend: type[AttentionBackend], shared: int, max_levels: int
) -> None:
    grove = Grove(backend, min(max_levels, backend.max_levels), seed=shared)
    parent = grove.root()
    grove.step({parent: grove.some_tokens(shared)})
    branches = [parent, *grove.fork(parent, 4)]
    for _ in range(3):
        grove.step({branch: grove.some_tokens(1) for branch in branches})
    for branch in branches[1:3]:
        grove.release(branch)
    grove.step({branch: grove.some_tokens(17) for branch in (branches[0], branches[3], branches[4])})


@pytest.mark.parametrize("max_levels", [1, 8])
def test_nested_forks(backend: type[AttentionBackend], max_levels: int) -> None:
    grove = Grove(backend, min(max_levels, backend.max_levels), seed=3)
    branch = grove.root()
    grove.step({branch: grove.some_tokens(18)})
    for depth in range(5):
        branch, sibling = grove.fork(branch, 2)
        grove.step({branch: grove.some_tokens(depth * 5 + 1), sibling: grove.some_tokens(1)})
    grove.step({each: grove.some_tokens(1) for each in grove.tokens})
    if max_levels == 1:
        assert grove.num_copies > 0
    else:
        assert grove.num_copies == 0
        assert grove.most_levels > 4
