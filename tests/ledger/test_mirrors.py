"""Followed ledgers on disk: cursors, evidence and new chains outlive the process."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tessella_p2p.base.errors import StorageError
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.ledger.chain import Head
from tessella_p2p.ledger.federation import Deceived, decode_evidence
from tessella_p2p.ledger.mirrors import Mirror, Mirrors
from tests.ledger.paper_issuer import PaperIssuer
from tests.ledger.proving import LAYERS, ROOT, WORKERS, credits_for, key_of

LAYERS_OF = {ROOT: LAYERS}
MIDDLE = WORKERS[1].peer_id
EARNED = credits_for(LayerRange(10, 20), 300)
_MAP_BYTES = 64 << 20


def opened(folder: Path, issuer: PaperIssuer) -> Mirror:
    return Mirror(folder, issuer.key.peer_id, map_size_bytes=_MAP_BYTES, sync=False)


def pull(mirror: Mirror, issuer: PaperIssuer, limit: int = 500) -> bool:
    """One page, as the issuer answers for the mirror's cursor."""
    cursor = mirror.cursor
    since = cursor.sequence if cursor.chain == issuer.chain else len(issuer.entries)
    entries, head = issuer.page(since, limit)
    return mirror.take(entries, head, LAYERS_OF)


def pull_all(mirror: Mirror, issuer: PaperIssuer) -> None:
    while pull(mirror, issuer, 2):
        pass


def restored(issuer: PaperIssuer, upto: int, chain: int = 1) -> PaperIssuer:
    """The issuer after a restore from a backup that ended with entry ``upto``, its proofs long dropped."""
    return PaperIssuer(issuer.key, chain, [(entry, None) for entry, _ in issuer.entries[:upto]], issuer.sequence + 1)


def busy() -> PaperIssuer:
    issuer = PaperIssuer()
    for number in range(3):
        issuer.work(f"request-{number}")
    return issuer


def test_a_mirror_goes_on_where_it_was(tmp_path: Path) -> None:
    issuer = busy()
    with closing(opened(tmp_path, issuer)) as mirror:
        assert mirror.cursor == Head(0, 0, bytes(32))
        assert pull(mirror, issuer, limit=2)
    with closing(opened(tmp_path, issuer)) as mirror:
        assert mirror.cursor.sequence == 2
        assert mirror.standing().head == 3
        assert not pull(mirror, issuer)
        assert mirror.counted(MIDDLE) == 3 * EARNED


def test_a_page_with_a_lie_is_not_taken_at_all(tmp_path: Path) -> None:
    issuer = busy()
    with closing(opened(tmp_path, issuer)) as mirror:
        pull_all(mirror, issuer)
        issuer.work("request-4")
        issuer.entries.append(issuer.entries[0])
        with pytest.raises(Deceived):
            pull(mirror, issuer)
        assert mirror.cursor.sequence == 3


def test_evidence_outlives_the_process_and_nothing_of_a_liar_counts(tmp_path: Path) -> None:
    issuer = busy()
    with closing(opened(tmp_path, issuer)) as mirror:
        pull_all(mirror, issuer)
        assert mirror.counted(MIDDLE) == 3 * EARNED
        issuer.entries.append(issuer.entries[0])
        with pytest.raises(Deceived):
            pull(mirror, issuer)
        assert mirror.counted(MIDDLE) == 0
        evidence = mirror.evidence
    assert evidence is not None
    assert decode_evidence((tmp_path / "evidence.cbor").read_bytes()) == evidence
    with closing(opened(tmp_path, issuer)) as mirror:
        assert mirror.standing().evidence == evidence
        assert mirror.counted(MIDDLE) == 0


def test_damaged_evidence_does_not_make_a_liar_honest(tmp_path: Path) -> None:
    (tmp_path / "evidence.cbor").write_bytes(b"\x00")
    with pytest.raises(StorageError, match="damaged"):
        opened(tmp_path, busy())


