"""The orchestrator and its client over the in-memory network, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import trio

from tessella_p2p.base.errors import (
    ClaimTooSmall,
    DialError,
    HopTimeout,
    InvalidRequest,
    InvalidSignature,
    NotAuthorized,
    Overloaded,
    RemoteProtocolError,
    Replayed,
    StreamReset,
    UnknownModel,
)
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import HEARTBEAT_S, LEASE_SERIAL_BLOCK, REPORT_BURST, REQUEST_TTL_MS, RESTORED_GRACE_S
from tessella_p2p.ledger.accounts import ISSUANCE
from tessella_p2p.ledger.blocking import in_place
from tessella_p2p.ledger.client import OrchestratorClient
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.net.framing import receive_message, send_message
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork, constant_latency
from tessella_p2p.net.network import Network, Stream
from tessella_p2p.net.virtual_clock import VirtualClock, run_deterministic
from tessella_p2p.orchestrator.member import MemberState
from tessella_p2p.orchestrator.service import Orchestrator
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import ClockSequencer, Message, open_envelope, seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import (
    ANSWER,
    REQUEST,
    Acknowledged,
    Announce,
    AnswerBody,
    Assigned,
    Credits,
    Deregister,
    Granted,
    ListStages,
    ReadCredits,
    Ready,
    Refused,
    ReportFailure,
    RequestBody,
    SessionGrant,
    Stages,
    WorkDone,
    WorkSettled,
)
from tests.ledger.proving import Stage, proof_body, seal_proof
from tests.orchestrator.paper_workers import (
    MODEL,
    MODEL_ID,
    NOW,
    ORCHESTRATOR,
    RECIPE,
    ROOT,
    key_of,
    lease_of,
    register,
    stage_record,
)

ADDRESS = "/ip4/10.0.0.1/tcp/9080"


@dataclass
class VirtualWallClock:
    """The date under virtual time."""

    clock: VirtualClock

    def unix_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return NOW + int(self.clock.now * 1000)


@dataclass
class Bench:
    """An orchestrator on a network, and clients of it."""

    fabric: MemoryFabric
    clock: VirtualWallClock
    nursery: trio.Nursery
    path: Path
    orchestrator: Orchestrator
    store: LedgerStore
    networks: dict[PeerId, MemoryNetwork] = field(default_factory=dict)

    async def network_of(self, key: NodeKey) -> MemoryNetwork:
        if key.peer_id not in self.networks:
            opened = await self.nursery.start(_keep_open, self.fabric, key)
            self.networks[key.peer_id] = opened
        return self.networks[key.peer_id]

    async def client(self, name: str, pinned: PeerId = ORCHESTRATOR.peer_id) -> OrchestratorClient:
        key = key_of(name)
        network = await self.network_of(key)
        return OrchestratorClient(
            network, key, self.clock, ClockSequencer(), pinned, f"{ADDRESS}/p2p/{ORCHESTRATOR.peer_id}"
        )

    async def raw(self, name: str, request: bytes) -> Message:
        """The body of the answer to bytes that no client would send."""
        key = key_of(name)
        network = await self.network_of(key)
        network.add_addresses(ORCHESTRATOR.peer_id, [ADDRESS])
        stream = await network.open_stream(ORCHESTRATOR.peer_id, protocols.ORCHESTRATOR)
        await send_message(stream, request)
        answer = await receive_message(stream)
        await stream.aclose()
        assert answer is not None
        envelope = open_envelope(
            answer, ANSWER, now_ms=self.clock.unix_ms(), audience=key.peer_id, signer=ORCHESTRATOR.peer_id
        )
        return envelope.message(AnswerBody).body

    def request(self, name: str, sequence: int = 1, ttl_ms: int = REQUEST_TTL_MS, audience: str = "") -> bytes:
        return seal(
            key_of(name),
            REQUEST,
            RequestBody(body=ReadCredits()),
            sequence=sequence,
            now_ms=self.clock.unix_ms(),
            audience=audience or ORCHESTRATOR.peer_id,
            ttl_ms=ttl_ms,
        )


async def _keep_open(
    fabric: MemoryFabric,
    key: NodeKey,
    address: str | None = None,
    *,
    task_status: trio.TaskStatus[MemoryNetwork] = trio.TASK_STATUS_IGNORED,
) -> None:
    async with MemoryNetwork.open(fabric, key.peer_id, address) as network:
        task_status.started(network)
        await trio.sleep_forever()


@asynccontextmanager
async def bench(
    clock: VirtualClock, path: Path, *, min_stages: int = 1, allow: frozenset[PeerId] | None = None
) -> AsyncIterator[Bench]:
    fabric = MemoryFabric(Random(1), clock, constant_latency(0.01))
    wall = VirtualWallClock(clock)
    store = LedgerStore(path / "ledger", sync=False)
    async with trio.open_nursery() as nursery:
        network: MemoryNetwork = await nursery.start(_keep_open, fabric, ORCHESTRATOR, ADDRESS)
        orchestrator = Orchestrator(
            network,
            ORCHESTRATOR,
            wall,
            store,
            models=[MODEL],
            recipe=RECIPE,
            sequencer=ClockSequencer(),
            min_stages=min_stages,
            allow=allow,
            run_blocking=in_place,
        )
        await nursery.start(orchestrator.run)
        yield Bench(fabric, wall, nursery, path, orchestrator, store)
        nursery.cancel_scope.cancel()
    store.close()


def run_bench(
    scenario: Callable[[Bench], Awaitable[None]],
    path: Path,
    *,
    min_stages: int = 1,
    allow: frozenset[PeerId] | None = None,
) -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with bench(clock, path, min_stages=min_stages, allow=allow) as made:
            await scenario(made)

    run_deterministic(main, 5, clock=clock)


async def serve_stage(made: Bench, name: str) -> tuple[OrchestratorClient, bytes]:
    """Register a worker and say that it is ready; its client and its lease."""
    client = await made.client(name)
    assigned = await client.ask(register(), Assigned)
    record = stage_record(key_of(name), assigned.lease, now_ms=made.clock.unix_ms())
    await client.ask(Ready(serial=lease_of(assigned.lease).serial, record=record), Acknowledged)
    return client, assigned.lease


# ---- The whole life ----


def test_workers_register_serve_prove_and_are_paid(tmp_path: Path) -> None:
    """Every request of the protocol once, in the order of a mesh's life."""

    async def scenario(made: Bench) -> None:
        names = ("worker 0", "worker 1", "worker 2")
        served = [await serve_stage(made, name) for name in names]
        entry = await made.client("entry")
        stages = await entry.ask(ListStages(), Stages)
        assert stages.health == "healthy"
        assert stages.missing == ()
        assert len(stages.records) == 3
        granted = await entry.ask(
            SessionGrant(
                request_id="request-1", model_id=MODEL_ID, manifest_root=ROOT, recipe=RECIPE, max_positions=500
            ),
            Granted,
        )
        assert granted.tier == "Leech"
        route = tuple(
            Stage(key_of(name), lease_of(lease).layers) for name, (_, lease) in zip(names, served, strict=True)
        )
        for index, (client, lease) in enumerate(served):
            body = proof_body(
                index,
                route=route,
                opened_at=made.clock.unix_ms(),
                sealed_ticket=granted.ticket,
                sealed_lease=lease,
                requester=key_of("entry"),
            )
            proof = seal_proof(body, route[index].key)
            first = await client.ask(WorkDone(proofs=(proof,)), WorkSettled)
            again = await client.ask(WorkDone(proofs=(proof, b"junk")), WorkSettled)
            assert [one.status for one in first.results] == ["settled"]
            assert [one.status for one in again.results] == ["duplicate", "refused"]
            balance = await client.ask(ReadCredits(), Credits)
            assert balance.micro_credits == len(LayerRange(*route[index].layers)) * 300 * 1000
            assert (balance.tier, balance.settled_proofs) == ("Standard", 1)
        accounts = made.store.accounts("", 1024)
        assert sum(account.micro_credits for account in accounts) == 0
        assert {account.name for account in accounts} == {ISSUANCE, *(stage.key.peer_id for stage in route)}
        await served[0][0].ask(Deregister(), Acknowledged)
        left = await entry.ask(ListStages(manifest_root=ROOT), Stages)
        assert left.missing == (route[0].layers,)
        assert made.orchestrator.membership.coverage(ROOT).health == "degraded"

    run_bench(scenario, tmp_path, min_stages=3)


