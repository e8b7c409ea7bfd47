"""OpenAI's own description of its answers, as JSON schemas that say no more than it: strict, so that nothing of ours hides in them.

The types of the ``openai`` package are generated from OpenAI's OpenAPI document. Pydantic makes schemas of them; an object of theirs
takes no other fields than the described ones here. Two things differ from the generated types, because OpenAI's service itself differs:

- ``finish_reason`` of a streamed ``text_completion`` is null until the last chunk (the type knows only the last one's words);
- an ``embedding`` is a text where ``encoding_format`` asked for base64 (the SDK decodes it before the type sees it).
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter

Json = dict[str, Any]
OURS = frozenset({"tessella"})
"""What this node adds to an answer of OpenAI's, at its top, and to each of several choices, where it is asked for."""
OUR_MODEL_FIELDS = frozenset({"context_length", "embedding_length", "features"})
"""… and to a model."""
OUR_ERROR_FIELDS = frozenset({"missing_layers", "peer_id", "protocol", "request_id"})
"""… and to an error."""


def check_chat_completion(value: Json) -> None:
    """A whole chat answer. This and each further function raises `jsonschema.ValidationError`."""
    _validator(ChatCompletion).validate(_without(value, OURS))


def check_chat_chunk(value: Json) -> None:
    """One event of a chat stream."""
    _validator(ChatCompletionChunk).validate(_without(value, OURS))


def check_completion(value: Json) -> None:
    """A whole ``text_completion``."""
    _validator(Completion).validate(_without(value, OURS))


def check_completion_chunk(value: Json) -> None:
    """One event of a streamed ``text_completion``."""
    _validator(Completion, _with_open_reason).validate(_without(value, OURS))


def check_embeddings(value: Json) -> None:
    """Vectors of floats."""
    _validator(CreateEmbeddingResponse).validate(_without(value, OURS))


def check_base64_embeddings(value: Json) -> None:
    """Vectors as base64 of little-endian f32, whole numbers of them."""
    _validator(CreateEmbeddingResponse, _with_base64).validate(_without(value, OURS))
    for each in value["data"]:
        assert len(base64.b64decode(each["embedding"], validate=True)) % 4 == 0


def check_model(value: Json) -> None:
    """One model."""
    _validator(Model).validate(_without(value, OUR_MODEL_FIELDS))


def check_models(value: Json) -> None:
    """The list of models; the SDK has no type of its own for the list."""
    assert set(value) == {"object", "data"}
    assert value["object"] == "list"
    for each in value["data"]:
        check_model(each)


def check_error(value: Json) -> None:
    """An error, as a whole answer or as an event of a stream."""
    assert set(value) == {"error"}
    _validator(ErrorObject).validate(_without(value["error"], OUR_ERROR_FIELDS))


def _without(value: Json, ours: frozenset[str]) -> Json:
    kept = {name: field for name, field in value.items() if name not in ours}
    if "choices" in kept:
        kept["choices"] = [_without(choice, ours) for choice in kept["choices"]]
    return kept


def _with_open_reason(schema: Json) -> None:
    reason = schema["$defs"]["CompletionChoice"]["properties"]["finish_reason"]
    schema["$defs"]["CompletionChoice"]["properties"]["finish_reason"] = {"anyOf": [reason, {"type": "null"}]}


def _with_base64(schema: Json) -> None:
    schema["$defs"]["Embedding"]["properties"]["embedding"] = {"type": "string", "minLength": 1}


@cache
def _validator(kind: type, change: Callable[[Json], None] | None = None) -> Draft202012Validator:
    schema = TypeAdapter(kind).json_schema(mode="validation")
    for each in (schema, *schema.get("$defs", {}).values()):
        if "properties" in each:
            each["additionalProperties"] = False
    if change is not None:
        change(schema)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)
