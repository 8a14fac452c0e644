"""No argument from Python can crash the process."""

from __future__ import annotations

import faulthandler

from tests.properties.fuzz_bindings import METHODS, PROPERTIES, fuzz

from branchline.engine import _core


def test_random_arguments() -> None:
    faulthandler.enable()
    outcomes = fuzz(1, 20_000)
    assert set(outcomes) >= {"returned", "TypeError", "ValueError", "ReleasedHandleError", "BatchError", "OutOfPagesError"}


def test_the_fuzzer_knows_every_member() -> None:
    members = {name for name in dir(_core.BranchTree) if not name.startswith("_")}
    assert members == {*METHODS, *PROPERTIES}
