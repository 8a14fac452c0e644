"""Recorded traces are read from their files. The real ones lie in the folder that BRANCHLINE_TRACES names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from branchline.engine.errors import ConfigError
from branchline.load.simulate.files import read_trace
from branchline.load.simulate.simulator import SimulatedEngine, Simulator

MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 20, "hash_ids": [7, 8, 9]},
    {"timestamp": 500, "input_length": 1030, "output_length": 4, "hash_ids": [7, 8, 10]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.0000000,3180,8
"""


def mooncake(folder: Path) -> Path:
    path = folder / "mooncake.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in MOONCAKE))
    return path


def test_mooncake(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path))
    assert trace.arrival_s.tolist() == [0.0, 0.5]
    assert trace.prompt_tokens.tolist() == [1200, 1030]
    assert trace.output_tokens.tolist() == [20, 4]
    one, other = trace.prompt(0), trace.prompt(1)
    assert (one[:1024] == other[:1024]).all()
    assert not (one[1024:1030] == other[1024:]).any()
    assert trace.unlimited_hits() == 1024


def test_lengths_and_blocks_are_scaled(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path), length_scale=1 / 16)
    assert trace.prompt_tokens.tolist() == [75, 64]
    assert trace.output_tokens.tolist() == [1, 1]
    assert trace.block_tokens == 32
    assert (trace.prompt(0)[:64] == trace.prompt(1)).all()


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    trace = read_trace(path)
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 1.02004])
    assert trace.prompt_tokens.tolist() == [4808, 3180]
    assert trace.unlimited_hits() == 0


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "neither"),
        ("hello\n", "neither"),
        ('{"timestamp": 1}\n', "input_length"),
        ("TIMESTAMP,ContextTokens\nnow,1\n", "now"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: str, what: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(ConfigError, match=what):
        read_trace(path)


def test_a_file_that_is_not_there_and_scales_that_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="a block keeps no token"):
        read_trace(mooncake(tmp_path), length_scale=1e-4)
    with pytest.raises(ConfigError, match="more than 0"):
        read_trace(mooncake(tmp_path), length_scale=0)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mooncake_conversation.jsonl", 12031),
        ("mooncake_synthetic.jsonl", 3993),
        ("azure_2023_code.csv", 8819),
        ("azure_2023_conv.csv", 19366),
    ],
)
def test_real_traces_are_replayed(name: str, count: int) -> None:
    folder = os.environ.get("BRANCHLINE_TRACES")
    if folder is None or not (path := Path(folder) / name).exists():
        pytest.skip(f"no {name}: set BRANCHLINE_TRACES to a folder that has it")
    trace = read_trace(path, length_scale=1 / 16)
    assert len(trace) == count
    assert np.isfinite(trace.arrival_s).all()
    part = trace.first(400)
    outcome = Simulator(part, SimulatedEngine()).run()
    assert (outcome.fate != 0).all()
    assert outcome.lost_pages == 0
    assert outcome.cached_tokens <= outcome.prompt_tokens
