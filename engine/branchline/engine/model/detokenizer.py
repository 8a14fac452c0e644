"""From generated token ids to text, as they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8
# A character has at most 4 bytes, so at most 4 tokens: more of them without a whole character at their end are no text.
_MAX_HELD_TOKENS = 64


class Decodes(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...


class Detokenizer:
    """The text of one generation. What `push` and `finish` return, joined, is the decode of all its tokens after the
    context, cut at the first stop string; special tokens are skipped.

    Never gives out half a character (it waits for the rest) nor a part of a stop string (it holds back the longest end of the
    text that could begin one).

    The text of a token depends on the tokens before it (a leading space, the first bytes of a character), so each decode
    covers the tokens since the last whole character but one (the two-offset method of vLLM and Text Generation Inference).
    `tokenizers.decoders.DecodeStream` works alike, but raises on bytes that spoil a run which it gave out already, and has no
    way to end.

    Attributes:
        stopped: the stop string that ended the text, or None.
    """

    def __init__(self, tokenizer: Decodes, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        """`context`: the tokens before the first generated one; the last few are enough."""
        self._tokenizer = tokenizer
        self._filter = StopFilter(stop)
        self._before = list(context[-_CONTEXT_TOKENS:])  # tokens whose text was given out
        # A context may end in the first bytes of a character: they are part of the first text then.
        self._before_text = tokenizer.decode(self._before).rstrip(_REPLACEMENT)
        self._held: list[int] = []  # tokens after them

    @property
    def stopped(self) -> str | None:
        return self._filter.stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens. Returns the text that is sure now; "" after a stop string."""
        given = []
        for token in token_ids:
            if self._filter.stopped is not None:
                break
            self._held.append(token)
            text = self._new_text()
            if text and (not text.endswith(_REPLACEMENT) or len(self._held) >= _MAX_HELD_TOKENS):
                self._before, self._held = self._held, []
                self._before_text = self._tokenizer.decode(self._before)
                given.append(self._filter.push(text))
            elif not text and len(self._held) >= _MAX_HELD_TOKENS:
                del self._held[:-_CONTEXT_TOKENS]  # special tokens only
        return "".join(given)

    def finish(self) -> str:
        """The generation ended: returns the text that was held back. Bytes that make no character become U+FFFD."""
        if self._filter.stopped is not None:
            return ""
        text, self._held = self._new_text(), []
        return self._filter.push(text) + self._filter.finish()

    def _new_text(self) -> str:
        if not self._held:
            return ""
        text = self._tokenizer.decode([*self._before, *self._held])
        if text.startswith(self._before_text):
            return text[len(self._before_text) :]
        # A byte-fallback decoder takes back characters of a run of bytes that ends in an invalid one: keep them.
        return self._tokenizer.decode(self._held)


class StopFilter:
    """Passes text on up to the first stop string to be complete (of those that are complete at the same character, the
    longest), which is cut off. Holds back an end of the text that may begin one.

    One automaton for each string (Knuth, Morris, Pratt 1977): the cost is linear in the text, however long the strings are.

    Attributes:
        stopped: the stop string that was found, or None.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stopped: str | None = None
        self._stop = sorted(set(stop), key=len, reverse=True)
        self._borders = [_borders(string) for string in self._stop]
        self._matched = [0] * len(self._stop)  # characters of each string that the text ends in
        self._held = ""

    def push(self, text: str) -> str:
        """Take more text. Returns what can't be part of a stop string."""
        if not self._stop or self.stopped is not None:
            return text if self.stopped is None else ""
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            for i, string in enumerate(self._stop):
                length = self._matched[i]
                while length and string[length] != character:
                    length = self._borders[i][length]
                self._matched[i] = length = length + 1 if string[length] == character else 0
                if length == len(string):
                    self.stopped, self._held = string, ""
                    return pending[: end - length]
        kept = max(self._matched)
        self._held = pending[len(pending) - kept :]
        return pending[: len(pending) - kept]

    def finish(self) -> str:
        """No more text comes: returns what was held back."""
        held, self._held = self._held, ""
        return held


def _borders(string: str) -> list[int]:
    """For each n < len(string): length of the longest proper prefix of string[:n] that is also its end."""
    borders = [0, 0]
    for n in range(2, len(string)):
        length = borders[n - 1]
        while length and string[length] != string[n - 1]:
            length = borders[length]
        borders.append(length + 1 if string[length] == string[n - 1] else 0)
    return borders
