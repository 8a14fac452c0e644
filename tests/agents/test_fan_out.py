"""The fan-out pattern, its view and its receipt."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence

import msgspec
import pytest
from rich.console import Console
from tests.agents.harness import run, until

from branchline.agents import connect
from branchline.agents.patterns.fan_out import ask_apart, fan_out
from branchline.agents.receipt import Receipt, Run
from branchline.agents.testing import ScriptedEngine
from branchline.agents.view import FanOutView, Steps
from branchline.engine.errors import ContextLengthError
from branchline.engine.types import Append, Command, Context, Generate, ModelInfo, Ready, Service

DOCUMENT = " ".join(f"w{i}" for i in range(100))
QUESTIONS = [f" question{i}" for i in range(8)]


def test_answers_come_in_order_and_children_are_released(engine: ScriptedEngine) -> None:
    async def main() -> None:
        async with connect(engine) as session:
            root = session.context(DOCUMENT)
            answers = await fan_out(root, QUESTIONS, temperature=0)
            assert [answer.result.text.split()[-1] for answer in answers] == [f"question{i}." for i in range(8)]
            assert all(answer.fork_s is not None and answer.first_token_s > 0 for answer in answers)
            assert {answer.info.shared_tokens for answer in answers} == {100}
            await until(lambda: engine.stats().branches == 1, "only the root is left")
            assert await fan_out(root, []) == []

    run(main())


def test_one_failure_ends_the_others(engine: ScriptedEngine) -> None:
    async def main() -> None:
        async with connect(engine) as session:
            root = session.context(DOCUMENT)
            with pytest.raises(ContextLengthError):
                await fan_out(root, [" endless", " bad", " endless"])
            await until(lambda: engine.stats().running == 0, "the others were stopped")
            await until(lambda: engine.stats().branches == 1, "only the root is left")

    run(main())


@pytest.mark.parametrize("apart", [False, True])
def test_all_its_work_is_served_as_soon_as_was_asked(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    given: list[Command] = []
    submit = engine.submit

    def noting(session: str, commands: Sequence[Command]) -> None:
        given.extend(commands)
        submit(session, commands)

    monkeypatch.setattr(engine, "submit", noting)

    async def main() -> None:
        async with connect(engine) as session:
            if apart:
                await ask_apart(session, QUESTIONS, temperature=0, priority=7, qos="batch", deadline_ms=60_000.0)
            else:
                root = session.context(DOCUMENT)
                await fan_out(root, QUESTIONS, temperature=0, priority=7, qos="batch", deadline_ms=60_000.0)

    run(main())
    service = Service(priority=7, qos="batch", deadline_ms=60_000.0)
    asked = [command for command in given if isinstance(command, Context if apart else Append)]
    generations = [command for command in given if isinstance(command, Generate)]
    assert len(asked) == len(generations) == len(QUESTIONS)
    assert {command.service for command in (*asked, *generations)} == {service}
    assert {command.params.temperature for command in generations} == {0}


def receipts(engine: ScriptedEngine, apart_questions: list[str]) -> Receipt:
    async def measured() -> Receipt:
        async with connect(engine) as session:
            runs = []
            for apart in (False, True):
                before, began = await session.stats(), time.perf_counter()
                if apart:
                    answers = await ask_apart(session, [DOCUMENT + question for question in apart_questions], temperature=0)
                else:
                    root = await session.context(DOCUMENT).ready()
                    prefix = root.last_ready
                    answers = await fan_out(root, QUESTIONS, temperature=0)
                    root.release()
                total_s = time.perf_counter() - began
                runs.append(Run(answers=answers, total_s=total_s, before=before, after=await session.stats()))
            assert prefix is not None
            return Receipt(info=session.info, prefix=prefix, forked=runs[0], apart=runs[1])

    receipt: Receipt = run(measured())
    return receipt


def text_of(receipt: Receipt) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(receipt.table())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_receipt_counts_what_was_shared(engine: ScriptedEngine) -> None:
    receipt = receipts(engine, QUESTIONS)
    page = engine.info.page_bytes
    # 100 shared tokens are 7 pages; each branch adds a question and 7 words on 1 page. Apart: 108 tokens are 7 pages, 8 times.
    assert receipt.bytes_taken() == (7 + 8) * page
    assert receipt.bytes_unshared() == 8 * 7 * page
    assert receipt.forked.prefill_tokens == 108
    assert receipt.apart is not None
    assert receipt.apart.prefill_tokens == 808
    assert receipt.identical() == 8
    text = text_of(receipt)
    assert "all 8 identical, token for token" in text
    assert "3.7 times as much" in text


def test_the_receipt_says_when_answers_differ(engine: ScriptedEngine) -> None:
    receipt = receipts(engine, [" other", *QUESTIONS[1:]])
    assert receipt.identical() == 7
    assert "7 of 8 identical, token for token; NOT the same: 1 from token 6" in text_of(receipt)


def test_the_receipt_tells_of_preemptions(engine: ScriptedEngine) -> None:
    receipt = receipts(engine, QUESTIONS)
    assert "preemptions" not in text_of(receipt)
    first, *rest = receipt.forked.answers
    timing = msgspec.structs.replace(first.result.timing, preemptions=3, preempted_s=0.5)
    first = msgspec.structs.replace(first, result=msgspec.structs.replace(first.result, timing=timing))
    run = msgspec.structs.replace(receipt.forked, answers=[first, *rest])
    assert "3, for which the branches waited 0.50 s" in text_of(msgspec.structs.replace(receipt, forked=run))


def test_the_time_outside_tensor_work_leaves_waiting_out(engine: ScriptedEngine) -> None:
    before = engine.stats()
    after = msgspec.structs.replace(before, tensor_s=3.0, plan_s=0.75, python_s=0.25, idle_s=100.0)
    assert Run(answers=[], total_s=1.0, before=before, after=after).outside_tensor_work == 0.25
    assert Run(answers=[], total_s=1.0, before=before, after=before).outside_tensor_work == 0.0


@pytest.mark.parametrize("terminal", [True, False])
def test_the_view_shows_every_branch(engine: ScriptedEngine, terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=60, height=40, force_terminal=terminal, legacy_windows=False)

    async def main() -> None:
        async with connect(engine) as session:
            with Steps(console) as steps:
                steps("reading")
                root = await session.context(DOCUMENT).ready()
                steps.done()
                with FanOutView(console, "root: 100 tokens", QUESTIONS) as view:
                    await fan_out(root, QUESTIONS, watcher=view)

    run(main())
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert "✓ reading" in output
    assert "root: 100 tokens" in output
    for i in range(8):
        assert f"the last is question{i}." in output
    assert ("\x1b[" in output) == terminal
    if not terminal:
        assert output.count("root: 100 tokens") == 1
        assert output.count("done, 7 tokens") == 8


def test_a_failed_step_is_marked() -> None:
    console = Console(file=io.StringIO(), width=60)
    steps = Steps(console)

    def fail() -> None:
        with steps:
            steps("loading")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().startswith("✗ loading")


def test_the_receipt_needs_no_second_run(engine: ScriptedEngine) -> None:
    stats = engine.stats()
    info: ModelInfo = engine.info
    run_ = Run(answers=[], total_s=1.0, before=stats, after=stats)
    receipt = Receipt(info=info, prefix=Ready(0, 5, 5, 0.1), forked=run_, apart=None)
    assert receipt.identical() is None
    assert "without forking" not in text_of(receipt)
