"""Which part may import which: read from the source, and seen at run time in a fresh process."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIENT_PARTS_OF_OTHERS = {
    "branchline.orchestrator.placement",
    "branchline.orchestrator.prefix",
    "branchline.orchestrator.protocol",
    "branchline.orchestrator.wire",
    "branchline.engine.types",
    "branchline.engine.errors",
    # In functions, when an engine is to be loaded in this process.
    "branchline.engine.config",
    "branchline.engine.engine",
}
HTTP_LIBRARIES = {"aiohttp", "fastapi", "flask", "httpx", "requests", "starlette", "uvicorn"}


def sources(part: str) -> list[Path]:
    found = sorted((ROOT / part / "branchline" / part).rglob("*.py"))
    assert found
    return found


def imports(path: Path) -> Iterator[str]:
    """Names of all modules that a file imports, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def parts(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("branchline.")}


@pytest.mark.parametrize("path", sources("engine"), ids=lambda path: path.stem)
def test_the_engine_knows_neither_ray_nor_http_nor_the_other_parts(path: Path) -> None:
    assert not packages(path) & (HTTP_LIBRARIES | {"ray"})
    assert parts(path) <= {"engine"}


@pytest.mark.parametrize("path", sources("orchestrator"), ids=lambda path: path.stem)
def test_the_orchestrator_imports_the_engine_and_not_what_is_above_it(path: Path) -> None:
    if path.stem not in ("cli", "chat"):  # the command line, and the chat behind it, are clients too
        assert parts(path) <= {"engine", "orchestrator"}


@pytest.mark.parametrize("path", sources("agents"), ids=lambda path: path.stem)
def test_the_sdk_imports_the_wire_alone(path: Path) -> None:
    foreign = {name for name in imports(path) if name.startswith(("branchline.engine", "branchline.orchestrator"))}
    modules = {name for name in foreign if name in CLIENT_PARTS_OF_OTHERS}
    assert all(name in modules or name.rpartition(".")[0] in modules for name in foreign), foreign
    if path.name != "ray.py":
        ray = {name for name in imports(path) if name.partition(".")[0] == "ray"}
        assert all("TYPE_CHECKING" in path.read_text(encoding="utf-8") for _ in ray), ray
    assert "torch" not in packages(path)


def test_types_and_errors_of_the_engine_import_nothing_heavy() -> None:
    allowed = {"__future__", "typing", "msgspec", "collections", "branchline", "difflib", "math"}
    for name in ("types", "errors", "config"):
        assert packages(ROOT / "engine/branchline/engine" / f"{name}.py") <= allowed


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after a statement."""
    script = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import branchline.agents", {"ray", "torch", "httpx", "numpy", "rich", "transformers"}),
        (
            "from branchline.agents import *\nimport branchline.agents.testing, branchline.agents.patterns.fan_out",
            {"ray", "torch", "httpx", "numpy", "transformers"},
        ),
        ("import branchline.agents.transport.http", {"ray", "torch", "numpy"}),
        ("import branchline.agents.view, branchline.agents.receipt", {"ray", "torch"}),
        (
            "import branchline.engine.types, branchline.engine.config, branchline.orchestrator.protocol",
            {"ray", "torch", "numpy"},
        ),
        ("import branchline.engine, branchline.orchestrator", {"ray", "torch", "numpy", "msgspec"}),
    ],
)
def test_importing_does_not_pull_in(statement: str, forbidden: set[str]) -> None:
    loaded = loaded_by(statement)
    assert "branchline" in loaded
    assert not loaded & forbidden


def test_the_whole_engine_loads_without_ray_and_http_servers() -> None:
    pytest.importorskip("branchline.engine._core", reason="the compiled core isn't built")
    loaded = loaded_by("import branchline.engine.engine")
    assert "torch" in loaded
    assert not loaded & {"ray", "fastapi", "starlette", "uvicorn", "flask"}


def test_no_package_file_does_anything() -> None:
    """Every `__init__.py` is empty, a docstring, or lazy; the namespace itself has none."""
    assert not list(ROOT.glob("*/branchline/__init__.py"))
    for part in ("engine", "orchestrator", "agents", "load"):
        for path in (ROOT / part / "branchline" / part).rglob("__init__.py"):
            top = set()
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Import):
                    top |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    top.add(str(node.module))
            assert top <= {"__future__", "typing", "importlib"}, path
