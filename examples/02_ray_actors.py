"""Two agent actors share one context: the reader computes it, the answerer attaches to it by a handle of under 200 bytes.

Starts a local Ray with the application:     python examples/02_ray_actors.py [model]
"""

import asyncio
import pickle
import socket
import sys

import ray

from branchline.agents import BranchHandle, Message, Session, connect
from branchline.engine.config import DEFAULT_MODEL, EngineConfig
from branchline.orchestrator import app
from branchline.orchestrator.config import ServeConfig

FACTS = "Ada works in Oslo on engines. Bo works in Lima on boats. Cy works in Kyoto on gardens."


class Reader:
    """An actor that holds the context. Its session must stay open while others attach."""

    session: Session

    @ray.method
    async def read(self, text: str) -> BranchHandle:
        self.session = await connect("serve:branchline", client="reader")
        system = Message(role="system", content=f"Answer from these facts. {text}")
        self.root = await self.session.context(system).ready()
        return await self.root.share()


class Answerer:
    """An actor that gets a handle, never tensors."""

    @ray.method
    async def answer(self, handle: BranchHandle, questions: list[str]) -> list[str]:
        async with connect(handle, client="answerer") as session:
            root = session.attach(handle)
            branches = [root.fork().append(Message(role="user", content=question)) for question in questions]
            results = await asyncio.gather(*(branch.generate(temperature=0, max_tokens=24) for branch in branches))
            return [result.text for result in results]


with socket.create_server(("127.0.0.1", 0)) as listener:
    port = listener.getsockname()[1]
model = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL
running = app.start(ServeConfig(port=port, dashboard=False, engine=EngineConfig(model=model)), print)
try:
    reader, answerer = ray.remote(Reader).remote(), ray.remote(Answerer).remote()
    shared = ray.get(reader.read.remote(FACTS))
    print(f"the handle takes {len(pickle.dumps(shared))} bytes")
    asked = ["Where does Ada work?", "What does Bo work on?", "Who works in Kyoto?"]
    answers = ray.get(answerer.answer.remote(shared, asked))
    for question, text in zip(asked, answers, strict=True):
        print(f"{question} {text.strip()}")
finally:
    app.stop(running)
