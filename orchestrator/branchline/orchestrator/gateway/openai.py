"""The endpoints of OpenAI's API."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from branchline.engine.errors import BranchlineError, EngineError, ModelNotFoundError
from branchline.engine.types import ModelInfo
from branchline.orchestrator.gateway.asgi import DONE, EventStream, read_body, sse, until_disconnect
from branchline.orchestrator.gateway.backend import Backend
from branchline.orchestrator.gateway.generation import Generation
from branchline.orchestrator.gateway.requests import ChatRequest, CompletionRequest, Job, parse_chat, parse_completion
from branchline.orchestrator.gateway.responses import ChunkWriter, Collector, Kind
from branchline.orchestrator.prefix import prefix_of
from branchline.orchestrator.protocol import TENANT_HEADER, encode_json, openai_error

logger = logging.getLogger(__name__)
Parse = Callable[[bytes], tuple[ChatRequest | CompletionRequest, Job]]


class OpenAI:
    """Chat and text completions and the model list, over the gateway's backend."""

    def __init__(self, backend: Backend, max_body_bytes: int) -> None:
        self._backend = backend
        self._max_body_bytes = max_body_bytes
        self._started = int(time.time())

    def routes(self) -> list[Route]:
        """The routes of this part."""
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
        ]

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        return await self._complete(request, "chat", parse_chat)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        return await self._complete(request, "text", parse_completion)

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        model = await self._backend.model()
        return _json({"object": "list", "data": [self._model_body(model)]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}"""
        model = await self._backend.model()
        _check_model(request.path_params["model"], model)
        return _json(self._model_body(model))

    async def _complete(self, request: Request, kind: Kind, parse: Parse) -> Response:
        body, job = parse(await read_body(request, self._max_body_bytes))
        job = msgspec.structs.replace(job, tenant=request.headers.get(TENANT_HEADER))
        model = await self._backend.model()
        _check_model(body.model, model)
        channel = await self._backend.channel(prefix_of(job.contents[0]).of_tenant(job.tenant or ""))
        generation = Generation(channel, job)
        self._backend.log.asked(channel.opened.session, generation.branches)
        handed_over = False
        try:
            started = await until_disconnect(request.receive, _start(generation))
            if started is None:
                return _client_gone()
            if not job.stream:
                whole = await until_disconnect(request.receive, _collect(generation, job, kind, model.name))
                return Response(whole, media_type="application/json") if whole is not None else _client_gone()
            handed_over = True
            return EventStream(_stream(generation, job, kind, model.name), generation.aclose)
        finally:
            if not handed_over:
                generation.close()

    def _model_body(self, model: ModelInfo) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "branchline",
            "max_model_len": model.context_length,
        }


async def _start(generation: Generation) -> bool:
    await generation.start()
    return True


async def _collect(generation: Generation, job: Job, kind: Kind, model: str) -> bytes:
    collector = Collector(kind, model, job.n * len(job.contents), logprobs=job.params.logprobs is not None)
    async for pieces in generation.pieces():
        collector.add(pieces)
    return collector.body(generation.counts)


async def _stream(generation: Generation, job: Job, kind: Kind, model: str) -> AsyncGenerator[bytes, None]:
    """One item a step, with the chunks of all choices. An error after the start is the last message."""
    writer = ChunkWriter(kind, model, logprobs=job.params.logprobs is not None, include_usage=job.include_usage)
    try:
        opening = writer.opening(job.n * len(job.contents))
        if opening:
            yield sse(opening)
        async for pieces in generation.pieces():
            chunks = writer.pieces(pieces)
            if chunks:
                yield sse(chunks)
        yield sse([*writer.usage(generation.counts), DONE])
    except BranchlineError as err:
        yield sse([encode_json(openai_error(err))])
    except Exception:
        logger.exception("a streamed completion failed")
        yield sse([encode_json(openai_error(EngineError("the gateway failed; its log says why")))])


def _check_model(name: str, model: ModelInfo) -> None:
    if name != model.name:
        raise ModelNotFoundError(f"the model {name!r} does not exist: {model.name!r} is served here", param="model")


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _client_gone() -> Response:
    return Response(status_code=499)
