"""Another ledger is followed entry by entry; what can be checked is checked, and every lie leaves its evidence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import MalformedMessage, RemoteProtocolError, VersionMismatch
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import MAX_KEPT_RUMOURS
from tessella_p2p.ledger.chain import START, Head
from tessella_p2p.ledger.changes import (
    BlacklistChanged,
    ChainBegun,
    ProofSettled,
    Slashed,
    TicketsExpired,
    decode_entry,
)
from tessella_p2p.ledger.federation import (
    Deceived,
    Evidence,
    MirroredLedger,
    decode_evidence,
    encode_evidence,
    open_head,
)
from tessella_p2p.ledger.tables import DictTables
from tessella_p2p.wire import cbor
from tessella_p2p.wire.envelope import open_envelope, seal
from tessella_p2p.wire.messages import LEDGER_ENTRY, LEDGER_HEAD, LedgerEntry, LedgerHead
from tests.ledger.paper_issuer import PaperIssuer, proof_of
from tests.ledger.proving import (
    HOUR,
    LAYERS,
    NOW,
    ORCHESTRATOR,
    ROOT,
    ROUTE,
    WEEK,
    WORKERS,
    credits_for,
    key_of,
)

LAYERS_OF = {ROOT: LAYERS}
MIDDLE = WORKERS[1].peer_id
OTHER = key_of("another orchestrator")


def mirror_of(issuer: PaperIssuer) -> MirroredLedger:
    return MirroredLedger(DictTables(), issuer.key.peer_id, issuer.chain)


def follow(mirror: MirroredLedger, issuer: PaperIssuer, limit: int = 500) -> Head:
    """Pull until the end."""
    while True:
        entries, head = issuer.page(mirror.cursor.sequence, limit)
        told = mirror.take(entries, head, LAYERS_OF)
        if mirror.cursor.sequence == told.sequence:
            return told


def three_stages() -> PaperIssuer:
    issuer = PaperIssuer()
    for index in range(3):
        issuer.work(index=index)
    return issuer


# ---- What is believed ----


def test_a_true_ledger_is_followed_to_its_end_and_says_the_same_of_everybody() -> None:
    issuer = three_stages()
    issuer.apply(Slashed(peer=MIDDLE, micro_credits=1_000_000, reason="test", by="operator"))
    issuer.apply(BlacklistChanged(peer=MIDDLE, blacklisted=True, reason="test"))
    mirror = mirror_of(issuer)
    assert follow(mirror, issuer) == issuer.head == mirror.cursor
    for stage in ROUTE:
        assert mirror.counted(stage.key.peer_id) == issuer.state.accounts.get(stage.key.peer_id).micro_credits
    assert mirror.counted(MIDDLE) == credits_for(LayerRange(10, 20), 300) - 1_000_000


@settings(max_examples=25, deadline=None)
@given(
    works=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from([100, 200, 300])), max_size=12),
    limit=st.integers(1, 5),
)
def test_pages_of_any_size_bring_the_same_cursor_and_balances(works: list[tuple[int, int, int]], limit: int) -> None:
    issuer = PaperIssuer()
    for request, index, positions in works:
        issuer.work(f"request-{request}", index, positions)
    mirror = mirror_of(issuer)
    follow(mirror, issuer, limit)
    assert mirror.cursor == issuer.head
    for stage in ROUTE:
        assert mirror.counted(stage.key.peer_id) == issuer.state.accounts.get(stage.key.peer_id).micro_credits


def test_what_is_added_later_is_pulled_from_the_cursor_on() -> None:
    issuer = three_stages()
    mirror = mirror_of(issuer)
    follow(mirror, issuer)
    issuer.work("request-2")
    follow(mirror, issuer)
    assert mirror.cursor.sequence == 4
    assert mirror.counted(MIDDLE) == 2 * credits_for(LayerRange(10, 20), 300)


def test_an_entry_without_its_proof_keeps_its_place_and_counts_for_nothing() -> None:
    issuer = three_stages()
    issuer.entries[1] = (issuer.entries[1][0], None)
    mirror = mirror_of(issuer)
    assert follow(mirror, issuer) == issuer.head
    assert mirror.counted(MIDDLE) == 0
    assert mirror.counted(WORKERS[0].peer_id) == credits_for(LayerRange(0, 10), 300)


def test_an_entry_that_was_proven_in_an_earlier_chain_counts_without_its_proof() -> None:
    before = three_stages()
    old = mirror_of(before)
    follow(old, before)

    def proven_before(sequence: int, digest: bytes) -> bool:
        link = old.link(sequence)
        return link is not None and link.proven and link.digest == digest

    after = PaperIssuer(chain=1, entries=[(entry, None) for entry, _ in before.entries])
    mirror = mirror_of(after)
    mirror.take(*after.page(), LAYERS_OF, proven_before)
    assert mirror.counted(MIDDLE) == credits_for(LayerRange(10, 20), 300)
    other = PaperIssuer(chain=1)
    other.work("request-2")
    other.entries = [(entry, None) for entry, _ in other.entries]
    fresh = mirror_of(other)
    fresh.take(*other.page(), LAYERS_OF, proven_before)
    assert fresh.counted(MIDDLE) == 0


def test_what_somebody_owes_elsewhere_is_not_owed_here() -> None:
    issuer = three_stages()
    issuer.apply(Slashed(peer=MIDDLE, micro_credits=2**40, reason="test", by="operator"))
    mirror = mirror_of(issuer)
    follow(mirror, issuer)
    assert mirror.counted(MIDDLE) == 0


def test_tickets_are_forgotten_as_the_issuer_forgot_them() -> None:
    issuer = three_stages()
    issuer.apply(TicketsExpired(before=NOW + WEEK), NOW + WEEK)
    mirror = mirror_of(issuer)
    assert follow(mirror, issuer) == issuer.head


def test_a_new_chain_is_told_and_takes_nothing() -> None:
    issuer = three_stages()
    mirror = mirror_of(issuer)
    follow(mirror, issuer)
    before = mirror.cursor
    restored = PaperIssuer(chain=1, entries=issuer.entries[:1])
    assert mirror.take([], restored.sealed_head(), LAYERS_OF).chain == 1
    assert mirror.cursor == before


# ---- What is refused, with evidence ----


def settled_entry(issuer: PaperIssuer, sequence: int = 1) -> ProofSettled:
    change = decode_entry(issuer.entries[sequence - 1][0]).change
    assert isinstance(change, ProofSettled)
    return change


Edit = Callable[[ProofSettled], dict[str, object]]
EDITS: dict[str, Edit] = {
    "more is paid": lambda change: {"micro_credits": change.micro_credits + 1_000},
    "less is paid": lambda change: {"micro_credits": change.micro_credits - 1_000},
    "somebody else is paid": lambda _: {"worker": WORKERS[5].peer_id},
    "another requester": lambda _: {"requester": WORKERS[5].peer_id},
    "another request": lambda _: {"request_id": "another"},
    "it may be settled for longer": lambda change: {"settle_before": change.settle_before + HOUR},
    "another session": lambda _: {"session": bytes(16)},
    "another epoch": lambda _: {"epoch": 7},
    "more layers": lambda _: {"layers": (9, 20), "micro_credits": credits_for(LayerRange(9, 20), 300)},
    "more positions than the receipt covers": lambda _: {
        "paid_positions": 400,
        "micro_credits": credits_for(LayerRange(10, 20), 400),
    },
    "more positions than the receipt covers, and more to come": lambda _: {
        "paid_positions": 400,
        "micro_credits": credits_for(LayerRange(10, 20), 400),
        "complete": False,
    },
    "less paid and called complete": lambda _: {
        "paid_positions": 200,
        "micro_credits": credits_for(LayerRange(10, 20), 200),
    },
    "another payload": lambda _: {"payload_digest": bytes(32)},
    "another neighbour": lambda _: {"upstream": WORKERS[5].peer_id},
    "another route": lambda _: {"route": bytes(32)},
    "no route": lambda _: {"route": None},
    "digests left out": lambda change: {"points": change.points[1:]},
    "the requester pays what it has not": lambda _: {"requester_pays": True},
}


def assert_convicted(issuer: PaperIssuer, error: Deceived, kind: str, sequence: int) -> Evidence:
    """The evidence names the issuer, and holds what it signed."""
    evidence = error.evidence
    assert (evidence.kind, evidence.issuer, evidence.sequence) == (kind, issuer.key.peer_id, sequence)
    assert error.peer == issuer.key.peer_id
    assert evidence.statements
    for statement in evidence.statements:
        try:
            open_envelope(statement, LEDGER_ENTRY, now_ms=None, signer=issuer.key.peer_id).message(LedgerEntry)
        except RemoteProtocolError:
            open_head(statement, issuer.key.peer_id)
    assert decode_evidence(encode_evidence(evidence)) == evidence
    return evidence


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_entry_that_is_not_what_its_proof_says_convicts_its_issuer(edit: Edit) -> None:
    issuer = PaperIssuer()
    proof = proof_of(issuer.key)
    issuer.work()
    change = settled_entry(issuer)
    issuer.entries.clear()
    issuer.append(change.model_copy(update=edit(change)), proof)
    mirror = mirror_of(issuer)
    with pytest.raises(Deceived) as caught:
        follow(mirror, issuer)
    assert_convicted(issuer, caught.value, "forged_entry", 1)


def test_the_same_work_paid_twice_convicts() -> None:
    issuer = PaperIssuer()
    issuer.work()
    issuer.append(settled_entry(issuer), issuer.entries[0][1])
    with pytest.raises(Deceived, match="are not what is due") as caught:
        follow(mirror_of(issuer), issuer)
    assert_convicted(issuer, caught.value, "forged_entry", 2)


def test_a_ticket_that_was_forgotten_and_is_paid_again_convicts() -> None:
    issuer = PaperIssuer()
    issuer.work()
    issuer.append(TicketsExpired(before=NOW + WEEK), None, NOW + WEEK)
    issuer.append(settled_entry(issuer), issuer.entries[0][1], NOW)
    with pytest.raises(Deceived, match="forgotten"):
        follow(mirror_of(issuer), issuer)


def test_tickets_that_are_forgotten_too_early_convict() -> None:
    issuer = PaperIssuer()
    issuer.work()
    issuer.append(TicketsExpired(before=NOW + WEEK), None, NOW)
    with pytest.raises(Deceived, match="still be settled"):
        follow(mirror_of(issuer), issuer)


@pytest.mark.parametrize(
    "proof",
    [
        pytest.param(b"no envelope", id="no envelope"),
        pytest.param(proof_of(OTHER), id="of another orchestrator's ticket"),
        pytest.param(proof_of(ORCHESTRATOR, "request-2"), id="of another request"),
        pytest.param(proof_of(ORCHESTRATOR, index=2), id="of another worker"),
    ],
)
def test_a_proof_that_shows_nothing_for_its_entry_convicts(proof: bytes) -> None:
    issuer = PaperIssuer()
    issuer.work()
    issuer.entries[0] = (issuer.entries[0][0], proof)
    with pytest.raises(Deceived) as caught:
        follow(mirror_of(issuer), issuer)
    assert_convicted(issuer, caught.value, "forged_entry", 1)


def test_a_proof_beside_an_entry_that_settles_none_convicts() -> None:
    issuer = PaperIssuer()
    issuer.append(Slashed(peer=MIDDLE, micro_credits=1, reason="", by="operator"), proof_of(issuer.key))
    with pytest.raises(Deceived, match="settles none"):
        follow(mirror_of(issuer), issuer)


def test_another_chain_that_begins_within_this_one_convicts() -> None:
    issuer = PaperIssuer()
    issuer.append(ChainBegun(chain=7, after=0, after_hash=bytes(32)), None)
    with pytest.raises(Deceived, match="begins chain 7"):
        follow(mirror_of(issuer), issuer)


def test_a_ledger_that_was_restored_twice_is_followed() -> None:
    issuer = PaperIssuer(chain=9)
    issuer.work()
    for chain in (7, 9):  # a journal keeps its earlier restores, and goes into the next chain as a whole
        issuer.apply(ChainBegun(chain=chain, after=1, after_hash=bytes(32)))
    issuer.work("request-2")
    mirror = mirror_of(issuer)
    assert follow(mirror, issuer) == issuer.head
    assert mirror.counted(MIDDLE) == 2 * credits_for(LayerRange(10, 20), 300)


def test_history_that_is_written_anew_convicts_with_both_statements() -> None:
    issuer = three_stages()
    mirror = mirror_of(issuer)
    follow(mirror, issuer)
    issuer.entries[1] = issuer.entries[0]
    issuer.work("request-2")
    with pytest.raises(Deceived) as caught:
        mirror.take(*issuer.page(3), LAYERS_OF)
    evidence = assert_convicted(issuer, caught.value, "equivocation", 4)
    said, says = [open_envelope(raw, LEDGER_ENTRY, now_ms=None).message(LedgerEntry) for raw in evidence.statements]
    assert (said.sequence, says.sequence) == (3, 4)


def test_a_head_that_differs_at_the_cursor_convicts() -> None:
    issuer = three_stages()
    mirror = mirror_of(issuer)
    follow(mirror, issuer)
    with pytest.raises(Deceived, match="two journals") as caught:
        mirror.take([], issuer.sealed_head(Head(0, 3, bytes(32))), LAYERS_OF)
    assert len(assert_convicted(issuer, caught.value, "equivocation", 3).statements) == 2


def test_a_journal_that_becomes_shorter_without_a_new_chain_convicts() -> None:
    issuer = three_stages()
    mirror = mirror_of(issuer)
    follow(mirror, issuer)
    with pytest.raises(Deceived, match="ends before") as caught:
        mirror.take([], issuer.sealed_head(Head(0, 2, issuer.hash_of(2))), LAYERS_OF)
    assert len(assert_convicted(issuer, caught.value, "equivocation", 2).statements) == 2


def test_going_back_to_an_earlier_chain_convicts() -> None:
    issuer = three_stages()
    issuer.chain = 2
    mirror = mirror_of(issuer)
    follow(mirror, issuer)
    issuer.chain = 1
    with pytest.raises(Deceived, match="earlier chain") as caught:
        mirror.take([], issuer.sealed_head(), LAYERS_OF)
    assert len(assert_convicted(issuer, caught.value, "equivocation", 3).statements) == 2


# ---- Two stories ----


def test_a_head_that_was_shown_to_somebody_else_is_compared() -> None:
    issuer = three_stages()
    mirror = mirror_of(issuer)
    follow(mirror, issuer)
    mirror.hear(issuer.sealed_head(Head(0, 2, issuer.hash_of(2))))
    mirror.hear(issuer.sealed_head())
    mirror.hear(issuer.sealed_head(Head(0, 0, START)))
    mirror.hear(issuer.sealed_head(Head(4, 2, bytes(32))))  # of another chain: compared by whoever follows that
    with pytest.raises(Deceived) as caught:
        mirror.hear(issuer.sealed_head(Head(0, 2, bytes(32))))
    assert len(assert_convicted(issuer, caught.value, "equivocation", 2).statements) == 2


def test_a_head_of_somebody_else_that_is_ahead_is_compared_once_the_cursor_is_there() -> None:
    issuer = three_stages()
    mirror = mirror_of(issuer)
    mirror.take(*issuer.page(0, 1), LAYERS_OF)
    mirror.hear(issuer.sealed_head(Head(0, 3, bytes(32))))
    with pytest.raises(Deceived, match="two journals"):
        mirror.take(*issuer.page(1), LAYERS_OF)


def test_later_heads_of_a_fork_do_not_push_out_its_first_one() -> None:
    issuer = PaperIssuer()
    for number in range(6):
        issuer.work(f"request-{number}")
    mirror = mirror_of(issuer)
    mirror.take(*issuer.page(0, 1), LAYERS_OF)
    mirror.hear(issuer.sealed_head(Head(0, 3, bytes(32))))
    for ahead in range(4, 4 + 2 * MAX_KEPT_RUMOURS):
        mirror.hear(issuer.sealed_head(Head(0, ahead, bytes(32))))
    mirror.take(issuer.page(1, 1)[0], issuer.sealed_head(), LAYERS_OF)
    with pytest.raises(Deceived, match="entry 3 of chain 0: two journals"):
        mirror.take(issuer.page(2, 1)[0], issuer.sealed_head(), LAYERS_OF)


def test_heads_that_are_never_reached_do_not_push_out_those_that_are() -> None:
    issuer, tables = three_stages(), DictTables()
    mirror = MirroredLedger(tables, issuer.key.peer_id, issuer.chain)
    for ahead in range(1000, 1000 + 4 * MAX_KEPT_RUMOURS):
        mirror.hear(issuer.sealed_head(Head(0, ahead, bytes(32))))
    assert len(tables.content()["mirror"]) == MAX_KEPT_RUMOURS
    mirror.hear(issuer.sealed_head(Head(0, 3, bytes(32))))
    with pytest.raises(Deceived, match="two journals"):
        mirror.take(*issuer.page(), LAYERS_OF)


def test_heads_that_held_are_forgotten_once_they_are_compared() -> None:
    issuer, tables = three_stages(), DictTables()
    mirror = MirroredLedger(tables, issuer.key.peer_id, issuer.chain)
    for number in (1, 2, 3):
        mirror.hear(issuer.sealed_head(Head(0, number, issuer.hash_of(number))))
    assert follow(mirror, issuer) == issuer.head
    assert sorted(key for key, _ in tables.content()["mirror"]) == [b"cursor", b"head"]


def test_two_heads_that_differ_at_one_entry_convict_before_anybody_is_there() -> None:
    issuer = three_stages()
    mirror = mirror_of(issuer)
    mirror.hear(issuer.sealed_head(Head(0, 50, bytes(32))))
    mirror.hear(issuer.sealed_head(Head(0, 50, bytes(32))))
    with pytest.raises(Deceived) as caught:
        mirror.hear(issuer.sealed_head(Head(0, 50, b"x" * 32)))
    assert len(assert_convicted(issuer, caught.value, "equivocation", 50).statements) == 2


def test_a_head_that_an_older_version_kept_is_compared_as_well() -> None:
    issuer, tables = three_stages(), DictTables()
    tables.put("mirror", b"rumour", issuer.sealed_head(Head(0, 3, bytes(32))))
    mirror = MirroredLedger(tables, issuer.key.peer_id, issuer.chain)
    mirror.take(issuer.page(0, 1)[0], issuer.sealed_head(), LAYERS_OF)
    with pytest.raises(Deceived, match="two journals"):
        mirror.take(*issuer.page(1), LAYERS_OF)


def test_nobody_can_make_a_head_for_another() -> None:
    issuer = three_stages()
    mirror = mirror_of(issuer)
    follow(mirror, issuer)
    forged = seal(OTHER, LEDGER_HEAD, LedgerHead(chain=0, sequence=2, hash=bytes(32)), sequence=1, now_ms=NOW)
    with pytest.raises(RemoteProtocolError) as caught:
        mirror.hear(forged)
    assert not isinstance(caught.value, Deceived)


# ---- What is no answer, and convicts nobody ----


def bad_pages(issuer: PaperIssuer) -> dict[str, tuple[list[bytes], bytes]]:
    entries, head = issuer.page()
    stranger = PaperIssuer(OTHER)
    stranger.work()
    return {
        "an entry is left out": (entries[1:], head),
        "entries in another order": ([entries[1], entries[0], entries[2]], head),
        "an entry twice": ([entries[0], entries[0]], head),
        "an entry of another orchestrator": (stranger.page()[0], head),
        "an entry of another chain": ([issuer.sealed_entry(1, chain=3)], head),
        "a head of another orchestrator": (entries, stranger.sealed_head()),
        "a damaged entry": ([entries[0][:-1]], head),
        "a damaged head": (entries, head[:-1]),
        "an entry where a head should be": (entries, entries[0]),
    }


@pytest.mark.parametrize("name", list(bad_pages(three_stages())))
def test_a_page_that_anybody_could_have_garbled_is_refused_and_convicts_nobody(name: str) -> None:
    issuer = three_stages()
    with pytest.raises(RemoteProtocolError) as caught:
        mirror_of(issuer).take(*bad_pages(issuer)[name], LAYERS_OF)
    assert not isinstance(caught.value, Deceived)


def test_a_head_that_is_older_than_one_before_is_refused_and_convicts_nobody() -> None:
    issuer = three_stages()
    mirror = mirror_of(issuer)
    mirror.take(*issuer.page(), LAYERS_OF)
    with pytest.raises(RemoteProtocolError, match="older") as caught:
        mirror.take([], issuer.sealed_head(Head(0, 2, issuer.hash_of(2)), NOW - 1), LAYERS_OF)
    assert not isinstance(caught.value, Deceived)


def test_an_entry_of_a_newer_version_stops_the_follower_and_convicts_nobody() -> None:
    issuer = three_stages()
    mirror = mirror_of(issuer)
    follow(mirror, issuer)
    issuer.entries.append((cbor.encode({"at": NOW, "change": {"kind": "coined", "peer": MIDDLE}}), None))
    with pytest.raises(VersionMismatch, match="update this program"):
        mirror.take(*issuer.page(3), LAYERS_OF)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=80), max_size=3), st.binary(max_size=80))
def test_any_bytes_give_a_typed_error(entries: list[bytes], head: bytes) -> None:
    issuer = PaperIssuer()
    for page in ((entries, head), (entries, issuer.sealed_head())):
        with suppress(RemoteProtocolError):
            mirror_of(issuer).take(*page, LAYERS_OF)


@settings(max_examples=80, deadline=None)
@given(st.binary(min_size=1, max_size=120), st.one_of(st.none(), st.binary(min_size=1, max_size=120)))
def test_any_bytes_that_an_orchestrator_signs_as_an_entry_give_a_typed_error(entry: bytes, proof: bytes | None) -> None:
    issuer = PaperIssuer(entries=[(entry, proof)])
    with pytest.raises(RemoteProtocolError):
        mirror_of(issuer).take(*issuer.page(), LAYERS_OF)


@given(st.binary(max_size=200))
def test_any_bytes_in_a_file_of_evidence_give_a_typed_error(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_evidence(data)


def test_a_peer_that_was_never_heard_of_has_nothing() -> None:
    assert mirror_of(PaperIssuer()).counted(PeerId("nobody")) == 0
