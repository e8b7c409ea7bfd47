"""The operator: the token, what it may ask, and the log of what it did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from pydantic import SecretStr

from tessella_p2p.base.errors import (
    InvalidRequest,
    NotAuthorized,
    NotOperator,
    Overloaded,
    TessellaError,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.ledger.accounts import ISSUANCE
from tessella_p2p.ledger.audit_evidence import AuditEvidence
from tessella_p2p.ledger.changes import VerdictReached
from tessella_p2p.orchestrator.operator_log import OperatorLog
from tessella_p2p.wire import messages as m
from tests.orchestrator.paper_workers import CONTRACT, LAYERS, MODEL_ID, RECIPE, ROOT, key_of, register
from tests.orchestrator.test_orchestrator_service import Bench, run_bench, serve_stage

TOKEN = "the token of the operator"
OTHER_ROOT = bytes(reversed(range(32)))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


def prepared(made: Bench) -> Path:
    """The bench's orchestrator with a token and a log; the log's path."""
    path = made.path / "operator.log"
    made.orchestrator.operating.admin_token = SecretStr(TOKEN)
    made.orchestrator.operating.log = OperatorLog(path)
    return path


def published(**changes: object) -> m.PublishManifest:
    terms = {"recipe": RECIPE, "device": "*", "layer_mb": 10, "kv_mb": 2, "embedding_mb": 5, "head_mb": 5}
    fields: dict[str, object] = {
        "model_id": MODEL_ID,
        "manifest_root": OTHER_ROOT,
        "contract_hash": CONTRACT,
        "total_layers": LAYERS,
        "terms": (terms,),
    }
    return m.PublishManifest.model_validate({**fields, **changes})


async def operated(made: Bench, request: m.OperatorRequest) -> m.OperatorAnswer:
    return await made.orchestrator.operate(TOKEN, request, where="http 127.0.0.1")


# ---- The token ----


@pytest.mark.parametrize("token", ["", "x", TOKEN[:-1], TOKEN + " ", TOKEN.upper(), "ü" * 20])
def test_another_token_is_refused_and_nothing_is_done_or_noted(tmp_path: Path, token: str) -> None:
    async def scenario(made: Bench) -> None:
        log = prepared(made)
        victim = key_of("victim").peer_id
        with pytest.raises(NotOperator):
            await made.orchestrator.operate(token, m.Slash(peer_id=victim, micro_credits=5, reason="theft"))
        assert made.store.head().sequence == 0
        assert log.read_bytes() == b""
        assert made.orchestrator.outcomes["operate:admin_token_required"] == 1

    run_bench(scenario, tmp_path)


def test_without_a_token_of_its_own_nobody_operates_an_orchestrator(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        for token in ("", "None", TOKEN):
            with pytest.raises(NotOperator, match="has no admin token"):
                await made.orchestrator.operate(token, m.ReadLedger())

    run_bench(scenario, tmp_path)


def test_the_token_works_over_the_mesh_whoever_signs(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        log = prepared(made)
        client = await made.client("operator")
        answer = await client.ask(m.Operate(admin_token=TOKEN, request=m.ReadLedger()), m.LedgerLines)
        assert answer == m.LedgerLines(head=0, entries=())
        with pytest.raises(NotOperator):
            await client.call(m.Operate(admin_token="another", request=m.ReadLedger()))
        assert [line["where"] for line in lines_of(log)] == [f"p2p {key_of('operator').peer_id}"]

    run_bench(scenario, tmp_path)


def test_a_replaced_token_counts_at_once(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        prepared(made)
        made.orchestrator.operating.admin_token = SecretStr("another token than before")
        with pytest.raises(NotOperator):
            await operated(made, m.ReadLedger())
        await made.orchestrator.operate("another token than before", m.ReadLedger())

    run_bench(scenario, tmp_path)


# ---- The log ----


def test_an_action_is_noted_before_and_after_it_and_a_read_once(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        log = prepared(made)
        victim = key_of("victim").peer_id
        await operated(made, m.Slash(peer_id=victim, micro_credits=5, reason="theft"))
        await operated(made, m.ReadAccounts())
        with pytest.raises(InvalidRequest):
            await operated(made, m.Slash(peer_id=victim, reason="nothing"))
        lines = lines_of(log)
        assert [(line["kind"], line["outcome"]) for line in lines] == [
            ("slash", "begun"),
            ("slash", "done"),
            ("read_accounts", "done"),
            ("slash", "begun"),
            ("slash", "invalid_request"),
        ]
        assert lines[0]["request"] == {"peer_id": victim, "micro_credits": 5, "reason": "theft"}
        assert lines[0]["action"] == lines[1]["action"] != lines[3]["action"] == lines[4]["action"]
        assert {line["where"] for line in lines} == {"http 127.0.0.1"}
        assert lines[0]["at"].startswith("2027-01-15T08:00:0")
        assert "nothing is to be done" in lines[4]["reason"]
        assert TOKEN not in log.read_text(encoding="ascii")

    run_bench(scenario, tmp_path)


def test_what_cannot_be_noted_is_not_done(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        prepared(made)
        log = made.orchestrator.operating.log
        assert log is not None
        log.close()
        with pytest.raises(Overloaded):
            await operated(made, m.Slash(peer_id=key_of("victim").peer_id, micro_credits=5, reason="theft"))
        assert made.store.head().sequence == 0

    run_bench(scenario, tmp_path)


def test_the_log_goes_on_after_a_restart_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "operator.log"
    for _ in range(2):
        log = OperatorLog(path)
        log.write(1_800_000_000_000, "p2p x", "slash", {"reason": "a\nb "}, "done")
        log.close()
    first, second = lines_of(path)
    assert first["action"] != second["action"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_after_a_line_that_a_full_disk_cut_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "operator.log"
    log = OperatorLog(path)
    log.write(1_800_000_000_000, "p2p x", "slash", {}, "done")
    for _ in range(2):
        with path.open("ab") as file:
            file.write(b'{"at": "2027-01-15T08:')
        log.write(1_800_000_000_000, "p2p x", "slash", {}, "begun")
        log.close()
        log = OperatorLog(path)
    log.close()
    whole = [line for line in path.read_text(encoding="ascii").splitlines() if line.endswith("}")]
    assert [json.loads(line)["outcome"] for line in whole] == ["done", "begun", "begun"]


def test_a_log_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "operator.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TessellaError, match=r"operator\.log: the operator's log cannot be written"):
        OperatorLog(tmp_path / "operator.log")


# ---- Slashing ----


def test_a_slash_takes_credits_shows_in_the_ledger_and_keeps_the_sum_at_nothing(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        prepared(made)
        victim = key_of("victim").peer_id
        answer = await operated(made, m.Slash(peer_id=victim, micro_credits=7, reason="it\nlied"))
        assert isinstance(answer, m.Slashed)
        assert (answer.account.micro_credits, answer.account.tier) == (-7, "Leech")
        assert (answer.reputation.slashes, answer.reputation.blacklisted) == (1, False)
        accounts = await operated(made, m.ReadAccounts())
        assert isinstance(accounts, m.AccountEntries)
        assert {one.name: one.micro_credits for one in accounts.accounts} == {ISSUANCE: 7, victim: -7}
        ledger = await operated(made, m.ReadLedger())
        assert isinstance(ledger, m.LedgerLines)
        (line,) = ledger.entries
        assert (line.sequence, line.kind, line.peer_id, line.micro_credits) == (1, "slashed", victim, -7)
        assert line.text == "by operator: it lied"

    run_bench(scenario, tmp_path)


def test_the_operator_reads_what_a_verdict_rests_on(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        prepared(made)
        reached = VerdictReached(audit_id=bytes(16), peer=key_of("liar").peer_id, verdict="failed", reason="wrong")
        made.store.record_verdict(reached, 1, None, AuditEvidence(b"proof", (b"report", b"another")))
        ledger = await operated(made, m.ReadLedger())
        assert isinstance(ledger, m.LedgerLines)
        assert [(line.sequence, line.reports) for line in ledger.entries] == [(1, 2)]
        evidence = await operated(made, m.ReadEvidence(sequence=1))
        assert evidence == m.Evidence(sequence=1, proof=b"proof", reports=(b"report", b"another"))
        with pytest.raises(InvalidRequest) as raised:
            await operated(made, m.ReadEvidence(sequence=2))
        assert raised.value.param == "sequence"

    run_bench(scenario, tmp_path)


def test_a_blacklisted_worker_leaves_the_mesh_at_once_and_may_come_back_when_taken_off(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        prepared(made)
        client, _ = await serve_stage(made, "worker")
        worker = key_of("worker").peer_id
        answer = await operated(made, m.Slash(peer_id=worker, reason="caught", blacklist=True))
        assert isinstance(answer, m.Slashed)
        assert answer.reputation.blacklisted
        assert answer.account.micro_credits == 0
        assert made.orchestrator.membership.coverage(ROOT).health == "incomplete"
        await operated(made, m.Slash(peer_id=worker, reason="pardoned", blacklist=False))
        await client.ask(register(), m.Assigned)

    run_bench(scenario, tmp_path)


@pytest.mark.parametrize("amount", [2**53 - 1])
def test_no_slash_takes_a_balance_out_of_what_a_message_can_say(tmp_path: Path, amount: int) -> None:
    async def scenario(made: Bench) -> None:
        prepared(made)
        slash = m.Slash(peer_id=key_of("victim").peer_id, micro_credits=amount, reason="again")
        await operated(made, slash)
        with pytest.raises(InvalidRequest):
            await operated(made, slash)
        await operated(made, m.ReadAccounts(peer_id=slash.peer_id))
        await operated(made, m.ReadAccounts())

    run_bench(scenario, tmp_path)


# ---- Pages ----


def test_accounts_reputations_and_the_ledger_are_read_by_pages(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        prepared(made)
        peers = sorted(key_of(f"peer {number}").peer_id for number in range(5))
        for peer in peers:
            await operated(made, m.Slash(peer_id=peer, micro_credits=1, reason="x" * 512))
        found: list[str] = []
        more, after = True, None
        while more:
            page = await operated(made, m.ReadReputation(after=after, limit=2))
            assert isinstance(page, m.ReputationEntries)
            found += [entry.peer_id for entry in page.entries]
            more, after = page.more, PeerId(found[-1])
        assert found == peers
        accounts = await operated(made, m.ReadAccounts(limit=5))
        assert isinstance(accounts, m.AccountEntries)
        rest = await operated(made, m.ReadAccounts(after=accounts.accounts[-1].name, limit=5))
        assert isinstance(rest, m.AccountEntries)
        assert (len(accounts.accounts), accounts.more, len(rest.accounts), rest.more) == (5, True, 1, False)
        newest = await operated(made, m.ReadLedger(limit=3))
        assert isinstance(newest, m.LedgerLines)
        assert [line.sequence for line in newest.entries] == [5, 4, 3]
        older = await operated(made, m.ReadLedger(limit=3, before=3))
        assert isinstance(older, m.LedgerLines)
        assert [line.sequence for line in older.entries] == [2, 1]
        assert older.head == 5

    run_bench(scenario, tmp_path)


def test_a_stranger_has_a_clean_slate(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        prepared(made)
        answer = await operated(made, m.ReadReputation(peer_id=key_of("stranger").peer_id))
        assert isinstance(answer, m.ReputationEntries)
        assert [(entry.score, entry.blacklisted) for entry in answer.entries] == [(1000, False)]

    run_bench(scenario, tmp_path)


# ---- Manifests ----


def test_a_published_manifest_is_what_workers_register_with_also_after_a_restart(tmp_path: Path) -> None:
    async def before(made: Bench) -> None:
        prepared(made)
        answer = await operated(made, published())
        assert answer == m.ManifestSummary(
            model_id=MODEL_ID, manifest_root=OTHER_ROOT, contract_hash=CONTRACT, total_layers=LAYERS
        )

    async def after(made: Bench) -> None:
        assert made.orchestrator.catalogue.by_name(MODEL_ID).manifest_root == OTHER_ROOT
        client = await made.client("worker")
        assert (await client.ask(register(manifest_root=OTHER_ROOT), m.Assigned)).model_id == MODEL_ID
        with pytest.raises(InvalidRequest, match="not served"):
            await client.call(register(manifest_root=bytes(32)))

    run_bench(before, tmp_path)
    run_bench(after, tmp_path)


def test_the_manifest_that_was_published_last_is_served_after_a_restart_whatever_the_clock_said(tmp_path: Path) -> None:
    first, second, third = (bytes([number]) * 32 for number in (9, 8, 7))

    async def ahead(made: Bench) -> None:
        prepared(made)
        await trio.sleep(60.0)
        await operated(made, published(manifest_root=first))

    async def set_back(made: Bench) -> None:
        prepared(made)
        await operated(made, published(manifest_root=second))
        await operated(made, published(manifest_root=third))

    async def after(made: Bench) -> None:
        assert made.orchestrator.catalogue.by_name(MODEL_ID).manifest_root == third

    for scenario in (ahead, set_back, after):
        run_bench(scenario, tmp_path)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"manifest_root": ROOT, "model_id": "another"}, "model_id"),
        ({"manifest_root": ROOT, "contract_hash": bytes(32)}, "contract_hash"),
        ({"manifest_root": ROOT, "total_layers": LAYERS + 1}, "total_layers"),
    ],
)
def test_a_root_stands_for_one_model(tmp_path: Path, changes: dict[str, object], param: str) -> None:
    async def scenario(made: Bench) -> None:
        prepared(made)
        with pytest.raises(InvalidRequest) as refused:
            await operated(made, published(**changes))
        assert refused.value.param == param
        assert made.store.models() == {}
        assert [model.manifest_root for model in made.orchestrator.catalogue.models()] == [ROOT]

    run_bench(scenario, tmp_path)


@pytest.mark.parametrize(
    "terms",
    [
        {"layer_mb": 0, "kv_mb": 0},
        {"recipe": f"{RECIPE}@class"},
        {"device": "*", "recipe": RECIPE, "twice": True},
    ],
)
def test_terms_by_which_nothing_can_be_assigned_are_refused(tmp_path: Path, terms: dict[str, object]) -> None:
    async def scenario(made: Bench) -> None:
        prepared(made)
        entry = m.TermsEntry(recipe=RECIPE, device="*", layer_mb=1, kv_mb=1, embedding_mb=1, head_mb=1)
        changed = entry.model_copy(update={name: value for name, value in terms.items() if name != "twice"})
        with pytest.raises(InvalidRequest) as refused:
            await operated(made, published(terms=(changed, changed) if "twice" in terms else (changed,)))
        assert refused.value.param == "terms"
        assert made.store.models() == {}

    run_bench(scenario, tmp_path)


# ---- The allow-list ----


def test_who_is_taken_off_the_allow_list_leaves_at_once(tmp_path: Path) -> None:
    async def scenario(made: Bench) -> None:
        prepared(made)
        friend, _ = await serve_stage(made, "friend")
        stranger, _ = await serve_stage(made, "stranger")
        await made.orchestrator.admit_only(frozenset({key_of("friend").peer_id}))
        states = {member.peer_id: member.state for member in made.orchestrator.membership.members()}
        assert states[key_of("stranger").peer_id] == "Left"
        assert states[key_of("friend").peer_id] == "Healthy"
        with pytest.raises(NotAuthorized):
            await stranger.call(m.ReadCredits())
        await friend.call(m.ReadCredits())
        await made.orchestrator.admit_only(None)
        await stranger.call(m.ReadCredits())

    run_bench(scenario, tmp_path)
