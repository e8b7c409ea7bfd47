"""What comes over HTTP as the messages that an orchestrator answers; pure.

Parameters and JSON are checked as the messages are on the wire: no coercion between types, no unknown field, no field twice. Whatever
is wrong, the error names the field.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from pydantic import ValidationError
from pydantic_core import from_json

from tessella_p2p.base.errors import InvalidRequest, MalformedMessage, NotOperator
from tessella_p2p.base.limits import MAX_ADMIN_TOKEN_CHARS, MAX_ENVELOPE_BYTES, MAX_QUERY_FIELDS
from tessella_p2p.bridge.orchestrator_routes import ENVELOPE_HEADER, REQUEST_KINDS, ApiRoute
from tessella_p2p.wire.envelope import Message

MessageT = TypeVar("MessageT", bound=Message)
BODY = "body"
"""The name of a field that is the whole body."""
CBOR = "application/cbor"
JSON = "application/json"
_ECHOED_CHARS = 64
_NO_UTF8 = re.compile("[\udc80-\udcff]")
"""Bytes that no character starts with, as `parameters` sees them."""
_INTEGER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_INTEGERS = frozenset({"limit", "before", "since", "chain", "sequence", "vram_mb"})
_FLAGS = {"true": True, "false": False}
_HEX_FIELDS = frozenset({"manifest_root", "contract_hash"})


def parameters(query: bytes) -> dict[str, str]:
    """The parameters of a query.

    Raises:
        InvalidRequest: one that stands twice, no UTF-8, or too many.
    """
    try:
        pairs = parse_qsl(
            query.decode("ascii"), keep_blank_values=True, errors="surrogateescape", max_num_fields=MAX_QUERY_FIELDS
        )
    except ValueError as error:  # UnicodeDecodeError is one
        raise InvalidRequest(f"the query cannot be read: {type(error).__name__}", "query") from None
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in found:
            raise InvalidRequest(f"{_echoed(name)} stands twice", _echoed(name))
        if _NO_UTF8.search(value):
            raise InvalidRequest(f"{_echoed(name)} is no UTF-8", _echoed(name))
        found[name] = value
    return found


def message_of_query(route: ApiRoute, given: Mapping[str, str]) -> Message:
    """The message that the parameters of a public or operator GET ask for.

    Raises:
        InvalidRequest: names the parameter.
    """
    for name in given:
        if name not in route.request.model_fields or name == "kind":
            raise InvalidRequest(f"unknown parameter: {_echoed(name)}", _echoed(name))
    values = {name: _number(value) if name in _INTEGERS else value for name, value in given.items()}
    return _validated(route.request, {**route.defaults, **values})


def flag(given: dict[str, str], name: str) -> bool:
    """Take the parameter ``name``, ``true`` or ``false``, out of ``given``; absent is false.

    Raises:
        InvalidRequest: it is something else.
    """
    value = given.pop(name, "false")
    if value not in _FLAGS:
        raise InvalidRequest(f"{name} is true or false", name)
    return _FLAGS[value]


def message_of_json(route: ApiRoute, body: bytes) -> Message:
    """The message that an operator's JSON asks for.

    Raises:
        InvalidRequest: names the field.
    """
    try:
        fields = from_json(body or b"{}", allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise InvalidRequest(f"the body is no JSON that can be read: {error}", BODY) from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object", BODY)
    if "kind" in fields:
        raise InvalidRequest("unknown field: kind", "kind")
    return _validated(route.request, {name: _from_json(name, value) for name, value in fields.items()})


def sealed_of_header(header: str | None) -> bytes:
    """The envelope of a signed GET.

    Raises:
        InvalidRequest: there is none, or it is no base64url.
    """
    if header is None:
        raise InvalidRequest(f"the sealed request is missing: give it in the header {ENVELOPE_HEADER}", ENVELOPE_HEADER)
    if len(header) > 2 * MAX_ENVELOPE_BYTES:
        raise InvalidRequest("the envelope is too long", ENVELOPE_HEADER)
    try:
        text = header.encode("ascii").rstrip(b"=")
        return base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise InvalidRequest("the envelope is no base64url", ENVELOPE_HEADER) from None


def bearer_token(header: str | None) -> str:
    """The token in an ``authorization`` header.

    Raises:
        NotOperator: there is none.
    """
    scheme, _, token = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not token or len(token) > MAX_ADMIN_TOKEN_CHARS:
        raise NotOperator("this route is the operator's: authorization: Bearer ADMIN_TOKEN")
    return token


def check_content_type(header: str | None, expected: str) -> None:
    """A body has to say what it is, so that no page of a browser sends one by a plain form.

    Raises:
        InvalidRequest: another type, or none.
    """
    if (header or "").partition(";")[0].strip().lower() != expected:
        raise InvalidRequest(f"the body's content-type has to be {expected}", "content-type")


def named_field(error: MalformedMessage, whole: str) -> MalformedMessage:
    """``error`` with the name that the field has in the sender's message: ``claim_mb``, not ``body.register.claim_mb``.

    Args:
        error: of a sealed request.
        whole: what to name where the bytes are no message at all.
    """
    steps = (error.param or "").split(".")
    if steps[0] == "body":
        steps = steps[1:]
        if steps[:1] and steps[0] in REQUEST_KINDS:
            steps = steps[1:]
    return MalformedMessage(str(error), param=".".join(steps) or whole)


def _number(text: str) -> object:
    """The integer that ``text`` is; another text is left for the validation to refuse."""
    return int(text) if _INTEGER.fullmatch(text) else text


def _from_json(name: str, value: Any) -> Any:
    if name in _HEX_FIELDS and isinstance(value, str):
        try:
            return bytes.fromhex(value) if value.isascii() and " " not in value else value
        except ValueError:
            raise InvalidRequest(f"{name} is no hex", name) from None
    return _tuples(value)


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return value


def _validated(kind: type[MessageT], fields: Mapping[str, Any]) -> MessageT:
    try:
        return kind.model_validate(fields)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_context=False, include_input=False)[0]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]).lstrip(".")
    raise InvalidRequest(f"{_echoed(param)}: {first['msg']}", _echoed(param))


def _echoed(name: str) -> str:
    return name[:_ECHOED_CHARS].encode("unicode_escape").decode("ascii")
