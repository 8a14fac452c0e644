"""The step loop: drain commands, plan, forward, sample, commit, publish. One thread per engine runs it."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition

import numpy as np

from branchline.engine._core import BranchTree, OutOfPagesError
from branchline.engine.branch import Branch, Session
from branchline.engine.commands import CommandRunner, emit, emit_failed
from branchline.engine.config import EngineConfig
from branchline.engine.content import ContentEncoder
from branchline.engine.errors import BranchlineError, EngineStepError, PoolExhaustedError
from branchline.engine.model.detokenizer import Detokenizer
from branchline.engine.model.rng import stream_key
from branchline.engine.model.runner import Runner
from branchline.engine.model.sampler import Sampled, Sampler
from branchline.engine.model.tokenizer import Tokenizer
from branchline.engine.results import position_logprobs
from branchline.engine.scheduler.scheduler import Scheduler
from branchline.engine.step import step_of
from branchline.engine.types import Command, Delta, EngineStats, Finished, FinishReason, Generate, Timing, Usage
from branchline.engine.work import Generation, Work

IDLE_CHECK_S = 0.5
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


class StepLoop:
    """Owns an engine's mutable state. All methods but `post`, `call` and `stats` run in the engine thread."""

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
    ) -> None:
        self._config = config
        self._tree = tree
        self._runner = runner
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._scheduler = Scheduler(tree, config.max_batch, config.max_step_tokens)
        self._seeds = np.random.default_rng(config.deterministic_seed)
        self._executor = ThreadPoolExecutor(1, "branchline-tokenize")
        self._commands = CommandRunner(
            tree=tree,
            scheduler=self._scheduler,
            encoder=encoder,
            check_params=sampler.check,
            make_generation=self._make_generation,
            stop_work=self.stop_work,
            context_length=context_length,
            default_max_tokens=config.default_max_tokens,
            executor=self._executor,
            call_in_engine=self.call,
            sessions={},
        )
        self.sessions: dict[str, Session] = self._commands.sessions
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = Condition()
        self._closing = False
        self._blocked_since: float | None = None
        self._private_pages = 0
        self._count_pages_at = 0.0
        self._samples = np.zeros(config.max_batch, bool)
        self.counters = Counters()

    # --- from other threads -----------------------------------------------------------------------------------------

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` in the engine thread before its next step. Any thread; never blocks."""
        self._inbox.append(function)
        with self._wake:
            self._wake.notify()

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
        counters, scheduler = self.counters, self._scheduler
        waiting = Counter(work.service.qos for work in list(scheduler.waiting))
        return EngineStats(
            steps=counters.steps,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=counters.decode_tokens,
            forks=self._commands.num_forks,
            branches=self._tree.num_branches,
            running=len(scheduler.running),
            waiting=waiting.total(),
            waiting_interactive=waiting["interactive"],
            waiting_batch=waiting["batch"],
            sessions=len(self.sessions),
            pages_free=self._tree.num_free_pages,
            pages_total=self._tree.num_pages,
            pages_private=self._private_pages,
            copied_bytes=self._runner.copied_bytes,
            tensor_s=counters.tensor_s,
            plan_s=counters.plan_s,
            python_s=counters.python_s,
            idle_s=counters.idle_s,
        )

    @property
    def waiting(self) -> deque[Work]:
        """Work that has no slot yet."""
        return self._scheduler.waiting

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
            self._commands.settle()
            stepped = self._step()
            self._commands.settle()
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
        self._commands.settle()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _count_private_pages(self, now: float) -> None:
        nodes = [branch.node for session in list(self.sessions.values()) for branch in session.branches.values()]
        self._private_pages = sum(self._tree.describe(node)[3] for node in nodes if node is not None)
        self._count_pages_at = now + PAGE_COUNT_PERIOD_S

    def _drain(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _wait(self) -> None:
        began = time.perf_counter()
        with self._wake:
            if not self._inbox:
                self._wake.wait(IDLE_CHECK_S)
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
        self._admit()
        chunks = list(self._scheduler.chunks())
        if not self._scheduler.running:
            return False
        for work, count in chunks:
            node, slot = work.branch.node, work.slot
            assert node is not None
            assert slot is not None
            self._tree.prefill(node, slot, work.branch.pending[:count])
            self._samples[slot] = work.generation is not None and count == work.prefill_left
        while True:
            try:
                num_tokens = self._tree.plan()
                break
            except OutOfPagesError as err:
                chunks = self._make_room(chunks, err)
                if not self._scheduler.running:
                    return True
        step = step_of(self._tree, num_tokens)
        rows = np.flatnonzero(self._samples[step.row_slots])
        logit_tokens = step.row_indptr[1:][rows] - 1
        slots = step.row_slots[rows]
        positions = step.positions[logit_tokens] + 1
        planned = time.perf_counter()
        try:
            logits = self._runner.run(step, logit_tokens)
            sampled = self._sampler.sample(logits, slots, positions)
        except Exception as err:  # a failing kernel or an exhausted allocator must not end the engine
            self._tree.rollback()
            self._fail_all(EngineStepError(f"the step failed and its requests are lost: {err!r}"))
            return True
        computed = time.perf_counter()
        self._tree.next_tokens[slots] = sampled.tokens
        self._tree.commit()
        committed = time.perf_counter()
        counters = self.counters
        counters.steps += 1
        counters.prefill_tokens += num_tokens - (step.row_slots.size - len(chunks))
        counters.decode_tokens += len(rows)
        counters.plan_s += planned - began + committed - computed
        counters.tensor_s += computed - planned
        self._after_prefill(chunks)
        self._after_sampling(slots, sampled)
        return True

    def _admit(self) -> None:
        now = time.monotonic()
        for work in self._scheduler.admit():
            branch, slot, generation = work.branch, work.slot, work.generation
            assert branch.node is not None
            assert slot is not None
            work.started = now
            self._samples[slot] = False
            if generation is None:
                continue
            prompt = None
            if generation.params.repetition_penalty != 1.0:
                prompt = np.concatenate((self._tree.tokens(branch.node), branch.pending))
            seed = generation.params.seed
            if seed is None:
                seed = int(self._seeds.integers(2**63))
            self._sampler.add(slot, generation.params, stream_key(seed, branch.key), prompt)
            if len(branch.pending) == 1:
                self._start_decoding(work, int(branch.pending[0]))
        if self._scheduler.waiting and not self._scheduler.running:
            self._refuse_if_blocked(now)
        else:
            self._blocked_since = None

    def _refuse_if_blocked(self, now: float) -> None:
        """Nothing runs that could free pages, and the head of the queue doesn't fit: wait a while for a release."""
        self._blocked_since = self._blocked_since or now
        if now - self._blocked_since < self._config.blocked_timeout_s:
            return
        work = self._scheduler.waiting[0]
        wanted, free = self._scheduler.pages_wanted(work), self._tree.num_free_pages
        self._fail_work(
            work,
            PoolExhaustedError(
                f"{wanted} pages are needed, {free} of {self._tree.num_pages} are free and idle branches hold the rest: "
                "release branches, ask for fewer tokens, or give the engine a larger pool"
            ),
        )
        self._blocked_since = None

    def _start_decoding(self, work: Work, next_token: int) -> None:
        assert work.branch.node is not None
        assert work.slot is not None
        self._tree.join(work.branch.node, work.slot, next_token)
        self._scheduler.started_decoding(work)
        self._samples[work.slot] = True

    def _make_room(self, chunks: list[tuple[Work, int]], err: OutOfPagesError) -> list[tuple[Work, int]]:
        """Admission reserves what a work needs, but a fork of a running branch may cost it a page more."""
        victim = self._scheduler.youngest()
        if any(work is victim for work, _ in chunks):
            assert victim.branch.node is not None
            self._tree.leave(victim.branch.node)
            chunks = [(work, count) for work, count in chunks if work is not victim]
        self._fail_work(victim, PoolExhaustedError(f"no page is free for the next token ({err}): release branches or retry"))
        return chunks

    # --- results ----------------------------------------------------------------------------------------------------

    def _after_prefill(self, chunks: list[tuple[Work, int]]) -> None:
        for work, count in chunks:
            work.branch.pending = work.branch.pending[count:]
            if work.prefill_left or (work.generation is not None and not len(work.branch.pending)):
                continue
            self._remove(work)
            self._commands.work_ended(work)

    def _after_sampling(self, slots: np.ndarray[tuple[int], np.dtype[np.int32]], sampled: Sampled) -> None:
        now = time.monotonic()
        for i, (slot, token) in enumerate(zip(slots.tolist(), sampled.tokens.tolist(), strict=True)):
            work = self._scheduler.running[slot]
            generation = work.generation
            assert generation is not None
            if sampled.bad[i]:
                self._fail_work(work, EngineStepError("the model's logits hold no finite number for this branch"))
                continue
            if generation.first_token_at is None:
                generation.first_token_at = now
            generation.tokens.append(token)
            reason: FinishReason | None = None
            stop: str | int | None = None
            if token in generation.end_tokens:
                reason, stop = "stop", token
                text = generation.detokenizer.finish()
            else:
                text = generation.detokenizer.push((token,))
                if generation.detokenizer.stopped is not None:
                    reason, stop = "stop", generation.detokenizer.stopped
                elif len(generation.tokens) >= generation.max_tokens:
                    reason = "length"
                    text += generation.detokenizer.finish()
            branch = work.branch
            row = sampled.logprobs.get(i)
            logprobs = None if row is None else (position_logprobs(row, token, self._tokenizer),)
            emit(branch.session, Delta(branch.id, generation.request, (token,), text, logprobs))
            if not work.decoding:
                self._commands.answer_ready(branch)
            if reason is not None:
                self._finish(work, reason, stop, token)
            elif not work.decoding:
                self._start_decoding(work, token)

    def _finish(self, work: Work, reason: FinishReason, stop: str | int | None, last_token: int | None) -> None:
        """End a generation. `last_token`: the one whose K/V isn't computed; None: `branch.pending` holds it."""
        generation, branch = work.generation, work.branch
        assert generation is not None
        now = time.monotonic()
        if last_token is not None:
            branch.pending = np.array([last_token], np.int32)
        self._remove(work)
        started, first = work.started or now, generation.first_token_at or now
        usage = Usage(generation.prompt_tokens, len(generation.tokens), generation.shared_tokens)
        timing = Timing(started - work.submitted, first - work.submitted, now - work.submitted)
        emit(branch.session, Finished(branch.id, generation.request, reason, usage, timing, stop))
        self._commands.work_ended(work)

    def stop_work(self, work: Work) -> None:
        """Stop a work at once; its branch keeps what is computed and generated. A generation ends as cancelled."""
        if work.generation is None:
            self._remove(work)
            self._commands.work_ended(work)
            return
        last = int(self._tree.next_tokens[work.slot]) if work.decoding else None
        text = work.generation.detokenizer.finish()
        if text:
            emit(work.branch.session, Delta(work.branch.id, work.generation.request, (), text))
        self._finish(work, "cancelled", None, last)

    def _remove(self, work: Work) -> None:
        slot, node = work.slot, work.branch.node
        if slot is not None:
            if work.decoding:
                assert node is not None
                self._tree.leave(node)
            if work.generation is not None:
                self._sampler.remove(slot)
            self._samples[slot] = False
        self._scheduler.remove(work)
        work.decoding = False

    def _fail_work(self, work: Work, err: BranchlineError) -> None:
        """End a work with an error. A generation's output is given back; a branch that lacks appended tokens is failed."""
        branch, generation = work.branch, work.generation
        assert branch.node is not None
        if generation is not None and work.decoding:
            computed = self._tree.length(branch.node)
            keep = max(generation.prompt_tokens - 1, self._tree.shared_length(branch.node))
            tokens = self._tree.tokens(branch.node)
            branch.pending = np.array([tokens[keep] if keep < computed else self._tree.next_tokens[work.slot]], np.int32)
            self._remove(work)
            self._tree.truncate(branch.node, min(keep, computed))
        else:
            self._remove(work)
        if generation is not None:
            emit_failed(branch.session, branch.id, err, generation.request)
            if len(branch.pending):
                self._commands.work_ended(work)
                return
        branch.work = None
        self._commands.fail_branch(branch, err)

    def _fail_all(self, err: BranchlineError) -> None:
        for work in list(self._scheduler.running.values()):
            self._fail_work(work, err)

    def _make_generation(self, branch: Branch, command: Generate, max_tokens: int) -> Generation:
        assert branch.node is not None
        params = command.params
        end_tokens = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_tokens |= self._tokenizer.eos_ids
        return Generation(
            request=command.request,
            params=params,
            max_tokens=max_tokens,
            end_tokens=end_tokens,
            detokenizer=Detokenizer(self._tokenizer, params.stop, branch.pending.tolist()),
            prompt_tokens=self._tree.length(branch.node) + len(branch.pending),
            shared_tokens=self._tree.shared_length(branch.node),
        )
