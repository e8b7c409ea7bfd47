"""Who may register: from where, under which key, with which manifest; and how long a worker that loads may be silent."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import ClaimTooSmall, InvalidRequest, KeyInUse
from tessella_p2p.orchestrator.admission import OFFLINE_MS, MemberRules, is_private
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.member import Announced, Deregistered, Loaded, MemberState, Registered, TimePassed
from tessella_p2p.orchestrator.members import Members
from tessella_p2p.orchestrator.terms import ServedModel
from tessella_p2p.wire.messages import Announce, Deregister, Ready
from tests.orchestrator.paper_workers import (
    CONTRACT,
    LAYERS,
    MODEL,
    MODEL_ID,
    NOW,
    ORCHESTRATOR,
    PaperWorker,
    register,
    stage_record,
)

HERE, THERE = "/ip4/198.51.100.1/tcp/9080", "/ip4/198.51.100.2/tcp/9080"
FIRST, SECOND = b"1" * 16, b"2" * 16


def members(**rules: Any) -> Members:
    return Members(ORCHESTRATOR, Catalogue([MODEL]), rules=MemberRules(**rules))


# ---- One key, two processes ----


def registered(instance: bytes | None = FIRST, address: str = HERE) -> tuple[Members, PaperWorker]:
    core = members()
    worker = PaperWorker(core, "worker")
    worker.register(addresses=(address,), instance=instance)
    return core, worker


def test_a_second_process_with_the_key_of_one_that_is_heard_is_refused_and_the_first_is_named() -> None:
    core, worker = registered()
    before = core.members()
    with pytest.raises(KeyInUse, match=r"198\.51\.100\.1") as caught:
        worker.register(NOW + 1000, addresses=(THERE,), instance=SECOND)
    assert str(worker.peer) in str(caught.value)
    assert core.members() == before, "the first goes on"


@pytest.mark.parametrize(
    ("address", "instance", "later_ms"),
    [
        (HERE, SECOND, 1000),
        (THERE, FIRST, 1000),
        (THERE, None, 1000),
        (THERE, SECOND, OFFLINE_MS),
    ],
    ids=["started again where it was", "another address of the same process", "an older node", "the first is silent"],
)
def test_a_worker_that_was_started_again_is_no_second_process(
    address: str, instance: bytes | None, later_ms: int
) -> None:
    _, worker = registered()
    worker.register(NOW + later_ms, addresses=(address,), instance=instance)


def test_a_key_whose_worker_left_is_free() -> None:
    core, worker = registered()
    core.handle(Deregistered(worker.peer, Deregister()), NOW)
    worker.register(NOW + 1, addresses=(THERE,), instance=SECOND)


def test_heartbeats_of_a_process_whose_key_another_one_took_over_are_refused() -> None:
    core, worker = registered()
    worker.register(NOW + 1000, addresses=(HERE,), instance=SECOND)
    for event in (
        Announced(worker.peer, Announce(serial=worker.serial, queue_depth=0, state="loading", instance=FIRST)),
        Loaded(worker.peer, Ready(serial=worker.serial, record=worker.record(), instance=FIRST)),
    ):
        with pytest.raises(KeyInUse, match="another process since"):
            core.handle(event, NOW + 2000)
    core.handle(
        Announced(worker.peer, Announce(serial=worker.serial, queue_depth=0, state="loading", instance=SECOND)), NOW
    )


def test_after_a_restart_of_the_orchestrator_the_first_word_tells_whose_key_it_is() -> None:
    _, worker = registered()
    restarted = Members(ORCHESTRATOR, Catalogue([MODEL]), serial_floor=5000)
    body = Announce(serial=worker.serial, queue_depth=0, state="ready", record=worker.record(), instance=FIRST)
    restarted.handle(Announced(worker.peer, body), NOW + 1000)
    with pytest.raises(KeyInUse):
        restarted.handle(Registered(worker.peer, register(addresses=(THERE,), instance=SECOND)), NOW + 2000)


# ---- Manifests ----


def test_a_manifest_that_is_not_served_is_a_bad_request_as_the_manual_has_it() -> None:
    with pytest.raises(InvalidRequest) as caught:
        PaperWorker(members(), "worker").register(manifest_root=bytes(32))
    assert caught.value.param == "manifest_root"


# ---- Addresses ----


@pytest.mark.parametrize(
    "address",
    [
        *(
            "/dns4/10.0.0.1/tcp/1",
            "/dns/127.1/tcp/1",
            "/dns/0x7f000001/tcp/1",
            "/dns4/LOCALHOST./tcp/1",
            "/dns/::1/tcp/1",
        ),
        *("/ip4/224.0.0.1/tcp/1", "/ip4/255.255.255.255/tcp/1", "/ip6/ff02::1/tcp/1", "/ip6/64:ff9b::7f00:1/tcp/1"),
        *("/ip4/127.0.0.1/tcp/1", "/ip4/10.1.2.3/tcp/1", "/ip4/172.16.0.1/tcp/1", "/ip4/172.31.255.255/tcp/1"),
        *("/ip4/192.168.1.2/tcp/1", "/ip4/169.254.1.1/tcp/1", "/ip4/100.64.0.1/tcp/1", "/ip4/0.0.0.0/tcp/1"),
        *("/ip6/::1/tcp/1", "/ip6/fc00::1/tcp/1", "/ip6/fe80::1/tcp/1", "/ip6/::/tcp/1", "/ip6/::ffff:8.8.8.8/tcp/1"),
        *("/dns4/localhost/tcp/1", "/dns/printer.local/tcp/1", "/dns4/db.internal/tcp/1"),
    ],
)
def test_private_addresses_are_refused_where_they_are_not_allowed(address: str) -> None:
    assert is_private(address)
    strict, lenient = members(allow_private_addrs=False), members()
    for addresses in ((address,), (HERE, address)):
        with pytest.raises(InvalidRequest, match="allow_private_addrs") as caught:
            PaperWorker(strict, "worker").register(addresses=addresses)
        assert caught.value.param == "addresses"
    assert strict.members() == ()
    PaperWorker(lenient, "worker").register(addresses=(address,))


@pytest.mark.parametrize(
    "address",
    [
        *("/unix/tmp/socket", "/ip4/8.8.8/tcp/1", "/ip4/010.1.1.1/tcp/1", "8.8.8.8", "", "/", "/ip4", "//ip4/8.8.8.8"),
        *("/ip4/8.8.8.8", "/ip4/8.8.8.8/tcp", "/ip4/8.8.8.8/tcp/0", "/ip4/8.8.8.8/tcp/65536", "/ip4/8.8.8.8/tcp/+1"),
        *(
            "/ip4/8.8.8.8/udp/1",
            "/ip6/8.8.8.8/tcp/1",
            "/ip6/fe80::1%eth0/tcp/1",
            "/ip4/8.8.8.8/tcp/1/ip4/10.0.0.1/tcp/1",
        ),
        *(
            "/dns4//tcp/1",
            "/dns/a b/tcp/1",
            "/dns/<b>/tcp/1",
            "not an address",
            "http://x",
        ),
    ],
)
@pytest.mark.parametrize("allow_private_addrs", [False, True])
def test_what_nobody_can_dial_is_no_address(address: str, allow_private_addrs: bool) -> None:
    core = members(allow_private_addrs=allow_private_addrs)
    with pytest.raises(InvalidRequest, match="multiaddr") as caught:
        PaperWorker(core, "worker").register(addresses=(HERE, address))
    assert caught.value.param == "addresses"
    assert core.members() == ()


@pytest.mark.parametrize(
    "address",
    ["/ip4/8.8.8.8/tcp/1", "/ip4/172.32.0.1/tcp/1", "/ip6/2001:4860::1/tcp/1", "/dns4/node.example.org/tcp/1", HERE],
)
def test_public_addresses_are_taken(address: str) -> None:
    assert not is_private(address)
    PaperWorker(members(allow_private_addrs=False), "worker").register(addresses=(address,))


def test_a_record_brings_no_private_address_in_by_the_back_door() -> None:
    core = members(allow_private_addrs=False)
    worker = PaperWorker(core, "worker")
    worker.register(addresses=(HERE,))
    record = stage_record(worker.key, worker.lease, addresses=("/ip4/192.168.0.7/tcp/1",))
    before = core.members()
    with pytest.raises(InvalidRequest) as caught:
        core.handle(Loaded(worker.peer, Ready(serial=worker.serial, record=record)), NOW)
    assert caught.value.param == "addresses"
    assert core.members() == before


@given(
    st.text(max_size=60)
    | st.text(max_size=20).map("/ip4/{}/tcp/1".format)
    | st.text("0123456789", max_size=9).map("/dns/a/tcp/{}".format)
)
def test_of_any_text_a_refusal_is_the_worst_that_comes(text: str) -> None:
    core = members(allow_private_addrs=False)
    with suppress(InvalidRequest):
        PaperWorker(core, "worker").register(addresses=(text,))


# ---- Claims, grace, manifests ----


def test_the_operators_least_claim_is_refused_one_megabyte_below_it() -> None:
    core = Members(ORCHESTRATOR, Catalogue([MODEL], min_claim_mb=2048))
    with pytest.raises(ClaimTooSmall, match="2048 MB is the least"):
        PaperWorker(core, "worker").register(claim_mb=2047)
    PaperWorker(core, "worker").register(claim_mb=2048)


def test_who_has_said_ready_has_no_more_grace_for_loading() -> None:
    core = members()
    worker = PaperWorker(core, "worker")
    worker.register()
    worker.ready(NOW + 1000)
    for silent_ms, state in ((OFFLINE_MS - 1, MemberState.HEALTHY), (OFFLINE_MS, MemberState.OFFLINE)):
        core.handle(TimePassed(), NOW + 1000 + silent_ms)
        member = core.get(worker.peer)
        assert member is not None
        assert member.state is state


@pytest.mark.parametrize(("grace_s", "silent_ms"), [(300.0, 300_000), (1.0, OFFLINE_MS)])
def test_a_worker_that_loads_may_be_silent_for_the_operators_grace(grace_s: float, silent_ms: int) -> None:
    core = members(registration_grace_s=grace_s)
    worker = PaperWorker(core, "worker")
    worker.register()
    for now_ms, state in ((silent_ms - 1, MemberState.PENDING_LOAD), (silent_ms, MemberState.OFFLINE)):
        core.handle(TimePassed(), NOW + now_ms)
        member = core.get(worker.peer)
        assert member is not None
        assert member.state is state


def test_nobody_registers_under_a_manifest_that_was_replaced_and_who_serves_it_goes_on() -> None:
    catalogue = Catalogue([MODEL])
    core = Members(ORCHESTRATOR, catalogue)
    worker = PaperWorker(core, "worker")
    worker.register()
    catalogue.publish(ServedModel(MODEL_ID, b"n" * 32, CONTRACT, LAYERS, MODEL.terms))
    worker.ready()
    with pytest.raises(InvalidRequest, match="pull it") as caught:
        PaperWorker(core, "late").register()
    assert caught.value.param == "manifest_root"
    PaperWorker(core, "late").register(manifest_root=b"n" * 32)
