"""The gateway as an ASGI application: its routes, and every error as OpenAI's clients expect it."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from branchline.engine.errors import BranchlineError, EngineError, InvalidRequestError
from branchline.orchestrator import protocol
from branchline.orchestrator.errors import MethodNotAllowedError, PathNotFoundError
from branchline.orchestrator.gateway.asgi import RequestIds
from branchline.orchestrator.gateway.backend import Backend
from branchline.orchestrator.gateway.branches import Branches
from branchline.orchestrator.gateway.openai import OpenAI
from branchline.orchestrator.host import replica_of

logger = logging.getLogger(__name__)
RETRY_AFTER_S = 1
TRY_AGAIN = (429, 503)


def build_asgi(backend: Backend, max_body_bytes: int, *, request_ids: bool = True) -> Starlette:
    """The gateway over a backend, which is started and closed with the application's lifespan.

    Args:
        request_ids: put an x-request-id on each response; False where the server in front does (Ray Serve's proxy).
    """

    async def healthz(request: Request) -> Response:
        """GET /healthz: 200 when a replica answers to this gateway."""
        live = backend.num_live()
        if not live:
            await backend.channel()
        return Response(protocol.encode_json({"status": "ok", "replicas": backend.num_live()}), media_type="application/json")

    async def stats(request: Request) -> Response:
        """GET /v1/stats: of all replicas together, of a session's, or `by=replica`: of each."""
        if request.query_params.get("by") == "replica":
            each = [{"replica": reply.replica, "stats": reply.stats} for reply in await backend.stats_by_replica()]
            return Response(protocol.encode_json(each), media_type="application/json")
        session = request.query_params.get("session")
        counters = await backend.stats(replica_of(session) if session else None)
        return Response(protocol.encode_json(counters), media_type="application/json")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await backend.start()
        yield
        await backend.close()

    return Starlette(
        routes=[
            Route("/healthz", healthz, methods=["GET"]),
            Route("/v1/stats", stats, methods=["GET"]),
            *OpenAI(backend, max_body_bytes).routes(),
            *Branches(backend, max_body_bytes).routes(),
        ],
        middleware=[Middleware(RequestIds)] if request_ids else [],
        exception_handlers={
            BranchlineError: _refuse,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _unexpected,
        },
        lifespan=lifespan,
    )


async def _refuse(request: Request, err: Exception) -> Response:
    assert isinstance(err, BranchlineError)
    headers = {}
    if err.status in TRY_AGAIN:
        headers["retry-after"] = str(math.ceil(max(err.retry_after_s or RETRY_AFTER_S, RETRY_AFTER_S)))
    body = protocol.encode_json(protocol.openai_error(err))
    return Response(body, status_code=err.status, media_type="application/json", headers=headers)


async def _http_error(request: Request, err: Exception) -> Response:
    assert isinstance(err, HTTPException)
    path = request.url.path
    if err.status_code == 404:
        return await _refuse(request, PathNotFoundError(f"no path {path}: see /v1/models, /v1/chat/completions, /v1/sessions"))
    if err.status_code == 405:
        return await _refuse(request, MethodNotAllowedError(f"{request.method} isn't allowed on {path}"))
    return await _refuse(request, InvalidRequestError(err.detail))


async def _gone(request: Request, err: Exception) -> Response:
    return Response(status_code=499)


async def _unexpected(request: Request, err: Exception) -> Response:
    logger.exception("%s %s failed", request.method, request.url.path, exc_info=err)
    return await _refuse(request, EngineError("the gateway failed; its log says why"))
