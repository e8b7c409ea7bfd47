"""Body of ``POST /v1/generate``; pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import MAX_POSITIONS
from tessella_p2p.bridge.openai_models.fields import ModelName, ScoredSampled, listed
from tessella_p2p.bridge.openai_models.reading import json_object, supported, validated


class GenerateBody(ScoredSampled):
    """Body of ``POST /v1/generate``: a prompt as it stands, without a chat template."""

    model: ModelName | None = None
    prompt: str | None = None
    prompt_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=2**31)], ...],
        FailFast(),
        Field(strict=False, max_length=MAX_POSITIONS),
        listed("a list of token ids"),
    ] = ()


def generate_body(body: bytes) -> GenerateBody:
    """Read a request for ``/v1/generate``.

    Raises:
        InvalidRequest: with the field at fault as ``param``.
    """
    fields = json_object(body)
    request = validated(GenerateBody, supported(fields, GenerateBody, {}, frozenset()))
    if (request.prompt is None) == (not request.prompt_ids):
        raise InvalidRequest("give exactly one of prompt (text) and prompt_ids (token ids)", "prompt")
    request.check()
    return request
