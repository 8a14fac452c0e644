"""`branchline bench fanout`: many branches on one prefix, against llama.cpp on the same file and tokens.

Every contestant has a process of its own, and they take turns within the run; llama.cpp takes part twice, with flash attention
off and on, and the better one counts. It shares the prefix too: its sequences refer to the same cells of one unified cache.
Where it isn't installed (`make bench-peers`) its figures are null.
"""

from __future__ import annotations

import json as jsonlib
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from branchline.engine.errors import ConfigError
from branchline.load.peers.base import Case
from branchline.load.peers.race import Race, has_llama_cpp
from branchline.load.peers.worker import Worker
from branchline.load.receipt import Line, emit, machine, show

PREFIXES = (1024, 2048, 4096)
BRANCHES = (1, 16, 64)
TAILS = Case(prefix=2048, branches=64, tail=256)
GROUPS = Case(prefix=2048, branches=64, groups=8, group_tail=512)
MANY = Case(prefix=8128, branches=500)  # the model's context ends at 8,192, and the branches must grow
CASES = {case.name: case for case in (*(Case(prefix=p, branches=n) for p in PREFIXES for n in BRANCHES), TAILS, GROUPS, MANY)}
SMOKE = ["prefill", *(f"2048x{branches}" for branches in BRANCHES), TAILS.name, "outside"]
IDENTITY = ("prefix", "branches", "tail", "groups", "group_tail", "tokens", "kv_dtype", "threads")
OUTSIDE = (1, 16, 64, 500)
PREFIX = 2048
ATTENTION = [(PREFIX, branches, kv_dtype) for branches in (1, 64, 500) for kv_dtype in ("float32", "bfloat16", "int8")]
LINEAR_GOALS = {1: 2.0, 8: 3.5, 16: 3.5, 64: 3.0}
LINEAR_TURNS = 7
Results = dict[str, Any]


def measure(only: list[str], threads: int, *, peers: bool) -> Results:
    """The named rows, with as many threads: {"rows", "prefill", "first_token", "outside_share", …}. Raises BenchmarkError."""
    results: Results = {}
    wanted = [CASES[name] for name in only if name in CASES]
    for prefix in sorted({case.prefix for case in wanted} | ({PREFIX} if "prefill" in only else set())):
        cases = [case for case in wanted if case.prefix == prefix]
        with Race(threads, cases or [CASES[f"{PREFIX}x1"]], peers=peers) as race:
            if prefix == PREFIX and "prefill" in only:
                results["prefill"] = [race.prefill()]
            results.setdefault("rows", []).extend(race.decode(case) for case in cases)
    for name, section in SECTIONS.items():
        if name in only:
            results |= section(threads, peers)
    return results


def _outside(threads: int, peers: bool) -> Results:
    with Worker("product", threads=threads) as product:
        shares = {str(branches): product.call("outside", PREFIX, branches)["share"] for branches in OUTSIDE}
    return {"outside": [{"threads": threads, **shares}]}


def _first_token(threads: int, peers: bool) -> Results:
    with Worker("product", threads=threads) as product:
        return {"first_token": [{"threads": threads, **product.call("first_token", PREFIX, 64)}]}


def _attention(threads: int, peers: bool) -> Results:
    with Worker("attention", threads=threads) as attention:
        return {"attention": [attention.call("attend", *case) for case in ATTENTION]}


def _linears(threads: int, peers: bool) -> Results:
    """Turn by turn, the median of each."""
    contestants = ("linears", "ggml") if peers else ("linears",)
    rows = []
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(name, threads=threads)) for name in contestants}
        for tokens in LINEAR_GOALS:
            times: dict[str, list[float]] = {name: [] for name in workers}
            for turn in range(LINEAR_TURNS + 1):
                for name, worker in workers.items():
                    took = float(worker.call("multiply", tokens))
                    if turn:  # the first one warms up
                        times[name].append(took * 1e3)
            ours, ggml = (statistics.median(times[name]) if name in times else None for name in ("linears", "ggml"))
            assert ours is not None
            ratio = None if ggml is None else ggml / ours
            rows.append({"threads": threads, "tokens": tokens, "ours_ms": ours, "ggml_ms": ggml, "ratio": ratio})
    return {"linears": rows}


SECTIONS: dict[str, Callable[[int, bool], Results]] = {
    "outside": _outside,
    "first-token": _first_token,
    "attention": _attention,
    "linears": _linears,
}
NAMES = ["prefill", *CASES, *SECTIONS]


def merge(old: Results, new: Results) -> Results:
    """`old` with its rows replaced where `new` has the same case, and the ratios computed from all of them."""
    lists = {key: value for key, value in old.items() if isinstance(value, list)}
    for key, rows in new.items():
        mine = [_identity(row) for row in rows]
        lists[key] = [row for row in lists.get(key, []) if _identity(row) not in mine] + rows
    return _ratios(lists, 1) | {"two_threads": _ratios(lists, 2)} | lists


