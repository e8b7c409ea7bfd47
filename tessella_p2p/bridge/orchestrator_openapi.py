"""The orchestrator's API as an OpenAPI 3.1 document; pure. `orchestrator_routes` is the source of all of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any, Final

from tessella_p2p.base.limits import MAX_ENVELOPE_BYTES
from tessella_p2p.bridge import orchestrator_json as j
from tessella_p2p.bridge.moved import MOVED
from tessella_p2p.bridge.orchestrator_requests import CBOR, JSON
from tessella_p2p.bridge.orchestrator_routes import (
    DOCS_PATH,
    ENVELOPE_HEADER,
    METRICS_PATH,
    NEXT_HEADER,
    OPENAPI_PATH,
    ROUTES,
    ApiRoute,
)

Json = dict[str, Any]
_STATUS: Final = {
    400: "a field is not accepted; `param` names it",
    401: "the signature does not verify, or the clock is off (the message says by how many seconds); no or a wrong admin token",
    403: "admission, lease or blacklist does not allow it",
    404: "the model is not served here",
    408: "the body did not come in time",
    409: "the claim cannot hold one layer, or another process uses the key",
    410: "this route is a libp2p protocol, which `protocol` names",
    413: "the body is too large",
    503: "at a limit, or the ledger cannot be written: try again after `retry-after` seconds",
}
_PUBLIC_ERRORS: Final = (400, 404, 409, 503)
_SIGNED_ERRORS: Final = (400, 401, 403, 404, 409, 503)
_OPERATOR_ERRORS: Final = (400, 401, 404, 409, 503)
_BODY_ERRORS: Final = (408, 413)
_ABOUT: Final = """The manual's section 07 over HTTP. Public routes are anybody's. A signed route takes a sealed request envelope:
the body of a POST (`application/cbor`), or the header `{header}` (base64url) of a GET. Operator routes take
`authorization: Bearer ADMIN_TOKEN` and JSON. Answers are JSON; digests are hex, envelopes base64url."""


def openapi(version: str) -> Json:
    """The document.

    Args:
        version: of the package.
    """
    schemas: j.Schemas = {}
    paths: Json = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    for path, protocol in MOVED.items():
        paths[path] = {"post": _moved(path, protocol)}
    paths[METRICS_PATH] = {"get": _plain("Counters, in Prometheus' text format.", "text/plain")}
    paths[OPENAPI_PATH] = {"get": _plain("This document.", JSON)}
    paths[DOCS_PATH] = {"get": _plain("This document, to be read.", "text/html")}
    j.schema_of(j.ErrorAnswer, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tessella-P2P orchestrator",
            "version": version,
            "description": " ".join(_ABOUT.format(header=ENVELOPE_HEADER).split()),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": {name: _readable(schemas[name]) for name in sorted(schemas)},
            "securitySchemes": {
                "admin_token": {"type": "http", "scheme": "bearer"},
                "envelope": {"type": "apiKey", "in": "header", "name": ENVELOPE_HEADER},
            },
        },
    }


def _operation(route: ApiRoute, schemas: j.Schemas) -> Json:
    answered: Json = {"description": "the answer", "content": {JSON: {"schema": j.schema_of(route.answer, schemas)}}}
    if route.next_key is not None:
        said = f"where there is another page: what its `after` is (the `{route.next_key}` of this page's last row)"
        answered["headers"] = {NEXT_HEADER: {"description": said, "schema": {"type": "string"}}}
    operation: Json = {
        "operationId": _operation_id(route.method, route.path),
        "tags": [route.access],
        "summary": route.summary,
        "responses": {"200": answered, **_errors(_codes(route))},
    }
    if route.access == "signed":
        said = f"a sealed `{route.request.__name__}`: {_first_line(route.request)}"
        if route.method == "POST":
            schema = {"type": "string", "format": "binary", "maxLength": MAX_ENVELOPE_BYTES}
            operation["requestBody"] = {"required": True, "description": said, "content": {CBOR: {"schema": schema}}}
        else:
            operation["security"] = [{"envelope": []}]
            operation["description"] = f"In the header `{ENVELOPE_HEADER}`: {said}"
        return operation
    if route.access == "operator":
        operation["security"] = [{"admin_token": []}]
    fields = _request_schema(route, schemas)
    if route.method == "POST":
        operation["requestBody"] = {"required": bool(fields["required"]), "content": {JSON: {"schema": fields}}}
        return operation
    parameters = [_parameter(name, schema, fields["required"]) for name, schema in fields["properties"].items()]
    parameters += [
        {"name": name, "in": "query", "required": False, "description": said, "schema": {"type": "boolean"}}
        for name, said in route.also.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    return operation


def _parameter(name: str, schema: Json, required: Iterable[str]) -> Json:
    return {"name": name, "in": "query", "required": name in required, "schema": schema}


def _request_schema(route: ApiRoute, schemas: j.Schemas) -> Json:
    """The fields of the route's message as an object; those that the route fills in are not required."""
    j.schema_of(route.request, schemas)
    whole = schemas.pop(route.request.__name__)
    properties = dict(whole.get("properties", {}))
    if route.method == "GET":
        properties = {name: _without_null(schema) for name, schema in properties.items()}
    required = [
        name for name, given in route.request.model_fields.items() if given.is_required() and name not in route.defaults
    ]
    for name, value in route.defaults.items():
        properties[name] = {**properties[name], "default": value}
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required}


def _without_null(schema: Json) -> Json:
    """A parameter that may be absent is left out; it cannot be null."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    return kinds[0] if len(kinds) == 1 else {name: value for name, value in schema.items() if name != "title"}


def _codes(route: ApiRoute) -> tuple[int, ...]:
    errors = {"public": _PUBLIC_ERRORS, "signed": _SIGNED_ERRORS, "operator": _OPERATOR_ERRORS}[route.access]
    return (*errors, *(_BODY_ERRORS if route.method == "POST" else ()))


def _errors(codes: Iterable[int]) -> Json:
    schema = {"$ref": f"#/components/schemas/{j.ErrorAnswer.__name__}"}
    return {str(code): {"description": _STATUS[code], "content": {JSON: {"schema": schema}}} for code in sorted(codes)}


def _moved(path: str, protocol: str) -> Json:
    operation: Json = {
        "operationId": _operation_id("POST", path),
        "tags": ["moved"],
        "summary": f"Not over HTTP: peers speak `{protocol}` over libp2p.",
        "responses": _errors((410, *_BODY_ERRORS)),
    }
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    return operation


def _plain(summary: str, media_type: str) -> Json:
    schema: Json = {"type": "object"} if media_type == JSON else {"type": "string"}
    answered = {"description": "the answer", "content": {media_type: {"schema": schema}}}
    return {"tags": ["public"], "summary": summary, "responses": {"200": answered}}


def _operation_id(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", path)])


def _first_line(kind: type) -> str:
    return _ticks((inspect.getdoc(kind) or "").partition("\n")[0])


def _readable(schema: Json) -> Json:
    described = schema.get("description")
    return schema if described is None else {**schema, "description": _ticks(described)}


def _ticks(text: str) -> str:
    """The marks of our docstrings as Markdown's."""
    return text.replace("``", "`")
