"""``GET /requests`` and ``GET /requests/{request_id}``: what became of a request. Nobody sees the requests of another API key."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tessella_p2p.base.errors import UnknownRequest
from tessella_p2p.base.limits import MAX_LISTED_REQUESTS
from tessella_p2p.bridge.answers import hop_of
from tessella_p2p.bridge.callers import caller_of
from tessella_p2p.bridge.responses import json_response
from tessella_p2p.entry.api import Entry
from tessella_p2p.entry.requests import EpochRecord, Fault, RequestRecord


def request_routes(entry: Entry) -> list[Route]:
    """Both routes, over the book of ``entry``."""
    view = _RequestView(entry)
    return [Route("/requests", view.listed), Route("/requests/{request_id}", view.one)]


class _RequestView:
    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    async def listed(self, request: Request) -> Response:
        """Those in flight, oldest first, and the last ones, newest first."""
        name, book = _caller(request), self._entry.requests
        return json_response(
            {
                "in_flight": [request_json(record) for record in book.in_flight() if record.caller == name],
                "recent": [request_json(record) for record in book.recent(MAX_LISTED_REQUESTS, name)],
            }
        )

    async def one(self, request: Request) -> Response:
        """One of them."""
        request_id: str = request.path_params["request_id"]
        record = self._entry.requests.find(request_id)
        if record is None or record.caller != _caller(request):
            raise UnknownRequest(
                "no request of this caller has this id here; a node remembers its last ones, and forgets them at a restart"
            )
        return json_response(request_json(record))


def _caller(request: Request) -> str:
    caller = caller_of(request.scope)
    return caller.name


def request_json(record: RequestRecord) -> dict[str, Any]:
    """A request, as it is told. Times count from ``began_at_ms``; null where it has not come so far."""
    return {
        "request_id": record.request_id,
        "object": "tessella.request",
        "kind": record.kind,
        "model": record.model,
        "trace_id": record.trace_id,
        "began_at_ms": record.began_at_ms,
        "tokenised_ms": record.tokenised_ms,
        "proven_ms": record.proven_ms,
        "granted_ms": record.granted_ms,
        "placed_ms": record.placed_ms,
        "first_token_ms": record.first_token_ms,
        "last_token_ms": record.last_token_ms,
        "ended_ms": record.ended_ms,
        "prompt_tokens": record.prompt_tokens,
        "max_tokens": record.max_tokens,
        "num_tokens": record.num_tokens,
        "tier": record.tier,
        "paid": record.paid,
        "end": record.end,
        "fault": _fault_json(record.fault),
        "epochs": [_epoch_json(epoch) for epoch in record.epochs],
    }


def _epoch_json(epoch: EpochRecord) -> dict[str, Any]:
    return {
        "epoch": epoch.epoch,
        "opened_ms": epoch.opened_ms,
        "ended_ms": epoch.ended_ms,
        "num_tokens": epoch.num_tokens,
        "fault": _fault_json(epoch.fault),
        "route": [hop_of(hop) for hop in epoch.route],
    }


def _fault_json(fault: Fault | None) -> dict[str, Any] | None:
    if fault is None:
        return None
    return {"code": fault.code, "peer_id": fault.peer, "missing_layers": [list(layers) for layers in fault.missing]}
