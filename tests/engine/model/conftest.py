"""A tiny model in both formats, to be damaged by the tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics import tiny_hf
from tests.numerics.tiny_gguf import write_gguf

from branchline.engine.config import EngineConfig
from branchline.engine.model.runner import LoadedModel, load_model


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing by threads, and on a busy machine threads that wait for each other cost a lot."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("saved")
    tiny_hf.make("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def saved_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("saved") / "tiny.gguf", tiny_hf.make("llama"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the model's folder that the test may change."""
    return Path(shutil.copytree(saved, tmp_path / "tiny-llama"))


@pytest.fixture
def gguf_bytes(saved_gguf: Path) -> bytearray:
    return bytearray(saved_gguf.read_bytes())


def load(path: Path, **settings: Any) -> LoadedModel:
    return load_model(EngineConfig.from_dict({"model": str(path), **settings}))


def edit_config(folder: Path, **fields: Any) -> Path:
    """Change fields of config.json; a field that is set to None is dropped. Returns the folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder
