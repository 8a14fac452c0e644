"""`connect`: from a target to a session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from branchline.agents.content import ContentLike, to_content
from branchline.agents.errors import ConnectError
from branchline.agents.link import Link
from branchline.agents.session import Session
from branchline.agents.transport.base import Transport
from branchline.agents.transport.local import EngineLike, LocalTransport, is_engine
from branchline.engine.errors import ConfigError, InvalidParameterError
from branchline.orchestrator.prefix import Prefix, prefix_of
from branchline.orchestrator.protocol import APP_NAME, BranchHandle

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from branchline.engine.config import EngineConfig

Target: TypeAlias = "str | EngineLike | BranchHandle | DeploymentHandle[Any] | None"

MODULE_OF_SCHEME = {"https": "http", "serve": "ray"}


def connect(
    target: Target = None,
    *,
    config: EngineConfig | None = None,
    progress: Callable[[str], None] | None = None,
    client: str = "",
    tenant: str = "",
    near: ContentLike | None = None,
    **options: Any,
) -> Connection:
    """Open a session: `async with connect(…) as session`, or `session = await connect(…)` and `await session.aclose()`.

    Args:
        target: where the engine is.
            None: the model that `config` names (the default: the built-in one) is loaded in this process, and closed with
            the session. Takes seconds, in a thread.
            An `Engine`, or a `testing.ScriptedEngine`: used as it is, and left open.
            "http://…", "https://…": a gateway (`branchline serve`).
            "serve:<app>": an application in the Ray cluster of this process, driver or actor.
            A Ray Serve `DeploymentHandle`: of an engine deployment.
            A `BranchHandle`: the engine that holds this branch.
        config: settings of an engine that is loaded here.
        progress: called with a line of text before each part of the loading.
        client: a name for the engine's logs and metrics.
        tenant: whom the session's work is done for: its share and limits are settings of the engine (docs/scheduling.md).
        near: what the session's first context begins with, as `Session.context` takes it: where there are several replicas the
            session is opened on one that has it in its prefix cache, unless that one is busier than computing it again is
            worth (docs/routing.md). Changes nothing in what is generated.
        options: of the transport: for http `headers`, `timeout_s`, `http`; for Ray `replica`, and `direct` (False: never a
            direct channel to the replica).

    Raises, when it is awaited or entered: ConnectError, ModelError, ConfigError, EngineClosedError, TenantLimitError.
    """
    return Connection(target, config, progress, client, tenant, near, options)


class Connection:
    """What `connect` returns: awaitable, and an asynchronous context manager."""

    def __init__(
        self,
        target: Target,
        config: EngineConfig | None,
        progress: Callable[[str], None] | None,
        client: str,
        tenant: str,
        near: ContentLike | None,
        options: dict[str, Any],
    ) -> None:
        self._target = target
        self._config = config
        self._progress = progress
        self._client = client
        self._tenant = tenant
        self._near = None if near is None else prefix_of(to_content(near))
        self._options = options
        self._session: Session | None = None

    def __await__(self) -> Generator[Any, None, Session]:
        return self._open().__await__()

    async def __aenter__(self) -> Session:
        self._session = await self._open()
        return self._session

    async def __aexit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        if self._session is not None:
            await self._session.aclose()

    async def _open(self) -> Session:
        if self._target is not None and self._config is not None:
            raise ConfigError("config is for an engine that is loaded here (no target); give it to the server instead")
        if self._target is not None:
            transport, app = _transport_to(self._target, self._client, self._tenant, self._near, self._options)
            return await _open_session(transport, app, None)
        engine = await asyncio.to_thread(_load_engine, self._config, self._progress)
        try:
            return await _open_session(LocalTransport(engine, client=self._client, tenant=self._tenant), "", engine.close)
        except BaseException:
            await asyncio.to_thread(engine.close)
            raise


async def _open_session(transport: Transport, app: str, on_close: Callable[[], None] | None) -> Session:
    try:
        opened = await transport.open()
    except BaseException:
        await transport.close()
        raise
    return Session(transport, opened, Link(transport, opened, on_close=on_close), app=app)


def _load_engine(config: EngineConfig | None, progress: Callable[[str], None] | None) -> EngineLike:
    from branchline.engine.config import EngineConfig
    from branchline.engine.engine import Engine

    return Engine.load(config or EngineConfig(), progress)


def _transport_to(target: Any, client: str, tenant: str, near: Prefix | None, options: dict[str, Any]) -> tuple[Transport, str]:
    if isinstance(target, BranchHandle):
        if not target.app:
            raise ConnectError("the handle is of an engine in one process: only sessions of that engine can attach to it")
        options = {**options, "replica": target.replica}
        target = f"serve:{target.app}"
    if isinstance(target, str):
        scheme, _, rest = target.partition(":")
        app = (rest or APP_NAME) if scheme == "serve" else APP_NAME
        name = MODULE_OF_SCHEME.get(scheme, scheme)
    elif is_engine(target):
        name, app = "local", ""
    elif type(target).__module__.startswith("ray.serve"):
        name, app = "ray", getattr(target, "app_name", APP_NAME)
    else:
        raise ConnectError(f"can't connect to {type(target).__name__}: expected a URL, 'serve:<app>', an engine or a handle")
    if isinstance(target, str) and name in ("base", "local", ""):
        raise _no_transport(target)
    module = f"{__package__}.transport.{name}"
    if not name.isidentifier() or find_spec(module) is None:
        raise _no_transport(target)
    make = import_module(module).make_transport
    known = [option for option in signature(make).parameters if option not in ("target", "client", "tenant", "near")]
    for option in options:
        if option not in known:
            raise InvalidParameterError(
                f"unknown option {option!r} for {target!r}: known are {', '.join(known) or 'none'}", param=option
            )
    transport: Transport = make(target, client=client, tenant=tenant, near=near, **options)
    return transport, app


def _no_transport(target: Any) -> ConnectError:
    return ConnectError(f"no transport for {target!r}: expected 'http://…', 'https://…' or 'serve:<app>'")
