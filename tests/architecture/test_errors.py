"""Every error is drawn in its module's tree, has a code of its own, and crosses the wire as the same class."""

from __future__ import annotations

import importlib
import pickle
import re
from pathlib import Path

import pytest

import branchline.agents.errors
import branchline.orchestrator.protocol as protocol
from branchline.engine.errors import BranchlineError, from_wire
from branchline.engine.types import ErrorInfo

ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(path.with_suffix("").parts[-3:])
    for part in ("engine", "orchestrator", "agents")
    for path in sorted((ROOT / part / "branchline" / part).glob("errors.py"))
]


def classes() -> list[type[BranchlineError]]:
    for module in MODULES:
        importlib.import_module(module)
    found, queue = [], [BranchlineError]
    while queue:
        cls = queue.pop()
        found.append(cls)
        queue.extend(cls.__subclasses__())
    return [cls for cls in found if cls.__module__ in MODULES]


def test_every_part_with_errors_is_looked_at() -> None:
    assert {"branchline.engine.errors", "branchline.agents.errors"} <= set(MODULES)
    assert len(classes()) > 20


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_an_error_is_in_its_modules_tree_below_its_parent(cls: type[BranchlineError]) -> None:
    tree = importlib.import_module(cls.__module__).__doc__
    assert tree is not None
    lines = tree.splitlines()
    depths = {match[2]: len(match[1]) for line in lines if (match := re.match(r"([\s│├└─]*)(\w+Error)\b", line))}
    assert cls.__name__ in depths, f"{cls.__name__} isn't in the tree of {cls.__module__}"
    parent = next(base for base in cls.__mro__[1:] if issubclass(base, Exception))
    if parent.__name__ in depths and issubclass(parent, BranchlineError):
        assert depths[parent.__name__] < depths[cls.__name__]
    assert cls.__doc__


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_an_error_crosses_the_wire_as_the_same_class(cls: type[BranchlineError]) -> None:
    err = cls("4 needed, 3 there", param="n", retry_after_s=2.5)
    back = ErrorInfo.of(err).exception()
    assert type(back) is cls
    assert (back.message, back.param, str(back)) == ("4 needed, 3 there", "n", "4 needed, 3 there")
    assert back.retry_after_s == 2.5
    body = protocol.openai_error(err).error
    assert type(protocol.from_openai_error({"error": {"code": body.code, "message": body.message, "param": body.param}})) is cls
    copy = pickle.loads(pickle.dumps(err))
    assert (type(copy), copy.message, copy.param) == (cls, err.message, err.param)


def test_codes_are_unique_and_statuses_are_errors() -> None:
    found = classes()
    assert len({cls.code for cls in found}) == len(found)
    assert all(400 <= cls.status < 600 for cls in found)


def test_an_unknown_code_still_tells_what_was_wrong() -> None:
    err = from_wire("from_the_future", "something new")
    assert type(err) is BranchlineError
    assert "something new" in str(err)
    assert "from_the_future" in str(err)


def test_an_error_raised_again_is_equal_and_not_the_same() -> None:
    first = branchline.agents.errors.ConnectionLostError("gone", param="p")
    first.__cause__ = OSError("pipe")
    second = branchline.agents.errors.again(first)
    assert second is not first
    assert (type(second), second.message, second.param, second.__cause__) == (type(first), "gone", "p", first.__cause__)
