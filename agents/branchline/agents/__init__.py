"""The agents' SDK. `connect` to an engine, make a context, fork it, generate on all forks at once.

    async with connect() as session:
        root = session.context("…")
        children = root.fork(8)
        results = await asyncio.gather(*(child.append(q).generate(max_tokens=64) for child, q in zip(children, questions)))

Names are loaded when they are first used; importing the package pulls in neither Ray nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from branchline.agents.branch import Branch as Branch
    from branchline.agents.client import Connection as Connection
    from branchline.agents.client import connect as connect
    from branchline.agents.errors import ConnectError as ConnectError
    from branchline.agents.errors import ConnectionLostError as ConnectionLostError
    from branchline.agents.errors import SessionClosedError as SessionClosedError
    from branchline.agents.errors import TransportError as TransportError
    from branchline.agents.generation import Generation as Generation
    from branchline.agents.generation import Stream as Stream
    from branchline.agents.result import Result as Result
    from branchline.agents.session import Session as Session
    from branchline.engine.errors import BranchlineError as BranchlineError
    from branchline.engine.types import Message as Message
    from branchline.engine.types import SamplingParams as SamplingParams
    from branchline.orchestrator.protocol import BranchHandle as BranchHandle

_MODULES = {
    "Branch": "branchline.agents.branch",
    "BranchHandle": "branchline.orchestrator.protocol",
    "BranchlineError": "branchline.engine.errors",
    "ConnectError": "branchline.agents.errors",
    "Connection": "branchline.agents.client",
    "ConnectionLostError": "branchline.agents.errors",
    "Generation": "branchline.agents.generation",
    "Message": "branchline.engine.types",
    "Result": "branchline.agents.result",
    "SamplingParams": "branchline.engine.types",
    "Session": "branchline.agents.session",
    "SessionClosedError": "branchline.agents.errors",
    "Stream": "branchline.agents.generation",
    "TransportError": "branchline.agents.errors",
    "connect": "branchline.agents.client",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
