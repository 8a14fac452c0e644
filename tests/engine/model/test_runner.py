"""Loading by the engine's settings, finding architectures, running steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.model.conftest import load
from tests.numerics.rows import Rows

from branchline.engine import models
from branchline.engine.config import EngineConfig
from branchline.engine.errors import ConfigError, UnsupportedModelError
from branchline.engine.model.runner import load_model
from branchline.engine.models.base import Architecture, Decoder
from branchline.engine.models.find import architecture_names, find_architecture


def test_what_a_loaded_model_says_of_itself(folder: Path) -> None:
    model = load(folder)
    assert model.name == "tiny-llama"
    assert model.files.kind == "hf"
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    spec = model.decoder.attention_spec(16, model.dtype, model.device)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale) == (3, 4, 2, 16, 0.25)


def test_the_context_may_be_bounded(folder: Path) -> None:
    assert load(folder, context_length=100).model_config.context_length == 100
    assert load(folder).model_config.context_length == 512


def test_a_context_longer_than_the_models(folder: Path) -> None:
    with pytest.raises(ConfigError, match="context_length = 513: the model's is 512") as caught:
        load(folder, context_length=513)
    assert caught.value.param == "context_length"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        load_model(EngineConfig(model=str(folder), device="cuda"))


def test_every_architecture_file_has_an_architecture() -> None:
    assert architecture_names() == ["llama", "mistral", "qwen2", "qwen3"]
    for name in architecture_names():
        found = find_architecture(name)
        assert isinstance(found, Architecture)
        assert issubclass(found.decoder, Decoder)


def test_adding_an_architecture_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mymodel.py").write_text("from branchline.engine.models.qwen2 import ARCHITECTURE\n")
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    assert "mymodel" in architecture_names()
    assert find_architecture("mymodel").qkv_bias


def test_a_broken_architecture_file_shows_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "empty.py").write_text("")
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        find_architecture("broken")
    with pytest.raises(UnsupportedModelError, match=r"models\.empty has no ARCHITECTURE"):
        find_architecture("empty")


def test_copies_are_counted(folder: Path) -> None:
    """A fork inside a page whose backend can't take another level copies the filled part of one page."""
    model = load(folder)
    rows = Rows(model, "reference", max_levels=1)
    parent = rows.tree.root()
    rows.tree.prefill(parent, 0, np.arange(3, 8, dtype=np.int32))
    rows.step()
    assert rows.runner.copied_bytes == 0
    child = rows.tree.fork(parent)
    rows.tree.prefill(child, 0, np.array([9], np.int32))
    rows.step()
    bytes_a_token = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, size, float32
    assert rows.runner.copied_bytes == 5 * bytes_a_token


def test_logits_may_be_changed_in_place(folder: Path) -> None:
    logits = Rows(load(folder), "reference").logits([3, 4, 5])
    logits[0, 0] = -torch.inf
    assert logits.div_(2.0)[0, 0] == -torch.inf


def test_steps_outlive_the_arrays_that_they_were_planned_in(folder: Path) -> None:
    rows = Rows(load(folder), "reference")
    first, second = [3, 4, 5], [9, 8, 7]
    logits = rows.logits(first)
    kept = logits.clone()
    rows.logits(second)
    assert torch.equal(logits, kept)


def test_loading_imports_neither_transformers_nor_ray() -> None:
    code = (
        "import sys, branchline.engine.model.runner; "
        "print([name for name in ('transformers', 'ray', 'fastapi', 'llama_cpp') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
