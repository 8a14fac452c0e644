"""`branchline bench fanout`: many branches on one prefix, against llama.cpp on the same file and tokens.

Each measurement has a process of its own; ours and llama.cpp's, with flash attention off and on, take turns. llama.cpp shares
the prefix too: its sequences are copies within one unified cache. Where it isn't installed its columns are null; install it
with `CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json as jsonlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer

from branchline.engine.config import DEFAULT_MODEL, EngineConfig
from branchline.load.measure import BenchmarkError
from branchline.load.receipt import Line, emit, show

MODULE = "branchline.load.bench.fanout"
PREFIXES = (1024, 2048, 4096)
BRANCHES = (1, 16, 64)
TAIL = 256
SMOKE = ((2048, 1, 0), (2048, 16, 0), (2048, 64, 0), (2048, 64, TAIL))
STEPS = 8
WARM_UP = 2
CHUNK = 512  # tokens of a prefill step, on both sides
OUTSIDE = (1, 16, 64, 500)
Clock = Callable[[], float]


def _clock(threads: int) -> Clock:
    """One thread by processor time, which other work on the machine disturbs least; several by wall time."""
    return time.process_time if threads == 1 else time.perf_counter


def _tokens(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(100, 40_000, count).astype(np.int32)


def ours(threads: int, prefix: int, branches: int, tail: int) -> dict[str, float]:
    """Decode steps of the native engine: plan, compute, take the likeliest tokens, commit."""
    from branchline.engine._core import BranchTree
    from branchline.engine.attention.base import PagePool
    from branchline.engine.attention.native import Backend
    from branchline.engine.model.native import NativeModel, NativeRunner, open_model
    from branchline.engine.step import step_of
    from branchline.engine.threads import set_compute_threads

    set_compute_threads(threads)  # torch's, which look for the likeliest tokens
    config = EngineConfig(model=DEFAULT_MODEL, compute="native", threads=threads)
    model = open_model(config)
    assert isinstance(model, NativeModel)
    num_pages = prefix // config.page_tokens + branches * ((tail + STEPS + WARM_UP) // config.page_tokens + 2) + 8
    spec = model.attention_spec(config.page_tokens)
    pool = PagePool(spec, num_pages)
    attention = Backend(spec, pool, threads=model.threads)
    runner = NativeRunner(model, attention)
    tree = BranchTree(
        num_pages,
        page_tokens=config.page_tokens,
        max_batch=branches,
        max_step_tokens=max(CHUNK, branches),
        max_levels=attention.max_levels,
    )
    clock = _clock(threads)

    def step() -> None:
        planned = step_of(tree, tree.plan())
        logits = runner.run(planned, planned.row_indptr[1:] - 1)
        tree.next_tokens[planned.row_slots] = logits.argmax(dim=-1).numpy()
        tree.commit()

    def prefill(branch: int, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        for begin in range(0, len(tokens), CHUNK):
            tree.prefill(branch, 0, tokens[begin : begin + CHUNK])
            step()

    root = tree.root()
    began = clock()
    prefill(root, _tokens(prefix, 0))
    prefill_s = clock() - began
    children = [int(child) for child in tree.fork_many(root, branches)]
    for slot, child in enumerate(children):
        if tail:
            prefill(child, _tokens(tail, slot + 1))
    for slot, child in enumerate(children):
        tree.join(child, slot, 100 + slot)
    return _summary(step, clock, branches, prefix / prefill_s)


def llama_cpp(threads: int, prefix: int, branches: int, tail: int, flash: bool) -> dict[str, float]:
    """The same by llama.cpp."""
    api: Any = importlib.import_module("llama_cpp")
    from branchline.engine.model.resolve import resolve_model

    api.llama_backend_init()
    path = resolve_model(DEFAULT_MODEL).path
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx = prefix + branches * (tail + STEPS + WARM_UP) + 256
    params.n_batch = params.n_ubatch = max(CHUNK, branches)
    params.n_seq_max = branches
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = int(flash)
    params.kv_unified = True
    context = api.llama_init_from_model(model, params)
    memory = api.llama_get_memory(context)
    batch = api.llama_batch_init(max(CHUNK, branches), 0, 1)
    vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    clock = _clock(threads)

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if (code := api.llama_decode(context, batch)) != 0:
            raise BenchmarkError(f"llama_decode returned {code} for {len(rows)} tokens")

    def prefill(sequence: int, first: int, tokens: list[int]) -> None:
        for begin in range(0, len(tokens), CHUNK):
            piece = tokens[begin : begin + CHUNK]
            decode([(token, first + begin + i, sequence, i + 1 == len(piece)) for i, token in enumerate(piece)])

    began = clock()
    prefill(0, 0, _tokens(prefix, 0).tolist())
    prefill_s = clock() - began
    for sequence in range(1, branches):
        api.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
    if tail:
        for sequence in range(branches):
            prefill(sequence, prefix, _tokens(tail, sequence + 1).tolist())
    next_tokens, length = [100 + i for i in range(branches)], prefix + tail

    def step() -> None:
        nonlocal length
        decode([(token, length, sequence, True) for sequence, token in enumerate(next_tokens)])
        length += 1
        for i in range(branches):
            logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, i), (vocab_size,))
            next_tokens[i] = int(logits.argmax())

    return _summary(step, clock, branches, prefix / prefill_s)


def _summary(step: Callable[[], None], clock: Clock, branches: int, prefill_tok_s: float) -> dict[str, float]:
    times = []
    for index in range(WARM_UP + STEPS):
        began = clock()
        step()
        if index >= WARM_UP:
            times.append(clock() - began)
    took = statistics.median(times)
    return {
        "step_ms": took * 1e3,
        "spread_ms": (max(times) - min(times)) * 1e3,
        "tok_s": branches / took,
        "prefill_tok_s": prefill_tok_s,
    }


def outside(branches: int) -> dict[str, float]:
    """Share of the engine's busy time that isn't in the native call, while it decodes `branches` streams of one prefix."""
    from branchline.engine.engine import Engine
    from branchline.engine.model.native import NativeRunner
    from branchline.engine.types import Context, Fork, Generate, SamplingParams, TokenIds

    spent = [0.0]
    run = NativeRunner.run

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        logits = run(*args)
        spent[0] += time.perf_counter() - began
        return logits

    setattr(NativeRunner, "run", timed)  # noqa: B010  (in this process only)
    config = EngineConfig(model=DEFAULT_MODEL, compute="native", threads=1, max_batch=max(branches, 1))
    with Engine.load(config) as engine:
        session = engine.open_session(lambda events: None)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24)
        engine.submit(session, [Context(0, TokenIds(tuple(_tokens(2048, 0).tolist())))])
        ids = range(1, branches + 1)
        engine.submit(session, [Fork(0, 1, branches), *(Generate(i, i, params) for i in ids)])
        while engine.stats().decode_tokens < 4 * branches:
            time.sleep(0.01)
        before, native = engine.stats(), spent[0]
        while engine.stats().decode_tokens < 20 * branches:
            time.sleep(0.01)
        after, native = engine.stats(), spent[0] - native
    busy = sum(getattr(after, name) - getattr(before, name) for name in ("tensor_s", "plan_s", "python_s"))
    return {"share": 1 - native / busy}


def _apart(function: str, *args: Any) -> dict[str, Any]:
    """The function's result from a process of its own. Raises BenchmarkError."""
    command = [sys.executable, "-m", MODULE, function, jsonlib.dumps(args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"{function}{args} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = jsonlib.loads(done.stdout.splitlines()[-1])
    return result


def _row(threads: int, prefix: int, branches: int, tail: int, has_peer: bool) -> dict[str, Any]:
    mine = _apart("ours", threads, prefix, branches, tail)
    row: dict[str, Any] = {"prefix": prefix, "branches": branches, "tail": tail, "threads": threads}
    row |= {f"ours_{name}": value for name, value in mine.items()}
    peers = [_apart("llama_cpp", threads, prefix, branches, tail, flash) for flash in (False, True)] if has_peer else []
    for name in ("tok_s", "prefill_tok_s"):
        best = max((peer[name] for peer in peers), default=None)
        row[f"llama_cpp_{name}"] = best
        row["ratio" if name == "tok_s" else "prefill_ratio"] = None if best is None else mine[name] / best
    return row


def run(
    json: Annotated[str | None, typer.Option(help="Write one JSON object to this file; - is standard output.")] = None,
    smoke: Annotated[bool, typer.Option(help="Only the cases of the five headline ratios.")] = False,
    threads: Annotated[int, typer.Option(help="1: measured by processor time; more: by wall time.")] = 1,
) -> None:
    """Decode many branches of one prefix, against llama.cpp in the same run."""
    has_peer = importlib.util.find_spec("llama_cpp") is not None
    whole = [(prefix, branches, 0) for prefix in PREFIXES for branches in BRANCHES] + [(2048, 64, TAIL)]
    rows = [_row(threads, *case, has_peer) for case in (SMOKE if smoke else whole)]
    found = {(row["prefix"], row["branches"], row["tail"]): row for row in rows}
    results: dict[str, Any] = {"rows": rows}
    results |= {f"ratio_2048_{branches}": found[2048, branches, 0]["ratio"] for branches in BRANCHES}
    results["ratio_tail256_64"] = found[2048, 64, TAIL]["ratio"]
    results["prefill_ratio"] = found[2048, 64, 0]["prefill_ratio"]
    if not smoke:
        results["outside_share"] = {str(branches): _apart("outside", branches)["share"] for branches in OUTSIDE}
    if json is None:
        for row in rows:
            show(
                f"{row['branches']} branches of {row['prefix']:,} + {row['tail']} tokens, threads: {threads}",
                [
                    Line("a step", row["ours_step_ms"], "ms"),
                    Line("decode", row["ours_tok_s"], "tokens/s"),
                    Line("prefill", row["ours_prefill_tok_s"], "tokens/s"),
                    *([Line("decode, times llama.cpp", row["ratio"], "×")] if has_peer else []),
                    *([Line("prefill, times llama.cpp", row["prefill_ratio"], "×")] if has_peer else []),
                ],
            )
    emit("fanout", results, json)


def main() -> None:
    typer.run(run)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("ours", "llama_cpp", "outside"):
        print(jsonlib.dumps(globals()[sys.argv[1]](*jsonlib.loads(sys.argv[2]))))
    else:
        main()