def test_a_restored_ledger_is_followed_from_its_beginning_and_counts_nothing_twice(tmp_path: Path) -> None:
    issuer = busy()
    with closing(opened(tmp_path, issuer)) as mirror:
        pull_all(mirror, issuer)
        after = restored(issuer, upto=2)
        after.state = issuer.state
        after.work("request-9")
        assert pull(mirror, after), "it begins again"
        assert mirror.cursor == Head(1, 0, bytes(32))
        assert mirror.counted(MIDDLE) == 3 * EARNED, "the old chain counts until the new one has caught up"
        pull_all(mirror, after)
        assert mirror.cursor == after.head
        # Two entries of before, which were proven then, and the new one; what the backup did not have is gone.
        assert mirror.counted(MIDDLE) == 3 * EARNED
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["chain-1"]
    with closing(opened(tmp_path, after)) as mirror:
        assert mirror.cursor == after.head
        assert mirror.counted(MIDDLE) == 3 * EARNED


@pytest.mark.parametrize("pages", [0, 1])
def test_a_crash_while_a_new_chain_is_pulled_loses_no_balance(tmp_path: Path, pages: int) -> None:
    issuer = busy()
    after = restored(issuer, upto=3)
    with closing(opened(tmp_path, issuer)) as mirror:
        pull_all(mirror, issuer)
        pull(mirror, after)
        for _ in range(pages):
            pull(mirror, after, limit=1)
    with closing(opened(tmp_path, issuer)) as mirror:
        assert mirror.counted(MIDDLE) == 3 * EARNED
        assert mirror.cursor.chain == 1
        pull_all(mirror, after)
        assert mirror.counted(MIDDLE) == 3 * EARNED


def test_a_chain_that_never_caught_up_is_given_up_for_a_later_one(tmp_path: Path) -> None:
    issuer = busy()
    with closing(opened(tmp_path, issuer)) as mirror:
        pull_all(mirror, issuer)
        for chain in (1, 2, 5):
            pull(mirror, restored(issuer, upto=3, chain=chain))
        assert mirror.cursor.chain == 5
        assert sorted(path.name for path in tmp_path.iterdir()) == ["chain-0", "chain-5"]
        assert mirror.counted(MIDDLE) == 3 * EARNED


def test_an_orchestrator_on_a_later_chain_is_followed_from_the_first_pull_on(tmp_path: Path) -> None:
    issuer = PaperIssuer(chain=3)
    issuer.work()
    with closing(opened(tmp_path, issuer)) as mirror:
        pull_all(mirror, issuer)
        assert mirror.cursor == issuer.head
        assert mirror.counted(MIDDLE) == EARNED


def test_a_head_that_others_were_shown_convicts_here_too(tmp_path: Path) -> None:
    issuer = busy()
    with closing(opened(tmp_path, issuer)) as mirror:
        pull_all(mirror, issuer)
        with pytest.raises(Deceived):
            mirror.hear(issuer.sealed_head(Head(0, 1, bytes(32))))
        assert mirror.counted(MIDDLE) == 0


@pytest.mark.parametrize(("trust_limit", "counts"), [(0, 0), (EARNED, 2 * EARNED), (10 * EARNED, 4 * EARNED)])
def test_of_each_orchestrator_counts_what_the_trust_limit_allows(tmp_path: Path, trust_limit: int, counts: int) -> None:
    first, second = PaperIssuer(key_of("first")), PaperIssuer(key_of("second"))
    first.work()
    for number in range(3):
        second.work(f"request-{number}")
    issuers = [first.key.peer_id, second.key.peer_id]
    with closing(Mirrors(tmp_path, issuers, trust_limit, map_size_bytes=_MAP_BYTES, sync=False)) as mirrors:
        for issuer in (first, second):
            pull_all(mirrors.mirrors[issuer.key.peer_id], issuer)
        assert mirrors.foreign(MIDDLE) == counts
        assert mirrors.foreign(WORKERS[5].peer_id) == 0
        assert len(mirrors.heads()) == 2
