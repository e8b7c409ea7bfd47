"""Followed ledgers on disk (shell): of each orchestrator what was verified, how far, and the evidence against it.

    <folder>/<peer id>/chain-<n>/      an LMDB folder, see ``federation``
    <folder>/<peer id>/evidence.cbor   why it is followed no further, see `federation.Evidence`

A page is one transaction: it is verified, then durable with its cursor, and only then counted. When an orchestrator begins a new chain
(it was restored from a backup), that one is followed from its beginning, beside the old one, which counts until the new one has caught
up; so nothing counts twice, and nothing is missing meanwhile.

Evidence stays until an operator removes the orchestrator's folder.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from tessella_p2p.base.errors import LocalProtocolError, MalformedMessage, StorageError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MIRROR_MAP_BYTES
from tessella_p2p.ledger.chain import Head
from tessella_p2p.ledger.environment import Environment, Transaction
from tessella_p2p.ledger.federation import (
    TABLE_NAMES,
    Deceived,
    Evidence,
    MirroredLedger,
    decode_evidence,
    encode_evidence,
    open_head,
)

_LOG: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

SCHEMA = 2
_CHAIN_FOLDER = re.compile(r"chain-(\d{1,16})")
_CAUGHT_UP = "caught_up"
_EVIDENCE_NAME = "evidence.cbor"


@dataclass(frozen=True, slots=True)
class Standing:
    """How far an orchestrator was followed: up to entry ``cursor`` of ``chain``, which ends at ``head`` as far as it said.

    ``evidence`` is what convicts it, where it deceived.
    """

    issuer: PeerId
    chain: int
    cursor: int
    head: int
    evidence: Evidence | None


class _Chain:
    """One chain of one orchestrator."""

    def __init__(self, path: Path, number: int, map_size_bytes: int, sync: bool) -> None:
        self.path = path
        self.number = number
        self.environment = Environment(path, TABLE_NAMES, map_size_bytes=map_size_bytes, schema=SCHEMA, sync=sync)

    @property
    def caught_up(self) -> bool:
        """Whether its end was reached once."""
        with self.environment.read() as transaction:
            return bool(transaction.number(_CAUGHT_UP))

    def remove(self) -> None:
        """Close and delete it."""
        self.environment.close()
        shutil.rmtree(self.path, ignore_errors=True)


class Mirror:
    """One orchestrator's ledger, as it was verified here. Methods block; any thread may read, one at a time may `take` and `hear`.

    Args:
        folder: of this orchestrator alone.
        issuer: its peer id.

    Raises:
        StorageError: here and in every method, when the folder is in use, full, damaged or unwritable.
    """

    def __init__(
        self,
        folder: Path,
        issuer: PeerId,
        *,
        map_size_bytes: int = MIRROR_MAP_BYTES,
        sync: bool = True,
    ) -> None:
        self.issuer = issuer
        self._folder = folder
        self._map_size_bytes = map_size_bytes
        self._sync = sync
        self._closing = threading.Lock()
        """Held by whoever reads a chain, and by whoever closes one."""
        with self._typed_errors():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.evidence = self._read_evidence()
            found = [_CHAIN_FOLDER.fullmatch(path.name) for path in folder.iterdir()]
        chains = [self._open(number) for number in sorted(int(match[1]) for match in found if match)] or [self._open(0)]
        # What a crash left: at most one chain counts, and one later one is being followed.
        counted = [chain for chain in chains if chain.caught_up] or chains
        self._counted = counted[-1] if counted[-1].caught_up else counted[0]
        self._followed = chains[-1]
        for chain in chains:
            if chain not in (self._counted, self._followed):
                chain.remove()

    def close(self) -> None:
        """Close the databases."""
        with self._closing:
            self._counted.environment.close()
            self._followed.environment.close()

    @property
    def cursor(self) -> Head:
        """The last entry that was taken, of the chain that is followed."""
        with self._closing, self._followed.environment.read() as transaction:
            return self._ledger(self._followed, transaction).cursor

    def standing(self) -> Standing:
        """How far it was followed."""
        signed = self.signed_head()
        cursor = self.cursor
        head = cursor.sequence if signed is None else open_head(signed)[1].sequence
        return Standing(self.issuer, cursor.chain, cursor.sequence, max(head, cursor.sequence), self.evidence)

    def signed_head(self) -> bytes | None:
        """The newest sealed head that it showed here."""
        with self._closing, self._followed.environment.read() as transaction:
            return self._ledger(self._followed, transaction).signed_head()

    def counted(self, peer: PeerId) -> int:
        """Micro-credits of ``peer`` that were proven here; none of an orchestrator that deceived."""
        if self.evidence is not None:
            return 0
        with self._closing, self._counted.environment.read() as transaction:
            return self._ledger(self._counted, transaction).counted(peer)

    def take(self, entries: Sequence[bytes], signed_head: bytes, total_layers: Mapping[bytes, int]) -> bool:
        """Take one page that the orchestrator answered for `cursor`, see `MirroredLedger.take`; durable when it returns.

        Returns:
            Whether there is more to ask for.

        Raises:
            Deceived: the evidence is on disk then, and nothing of this orchestrator counts any more.
            RemoteProtocolError: as `MirroredLedger.take`; nothing was taken.
        """
        chain = self._followed
        try:
            with chain.environment.write() as transaction:
                ledger = self._ledger(chain, transaction)
                head = ledger.take(entries, signed_head, total_layers, self._proven_before)
                reached = head.chain == chain.number and ledger.cursor.sequence >= head.sequence
                if reached and not transaction.number(_CAUGHT_UP):
                    transaction.set_number(_CAUGHT_UP, 1)
        except Deceived as error:
            self._convict(error.evidence)
            raise
        if head.chain > chain.number:
            self._follow(head.chain)
            return True
        if reached and chain is not self._counted:
            with self._closing:
                self._counted.remove()
                self._counted = chain
        return not reached

    def hear(self, signed_head: bytes) -> None:
        """Compare with a head that it showed to somebody else.

        Raises:
            Deceived: as `take`.
            RemoteProtocolError: it is no head of this orchestrator.
        """
        chain = self._followed
        try:
            with chain.environment.write() as transaction:
                self._ledger(chain, transaction).hear(signed_head)
        except Deceived as error:
            self._convict(error.evidence)
            raise

    # ---- Chains ----

    def _open(self, number: int) -> _Chain:
        return _Chain(self._folder / f"chain-{number}", number, self._map_size_bytes, self._sync)

    def _follow(self, number: int) -> None:
        """Begin with another chain; one that never caught up and that nothing counts of is given up."""
        begun = self._open(number)
        with self._closing:
            if self._followed is not self._counted:
                self._followed.remove()
            self._followed = begun

    def _ledger(self, chain: _Chain, transaction: Transaction) -> MirroredLedger:
        return MirroredLedger(transaction, self.issuer, chain.number)

    def _proven_before(self, sequence: int, digest: bytes) -> bool:
        older = self._counted
        if older is self._followed:
            return False
        with older.environment.read() as transaction:
            link = self._ledger(older, transaction).link(sequence)
        return link is not None and link.proven and link.digest == digest

    # ---- Evidence ----

    def _read_evidence(self) -> Evidence | None:
        path = self._folder / _EVIDENCE_NAME
        if not path.exists():
            return None
        try:
            return decode_evidence(path.read_bytes())
        except MalformedMessage as error:
            raise StorageError(f"{path} is damaged: move it away to follow {self.issuer} again") from error

    def _convict(self, evidence: Evidence) -> None:
        """Keep the evidence; from then on nothing counts."""
        self.evidence = evidence
        path = self._folder / _EVIDENCE_NAME
        with self._typed_errors():
            written = path.with_suffix(".new")
            with written.open("wb") as file:
                file.write(encode_evidence(evidence))
                file.flush()
                os.fsync(file.fileno())
            written.replace(path)

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{self._folder} cannot be used: {error.strerror}. Check the disk and the folder's owner"
            ) from error


class Mirrors:
    """The ledgers of all followed orchestrators, in one folder. Methods block, for microseconds where they only read.

    Args:
        folder: where the mirrors are.
        issuers: the followed orchestrators, as they are pinned.
        trust_limit: micro-credits of one identity that count here at most, of those that one orchestrator says it has.

    Raises:
        StorageError: a mirror cannot be opened.
    """

    def __init__(
        self,
        folder: Path,
        issuers: Iterable[PeerId],
        trust_limit: int,
        *,
        map_size_bytes: int = MIRROR_MAP_BYTES,
        sync: bool = True,
    ) -> None:
        self._folder = folder
        self._map_size_bytes = map_size_bytes
        self._sync = sync
        self._trust_limit = trust_limit
        self.mirrors: dict[PeerId, Mirror] = {}
        """By issuer; replaced, not changed, for other threads read it."""
        self._left: dict[PeerId, Mirror] = {}
        self._unreadable: set[PeerId] = set()
        for issuer in dict.fromkeys(issuers):
            self.follow(issuer)

    def follow(self, issuer: PeerId) -> Mirror:
        """Follow one more orchestrator, from where its mirror stands.

        Raises:
            StorageError: the mirror cannot be opened.
        """
        mirror = self._left.pop(issuer, None) or Mirror(
            self._folder / issuer, issuer, map_size_bytes=self._map_size_bytes, sync=self._sync
        )
        self.mirrors = {**self.mirrors, issuer: mirror}
        return mirror

    def leave(self, issuer: PeerId) -> None:
        """Follow an orchestrator no more: nothing of it counts, and its mirror stays on disk."""
        # Whoever reads it now may go on: it is closed with the others.
        self._left[issuer] = self.mirrors[issuer]
        self.mirrors = {other: mirror for other, mirror in self.mirrors.items() if other != issuer}

    def close(self) -> None:
        """Close every mirror."""
        for mirror in (*self.mirrors.values(), *self._left.values()):
            mirror.close()

    def foreign(self, peer: PeerId) -> int:
        """Micro-credits of ``peer`` elsewhere that count here: of each orchestrator up to the trust limit.

        A mirror that cannot be read counts for nothing: a broken folder costs its orchestrator's clients their tier here, and nobody a
        grant.
        """
        return sum(min(self._counted(mirror, peer), self._trust_limit) for mirror in self.mirrors.values())

    def _counted(self, mirror: Mirror, peer: PeerId) -> int:
        try:
            counted = mirror.counted(peer)
        # The second one is what a damaged row of ours is: of a ledger it would be the end, of a mirror it is no more than this.
        except (StorageError, LocalProtocolError) as error:
            self._note_unreadable(mirror, error)
            return 0
        self._unreadable.discard(mirror.issuer)
        return counted

    def heads(self) -> tuple[bytes, ...]:
        """The newest sealed heads that the followed orchestrators showed here, as far as they can be read: to be passed on."""
        heads = []
        for mirror in self.mirrors.values():
            try:
                heads.append(mirror.signed_head())
            except StorageError as error:
                self._note_unreadable(mirror, error)
        return tuple(head for head in heads if head is not None)

    def _note_unreadable(self, mirror: Mirror, error: Exception) -> None:
        """Log it once, until it is read again."""
        if mirror.issuer not in self._unreadable:
            self._unreadable.add(mirror.issuer)
            _LOG.error("mirror_unreadable", issuer=mirror.issuer, reason=str(error))
