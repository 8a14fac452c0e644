"""A contestant in a process of its own that waits, asleep, for its turn: one JSON line in, one out."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any, Self

from branchline.load.measure import BenchmarkError


class Worker:
    """Starts the process; `call` runs one of the contestant's methods in it."""

    def __init__(self, module: str, **arguments: Any) -> None:
        """`module`: of `branchline.load.peers`, with a class `Peer`; `arguments` go to that."""
        self._what = f"{module}({arguments})"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed in `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, module, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def call(self, method: str, *arguments: Any) -> Any:
        """Raises BenchmarkError with the end of what the process wrote if it is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([method, arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            line = ""
        else:
            line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            written = self._errors.read().decode(errors="replace")[-2000:]
            raise BenchmarkError(f"{self._what}.{method}{arguments} ended with {code}:\n{written}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it went first, and `call` has said so
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def main(module: str, arguments: str) -> None:
    """The process."""
    peer = importlib.import_module(f"{__package__ or 'branchline.load.peers'}.{module}").Peer(**json.loads(arguments))
    for line in sys.stdin:
        method, parameters = json.loads(line)
        sys.stdout.write(json.dumps(getattr(peer, method)(*parameters)) + "\n")
        sys.stdout.flush()
    peer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
