"""The wire: what clients and replicas send each other, the same through a Ray handle and over HTTP.

Imports msgspec, `branchline.engine.types` and `prefix` alone, so that a client needs neither Ray nor torch.

A client opens a **session** on one replica, sends **batches of commands** (in order: the next batch goes out when the last
one was acknowledged) and reads **one stream of event batches** for all of its branches.

Through a Ray Serve handle the replica's methods are (payloads are msgpack of the Structs below):

    open_session(payload: OpenSession) -> Reply          any replica
    submit(payload: CommandBatch) -> Reply               options(session_id=<SessionOpened.replica>)
    events(session: str) -> stream of EventBatch         options(session_id=…, stream=True); the first item comes at once and
                                                         may have no events; empty batches are heartbeats. A stream without
                                                         any item: no such session, or somebody reads it already
    close_session(session: str) -> Reply                 options(session_id=…)
    stats() -> Reply
    load() -> Reply                                      a LoadReply: what decides where new roots go
    describe() -> SessionOpened                          of no session: the replica's name and what it serves

An OpenAI request, and a session that names no tenant itself, are for the tenant that the header x-branchline-tenant names.

A batch without commands keeps a session alive. A request for a replica that is gone reaches another one, which answers that
it has no such session.

Over HTTP (JSON, or msgpack where `Content-Type`/`Accept` is application/msgpack; errors have OpenAI's shape):

    POST   /v1/sessions                    OpenSession -> SessionOpened
    POST   /v1/sessions/{id}/commands      CommandBatch.commands -> 202
    GET    /v1/sessions/{id}/events        Server-Sent Events, one EventBatch a message
    DELETE /v1/sessions/{id}               -> 204
    GET    /v1/stats[?session={id}]        -> EngineStats, of all replicas together or of the session's
    GET    /v1/stats?by=replica            -> a list of {"replica", "stats"}
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from branchline.engine.errors import BranchlineError, from_wire
from branchline.engine.types import Command, EngineStats, ErrorInfo, Event, ModelInfo
from branchline.orchestrator.prefix import Prefix

PROTOCOL_VERSION: Final = 1
APP_NAME: Final = "branchline"
ENGINE_DEPLOYMENT: Final = "Engine"
TENANT_HEADER: Final = "x-branchline-tenant"
MSGPACK: Final = "application/msgpack"


class OpenSession(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ask for a session. `client` is a name for logs and metrics; `tenant`: whom its work is done for; `direct`: whether the
    client would use a direct channel; `near`: what its first context will begin with (see prefix.py), for a gateway that
    chooses the replica."""

    version: int = PROTOCOL_VERSION
    client: str = ""
    tenant: str = ""
    direct: bool = False
    near: Prefix | None = None


class DirectAddress(msgspec.Struct, frozen=True):
    """Where a replica takes direct channels (wire.py), and the token (a secret) that lets this session's client in, once,
    within seconds."""

    host: str
    port: int
    token: str


class SessionOpened(msgspec.Struct, frozen=True, kw_only=True, tag="opened", omit_defaults=True):
    """The session's id (a secret: who knows it can use the session), its replica, and what is served there.

    A session whose client sends nothing for `timeout_s` seconds is closed: clients that have nothing to say send a batch
    without commands about three times in that time. (Reading the stream is not enough: Ray doesn't tell a replica that the
    process that read it was killed.) Over HTTP the gateway does it for as long as the event stream is read. `direct` is there
    if it was asked for and the replica offers it.
    """

    session: str
    replica: str
    model: ModelInfo
    timeout_s: float
    direct: DirectAddress | None = None


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """Accepted; results come in the stream."""


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    """Refused as a whole; nothing of it took effect."""

    error: ErrorInfo

    def exception(self) -> BranchlineError:
        """The error as an exception."""
        return self.error.exception()


class StatsReply(msgspec.Struct, frozen=True, tag="stats"):
    """The counters of the replica that answered."""

    replica: str
    stats: EngineStats


class LoadReply(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """What decides whether new roots go to this replica (see docs/routing.md).

    Attributes:
        draining: it is about to stop, and takes no new sessions.
        running, waiting: generations and contexts in the batch; those that wait for a place in it.
        branches, sessions: alive.
        pages_free, pages_total: those that only the prefix cache holds are free.
        prefill_token_s, decode_token_s: seconds that a token of a prompt, and of an output, took lately; None: none yet.
        output_tokens: of a generation, lately, on average; None: none has ended yet.
        prefixes: hashes of what the prefix cache probably holds (see prefix.py), joined.
    """

    replica: str
    draining: bool
    running: int
    waiting: int
    branches: int
    sessions: int
    pages_free: int
    pages_total: int
    page_tokens: int
    prefill_token_s: float | None
    decode_token_s: float | None
    output_tokens: float | None
    prefixes: bytes


Reply = SessionOpened | Ack | ErrorReply | StatsReply | LoadReply


class CommandBatch(msgspec.Struct, frozen=True):
    """Commands of one session, in order."""

    session: str
    commands: tuple[Command, ...]


class EventBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """Events of one session. One engine step gives at most one batch; batches of a slow reader are joined, and then a
    generation's deltas, too. `error`: the session is closed, and why; nothing comes after it."""

    session: str
    events: tuple[Event, ...]
    error: ErrorInfo | None = None


class BranchHandle(msgspec.Struct, frozen=True, array_like=True):
    """Names a branch anywhere: small, plain data, safe to pickle and to send. Use it by `Session.attach(handle)`.

    Attributes:
        app: the Serve application, or "" for an engine in this process.
        replica: who holds the branch's pages.
        session: the session that owns it.
        branch: its id there.
    """

    app: str
    replica: str
    session: str
    branch: int


_encoder: Final = msgspec.msgpack.Encoder()
_json_encoder: Final = msgspec.json.Encoder()

encode = _encoder.encode
encode_json = _json_encoder.encode
decode_open: Final = msgspec.msgpack.Decoder(OpenSession).decode
decode_open_json: Final = msgspec.json.Decoder(OpenSession).decode
decode_reply: Final = msgspec.msgpack.Decoder(Reply).decode
decode_opened_json: Final = msgspec.json.Decoder(SessionOpened).decode
decode_batch: Final = msgspec.msgpack.Decoder(CommandBatch).decode
decode_commands: Final = msgspec.msgpack.Decoder(tuple[Command, ...]).decode
decode_commands_json: Final = msgspec.json.Decoder(tuple[Command, ...]).decode
decode_events: Final = msgspec.msgpack.Decoder(EventBatch).decode
decode_events_json: Final = msgspec.json.Decoder(EventBatch).decode


class OpenAIErrorBody(msgspec.Struct, frozen=True):
    """The inside of an OpenAI-shaped error body."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct, frozen=True):
    """`{"error": {…}}`, as every HTTP error is answered."""

    error: OpenAIErrorBody


def openai_error(err: BranchlineError) -> OpenAIError:
    """The error as OpenAI's clients expect it; `type` follows the HTTP status."""
    kinds: dict[int, str] = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }
    kind = kinds.get(err.status, "invalid_request_error" if err.status < 500 else "server_error")
    return OpenAIError(OpenAIErrorBody(err.message, kind, err.param, err.code))


def from_openai_error(body: Any) -> BranchlineError:
    """The exception that an OpenAI-shaped body (decoded JSON) stands for."""
    error = body.get("error", {}) if isinstance(body, dict) else {}
    return from_wire(error.get("code") or "branchline_error", error.get("message") or str(body), error.get("param"))
