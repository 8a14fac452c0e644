"""The fan-out benchmark measures what it says: our contestant is the engine's own step, and receipts add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from branchline.engine.errors import ConfigError
from branchline.load.bench import fanout
from branchline.load.measure import BenchmarkError
from branchline.load.peers import race
from branchline.load.peers.base import STEPS_RESERVED, Case
from branchline.load.peers.linears import Peer as Linears
from branchline.load.peers.ours import Peer as Ours
from branchline.load.peers.worker import Worker


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case(prefix=2048, branches=64), "2048x64"),
        (Case(prefix=2048, branches=64, tail=256), "2048x64+256"),
        (Case(prefix=2048, branches=64, groups=8, group_tail=512), "2048+8x512x64"),
    ],
)
def test_a_case_is_named_by_its_tree(case: Case, name: str) -> None:
    assert case.name == name
    assert fanout.CASES[name] == case


def test_a_case_has_room_for_every_level() -> None:
    case = Case(prefix=100, branches=4, tail=10, groups=2, group_tail=50)
    assert case.num_tokens == 100 + 2 * 50 + 4 * (10 + STEPS_RESERVED)


def test_our_contestant_shares_the_prefix_and_gives_each_branch_a_tail() -> None:
    peer = Ours(1, num_tokens=1024, branches=8)
    assert peer.prefill(64) > 0
    assert peer.branch(vars(Case(prefix=64, branches=8)))["pages"] == 64 // 16
    for _ in range(3):
        assert peer.step() > 0
    peer.prefill(64)
    # four pages of the prefix, two for each group's 32 tokens, one for each branch's 16
    case = Case(prefix=64, branches=8, groups=2, group_tail=32, tail=16)
    assert peer.branch(vars(case))["pages"] == 4 + 2 * 2 + 8


def test_our_linear_layers_are_the_models() -> None:
    peer = Linears(1)
    kinds = [kind for kind, _ in peer.matrices]
    assert kinds == ["qkv", "out", "gate_up", "down"] * 30 + ["head"]
    assert sum(matrix.rows * matrix.cols for _, matrix in peer.matrices) == 134_479_872  # SmolLM2-135M without its norms
    assert peer.multiply(2) > 0


def test_the_better_of_llama_cpps_two_ways_counts() -> None:
    row = race._compared({"ours": 300.0, "llama_cpp_flash_off": 100.0, "llama_cpp_flash_on": 75.0})
    assert row["llama_cpp_tok_s"] == 100.0
    assert row["ratio"] == 3.0
    alone = race._compared({"ours": 300.0})
    assert alone["llama_cpp_tok_s"] is None
    assert alone["ratio"] is None


def _row(**wanted: Any) -> dict[str, Any]:
    return {"prefix": 2048, "branches": 64, "tail": 0, "groups": 1, "group_tail": 0, "threads": 1, "ratio": 2.0} | wanted


def test_a_receipt_keeps_what_was_not_measured_again() -> None:
    old = fanout.merge({}, {"rows": [_row(), _row(tail=256, ratio=9.0)], "outside": [{"threads": 1, "1": 0.05}]})
    new = fanout.merge(old, {"rows": [_row(ratio=3.0), _row(threads=2, ratio=4.0)]})
    assert new["ratio_2048_64"] == 3.0
    assert new["ratio_tail256_64"] == 9.0
    assert new["two_threads"]["ratio_2048_64"] == 4.0
    assert new["outside_share"] == {"1": 0.05}
    assert len(new["rows"]) == 3


def test_rows_of_attention_differ_by_their_numbers() -> None:
    rows = [{"prefix": 2048, "branches": 1, "kv_dtype": kind, "threads": 1} for kind in ("float32", "int8")]
    assert len(fanout.merge(fanout.merge({}, {"attention": rows[:1]}), {"attention": rows})["attention"]) == 2


def test_an_unknown_row_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--only 7: there are prefill, 1024x1") as caught:
        fanout.run(only=["7"])
    assert caught.value.param == "only"


def test_a_contestant_that_fails_says_why() -> None:
    with Worker("attention", threads=1) as worker, pytest.raises(BenchmarkError, match="KeyError: 'float8'"):
        worker.call("attend", 64, 1, "float8")


def test_attention_is_measured_against_the_machine(tmp_path: Path) -> None:
    with Worker("attention", threads=1) as worker:
        row = worker.call("attend", 256, 4, "bfloat16")
    assert row["of_sgemm"] == pytest.approx(row["gflops"] / row["sgemm_gflops"])
    assert row["gflops"] == pytest.approx(4 * 4 * 9 * 64 * 257 * 30 / row["step_ms"] / 1e6)
    assert row["gb_s"] == pytest.approx(256 * 30 * 2 * 3 * 64 * 2 / row["step_ms"] / 1e6)
    assert json.loads(json.dumps(row)) == row


@pytest.mark.slow
def test_ggml_multiplies_by_the_same_weights() -> None:
    pytest.importorskip("llama_cpp")
    from branchline.load.peers.ggml import Peer as Ggml

    ours, ggml = Linears(1), Ggml(1)
    head = dict(ours.matrices)["head"]
    x = np.random.default_rng(0).standard_normal((3, head.cols), dtype=np.float32)
    np.testing.assert_allclose(
        ggml.product("model.embed_tokens.weight", x), x @ head.dequantize().T, atol=0.05 * float(np.abs(x).max()), rtol=0.02
    )
    assert sorted(ggml.weights) == sorted(
        [f"model.layers.{i}.{name}.weight" for i in range(30) for name in (
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )] + ["model.embed_tokens.weight"]
    )  # fmt: skip
    assert ggml.multiply(2) > 0
    ggml.close()
