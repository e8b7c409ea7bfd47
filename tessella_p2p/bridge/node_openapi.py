"""The node's HTTP surface as an OpenAPI 3.1 document; pure. The types that read requests and make answers are the source of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import BaseModel, TypeAdapter

from tessella_p2p.base.limits import MAX_CONTENT_PARTS, MAX_LOGIT_BIASES, MAX_STOP_CHARS, MAX_STOP_STRINGS
from tessella_p2p.bridge import answers
from tessella_p2p.bridge import node_schemas as s
from tessella_p2p.bridge.authorising import HEALTH_PATH
from tessella_p2p.bridge.completions import TextCompletion
from tessella_p2p.bridge.embeddings import EmbeddingList
from tessella_p2p.bridge.generate import Generated, GeneratedChunk
from tessella_p2p.bridge.infill_answer import InfillAnswer, InfillChunk
from tessella_p2p.bridge.moved import MOVED
from tessella_p2p.bridge.openai_models.chat import ChatRequest
from tessella_p2p.bridge.openai_models.completions import CompletionRequest
from tessella_p2p.bridge.openai_models.embeddings import EmbeddingsBody
from tessella_p2p.bridge.openai_models.fim import FimBody
from tessella_p2p.bridge.openai_models.generate import GenerateBody
from tessella_p2p.bridge.openai_models.infill import InfillBody

Json = dict[str, Any]
OPENAPI_PATH: Final = "/openapi.json"
DOCS_PATH: Final = "/docs"
_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_TEXT: Final = "text/plain"
_HTML: Final = "text/html"
_REFERENCE: Final = "#/components/schemas/"
_ERROR: Final = "ErrorAnswer"
_ABOUT: Final = (
    "What a node answers to clients: OpenAI's routes for text and vectors, those that editors ask of a llama.cpp server, and what it "
    "tells of itself. A field that is not described is refused, but for those of OpenAI's that change nothing."
)
_STATUSES: Final = {
    400: "a field is not accepted; `param` names it",
    401: "no API key that is good here, where the node asks for one",
    403: "the orchestrator or a stage does not allow it, or a web page asked that may not",
    404: "a model or a path that is not served here",
    408: "the body did not come in time",
    409: "the session was overtaken; try again",
    410: "this route is a libp2p protocol, which `protocol` names",
    413: "the body, or the prompt's hidden states, are too large",
    421: "sent to another name than this server's",
    429: "a limit of the API key; try again after `retry-after` seconds",
    500: "the node failed; its log says why",
    502: "a peer broke off, or broke a rule",
    503: "layers are missing (`missing_layers`), or the node is at a limit: try again after `retry-after` seconds",
    504: "a peer took too long",
}
_ALWAYS: Final = (401, 403, 408, 413, 421, 429, 500, 503)
_WITH_BODY: Final = (400, 404, 409, 502, 504)


@dataclass(frozen=True, slots=True)
class Operation:
    """One route as clients see it.

    Attributes:
        tag: the heading that it stands under.
        body: what reads a request; None for a route without a body.
        answer: what makes an answer; or its schema, where there is no such type.
        chunk: what makes an event of a stream, where the route can stream.
        media_type: of the answer.
        partial: whether a request may ask for some of the answer's fields alone.
        codes: statuses beside those that every route may have.
        query: parameters, and what they do.
    """

    method: Literal["GET", "POST"]
    path: str
    tag: Literal["openai", "text", "node"]
    summary: str
    body: type[BaseModel] | None = None
    answer: type | Json = field(default_factory=lambda: s.TEXT)
    chunk: type | None = None
    media_type: str = _JSON
    partial: bool = False
    codes: tuple[int, ...] = ()
    query: Mapping[str, str] = field(default_factory=dict)


OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        tag="openai",
        summary="An answer to a conversation.",
        body=ChatRequest,
        answer=answers.ChatCompletion,
        chunk=answers.ChatChunk,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        tag="openai",
        summary="What follows a prompt as it stands, or several.",
        body=CompletionRequest,
        answer=TextCompletion,
        chunk=TextCompletion,
    ),
    Operation("POST", "/v1/embeddings", "openai", "Vectors of texts.", EmbeddingsBody, EmbeddingList),
    Operation("GET", "/v1/models", "openai", "The models that a proven route serves.", answer=s.MODELS),
    Operation("GET", "/v1/models/{model}", "openai", "One of them.", answer=s.MODEL, codes=(404,)),
    Operation(
        method="POST",
        path="/v1/generate",
        tag="text",
        summary="What follows a prompt as it stands, a text or token ids.",
        body=GenerateBody,
        answer=Generated,
        chunk=GeneratedChunk,
    ),
    Operation(
        method="POST",
        path="/v1/fim/completions",
        tag="text",
        summary="What is missing between two texts.",
        body=FimBody,
        answer=TextCompletion,
        chunk=TextCompletion,
    ),
    Operation(
        method="POST",
        path="/infill",
        tag="text",
        summary="What is missing between two texts, in llama.cpp's fields.",
        body=InfillBody,
        answer=InfillAnswer,
        chunk=InfillChunk,
        partial=True,
    ),
    Operation("GET", "/status", "node", "This node.", answer=s.STATUS),
    Operation(
        method="GET",
        path="/peers",
        tag="node",
        summary="The stages that this node knows.",
        answer=s.PEERS,
        query={"model_id": "those of this model alone"},
    ),
    Operation("GET", "/metrics", "node", "Counters, in Prometheus' text format.", media_type=_TEXT),
    Operation("GET", HEALTH_PATH, "node", "That this process answers; it needs no key.", answer=s.HEALTH),
    Operation("GET", "/requests", "node", "The caller's requests, in flight and last.", answer=s.REQUESTS),
    Operation("GET", "/requests/{request_id}", "node", "What became of one.", answer=s.REQUEST, codes=(404,)),
    Operation("GET", "/", "node", "The dashboard.", media_type=_HTML),
    Operation("GET", "/events", "node", "The dashboard's picture of the mesh, once a second.", media_type=_EVENTS),
    Operation("GET", OPENAPI_PATH, "node", "This document.", answer={"type": "object"}),
    Operation("GET", DOCS_PATH, "node", "This document, to be read.", media_type=_HTML),
)


def openapi(version: str) -> Json:
    """The document.

    Args:
        version: of the package.
    """
    schemas = _Schemas()
    paths: Json = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, schemas)
    for path, protocol in MOVED.items():
        paths[path] = {"post": _moved(path, protocol)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tessella-P2P node",
            "version": version,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas.shared, _ERROR: s.ERROR},
            "securitySchemes": {"api_key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"api_key": []}],
    }


class _Schemas:
    """Schemas of all types that the operations name, made together, so that types of one name are told apart."""

    def __init__(self) -> None:
        adapters: dict[type, TypeAdapter[Any]] = {
            kind: TypeAdapter(kind)
            for each in OPERATIONS
            for kind in (each.body, each.answer, each.chunk)
            if isinstance(kind, type)
        }
        bodies = {each.body for each in OPERATIONS}
        found, shared = TypeAdapter.json_schemas(
            [
                (kind, "validation" if kind in bodies else "serialization", adapter)
                for kind, adapter in adapters.items()
            ],
            ref_template=_REFERENCE + "{model}",
        )
        self._found = {kind: schema for (kind, _), schema in found.items()}
        self.shared: Json = {name: _as_read(schema) for name, schema in sorted(shared["$defs"].items())}

    def of(self, kind: type) -> Json:
        """A schema, or the reference to one."""
        return self._found[kind]

    def taken_out(self, kind: type) -> Json:
        """The schema itself of a type that nothing else refers to."""
        schema = self.of(kind)
        return self.shared.pop(schema["$ref"].removeprefix(_REFERENCE)) if "$ref" in schema else _as_read(schema)


def _as_read(schema: Json) -> Json:
    """``schema`` of a request with what its reading takes beyond the type: null for any list, and the other forms of some fields."""
    described = {"description": _ticks(schema["description"])} if "description" in schema else {}
    if schema.get("additionalProperties") is not False:  # an answer's: requests alone refuse unknown fields
        return {**schema, **described}
    required = schema.get("required", ())
    properties = {name: _field_as_read(name, each, name in required) for name, each in schema["properties"].items()}
    return {**schema, **described, "properties": properties}


def _field_as_read(name: str, schema: Json, required: bool) -> Json:
    if name in _FORMS:
        return _FORMS[name](schema)
    if schema.get("type") == "array" and not required and "default" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    return schema


def _stops(_: Json) -> Json:
    text = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    return {"anyOf": [text, {"type": "array", "items": text, "maxItems": MAX_STOP_STRINGS}, {"type": "null"}]}


def _biases(_: Json) -> Json:
    biases = {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,5})$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_LOGIT_BIASES,
    }
    return {"anyOf": [biases, {"type": "null"}]}


def _content(schema: Json) -> Json:
    return {"anyOf": [{"type": "string"}, {**schema, "maxItems": MAX_CONTENT_PARTS}, {"type": "null"}]}


def _prompts(schema: Json) -> Json:
    if schema.get("type") == "string" or "anyOf" in schema:
        return schema  # one text
    text, ids = {"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    several = [{"type": "array", "items": each, "minItems": 1} for each in (text, ids)]
    return {"anyOf": [text, ids, *several]}


def _tool_choice(schema: Json) -> Json:
    return {"anyOf": [{"enum": ["none", "auto", "required"]}, *schema["anyOf"]]}


_FORMS: Final = {
    "tool_choice": _tool_choice,
    "prompt": _prompts,
    "stop": _stops,
    "logit_bias": _biases,
    "content": _content,
}
"""By the field's name, what a validator makes one form of."""


