"""The benchmarks of the core run and say what they must; how fast they are is for an idle machine to tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from branchline.load.bench import fork, kv, plan

KEYS = {
    "fork": {
        "empty_call_ns", "memcpy_us", "prefix_tokens", "page_tokens", "fork_one_ns", "fork_500_total_us", "fork_500_objects_us",
        "release_500_us", "first_append_ns", "kv_bytes_copied", "pages_added",
    },
    "kv": {
        "alloc_call_ns_per_seq", "alloc_batch_ns_per_page", "free_call_ns_per_seq", "free_batch_ns_per_page", "cow_us",
        "memcpy_us", "empty_call_ns",
    },
    "plan": {"empty_call_ns", "memcpy_us", "cascade_us", "flat_us"},
}  # fmt: skip


def test_the_first_append_of_500_branches_copies_nothing() -> None:
    result = fork.first_append()
    assert result["kv_bytes_copied"] == 0
    assert result["pages_added"] == 500
    assert result["first_append_ns"] > 0


def test_the_index_finds_the_prompt() -> None:
    assert all(value > 0 for value in kv.prefix_index().values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fork", "kv", "plan"])
def test_json_has_the_promised_keys(name: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    if name == "fork":
        fork.run(json=str(path), real_pool=False)
    else:
        {"kv": kv, "plan": plan}[name].run(json=str(path))
    result = json.loads(path.read_text())
    assert set(result) >= KEYS[name]
    for key in ("cascade_us", "flat_us") if name == "plan" else ():
        assert set(result[key]) == {"1", "9", "40", "96", "192", "500", "1000"}
