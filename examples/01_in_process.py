"""The shortest program: the default model in this process, one context, two forks.

python examples/01_in_process.py [model]
"""

import asyncio
import sys

from branchline.agents import connect
from branchline.engine.config import DEFAULT_MODEL, EngineConfig


async def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL
    async with connect(config=EngineConfig(model=model), progress=print) as session:
        root = session.context("The three largest cities of France are")
        greedy, lively = root.fork(2)
        plain, other = await asyncio.gather(
            greedy.generate(temperature=0, max_tokens=24), lively.generate(temperature=0.8, seed=7, max_tokens=24)
        )
        print(f"greedy: {plain.text.strip()}\nlively: {other.text.strip()}")
        print(f"{plain.usage.shared_tokens} of {plain.usage.prompt_tokens} prompt tokens are shared")


asyncio.run(main())
