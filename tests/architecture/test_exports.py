"""The SDK's public face."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import get_type_hints

import pytest

import branchline.agents as agents
from branchline.agents.content import Sampling
from branchline.engine.types import SamplingParams

SOURCES = Path(__file__).parents[2] / "agents" / "branchline" / "agents"

PUBLIC = [
    "Branch",
    "BranchHandle",
    "BranchlineError",
    "ConnectError",
    "Connection",
    "ConnectionLostError",
    "Generation",
    "Message",
    "Result",
    "SamplingParams",
    "Session",
    "SessionClosedError",
    "Stream",
    "TransportError",
    "connect",
]


def test_exports_are_these_and_all_load() -> None:
    assert agents.__all__ == PUBLIC == dir(agents)
    assert all(getattr(agents, name).__name__ == name for name in PUBLIC)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        agents.nonsense  # noqa: B018


def test_every_export_is_typed_for_checkers() -> None:
    tree = ast.parse((SOURCES / "__init__.py").read_text())
    typed = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(PUBLIC) <= typed


def test_the_keyword_arguments_are_the_fields_of_the_parameters() -> None:
    assert set(get_type_hints(Sampling)) == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_thing_is_documented(name: str) -> None:
    thing = getattr(agents, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing) and thing.__module__.startswith("branchline.agents"):
        members = [member for key, member in vars(thing).items() if not key.startswith("_") and callable(member)]
        assert all(inspect.getdoc(member) for member in members)


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda path: path.stem)
def test_no_module_holds_mutable_state(path: Path) -> None:
    """At module level: constants, types, functions and classes. A lower-case name bound to a list, a set or a dict is state."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Set | ast.Dict):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            assert all(name.isupper() or name in ("_MODULES", "__all__") for name in names), names
    assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Global)]


@pytest.mark.parametrize("path", sorted((SOURCES / "transport").glob("*.py")), ids=lambda path: path.stem)
def test_every_transport_module_makes_a_transport(path: Path) -> None:
    if path.stem not in ("__init__", "base"):
        made = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert "make_transport" in made
