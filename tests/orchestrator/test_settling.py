"""Grants and settlement beside the ledger: who gets a ticket, at which tier, and who is told of proofs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from tessella_p2p.base.errors import Blacklisted
from tessella_p2p.base.limits import HEARTBEAT_S, MICRO_PER_CREDIT, PROOF_GRACE_S, TICKET_OPEN_S, TICKET_SETTLE_S
from tessella_p2p.ledger.store import Judged
from tessella_p2p.wire.messages import Credits, Granted, ReadCredits, SessionGrant, WorkDone, WorkSettled
from tests.ledger.proving import Stage, proof_body, seal_proof
from tests.orchestrator.paper_workers import MODEL, MODEL_ID, NOW, RECIPE, ROOT, key_of, lease_of
from tests.orchestrator.test_orchestrator_service import Bench, run_bench, serve_stage

ALONE = "worker 0"


def grant(request_id: str = "request-1") -> SessionGrant:
    return SessionGrant(request_id=request_id, model_id=MODEL_ID, manifest_root=ROOT, recipe=RECIPE, max_positions=500)


async def proven(made: Bench, receipted: int | None = -1) -> bytes:
    """The proof of a worker that serves every layer, for a request of its own."""
    client, lease = await serve_stage(made, ALONE)
    granted = await client.ask(grant(), Granted)
    body = proof_body(
        0,
        route=(Stage(key_of(ALONE), lease_of(lease).layers),),
        opened_at=made.clock.unix_ms(),
        sealed_ticket=granted.ticket,
        sealed_lease=lease,
        requester=key_of(ALONE),
        receipted=receipted,
    )
    return seal_proof(body, key_of(ALONE))


def test_a_blacklisted_requester_gets_no_ticket_until_it_is_taken_off(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        entry = await made.client("entry")
        made.store.set_blacklisted(key_of("entry").peer_id, True, "it lied", made.clock.unix_ms())
        with pytest.raises(Blacklisted):
            await entry.ask(grant(), Granted)
        made.store.set_blacklisted(key_of("entry").peer_id, False, "it repented", made.clock.unix_ms())
        assert (await entry.ask(grant(), Granted)).tier == "Leech"

    run_bench(scenario, tmp_path)


def test_credits_of_other_orchestrators_count_towards_the_tier(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        entry = await made.client("entry")
        foreign = {key_of("entry").peer_id: 2_000 * MICRO_PER_CREDIT}
        made.orchestrator.settling.foreign_balance = lambda peer: foreign.get(peer, 0)
        assert (await entry.ask(grant(), Granted)).tier == "VIP"
        assert (await entry.ask(ReadCredits(), Credits)).tier == "VIP"
        other = await made.client("another entry")
        assert (await other.ask(grant(), Granted)).tier == "Leech"

    run_bench(scenario, tmp_path)


def test_observers_are_told_of_each_proof_and_of_the_entry_that_it_made(tmp_path: Path) -> None:
    told: list[tuple[bytes, Judged]] = []

    async def scenario(made: Bench) -> None:
        made.orchestrator.settling.observers.append(lambda raw, judged: told.append((raw, judged)))
        proof = await proven(made)
        client = await made.client(ALONE)
        await client.ask(WorkDone(proofs=(b"junk", proof, proof)), WorkSettled)
        assert [raw for raw, _ in told] == [b"junk", proof, proof]
        statuses = [judged.settled.status for _, judged in told]
        assert statuses == ["refused", "settled", "duplicate"]
        sequence = told[1][1].sequence
        assert sequence is not None
        assert made.store.proof(sequence) == proof
        assert told[1][1].work is not None
        assert (told[0][1].sequence, told[0][1].work, told[2][1].sequence) == (None, None, None)

    run_bench(scenario, tmp_path)


def test_whoever_uploads_junk_gets_one_line_in_the_log_for_each_reason(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        client = await made.client(ALONE)
        unreceipted = await proven(made, receipted=None)
        with capture_logs() as lines:
            await client.ask(WorkDone(proofs=(b"junk", unreceipted, *(b"more junk",) * 60)), WorkSettled)
        judged = sorted(
            (line["code"], line["num"], line["worker"]) for line in lines if line["event"] == "proof_judged"
        )
        assert judged == [("malformed_message", 61, None), ("no_receipt", 1, key_of(ALONE).peer_id)]
        assert made.orchestrator.outcomes["proof:refused"] == 61

    run_bench(scenario, tmp_path)


def test_a_model_that_is_published_while_it_runs_has_a_tail_as_well(tmp_path: Path) -> None:
    """The layers by which a tail is known follow the catalogue."""

    async def scenario(made: Bench) -> None:
        catalogue = made.orchestrator.catalogue
        other = bytes(range(32, 64))
        assert other not in catalogue.total_layers
        view = catalogue.total_layers
        catalogue.publish(replace(MODEL, model_id="another", manifest_root=other))
        assert view[other] == MODEL.total_layers
        assert view[ROOT] == MODEL.total_layers

    run_bench(scenario, tmp_path)


def test_proofs_that_nobody_needs_any_more_are_dropped_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def come_to(seconds: float) -> None:
        """Move the date to so long after the start, and let the orchestrator notice."""
        monkeypatch.setattr("tests.orchestrator.test_orchestrator_service.NOW", NOW + round(seconds * 1000))
        await trio.sleep(HEARTBEAT_S + 1.0)

    async def scenario(made: Bench) -> None:
        client = await made.client(ALONE)
        await client.ask(WorkDone(proofs=(await proven(made),)), WorkSettled)
        assert "tickets" in made.store.content()
        await come_to(TICKET_OPEN_S + TICKET_SETTLE_S)
        assert not {"tickets", "proofs", "expiry"} & set(made.store.content())
        assert made.store.proof(1) is not None
        await come_to(TICKET_OPEN_S + TICKET_SETTLE_S + PROOF_GRACE_S)
        assert made.store.proof(1) is None
        assert made.store.content() == made.store.replay().content()

    run_bench(scenario, tmp_path)
