"""Drives a whole engine with random commands of two clients, and checks every answer against what the commands mean.

What a branch holds follows from its commands alone: each takes effect in its turn, whatever the scheduler does in between.
`Client` keeps that meaning beside the engine, so that each answer's length and tokens can be checked afterwards.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from tests.properties.engine_client import Asked, Client, Named, resolve

from branchline.engine.engine import Engine
from branchline.engine.types import (
    Adopt,
    Adopted,
    Append,
    Attach,
    Cancel,
    Context,
    Delta,
    Failed,
    Finished,
    Fork,
    Generate,
    Info,
    Inspect,
    Pin,
    Race,
    Raced,
    Ready,
    Release,
    SamplingParams,
    Service,
    TokenIds,
)

VOCABULARY = 250
# No branch of the driver grows longer, so that two pinned ones and any third fit into 700 tokens.
MOST_TOKENS = 200
MOST_PINNED = 2


class Driver:
    """Commands at random. The engine's own thread sends a few before every step: a seed gives the same run each time.

    Args:
        calm: only commands that no outcome depends on when they come.
        seeded: half of the outputs are sampled, with a seed.
        before_step: called in the engine's thread.
    """

    def __init__(
        self,
        engine: Engine,
        seed: int,
        num_commands: int,
        *,
        calm: bool,
        seeded: bool,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.clients = [Client(engine, "one"), Client(engine, "other")]
        self._rng = random.Random(seed)
        self._left = num_commands
        self._calm = calm
        self._seeded = seeded
        self._before_step = before_step
        self._stems = [self._tokens(60) for _ in range(3)]
        self._all_sent = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Send everything, and wait until all is answered."""
        scheduler = self.engine._loop.scheduler
        real = scheduler.begin

        def begin(now: float) -> object:
            try:
                self._before_step()
                self._send_some()
            except BaseException as err:  # an error in the engine's thread would end the engine
                self._error = self._error or err
                self._all_sent.set()
            return real(now)

        scheduler.begin = begin  # type: ignore[method-assign, assignment]
        try:
            self.engine._loop.call(lambda: None)
            assert self._all_sent.wait(60), "the engine stands still"
            self._wait()
        finally:
            scheduler.begin = real  # type: ignore[method-assign]
        if self._error is not None:
            raise self._error

    def check(self, expected: Callable[[list[tuple[list[int], int]]], list[list[int]]]) -> None:
        """Compare all answers with what they should be.

        Args:
            expected: the greedy continuations, of given lengths, of given prompts.
        """
        for client in self.clients:
            self._check_answers(client)
        for client in self.clients:
            self._check_lengths(client)
        greedy = [asked for client in self.clients for asked in client.asked if asked.tokens and not asked.params.temperature]
        continued = expected([(resolve(asked.held), len(asked.tokens)) for asked in greedy])
        for asked, tokens in zip(greedy, continued, strict=True):
            assert list(asked.tokens) == tokens, f"request {asked.request} of branch {asked.branch}"

    # --- answers ----------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        if self._error is not None:
            return
        for client in self.clients:
            client.flush()
            client.wait_until_answered()
            winners = {branch for raced in client.of_kind(Raced) for branch in raced.winners}
            runners = [runner for race in client.races.values() for runner in race if runner.id in winners]
            client.branches.update((runner.id, runner) for runner in runners)
            for branch in client.branches.values():
                self._inspect(client, branch)
            client.flush()
        for client in self.clients:
            client.wait_until_answered()

    def _check_answers(self, client: Client) -> None:
        """Each request ends once and nothing comes after its end; nothing fails but what may."""
        for failed in client.of_kind(Failed):
            if failed.request is not None:
                assert failed.error.code in ("deadline_exceeded", "released_branch"), failed
            else:
                assert failed.error.code == "released_branch", failed
                assert failed.branch not in client.branches, failed
        for asked in client.asked:
            answers = client.answers(Finished, asked.request)
            (end,) = (event for event in answers if not isinstance(event, Delta))
            assert answers[-1] is end
            if isinstance(end, Failed):
                assert asked.service.deadline_ms is not None, end
                continue
            asked.tokens = tuple(token for event in answers if isinstance(event, Delta) for token in event.tokens)
            assert asked.stoppable or end.reason != "cancelled", end
            assert end.usage.completion_tokens == len(asked.tokens)
            assert end.usage.shared_tokens <= end.usage.prompt_tokens
            if end.reason == "length":
                assert len(asked.tokens) == asked.params.max_tokens
        for request, runners in client.races.items():
            (raced,) = client.answers(Raced, request)
            assert sorted((*raced.winners, *raced.losers)) == [runner.id for runner in runners]

    def _check_lengths(self, client: Client) -> None:
        """Each answer tells of as many tokens as the branch must have held then."""
        for asked in client.asked:
            for end in client.answers(Finished, asked.request):
                if isinstance(end, Finished) and (asked.tokens or end.reason != "cancelled"):
                    assert end.usage.prompt_tokens == len(resolve(asked.held))
        for request, held in client.inspected.items():
            for info in client.answers(Info, request):
                assert isinstance(info, Failed) or info.num_tokens == len(resolve(held))
        adopted = [(event.branch, event.child, event.num_tokens) for event in client.of_kind(Adopted)]
        told = [(branch, child, len(resolve(held))) for branch, child, held in client.adoptions]
        assert set(adopted) <= set(told)
        assert self._calm is False or len(adopted) == len(told)
        for branch in (*client.branches.values(), *client.gone):
            lengths = [ready.num_tokens for ready in client.of_kind(Ready) if ready.branch == branch.id]
            expected = [len(resolve(held)) for held in branch.added]
            assert lengths == expected[: len(lengths)], f"branch {branch.id}"
            if branch.id in client.branches:
                assert len(lengths) == len(expected), f"branch {branch.id}"

    # --- commands ---------------------------------------------------------------------------------------------------

    def _send_some(self) -> None:
        if self._all_sent.is_set():
            return
        for _ in range(self._rng.choice((0, 0, 1, 1, 2, 6))):
            if self._left == 0:
                break
            self._left -= 1
            self._command(self._rng.choice(self.clients))
        for client in self.clients:
            if self._rng.random() < 0.5 or self._left == 0:
                client.flush()
        if self._left == 0:
            self._all_sent.set()
        # So that the loop doesn't sleep.
        self.engine._loop.call(lambda: None)

    def _command(self, client: Client) -> None:
        rng = self._rng
        if not client.branches:
            self._context(client)
            return
        branch = rng.choice(list(client.branches.values()))
        moves: list[tuple[int, Callable[[Client, Named], None]]] = [
            (4, lambda client, _: self._context(client)),
            (6, self._fork),
            (6, self._append),
            (12, self._generate),
            (3, self._adopt),
            (3, self._attach),
            (2, self._inspect),
            (2, self._pin),
        ]
        if not self._calm:
            moves += [(4, self._cancel), (5, self._release), (2, self._race)]
        rng.choices([move for _, move in moves], [weight for weight, _ in moves])[0](client, branch)

    def _context(self, client: Client) -> None:
        rng = self._rng
        tokens = rng.choice(self._stems)[: rng.randrange(1, 60)] + self._tokens(rng.randrange(1, 30))
        branch = client.name([tokens], len(tokens))
        branch.added.append(list(branch.held))
        branch.pinned = rng.random() < 0.2 and self._may_pin()
        client.unsent.append(Context(branch.id, TokenIds(tokens), branch.pinned, self._service(deadline=False)))

    def _fork(self, client: Client, parent: Named) -> None:
        self._forked(client, parent)

    def _forked(self, client: Client, parent: Named) -> list[Named]:
        children = [client.name(parent.held, parent.most) for _ in range(self._rng.randrange(1, 5))]
        client.unsent.append(Fork(parent.id, children[0].id, len(children)))
        return children

    def _attach(self, client: Client, source: Named) -> None:
        # The other client's commands are the first to arrive: what the source holds is what they make of it.
        client.flush()
        other = self.clients[1 - self.clients.index(client)]
        child = other.name(source.held, source.most)
        other.unsent.append(Attach(child.id, client.session, source.id))
        other.flush()

    def _append(self, client: Client, branch: Named) -> None:
        tokens = self._tokens(self._rng.randrange(1, 40))
        if branch.most + len(tokens) > MOST_TOKENS:
            return
        branch.most += len(tokens)
        branch.held.append(tokens)
        branch.added.append(list(branch.held))
        client.unsent.append(Append(branch.id, TokenIds(tokens), self._service(deadline=False)))

    def _generate(self, client: Client, branch: Named) -> None:
        rng = self._rng
        max_tokens = rng.choice((1, 2, 9, 33))
        if branch.most + max_tokens > MOST_TOKENS:
            return
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=float(rng.randrange(2)) if self._seeded else 0.0,
            seed=rng.randrange(1000),
            ignore_eos=rng.random() < 0.7,
        )
        service = self._service(deadline=not self._calm)
        asked = Asked(client, branch.id, client.new_request(), list(branch.held), params, service)
        branch.most += max_tokens
        branch.held.append(asked)
        branch.asked.append(asked)
        client.asked.append(asked)
        client.unsent.append(Generate(branch.id, asked.request, params, service))

    def _adopt(self, client: Client, branch: Named) -> None:
        child = self._rng.choice(list(client.branches.values()))
        if child is branch:
            return
        client.gone.append(client.branches.pop(child.id))
        branch.held, branch.most = list(child.held), child.most
        client.adoptions.append((branch.id, child.id, list(child.held)))
        branch.adopted.append(child)
        client.unsent.append(Adopt(branch.id, child.id))

    def _inspect(self, client: Client, branch: Named) -> None:
        request = client.new_request()
        client.inspected[request] = list(branch.held)
        client.unsent.append(Inspect(branch.id, request))

    def _pin(self, client: Client, branch: Named) -> None:
        if branch.pinned or self._may_pin():
            branch.pinned = not branch.pinned
            client.unsent.append(Pin(branch.id, branch.pinned))

    def _cancel(self, client: Client, branch: Named) -> None:
        for asked in branch.asked:
            asked.stoppable = True
        client.unsent.append(Cancel(branch.id))

    def _release(self, client: Client, branch: Named) -> None:
        branch.may_be_stopped()
        client.gone.append(client.branches.pop(branch.id))
        client.unsent.append(Release((branch.id,)))

    def _race(self, client: Client, parent: Named) -> None:
        if parent.most + 33 > MOST_TOKENS:
            return
        runners = self._forked(client, parent)
        winners, request = self._rng.randrange(1, len(runners) + 1), client.new_request()
        client.races[request] = runners
        for runner in runners:
            self._generate(client, runner)
        client.unsent.append(Race(tuple(runner.id for runner in runners), request, winners))
        for runner in runners:
            for asked in runner.asked:
                asked.stoppable = True
            if self._rng.random() < 0.2:
                client.unsent.append(Cancel(runner.id))
            # Whether it lives on is known when the race is over.
            client.gone.append(client.branches.pop(runner.id))
        # All of it arrives at once: none has ended before the race begins.
        client.flush()

    def _may_pin(self) -> bool:
        return sum(branch.pinned for client in self.clients for branch in client.branches.values()) < MOST_PINNED

    def _service(self, *, deadline: bool) -> Service:
        rng = self._rng
        return Service(
            priority=rng.randrange(-2, 3),
            qos=rng.choice(("interactive", "standard", "batch")),
            deadline_ms=rng.choice((0.5, 20.0, 5000.0)) if deadline and rng.random() < 0.1 else None,
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(VOCABULARY) for _ in range(count))
