"""Structured log lines, one a request. Ray's formatters put the extra fields into the line: as JSON, or as key=value."""

from __future__ import annotations

import logging
from typing import Any

from branchline.engine.types import Failed, Finished

logger = logging.getLogger("ray.serve.branchline.requests")


class RequestLog:
    """Tells of each request how it ended. Off by default: a storm of short requests would write more than it computes."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    def finished(self, session: str, event: Finished, qos: str, tax_s: float | None) -> None:
        """A generation ended."""
        if self._enabled:
            timing, usage = event.timing, event.usage
            self._write(
                logging.INFO,
                f"generation ended: {event.reason}",
                session,
                branch=event.branch,
                generation=event.request,
                reason=event.reason,
                qos=qos,
                prompt_tokens=usage.prompt_tokens,
                shared_tokens=usage.shared_tokens,
                completion_tokens=usage.completion_tokens,
                queue_ms=_ms(timing.queue_s),
                first_token_ms=_ms(timing.first_token_s),
                total_ms=_ms(timing.total_s),
                tax_ms=None if tax_s is None else _ms(tax_s),
                preemptions=timing.preemptions,
            )

    def failed(self, session: str, event: Failed) -> None:
        """A command failed, or a generation did."""
        if self._enabled:
            self._write(
                logging.WARNING,
                f"branch {event.branch} failed: {event.error.message}",
                session,
                branch=event.branch,
                generation=event.request,
                code=event.error.code,
            )

    def asked(self, session: str, branches: range) -> None:
        """An HTTP request took these branches. Serve adds the request's id."""
        if self._enabled:
            self._write(logging.INFO, "branches of a request", session, branches=[branches.start, branches.stop])

    def _write(self, level: int, message: str, session: str, **fields: Any) -> None:
        logger.log(level, message, extra={"session": short(session), **fields})


def short(session: str) -> str:
    """A session's id as it may stand in a log: who has the whole id can use the session."""
    replica, _, own = session.rpartition(".")
    return f"{replica}.{own[:8]}" if replica else own[:8]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
