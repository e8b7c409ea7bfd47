"""JSON schemas of what a node tells of itself, for its OpenAPI document; pure. `node_view` and `app` make what they describe."""

from __future__ import annotations

from typing import Any, Final, get_args

from tessella_p2p.bridge.node_view import PeerStatus

Json = dict[str, Any]


def fields(description: str, /, **properties: Json) -> Json:
    """An object that has each of ``properties``, and may get more in a later version."""
    return {"type": "object", "description": description, "properties": properties, "required": sorted(properties)}


def listed(items: Json) -> Json:
    """A list of ``items``."""
    return {"type": "array", "items": items}


def maybe(schema: Json, description: str) -> Json:
    """``schema`` or null; ``description`` says when it is null."""
    return {"anyOf": [schema, {"type": "null"}], "description": description}


TEXT: Final[Json] = {"type": "string"}
COUNT: Final[Json] = {"type": "integer", "minimum": 0}
NUMBER: Final[Json] = {"type": "number"}
FLAG: Final[Json] = {"type": "boolean"}
LAYERS: Final[Json] = {**listed(COUNT), "minItems": 2, "maxItems": 2, "description": "half-open: [start, end]"}
_COUNTS: Final[Json] = {"type": "object", "additionalProperties": COUNT}
_DEVICE: Final = fields(
    "What computes; `oom_streak` counts the engine's failures within the window.",
    kind=TEXT,
    healthy=FLAG,
    oom_streak=COUNT,
    memory_used_mb=maybe(COUNT, "null where it is not known"),
    memory_total_mb=maybe(COUNT, "null where it is not known"),
)
_ASSIGNMENT: Final = fields(
    "What the orchestrator granted.",
    model_repo=TEXT,
    layer_ranges=listed(LAYERS),
    serial=COUNT,
    expires_at_ms=COUNT,
)
_KV: Final = fields(
    "The stage's KV in pages, and what its prefix cache did.",
    page_positions=COUNT,
    page_bytes=COUNT,
    pages_total=COUNT,
    pages_used=COUNT,
    pages_cached=COUNT,
    prefix_positions_hit=COUNT,
    sessions_evicted=COUNT,
)
_STAGE: Final = fields(
    "The stage that this node serves; `waiting` counts steps by tier.",
    state=TEXT,
    sessions=COUNT,
    waiting=_COUNTS,
    crashes=COUNT,
    recent_failures=COUNT,
    memory_bytes=COUNT,
    kv=_KV,
)
STATUS: Final = fields(
    "One moment of this node.",
    version=TEXT,
    peer_id=TEXT,
    state=TEXT,
    model=maybe(TEXT, "the configured model"),
    models=listed(TEXT),
    readiness=maybe(
        fields(
            "Whether the configured model is answered for.",
            state=TEXT,
            proven_secs_ago=maybe(NUMBER, "null where no route was ever proven"),
            missing_layers=listed(LAYERS),
        ),
        "null without a model",
    ),
    layer_ranges=listed(LAYERS),
    assignment=maybe(_ASSIGNMENT, "null before there is one"),
    recipe=maybe(TEXT, "null without a stage"),
    conversions={"type": "object", "additionalProperties": TEXT},
    hidden_size=maybe(COUNT, "null without a stage"),
    queue_depth=COUNT,
    max_input_tokens=maybe(COUNT, "null where nothing bounds it"),
    max_input_tokens_source={"enum": ["declared", "measured"]},
    hop_timeout_secs=NUMBER,
    max_concurrent_hop_bodies=COUNT,
    hop_bodies_in_flight=COUNT,
    max_hop_body_bytes=COUNT,
    peer_failures=_COUNTS,
    device=_DEVICE,
    gpu=_DEVICE,
    orchestrator=fields(
        "The pinned orchestrator, and for how long it has not answered.",
        peer_id=maybe(TEXT, "null where none is pinned"),
        reachable=FLAG,
        outage_secs=COUNT,
        tickets_held=COUNT,
    ),
    credits=maybe(
        fields("The balance.", credits=NUMBER, micro_credits={"type": "integer"}, tier=TEXT), "null before it was told"
    ),
    proofs=fields(
        "The proofs of this node, by what became of them.",
        open=COUNT,
        pending=COUNT,
        settled=COUNT,
        held=COUNT,
        refused=COUNT,
    ),
    addresses=listed(TEXT),
    stage=maybe(_STAGE, "null without one"),
    event_loop=fields("Stalls of the event loop since the start.", stalls=COUNT, longest_ms=NUMBER, total_ms=NUMBER),
)
PEERS: Final = listed(
    fields(
        "One peer of a model.",
        peer_id=TEXT,
        model_id=TEXT,
        layer_ranges=listed(LAYERS),
        status={"enum": list(get_args(PeerStatus))},
        queue_depth=COUNT,
        canary=FLAG,
        recipe=TEXT,
        addresses=listed(TEXT),
        http_api_url=maybe(TEXT, "null where it is not known"),
    )
)
MODEL: Final = fields(
    "A model, as OpenAI describes one, and what it can be asked for.",
    id=TEXT,
    object={"const": "model"},
    created=COUNT,
    owned_by=TEXT,
    context_length=COUNT,
    embedding_length=COUNT,
    features=fields("What it can do beyond text.", fill_in_the_middle=FLAG, tools=FLAG),
)
MODELS: Final = fields("The models.", object={"const": "list"}, data=listed(MODEL))
_HOP: Final = fields(
    "One stage of a route; `cached` is in positions.",
    peer_id=TEXT,
    layers=LAYERS,
    hop_ms=NUMBER,
    compute_ms=NUMBER,
    cached=maybe(COUNT, "null before the first token"),
)
_FAULT: Final = fields(
    "What went wrong.",
    code=TEXT,
    peer_id=maybe(TEXT, "null where no peer is at fault"),
    missing_layers=listed(LAYERS),
)
_EPOCH: Final = fields(
    "One route of a request; times are milliseconds from the request's beginning.",
    epoch=COUNT,
    opened_ms=NUMBER,
    ended_ms=maybe(NUMBER, "null while it is in use"),
    num_tokens=COUNT,
    fault=maybe(_FAULT, "null where nothing ended it early"),
    route=listed(_HOP),
)
_LATER: Final = maybe(NUMBER, "milliseconds from the beginning; null where it has not come so far")
REQUEST: Final = fields(
    "What became of a request; never what was asked or answered.",
    request_id=TEXT,
    object={"const": "tessella.request"},
    kind=TEXT,
    model=TEXT,
    trace_id=maybe(TEXT, "null where the client told none"),
    began_at_ms=COUNT,
    tokenised_ms=_LATER,
    proven_ms=_LATER,
    granted_ms=_LATER,
    placed_ms=_LATER,
    first_token_ms=_LATER,
    last_token_ms=_LATER,
    ended_ms=_LATER,
    prompt_tokens=maybe(COUNT, "null before it is known"),
    max_tokens=maybe(COUNT, "null before it is known"),
    num_tokens=COUNT,
    tier=maybe(TEXT, "null before the grant"),
    paid=maybe(FLAG, "null before the grant"),
    end=maybe(TEXT, "`stop`, `length`, `cancelled` or an error's code; null in flight"),
    fault=maybe(_FAULT, "null where nothing went wrong"),
    epochs=listed(_EPOCH),
)
HEALTH: Final = fields("The process answers; of the mesh this says nothing.", status={"const": "ok"})
REQUESTS: Final = fields("Requests of this caller.", in_flight=listed(REQUEST), recent=listed(REQUEST))
ERROR: Final = fields(
    "Any answer with a status of 400 and above.",
    error=fields(
        "`code` is for programs, `message` for people, `param` the field at fault where there is one.",
        message=TEXT,
        type=TEXT,
        param=maybe(TEXT, "null where no field is at fault"),
        code=TEXT,
    ),
)
