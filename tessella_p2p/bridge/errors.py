"""Errors as HTTP answers, in OpenAI's shape; pure.

``{"error": {"message", "type", "param", "code"}}``: ``code`` is the error's code in ``base/errors.py``, but where OpenAI has another
word, and its status is that error's ``http_status``; nothing else in the bridge decides either. The official SDKs raise their class
by the status and expose ``code``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from tessella_p2p.base.errors import (
    InvalidRequest,
    MalformedMessage,
    NoRoute,
    NotOperator,
    PromptTooLong,
    RemoteProtocolError,
    TessellaError,
)
from tessella_p2p.base.limits import HEARTBEAT_S
from tessella_p2p.bridge.answer_headers import REQUEST_ID

_RETRY_AFTER_S: Mapping[str, int] = {NoRoute.code: int(HEARTBEAT_S)}
"""Seconds after which a refusal with status 503 may be different; a hole closes with a heartbeat at the earliest."""
_DEFAULT_RETRY_AFTER_S = 1
_OPENAI_CODES: Mapping[str, str] = {PromptTooLong.code: "context_length_exceeded"}
"""Where OpenAI has a word of its own, on which clients act: it is theirs."""
_BAD_REQUEST = 400
_BAD_GATEWAY = 502
INTERNAL = 500


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error, ready to be sent."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    def json(self) -> bytes:
        """The body as it goes out, also as the ``data`` of a failed stream."""
        return to_json(self.body)


def error_answer(error: TessellaError, *, of_client: bool = False) -> ErrorAnswer:
    """The answer to a request that ``error`` ended: the one place where errors become HTTP.

    What this node itself did wrong (status 500) keeps its code, and its message stays in the log: it may name files. A peer's broken
    rule is not the client's fault, so a `RemoteProtocolError` that reaches the client is a bad gateway, whatever status it has
    between peers; unless the client is that peer.

    Args:
        error: what ended the request.
        of_client: whether the client itself speaks the protocol whose rule was broken: its envelope is the request.
    """
    status, message = error.http_status, str(error)
    if isinstance(error, RemoteProtocolError) and not (of_client and status < INTERNAL):
        status = _BAD_REQUEST if of_client else _BAD_GATEWAY
    if status == INTERNAL:
        message = "this node failed to answer; its log says why"
    more: dict[str, Any] = {}
    if isinstance(error, NoRoute):
        more["missing_layers"] = [list(layers) for layers in error.missing]
    if error.peer is not None:
        more["peer_id"] = error.peer
    headers = {"retry-after": str(_retry_after_s(error))} if status == 503 else {}
    if error.request_id is not None:
        more["request_id"] = headers[REQUEST_ID] = error.request_id
    if isinstance(error, NotOperator):
        headers["www-authenticate"] = "Bearer"
    param = error.param if isinstance(error, InvalidRequest | MalformedMessage) else None
    code = _OPENAI_CODES.get(error.code, error.code)
    return shaped_error(status, message, code, param=param, headers=headers, more=more)


def _retry_after_s(error: TessellaError) -> int:
    if isinstance(error, NoRoute) and error.retry_after_s is not None:
        return max(1, math.ceil(error.retry_after_s))
    return _RETRY_AFTER_S.get(error.code, _DEFAULT_RETRY_AFTER_S)


def shaped_error(
    status: int,
    message: str,
    code: str,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
) -> ErrorAnswer:
    """An answer for what HTTP itself refuses (404, 405, 408, 413), where no `TessellaError` exists."""
    kind = "server_error" if status >= INTERNAL else "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": code, **(more or {})}
    return ErrorAnswer(status, {"error": error}, dict(headers or {}))


def sole_error(group: BaseExceptionGroup[BaseException]) -> TessellaError | None:
    """The one `TessellaError` that a nursery between its origin and here has wrapped, or None when there is anything else."""
    if len(group.exceptions) != 1:
        return None
    inner = group.exceptions[0]
    if isinstance(inner, BaseExceptionGroup):
        return sole_error(inner)
    return inner if isinstance(inner, TessellaError) else None


def raw_refusal(message: str) -> bytes:
    """A whole HTTP/1.1 answer 503, for a connection that is not served at all."""
    body = shaped_error(503, message, "overloaded").json()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"retry-after: {_DEFAULT_RETRY_AFTER_S}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body
