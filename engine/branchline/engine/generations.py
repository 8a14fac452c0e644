"""Generations from their first step to their last event: sampling state, text, and how they end. Runs in the engine thread."""

from __future__ import annotations

import time

import numpy as np

from branchline.engine._core import BranchTree
from branchline.engine.branch import Branch
from branchline.engine.errors import BranchlineError, EngineStepError
from branchline.engine.model.detokenizer import Detokenizer
from branchline.engine.model.rng import stream_key
from branchline.engine.model.sampler import Sampled, Sampler
from branchline.engine.model.tokenizer import Tokenizer
from branchline.engine.outbox import emit
from branchline.engine.results import position_logprobs
from branchline.engine.scheduler.listener import Listener
from branchline.engine.scheduler.scheduler import Scheduler
from branchline.engine.scheduler.step_plan import StepPlan
from branchline.engine.scheduler.work import Work as ScheduledWork
from branchline.engine.turns import Turns
from branchline.engine.types import Delta, Finished, FinishReason, Generate, Timing, Usage
from branchline.engine.work import Generation, Work

# What a detokenizer may need of the tokens before the first that is generated.
_CONTEXT_TOKENS = 16


class Generations(Listener):
    """Mirrors the scheduler's decisions in the sampler, and turns sampled tokens into events.

    Attributes:
        scheduler, turns: set once, before the first step: they need this object, too.
    """

    scheduler: Scheduler
    turns: Turns

    def __init__(self, tree: BranchTree, sampler: Sampler, tokenizer: Tokenizer, seed: int | None) -> None:
        """`seed`: what requests without a seed of their own draw theirs from."""
        self._tree = tree
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._seeds = np.random.default_rng(seed)

    def make(self, branch: Branch, command: Generate, prompt_tokens: int) -> Generation:
        """What a `Generate` asks for."""
        params = command.params
        end_tokens = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_tokens |= self._tokenizer.eos_ids
        context = branch.strand.pending[-_CONTEXT_TOKENS:].tolist()
        return Generation(
            request=command.request,
            params=params,
            end_tokens=end_tokens,
            detokenizer=Detokenizer(self._tokenizer, params.stop, context),
            prompt_tokens=prompt_tokens,
        )

    # --- what the scheduler decides ---------------------------------------------------------------------------------

    def admitted(self, work: ScheduledWork) -> None:
        assert isinstance(work, Work)
        generation, slot = work.generation, work.slot
        assert slot is not None
        if generation is None:
            return
        if generation.sampling is not None:
            self._sampler.restore(slot, generation.sampling)
            generation.sampling = None
            return
        params = generation.params
        prompt = work.strand.tokens(self._tree) if params.repetition_penalty != 1.0 else None
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        self._sampler.add(slot, params, stream_key(seed, work.branch.key), prompt)

    def yielded(self, work: ScheduledWork, slot: int) -> None:
        assert isinstance(work, Work)
        if work.generation is not None:
            work.generation.sampling = self._sampler.save(slot)

    def computed(self, work: ScheduledWork) -> None:
        assert isinstance(work, Work)
        self.turns.work_ended(work.branch)

    def dropped(self, work: ScheduledWork, slot: int | None, err: BranchlineError) -> None:
        assert isinstance(work, Work)
        if slot is not None and work.generation is not None:
            self._sampler.remove(slot)
        self._failed(work, err)

    # --- steps ------------------------------------------------------------------------------------------------------

    def sampled(self, plan: StepPlan, works: list[Work], sampled: Sampled) -> None:
        """Tokens were sampled, and the step has ended.

        Args:
            works: of the rows that were sampled, as they were when the step was planned.
        """
        now = time.monotonic()
        for i, (work, token) in enumerate(zip(works, sampled.tokens.tolist(), strict=True)):
            generation, branch = work.generation, work.branch
            assert generation is not None
            if branch.work is not work:  # a race that ended in this step released it
                continue
            if sampled.bad[i]:
                self.fail(work, EngineStepError("the model's logits hold no finite number for this branch"))
                continue
            generation.num_tokens += 1
            reason: FinishReason | None = None
            stop: str | int | None = None
            if token in generation.end_tokens:
                reason, stop = "stop", token
                text = generation.detokenizer.finish()
            else:
                text = generation.detokenizer.push((token,))
                if generation.detokenizer.stopped is not None:
                    reason, stop = "stop", generation.detokenizer.stopped
                elif generation.num_tokens >= work.max_tokens:
                    reason = "length"
                    text += generation.detokenizer.finish()
            row = sampled.logprobs.get(i)
            logprobs = None if row is None else (position_logprobs(row, token, self._tokenizer),)
            emit(branch.session, Delta(branch.id, generation.request, (token,), text, logprobs))
            if generation.first_token_at is None:
                generation.first_token_at = now
                self.turns.answer_ready(branch)
            if reason is not None:
                self._finish(work, reason, stop)

    def stop(self, work: Work) -> None:
        """Stop a work at once; its branch keeps what is computed and generated. A generation ends as cancelled."""
        if work.generation is None:
            self.scheduler.remove(work, time.monotonic())
            self.turns.work_ended(work.branch)
            return
        text = work.generation.detokenizer.finish()
        if text:
            emit(work.branch.session, Delta(work.branch.id, work.generation.request, (), text))
        self._finish(work, "cancelled", None)

    def fail(self, work: Work, err: BranchlineError) -> None:
        """End a work with an error."""
        if work.slot is not None and work.generation is not None:
            self._sampler.remove(work.slot)
        self.scheduler.remove(work, time.monotonic())
        self._failed(work, err)

    def fail_running(self, err: BranchlineError) -> None:
        """End all that runs with an error."""
        for work in list(self.scheduler.slots.works.values()):
            assert isinstance(work, Work)
            self.fail(work, err)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _failed(self, work: Work, err: BranchlineError) -> None:
        """A generation's output is given back; a branch that lacks tokens which were appended is failed."""
        branch, generation = work.branch, work.generation
        branch.work = None
        if generation is None:
            self.turns.fail(branch, err)
            return
        if work.strand.length(self._tree) > generation.prompt_tokens:
            self.scheduler.cache.rewind(work.strand, generation.prompt_tokens)
        self.turns.fail_generation(branch, generation.request, err)
        self.turns.touch(branch)

    def _finish(self, work: Work, reason: FinishReason, stop: str | int | None) -> None:
        generation, branch = work.generation, work.branch
        assert generation is not None
        now = time.monotonic()
        if work.slot is not None:
            self._sampler.remove(work.slot)
        self.scheduler.remove(work, now, ended=reason != "cancelled")
        if work.yielded_at is not None:
            work.preempted_s += now - work.yielded_at
        started = now if work.started is None else work.started
        first = now if generation.first_token_at is None else generation.first_token_at
        shared = min(work.strand.inherited, generation.prompt_tokens)
        usage = Usage(generation.prompt_tokens, generation.num_tokens, shared)
        timing = Timing(
            started - work.submitted, first - work.submitted, now - work.submitted, work.preemptions, work.preempted_s
        )
        emit(branch.session, Finished(branch.id, generation.request, reason, usage, timing, stop))
        self.turns.work_ended(branch)
        if branch.race is not None:
            branch.race.ended(branch, reason != "cancelled", self.turns.release)
