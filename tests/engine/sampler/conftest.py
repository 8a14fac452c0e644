"""Small tensors: one thread is faster than two, and doesn't depend on who else uses the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from branchline.engine import _kernels
from branchline.engine.model.sampler import Sampler
from branchline.engine.model.sampler_native import NativeSampler


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["torch", "native-1", "native-2"], scope="package")
def make(request: pytest.FixtureRequest) -> Callable[[int, int], Sampler]:
    """A sampler of a vocabulary's size and so many slots; the native one on one thread and on two."""
    if request.param == "torch":
        return Sampler
    threads = _kernels.ThreadPool(int(request.param[-1]))
    return lambda vocab_size, max_batch: NativeSampler(vocab_size, max_batch, threads)
