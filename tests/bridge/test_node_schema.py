"""The node's OpenAPI document tells what there is, and schemathesis, which reads it, gets no answer that it does not promise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from jsonschema import Draft202012Validator
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from starlette.applications import Starlette
from starlette.routing import Route

from tessella_p2p.bridge.node_openapi import openapi
from tessella_p2p.bridge.openai_models.embeddings import EmbeddingsBody
from tests.bridge.bridge_doubles import MODEL, SpeakingEntry, app_for, call, chat_body, events_of, serving
from tests.bridge.served_in_thread import ServerThread

# Schemathesis leaves sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
DOCUMENT = openapi("test")
_SCHEMA = schemathesis.openapi.from_dict(
    {
        **DOCUMENT,
        "paths": {
            path: item
            for path, item in DOCUMENT["paths"].items()
            if path != "/events"  # never ends
        },
    }
)
# Its other phase tries each bound of each field by itself, anew on each route: 1,700 calls. The tests of each route do that by name.
_SCHEMA.config.phases.coverage.enabled = False


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A served node."""
    with ServerThread(lambda: serving(app_for(SpeakingEntry()))) as server:
        yield server.url


@_SCHEMA.parametrize()
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
)
def test_every_answer_is_one_that_the_document_promises(case: schemathesis.Case[Any], url: str) -> None:
    # A schema says neither which models are served nor how fields depend on each other, and not which of OpenAI's fields change
    # nothing: what is refused and what is not is tested by name elsewhere.
    case.call_and_validate(base_url=url, excluded_checks=[positive_data_acceptance, negative_data_rejection])


def _routes() -> set[tuple[str, str]]:
    app: Any = app_for(SpeakingEntry())
    while not isinstance(app, Starlette):
        app = app._app
    return {
        (method, route.path.replace(":path", ""))
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ("POST",)
        if method != "HEAD" and not route.path.startswith("/ui/")
    }


def test_the_document_has_every_route_and_no_other() -> None:
    described = {(method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item}

    assert described == _routes()


def _validator(schema: dict[str, Any]) -> Draft202012Validator:
    """Strict where the document names fields: one that an answer has and the document has not is found."""

    def closed(node: Any) -> Any:
        if isinstance(node, list):
            return [closed(each) for each in node]
        if not isinstance(node, dict):
            return node
        inner = {name: closed(value) for name, value in node.items()}
        return {"additionalProperties": False, **inner} if isinstance(node.get("properties"), dict) else inner

    return Draft202012Validator(
        {**closed(schema), "components": {"schemas": closed(DOCUMENT["components"]["schemas"])}}
    )


def _answer_schema(method: str, path: str) -> dict[str, Any]:
    schema: dict[str, Any] = DOCUMENT["paths"][path][method.lower()]["responses"]["200"]["content"]["application/json"][
        "schema"
    ]
    return schema


GAP = {"input_prefix": "a", "input_suffix": "b"}
GENERATED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", chat_body(), "ChatChunk"),
    ("/v1/chat/completions", chat_body(tessella=True, logprobs=True, top_logprobs=2), "ChatChunk"),
    ("/v1/generate", {"prompt": "hi", "logprobs": True, "tessella": True}, "GeneratedChunk"),
    ("/v1/completions", {"model": MODEL, "prompt": "hi", "n": 2, "logprobs": 1, "tessella": True}, "TextCompletion"),
    ("/v1/fim/completions", {"prefix": "a", "suffix": "b", "tessella": True}, "TextCompletion"),
    ("/infill", GAP, ""),
]


@pytest.mark.parametrize(("path", "body", "chunk"), GENERATED)
async def test_generated_answers_have_the_fields_of_the_document(path: str, body: dict[str, Any], chunk: str) -> None:
    app = app_for(SpeakingEntry())
    whole = await call(app, "POST", path, body)
    streamed = await call(app, "POST", path, {**body, "stream": True})

    _validator(_answer_schema("POST", path)).validate(whole.json())
    if chunk:
        chunks = _validator({"$ref": f"#/components/schemas/{chunk}"})
        for event in events_of(streamed.body):
            if event != "[DONE]":
                chunks.validate(event)


async def test_what_the_node_tells_of_itself_has_the_fields_of_the_document() -> None:
    app = app_for(SpeakingEntry())
    for path in ("/status", "/peers", "/v1/models", "/requests", "/healthz"):
        _validator(_answer_schema("GET", path)).validate((await call(app, "GET", path)).json())
    _validator(_answer_schema("GET", "/v1/models/{model}")).validate(
        (await call(app, "GET", f"/v1/models/{MODEL}")).json()
    )
    vectors = await call(app, "POST", "/v1/embeddings", {"model": MODEL, "input": ["a"]})
    _validator(_answer_schema("POST", "/v1/embeddings")).validate(vectors.json())


async def test_the_document_and_its_page_are_served() -> None:
    app = app_for(SpeakingEntry(), version="test")
    document = await call(app, "GET", "/openapi.json")
    page = await call(app, "GET", "/docs")

    assert document.json() == DOCUMENT
    assert page.headers["content-type"].startswith("text/html")
    assert "style-src 'sha256-" in page.headers["content-security-policy"]
    for path in DOCUMENT["paths"]:
        assert path in page.body.decode()
    assert (EmbeddingsBody.__doc__ or "").split("``")[0].encode() in page.body
