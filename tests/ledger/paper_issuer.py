"""An orchestrator on paper: a journal that is a hash chain, and the sealed pages that it shows of it; true or edited."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessella_p2p.ledger.chain import START, Head, entry_hash
from tessella_p2p.ledger.changes import Change, JournalEntry, ProofSettled, encode_entry
from tessella_p2p.ledger.evidence import SettlementTerms, verify_proof
from tessella_p2p.ledger.settlement import settle
from tessella_p2p.ledger.state import LedgerState
from tessella_p2p.ledger.tables import DictTables
from tessella_p2p.wire.envelope import Message, seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import LEDGER_ENTRY, LEDGER_HEAD, LedgerEntry, LedgerHead
from tests.ledger.proving import (
    LAYERS,
    NOW,
    ORCHESTRATOR,
    REQUESTER,
    ROOT,
    ROUTE,
    lease,
    proof_body,
    seal_proof,
    ticket,
)


@dataclass
class PaperIssuer:
    """Its journal may be written by the rules (`settle`) or against them (`append`)."""

    key: NodeKey = ORCHESTRATOR
    chain: int = 0
    entries: list[tuple[bytes, bytes | None]] = field(default_factory=list)
    """Each entry's bytes and its sealed proof."""
    sequence: int = 0
    state: LedgerState = field(default_factory=lambda: LedgerState(DictTables()))

    def settle(self, raw: bytes, at: int = NOW) -> list[ProofSettled]:
        """Judge a sealed proof as an orchestrator does."""
        terms = SettlementTerms(self.key.peer_id, {ROOT: LAYERS})
        changes, _ = settle(self.state, verify_proof(raw, terms, at), terms, at)
        for change in changes:
            self.state.apply(change, at)
            self.append(change, raw, at)
        return [change for change in changes if isinstance(change, ProofSettled)]

    def work(self, request_id: str = "request-1", index: int = 1, positions: int = 300, at: int = NOW) -> None:
        """A stage of the route works for one request and is paid."""
        self.settle(proof_of(self.key, request_id, index, positions), at)

    def apply(self, change: Change, at: int = NOW) -> None:
        """Append a change that rests on no proof."""
        self.state.apply(change, at)
        self.append(change, None, at)

    def append(self, change: Change, proof: bytes | None, at: int = NOW) -> None:
        """Append any change, whether it fits or not."""
        self.entries.append((encode_entry(JournalEntry(at=at, change=change)), proof))

    def hash_of(self, sequence: int) -> bytes:
        """The hash of an entry."""
        at = START
        for number, (entry, _) in enumerate(self.entries[:sequence], 1):
            at = entry_hash(at, self.chain, number, entry)
        return at

    @property
    def head(self) -> Head:
        """Where the journal ends."""
        return Head(self.chain, len(self.entries), self.hash_of(len(self.entries)))

    def sealed(self, domain: str, message: Message, at: int = NOW) -> bytes:
        """Signed by it."""
        self.sequence += 1
        return seal(self.key, domain, message, sequence=self.sequence, now_ms=at)

    def sealed_entry(self, sequence: int, **changes: object) -> bytes:
        """One entry as it is shown; ``changes`` edits it."""
        entry, proof = self.entries[sequence - 1]
        fields: dict[str, object] = {
            "chain": self.chain,
            "sequence": sequence,
            "previous": self.hash_of(sequence - 1),
            "entry": entry,
            "proof": proof,
        }
        return self.sealed(LEDGER_ENTRY, LedgerEntry.model_validate({**fields, **changes}))

    def sealed_head(self, head: Head | None = None, at: int = NOW) -> bytes:
        """A head as it is shown; its own, where none is given."""
        shown = head or self.head
        return self.sealed(LEDGER_HEAD, LedgerHead(chain=shown.chain, sequence=shown.sequence, hash=shown.hash), at)

    def page(self, since: int = 0, limit: int = 500) -> tuple[list[bytes], bytes]:
        """Entries behind a cursor, and the head."""
        last = min(since + limit, len(self.entries))
        return [self.sealed_entry(number) for number in range(since + 1, last + 1)], self.sealed_head()


def proof_of(issuer: NodeKey, request_id: str = "request-1", index: int = 1, positions: int = 300) -> bytes:
    """The sealed proof of one stage of the route for a ticket and a lease of ``issuer``."""
    stage = ROUTE[index]
    body = proof_body(
        index,
        positions=positions,
        request_id=request_id,
        sealed_ticket=ticket(request_id, minter=issuer, requester=REQUESTER),
        sealed_lease=lease(stage.key, stage.layers, signer=issuer),
    )
    return seal_proof(body, stage.key, audience=issuer.peer_id)
