"""OpenAI's request bodies: decoded, checked, and turned into what the engine takes."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from branchline.engine.errors import InvalidParameterError, InvalidRequestError
from branchline.engine.types import (
    DEFAULT_SERVICE,
    Chat,
    Content,
    Message,
    QoS,
    SamplingParams,
    Service,
    Text,
    TokenIds,
)
from branchline.orchestrator.errors import UnsupportedParameterError

MAX_CHOICES: Final = 128
MAX_PROMPTS: Final = 256
MAX_TOKEN_ID: Final = 2**31 - 1
MAX_COUNT: Final = 2**53

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`stream_options`. Obfuscation is accepted; there is none to switch off."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and text completions share. None of an optional parameter is its default.

    Those after `logit_bias` aren't OpenAI's: clients send them as `extra_body`. Parameters that change nothing here (`user`
    and the like) are accepted.
    """

    model: str
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    qos: QoS | None = None
    deadline_ms: float | None = None
    user: str | None = None


class TextPart(msgspec.Struct, frozen=True):
    """One part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message as OpenAI's clients send it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class ChatRequest(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class CompletionRequest(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is asked for: `n` generations on each of `contents`.

    Attributes:
        tenant: whom it is done for; None: nobody in particular.
        stream, include_usage: how to answer.
    """

    contents: tuple[Content, ...]
    n: int
    params: SamplingParams
    service: Service
    stream: bool
    include_usage: bool
    tenant: str | None = None


ACCEPTED: Final = frozenset(
    {"metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "verbosity"}
)
"""Parameters of OpenAI's service that change nothing in what is generated here."""

UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "web_search_options": (None,),
    "moderation": (None,),
    "echo": (None, False),
    "best_of": (None, 1),
    "suffix": (None, ""),
}
"""Parameters of OpenAI's API that aren't supported yet, each with the values that ask for nothing."""

B = TypeVar("B", ChatRequest, CompletionRequest)


