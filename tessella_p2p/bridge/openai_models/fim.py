"""Body of ``POST /v1/fim/completions``; pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tessella_p2p.base.limits import MAX_LEGACY_LOGPROBS
from tessella_p2p.bridge.openai_models.fields import ModelName, StreamedSampled
from tessella_p2p.bridge.openai_models.reading import json_object, supported, validated


class FimBody(StreamedSampled):
    """The texts before and behind a gap. Both are text: the name of a control token in them stays a name."""

    model: ModelName | None = None
    prefix: str
    suffix: str
    logprobs: Annotated[int, Field(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None

    def alternatives(self) -> int | None:
        """See `Sampled.alternatives`."""
        return self.logprobs


_WITHOUT_EFFECT = frozenset({"metadata", "user"})


def fim_body(body: bytes) -> FimBody:
    """Read a request to fill a gap.

    Raises:
        InvalidRequest: with the field at fault as ``param``.
    """
    request = validated(FimBody, supported(json_object(body), FimBody, {}, _WITHOUT_EFFECT))
    request.check()
    return request
