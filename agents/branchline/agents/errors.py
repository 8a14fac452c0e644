"""What the SDK itself raises, beside the engine's errors (`branchline.engine.errors`), which arrive as the same classes.

    BranchlineError
    ├── TransportError (also a ConnectionError)   the way to the engine failed
    │   ├── ConnectError                          nothing usable answers at the target
    │   └── ConnectionLostError                   the connection broke; what was waiting for it is lost
    └── SessionClosedError                        the session was closed in this process

`except ConnectionError` catches the transport's errors, `except BranchlineError` everything that the SDK and the engine
raise.
"""

from __future__ import annotations

from branchline.engine.errors import BranchlineError


class TransportError(BranchlineError, ConnectionError):
    """The way to the engine failed."""

    code = "transport_error"
    status = 503


class ConnectError(TransportError):
    """Nothing answers at the target, or what answers isn't a Branchline engine."""

    code = "connect_failed"


class ConnectionLostError(TransportError):
    """The connection to the engine broke. Every call that waited raises this; the session can't be used any more."""

    code = "connection_lost"


class SessionClosedError(BranchlineError):
    """The session was closed in this process, or its event loop has ended."""

    code = "session_closed"
    status = 409


def again(err: BranchlineError) -> BranchlineError:
    """A new exception equal to `err`, with the same cause, so that each waiting call gets a traceback of its own."""
    copy = type(err)(err.message, param=err.param)
    copy.__cause__ = err.__cause__
    return copy
