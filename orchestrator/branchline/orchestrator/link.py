"""The way from a client to the engine replicas: Ray Serve, or hosts in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from branchline.orchestrator.errors import ReplicaUnavailableError
from branchline.orchestrator.routing_policy import least_loaded

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from branchline.orchestrator.host import EngineHost

BROADCAST_TIMEOUT_S = 10.0


class Link(Protocol):
    """Calls methods of engine replicas. Payloads are the protocol's, as bytes."""

    async def call(self, method: str, *args: bytes | str, replica: str | None = None) -> bytes:
        """Call a method of one replica; None: the one with the shortest queue. Raises ReplicaUnavailableError."""
        ...

    def events(self, session: str, replica: str) -> AsyncGenerator[bytes, None]:
        """The event stream of a session. Closing the generator tells the replica that the reader is gone.
        Raises ReplicaUnavailableError while it is read."""
        ...

    async def call_all(self, method: str) -> list[bytes]:
        """Call a method without arguments on every replica that is up; replicas that fail meanwhile are left out.
        Raises ReplicaUnavailableError when none is up."""
        ...


class ServeLink:
    """Over a Serve handle to the engine deployment."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def call(self, method: str, *args: bytes | str, replica: str | None = None) -> bytes:
        """See `Link.call`."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        # Ray's annotations don't tell a stream from a single answer.
        response: Any = self._handle.options(method_name=method, session_id=replica or "").remote(*args)
        try:
            return bytes(await response)
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (RayError, RayServeException) as err:
            raise _unavailable(replica, err) from err

    async def events(self, session: str, replica: str) -> AsyncGenerator[bytes, None]:
        """See `Link.events`. A Ray stream that is only dropped goes on in the replica: it is cancelled explicitly here."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        stream: Any = self._handle.options(method_name="events", session_id=replica, stream=True).remote(session)
        ended = False
        try:
            while True:
                try:
                    batch = await anext(stream)
                except StopAsyncIteration:
                    ended = True
                    return
                except (RayError, RayServeException) as err:
                    ended = True
                    raise _unavailable(replica, err) from err
                yield batch
        finally:
            if not ended:
                stream.cancel()

    async def call_all(self, method: str) -> list[bytes]:
        """See `Link.call_all`."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            results = await asyncio.wait_for(
                self._handle.broadcast(method).results_async(return_exceptions=True), BROADCAST_TIMEOUT_S
            )
        except (RayError, RayServeException, TimeoutError) as err:
            raise _unavailable(None, err) from err
        return [result for result in results if isinstance(result, bytes)]


class HostLink:
    """To hosts in this process and on this loop, by replica name. For tests, and for a gateway without Ray."""

    def __init__(self, hosts: Mapping[str, EngineHost]) -> None:
        self._hosts = hosts

    async def call(self, method: str, *args: bytes | str, replica: str | None = None) -> bytes:
        """See `Link.call`."""
        if not self._hosts:
            raise ReplicaUnavailableError("no engine replica is up")
        host = self._hosts.get(replica or "") or self._hosts[least_loaded(dict.fromkeys(self._hosts, 0))]
        answer = await getattr(host, method)(*args)
        assert isinstance(answer, bytes)
        return answer

    async def events(self, session: str, replica: str) -> AsyncGenerator[bytes, None]:
        """See `Link.events`."""
        if replica in self._hosts:
            async with contextlib.aclosing(self._hosts[replica].events(session)) as stream:
                async for batch in stream:
                    yield batch

    async def call_all(self, method: str) -> list[bytes]:
        """See `Link.call_all`."""
        if not self._hosts:
            raise ReplicaUnavailableError("no engine replica is up")
        return [await self.call(method, replica=name) for name in self._hosts]


def _unavailable(replica: str | None, err: Exception) -> ReplicaUnavailableError:
    who = f"engine replica {replica}" if replica else "the engine"
    reason = str(err).strip().splitlines()
    return ReplicaUnavailableError(f"{who} can't be reached ({reason[-1] if reason else type(err).__name__}); try again")
