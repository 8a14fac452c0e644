"""One agent reads a document; eight subagents are forked off it and asked at once. Prints what sharing saved.

python examples/fan_out.py [--in-process] [--model …] [--document LICENSE] [--max-tokens 64] [--fast] [--no-baseline]
"""

import argparse
import asyncio
import socket
import sys
import time
from pathlib import Path

from rich.console import Console

from branchline.agents import BranchlineError, Message, Session, connect
from branchline.agents.patterns.fan_out import ask_apart, fan_out
from branchline.agents.receipt import Receipt, Run
from branchline.agents.view import FanOutView, Steps
from branchline.engine.config import DEFAULT_MODEL, EngineConfig

QUESTIONS = [
    "Who may use the work under this license, and what does it cost them?",
    "What must I do when I redistribute a modified version?",
    "Does the license grant rights to patents?",
    "When does a patent licence end?",
    "May I use the licensor's trademarks?",
    "Is there any warranty?",
    "Who is liable for damages?",
    "Under which terms are contributions submitted?",
]


async def demo(session: Session, console: Console, steps: Steps, args: argparse.Namespace) -> Receipt:
    system = Message(role="system", content="Answer in one or two sentences, from the document that the user gives.")
    document = [system, Message(role="user", content=args.document.read_text(encoding="utf-8"))]
    asked = [Message(role="user", content=question) for question in QUESTIONS]
    before, began = await session.stats(), time.perf_counter()
    steps(f"reading {args.document.name} once")
    root = await session.context(document, add_generation_prompt=False).ready()
    steps.done()
    info, prefix = await root.inspect(), root.last_ready
    assert prefix is not None
    title = f"{args.document.name}: {info.num_tokens} tokens on {info.shared_pages + info.private_pages} pages"
    with FanOutView(console, title, QUESTIONS) as view:
        answers = await fan_out(root, asked, temperature=0, max_tokens=args.max_tokens, watcher=view)
    forked = Run(answers=answers, total_s=time.perf_counter() - began, before=before, after=await session.stats())
    root.release()
    apart = None
    if not args.no_baseline:
        steps(f"the same without forking or a prefix cache: {len(QUESTIONS)} separate contexts, all at once")
        before, began = await session.stats(), time.perf_counter()
        answers = await ask_apart(session, [[*document, ask] for ask in asked], temperature=0, max_tokens=args.max_tokens)
        apart = Run(answers=answers, total_s=time.perf_counter() - began, before=before, after=await session.stats())
        steps.done()
    return Receipt(info=session.info, prefix=prefix, forked=forked, apart=apart)


async def main(args: argparse.Namespace, console: Console, steps: Steps) -> None:
    config = engine_config(args) if args.in_process else None
    async with connect(None if args.in_process else "serve:branchline", config=config, progress=steps) as session:
        receipt = await demo(session, console, steps, args)
    console.print(receipt.table())


def engine_config(args: argparse.Namespace) -> EngineConfig:
    # Compared like with like: unrounded numbers, which decide near ties alike, and contexts that find nothing of the forks.
    exact = {} if args.fast else {"activations": "float32", "kv_dtype": "float32"}
    return EngineConfig.from_dict({"model": args.model, "scheduling": {"prefix_cache": False}} | exact)


def through_ray(args: argparse.Namespace, console: Console, steps: Steps) -> None:
    from branchline.orchestrator import app
    from branchline.orchestrator.config import ServeConfig

    running = app.start(ServeConfig(engine=engine_config(args), port=free_port(8000), dashboard_port=free_port(8265)), steps)
    try:
        steps.done()
        console.print(f"[dim]OpenAI API {running.base_url}, Ray dashboard {running.dashboard_url}[/dim]", highlight=False)
        asyncio.run(main(args, console, steps))
    finally:
        steps("stopping Ray")
        app.stop(running)


def free_port(preferred: int) -> int:
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", preferred)) == 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free: int = listener.getsockname()[1]
    return free if taken else preferred


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-process", action="store_true", help="no Ray: the engine runs in this process")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a built-in name, a .gguf file, a folder or a repository id")
    parser.add_argument("--document", type=Path, default=Path(__file__).parents[1] / "LICENSE", help="what the agent reads")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--fast", action="store_true", help="8-bit inputs and bfloat16 K/V, as the engine does by default")
    parser.add_argument("--no-baseline", action="store_true", help="don't run it without forking")
    options = parser.parse_args()
    terminal = Console()
    try:
        with Steps(terminal) as progress:
            if options.in_process:
                asyncio.run(main(options, terminal, progress))
            else:
                through_ray(options, terminal, progress)
    except (BranchlineError, OSError) as err:
        sys.exit(f"{type(err).__name__}: {err}")