def _operation(each: Operation, schemas: _Schemas) -> Json:
    answered: Json = {each.media_type: {"schema": _answer(each, schemas)}}
    said = "the answer"
    if each.chunk is not None:
        answered[_EVENTS] = {"schema": _event(schemas.of(each.chunk)["$ref"].rpartition("/")[2])}
        said = "the answer; with `stream` server-sent events"
    codes = (*_ALWAYS, *each.codes, *(_WITH_BODY if each.body is not None else ()))
    operation: Json = {
        "operationId": _operation_id(each.method, each.path),
        "tags": [each.tag],
        "summary": each.summary,
        "responses": {"200": {"description": said, "content": answered}, **_errors(codes)},
    }
    if each.body is not None:
        schema = schemas.taken_out(each.body)
        said = schema.get("description", "")
        operation["requestBody"] = {"required": True, "description": said, "content": {_JSON: {"schema": schema}}}
    parameters = [
        *_path_parameters(each.path),
        *(
            {"name": name, "in": "query", "required": False, "description": does, "schema": s.TEXT}
            for name, does in each.query.items()
        ),
    ]
    if parameters:
        operation["parameters"] = parameters
    return operation


def _event(chunk: str) -> Json:
    """One server-sent event. Its data is described in words: the last one, ``[DONE]``, is no JSON."""
    data = {
        **s.TEXT,
        "description": f"a `{chunk}` as JSON, or an `{_ERROR}`; behind the last of OpenAI's shapes `[DONE]`",
    }
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _answer(each: Operation, schemas: _Schemas) -> Json:
    if not isinstance(each.answer, type):
        return each.answer
    if each.partial:
        return {name: value for name, value in schemas.taken_out(each.answer).items() if name != "required"}
    return schemas.of(each.answer)


def _moved(path: str, protocol: str) -> Json:
    operation: Json = {
        "operationId": _operation_id("POST", path),
        "tags": ["moved"],
        "summary": f"Not over HTTP: peers speak `{protocol}` over libp2p.",
        "responses": _errors((410, *_ALWAYS)),
    }
    if parameters := _path_parameters(path):
        operation["parameters"] = parameters
    return operation


def _path_parameters(path: str) -> list[Json]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _errors(codes: Iterable[int]) -> Json:
    content = {_JSON: {"schema": {"$ref": _REFERENCE + _ERROR}}}
    return {str(code): {"description": _STATUSES[code], "content": content} for code in sorted(set(codes))}


def _operation_id(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", path)])


def _ticks(text: str) -> str:
    """The marks of our docstrings as Markdown's."""
    return text.replace("``", "`")