def test_a_silent_worker_goes_offline_by_itself(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        client, lease = await serve_stage(made, "worker")
        serial = lease_of(lease).serial
        for _ in range(20):
            await client.ask(Announce(serial=serial, queue_depth=0, state="ready"), Acknowledged)
            await trio.sleep(5.0)
        assert [member.state for member in made.orchestrator.membership.members()] == [MemberState.HEALTHY]
        await trio.sleep(20.0)
        assert [member.state for member in made.orchestrator.membership.members()] == [MemberState.OFFLINE]

    run_bench(scenario, tmp_path)


def test_lease_serials_rise_over_a_restart(tmp_path: Path) -> None:
    serials: list[int] = []

    async def scenario(made: Bench) -> None:
        client, lease = await serve_stage(made, "worker")
        serials.append(lease_of(lease).serial)
        assert made.store.serial_floor() >= serials[-1]
        await client.ask(Deregister(), Acknowledged)

    for _ in range(3):
        run_bench(scenario, tmp_path)
    assert serials == sorted(set(serials))
    assert serials[1] > LEASE_SERIAL_BLOCK


def test_a_worker_that_is_restarted_with_the_orchestrator_gets_its_own_range(tmp_path: Path) -> None:
    """It registers before the other two, which serve on under their leases, have been heard again."""
    names = ("worker 0", "worker 1", "worker 2")
    leases: dict[str, bytes] = {}

    async def before(made: Bench) -> None:
        for name in names:
            _, leases[name] = await serve_stage(made, name)
        assert made.orchestrator.membership.coverage(ROOT).health == "healthy"

    async def after(made: Bench) -> None:
        restarted = await made.client("worker 1")
        assigned = await restarted.ask(register(), Assigned)
        assert assigned.layers == lease_of(leases["worker 1"]).layers
        assert lease_of(assigned.lease).serial > max(lease_of(lease).serial for lease in leases.values())
        leases["worker 1"] = assigned.lease
        for name in names:
            client = await made.client(name)
            record = stage_record(key_of(name), leases[name], now_ms=made.clock.unix_ms())
            await client.ask(Ready(serial=lease_of(leases[name]).serial, record=record), Acknowledged)
        stages = await restarted.ask(ListStages(), Stages)
        assert (stages.health, len(stages.records)) == ("healthy", 3)

    run_bench(before, tmp_path, min_stages=3)
    run_bench(after, tmp_path, min_stages=3)


def test_the_range_of_a_worker_that_never_comes_back_is_given_away(tmp_path: Path) -> None:
    lost: list[tuple[int, int]] = []

    async def before(made: Bench) -> None:
        for name in ("worker 0", "worker 1"):
            _, lease = await serve_stage(made, name)
            lost.append(lease_of(lease).layers)

    async def after(made: Bench) -> None:
        await trio.sleep(RESTORED_GRACE_S + HEARTBEAT_S + 1.0)
        heirs = [await (await made.client(f"heir {i}")).ask(register(), Assigned) for i in range(2)]
        assert [heir.layers for heir in heirs] == lost

    run_bench(before, tmp_path, min_stages=2)
    run_bench(after, tmp_path, min_stages=2)


def test_no_lease_leaves_before_its_serial_is_durable(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        made.store.close()  # as a disk that fails
        client = await made.client("worker")
        for _ in range(2):
            with pytest.raises(Overloaded, match="ledger"):
                await client.call(register())

    run_bench(scenario, tmp_path)


def test_a_failing_peer_is_counted_not_judged(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        await serve_stage(made, "worker")
        client = await made.client("entry")
        await client.ask(ReportFailure(peer_id=key_of("worker").peer_id, code="hop_timeout"), Acknowledged)
        assert made.orchestrator.membership.reported_failures == {key_of("worker").peer_id: 1}
        assert [member.state for member in made.orchestrator.membership.members()] == [MemberState.HEALTHY]

    run_bench(scenario, tmp_path)


def test_reports_about_oneself_and_about_strangers_take_no_room(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        worker, _ = await serve_stage(made, "worker")
        await worker.ask(ReportFailure(peer_id=key_of("worker").peer_id, code="hop_timeout"), Acknowledged)
        for number in range(5):
            await worker.ask(ReportFailure(peer_id=key_of(f"stranger {number}").peer_id, code="x"), Acknowledged)
        assert not made.orchestrator.membership.reported_failures

    run_bench(scenario, tmp_path)


def test_a_liar_that_reports_all_the_time_is_slowed_down_and_harms_nobody(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        await serve_stage(made, "worker")
        liar = await made.client("liar")
        victim = key_of("worker").peer_id
        report = ReportFailure(peer_id=victim, code="hop_timeout")
        refused: list[Overloaded] = []

        async def lie() -> None:
            try:
                await liar.ask(report, Acknowledged)
            except Overloaded as error:
                refused.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(2 * REPORT_BURST):
                nursery.start_soon(lie)
        assert len(refused) == REPORT_BURST
        assert made.orchestrator.membership.reported_failures[victim] == REPORT_BURST
        assert [member.state for member in made.orchestrator.membership.members()] == [MemberState.HEALTHY]
        honest = await made.client("honest")
        await honest.ask(report, Acknowledged)

    run_bench(scenario, tmp_path)


# ---- Refusals ----


def test_refusals_arrive_as_the_errors_that_they_are(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        client = await made.client("worker")
        with pytest.raises(ClaimTooSmall):
            await client.call(register(claim_mb=1))
        with pytest.raises(UnknownModel):
            await client.call(register(recipe="int4"))
        with pytest.raises(InvalidRequest):
            await client.call(register(total_layers=12))
        with pytest.raises(NotAuthorized, match="register again"):
            await client.call(Announce(serial=1, queue_depth=0, state="ready"))
        with pytest.raises(RemoteProtocolError, match="answered read_credits with credits"):
            await client.ask(ReadCredits(), Acknowledged)

    run_bench(scenario, tmp_path)


def test_a_private_mesh_refuses_a_stranger_before_it_verifies_a_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M-REG-2."""

    async def scenario(made: Bench) -> None:
        verified: list[object] = []
        monkeypatch.setattr(
            "tessella_p2p.orchestrator.service.open_envelope", lambda *args, **kwargs: verified.append(args)
        )
        answer = await made.raw("stranger", made.request("stranger"))
        assert isinstance(answer, Refused)
        assert answer.code == "worker_not_authorized"
        assert verified == []
        assert made.orchestrator.outcomes["signatures_verified"] == 0
        monkeypatch.undo()
        assert isinstance(await (await made.client("friend")).call(ReadCredits()), Credits)
        with pytest.raises(NotAuthorized):
            await (await made.client("stranger")).call(ReadCredits())
        assert made.orchestrator.outcomes["signatures_verified"] == 1

    run_bench(scenario, tmp_path, allow=frozenset({key_of("friend").peer_id}))


def test_hostile_requests_are_refused_with_a_signed_answer(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        once = made.request("worker")
        assert isinstance(await made.raw("worker", once), Credits)
        flipped = bytearray(made.request("worker", 2))
        flipped[-1] ^= 1
        for request, code in (
            (once, "replayed"),
            (bytes(flipped), "invalid_signature"),
            (made.request("somebody else", 3), "invalid_signature"),
            (made.request("worker", 4, audience=key_of("other orchestrator").peer_id), "invalid_signature"),
            (made.request("worker", 5, ttl_ms=REQUEST_TTL_MS + 1), "remote_protocol_error"),
            (made.request("worker", 2**53), "malformed_message"),
            (b"garbage", "malformed_message"),
            (b"\x80", "malformed_message"),
            (b"\x9f" * 100, "malformed_message"),
            (b"\x81\x02", "version_mismatch"),
        ):
            answer = await made.raw("worker", request)
            assert isinstance(answer, Refused)
            assert answer.code == code
        old = made.request("worker", 6)
        await trio.sleep(61.0)
        answer = await made.raw("worker", old)
        assert isinstance(answer, Refused)
        assert answer.code == "expired"
        assert isinstance(await made.raw("worker", made.request("worker", 7)), Credits)

    run_bench(scenario, tmp_path)


def test_a_request_from_before_a_restart_is_taken_from_its_signer_alone(tmp_path: Path) -> None:
    """The replay guard is empty after a restart; over HTTP whoever recorded a request could show it once more."""

    async def scenario(made: Bench) -> None:
        recorded, new = (
            seal(
                key_of("worker"),
                REQUEST,
                RequestBody(body=ReadCredits()),
                sequence=at,
                now_ms=at,
                audience=ORCHESTRATOR.peer_id,
            )
            for at in (NOW - 1, NOW)
        )
        with pytest.raises(Replayed, match="before this orchestrator began"):
            await made.orchestrator.handle(recorded, None)
        assert isinstance(await made.orchestrator.handle(new, None), Credits)
        assert isinstance(await made.raw("worker", recorded), Credits)

    run_bench(scenario, tmp_path)


def test_an_oversized_request_is_refused_unread(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        network = await made.network_of(key_of("worker"))
        network.add_addresses(ORCHESTRATOR.peer_id, [ADDRESS])
        stream = await network.open_stream(ORCHESTRATOR.peer_id, protocols.ORCHESTRATOR)
        await stream.send_all((1 << 30).to_bytes(4, "big"))
        answer = await receive_message(stream)
        assert answer is not None
        envelope = open_envelope(answer, ANSWER, now_ms=None, audience=key_of("worker").peer_id)
        body = envelope.message(AnswerBody).body
        assert isinstance(body, Refused)
        assert body.code == "malformed_message"

    run_bench(scenario, tmp_path)


def test_a_peer_that_says_nothing_holds_no_stream(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        network = await made.network_of(key_of("worker"))
        network.add_addresses(ORCHESTRATOR.peer_id, [ADDRESS])
        stream = await network.open_stream(ORCHESTRATOR.peer_id, protocols.ORCHESTRATOR)
        await stream.send_all(b"\0\0")
        with trio.fail_after(20.0):
            assert await receive_message(stream) is None

    run_bench(scenario, tmp_path)


# ---- The client ----


def test_an_orchestrator_that_is_not_there_is_a_transport_error(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        client = await made.client("worker")
        made.fabric.crash(ORCHESTRATOR.peer_id)
        with pytest.raises((DialError, StreamReset)):
            await client.call(ReadCredits())

    run_bench(scenario, tmp_path)


def test_an_orchestrator_that_is_silent_is_a_timeout(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        client = await made.client("worker")
        await client.call(ReadCredits())
        made.fabric.freeze(ORCHESTRATOR.peer_id)
        with pytest.raises(HopTimeout, match="did not answer read_credits within 2 s"):
            await client.call(ReadCredits(), timeout_s=2.0)

    run_bench(scenario, tmp_path)


@pytest.mark.parametrize("lie", ["another request", "another signer", "another audience"])
def test_an_answer_that_is_not_the_orchestrators_to_this_request_is_refused(tmp_path: Path, lie: str) -> None:
    async def scenario(made: Bench) -> None:
        network: Network = await made.network_of(key_of("liar"))
        signer = key_of("somebody") if lie == "another signer" else key_of("liar")
        audience = key_of("somebody" if lie == "another audience" else "worker").peer_id

        async def answer(stream: Stream) -> None:
            raw = await receive_message(stream)
            assert raw is not None
            sequence = open_envelope(raw, REQUEST, now_ms=None, audience=key_of("liar").peer_id).sequence
            body = AnswerBody(to=sequence - (lie == "another request"), body=Acknowledged())
            await send_message(
                stream, seal(signer, ANSWER, body, sequence=1, now_ms=made.clock.unix_ms(), audience=audience)
            )

        network.serve(protocols.ORCHESTRATOR, answer)
        mine = await made.network_of(key_of("worker"))
        client = OrchestratorClient(
            mine, key_of("worker"), made.clock, ClockSequencer(), key_of("liar").peer_id, network.addresses[0]
        )
        with pytest.raises(InvalidSignature):
            await client.call(Deregister())

    run_bench(scenario, tmp_path)
