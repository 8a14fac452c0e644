"""Chat messages to text by the model's own Jinja template, and what to put after a branch that holds messages already."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from branchline.engine.errors import ChatTemplateError
from branchline.engine.types import Message

Tools = Sequence[Mapping[str, Any]]

# Stands in a branch's messages for a reply that was generated there, whose text the template needn't know.
GENERATED_REPLY = Message(role="assistant", content="reply")


class HasTemplate(Protocol):
    """What is needed of a tokenizer."""

    @property
    def chat_template(self) -> str | None: ...
    @property
    def special_texts(self) -> dict[str, str]: ...


class ChatTemplate:
    """A compiled chat template. Rendering changes nothing and may be done from any thread."""

    def __init__(self, template: str, special_texts: Mapping[str, str] | None = None) -> None:
        """
        Args:
            template: Jinja source, run in a sandbox.
            special_texts: role to text of special tokens ("bos_token", "eos_token", …), which templates name.

        Raises ChatTemplateError if the source isn't valid Jinja.
        """
        self._special_texts = dict(special_texts or {})
        self._eos = self._special_texts.get("eos_token", "")
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateSyntaxError as err:
            raise ChatTemplateError(f"the model's chat template isn't valid Jinja: line {err.lineno}: {err.message}") from err

    @classmethod
    def of(cls, tokenizer: HasTemplate) -> ChatTemplate | None:
        """The tokenizer's template, or None if the model has none. Raises ChatTemplateError."""
        return cls(tokenizer.chat_template, tokenizer.special_texts) if tokenizer.chat_template else None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Tools | None = None) -> str:
        """The text of a whole conversation. Raises ChatTemplateError with the template's own complaint."""
        values = [_plain(message) for message in messages]
        try:
            return self._template.render(
                messages=values,
                tools=[dict(tool) for tool in tools] if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_texts,
            )
        except jinja2.TemplateError as err:
            raise ChatTemplateError(f"the model's chat template refused the messages: {err.message or err}") from err
        except Exception as err:  # the template runs over whatever the client sent
            raise ChatTemplateError(f"the model's chat template failed on these messages: {type(err).__name__}: {err}") from err

    def continuation(
        self,
        held: Sequence[Message],
        new: Sequence[Message],
        add_generation_prompt: bool,
        tools: Tools | None = None,
        *,
        last_reply_open: bool,
        reply_is_empty: bool = False,
    ) -> str:
        """The text to put after a branch that holds `held`, so that nothing that it holds is computed again.

        Args:
            held: the messages on the branch. A reply that was generated after them isn't in it; earlier replies are, with
                their text or as GENERATED_REPLY.
            new: messages to add; may be empty.
            add_generation_prompt: end with the beginning of an assistant's turn.
            tools: as in `render`; the same as when `held` was rendered.
            last_reply_open: the branch was rendered with a generation prompt, and a reply (perhaps none) stands after it. The
                text then begins with what closes the assistant's turn. That is usually the end token, which the reply may
                have brought along: drop the first token if the branch ends in it already.
            reply_is_empty: with `last_reply_open`: nothing was generated, so that a `new` that begins with an assistant's
                message fills the open turn instead of adding one.

        Raises ChatTemplateError: the template's complaint, or that it would render what is held differently now.
        """
        if not last_reply_open:
            before = self.render(held, False, tools)
            return self._after(before, self.render([*held, *new], add_generation_prompt, tools))
        if reply_is_empty and new and new[0].role == "assistant":
            before = self.render(held, True, tools)
            return self._after(before, self.render([*held, *new], add_generation_prompt, tools))
        stem = self.render(held, False, tools)
        reply = _unused_word(stem, new)
        whole = self.render([*held, Message(role="assistant", content=reply), *new], add_generation_prompt, tools)
        rest = self._after(stem, whole)
        if rest.count(reply) != 1:
            raise ChatTemplateError(
                "the model's chat template doesn't render an assistant's message as it stands, so the turn that was generated "
                "can't be closed: send the whole conversation as a new context instead"
            )
        closing = rest[rest.index(reply) + len(reply) :]
        # Some templates put a space before the end token; a generated reply has none, and the end token may stand there.
        bare = closing.lstrip(" ")
        return bare if self._eos and bare.startswith(self._eos) else closing

    def _after(self, before: str, whole: str) -> str:
        if whole.startswith(before):
            return whole[len(before) :]
        same = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole)))
        raise ChatTemplateError(
            f"the model's chat template renders the {len(before)} characters that the branch holds differently once messages "
            f"follow (from character {same}: {before[same : same + 40]!r} becomes {whole[same : same + 40]!r}): send the whole "
            "conversation as a new context instead"
        )


def _unused_word(stem: str, new: Sequence[Message]) -> str:
    """A word that stands neither in `stem` nor in `new`."""
    texts = [stem, *(message.content or "" for message in new), *(str(message.tool_calls) for message in new)]
    number = 0
    while any(f"Reply{number}Placeholder" in text for text in texts):
        number += 1
    return f"Reply{number}Placeholder"


def _plain(message: Message) -> dict[str, Any]:
    """The message as templates expect it: absent keys are absent, content is a string, a call's arguments are an object."""
    value: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.name is not None:
        value["name"] = message.name
    if message.tool_call_id is not None:
        value["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        value["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return value


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's API carries the arguments as a JSON text; templates were written for the object."""
    plain = dict(call)
    function = plain.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except json.JSONDecodeError:
            return plain
        if isinstance(arguments, dict):
            plain["function"] = {**function, "arguments": arguments}
    return plain


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks an assistant's text for training; here it is its content alone."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Set up as transformers' `apply_chat_template` does, which model authors write for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models weren't trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