def _identity(row: Results) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in IDENTITY)


def _ratios(lists: dict[str, list[Results]], threads: int) -> Results:
    """The headline figures with this many threads; None where they weren't measured."""

    def find(key: str, **wanted: Any) -> Results:
        rows = lists.get(key, [])
        return next((row for row in rows if row.items() >= ({"threads": threads} | wanted).items()), {})

    def ratio(branches: int, tail: int = 0) -> float | None:
        return find("rows", prefix=PREFIX, branches=branches, tail=tail, groups=1).get("ratio")

    return {f"ratio_{PREFIX}_{branches}": ratio(branches) for branches in BRANCHES} | {
        "ratio_tail256_64": ratio(64, TAILS.tail),
        "prefill_ratio": find("prefill", prefix=PREFIX).get("ratio"),
        "outside_share": {key: value for key, value in find("outside").items() if key != "threads"},
    }


def run(
    json: Annotated[str | None, typer.Option(help="Write one JSON object to this file; - is standard output.")] = None,
    smoke: Annotated[bool, typer.Option(help="Only the cases of the five headline ratios.")] = False,
    only: Annotated[list[str] | None, typer.Option(help=f"Rows to measure, repeatable: {', '.join(NAMES)}.")] = None,
    threads: Annotated[list[int] | None, typer.Option(help="1: by processor time; 2: by wall time. Default: both.")] = None,
    receipt: Annotated[
        Path | None, typer.Option(help="A receipt to write, or to add to: rows that it has are replaced, others stay.")
    ] = None,
) -> None:
    """Decode many branches of one prefix, against llama.cpp in the same run."""
    names = only or (SMOKE if smoke else NAMES)
    if unknown := [name for name in names if name not in NAMES]:
        raise ConfigError(f"--only {unknown[0]}: there are {', '.join(NAMES)}", param="only")
    before = jsonlib.loads(receipt.read_text()) if receipt is not None and receipt.exists() else {}
    results: Results = merge(before.get("results", {}), {})
    for count in threads or (1, 2):
        results = merge(results, measure(names, count, peers=has_llama_cpp()))
        if receipt is not None:
            whole = {"benchmark": "fanout", "machine": machine(), "results": results}
            receipt.write_text(jsonlib.dumps(whole, indent=1) + "\n")
    if json is None:
        _show(results)
    if receipt is None or json is not None:
        emit("fanout", results, json)


def _show(results: Results) -> None:
    for row in results.get("rows", []):
        name = Case(**{key: row[key] for key in ("prefix", "branches", "tail", "groups", "group_tail")}).name
        lines = [Line("decode", row["ours_tok_s"], "tokens/s")]
        if row["ratio"] is not None:
            lines += [Line("llama.cpp", row["llama_cpp_tok_s"], "tokens/s"), Line("ratio", row["ratio"], "×")]
        show(f"{name}, threads: {row['threads']}", lines)
    for row in results.get("prefill", []):
        lines = [Line("prefill", row["ours_tok_s"], "tokens/s")]
        if row["ratio"] is not None:
            lines += [Line("llama.cpp", row["llama_cpp_tok_s"], "tokens/s"), Line("ratio", row["ratio"], "×")]
        show(f"prefill of {row['prefix']} tokens, threads: {row['threads']}", lines)
    for row in results.get("outside", []):
        lines = [Line(f"{name} branches", 100 * share, "%") for name, share in row.items() if name != "threads"]
        show(f"outside the native call, threads: {row['threads']}", lines)
    for row in results.get("attention", []):
        lines = [
            Line("a step's attention", row["step_ms"], "ms"),
            Line("of sgemm's rate", 100 * row["of_sgemm"], "%", goal=90 if row["branches"] >= 64 else None),
            Line("of the read bandwidth", 100 * row["of_read"], "%", goal=70 if row["branches"] == 1 else None),
        ]
        show(f"attention, {row['kv_dtype']}, {row['prefix']}x{row['branches']}, threads: {row['threads']}", lines)
    for row in results.get("linears", []):
        lines = [Line("all linear layers", row["ours_ms"], "ms")]
        if row["ratio"] is not None:
            lines += [Line("ggml", row["ggml_ms"], "ms"), Line("ratio", row["ratio"], "×", goal=LINEAR_GOALS[row["tokens"]])]
        show(f"linear layers of {row['tokens']} tokens, threads: {row['threads']}", lines)
    for row in results.get("first_token", []):
        lines = [Line("first tokens", row["first_token_ms"], "ms"), Line("a step", row["step_ms"], "ms")]
        show(f"64 branches after a fork, threads: {row['threads']}", [*lines, Line("ratio", row["ratio"], "×", goal=1.2)])


def main() -> None:
    typer.run(run)


if __name__ == "__main__":
    main()
