"""What can go wrong between a client and the engine, beside the engine's own errors.

InvalidRequestError
├── PayloadTooLargeError         the request body is longer than the gateway reads          (HTTP 413)
├── MethodNotAllowedError        the path exists, not with this HTTP method                  (HTTP 405)
└── InvalidParameterError
    └── UnsupportedParameterError    a parameter of OpenAI's API that isn't supported yet    (HTTP 400)
BranchlineError
├── PathNotFoundError            no such path                                                (HTTP 404)
├── SlowReaderError              a session's events were not read, and it was closed         (HTTP 409)
├── TokenRefusedError            a direct channel's token is wrong or spent                  (HTTP 401)
└── ReplicaUnavailableError      the replica went away, or none is up                        (HTTP 503)
"""

from branchline.engine.errors import BranchlineError, InvalidParameterError, InvalidRequestError


class PayloadTooLargeError(InvalidRequestError):
    """The request body is longer than the gateway reads."""

    code = "payload_too_large"
    status = 413


class MethodNotAllowedError(InvalidRequestError):
    """The path exists, but not with this HTTP method."""

    code = "method_not_allowed"
    status = 405


class UnsupportedParameterError(InvalidParameterError):
    """The parameter is known from OpenAI's API and isn't supported yet."""

    code = "unsupported_parameter"


class PathNotFoundError(BranchlineError):
    """The gateway has no such path."""

    code = "path_not_found"
    status = 404


class SlowReaderError(BranchlineError):
    """A session's client reads its events more slowly than they come, by more than the replica keeps. The session is closed."""

    code = "slow_reader"
    status = 409


class TokenRefusedError(BranchlineError):
    """The token that a direct channel was to be opened with is wrong, was used already, or is too old."""

    code = "token_refused"
    status = 401


class ReplicaUnavailableError(BranchlineError):
    """The engine replica went away while it was asked, or none is up."""

    code = "replica_unavailable"
    status = 503
