"""One picture of ``GET /events``, read and checked: as much of it as the terminal UI shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tessella_p2p.base.errors import MalformedMessage
from tessella_p2p.base.limits import (
    MAX_PICTURED_ENDED,
    MAX_PICTURED_FLIGHTS,
    MAX_PICTURED_RECIPES,
    MAX_PICTURED_STAGES,
    PICTURED_RATE_S,
)

_MAX_LAYERS = 100_000
_MAX_HOPS = 4096

Layer = Annotated[int, Field(ge=0, le=_MAX_LAYERS)]
Layers = tuple[Layer, Layer]
PeerName = Annotated[str, Field(max_length=128)]
Amount = Annotated[float, Field(allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Readiness(_Part):
    """Whether the model answers; see `entry.readiness.ModelReadiness`."""

    state: str
    proven_ago_s: Amount | None = None
    missing: Annotated[tuple[Layers, ...], Field(max_length=_MAX_LAYERS)] = ()


class Model(_Part):
    """The node's model."""

    id: str | None
    total_layers: Layer
    readiness: Readiness


class Segment(_Part):
    """How many replicas hold a stretch of layers."""

    layers: Layers
    replicas: Annotated[int, Field(ge=0)]


class Coverage(_Part):
    """Who holds what in one recipe."""

    recipe: str
    holes: Annotated[tuple[Layers, ...], Field(max_length=_MAX_LAYERS)]
    segments: Annotated[tuple[Segment, ...], Field(max_length=_MAX_LAYERS)]


class Stage(_Part):
    """One stage of the mesh."""

    peer_id: PeerName
    layers: Layers
    status: str
    queue_depth: int
    canary: bool = False
    own: bool = False


class Hop(_Part):
    """One hop of a route."""

    peer_id: PeerName
    layers: Layers
    hop_ms: Amount


class Flight(_Part):
    """A request under way, or one that ended lately."""

    state: str
    tokens: int
    tokens_per_s: Amount | None
    reroutes: int
    end: str | None
    route: Annotated[tuple[Hop, ...], Field(max_length=_MAX_HOPS)]


class Rates(_Part):
    """Tokens a second: now, and in the last seconds, the newest last."""

    now: Amount
    history: Annotated[tuple[Amount, ...], Field(max_length=2 * PICTURED_RATE_S)]


class Balance(_Part):
    """Credits, and the tier that they give."""

    credits: Amount
    tier: str


class Picture(_Part):
    """The mesh at one moment."""

    model: Model
    coverage: Annotated[tuple[Coverage, ...], Field(max_length=MAX_PICTURED_RECIPES)]
    stages: Annotated[tuple[Stage, ...], Field(max_length=MAX_PICTURED_STAGES)]
    num_stages: int
    tokens_per_s: Rates
    credits: Balance | None
    flights: Annotated[tuple[Flight, ...], Field(max_length=MAX_PICTURED_FLIGHTS)]
    num_flights: int
    ended: Annotated[tuple[Flight, ...], Field(max_length=MAX_PICTURED_ENDED)]


def read_picture(event: Mapping[str, Any]) -> Picture:
    """An event of ``GET /events``.

    Raises:
        MalformedMessage: it is no picture.
    """
    try:
        return Picture.model_validate(event)
    except ValidationError as error:
        where = ".".join(str(step) for step in error.errors(include_url=False, include_input=False)[0]["loc"])
        raise MalformedMessage(
            f"the node's picture of its mesh cannot be read ({where}): is it of this version?"
        ) from None
