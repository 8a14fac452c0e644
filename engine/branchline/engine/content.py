"""From what a client sends to token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from branchline.engine.branch import ChatState
from branchline.engine.errors import ChatTemplateError, InvalidParameterError
from branchline.engine.model.chat_template import GENERATED_REPLY, ChatTemplate
from branchline.engine.scheduler.strand import Tokens
from branchline.engine.types import Chat, Content, Text, TokenIds

# Shorter content is tokenised in the engine thread: under 1 ms, less than handing it to another thread may take.
INLINE_CHARACTERS = 4096


class Encodes(Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...
    def encode(self, text: str, add_bos: bool) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ContentEncoder:
    """Tokenises content for the place where it goes. Thread-safe."""

    tokenizer: Encodes
    template: ChatTemplate | None

    def encode(self, content: Content, chat: ChatState | None, last_token: int | None) -> tuple[Tokens, ChatState | None]:
        """Token ids to put after a branch, and the branch's chat state then.

        Args:
            content: what to put there.
            chat: the messages that the branch holds.
            last_token: the branch's last token; None at an empty root.

        Raises InvalidParameterError on ids outside the vocabulary, ChatTemplateError.
        """
        if isinstance(content, TokenIds):
            ids = np.array(content.ids, np.int64)
            if ids.size and (ids.min() < 0 or ids.max() >= self.tokenizer.vocab_size):
                raise InvalidParameterError(
                    f"token ids from {ids.min()} to {ids.max()}: expected 0 to {self.tokenizer.vocab_size - 1}", param="ids"
                )
            return ids.astype(np.int32), chat
        if isinstance(content, Text):
            return np.array(self.tokenizer.encode(content.text, add_bos=last_token is None), np.int32), chat
        return self._encode_chat(content, chat, last_token)

    def _encode_chat(self, content: Chat, chat: ChatState | None, last_token: int | None) -> tuple[Tokens, ChatState]:
        if self.template is None:
            raise ChatTemplateError("the model has no chat template: send text or token ids instead of messages")
        if not content.messages and not (chat and content.add_generation_prompt):
            raise InvalidParameterError("messages is empty: expected at least one", param="messages")
        held = chat.messages if chat else ()
        if chat:
            text = self.template.continuation(
                held, content.messages, content.add_generation_prompt, content.tools, last_reply_open=chat.open
            )
        else:
            text = self.template.render(content.messages, content.add_generation_prompt, content.tools)
        ids = self.tokenizer.encode(text, add_bos=False)
        if ids and chat and chat.open and ids[0] == last_token and last_token in self.tokenizer.eos_ids:
            del ids[0]  # the reply's own end token stands there already
        # The reply that this closes stands on the branch; templates that want roles to alternate must know of it.
        replies = (GENERATED_REPLY,) if chat and chat.open else ()
        return np.array(ids, np.int32), ChatState((*held, *replies, *content.messages), content.add_generation_prompt)


def is_short(content: Content) -> bool:
    """Whether tokenising it costs too little to be handed to another thread."""
    if isinstance(content, Text):
        return len(content.text) <= INLINE_CHARACTERS
    if isinstance(content, TokenIds):
        return True
    return sum(len(message.content or "") for message in content.messages) <= INLINE_CHARACTERS
