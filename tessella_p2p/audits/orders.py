"""Who recomputes a claim, and the order for it (pure)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tessella_p2p.audits.sampling import Claim
from tessella_p2p.audits.tolerance import Tolerances
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import AUDIT_REPORT_PER_POSITION_S, AUDIT_REPORT_S, MAX_CANARIES_NAMED
from tessella_p2p.wire import messages as m


@dataclass(frozen=True, slots=True)
class Server:
    """A worker that serves a range now. ``recipe`` is the published one; ``canary`` how it answers, where it is one."""

    peer_id: PeerId
    addresses: tuple[str, ...]
    manifest_root: bytes
    recipe: str
    layers: LayerRange
    canary: m.CanaryMode = "off"


@dataclass(frozen=True, slots=True)
class Auditor:
    """Who may be asked, and how its answer is compared."""

    server: Server
    comparison: m.Comparison
    tolerance_ppm: int = 0


def auditors_for(claim: Claim, servers: Iterable[Server], tolerances: Tolerances, rng: random.Random) -> list[Auditor]:
    """Who may recompute ``claim``, in the order in which they are to be asked.

    They serve exactly the audited range, and are neither the worker, nor its neighbours, nor the requester, nor canaries: whoever is
    part of the work has its own reasons. Those of the same recipe come first, in a random order, for nobody is to know who audits
    whom; then those of another one whose distance was measured. A tail's tokens are never compared by tolerance: where two are
    nearly as likely, a deviation of one bit chooses the other.

    Args:
        rng: secret, like the sampler's.
    """
    involved = {claim.worker, claim.upstream, claim.downstream, claim.requester}
    bitwise: list[Auditor] = []
    near: list[Auditor] = []
    for server in servers:
        if server.peer_id in involved or server.canary != "off":
            continue
        if (server.manifest_root, server.layers) != (claim.manifest_root, claim.layers):
            continue
        if server.recipe == claim.recipe:
            bitwise.append(Auditor(server, "bitwise"))
        elif not claim.is_tail and (ppm := tolerances.between(server.recipe, claim.recipe)) is not None:
            near.append(Auditor(server, "tolerance", ppm))
    rng.shuffle(bitwise)
    rng.shuffle(near)
    return [*bitwise, *near]


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


def report_within_s(claim: Claim) -> float:
    """How long an auditor has for its report, in seconds."""
    return AUDIT_REPORT_S + AUDIT_REPORT_PER_POSITION_S * claim.positions


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
        report_before=now_ms + int(report_within_s(claim) * 1000),
    )
