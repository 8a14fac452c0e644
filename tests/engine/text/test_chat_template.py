"""Rendering as transformers does it, and continuing a branch that holds messages without computing any of them again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.engine.content import ContentEncoder
from branchline.engine.errors import ChatTemplateError
from branchline.engine.model.chat_template import ChatTemplate
from branchline.engine.model.tokenizer import Tokenizer
from branchline.engine.types import Chat, Message

from .templates import CHATML, LLAMA3, MISTRAL, QWEN3

SPECIAL = {
    "chatml": {"eos_token": "<|im_end|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "qwen3": {"eos_token": "<|im_end|>"},
}
SOURCE = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen3": QWEN3}
TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {"at": "<&>", "é": 1}}},)


@pytest.fixture(params=[*SOURCE, "smollm"])
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    if request.param == "smollm":
        found = ChatTemplate.of(request.getfixturevalue("smollm"))
        assert found is not None
        return found
    return ChatTemplate(SOURCE[request.param], SPECIAL[request.param])


def say(*contents: str) -> list[Message]:
    """User and assistant in turn."""
    return [Message(role="user" if i % 2 == 0 else "assistant", content=content) for i, content in enumerate(contents)]


def plain(messages: list[Message]) -> list[dict[str, Any]]:
    return [{"role": message.role, "content": message.content} for message in messages]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers' own imports
@pytest.mark.parametrize("name", SOURCE)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [False, True])
def test_renders_as_transformers_does(name: str, tools: tuple[dict[str, Any], ...] | None, prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = say("  Hi <b> ", "Hello\n", "ÄÖ\n\n'\"")
    ((expected, *_), _) = render_jinja_template(
        conversations=[plain(messages)],
        tools=list(tools) if tools else None,
        chat_template=SOURCE[name],
        add_generation_prompt=prompt,
        **SPECIAL[name],
    )
    assert ChatTemplate(SOURCE[name], SPECIAL[name]).render(messages, prompt, tools) == expected


def test_smollm_has_its_system_prompt(smollm: Tokenizer) -> None:
    template = ChatTemplate.of(smollm)
    assert template is not None
    text = template.render(say("The capital of France is"), True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nThe capital of France is<|im_end|>\n<|im_start|>assistant\n")
    assert smollm.encode(text, add_bos=True)[:2] == [1, 9690]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("split", [1, 2, 3])
def test_messages_after_messages(template: ChatTemplate, split: int, prompt: bool) -> None:
    messages = say("one", "two", "three", "four", "five")
    held, new = messages[:split], messages[split:]
    if "<think>" in template.render(held, False):  # Qwen3's template takes it away again once another question follows
        with pytest.raises(ChatTemplateError, match="holds differently"):
            template.continuation(held, new, prompt, last_reply_open=False)
        return
    text = template.continuation(held, new, prompt, last_reply_open=False)
    assert template.render(held, False) + text == template.render(messages, prompt)


def test_generation_prompt_alone(template: ChatTemplate) -> None:
    held = say("one")
    text = template.continuation(held, [], True, last_reply_open=False)
    assert template.render(held, False) + text == template.render(held, True)


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3"])
@settings(max_examples=30, deadline=None)
@given(
    words=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), min_size=4, max_size=6), prompt=st.booleans()
)
def test_closing_a_generated_reply_gives_the_whole_conversation(name: str, words: list[str], prompt: bool) -> None:
    template = ChatTemplate(SOURCE[name], SPECIAL[name])
    words = [word.strip() for word in words]  # Llama 3's template strips them, which a generated reply is not
    first, reply, *rest = say(*words)
    text = template.continuation([first], rest, prompt, last_reply_open=True)
    end = SPECIAL[name]["eos_token"]
    assert text.startswith(end)  # so that a caller can drop it
    if name == "qwen3" and ("</think>" in words[1] or rest[-1].role == "assistant"):
        return  # a final answer gets an empty thought in front: not what a branch holds, but its end is the same
    assert template.render([first], True) + words[1] + text == template.render([first, reply, *rest], prompt)


def test_closing_a_reply_puts_the_end_token_first_even_after_a_space() -> None:
    template = ChatTemplate(MISTRAL, SPECIAL["mistral"])
    text = template.continuation(say("one"), [Message(role="user", content="three")], False, last_reply_open=True)
    assert text == "</s>[INST] three [/INST]"


def test_later_turns_count_earlier_replies(template: ChatTemplate) -> None:
    held = say("one", "what was generated", "three")
    text = template.continuation(held, [Message(role="user", content="five")], True, last_reply_open=True)
    whole = template.render([*held, *say("", "four")[1:], Message(role="user", content="five")], True)
    assert whole.endswith(text)


def test_a_reply_is_closed_without_any_new_message(template: ChatTemplate) -> None:
    held = say("one")
    text = template.continuation(held, [], False, last_reply_open=True)
    assert template.render([*held, Message(role="assistant", content="R")], False).endswith(f"R{text}") or (
        text == "</s>" and template.render([*held, Message(role="assistant", content="R")], False).endswith("R </s>")
    )


def test_an_empty_turn_can_be_filled_by_the_client(template: ChatTemplate) -> None:
    messages = say("one", "two", "three")
    text = template.continuation(messages[:1], messages[1:], False, last_reply_open=True, reply_is_empty=True)
    assert template.render(messages[:1], True) + text == template.render(messages, False)


def test_placeholder_is_none_of_the_messages_words(template: ChatTemplate) -> None:
    held = say("Reply0Placeholder")
    text = template.continuation(held, [Message(role="user", content="Reply1Placeholder")], False, last_reply_open=True)
    assert text.count("Reply1Placeholder") == 1
    assert "Reply0" not in text
    assert "Reply2" not in text


def test_template_that_renders_held_messages_differently_is_refused() -> None:
    counting = ChatTemplate("{{ messages | length }}: {% for m in messages %}{{ m.content }};{% endfor %}")
    with pytest.raises(ChatTemplateError, match=r"from character 0: '1: one;' becomes '2: one;two;'"):
        counting.continuation(say("one"), say("one", "two")[1:], False, last_reply_open=False)
    with pytest.raises(ChatTemplateError, match="send the whole conversation"):
        counting.continuation(say("one"), say("two"), False, last_reply_open=True)


def test_qwen3_drops_old_thoughts_and_says_so() -> None:
    """A thought that the client sent stands on the branch, but the template takes it away once another question follows."""
    template = ChatTemplate(QWEN3, SPECIAL["qwen3"])
    held = say("one", "<think>\nhm\n</think>\n\ntwo")
    with pytest.raises(ChatTemplateError, match="holds differently"):
        template.continuation(held, say("three"), True, last_reply_open=False)


def test_template_that_changes_a_reply_is_refused() -> None:
    shouting = ChatTemplate("{% for m in messages %}{{ m.content | upper }};{% endfor %}")
    with pytest.raises(ChatTemplateError, match="can't be closed"):
        shouting.continuation(say("one"), say("three"), False, last_reply_open=True)


def test_template_s_own_complaint_is_passed_on() -> None:
    template = ChatTemplate(MISTRAL, SPECIAL["mistral"])
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render([Message(role="assistant", content="x")], False)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ messages[5].content.nothing }}", "refused the messages"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "refused the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused the messages"),
    ],
)
def test_failing_templates_are_typed_errors(source: str, complaint: str) -> None:
    with pytest.raises(ChatTemplateError, match=complaint):
        ChatTemplate(source).render(say("x"), False)


def test_invalid_source_is_a_typed_error() -> None:
    with pytest.raises(ChatTemplateError, match="isn't valid Jinja: line 2"):
        ChatTemplate("\n{% for %}")


def test_tool_calls_and_absent_content() -> None:
    template = ChatTemplate(LLAMA3, SPECIAL["llama3"])
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "here"}'}}
    text = template.render([*say("x"), Message(role="assistant", tool_calls=(call,))], False)
    assert '{"name": "look", "parameters": {"at": "here"}}<|eot_id|>' in text
    broken = {"type": "function", "function": {"name": "look", "arguments": "{"}}
    assert '"parameters": "{"}' in template.render([Message(role="assistant", tool_calls=(broken,))], False)
    answer = Message(role="tool", content="found", tool_call_id="1", name="look")
    assert ChatTemplate("{{ messages[0].tool_call_id }} {{ messages[0].name }}").render([answer], False) == "1 look"


def test_markup_for_training_loop_controls_and_dates() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert ChatTemplate(source).render(say("a", "b"), False) == "a"
    assert len(ChatTemplate("{{ strftime_now('%d %b %Y') }}").render(say("a"), False)) == 11


def test_model_without_a_template(byte_level: Tokenizer) -> None:
    assert ChatTemplate.of(byte_level) is None


def test_a_conversation_of_many_generated_turns(template: ChatTemplate, byte_level: Tokenizer) -> None:
    """Only what is new is encoded in each turn, and a template that wants roles to alternate is content."""
    encoder, chat = ContentEncoder(byte_level, template), None
    texts = []
    for question in ("one", "two", "three"):
        content = Chat(messages=(Message(role="user", content=question),), add_generation_prompt=True)
        ids, chat = encoder.encode(content, chat, last_token=5)
        texts.append(byte_level.decode(ids.tolist(), skip_special=False))
    assert texts[0] == template.render(say("one"), True)
    whole = template.render(say("one", "R", "two", "R", "three"), True)
    pieces = whole[len(texts[0]) :].split("R")[1:]
    assert [text.replace(" ", "") for text in texts[1:]] == [piece.replace(" ", "") for piece in pieces]
