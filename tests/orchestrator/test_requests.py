"""What the gateway takes from request bodies, and what it refuses, by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from branchline.engine.errors import BranchlineError, InvalidParameterError, InvalidRequestError
from branchline.engine.types import Chat, Message, SamplingParams, Text, TokenIds
from branchline.orchestrator.errors import UnsupportedParameterError
from branchline.orchestrator.gateway.requests import parse_chat, parse_completion

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"model": "m", "prompt": "hello"}


def body(base: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps(base | changes).encode()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SamplingParams()),
        ({"temperature": None, "stop": None, "seed": None}, SamplingParams()),
        ({"max_tokens": 5}, SamplingParams(max_tokens=5)),
        ({"max_completion_tokens": 7}, SamplingParams(max_tokens=7)),
        ({"max_tokens": 7, "max_completion_tokens": 7}, SamplingParams(max_tokens=7)),
        ({"temperature": 0, "top_p": 0.5, "seed": -3}, SamplingParams(temperature=0.0, top_p=0.5, seed=-3)),
        ({"stop": "x"}, SamplingParams(stop=("x",))),
        ({"stop": ["x", "yy"]}, SamplingParams(stop=("x", "yy"))),
        ({"presence_penalty": -2, "frequency_penalty": 2}, SamplingParams(presence_penalty=-2.0, frequency_penalty=2.0)),
        ({"logit_bias": {"12": -100, "3": 1.5}}, SamplingParams(logit_bias={12: -100.0, 3: 1.5})),
        ({"logprobs": True}, SamplingParams(logprobs=0)),
        ({"logprobs": True, "top_logprobs": 20}, SamplingParams(logprobs=20)),
        ({"logprobs": False}, SamplingParams()),
        ({"top_k": 5, "min_p": 0.1}, SamplingParams(top_k=5, min_p=0.1)),
        ({"top_k": -1}, SamplingParams()),
        ({"repetition_penalty": 1.2, "ignore_eos": True}, SamplingParams(repetition_penalty=1.2, ignore_eos=True)),
        ({"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}, SamplingParams()),
        ({"tools": None, "response_format": {"type": "text"}, "tool_choice": "none"}, SamplingParams()),
    ],
)
def test_chat_parameters(changes: dict[str, Any], expected: SamplingParams) -> None:
    _, job = parse_chat(body(HELLO, **changes))
    assert job.params == expected


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0]"),
        ({"model": None}, "model"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": "two"}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokns": 5}, "max_tokns"),
        ({"best_off": 5}, "best_off"),
    ],
)
def test_wrong_chat_parameters_are_named(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        parse_chat(body(HELLO, **changes))
    assert caught.value.param == param
    assert caught.value.status == 400
    assert not isinstance(caught.value, UnsupportedParameterError)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
    ],
)
def test_known_but_unsupported_parameters_say_so(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameterError, match="supported yet") as caught:
        parse_chat(body(HELLO, **changes))
    assert caught.value.param == param


def test_an_unknown_parameter_names_the_nearest_known_one() -> None:
    with pytest.raises(InvalidParameterError, match="did you mean 'temperature'"):
        parse_chat(body(HELLO, temprature=1))


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_missing_parameters_are_named(missing: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"{missing} is missing") as caught:
        parse_chat(json.dumps({k: v for k, v in HELLO.items() if k != missing}).encode())
    assert caught.value.param == missing


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff", b'{"model": "\\ud800"}', b'{"n": 1e999}'])
def test_bodies_that_are_no_json_objects(raw: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(InvalidRequestError) as caught:
            parse(raw)
        assert caught.value.status == 400


def test_messages_become_the_engines() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]
    _, job = parse_chat(body(HELLO, messages=messages))
    expected = (
        Message(role="system", content="be brief"),
        Message(role="user", content="a\nb", name="ann"),
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", content="42", tool_call_id="c"),
    )
    assert job.contents == (Chat(messages=expected, add_generation_prompt=True),)


@pytest.mark.parametrize(
    ("prompt", "contents"),
    [
        ("hi", (Text("hi"),)),
        ("", (Text(""),)),
        (["a", "b"], (Text("a"), Text("b"))),
        ([1, 2, 3], (TokenIds((1, 2, 3)),)),
        ([[1], [2, 3]], (TokenIds((1,)), TokenIds((2, 3)))),
        ([[1], "b"], (TokenIds((1,)), Text("b"))),
    ],
)
def test_completion_prompts(prompt: Any, contents: Any) -> None:
    _, job = parse_completion(body(PROMPT, prompt=prompt))
    assert job.contents == contents
    assert job.params.max_tokens == 16


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, 2**31]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": ["a", None]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], ["a"]]}, "prompt[1][0]"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 10, "n": 100}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_wrong_completion_parameters_are_named(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BranchlineError) as caught:
        parse_completion(body(PROMPT, **changes))
    assert (caught.value.status, caught.value.param) == (400, param)
