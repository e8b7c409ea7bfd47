"""What anybody may read fits into an answer."""

from __future__ import annotations

from tessella_p2p.base.limits import MAX_ADDRESS_CHARS, MAX_ADDRESSES, MAX_ENVELOPE_BYTES, MAX_PAGE_ROWS
from tessella_p2p.orchestrator.reading import within_an_answer
from tessella_p2p.wire.envelope import seal
from tessella_p2p.wire.messages import ANSWER, AnswerBody, PeerEntry, Peers
from tests.orchestrator.paper_workers import NOW, ORCHESTRATOR, key_of


def entry(number: int, address: str) -> PeerEntry:
    return PeerEntry(
        peer_id=key_of(f"worker {number}").peer_id,
        model_id="toy",
        recipe="f32",
        layer_ranges=((0, 4),),
        status="Healthy",
        p2p_addrs=(address,) * MAX_ADDRESSES,
        queue_depth=0,
        canary=False,
        failures=0,
        reputation=1000,
        replica_group_id=0,
    )


def test_workers_with_long_addresses_do_not_make_a_page_longer_than_an_envelope() -> None:
    entries = [entry(number, "a" * MAX_ADDRESS_CHARS) for number in range(MAX_PAGE_ROWS)]
    shown = within_an_answer(entries)
    assert shown == tuple(entries[: len(shown)])
    body = AnswerBody(to=1, body=Peers(peers=shown, more=True))
    assert MAX_ENVELOPE_BYTES / 2 < len(seal(ORCHESTRATOR, ANSWER, body, sequence=1, now_ms=NOW)) <= MAX_ENVELOPE_BYTES


def test_a_page_that_fits_is_shown_as_a_whole() -> None:
    entries = [entry(number, "/ip4/203.0.113.7/tcp/9080") for number in range(50)]
    assert within_an_answer(entries) == tuple(entries)
