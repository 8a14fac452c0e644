"""The step loop: drain commands, plan, forward, sample, commit, publish. One thread per engine runs it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition

from branchline.engine._core import BranchTree
from branchline.engine.branch import Session, Sink
from branchline.engine.commands import CommandRunner
from branchline.engine.config import EngineConfig
from branchline.engine.content import ContentEncoder
from branchline.engine.errors import EngineStepError
from branchline.engine.generations import Generations
from branchline.engine.model.runner import Runner
from branchline.engine.model.sampler import Sampler
from branchline.engine.model.tokenizer import Tokenizer
from branchline.engine.scheduler.scheduler import Scheduler
from branchline.engine.step import step_of
from branchline.engine.swap import SwapSpace
from branchline.engine.turns import Turns
from branchline.engine.types import Command, EngineStats
from branchline.engine.work import Work

IDLE_CHECK_S = 0.5
# How soon work that waits although nothing runs is looked at again.
BLOCKED_CHECK_S = 0.01
PAGE_COUNT_PERIOD_S = 1.0
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """Running totals; written by the engine thread, read by any."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    tensor_s: float = 0.0
    plan_s: float = 0.0
    python_s: float = 0.0
    idle_s: float = 0.0
    refused: int = 0


class StepLoop:
    """Owns an engine's mutable state. All methods but those marked so run in the engine thread."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        tree: BranchTree,
        runner: Runner,
        sampler: Sampler,
        tokenizer: Tokenizer,
        encoder: ContentEncoder,
        context_length: int,
        swap: SwapSpace | None,
    ) -> None:
        self._config = config
        self._tree = tree
        self._runner = runner
        self._sampler = sampler
        self._executor = ThreadPoolExecutor(1, "branchline-tokenize")
        self._generations = Generations(tree, sampler, tokenizer, config.deterministic_seed)
        self.scheduler = Scheduler(
            tree,
            config.scheduling,
            self._generations,
            max_batch=config.max_batch,
            max_step_tokens=config.max_step_tokens,
            max_waiting=config.max_waiting,
            blocked_timeout_s=config.blocked_timeout_s,
            copy_page=runner.copy_page,
            swap=swap,
        )
        self._turns = Turns(
            tree=tree,
            scheduler=self.scheduler,
            encoder=encoder,
            check_params=sampler.check,
            make_generation=self._generations.make,
            context_length=context_length,
            default_max_tokens=config.default_max_tokens,
            executor=self._executor,
            call_in_engine=self.call,
        )
        self._generations.scheduler, self._generations.turns = self.scheduler, self._turns
        self._commands = CommandRunner(self._turns, self.scheduler.tenants, self._generations.stop)
        self.sessions: dict[str, Session] = self._commands.sessions
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = Condition()
        self._closing = False
        self._private_pages = 0
        self._count_pages_at = 0.0
        self.counters = Counters()

    # --- from other threads -----------------------------------------------------------------------------------------

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` in the engine thread before its next step. Any thread; never blocks."""
        self._inbox.append(function)
        with self._wake:
            self._wake.notify()

    def open_session(self, session_id: str, sink: Sink, client: str, tenant_name: str) -> None:
        """Make a session. Any thread. Raises TenantLimitError."""
        tenant = self.scheduler.tenants.get(tenant_name)
        self.sessions[session_id] = Session(session_id, sink, client, tenant, time.monotonic())

    def post(self, session: Session, commands: tuple[Command, ...]) -> None:
        """Apply commands before the next step. Any thread; never blocks."""

        def apply() -> None:
            session.heard = time.monotonic()
            if not session.closed:
                for command in commands:
                    self._commands.apply(session, command)

        self.call(apply)

    def close_session(self, session: Session) -> None:
        """Release the session's branches before the next step. Any thread."""

        def close() -> None:
            if not session.closed:
                self._commands.close(session)
                self.sessions.pop(session.id, None)

        self.call(close)

    def stop(self) -> None:
        """End `run` after the step under way. Any thread."""

        def stop() -> None:
            self._closing = True

        self.call(stop)

    def stats(self) -> EngineStats:
        """Counters and what is there now. Any thread."""
        counters, scheduler = self.counters, self.scheduler
        by_class = scheduler.queue.by_class
        return EngineStats(
            steps=counters.steps,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=counters.decode_tokens,
            forks=self._turns.num_forks,
            branches=self._tree.num_branches,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            waiting_interactive=by_class["interactive"],
            waiting_batch=by_class["batch"],
            sessions=len(self.sessions),
            pages_free=self._tree.num_free_pages,
            pages_total=self._tree.num_pages,
            pages_cached=self._tree.num_cached_pages,
            pages_private=self._private_pages,
            copied_bytes=self._runner.copied_bytes,
            tensor_s=counters.tensor_s,
            plan_s=counters.plan_s,
            python_s=counters.python_s,
            idle_s=counters.idle_s,
            cached_tokens=scheduler.cache.cached_tokens,
            preemptions=scheduler.counters.preemptions,
            recomputed_tokens=scheduler.counters.recomputed_tokens,
            swapped_pages=scheduler.cache.swapped_pages,
            dropped=scheduler.counters.dropped,
            refused=counters.refused,
        )

    def check(self) -> None:
        """Verify the branch tree. In the engine thread."""
        self._tree.check()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until `stop`. Then all sessions are closed."""
        while not self._closing:
            began = time.perf_counter()
            worked_before = self.counters.tensor_s + self.counters.plan_s
            self._drain()
            self._turns.settle()
            stepped = self._step()
            self._turns.settle()
            self._publish()
            if began >= self._count_pages_at:
                self._count_private_pages(began)
            worked = self.counters.tensor_s + self.counters.plan_s - worked_before
            self.counters.python_s += time.perf_counter() - began - worked
            if not stepped:
                self._wait()
        for session in list(self.sessions.values()):
            self._commands.close(session)
        self.sessions.clear()
        self._turns.settle()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _count_private_pages(self, now: float) -> None:
        nodes = [branch.strand.node for session in list(self.sessions.values()) for branch in session.branches.values()]
        self._private_pages = sum(self._tree.private_part(node)[0] for node in nodes if node is not None)
        self._count_pages_at = now + PAGE_COUNT_PERIOD_S

    def _drain(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _wait(self) -> None:
        began = time.perf_counter()
        with self._wake:
            if not self._inbox:
                self._wake.wait(BLOCKED_CHECK_S if self.scheduler.num_waiting else IDLE_CHECK_S)
        self.counters.idle_s += time.perf_counter() - began
        self._close_silent_sessions()

    def _close_silent_sessions(self) -> None:
        oldest = time.monotonic() - self._config.session_timeout_s
        for session in [session for session in self.sessions.values() if session.heard < oldest]:
            self._commands.close(session)
            del self.sessions[session.id]

    def _publish(self) -> None:
        for session in list(self.sessions.values()):
            if session.outbox:
                events, session.outbox = tuple(session.outbox), []
                try:
                    session.sink(events)
                except Exception:  # a client's broken sink ends its own session, not the engine
                    logger.exception("session %s: its sink raised; the session is closed", session.id)
                    self._commands.close(session)
                    del self.sessions[session.id]

    def _step(self) -> bool:
        """One forward over everything that runs. Returns whether there was anything to do."""
        began = time.perf_counter()
        plan = self.scheduler.begin(time.monotonic())
        if plan is None:
            return False
        step = step_of(self._tree, plan.num_tokens)
        running = self.scheduler.slots.works
        works = [work for slot in plan.slots.tolist() if isinstance(work := running[slot], Work)]
        planned = time.perf_counter()
        try:
            logits = self._runner.run(step, plan.logit_tokens)
            sampled = self._sampler.sample(logits, plan.slots, plan.positions)
        except Exception as err:  # a failing kernel or an exhausted allocator must not end the engine
            self.scheduler.abort(plan)
            self._generations.fail_running(EngineStepError(f"the step failed and its requests are lost: {err!r}"))
            return True
        computed = time.perf_counter()
        self.scheduler.end(plan, sampled.tokens, time.monotonic())
        committed = time.perf_counter()
        counters = self.counters
        counters.steps += 1
        counters.prefill_tokens += plan.prefill_tokens
        counters.decode_tokens += len(plan.slots)
        counters.plan_s += planned - began + committed - computed
        counters.tensor_s += computed - planned
        self._generations.sampled(plan, works, sampled)
        return True
