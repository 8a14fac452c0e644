"""From what users write to what the engine takes: contents and sampling parameters, checked at the call."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import msgspec

from branchline.engine.errors import InvalidParameterError
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

MessageLike: TypeAlias = Message | Mapping[str, Any]
ContentLike: TypeAlias = str | MessageLike | Sequence[MessageLike] | Sequence[int] | Content

ASKING_ROLES = ("user", "tool")


class Sampling(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`: the fields of `SamplingParams`, where `stop` may be one string."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    logit_bias: Mapping[int, float] | None


class Serving(TypedDict, total=False):
    """How soon work is to be served: the fields of `Service`."""

    priority: int
    qos: QoS
    deadline_ms: float | None


class Generating(Sampling, Serving, total=False):
    """What `generate` takes by name."""


def to_service(given: Serving) -> Service:
    """Raises InvalidParameterError that names the field at fault."""
    if not given:
        return DEFAULT_SERVICE
    for name in given:
        if name not in Service.__struct_fields__:
            raise InvalidParameterError(
                f"unknown parameter {name!r}: known are {', '.join(Service.__struct_fields__)}", param=name
            )
    try:
        return msgspec.convert(dict(given), Service).validate()
    except msgspec.ValidationError as err:
        raise InvalidParameterError(f"{_param_of(str(err)) or 'service'}: {err}", param=_param_of(str(err))) from err


def split_settings(settings: Generating) -> tuple[Sampling, Serving]:
    """Those that choose tokens, and those that say how soon."""
    given: dict[str, Any] = dict(settings)
    serving: Any = {name: given.pop(name) for name in Service.__struct_fields__ if name in given}
    sampling: Any = given
    return sampling, serving


def to_content(content: ContentLike, *, add_generation_prompt: bool | None = None) -> Content:
    """Make the engine's content out of a text, one message, messages, or token ids.

    Args:
        content: a string is plain text; a `Message` or a mapping with `role` and `content` is a chat message; a sequence
            of integers is token ids; `Text`, `TokenIds` and `Chat` are taken as they stand.
        add_generation_prompt: whether the messages are followed by the opening of the assistant's turn. None: they are if
            the last one's role is "user" or "tool", so that `generate` answers it. Pass False for messages to which more
            are appended later.

    Raises:
        InvalidParameterError: `content` is empty or is none of these; `add_generation_prompt` without messages.
    """
    if isinstance(content, Text | TokenIds | Chat):
        made: Content = content
    elif isinstance(content, str):
        made = Text(content)
    elif isinstance(content, Message | Mapping):
        return _chat([content], add_generation_prompt)
    else:
        made = _from_sequence(content, add_generation_prompt)
        if isinstance(made, Chat):
            return made
    if add_generation_prompt is not None:
        raise InvalidParameterError(
            f"add_generation_prompt = {add_generation_prompt!r}: expected only with messages, the content is "
            f"{type(content).__name__}",
            param="add_generation_prompt",
        )
    return made


def _from_sequence(content: Any, add_generation_prompt: bool | None) -> Chat | TokenIds:
    try:
        items = list(content)
    except TypeError:
        raise _bad_content(f"got {type(content).__name__}") from None
    if not items:
        raise _bad_content("got an empty sequence")
    if isinstance(content, bytes | bytearray):
        raise _bad_content("got bytes; decode them first")
    if isinstance(items[0], Message | Mapping):
        return _chat(items, add_generation_prompt)
    ids = []
    for position, item in enumerate(items):
        try:
            ids.append(operator.index(item))
        except TypeError:
            raise _bad_content(f"item {position} is {type(item).__name__}") from None
        if ids[-1] < 0:
            raise _bad_content(f"token id {ids[-1]} at {position} is negative")
    return TokenIds(tuple(ids))


def _chat(items: Sequence[Any], add_generation_prompt: bool | None) -> Chat:
    messages = []
    for position, item in enumerate(items):
        if isinstance(item, Message):
            messages.append(item)
            continue
        if not isinstance(item, Mapping):
            raise _bad_content(f"item {position} is {type(item).__name__}, not a message")
        unknown = sorted(set(item) - set(Message.__struct_fields__))
        if unknown:
            raise _bad_content(f"message {position} has {unknown[0]!r}; known: {', '.join(Message.__struct_fields__)}")
        try:
            messages.append(msgspec.convert(dict(item), Message))
        except msgspec.ValidationError as err:
            raise _bad_content(f"message {position}: {err}") from err
    if add_generation_prompt is None:
        add_generation_prompt = messages[-1].role in ASKING_ROLES
    return Chat(messages=tuple(messages), add_generation_prompt=add_generation_prompt)


def _bad_content(found: str) -> InvalidParameterError:
    return InvalidParameterError(
        f"content: expected text, a message (role and content), messages, or token ids >= 0; {found}", param="content"
    )


def to_params(params: SamplingParams | None, settings: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters out of `params` (None: the defaults), changed by `settings`, and checked.

    Raises InvalidParameterError that names the parameter; for an unknown one it names the nearest known one.
    """
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidParameterError(f"params: expected SamplingParams, got {type(params).__name__}", param="params")
    if not settings:
        return (params or SamplingParams()).validate()
    known = SamplingParams.__struct_fields__
    for name in settings:
        if name not in known:
            all_known = (*known, *Service.__struct_fields__)
            near = difflib.get_close_matches(name, all_known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(all_known)}"
            raise InvalidParameterError(f"unknown parameter {name!r}: {hint}", param=name)
    fields = {name: getattr(params, name) for name in known} if params is not None else {}
    fields.update(settings)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    try:
        return msgspec.convert(fields, SamplingParams).validate()
    except msgspec.ValidationError as err:
        param = _param_of(str(err))
        value = fields.get(param) if param else settings
        raise InvalidParameterError(f"{param or 'parameters'} = {value!r}: {err}", param=param) from err


def _param_of(text: str) -> str | None:
    found = re.search(r"\$\.(\w+)", text)
    return found[1] if found else None
