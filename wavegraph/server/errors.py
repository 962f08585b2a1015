"""Errors as clients see them: the OpenAI error object, for every status."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from wavegraph.errors import WavegraphError

RETRY_AFTER = {"Retry-After": "1"}


class ApiError(WavegraphError):
    """An answer that is an error. ``param`` names the field at fault, ``code`` is for programs to look at."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """The error's ``type``."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"


class ErrorDetail(msgspec.Struct):
    """What is wrong: one sentence, the kind of error, the field at fault, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every answer that is an error, and of an error event inside a stream."""

    error: ErrorDetail


def error_body(error: ApiError) -> bytes:
    """The JSON of an error."""
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, error.kind, error.param, error.code)))


def error_response(error: ApiError) -> Response:
    """The whole answer."""
    return Response(error_body(error), error.status, error.headers, "application/json")


def engine_failed() -> ApiError:
    """For a request that was under way when the engine failed. What failed stands in the log."""
    return ApiError(500, "the engine failed while it worked on this request; try again", code="engine_failed")


def request_failed() -> ApiError:
    """For a request that failed by itself, or with its step. What failed stands in the log."""
    message = "work on this request failed; other requests are not affected, and the server's log says why"
    return ApiError(500, message, code="request_failed")


def timed_out() -> ApiError:
    """For a request whose time is up."""
    return ApiError(504, "the request took longer than this server allows; ask for less", code="timeout")


def unavailable(reason: Exception) -> ApiError:
    """For a request that came before the engine was ready, or after it began to shut down, or failed."""
    return ApiError(503, str(reason), code="unavailable", headers=RETRY_AFTER)
