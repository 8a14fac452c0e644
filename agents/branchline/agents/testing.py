"""A deterministic engine without a model, for tests of programs that use the SDK.

    engine = ScriptedEngine(lambda prompt: "yes" if "?" in prompt else "no")
    async with connect(engine) as session:
        assert (await session.context("Is it?").generate()).text == "yes"

It does what the real engine does with commands, branches and errors; only the tokens come from a function. One token is one
piece: a word with the white space before it. Messages read as "role: content" lines.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence

from branchline.agents.scripted import PAGE_TOKENS, Reply, ScriptedBranches, ScriptedSession, Sink
from branchline.engine.errors import EngineClosedError, SessionNotFoundError
from branchline.engine.types import Command, EngineStats, ModelInfo

PAGE_BYTES = 16384
NUM_PAGES = 4096


class ScriptedEngine:
    """Answers by a function of the branch's whole text.

    Args:
        reply: gives the text to generate, or its pieces one by one (also without end); a BranchlineError that it raises
            fails the generation.
        step_s: seconds of a step; in each, every running generation gets one token.
        session_timeout_s: a session from which nothing was heard for so long is closed.
    """

    def __init__(self, reply: Reply, *, step_s: float = 0.0, session_timeout_s: float = 60.0) -> None:
        self.info = ModelInfo(
            name="scripted",
            architecture="scripted",
            num_parameters=0,
            vocab_size=2**31 - 1,
            context_length=2**20,
            dtype="float32",
            attention="none",
            device="cpu",
            page_tokens=PAGE_TOKENS,
            page_bytes=PAGE_BYTES,
            num_pages=NUM_PAGES,
            max_batch=4096,
        )
        self._step_s = step_s
        self._session_timeout_s = session_timeout_s
        self._branches = ScriptedBranches(reply)
        self._inbox: deque[tuple[ScriptedSession, tuple[Command, ...] | None]] = deque()  # None: close the session
        self._wake = threading.Condition()
        self._closed = False
        self._steps = 0
        self._idle_s = 0.0
        self._thread = threading.Thread(target=self._loop, name="scripted-engine", daemon=True)
        self._thread.start()

    # --- what clients call, from any thread -------------------------------------------------------------------------

    def open_session(self, sink: Sink, client: str = "", tenant: str = "") -> str:
        """Make a session; `sink` gets the events of each step, in the engine's thread. Raises EngineClosedError."""
        with self._wake:
            self._raise_if_closed()
            session = ScriptedSession(secrets.token_hex(16), sink, time.monotonic())
            self._branches.sessions[session.id] = session
        return session.id

    def submit(self, session: str, commands: Sequence[Command]) -> None:
        """Take commands, in order. Raises SessionNotFoundError, EngineClosedError."""
        with self._wake:
            found = self._find(session)
            self._inbox.append((found, tuple(commands)))
            self._wake.notify()

    def touch(self, session: str) -> None:
        """Tell that the session's client lives. Raises SessionNotFoundError, EngineClosedError."""
        with self._wake:
            self._find(session)

    def close_session(self, session: str) -> None:
        """Release all that the session has. Closing one that is gone does nothing."""
        with self._wake:
            found = self._branches.sessions.pop(session, None)
            if found is not None:
                self._inbox.append((found, None))
                self._wake.notify()

    def stats(self) -> EngineStats:
        """Counters since the start, and what is there now."""
        with self._wake:
            branches = [branch for session in self._branches.sessions.values() for branch in session.branches.values()]
            held = sum(-(-(len(branch.pieces) - branch.shared) // PAGE_TOKENS) for branch in branches)
            return EngineStats(
                steps=self._steps,
                prefill_tokens=self._branches.prefill_tokens,
                decode_tokens=self._branches.decode_tokens,
                forks=self._branches.forks,
                branches=len(branches),
                running=len(self._branches.running),
                waiting=sum(len(branch.queue) for branch in branches),
                sessions=len(self._branches.sessions),
                pages_free=NUM_PAGES - held,
                pages_total=NUM_PAGES,
                copied_bytes=0,
                tensor_s=0.0,
                plan_s=0.0,
                python_s=0.0,
                idle_s=self._idle_s,
            )

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, session: str) -> ScriptedSession:
        self._raise_if_closed()
        found = self._branches.sessions.get(session)
        if found is None:
            raise SessionNotFoundError(f"no session {session[:8]}…: closed, expired or never opened; open a new one")
        found.heard = time.monotonic()
        return found

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine was closed")

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._wake:
                began = time.perf_counter()
                if not self._inbox and not self._branches.running and not self._closed:
                    self._wake.wait(self._session_timeout_s)
                self._idle_s += time.perf_counter() - began
                if self._closed:
                    self._branches.sessions.clear()
                    return
                self._expire()
                touched = {session.id: session for session in self._branches.sessions.values()}
                while self._inbox:
                    session, commands = self._inbox.popleft()
                    if commands is None:
                        self._branches.release_all(session)
                        continue
                    for command in commands:
                        self._branches.apply(session, command)
                for branch in list(self._branches.running):
                    self._branches.advance(branch)
                self._steps += bool(self._branches.running)
                outgoing = []
                for session in touched.values():
                    if session.outbox:
                        outgoing.append((session.sink, tuple(session.outbox)))
                        session.outbox.clear()
            for sink, events in outgoing:
                sink(events)
            if self._step_s and self._branches.running:
                time.sleep(self._step_s)

    def _expire(self) -> None:
        oldest = time.monotonic() - self._session_timeout_s
        for session in [session for session in self._branches.sessions.values() if session.heard < oldest]:
            del self._branches.sessions[session.id]
            self._branches.release_all(session)
