"""``POST /v1/fim/completions``: what is missing between two texts, answered as a text completion; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tessella_p2p.bridge.choices import Reading
from tessella_p2p.bridge.completions import CompletionDialect, CompletionStyle
from tessella_p2p.bridge.generate import lone_model
from tessella_p2p.bridge.openai_models.fim import fim_body
from tessella_p2p.entry.api import Gap


def read_fim(body: bytes, models: Sequence[str]) -> Reading:
    """Read a request to fill a gap; ``models`` are those that the node knows: a lone one need not be named.

    Raises:
        InvalidRequest: with the field at fault as ``param``.
        NoRoute: no model was named, and none is known.
    """
    asked = fim_body(body)
    model = asked.model if asked.model is not None else lone_model(models)
    request = replace(asked.asked_of(model), gap=Gap(asked.prefix, asked.suffix))
    style = CompletionStyle(usage_chunk=asked.wants_usage_chunk(), extension=bool(asked.tessella))
    return Reading((request,), bool(asked.stream), partial(CompletionDialect, style))
