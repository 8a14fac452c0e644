"""The demo's job on the default model: eight forked streams equal eight separate greedy runs, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.recorder import Recorder

from branchline.engine.config import EngineConfig
from branchline.engine.engine import Engine
from branchline.engine.types import Append, Chat, Message

LICENSE = Path(__file__).parents[2] / "LICENSE"
DEMO = {"compute": "native", "activations": "float32", "kv_dtype": "float32"}
QUESTIONS = [
    "Who may use the work?",
    "What must I keep when I redistribute it?",
    "Does it grant patent rights?",
    "When does the patent licence end?",
    "May I use trademarks?",
    "Is there any warranty?",
    "Who is liable for damages?",
    "What about contributions?",
]


@pytest.mark.parametrize(
    ("characters", "max_tokens"), [(1500, 24), pytest.param(20_000, 64, marks=pytest.mark.slow)], ids=["part", "whole"]
)
@pytest.mark.parametrize("settings", [{"compute": "torch"}, DEMO], ids=["torch", "demo"])
def test_forked_streams_equal_separate_runs(smollm2: str, settings: dict[str, str], characters: int, max_tokens: int) -> None:
    document = Message(role="system", content="Answer from this document.\n" + LICENSE.read_text()[:characters])
    asked = [Message(role="user", content=question) for question in QUESTIONS]
    uncached = {"scheduling": {"prefix_cache": False}}  # else the separate runs would find what the forks computed
    with Engine.load(EngineConfig.from_dict({"model": smollm2} | settings | uncached)) as engine:
        client = Recorder(engine)
        root = client.context(Chat(messages=(document,)))
        requests = []
        for branch, ask in zip(client.fork(root, len(asked)), asked, strict=True):
            client.send(Append(branch, Chat(messages=(ask,), add_generation_prompt=True)))
            requests.append(client.generate(branch, max_tokens=max_tokens))
        forked = [client.output(request) for request in requests]
        for ask, output in zip(asked, forked, strict=True):
            alone = client.context(Chat(messages=(document, ask), add_generation_prompt=True))
            separate = client.run(alone, max_tokens=max_tokens)
            assert separate.tokens == output.tokens
            assert separate.text == output.text
        assert all(output.finished.usage.shared_tokens > 0 for output in forked)
        assert engine.stats().copied_bytes == 0
