"""Models for the numerics tests; each is made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics import tiny_hf

from branchline.engine.attention.find import backend_names
from branchline.engine.config import EngineConfig
from branchline.engine.model.runner import LoadedModel, load_model

Pair = tuple[Any, LoadedModel]
CPU_BACKENDS = [name for name in backend_names() if name != "flashinfer"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing by threads, and on a busy machine threads that wait for each other cost a lot."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """(transformers' model, ours from the folder that it saved) of a variant."""
    made: dict[str, Pair] = {}

    def of(variant: str) -> Pair:
        if variant not in made:
            reference = tiny_hf.make(variant)
            folder: Path = tmp_path_factory.mktemp(variant)
            reference.save_pretrained(folder)
            made[variant] = (reference, load_model(EngineConfig(model=str(folder))))
        return made[variant]

    return of
