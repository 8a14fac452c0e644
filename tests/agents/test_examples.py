"""Every example runs, as a newcomer would run it: in a fresh process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.agents.gateway import serving

from branchline.agents.testing import ScriptedEngine

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES = 60
MOST_LINES_OF_THE_DEMO = 110


def example(name: str, *arguments: str, timeout_s: float = 200.0) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_all_examples_are_short_say_how_they_are_run_and_are_tested_here() -> None:
    this = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        most = MOST_LINES_OF_THE_DEMO if path.name == "fan_out.py" else MOST_LINES
        assert len(text.splitlines()) <= most, path.name
        assert f"python examples/{path.name}" in text.split('"""')[1]
        assert f'example("{path.name}"' in this


def test_in_process(smollm2: str) -> None:
    output = example("01_in_process.py", smollm2)
    assert "greedy: " in output
    assert "lively: " in output
    assert re.search(r"\d+ of \d+ prompt tokens are shared", output)


def test_openai_client() -> None:
    with ScriptedEngine(lambda prompt: f" heard {len(prompt.split())} words.") as engine, serving(engine) as gateway:
        output = example("03_openai_client.py", f"{gateway.url}/v1")
    lines = output.splitlines()
    assert lines[0] == "model: scripted"
    assert lines[1].strip().startswith("heard")
    assert [line[:8] for line in lines[2:5]] == ["0: heard", "1: heard", "2: heard"]


def test_the_demo_in_process(smollm2: str, tmp_path: Path) -> None:
    document = tmp_path / "short.txt"
    document.write_text("The red box holds nails. The blue box holds paint. The green box holds rope. " * 4)
    arguments = ("--in-process", "--model", smollm2, "--document", str(document), "--max-tokens", "12")
    output = example("fan_out.py", *arguments)
    assert "all 8 identical, token for token" in output
    assert "short.txt: " in output
    for row in (
        "pages shared",
        "pages private",
        "K/V without sharing",
        "time of the fork",
        "outside tensor work",
        "forking is",
    ):
        assert row in output


@pytest.mark.serve
def test_ray_actors(smollm2: str) -> None:
    output = example("02_ray_actors.py", smollm2)
    found = re.search(r"the handle takes (\d+) bytes", output)
    assert found is not None
    assert int(found[1]) < 200
    assert "Where does Ada work?" in output


@pytest.mark.serve
def test_the_demo_through_ray(smollm2: str, tmp_path: Path) -> None:
    document = tmp_path / "short.txt"
    document.write_text("The red box holds nails. The blue box holds paint.")
    output = example("fan_out.py", "--model", smollm2, "--document", str(document), "--max-tokens", "8", "--no-baseline")
    assert "starting Ray" in output
    assert "8, " in output
    assert "without forking" not in output
