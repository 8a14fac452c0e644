"""Packed weights in a mapped file: the same model, held once by all engines of a machine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from tests.numerics import tiny_hf
from tests.numerics.rows import Rows
from tests.numerics.tiny_gguf import write_gguf

from branchline.engine.config import EngineConfig
from branchline.engine.model.native import NativeModel, load_native
from branchline.engine.model.packed_file import packed_path
from branchline.engine.model.runner import find_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRANCHLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_hf.make("llama"), GGMLQuantizationType.Q4_1)


def load(model: Path, weights: str, **settings: object) -> NativeModel:
    config = EngineConfig.from_dict({"model": str(model), "threads": 1, "compute": "native", "weights": weights, **settings})
    return load_native(config, *find_model(config))


def logits(model: NativeModel) -> torch.Tensor:
    rows = Rows.native(model)
    return torch.cat([rows.logits(prompt) for prompt in tiny_hf.prompts()])


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.glob("*") if path.suffix != ".lock")


def test_the_file_is_made_once_and_gives_the_same_logits(cache: Path, model: Path) -> None:
    expected = logits(load(model, "private"))
    assert not cache.exists()
    assert torch.equal(logits(load(model, "mapped")), expected)
    (path,) = files(cache)
    before = path.stat()
    assert torch.equal(logits(load(model, "mapped")), expected)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("quantize", [None, "q8_0", "q4_1"])
def test_weights_that_are_quantised_while_they_are_loaded(cache: Path, tmp_path: Path, quantize: str | None) -> None:
    folder = tmp_path / "hf"
    tiny_hf.make("llama").save_pretrained(folder)
    expected = logits(load(folder, "private", quantize=quantize))
    for _ in range(2):  # packed, then mapped
        assert torch.equal(logits(load(folder, "mapped", quantize=quantize)), expected)
    assert len(files(cache)) == 1


def test_another_model_or_another_quantisation_is_another_file(model: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(model), weights="mapped")
    of = find_model(config)[0]
    path = packed_path(of, config)
    assert packed_path(of, EngineConfig(model=str(model), weights="mapped", quantize="q8_0")) != path
    os.utime(model, ns=(1, 1))
    assert packed_path(of, config) != path


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "another trailer"])
def test_a_damaged_file_is_made_again(cache: Path, model: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits(load(model, "mapped"))
    (path,) = files(cache)
    whole = path.read_bytes()
    broken = {
        "cut": whole[: len(whole) // 2],
        "flipped": whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:],
        "empty": b"",
        "another trailer": whole[:-1] + b"?",
    }[damage]
    path.unlink()  # it may be mapped
    path.write_bytes(broken)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(load(model, "mapped")), expected)
    assert str(path) in caplog.text
    assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_only_the_sharing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BRANCHLINE_CACHE", str(tmp_path / "file"))
    expected = logits(load(model, "private"))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(load(model, "mapped")), expected)
    assert "aren't shared" in caplog.text


def test_a_disk_that_is_full_leaves_nothing_behind(
    cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(load(model, "private"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("branchline.engine.model.packed_file.os.replace", full)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(load(model, "mapped")), expected)
    assert "No space left" in caplog.text
    assert files(cache) == []


def test_engines_that_start_together_make_one_file(cache: Path, model: Path) -> None:
    expected = logits(load(model, "private"))
    models: list[NativeModel] = []
    starts = [threading.Thread(target=lambda: models.append(load(model, "mapped"))) for _ in range(4)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert len(files(cache)) == 1
    assert all(torch.equal(logits(each), expected) for each in models)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what a mapping shares")
def test_another_process_holds_the_same_memory(cache: Path, model: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.numerics.test_packed_file import load, logits\n"
        "model = load(Path(sys.argv[1]), 'mapped')\n"
        "logits(model)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    mine = load(model, "mapped")
    logits(mine)
    (path,) = files(cache)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        for process in ("self", str(other.pid)):
            sizes = _mapping(Path(f"/proc/{process}/smaps"), path)
            assert sizes["Shared_Clean"] + sizes["Shared_Dirty"] >= 0.9 * sizes["Rss"] > 0
        other.communicate()


def _mapping(smaps: Path, path: Path) -> dict[str, int]:
    """KiB of each kind of a file's mapping."""
    sizes: dict[str, int] = {}
    mine = False
    for line in smaps.read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.strip().endswith("kB"):
            if mine:
                sizes[name] = sizes.get(name, 0) + int(rest.split()[0])
        elif not rest.startswith(" ") and "-" in line.split()[0]:
            mine = line.endswith(str(path))
    return sizes
