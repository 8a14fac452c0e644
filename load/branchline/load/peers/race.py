"""Ours and llama.cpp take turns at the same cases: a few steps of one, a few of the other, again and again."""

from __future__ import annotations

import importlib.util
import statistics
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from branchline.load.measure import BenchmarkError
from branchline.load.peers.base import Case
from branchline.load.peers.worker import Worker

OURS = "ours"
FLASH = {"llama_cpp_flash_off": False, "llama_cpp_flash_on": True}
PREFILLS = 3


def has_llama_cpp() -> bool:
    """Whether llama.cpp can take part."""
    return importlib.util.find_spec("llama_cpp") is not None


def rounds_of(case: Case) -> int:
    """Turns at a case, after one to warm up: fewer where llama.cpp's step takes a second."""
    return 9 if case.branches == 1 else 5 if case.branches <= 16 else 3


class Race:
    """The contestants on one prefix, each with one model loaded."""

    def __init__(self, threads: int, cases: list[Case], *, peers: bool) -> None:
        """`cases`: all of one prefix. Starts the processes and computes the prefix in each."""
        (self._prefix,) = {case.prefix for case in cases}
        size = {
            "threads": threads,
            "num_tokens": max(case.num_tokens for case in cases),
            "branches": max(case.branches for case in cases),
        }
        self._threads = threads
        self._stack = ExitStack()
        self._workers: dict[str, Worker] = {}
        self._missing: dict[str, str] = {}
        try:
            self._workers[OURS] = self._stack.enter_context(Worker("ours", **size))
            self._prefills = {OURS: [float(self._workers[OURS].call("prefill", self._prefix))]}
            for name, flash in FLASH.items() if peers else ():
                worker = self._stack.enter_context(Worker("llama_cpp", **size, flash=flash))
                try:
                    self._prefills[name] = [float(worker.call("prefill", self._prefix))]
                except BenchmarkError as error:
                    self._missing[name] = str(error).strip().splitlines()[-1]
                else:
                    self._workers[name] = worker
        except BaseException:
            self._stack.close()
            raise

    def prefill(self) -> dict[str, Any]:
        """Tokens per second of the prefix's prefill: the median, with the first one."""
        for _ in range(PREFILLS - 1):
            for name, worker in self._workers.items():
                self._prefills[name].append(float(worker.call("prefill", self._prefix)))
        speeds = {name: self._prefix / statistics.median(times) for name, times in self._prefills.items()}
        row = {"prefix": self._prefix, "threads": self._threads, "repetitions": PREFILLS}
        return row | _compared(speeds)

    def decode(self, case: Case) -> dict[str, Any]:
        """Tokens per second of all branches together: branches / median step."""
        how = {name: worker.call("branch", asdict(case)) for name, worker in self._workers.items()}
        rounds = rounds_of(case)
        times: dict[str, list[float]] = {name: [] for name in self._workers}
        for turn in range(rounds + 1):
            for name, worker in self._workers.items():
                steps = [float(worker.call("step")) for _ in range(3 if name == OURS else 1)]
                if turn:
                    times[name] += steps
        row: dict[str, Any] = asdict(case) | {"threads": self._threads}
        row |= _compared({name: case.branches / statistics.median(each) for name, each in times.items()})
        row |= self._missing
        row["contestants"] = {
            name: {
                "step_ms": statistics.median(each) * 1e3,
                "min_ms": min(each) * 1e3,
                "max_ms": max(each) * 1e3,
                "steps": len(each),
                "memory_bytes": self._workers[name].call("memory_bytes"),
                **how[name],
            }
            for name, each in times.items()
        }
        return row

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _compared(speeds: dict[str, float]) -> dict[str, Any]:
    """Ours, llama.cpp's with flash attention off and on, the better of these, and the ratio; None where it didn't run."""
    best = max((speed for name, speed in speeds.items() if name != OURS), default=None)
    row: dict[str, Any] = {f"{name}_tok_s": speed for name, speed in speeds.items()}
    return row | {"llama_cpp_tok_s": best, "ratio": None if best is None else speeds[OURS] / best}
