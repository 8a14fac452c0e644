"""The command line: quick help, one-line errors with exit status 2, a clean start and end."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from tests.orchestrator.fake_engine import ALPHABET
from tests.orchestrator.local_gateway import local_gateway, wait_for

from branchline.orchestrator.chat import run_chat

SIZE = re.compile(r"(\d+) tokens, \d+ pages of its own")
CLI = "import sys; from branchline.orchestrator.cli import main; main()"


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "COLUMNS": "200", "NO_COLOR": "1"}


def branchline(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CLI, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from branchline.orchestrator import cli; sys.argv[1:] = ['--help']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "print(sorted({'ray', 'torch', 'starlette', 'httpx', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("[]")
    for command in ("serve", "chat", "models", "version", "bench"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--model", "/no/such/file.gguf"], "/no/such/file.gguf"),
        (["serve", "--port", "0"], "port = 0"),
        (["serve", "--pool-tokens", "0"], "pool_tokens = 0"),
        (["serve", "--dtype", "int3"], "dtype"),
        (["bench", "nothing"], "no benchmark 'nothing'"),
        (["chat", "--url", "http://127.0.0.1:9"], "branchline serve"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: list[str], said: str) -> None:
    done = branchline(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_found_before_ray_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = branchline("serve", "--port", str(taken.getsockname()[1]))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "can't listen" in done.stderr


def test_models_and_version() -> None:
    models = branchline("models")
    assert models.returncode == 0
    assert "smollm2-135m-instruct" in models.stdout
    assert branchline("version").stdout.strip()


def talk(monkeypatch: pytest.MonkeyPatch, url: str, *lines: str, system: str | None = None) -> str:
    said: Iterator[str] = iter(lines)

    def read(prompt: str = "") -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    out = io.StringIO()
    asyncio.run(run_chat(url, system=system, temperature=0.0, max_tokens=12, console=Console(file=out, width=200)))
    return out.getvalue()


def test_a_chat_grows_one_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_gateway() as gateway:
        out = talk(monkeypatch, gateway.url, "hello", "/size", "again", "/size", "/nonsense", "/help", "/quit", "never")
        sizes = [int(size) for size in SIZE.findall(out)]
        # The fake engine's template writes `<user>text`; each answer has 12 tokens.
        assert sizes == [len("<user>hello") + 12, len("<user>hello") + 12 + len("<user>again") + 12]
        assert "11 + 12 tokens" in out
        assert "34 + 12 tokens" in out
        assert "/nonsense isn't a command" in out
        assert "/fork N QUESTION" in out
        wait_for(lambda: gateway.engine.stats().sessions == 1)


def test_a_chat_forks_without_changing_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_gateway() as gateway:
        out = talk(
            monkeypatch, gateway.url, "/fork 2 first?", "hello", "/size", "/fork 3 which?", "/size", "/fork x", system="s"
        )
        assert [int(size) for size in SIZE.findall(out)] == [len("<system>s<user>hello") + 12] * 2
        assert gateway.engine.stats().forks == 5
        assert all(f"{i}. " in out for i in (1, 2, 3))
        assert any(character in out for character in ALPHABET)


@pytest.mark.serve
def test_serve_starts_answers_and_ends_cleanly(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = ["serve", "--model", str(tiny_model), "--served-name", "tiny", "--port", str(port), "--no-dashboard"]
    process = subprocess.Popen(
        [sys.executable, "-c", CLI, *arguments, "--pool-tokens", "4096", "--attention", "reference"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), start_new_session=True,
    )  # fmt: skip
    try:
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "temperature": 0}
        deadline = time.monotonic() + 200
        while True:
            try:
                answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=20)
                if answer.status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert answer.json()["usage"]["completion_tokens"] == 4
        children = set(_descendants(process.pid))
        assert children
        time.sleep(1.0)  # until it has printed where it serves
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, output
    assert f"http://127.0.0.1:{port}/v1" in output
    assert "Traceback" not in output
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children), 20)


def _descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *_descendants(int(child))]
    return found
