"""From the engine's thread to an asyncio loop: one wake-up for all that arrives together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Hands items from any thread to `deliver` on the loop.

    However many items are put before the loop gets to run, it is woken once: a step's events for all sessions cost one
    `call_soon_threadsafe`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[T], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._items: deque[T] = deque()
        self._scheduled = False

    def put(self, item: T) -> None:
        """Leave an item. Any thread; never blocks. Items that come after the loop was closed are dropped."""
        self._items.append(item)
        if self._scheduled:
            return
        self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # the loop is closed: nobody is left to read
            self._items.clear()

    def _drain(self) -> None:
        # Cleared first: an item put from here on either is seen by this drain or schedules the next.
        self._scheduled = False
        while self._items:
            self._deliver(self._items.popleft())
