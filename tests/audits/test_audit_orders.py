"""Who is asked to recompute, and what the order says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulations.liars import TRUTH, claim
from tessella_p2p.audits.orders import (
    Auditor,
    Preference,
    Server,
    auditors_for,
    canaries_for,
    order_for,
    report_within_s,
)
from tessella_p2p.audits.tolerance import MARGIN, NONE_MEASURED, Tolerances
from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import AUDIT_LOAD_S, MAX_CANARIES_NAMED
from tessella_p2p.wire.keys import NodeKey

PEERS = tuple(NodeKey(bytes([index]) * 32).peer_id for index in range(1, 31))
WORKER, UPSTREAM, DOWNSTREAM, REQUESTER, PAYER, *OTHERS = PEERS
ROOT = bytes(32)
CLAIM = replace(
    claim(TRUTH, positions=40),
    worker=WORKER,
    upstream=UPSTREAM,
    downstream=DOWNSTREAM,
    requester=REQUESTER,
    payer=PAYER,
)
NEAR = Tolerances({frozenset({"f32", "torch-f32"}): 7})


def server(peer: PeerId, **changes: object) -> Server:
    fields: dict[str, object] = {
        "peer_id": peer,
        "addresses": ("/ip4/127.0.0.1/tcp/1",),
        "manifest_root": ROOT,
        "recipe": CLAIM.recipe,
        "layers": CLAIM.layers,
    }
    return Server(**{**fields, **changes})  # type: ignore[arg-type] # fields by name


def asked(*servers: Server, tolerances: Tolerances = NONE_MEASURED, seed: int = 1) -> list[PeerId]:
    return [each.server.peer_id for each in auditors_for(CLAIM, servers, tolerances, random.Random(seed))]


def test_replicas_of_the_same_recipe_audit() -> None:
    assert set(asked(*map(server, OTHERS[:3]))) == set(OTHERS[:3])


ELSEWHERE = LayerRange(0, 2)


@pytest.mark.parametrize("has_room", [False, True])
@pytest.mark.parametrize("never", [WORKER, DOWNSTREAM])
def test_the_worker_and_whoever_knows_its_answer_never_audit(never: PeerId, has_room: bool) -> None:
    layers = ELSEWHERE if has_room else CLAIM.layers
    assert asked(server(never, layers=layers, has_room=has_room)) == []


@pytest.mark.parametrize("party", [UPSTREAM, REQUESTER, PAYER])
def test_whoever_else_is_part_of_the_work_is_asked_last(party: PeerId) -> None:
    replica, roomy = server(OTHERS[0]), server(OTHERS[1], layers=ELSEWHERE, has_room=True)
    near = server(OTHERS[2], recipe="torch-f32@cpu-1")
    for layers in (CLAIM.layers, ELSEWHERE):
        last = server(party, layers=layers, has_room=layers == ELSEWHERE)
        for seed in range(5):
            order = asked(last, near, roomy, replica, tolerances=NEAR, seed=seed)
            assert order == [OTHERS[0], OTHERS[1], OTHERS[2], party]
    assert asked(server(party, recipe="torch-f32@cpu-1"), tolerances=NEAR) == []


def test_a_requester_that_is_the_downstream_peer_is_not_asked() -> None:
    entry = server(REQUESTER, layers=ELSEWHERE, has_room=True)
    tail = replace(CLAIM, is_tail=True, downstream=REQUESTER)
    assert auditors_for(tail, [entry], NONE_MEASURED, random.Random(1)) == []


def test_whoever_has_room_loads_the_range_and_has_more_time_for_it() -> None:
    roomy = server(OTHERS[0], layers=ELSEWHERE, has_room=True)
    (found,) = auditors_for(CLAIM, [roomy], NONE_MEASURED, random.Random(1))
    assert found == Auditor(roomy, "bitwise", Preference.ROOMY, loads=True)
    replica = Auditor(server(OTHERS[1]), "bitwise", Preference.REPLICA)
    assert report_within_s(CLAIM, found) == report_within_s(CLAIM, replica) + AUDIT_LOAD_S
    assert asked(replace(roomy, recipe="torch-f32@cpu-1"), tolerances=NEAR) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"manifest_root": b"1" * 32},
        {"layers": LayerRange(0, 2)},
        {"recipe": "torch-f32@cpu-1"},
        {"canary": "scale"},
        {"canary": "echo"},
    ],
)
def test_whoever_computes_something_else_does_not_audit(changes: dict[str, object]) -> None:
    assert asked(server(OTHERS[0], **changes)) == []


def test_nobody_foresees_who_audits() -> None:
    servers = list(map(server, OTHERS[:8]))
    assert len({tuple(asked(*servers, seed=seed)) for seed in range(20)}) > 10
    assert asked(*servers, seed=3) == asked(*servers, seed=3)


def test_another_recipe_audits_after_the_same_one_and_only_if_the_pair_was_measured() -> None:
    near = server(OTHERS[0], recipe="torch-f32@cpu-1")
    assert asked(near, server(OTHERS[1]), tolerances=NEAR) == [OTHERS[1], OTHERS[0]]
    found = auditors_for(CLAIM, [near], NEAR, random.Random(1))
    assert found == [Auditor(near, "tolerance", Preference.NEAR, 7 * MARGIN)]
    assert auditors_for(replace(CLAIM, is_tail=True), [near], NEAR, random.Random(1)) == []


def test_canaries_of_the_range_are_named_in_a_bounded_number() -> None:
    canaries = [server(peer, canary="scale") for peer in OTHERS[:20]]
    named = canaries_for(CLAIM, [server(OTHERS[20]), server(WORKER, canary="scale"), *canaries])
    assert [each.peer_id for each in named] == list(OTHERS[:MAX_CANARIES_NAMED])
    elsewhere = server(OTHERS[0], canary="scale", layers=LayerRange(1, 2))
    assert canaries_for(CLAIM, [elsewhere]) == ()


def test_a_bitwise_order_does_not_say_what_the_worker_claims() -> None:
    canaries = canaries_for(CLAIM, [server(OTHERS[1], canary="scale")])
    auditor = Auditor(server(OTHERS[0]), "bitwise", Preference.REPLICA)
    order = order_for(
        CLAIM,
        auditor,
        audit_id=bytes(16),
        upstream_addresses=["/ip4/127.0.0.1/tcp/2"],
        downstream_addresses=[],
        canaries=canaries,
        now_ms=1_000,
    )
    assert CLAIM.output_digest not in order.model_dump().values()
    assert (order.auditor, order.audited, order.positions) == (OTHERS[0], WORKER, 40)
    assert order.canaries == canaries
    assert order.report_before == 1_000 + int(report_within_s(CLAIM, auditor) * 1000)


def test_an_order_by_tolerance_says_it_and_names_no_canary() -> None:
    order = order_for(
        CLAIM,
        Auditor(server(OTHERS[0]), "tolerance", Preference.NEAR, 28),
        audit_id=bytes(16),
        upstream_addresses=(),
        downstream_addresses=(),
        canaries=canaries_for(CLAIM, [server(OTHERS[1], canary="scale")]),
        now_ms=0,
    )
    assert (order.output_digest, order.tolerance_ppm, order.canaries) == (CLAIM.output_digest, 28, ())


# ---- Tolerances ----


def test_a_measured_class_goes_before_its_recipe() -> None:
    tolerances = Tolerances({frozenset({"f32", "torch-f32"}): 7, frozenset({"f32", "torch-f32@cpu-1"}): 2})
    assert tolerances.between("torch-f32@cpu-1", "f32") == 2 * MARGIN
    assert tolerances.between("f32", "torch-f32@cpu-2") == 7 * MARGIN
    assert tolerances.between("f32", "torch-f16@cpu-1") is None


def test_two_classes_of_one_recipe_may_be_a_pair() -> None:
    tolerances = Tolerances({frozenset({"torch-f32"}): 0})
    assert tolerances.between("torch-f32@cpu-1", "torch-f32@cuda-1") == 1


def test_a_file_of_tolerances_is_read() -> None:
    content = {"pair": [{"recipes": ["f32", "torch-f32"], "measured_ppm": 9}]}
    assert Tolerances.of_file(content).between("f32", "torch-f32") == 9 * MARGIN
    assert Tolerances.of_file({}).between("f32", "torch-f32") is None


@pytest.mark.parametrize(
    "content",
    [
        {"pairs": []},
        {"pair": {}},
        {"pair": [{"recipes": ["f32"], "measured_ppm": 9}]},
        {"pair": [{"recipes": ["f32", "torch-f32"], "measured_ppm": -1}]},
        {"pair": [{"recipes": ["f32", "torch-f32"], "measured_ppm": True}]},
        {"pair": [{"recipes": ["f32", "torch-f32"], "measured_ppm": 9, "more": 1}]},
        {"pair": [{"recipes": ["f32", "torch-f32"], "measured_ppm": 9}] * 257},
    ],
)
def test_a_wrong_file_of_tolerances_is_refused_by_the_name_of_the_key(content: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="tolerances: pair"):
        Tolerances.of_file(content)


@given(st.lists(st.tuples(st.sampled_from(PEERS), st.sampled_from(["f32", "torch-f32"])), max_size=12))
def test_whoever_is_asked_may_be_asked(rows: list[tuple[PeerId, str]]) -> None:
    servers = [server(peer, recipe=recipe) for peer, recipe in rows]
    for auditor in auditors_for(CLAIM, servers, NEAR, random.Random(1)):
        assert auditor.server.peer_id not in (WORKER, DOWNSTREAM)
        assert auditor.comparison == ("bitwise" if auditor.server.recipe == CLAIM.recipe else "tolerance")
