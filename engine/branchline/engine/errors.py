"""Every error that the engine raises, in one tree.

    BranchlineError
    ├── InvalidRequestError          the caller's input is wrong; the same call will fail again   (HTTP 400)
    │   ├── InvalidParameterError    one named parameter has a wrong type or value                (HTTP 400)
    │   ├── ContextLengthError       prompt and output don't fit the model's context              (HTTP 400)
    │   └── ChatTemplateError        the model's chat template refused the messages               (HTTP 400)
    ├── BranchError                  a handle names nothing that can be used                      (HTTP 404)
    │   ├── UnknownBranchError       no such branch in this session                               (HTTP 404)
    │   ├── ReleasedBranchError      the branch was released                                      (HTTP 410)
    │   ├── ForeignHandleError       the handle belongs to another session or engine              (HTTP 403)
    │   ├── DuplicateBranchError     the branch id that a client minted is taken                  (HTTP 409)
    │   └── FailedBranchError        an earlier command on this branch or an ancestor failed      (HTTP 409)
    ├── SessionNotFoundError         no such session: closed, expired or never opened             (HTTP 404)
    ├── CapacityError                there is no room                                             (HTTP 503)
    │   ├── PoolTooSmallError        the request can never fit the page pool                      (HTTP 400)
    │   ├── PoolExhaustedError       the pages are held by others now                             (HTTP 503)
    │   ├── EngineOverloadedError    the waiting queue is full; try later                         (HTTP 429)
    │   └── TenantLimitError         the tenant has reached one of its limits; try later          (HTTP 429)
    ├── DeadlineError                it can't end before its deadline any more, and was dropped   (HTTP 504)
    ├── ModelError                   the model can't be loaded
    │   ├── ModelNotFoundError       no file, folder or repository of that name                   (HTTP 404)
    │   ├── CorruptModelError        the files are damaged or incomplete
    │   └── UnsupportedModelError    the architecture or a setting isn't implemented
    ├── ConfigError                  a setting is unknown or out of range
    └── EngineError                  the engine itself failed                                     (HTTP 500)
        ├── EngineClosedError        the engine was shut down                                     (HTTP 503)
        └── EngineStepError          a step raised; the requests in it are lost                   (HTTP 500)

Each class carries a stable `code` (what goes over the wire) and an HTTP `status`. `from_wire` turns a code back into its
class, so an error that happened in a replica is raised in the client as the same type.
"""

from typing import ClassVar


class BranchlineError(Exception):
    """Base of all errors of this project.

    Attributes:
        code: stable snake_case identifier, the same on every transport.
        status: the HTTP status that the gateway answers with.
        message: what was wrong, what was expected, what to do.
        param: the name of the parameter at fault, if one is.
        retry_after_s: seconds after which the same call may succeed, if that can be told.
    """

    code: ClassVar[str] = "branchline_error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.param, self.retry_after_s))


def _rebuild(cls: type[BranchlineError], message: str, param: str | None, retry_after_s: float | None) -> BranchlineError:
    return cls(message, param=param, retry_after_s=retry_after_s)


class InvalidRequestError(BranchlineError):
    """The caller's input is wrong."""

    code = "invalid_request"
    status = 400


class InvalidParameterError(InvalidRequestError):
    """One parameter has a wrong type or value; `param` names it."""

    code = "invalid_parameter"


class ContextLengthError(InvalidRequestError):
    """Prompt and requested output are longer than the model's context."""

    code = "context_length_exceeded"


class ChatTemplateError(InvalidRequestError):
    """The model has no chat template, or it refused these messages."""

    code = "chat_template_error"


class BranchError(BranchlineError):
    """A handle doesn't name a usable branch."""

    code = "branch_error"
    status = 404


class UnknownBranchError(BranchError):
    """No branch of this id was ever made in this session."""

    code = "unknown_branch"


class ReleasedBranchError(BranchError):
    """The branch was released; its pages may already belong to others."""

    code = "released_branch"
    status = 410


class ForeignHandleError(BranchError):
    """The handle belongs to another session; `Session.attach` takes those."""

    code = "foreign_handle"
    status = 403


class DuplicateBranchError(BranchError):
    """The branch id that the client minted is in use."""

    code = "duplicate_branch"
    status = 409


class FailedBranchError(BranchError):
    """An earlier command on this branch, or on the one it was forked from, failed; its content isn't what was asked for."""

    code = "failed_branch"
    status = 409


class SessionNotFoundError(BranchlineError):
    """The session was closed, has expired, or never existed."""

    code = "session_not_found"
    status = 404


class CapacityError(BranchlineError):
    """There is no room for the request."""

    code = "capacity"
    status = 503


class PoolTooSmallError(CapacityError):
    """The request needs more pages than the whole pool has."""

    code = "pool_too_small"
    status = 400


class PoolExhaustedError(CapacityError):
    """The pool's pages are held by other branches."""

    code = "pool_exhausted"


class EngineOverloadedError(CapacityError):
    """The waiting queue is full."""

    code = "overloaded"
    status = 429


class TenantLimitError(CapacityError):
    """The tenant has reached its limit of branches, pages or tokens per minute."""

    code = "tenant_limit"
    status = 429


class DeadlineError(BranchlineError):
    """The work can't end before its deadline any more: it was dropped."""

    code = "deadline_exceeded"
    status = 504


class ModelError(BranchlineError):
    """The model can't be loaded."""

    code = "model_error"


class ModelNotFoundError(ModelError):
    """No file, folder, built-in name or repository of this name."""

    code = "model_not_found"
    status = 404


class CorruptModelError(ModelError):
    """The model's files are damaged, truncated or incomplete."""

    code = "corrupt_model"


class UnsupportedModelError(ModelError):
    """The architecture, a tensor type or a setting of the model isn't implemented."""

    code = "unsupported_model"


class ConfigError(BranchlineError):
    """A setting is unknown, has the wrong type or is out of range."""

    code = "config_error"
    status = 400


class EngineError(BranchlineError):
    """The engine itself failed."""

    code = "engine_error"


class EngineClosedError(EngineError):
    """The engine was shut down, or is shutting down."""

    code = "engine_closed"
    status = 503


class EngineStepError(EngineError):
    """A step raised; the requests that were in it can't be continued."""

    code = "engine_step_failed"


def _walk(cls: type[BranchlineError]) -> dict[str, type[BranchlineError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found.update(_walk(sub))
    return found


def from_wire(code: str, message: str, param: str | None = None, retry_after_s: float | None = None) -> BranchlineError:
    """Build the error that a `code` stands for.

    Args:
        code: a class's `code`. One that this version doesn't know gives a plain `BranchlineError` whose text names it.
        message: the text that came with it.
        param: the parameter at fault, if any.
        retry_after_s: when to try again, if that came with it.
    """
    cls = _walk(BranchlineError).get(code)
    if cls is None:
        return BranchlineError(f"{message} (error code {code!r})", param=param, retry_after_s=retry_after_s)
    return cls(message, param=param, retry_after_s=retry_after_s)
