"""Heads that prove another input than they signed for, heads that sign for nothing, entries that lie about either: in a whole mesh."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from simulations.mesh import SimulatedMesh, SimulatedNode
from tessella_p2p.audits.judging import FALSE_INPUT, HISTORY_WITHHELD
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import FINAL_RECEIPT_S
from tessella_p2p.ledger.changes import VerdictReached
from tessella_p2p.net.virtual_clock import VirtualClock
from tessella_p2p.node.assembly import NodeRoles
from tessella_p2p.stages.history import Track, TrackKey
from tessella_p2p.stages.opening import Opening
from tessella_p2p.stages.work import WorkMeter
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import open_envelope, seal
from tessella_p2p.wire.frames import Frame
from tessella_p2p.worker.stage_session import StageSession
from tests.mesh.test_audits_in_mesh import (
    PROMPT,
    ask_and_settle,
    audited_mesh,
    audits,
    innocents_are_whole,
    layers_of,
    verdicts,
    verdicts_on,
)
from tests.mesh.test_simulated_mesh import all_settled, eventually
from tests.worker.hostile_mesh import pass_time


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def roles_of(node: SimulatedNode) -> NodeRoles:
    assert node.roles is not None
    return node.roles


def heads_of(mesh: SimulatedMesh) -> list[SimulatedNode]:
    return [node for node in mesh.nodes if layers_of(node).start == 0]


def entry_of(mesh: SimulatedMesh) -> SimulatedNode:
    """One that is no head itself."""
    return next(node for node in mesh.nodes if layers_of(node).start)


def prove_false_inputs(node: SimulatedNode) -> None:
    """Let a worker do its work, and prove that it was asked something else."""
    proofs = roles_of(node).proofs
    honest = proofs._seal

    def lie(opening: Opening, meter: WorkMeter) -> bytes:
        assert opening.orchestrator is not None
        envelope = open_envelope(honest(opening, meter), m.PROOF, now_ms=None, audience=opening.orchestrator)
        body = envelope.message(m.Proof).model_copy(update={"input_digest": node.rng.randbytes(32)})
        return seal(
            node.key,
            m.PROOF,
            body,
            sequence=envelope.sequence,
            now_ms=envelope.issued_at,
            audience=opening.orchestrator,
            ttl_ms=envelope.expires_at - envelope.issued_at,
        )

    proofs._seal = lie  # type: ignore[method-assign]


async def test_a_head_that_proves_another_input_is_failed_on_its_own_two_signatures(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with audited_mesh(tmp_path, clock, 3) as mesh:
        entry, liars = entry_of(mesh), heads_of(mesh)
        for liar in liars:
            prove_false_inputs(liar)
        for number in range(30):
            await mesh.ask(entry, [number, *PROMPT], 10)
            await pass_time(5.0)  # for proofs and audits
            if any(mesh.store.is_blacklisted(liar.peer_id) for liar in liars):
                break
        else:
            raise AssertionError(f"no liar was caught: {verdicts(mesh)}")
        journal = [(sequence, each.change) for sequence, each in mesh.store.journal()]
        against = [(sequence, each) for sequence, each in journal if isinstance(each, VerdictReached) and each.code]
        assert {(each.verdict, each.code) for _, each in against} == {("failed", FALSE_INPUT)}
        assert all(each.adjudicator is None for _, each in against), "nobody else is asked"
        for sequence, each in against:
            check_evidence(mesh, sequence, PeerId(each.peer), entry.peer_id)
        assert innocents_are_whole(mesh, *liars)


def check_evidence(mesh: SimulatedMesh, sequence: int, liar: PeerId, entry: PeerId) -> None:
    """Anybody can see from what is kept that the worker signed for two inputs."""
    evidence = mesh.store.audit_evidence(sequence)
    assert evidence is not None
    orchestrator = mesh.orchestrator_key.peer_id
    proof = open_envelope(evidence.proof, m.PROOF, now_ms=None, audience=orchestrator, signer=liar).message(m.Proof)
    (report,) = (
        open_envelope(raw, m.REQUEST, now_ms=None, audience=orchestrator).message(m.RequestBody).body
        for raw in evidence.reports
    )
    assert isinstance(report, m.AuditReport)
    assert report.receipt is not None
    receipt = open_envelope(report.receipt, m.RECEIPT, now_ms=None, audience=entry, signer=liar).message(m.ReceiptBody)
    assert (receipt.session, receipt.epoch, receipt.positions) == (proof.session, proof.epoch, proof.positions)
    assert receipt.digest != proof.input_digest


async def test_an_entry_that_withholds_the_receipt_counts_against_itself_alone(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with audited_mesh(tmp_path, clock, 3) as mesh:
        entry = entry_of(mesh)
        history = roles_of(entry)._history
        find = history.find

        def bare(key: TrackKey) -> Track | None:
            track = find(key)
            if track is not None:
                track.receipt = None
            return track

        history.find = bare  # type: ignore[method-assign]
        for head in heads_of(mesh):
            prove_false_inputs(head)
        await ask_and_settle(mesh, entry)
        assert sum((verdicts_on(mesh, head) for head in heads_of(mesh)), Counter()) == {"inconclusive": 1}
        assert {each.peer for each in verdicts(mesh) if each.code == HISTORY_WITHHELD} == {entry.peer_id}
        assert innocents_are_whole(mesh)


async def test_no_entry_that_shows_another_prompt_gets_an_honest_head_failed(
    tmp_path: Path, clock: VirtualClock
) -> None:
    async with audited_mesh(tmp_path, clock, 3) as mesh:
        entry = entry_of(mesh)
        history = roles_of(entry)._history
        begin = history.begin

        def forged(key: TrackKey, opened: bytes) -> Track:
            track = begin(key, opened)
            if key.side == "input" and key.audited in {head.peer_id for head in heads_of(mesh)}:
                return _Forged(history, key, opened, track)
            return track

        class _Forged(Track):
            """Keeps other tokens than were sent."""

            __slots__ = ("_real",)

            def __init__(self, *args: object) -> None:
                *made, self._real = args
                super().__init__(*made)  # type: ignore[arg-type]

            def note(self, frame: Frame, data: bytes | None = None) -> None:
                body = bytes(frame.body)
                other = bytes([body[0] ^ 1]) + body[1:]
                changed = Frame(
                    frame.kind,
                    frame.session,
                    frame.epoch,
                    frame.step,
                    frame.position,
                    frame.rows,
                    frame.dtype,
                    frame.flags,
                    (),
                    other,
                )
                assert isinstance(self._real, Track)
                self._real.note(changed)

            def note_receipt(self, raw: bytes, positions: int) -> None:
                assert isinstance(self._real, Track)
                self._real.note_receipt(raw, positions)

            def end(self, now: float) -> None:
                assert isinstance(self._real, Track)
                self._real.end(now)

        history.begin = forged  # type: ignore[method-assign]
        await ask_and_settle(mesh, entry)
        await ask_and_settle(mesh, entry)
        assert sum((verdicts_on(mesh, head) for head in heads_of(mesh)), Counter()) == {"inconclusive": 2}
        assert {each.peer for each in verdicts(mesh) if each.code == HISTORY_WITHHELD} == {entry.peer_id}
        assert innocents_are_whole(mesh)


@pytest.mark.parametrize("how", ["none", "other bytes", "an old one"])
async def test_a_head_that_does_not_sign_for_what_it_got_is_dropped(
    tmp_path: Path, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with audited_mesh(tmp_path, clock, 3) as mesh:
        entry = entry_of(mesh)
        liars = {head.peer_id for head in heads_of(mesh)[:2]}
        sends = StageSession._send_receipt
        measures = WorkMeter.input_receipt

        def lie(session: StageSession) -> None:
            if session._context.key.peer_id not in liars or session.opening.index:
                sends(session)
            elif how == "other bytes":
                session._meter.input_receipt = lambda: (measures(session._meter)[0], b"x" * 32)  # type: ignore[method-assign]
                sends(session)
            elif how == "an old one" and not session._receipted:
                sends(session)

        monkeypatch.setattr(StageSession, "_send_receipt", lie)
        for number in range(6):
            finished = await mesh.ask(entry, [number, *PROMPT], 10)
            assert finished.token_ids == mesh.expected([number, *PROMPT], 10)
            await eventually(lambda: all_settled(mesh), 60.0)
        failures = roles_of(entry).entry.peer_failures
        if how == "an old one":  # it came at the end of a short session: that is all that there is to sign
            assert not failures
            return
        assert failures
        assert set(failures) <= liars
        await eventually(lambda: audits(mesh) > 0, 600.0)
        assert innocents_are_whole(mesh)


async def test_what_a_head_signed_for_is_kept_with_the_history(tmp_path: Path, clock: VirtualClock) -> None:
    async with audited_mesh(tmp_path, clock, 1) as mesh:
        entry, (head,) = entry_of(mesh), heads_of(mesh)
        await mesh.ask(entry, PROMPT, 20)
        (track,) = [track for key, track in roles_of(entry)._history._tracks.items() if key.audited == head.peer_id]
        await eventually(lambda: track.receipted == len(PROMPT) + 19, FINAL_RECEIPT_S)
        assert track.receipt is not None
        opened = open_envelope(
            track.receipt, m.RECEIPT, now_ms=None, audience=entry.peer_id, signer=head.peer_id
        ).message(m.ReceiptBody)
        assert (opened.session, opened.epoch) == (track.key.session, track.key.epoch)
