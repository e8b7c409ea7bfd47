"""Body of ``POST /v1/embeddings``; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, WithJsonSchema

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import MAX_EMBEDDING_INPUTS, MAX_POSITIONS, MAX_VOCABULARY
from tessella_p2p.bridge.openai_models.fields import Body, Count, ModelName
from tessella_p2p.bridge.openai_models.reading import json_object, supported, validated

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_VOCABULARY - 1}, "minItems": 1}
_INPUT_SCHEMA = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_EMBEDDING_INPUTS},
        {**_IDS, "maxItems": MAX_POSITIONS},
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_EMBEDDING_INPUTS},
    ]
}


def _inputs(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """The four forms as one: what each vector is of. Raises `InvalidRequest`, which names the element at fault."""
    if isinstance(value, str):
        return (_text(value, "input"),)
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input: must be a text, a list of texts, a list of token ids, or a list of those", "input")
    if isinstance(value[0], int):
        return (_token_ids(value, "input"),)
    if len(value) > MAX_EMBEDDING_INPUTS:
        raise InvalidRequest(f"input: at most {MAX_EMBEDDING_INPUTS} inputs are taken at once", "input")
    read = _text if isinstance(value[0], str) else _token_ids
    return tuple(read(each, f"input[{index}]") for index, each in enumerate(value))


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{where}: must be a text that is not empty", where)
    return value


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{where}: must be a list of token ids that is not empty", where)
    _check_ids(value, where)
    return tuple(value)


def _check_ids(values: Sequence[Any], where: str) -> None:
    if len(values) > MAX_POSITIONS:
        raise InvalidRequest(f"{where}: at most {MAX_POSITIONS} token ids are taken", where)
    for index, each in enumerate(values):
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < MAX_VOCABULARY:
            param = f"{where}[{index}]"
            raise InvalidRequest(f"{param}: must be a token id, from 0 to {MAX_VOCABULARY - 1}", param)


class EmbeddingsBody(Body):
    """Inputs, each a text as it stands or token ids. ``dimensions`` may only be the model's own number."""

    model: ModelName
    input: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_inputs), WithJsonSchema(_INPUT_SCHEMA)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None


def embeddings_body(body: bytes) -> EmbeddingsBody:
    """Read a request for vectors.

    Raises:
        InvalidRequest: with the field at fault as ``param``.
    """
    return validated(EmbeddingsBody, supported(json_object(body), EmbeddingsBody, {}, _WITHOUT_EFFECT))


_WITHOUT_EFFECT = frozenset({"user"})