def parse_chat(body: bytes) -> tuple[ChatRequest, Job]:
    """Read a chat completion's body. Raises InvalidRequestError, InvalidParameterError, UnsupportedParameterError."""
    request = _parse(body, ChatRequest)
    if None not in (request.max_tokens, request.max_completion_tokens) and request.max_tokens != request.max_completion_tokens:
        raise InvalidParameterError(
            f"max_tokens = {request.max_tokens} and max_completion_tokens = {request.max_completion_tokens}: give one of them",
            param="max_completion_tokens",
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidParameterError("top_logprobs needs logprobs = true", param="top_logprobs")
    messages = tuple(_message(i, message) for i, message in enumerate(request.messages))
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    params = _params(request, request.max_completion_tokens or request.max_tokens, logprobs)
    return request, _job(request, (Chat(messages=messages, add_generation_prompt=True),), params)


def parse_completion(body: bytes) -> tuple[CompletionRequest, Job]:
    """Read a text completion's body. Raises like `parse_chat`."""
    request = _parse(body, CompletionRequest)
    contents = _prompts(request.prompt)
    if len(contents) * (request.n or 1) > MAX_CHOICES * 2:
        raise InvalidParameterError(
            f"n = {request.n} for {len(contents)} prompts: at most {MAX_CHOICES * 2} choices together", param="n"
        )
    # OpenAI's default for text completions is 16 tokens.
    return request, _job(request, contents, _params(request, request.max_tokens or 16, request.logprobs))


def _parse(body: bytes, kind: type[B]) -> B:
    try:
        raw = msgspec.json.decode(body)
    except msgspec.DecodeError as err:
        raise InvalidRequestError(f"the body isn't valid JSON: {err}") from err
    except UnicodeDecodeError as err:
        raise InvalidRequestError(f"the body isn't valid UTF-8: {err}") from err
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"the body is a JSON {_json_type(raw)}: expected an object")
    for name in list(raw):
        if name in ACCEPTED:
            del raw[name]
        elif name in UNSUPPORTED and name not in kind.__struct_fields__:
            if raw[name] not in UNSUPPORTED[name]:
                raise UnsupportedParameterError(f"{name} isn't supported yet: leave it out", param=name)
            del raw[name]
        elif name not in kind.__struct_fields__:
            near = difflib.get_close_matches(name, kind.__struct_fields__, n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise InvalidParameterError(f"unknown parameter {name!r}{hint}", param=name)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as err:
        raise _invalid(err) from err


def _invalid(err: msgspec.ValidationError) -> InvalidParameterError:
    text = str(err)
    missing = re.match(r"Object missing required field `(\w+)`$", text)
    if missing:
        return InvalidParameterError(f"{missing[1]} is missing", param=missing[1])
    message, _, path = text.partition(" - at `$.")
    path = path.rstrip("`")
    return InvalidParameterError(f"{path}: {message}" if path else message, param=path or None)


def _json_type(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _message(index: int, message: ChatMessage) -> Message:
    content = message.content
    if isinstance(content, list):
        for j, part in enumerate(content):
            where = f"messages[{index}].content[{j}]"
            if part.type != "text":
                raise UnsupportedParameterError(f"{where}: parts of type {part.type!r} aren't supported yet", param=where)
            if part.text is None:
                raise InvalidParameterError(f"{where}.text is missing", param=f"{where}.text")
        content = "\n".join(part.text or "" for part in content)
    if content is None and message.role != "assistant":
        where = f"messages[{index}].content"
        raise InvalidParameterError(f"{where} is missing", param=where)
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=content,
        name=message.name,
        tool_calls=tuple(message.tool_calls) if message.tool_calls else None,
        tool_call_id=message.tool_call_id,
    )


def _prompts(prompt: str | list[Any]) -> tuple[Content, ...]:
    """A prompt is text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return (Text(prompt),)
    if not prompt:
        raise InvalidParameterError("prompt is empty: expected text, token ids, or a list of either", param="prompt")
    if isinstance(prompt[0], int):
        return (_token_ids(prompt, "prompt"),)
    if len(prompt) > MAX_PROMPTS:
        raise InvalidParameterError(f"{len(prompt)} prompts: expected at most {MAX_PROMPTS}", param="prompt")
    return tuple(_prompt(item, f"prompt[{i}]") for i, item in enumerate(prompt))


def _prompt(item: Any, where: str) -> Content:
    if isinstance(item, str):
        return Text(item)
    if isinstance(item, list) and item:
        return _token_ids(item, where)
    raise InvalidParameterError(f"{where} = {item!r}: expected text or token ids", param=where)


def _token_ids(ids: list[Any], where: str) -> TokenIds:
    for i, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= MAX_TOKEN_ID:
            raise InvalidParameterError(f"{where}[{i}] = {token!r}: expected a token id", param=f"{where}[{i}]")
    return TokenIds(tuple(ids))


def _params(request: Sampling, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    given: dict[str, Any] = {
        name: getattr(request, name)
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty",
            "presence_penalty", "frequency_penalty", "ignore_eos", "seed",
        )
        if getattr(request, name) is not None
    }  # fmt: skip
    stop = request.stop or ()
    return SamplingParams(
        max_tokens=max_tokens,
        # Other servers write "all tokens" as -1.
        top_k=max(request.top_k or 0, 0),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=logprobs,
        logit_bias=_logit_bias(request.logit_bias),
        **given,
    ).validate()


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    bias = {}
    for token, value in given.items():
        if not token.isascii() or not token.isdigit() or len(token) > 10 or int(token) > MAX_TOKEN_ID:
            raise InvalidParameterError(f"logit_bias: {token!r} isn't a token id", param="logit_bias")
        bias[int(token)] = value
    return bias


def _job(request: Sampling, contents: tuple[Content, ...], params: SamplingParams) -> Job:
    if request.stream_options is not None and not request.stream:
        raise InvalidParameterError("stream_options needs stream = true", param="stream_options")
    usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    service = Service(
        priority=request.priority or 0, qos=request.qos or DEFAULT_SERVICE.qos, deadline_ms=request.deadline_ms
    ).validate()
    return Job(
        contents=contents,
        n=request.n or 1,
        params=params,
        service=service,
        stream=bool(request.stream),
        include_usage=usage,
    )
