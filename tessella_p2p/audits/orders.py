"""Who recomputes a claim, and the order for it (pure)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tessella_p2p.audits.sampling import Claim
from tessella_p2p.audits.tolerance import Tolerances
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import AUDIT_LOAD_S, AUDIT_REPORT_PER_POSITION_S, AUDIT_REPORT_S, MAX_CANARIES_NAMED
from tessella_p2p.wire import messages as m


@dataclass(frozen=True, slots=True)
class Server:
    """A worker that serves a range now.

    Attributes:
        recipe: the published one.
        canary: how it answers, where it is one.
        has_room: its claim holds the audited range beside its own.
    """

    peer_id: PeerId
    addresses: tuple[str, ...]
    manifest_root: bytes
    recipe: str
    layers: LayerRange
    canary: m.CanaryMode = "off"
    has_room: bool = False


class Preference(IntEnum):
    """Who is asked first."""

    REPLICA = 0
    """It serves the audited range."""
    ROOMY = 1
    """It loads that for the audit."""
    NEAR = 2
    """It serves the range under another recipe."""
    PARTY = 3
    """It serves or loads the range, and has its own reasons: it is the upstream peer, the requester, or who pays."""


@dataclass(frozen=True, slots=True)
class Auditor:
    """Who may be asked, how its answer is compared, and whether it has to load the range first."""

    server: Server
    comparison: m.Comparison
    preference: Preference
    tolerance_ppm: int = 0
    loads: bool = False


def auditors_for(claim: Claim, servers: Iterable[Server], tolerances: Tolerances, rng: random.Random) -> list[Auditor]:
    """Who may recompute ``claim``, in the order in which they are to be asked; see `Preference`.

    Never the worker, nor a canary; nor the downstream peer, for it knows what the worker answered and would not have to compute. The
    upstream peer and the requester do not know that. They are asked last: whoever is part of the work has its own reasons, but an
    audit by one of them is more than none. Within a preference the order is random, for nobody is to know who audits whom.

    A tail's tokens are never compared by tolerance: where two are nearly as likely, a deviation of one bit chooses the other.

    Args:
        rng: secret, like the sampler's.
    """
    found = [
        auditor
        for server in servers
        if server.peer_id not in (claim.worker, claim.downstream)
        and server.canary == "off"
        and server.manifest_root == claim.manifest_root
        and (auditor := _auditor(claim, server, tolerances)) is not None
    ]
    rng.shuffle(found)
    return sorted(found, key=lambda auditor: auditor.preference)


def _auditor(claim: Claim, server: Server, tolerances: Tolerances) -> Auditor | None:
    is_party = server.peer_id in (claim.upstream, claim.requester, claim.payer)
    serves = server.layers == claim.layers
    if server.recipe == claim.recipe:
        if not serves and not server.has_room:
            return None
        asked = Preference.PARTY if is_party else Preference.REPLICA if serves else Preference.ROOMY
        return Auditor(server, "bitwise", asked, loads=not serves)
    if serves and not is_party and not claim.is_tail:
        tolerance_ppm = tolerances.between(server.recipe, claim.recipe)
        if tolerance_ppm is not None:
            return Auditor(server, "tolerance", Preference.NEAR, tolerance_ppm)
    return None


def canaries_for(claim: Claim, servers: Iterable[Server]) -> tuple[m.CanaryNamed, ...]:
    """The canaries that answer the same question as the worker did, at most `MAX_CANARIES_NAMED`."""
    same = (
        m.CanaryNamed(peer_id=server.peer_id, mode=server.canary)
        for server in servers
        if server.canary != "off"
        and server.peer_id != claim.worker
        and (server.manifest_root, server.recipe, server.layers) == (claim.manifest_root, claim.recipe, claim.layers)
    )
    return tuple(named for named, _ in zip(same, range(MAX_CANARIES_NAMED), strict=False))


def report_within_s(claim: Claim, auditor: Auditor) -> float:
    """How long an auditor has for its report, in seconds."""
    load_s = AUDIT_LOAD_S if auditor.loads else 0.0
    return load_s + AUDIT_REPORT_S + AUDIT_REPORT_PER_POSITION_S * claim.positions


def order_for(
    claim: Claim,
    auditor: Auditor,
    *,
    audit_id: bytes,
    upstream_addresses: Sequence[str],
    downstream_addresses: Sequence[str],
    canaries: tuple[m.CanaryNamed, ...],
    now_ms: int,
) -> m.AuditOrder:
    """The order. Bit for bit it is blind: it holds what the worker received, and not what it claims to have answered."""
    by_tolerance = auditor.comparison == "tolerance"
    return m.AuditOrder(
        audit_id=audit_id,
        auditor=auditor.server.peer_id,
        audited=claim.worker,
        session=claim.session,
        epoch=claim.epoch,
        manifest_root=claim.manifest_root,
        recipe=claim.recipe,
        layers=claim.layers.as_tuple(),
        positions=claim.positions,
        input_digest=claim.input_digest,
        upstream=claim.upstream,
        upstream_addresses=tuple(upstream_addresses),
        downstream=claim.downstream,
        downstream_addresses=tuple(downstream_addresses),
        comparison=auditor.comparison,
        output_digest=claim.output_digest if by_tolerance else None,
        tolerance_ppm=auditor.tolerance_ppm,
        canaries=() if by_tolerance else canaries,
        report_before=now_ms + int(report_within_s(claim, auditor) * 1000),
    )
