"""Body of ``POST /infill``: what editors send to a llama.cpp server, under its names; pure.

Written against the requests of llama.vim and llama.vscode, and llama.cpp's description of ``/infill`` and ``/completion``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import FailFast, Field

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import (
    MAX_EXTRA_CHUNKS,
    MAX_POSITIONS,
    MAX_RESPONSE_FIELD_CHARS,
    MAX_RESPONSE_FIELDS,
)
from tessella_p2p.bridge.openai_models.fields import Body, ModelName, Sampled, listed
from tessella_p2p.bridge.openai_models.reading import each_supported, json_object, supported, validated
from tessella_p2p.entry.api import Gap, GenerateRequest

_SNIPPET = "\n\n--- snippet ---\n\n"
"""What llama.cpp writes before each extra text for a model that has no token to part files."""
_DAY_MS = 24 * 3600 * 1000

Sampler = Literal[
    "dry", "edkypmxt", "infill", "min_p", "penalties", "temperature", "top_k", "top_n_sigma", "top_p", "typ_p", "xtc"
]


class ExtraChunk(Body):
    """A piece of another file. ``filename`` is for models with repository tokens; what is asked of others does not have it."""

    text: str
    filename: str | None = None


class InfillBody(Sampled):
    """What stands before and behind the gap, and how much may go into it.

    ``prompt`` is the end of what stands before, as in llama.cpp: the line that is being written. Of ``samplers``, which names
    samplers in their order, ``top_k``, ``top_p`` and ``min_p`` count as switches: one that is not named does not work. The order
    is this node's, and samplers that it does not have would do nothing with llama.cpp's own defaults, ``infill`` excepted.
    """

    model: ModelName | None = None
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[
        tuple[ExtraChunk, ...],
        FailFast(),
        Field(strict=False, max_length=MAX_EXTRA_CHUNKS),
        listed("a list of objects with text and filename"),
    ] = ()
    prompt: str | None = None
    n_predict: Annotated[int, Field(ge=-1, le=MAX_POSITIONS)] | None = None
    n_indent: Annotated[int, Field(ge=0, le=MAX_POSITIONS)] | None = None
    t_max_predict_ms: Annotated[int, Field(ge=-1, le=_DAY_MS)] | None = None
    samplers: Annotated[
        tuple[Sampler, ...] | None,
        FailFast(),
        Field(strict=False, max_length=64),
    ] = None
    response_fields: Annotated[
        tuple[Annotated[str, Field(max_length=MAX_RESPONSE_FIELD_CHARS)], ...],
        FailFast(),
        Field(strict=False, max_length=MAX_RESPONSE_FIELDS),
        listed("a list of names of fields"),
    ] = ()

    def gap(self, extra: tuple[ExtraChunk, ...]) -> Gap:
        """The gap, behind those of the ``extra`` texts that there is room for."""
        before = "".join(_SNIPPET + chunk.text for chunk in extra)
        return Gap(before + self.input_prefix + (self.prompt or ""), self.input_suffix)

    def token_limit(self) -> int | None:
        """Tokens that may be generated: 0 for a warm-up, None for what there is room for."""
        limit = self.n_predict if self.n_predict is not None else self.max_tokens
        return None if limit == -1 else limit

    def time_limit_s(self) -> float | None:
        """How long the answer may take from its first token on, once it has a line."""
        return self.t_max_predict_ms / 1000 if self.t_max_predict_ms and self.t_max_predict_ms > 0 else None

    def asked_of(self, model: str) -> GenerateRequest:
        """See `Sampled.asked_of`; without the samplers that ``samplers`` leaves out."""
        request = super().asked_of(model)
        if self.samplers is None:
            return request
        return replace(
            request,
            top_k=request.top_k if "top_k" in self.samplers else 0,
            top_p=request.top_p if "top_p" in self.samplers else 1.0,
            min_p=request.min_p if "min_p" in self.samplers else 0.0,
        )

    def unsigned_seed(self) -> int | None:
        """See `Sampled.unsigned_seed`; −1 is llama.cpp's word for any."""
        return None if self.seed == -1 else super().unsigned_seed()

    def check(self) -> None:
        """See `Sampled.check`."""
        super().check()
        if self.tessella:
            raise InvalidRequest("tessella: this route answers in llama.cpp's fields alone", "tessella")


_WITHOUT_EFFECT = frozenset(
    {
        "cache_prompt",  # whether a prefix is cached is the stages' business
        "id_slot",
        "t_max_prompt_ms",  # llama.cpp has it for later, too
    }
)


def infill_body(body: bytes) -> InfillBody:
    """Read an editor's request.

    Raises:
        InvalidRequest: with the field at fault as ``param``.
    """
    fields = each_supported(json_object(body), "input_extra", MAX_EXTRA_CHUNKS, ExtraChunk, {}, frozenset({"time"}))
    request = validated(InfillBody, supported(fields, InfillBody, {"lora": ([],)}, _WITHOUT_EFFECT))
    request.check()
    return request
