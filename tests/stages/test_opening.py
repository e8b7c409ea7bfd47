"""A chain-open is believed when everything in it fits; each of its hostile twins is refused, and says why."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import (
    CapabilityRefused,
    Expired,
    InvalidRequest,
    InvalidSignature,
    MalformedMessage,
    NotAuthorized,
    RemoteProtocolError,
    StaleEpoch,
    TessellaError,
)
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import MAX_EPOCHS, MAX_MODEL_LAYERS, MAX_ROUTE_BYTES, MAX_STAGES
from tessella_p2p.stages.opening import EpochFence, open_hash, verify_capability, verify_open
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import seal
from tessella_p2p.wire.keys import NodeKey
from tests.stages.openings import (
    ENTRY,
    NOW,
    ORCHESTRATOR,
    ROUTE,
    STAGES,
    STRANGER,
    capability,
    identity,
    key_of,
    open_body,
    opened,
    route_statement,
    sealed,
    stages_of,
    ticket,
)


def upstream_of(index: int) -> NodeKey:
    return STAGES[index - 1] if index else ENTRY


@pytest.mark.parametrize("index", [0, 1, 2])
def test_each_stage_of_the_route_finds_its_place(index: int) -> None:
    opening = opened(index, ticket=ticket())
    assert (opening.index, opening.entry, opening.upstream) == (index, ENTRY.peer_id, upstream_of(index).peer_id)
    assert opening.downstream == (STAGES[index + 1] if index < 2 else ENTRY).peer_id
    assert opening.is_tail == (index == 2)
    assert (opening.tier, opening.orchestrator, opening.lease) == ("VIP", ORCHESTRATOR.peer_id, b"the lease in force")
    assert opening.opened_at == NOW


def test_without_a_ticket_a_session_is_unpaid_and_of_the_lowest_tier() -> None:
    opening = opened(1)
    assert (opening.tier, opening.ticket, opening.orchestrator) == ("Leech", None, None)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("upstream", [ENTRY, STRANGER, *STAGES], ids=lambda key: key.peer_id[-4:])
def test_only_the_stage_before_may_pass_an_open_on(index: int, upstream: NodeKey) -> None:
    if upstream is upstream_of(index):
        return
    with pytest.raises(NotAuthorized):
        verify_open(sealed().frame(), identity(index), upstream=upstream.peer_id, now_ms=NOW)


def moved(index: int, layers: tuple[int, int]) -> tuple[m.RouteStage, ...]:
    return tuple(s.model_copy(update={"layers": layers}) if i == index else s for i, s in enumerate(ROUTE))


WRONG_ROUTES: dict[str, tuple[m.RouteStage, ...]] = {
    "gap": moved(1, (3, 4)),
    "overlap": moved(1, (1, 4)),
    "too short": ROUTE[:2],
    "too long": (*ROUTE, m.RouteStage(peer_id=STRANGER.peer_id, layers=(6, 7), addresses=())),
    "late start": ROUTE[1:],
    "out of order": (ROUTE[1], ROUTE[0], ROUTE[2]),
    "twice": (ROUTE[0], ROUTE[1], ROUTE[2].model_copy(update={"peer_id": STAGES[0].peer_id})),
    "without this stage": (ROUTE[0].model_copy(update={"peer_id": STRANGER.peer_id}), *ROUTE[1:]),
}


@pytest.mark.parametrize("route", WRONG_ROUTES.values(), ids=WRONG_ROUTES)
def test_a_route_that_is_no_chain_over_every_layer_is_refused(route: tuple[m.RouteStage, ...]) -> None:
    with pytest.raises(InvalidRequest):
        opened(0, route=route)


@pytest.mark.parametrize(
    "served",
    [{"layers": LayerRange(0, 3)}, {"recipe": "int4"}, {"manifest_root": bytes(32)}, {"total_layers": 7}],
    ids=str,
)
def test_an_open_for_something_else_than_this_stage_serves_is_refused(served: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        verify_open(sealed().frame(), identity(0, **served), upstream=ENTRY.peer_id, now_ms=NOW)


def test_a_session_longer_than_the_stage_holds_is_refused() -> None:
    assert opened(0, max_positions=100).body.max_positions == 100
    with pytest.raises(InvalidRequest):
        opened(0, max_positions=101)


@pytest.mark.parametrize(
    ("at", "ttl_ms", "error"),
    [(NOW - 60_001, 60_000, Expired), (NOW + 61_000, 60_000, Expired), (NOW, 60_001, MalformedMessage)],
)
def test_an_open_out_of_its_time_is_refused(at: int, ttl_ms: int, error: type[TessellaError]) -> None:
    with pytest.raises(error):
        opened(0, at=at, ttl_ms=ttl_ms)


def test_an_open_of_another_domain_is_none() -> None:
    frame = m.OpenFrame(open=ticket(), capability=b"x")
    with pytest.raises(InvalidSignature):
        verify_open(frame, identity(0), upstream=ENTRY.peer_id, now_ms=NOW)


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_an_open_with_one_changed_byte_is_refused(at: int, flip: int) -> None:
    honest = sealed(ticket=ticket())
    raw = bytearray(honest.open)
    raw[at % len(raw)] ^= flip
    frame = m.OpenFrame(open=bytes(raw), capability=honest.capability)
    with pytest.raises(RemoteProtocolError):
        verify_open(frame, identity(0), upstream=ENTRY.peer_id, now_ms=NOW)


@given(st.binary(min_size=1, max_size=400), st.binary(min_size=1, max_size=400))
def test_any_bytes_give_a_typed_error(open_bytes: bytes, capability_bytes: bytes) -> None:
    with pytest.raises(TessellaError):
        verify_open(
            m.OpenFrame(open=open_bytes, capability=capability_bytes),
            identity(2),
            upstream=STAGES[1].peer_id,
            now_ms=NOW,
        )
    frame = sealed().frame().model_copy(update={"capability": capability_bytes})
    with pytest.raises(TessellaError):
        verify_open(frame, identity(2), upstream=STAGES[1].peer_id, now_ms=NOW)


WRONG_TICKETS: dict[str, tuple[bytes, type[TessellaError]]] = {
    "of an orchestrator that is not pinned": (ticket(minter=STRANGER), NotAuthorized),
    "minted by the entry itself": (ticket(minter=ENTRY), NotAuthorized),
    "of another requester": (ticket(requester=STRANGER), NotAuthorized),
    "for another request": (ticket(request_id="request-2"), NotAuthorized),
    "for another artifact": (ticket(root=bytes(32)), NotAuthorized),
    "for another recipe": (ticket(recipe="int4"), NotAuthorized),
    "for fewer positions": (ticket(max_positions=49), NotAuthorized),
    "with another tier written over it": (ticket().replace(b"cVIP", b"cVI."), InvalidSignature),
    "too late": (ticket(open_before=NOW), Expired),
    "no ticket": (sealed().open, InvalidSignature),
    "no envelope": (b"ticket", MalformedMessage),
}


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize(("raw", "error"), WRONG_TICKETS.values(), ids=WRONG_TICKETS)
def test_a_ticket_that_does_not_fit_is_refused(index: int, raw: bytes, error: type[TessellaError]) -> None:
    with pytest.raises(error):
        opened(index, ticket=raw)


def test_a_ticket_pays_for_as_many_positions_as_it_says() -> None:
    assert opened(0, ticket=ticket(max_positions=50)).ticket is not None


ELSEWHERE = stages_of((ROUTE[0], ROUTE[1].model_copy(update={"peer_id": STRANGER.peer_id}), ROUTE[2]))
WRONG_ROUTE_STATEMENTS: dict[str, tuple[bytes, type[TessellaError]]] = {
    "signed by a stranger": (route_statement(signer=STRANGER), InvalidSignature),
    "signed by the stage before": (route_statement(signer=STAGES[0]), InvalidSignature),
    "of another request": (route_statement(request_id="request-2"), NotAuthorized),
    "of another session": (route_statement(session=b"t" * 16), NotAuthorized),
    "of another epoch": (route_statement(epoch=1), NotAuthorized),
    "over another stage": (route_statement(stages=ELSEWHERE), NotAuthorized),
    "with other layers": (
        route_statement(stages=stages_of((*moved(0, (0, 1))[:1], *moved(1, (1, 4))[1:]))),
        NotAuthorized,
    ),
    "that ends early": (route_statement(stages=stages_of(ROUTE[:2])), NotAuthorized),
    "of another domain": (ticket(minter=ENTRY), InvalidSignature),
    "that is none": (b"statement", MalformedMessage),
}


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(("raw", "error"), WRONG_ROUTE_STATEMENTS.values(), ids=WRONG_ROUTE_STATEMENTS)
def test_a_route_statement_that_says_something_else_is_refused(
    index: int, raw: bytes, error: type[TessellaError]
) -> None:
    with pytest.raises(error):
        opened(index, ticket=ticket(), route_statement=raw)


def test_a_route_statement_comes_with_a_ticket_and_never_without() -> None:
    fields = dict(open_body(ticket=ticket()))
    for missing in ("ticket", "route_statement"):
        with pytest.raises(ValueError, match="come together"):
            m.ChainOpen(**(fields | {missing: None}))


def test_a_statement_of_the_longest_route_fits_into_its_bound() -> None:
    start = MAX_MODEL_LAYERS - MAX_STAGES
    cuts = [0, *range(start + 1, MAX_MODEL_LAYERS + 1)]
    stages = tuple((key_of(f"peer {at}").peer_id, cut) for at, cut in enumerate(pairwise(cuts)))
    sequence, now_ms = 2**53 - 1, 2**52
    longest = m.RouteStatement(request_id="r" * 64, session=b"s" * 16, epoch=MAX_EPOCHS - 1, stages=stages)
    assert len(stages) == MAX_STAGES
    assert len(seal(ENTRY, m.ROUTE, longest, sequence=sequence, now_ms=now_ms)) <= MAX_ROUTE_BYTES


@pytest.mark.parametrize(
    "stages",
    [
        (),
        ((STAGES[0].peer_id, (1, 2)),),
        ((STAGES[0].peer_id, (0, 2)), (STAGES[1].peer_id, (3, 4))),
        ((STAGES[0].peer_id, (0, 2)), (STAGES[1].peer_id, (1, 4))),
        ((STAGES[0].peer_id, (0, 2)), (STAGES[0].peer_id, (2, 4))),
    ],
    ids=["empty", "late start", "gap", "overlap", "twice"],
)
def test_a_route_statement_is_a_chain_of_different_peers(stages: tuple[tuple[str, tuple[int, int]], ...]) -> None:
    with pytest.raises(ValueError, match=r"stages|layer|twice"):
        m.RouteStatement(request_id="r", session=b"s" * 16, epoch=0, stages=stages)


HONEST = sealed()
OTHER_EPOCH, OTHER_SESSION = sealed(epoch=1), sealed(session=b"t" * 16)
WRONG_CAPABILITIES: dict[str, tuple[bytes, type[TessellaError]]] = {
    "of another epoch": (OTHER_EPOCH.capability, CapabilityRefused),
    "of another session": (OTHER_SESSION.capability, CapabilityRefused),
    "of another open of the same session": (sealed(max_positions=51).capability, CapabilityRefused),
    "that names another tail": (capability(of=HONEST, tail=STAGES[1].peer_id), CapabilityRefused),
    "addressed to another tail": (capability(of=HONEST, audience=STAGES[1]), InvalidSignature),
    "signed by the tail": (capability(of=HONEST, signer=STAGES[2]), InvalidSignature),
    "signed by a stranger": (capability(of=HONEST, signer=STRANGER), InvalidSignature),
    "that is over": (capability(of=HONEST, ttl_ms=0), Expired),
    "that is none": (HONEST.open, InvalidSignature),
}


@pytest.mark.parametrize(("raw", "error"), WRONG_CAPABILITIES.values(), ids=WRONG_CAPABILITIES)
def test_a_tail_refuses_a_capability_that_is_bound_to_something_else(raw: bytes, error: type[TessellaError]) -> None:
    frame = HONEST.frame().model_copy(update={"capability": raw})
    with pytest.raises(error):
        verify_open(frame, identity(2), upstream=STAGES[1].peer_id, now_ms=NOW)
    with pytest.raises(error):
        verify_capability(
            raw,
            entry=ENTRY.peer_id,
            tail=STAGES[2].peer_id,
            session=HONEST.body.session,
            epoch=0,
            opened=open_hash(HONEST.open),
            now_ms=NOW,
        )


def test_a_stage_before_the_tail_passes_a_capability_on_unread() -> None:
    frame = HONEST.frame().model_copy(update={"capability": b"for the tail to judge"})
    opening = verify_open(frame, identity(1), upstream=STAGES[0].peer_id, now_ms=NOW)
    assert opening.capability == b"for the tail to judge"


@given(st.lists(st.tuples(st.sampled_from([b"a" * 16, b"b" * 16]), st.integers(0, 5)), max_size=20))
def test_an_epoch_is_opened_once_and_never_after_a_later_one(opens: list[tuple[bytes, int]]) -> None:
    fence, highest = EpochFence(), dict.fromkeys((b"a" * 16, b"b" * 16), -1)
    for session, epoch in opens:
        opening = opened(0, session=session, epoch=epoch)
        if epoch > highest[session]:
            fence.admit(opening)
            highest[session] = epoch
        else:
            with pytest.raises(StaleEpoch):
                fence.admit(opening)


def test_a_session_belongs_to_the_entry_that_opened_it() -> None:
    fence = EpochFence()
    fence.admit(opened(1))
    stolen = verify_open(
        sealed(open_body(epoch=1), signer=STRANGER).frame(), identity(1), upstream=STAGES[0].peer_id, now_ms=NOW
    )
    with pytest.raises(NotAuthorized):
        fence.admit(stolen)
    fence.admit(opened(1, epoch=1))


def test_a_ticket_pays_for_one_session_over_all_its_epochs() -> None:
    fence = EpochFence()
    fence.admit(opened(0, ticket=ticket()))
    fence.admit(opened(0, ticket=ticket(), epoch=1))
    with pytest.raises(NotAuthorized):
        fence.admit(opened(0, ticket=ticket(), session=b"t" * 16))
    fence.admit(opened(0, session=b"t" * 16))  # unpaid, as often as there is room


def test_the_fence_forgets_the_oldest_session_first() -> None:
    fence = EpochFence()
    for number in range(4097):
        fence.admit(opened(0, session=number.to_bytes(16, "big")))
    with pytest.raises(StaleEpoch):
        fence.admit(opened(0, session=(4096).to_bytes(16, "big")))
    fence.admit(opened(0, session=bytes(16)))


def test_a_ticket_opens_until_its_hour_is_over() -> None:
    assert opened(0, ticket=ticket(open_before=NOW + 1)).ticket is not None
