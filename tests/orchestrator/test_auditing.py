"""Audits over the in-memory network: real orders to paper auditors, real proofs, a real ledger."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import trio

from simulations.mesh import SimulatedClock
from tessella_p2p.audits.judging import FALSE_REPORT, HISTORY_WITHHELD, penalty_micro_credits
from tessella_p2p.audits.sampling import claim_of
from tessella_p2p.base.errors import InvalidRequest, NotAuthorized, Overloaded, StorageError
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import AUDIT_REPORT_S, AUDITS_RESUMED_AFTER_S, MAX_AUDIT_REPORT_BYTES, MAX_OPEN_AUDITS
from tessella_p2p.ledger.audit_evidence import AuditEvidence, OpenAudit
from tessella_p2p.ledger.blocking import in_place
from tessella_p2p.ledger.changes import VerdictReached
from tessella_p2p.ledger.evidence import verify_proof
from tessella_p2p.ledger.proof_log import ProofLog
from tessella_p2p.ledger.store import Judged, LedgerStore
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork, constant_latency
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.orchestrator.auditing import Auditing, AuditPolicy
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.context import OrchestratorContext
from tessella_p2p.orchestrator.member import Member, MemberState, Move
from tessella_p2p.orchestrator.orders import Orders
from tessella_p2p.stages.hop_links import HopLinks
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import ClockSequencer
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.worker.context import StageContext
from tessella_p2p.worker.orders import OrderServer
from tessella_p2p.worker.proofs import ProofWriter
from tests.ledger.proving import (
    LAYERS,
    NOW,
    ORCHESTRATOR,
    RECIPE,
    ROOT,
    TERMS,
    WORKERS,
    digest_at,
    key_of,
    proof_body,
    seal_proof,
)
from tests.orchestrator.paper_workers import MODEL
from tests.orchestrator.paper_workers import TERMS as MODEL_TERMS

Conduct = Literal["honest", "lies", "accomplice", "withheld", "silent", "declines", "unreachable"]
WORKER, UPSTREAM, DOWNSTREAM = WORKERS[1], WORKERS[0], WORKERS[2]
LIE = "a lie"
SEALED = b"the sealed report of "
EVERYTHING = AuditPolicy(share=1.0, recheck_share=0.0)
CANARY = key_of("canary")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def member(peer: PeerId, addresses: tuple[str, ...], canary: m.CanaryMode = "off") -> Member:
    return Member(
        peer_id=peer,
        model_id="toy",
        manifest_root=ROOT,
        recipe=RECIPE,
        layers=LayerRange(10, 20),
        state=MemberState.HEALTHY,
        serial=1,
        lease=b"lease",
        lease_expires_at=0,
        last_seen=0,
        silent_until=0,
        addresses=addresses,
        canary=canary,
    )


@dataclass
class Court:
    """Auditing, its ledger, and auditors that behave as they are told."""

    auditing: Auditing
    store: LedgerStore
    context: OrchestratorContext
    members: list[Member]
    orders: list[m.AuditOrder] = field(default_factory=list)
    excluded: list[PeerId] = field(default_factory=list)
    canary_salt: str | None = None
    settled: int = 0

    async def carry_out(self, conduct: Conduct, order: m.AuditOrder) -> None:
        """What an auditor does with an order; its report comes at once."""
        self.orders.append(order)
        if conduct == "declines":
            raise Overloaded("this node has no time")
        if conduct == "silent":
            return
        salt = {"lies": order.auditor, "accomplice": LIE}.get(conduct, "")
        canaries = () if self.canary_salt is None else (self.known_wrong(order, self.canary_salt),)
        report = m.AuditReport(
            audit_id=order.audit_id,
            outcome="computed",
            output_digest=digest_at(order.layers[1], order.positions, salt),
            canary_digests=canaries,
        )
        if conduct == "withheld":
            report = m.AuditReport(
                audit_id=order.audit_id, outcome="inconclusive", code="history_withheld", withheld_by=order.upstream
            )
        await self.report(PeerId(order.auditor), report)

    def known_wrong(self, order: m.AuditOrder, salt: str) -> m.CanaryDigest:
        return m.CanaryDigest(peer_id=CANARY.peer_id, digest=digest_at(order.layers[1], order.positions, salt))

    async def report(self, peer: PeerId, report: m.AuditReport) -> m.OrchestratorAnswer:
        return self.auditing.report(peer, report, SEALED + peer.encode())

    def settle(self, *, lying: bool = False, salt_in: str = "") -> Judged:
        """Settle the next proof of the audited worker, and tell the part."""
        self.settled += 1
        request_id = f"request-{self.settled}"
        body = proof_body(1, request_id=request_id, salt_in=salt_in, salt_out=LIE if lying else "")
        return self.judge(seal_proof(body, WORKER, sequence=self.settled))

    def judge(self, raw: bytes) -> Judged:
        (judged,) = self.store.settle([raw], TERMS, NOW)
        self.auditing.judged(raw, judged)
        return judged

    def counted(self, what: str) -> int:
        return self.context.outcomes[f"audit:{what}"]

    async def concluded(self, audits: int = 1) -> None:
        """Wait in virtual time for so many audits to be over, and all that follows to be done."""
        while sum(map(self.counted, ("passed", "failed", "copied", "inconclusive"))) < audits:
            with trio.move_on_after(0.1):
                await trio.Event().wait()
        with trio.move_on_after(0.1):
            await trio.Event().wait()

    def verdicts(self) -> list[tuple[str, str, str | None]]:
        changes = (entry.change for _, entry in self.store.journal())
        return [(each.peer, each.verdict, each.code) for each in changes if isinstance(each, VerdictReached)]

    def balance(self, peer: PeerId) -> int:
        return self.store.account(peer).micro_credits


async def _auditor(
    fabric: MemoryFabric,
    key: NodeKey,
    conduct: Conduct,
    court: Callable[[], Court],
    folder: Path,
    date: SimulatedClock,
    *,
    task_status: trio.TaskStatus[Member],
) -> None:
    with closing(ProofLog(folder / key.peer_id, 16 << 20, sync=False)) as log:
        async with MemoryNetwork.open(fabric, key.peer_id) as network:
            sequencer = ClockSequencer()
            proofs = ProofWriter(key, date, sequencer, log, None, in_place)
            context = StageContext(network, key, date, sequencer, HopLinks(network, 10.0), proofs)

            async def refuse_assignments(_: m.UpdateAssignment, __: PeerId) -> None:
                raise InvalidRequest("no")

            async def audit(order: m.AuditOrder, _: bytes) -> None:
                await court().carry_out(conduct, order)

            server = OrderServer(context, frozenset({ORCHESTRATOR.peer_id}), refuse_assignments)
            server.on_audit = audit
            if conduct != "unreachable":
                server.serve()
            task_status.started(member(key.peer_id, network.addresses))
            await trio.sleep_forever()


@asynccontextmanager
async def court(
    folder: Path,
    clock: VirtualClock,
    conducts: Mapping[str, Conduct],
    policy: AuditPolicy = EVERYTHING,
    run_blocking: Callable[..., Awaitable[object]] = in_place,
) -> AsyncIterator[Court]:
    fabric = MemoryFabric(random.Random(1), clock, constant_latency(0.01))
    date = SimulatedClock(clock)
    made: list[Court] = []
    with closing(LedgerStore(folder / "ledger", 16 << 20, sync=False)) as store:
        async with (
            MemoryNetwork.open(fabric, ORCHESTRATOR.peer_id) as network,
            trio.open_nursery() as nursery,
        ):
            members: list[Member] = []
            for name, conduct in conducts.items():
                args = (fabric, key_of(name), conduct, lambda: made[0], folder, date)
                members.append(await nursery.start(_auditor, *args))
            context = OrchestratorContext(
                network,
                ORCHESTRATOR,
                date,
                store,
                ClockSequencer(),
                RECIPE,
                run_blocking,  # type: ignore[arg-type] # a test's own way to fail
            )

            async def exclude(peer: PeerId) -> None:
                made[0].excluded.append(peer)

            auditing = Auditing(
                context,
                Catalogue([MODEL]),
                lambda: members,
                Orders(context),
                exclude,
                lambda raw: verify_proof(raw, TERMS, NOW),
                policy,
                random.Random(1),
            )
            made.append(Court(auditing, store, context, members))
            nursery.start_soon(auditing.run)
            yield made[0]
            assert store.total() == 0
            nursery.cancel_scope.cancel()


def three(conduct: Conduct = "honest") -> dict[str, Conduct]:
    return {"replica 0": conduct, "replica 1": conduct, "replica 2": conduct}


async def test_honest_work_passes_and_nobody_pays(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, three()) as found:
        judged = found.settle()
        await found.concluded()
        assert found.verdicts() == [(WORKER.peer_id, "passed", None)]
        assert found.balance(WORKER.peer_id) == judged.settled.micro_credits
        assert len(found.orders) == 1
        order = found.orders[0]
        assert (order.audited, order.layers, order.positions) == (WORKER.peer_id, (10, 20), 300)
        assert (order.upstream, order.downstream) == (UPSTREAM.peer_id, DOWNSTREAM.peer_id)
        assert found.store.reputation(WORKER.peer_id, NOW).audits_passed == 1


async def test_a_liar_is_slashed_and_at_the_second_time_excluded(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, three()) as found:
        judged = found.settle(lying=True)
        await found.concluded()
        assert judged.work is not None
        claim = claim_of(judged.work, LAYERS)
        assert claim is not None
        penalty = penalty_micro_credits(claim, share=1.0)
        assert found.balance(WORKER.peer_id) == judged.settled.micro_credits - penalty < 0
        assert found.verdicts() == [(WORKER.peer_id, "failed", "wrong_output")]
        assert not found.excluded
        found.settle(lying=True)
        await found.concluded(2)
        assert found.store.is_blacklisted(WORKER.peer_id)
        assert found.excluded == [WORKER.peer_id]


async def test_a_lying_auditor_is_the_one_who_is_slashed(tmp_path: Path, clock: VirtualClock) -> None:
    conducts: dict[str, Conduct] = {"replica 0": "lies", "replica 1": "honest", "replica 2": "honest"}
    async with court(tmp_path, clock, conducts) as found:
        liar = key_of("replica 0").peer_id
        audits = 0
        while not any(peer == liar for peer, _, _ in found.verdicts()):  # until it is drawn
            found.settle()
            audits += 1
            await found.concluded(audits)
        assert (liar, "failed", FALSE_REPORT) in found.verdicts()
        assert found.balance(liar) < 0
        reputation = found.store.reputation(WORKER.peer_id, NOW)
        assert (reputation.audits_passed, reputation.audits_failed, reputation.slashes) == (audits, 0, 0)


async def test_an_accomplice_that_covers_a_liar_is_caught_with_it(tmp_path: Path, clock: VirtualClock) -> None:
    conducts: dict[str, Conduct] = {**three(), "replica 3": "accomplice"}
    async with court(tmp_path, clock, conducts, AuditPolicy(share=1.0, recheck_share=1.0)) as found:
        accomplice = key_of("replica 3").peer_id
        audits = 0
        while not any(peer == accomplice for peer, _, _ in found.verdicts()):
            found.settle(lying=True)
            audits += 1
            await found.concluded(audits)
        assert found.store.reputation(WORKER.peer_id, NOW).audits_failed == audits
        assert found.balance(accomplice) < 0


async def test_a_copier_of_a_canary_is_excluded_at_once(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, three()) as found:
        found.members.append(member(CANARY.peer_id, (), "scale"))
        found.canary_salt = LIE
        found.settle(lying=True)
        await found.concluded()
        assert found.orders[0].canaries == (m.CanaryNamed(peer_id=CANARY.peer_id, mode="scale"),)
        assert all(order.auditor != CANARY.peer_id for order in found.orders)
        assert found.verdicts() == [(WORKER.peer_id, "copied", "copied_canary")]
        assert found.store.reputation(WORKER.peer_id, NOW).copies == 1
        assert found.excluded == [WORKER.peer_id]


async def test_without_a_named_canary_the_same_lie_is_no_copy(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, three()) as found:
        found.canary_salt = LIE  # auditors say so, and nobody asked
        found.settle(lying=True)
        await found.concluded()
        assert found.verdicts() == [(WORKER.peer_id, "failed", "wrong_output")]


async def test_a_withheld_history_is_inconclusive_and_counted(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, three("withheld"), AuditPolicy(share=1.0)) as found:
        found.settle(lying=True)
        await found.concluded()
        assert found.verdicts() == [
            (WORKER.peer_id, "inconclusive", "history_withheld"),
            (UPSTREAM.peer_id, "inconclusive", HISTORY_WITHHELD),
        ]
        assert found.counted(HISTORY_WITHHELD) == 1
        assert found.store.reputation(UPSTREAM.peer_id, NOW).inconclusive == 1
        assert found.balance(WORKER.peer_id) > 0
        assert found.balance(UPSTREAM.peer_id) == 0


async def test_who_was_not_judged_is_audited_with_its_next_proof(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, three("withheld"), AuditPolicy(share=0.0)) as found:
        found.judge(seal_proof(proof_body(0, salt_out="odd"), UPSTREAM))
        found.judge(seal_proof(proof_body(1), WORKER))
        await found.concluded()
        found.settle()
        await found.concluded(2)
        assert [order.audited for order in found.orders] == [WORKER.peer_id] * 4


async def test_an_odd_proof_is_audited_whatever_the_share_and_paid_once_it_has_passed(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with court(tmp_path, clock, three(), AuditPolicy(share=0.0)) as found:
        found.judge(seal_proof(proof_body(0, salt_out="odd"), UPSTREAM))
        raw = seal_proof(proof_body(1), WORKER)
        judged = found.judge(raw)
        assert (judged.settled.status, judged.settled.code) == ("held", "neighbour_mismatch")
        await found.concluded()
        assert found.verdicts() == [(WORKER.peer_id, "passed", None)]
        assert found.judge(raw).settled.status == "settled"
        assert found.balance(WORKER.peer_id) > 0


async def test_an_odd_proof_that_is_sent_again_and_again_is_audited_once_at_a_time(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with court(tmp_path, clock, three("withheld"), AuditPolicy(share=0.0)) as found:
        found.judge(seal_proof(proof_body(0, salt_out="odd"), UPSTREAM))
        raw = seal_proof(proof_body(1), WORKER)
        for _ in range(3):
            found.judge(raw)
        await found.concluded()
        assert len(found.orders) == 2  # two auditors, of one audit
        found.judge(raw)
        await found.concluded(2)


async def test_a_mesh_without_replicas_judges_nobody_and_writes_nothing_down(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with court(tmp_path, clock, {}) as found:
        found.settle(lying=True)
        while not found.counted("no_auditor"):
            with trio.move_on_after(0.1):
                await trio.Event().wait()
        assert found.verdicts() == []


def roomy(one: Member, claim_mb: int) -> Member:
    """The same member at the end of the model, with such a claim."""
    return replace(one, layers=LayerRange(20, 30), claim_mb=claim_mb, device="cpu")


BOTH_MB = MODEL_TERMS.claim_mb(LayerRange(20, 30)) + MODEL_TERMS.claim_mb(LayerRange(10, 20))


async def test_without_replicas_whoever_has_room_for_the_range_audits_it(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, three()) as found:
        found.members[:] = [roomy(one, BOTH_MB) for one in found.members]
        found.settle(lying=True)
        await found.concluded()
        assert found.verdicts() == [(WORKER.peer_id, "failed", "wrong_output")]
        assert {order.layers for order in found.orders} == {(10, 20)}


@pytest.mark.parametrize(
    "changes",
    [
        {"claim_mb": BOTH_MB - 1},
        {"claim_mb": 0, "device": None},
        {"recipe": "q8_0"},
        {"move": Move(LayerRange(0, 10), 2, b"lease", 0, 0)},
        {"canary": "scale"},
    ],
    ids=["a smaller claim", "a claim that nobody remembers", "another recipe", "on the move", "a canary"],
)
async def test_whose_claim_is_not_free_for_it_audits_nothing(
    tmp_path: Path, clock: VirtualClock, changes: dict[str, Any]
) -> None:
    async with court(tmp_path, clock, {"replica 0": "honest"}) as found:
        found.members[:] = [replace(roomy(one, BOTH_MB), **changes) for one in found.members]
        found.settle()
        while not found.counted("no_auditor"):
            with trio.move_on_after(0.1):
                await trio.Event().wait()
        assert not found.orders


async def test_a_replica_is_asked_before_whoever_only_has_room(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, three()) as found:
        found.members[1:] = [roomy(one, BOTH_MB) for one in found.members[1:]]
        for number in range(1, 6):
            found.settle()
            await found.concluded(number)
        assert {order.auditor for order in found.orders} == {found.members[0].peer_id}


# ---- Evidence ----


def evidence_of(found: Court) -> dict[tuple[str, str], AuditEvidence | None]:
    return {
        (entry.change.peer, entry.change.verdict): found.store.audit_evidence(sequence)
        for sequence, entry in found.store.journal()
        if isinstance(entry.change, VerdictReached)
    }


def sealed_of(order: m.AuditOrder) -> bytes:
    return SEALED + order.auditor.encode()


async def test_a_verdict_that_is_not_passed_keeps_the_proof_and_the_sealed_reports(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with court(tmp_path, clock, three()) as found:
        found.settle()
        await found.concluded()
        assert evidence_of(found) == {(WORKER.peer_id, "passed"): None}
        found.orders.clear()
        found.settle(lying=True)
        await found.concluded(2)
        proof = seal_proof(proof_body(1, request_id="request-2", salt_out=LIE), WORKER, sequence=2)
        kept = evidence_of(found)[WORKER.peer_id, "failed"]
        assert kept == AuditEvidence(proof, tuple(map(sealed_of, found.orders)))
        assert len(kept.reports) == 3


async def test_the_evidence_of_a_false_report_is_that_report_too(tmp_path: Path, clock: VirtualClock) -> None:
    conducts: dict[str, Conduct] = {"replica 0": "lies", "replica 1": "honest", "replica 2": "honest"}
    async with court(tmp_path, clock, conducts) as found:
        liar = key_of("replica 0").peer_id
        audits = 0
        while (liar, "failed") not in evidence_of(found):
            found.settle()
            audits += 1
            await found.concluded(audits)
        kept = evidence_of(found)[liar, "failed"]
        assert kept is not None
        assert SEALED + liar.encode() in kept.reports


async def test_of_silence_there_is_no_evidence(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, three("silent")) as found:
        found.settle(lying=True)
        await found.concluded()
        assert evidence_of(found) == {(WORKER.peer_id, "inconclusive"): None}


async def test_a_report_beyond_the_bound_is_refused(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, {"replica 0": "silent"}) as found:
        found.settle()
        while not found.orders:
            with trio.move_on_after(0.1):
                await trio.Event().wait()
        order = found.orders[0]
        report = m.AuditReport(audit_id=order.audit_id, outcome="computed", output_digest=bytes(32))
        with pytest.raises(InvalidRequest):
            found.auditing.report(PeerId(order.auditor), report, bytes(MAX_AUDIT_REPORT_BYTES + 1))


# ---- Restarts ----


async def test_an_audit_that_was_under_way_begins_again_after_a_restart(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, three("silent")) as found:
        found.settle(lying=True)
        while not found.orders:
            with trio.move_on_after(0.1):
                await trio.Event().wait()
        audit_id = found.orders[0].audit_id
    async with court(tmp_path, clock, three()) as found:
        await found.concluded()
        assert found.verdicts() == [(WORKER.peer_id, "failed", "wrong_output")]
        assert {order.audit_id for order in found.orders} == {audit_id}
        assert found.counted("resumed") == 1
        assert found.store.open_audits() == []
    async with court(tmp_path, clock, three()) as found:
        with trio.move_on_after(2 * AUDITS_RESUMED_AFTER_S):
            await trio.Event().wait()
        assert not found.orders, "an audit that ended is over"


async def test_resumed_audits_do_not_wait_for_each_other(tmp_path: Path, clock: VirtualClock) -> None:
    """Each takes as long as its auditor may be silent; together they take no longer."""
    async with court(tmp_path, clock, {}) as found:
        for number in range(8):
            body = proof_body(1, request_id=f"request-{number}")
            found.store.begin_audit(OpenAudit(bytes([number]) * 16, "sampled", seal_proof(body, WORKER)))
    async with court(tmp_path, clock, {"replica 0": "silent"}) as found:
        with trio.fail_after(AUDITS_RESUMED_AFTER_S + 1.5 * AUDIT_REPORT_S):
            while len({order.audit_id for order in found.orders}) < 8:
                with trio.move_on_after(0.1):
                    await trio.Event().wait()
        assert found.counted("resumed") == 8


async def test_an_odd_audit_that_is_resumed_is_not_begun_a_second_time(tmp_path: Path, clock: VirtualClock) -> None:
    raw = seal_proof(proof_body(1), WORKER)
    async with court(tmp_path, clock, {}, AuditPolicy(share=0.0)) as found:
        found.judge(seal_proof(proof_body(0, salt_out="odd"), UPSTREAM))
        found.store.begin_audit(OpenAudit(bytes(16), "odd", raw))
    async with court(tmp_path, clock, three(), AuditPolicy(share=0.0)) as found:
        with trio.move_on_after(AUDITS_RESUMED_AFTER_S / 2):
            await trio.Event().wait()
        assert found.judge(raw).settled.code == "neighbour_mismatch"  # the worker sends what is held again
        await found.concluded()
        with trio.move_on_after(AUDITS_RESUMED_AFTER_S):
            await trio.Event().wait()
        assert {order.audit_id for order in found.orders} == {bytes(16)}
        assert found.verdicts() == [(WORKER.peer_id, "passed", None)]
        assert found.judge(raw).settled.status == "settled"


async def test_nobody_is_judged_twice_by_one_audit(tmp_path: Path, clock: VirtualClock) -> None:
    """The process died between the verdict and the end of the audit."""
    async with court(tmp_path, clock, three()) as found:
        judged = found.settle(lying=True)
        await found.concluded()
        balance = found.balance(WORKER.peer_id)
        proof = seal_proof(proof_body(1, request_id="request-1", salt_out=LIE), WORKER, sequence=1)
        assert judged.settled.status == "settled"
        found.store.begin_audit(OpenAudit(found.orders[0].audit_id, "sampled", proof))
    async with court(tmp_path, clock, three()) as found:
        await found.concluded()
        assert found.verdicts() == [(WORKER.peer_id, "failed", "wrong_output")]
        assert found.balance(WORKER.peer_id) == balance


async def test_what_is_no_proof_any_more_is_not_taken_up_again(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, three()) as found:
        found.store.begin_audit(OpenAudit(bytes(16), "sampled", b"damaged"))
    async with court(tmp_path, clock, three()) as found:
        with trio.move_on_after(2 * AUDITS_RESUMED_AFTER_S):
            await trio.Event().wait()
        assert found.store.open_audits() == []
        assert not found.orders


async def test_an_auditor_cannot_say_that_there_is_none(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, {"replica 0": "silent"}) as found:
        found.settle(lying=True)
        while not found.orders:
            with trio.move_on_after(0.1):
                await trio.Event().wait()
        order = found.orders[0]
        report = m.AuditReport(audit_id=order.audit_id, outcome="inconclusive", code="no_auditor")
        await found.report(PeerId(order.auditor), report)
        await found.concluded()
        assert found.verdicts() == [(WORKER.peer_id, "inconclusive", "no_auditor")]
        assert found.counted("no_auditor") == 0


async def test_who_declines_or_cannot_be_reached_is_passed_over(tmp_path: Path, clock: VirtualClock) -> None:
    conducts: dict[str, Conduct] = {"replica 0": "declines", "replica 1": "unreachable", "replica 2": "honest"}
    async with court(tmp_path, clock, conducts, AuditPolicy(share=1.0, recheck_share=1.0)) as found:
        found.settle()
        await found.concluded()
        assert found.verdicts() == [(WORKER.peer_id, "passed", None)]
        assert (found.counted("declined"), found.counted("unreachable")) == (1, 1)


async def test_silent_auditors_hold_up_an_audit_for_a_while_only(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, three("silent")) as found:
        found.settle(lying=True)
        await found.concluded()
        assert found.counted("no_report") == 3
        assert found.verdicts() == [(WORKER.peer_id, "inconclusive", "no_report")]


async def test_only_who_was_asked_reports_once_and_in_time(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, {"replica 0": "silent"}) as found:
        found.settle()
        while not found.orders:
            with trio.move_on_after(0.1):
                await trio.Event().wait()
        order = found.orders[0]
        true = m.AuditReport(audit_id=order.audit_id, outcome="computed", output_digest=digest_at(20, order.positions))
        with pytest.raises(NotAuthorized):
            await found.report(key_of("stranger").peer_id, true)
        with pytest.raises(NotAuthorized):
            await found.report(PeerId(order.auditor), true.model_copy(update={"audit_id": bytes(16)}))
        with pytest.raises(InvalidRequest):
            await found.report(PeerId(order.auditor), m.AuditReport(audit_id=order.audit_id, outcome="computed"))
        assert await found.report(PeerId(order.auditor), true) == m.Acknowledged()
        other = true.model_copy(update={"output_digest": bytes(32)})
        assert await found.report(PeerId(order.auditor), other) == m.Acknowledged()  # the first one counts
        await found.concluded()
        assert found.verdicts() == [(WORKER.peer_id, "passed", None)]
        with pytest.raises(NotAuthorized):
            await found.report(PeerId(order.auditor), true)


async def test_audits_beyond_the_bound_are_passed_over_and_hold_up_no_settlement(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with court(tmp_path, clock, {"replica 0": "silent"}) as found:
        for _ in range(MAX_OPEN_AUDITS + 5):  # before any audit begins
            assert found.settle().settled.status == "settled"
        assert found.counted("passed_over") == 5


async def test_an_owed_audit_that_finds_no_place_stays_owed(tmp_path: Path, clock: VirtualClock) -> None:
    """Else a worker gets out of it by proofs that come when as many audits wait as may."""
    async with court(tmp_path, clock, three(), AuditPolicy(share=0.0)) as found:
        for _ in range(MAX_OPEN_AUDITS + 1):  # before any audit begins
            found.auditing._sampler.owe(WORKER.peer_id)
            found.settle()
        assert found.counted("passed_over") == 1
        await found.concluded(MAX_OPEN_AUDITS)
        found.settle()
        with trio.move_on_after(60):
            await trio.Event().wait()
        assert found.counted("passed") == MAX_OPEN_AUDITS + 1


async def test_an_owed_audit_that_nobody_takes_stays_owed(tmp_path: Path, clock: VirtualClock) -> None:
    async with court(tmp_path, clock, three("declines"), AuditPolicy(share=0.0)) as found:
        found.auditing._sampler.owe(WORKER.peer_id)
        for audits in (1, 2):
            found.settle()
            with trio.move_on_after(60):
                await trio.Event().wait()
            assert found.counted("no_auditor") == audits


async def test_a_verdict_waits_for_a_ledger_that_cannot_be_written(tmp_path: Path, clock: VirtualClock) -> None:
    failures = iter([True, True, False])

    async def failing(write: Callable[[], object]) -> object:
        if next(failures, False):
            raise StorageError("the disk is full")
        return write()

    async with court(tmp_path, clock, three(), run_blocking=failing) as found:
        found.settle()
        await found.concluded()
        with trio.move_on_after(60):
            await trio.Event().wait()
        assert found.verdicts() == [(WORKER.peer_id, "passed", None)]
