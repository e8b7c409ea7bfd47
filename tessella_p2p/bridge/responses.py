"""Answers of a whole: JSON, and errors in the one shape, for the apps of every role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from tessella_p2p.base.errors import LocalProtocolError, TessellaError
from tessella_p2p.bridge.answers import encoded
from tessella_p2p.bridge.errors import INTERNAL, ErrorAnswer, error_answer, shaped_error

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)
_HTTP_CODES = {404: "unknown_url", 405: "method_not_allowed"}


def json_response(value: object, headers: Mapping[str, str] | None = None) -> Response:
    """``value`` as JSON; never cached."""
    return Response(
        encoded(value), media_type="application/json", headers={"cache-control": "no-store", **(headers or {})}
    )


def error_response(answer: ErrorAnswer) -> Response:
    """An error as a whole answer."""
    return Response(answer.json(), answer.status, answer.headers, media_type="application/json")


def logged_answer(error: TessellaError, *, of_client: bool = False) -> ErrorAnswer:
    """The answer to a request that ``error`` ended. Where it tells the client that this node's log says why, the log does."""
    answer = error_answer(error, of_client=of_client)
    if answer.status == INTERNAL:
        _log.error("http_answer_failed", code=error.code, reason=str(error), exc_info=error)
    return answer


def exception_handlers(answer_to: Callable[[TessellaError], ErrorAnswer]) -> dict[Any, ExceptionHandler]:
    """Starlette's handlers: whatever ends a request, its answer has the one shape.

    Args:
        answer_to: makes the answer to a `TessellaError`.
    """

    async def on_tessella_error(_: Request, error: Exception) -> Response:
        if not isinstance(error, TessellaError):
            raise error
        return error_response(answer_to(error))

    return {TessellaError: on_tessella_error, HTTPException: _on_http_exception, Exception: _on_bug}


async def _on_http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    status = error.status_code
    code = _HTTP_CODES.get(status, "invalid_request")
    what = f"{request.method} {request.scope['path']}"
    message = {404: f"there is nothing at {what}", 405: f"{what} is not answered; see the allow header"}.get(
        status, error.detail
    )
    return error_response(shaped_error(status, message, code, headers=error.headers))


async def _on_bug(_: Request, __: Exception) -> Response:
    """The answer to a request that met a bug; `Observed` logs the exception, which Starlette passes on to it."""
    return error_response(error_answer(LocalProtocolError()))
