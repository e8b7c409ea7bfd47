"""What a worker offers, what it is granted, and what makes a grant one (shell: it asks the orchestrator)."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
import trio

from tessella_p2p.base.errors import (
    InvalidRequest,
    NotAuthorized,
    RemoteProtocolError,
    TessellaError,
    TransportError,
)
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.dht.service import Discovery
from tessella_p2p.ledger.client import OrchestratorPort
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import open_envelope
from tessella_p2p.worker.context import StageContext

log = structlog.get_logger(__name__)

_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 15.0


@dataclass(frozen=True, slots=True)
class Offer:
    """What this node offers to hold."""

    model_id: str
    manifest_root: bytes
    contract_hash: bytes
    total_layers: int
    recipe: str
    claim_mb: int
    device: str
    layers: LayerRange | None = None
    api_url: str | None = None
    canary: m.CanaryMode = "off"
    """How it answers instead of truly, where this node is a canary: its engine does so (see ``load``), its lease and records say so."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What an orchestrator granted: the layers, and the lease that certifies them. Serials count within ``issuer``."""

    layers: LayerRange
    serial: int
    lease: bytes
    expires_at: int
    issuer: PeerId


class Registration:
    """Asks for layers, and checks what is granted: in an answer, or with an order.

    Args:
        instance: 16 random bytes of this process; None leaves them out.
    """

    def __init__(
        self,
        context: StageContext,
        offer: Offer,
        client: OrchestratorPort,
        discovery: Discovery,
        instance: bytes | None,
    ) -> None:
        self._context = context
        self._offer = offer
        self._client = client
        self._discovery = discovery
        self.instance = instance
        self.last_refusal: str | None = None
        """Why this node has no layers; None where it has."""

    async def register(self) -> Assignment:
        """Ask until there is a grant, at growing intervals."""
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                assignment = self.accept(await self._client.ask(self._request(), m.Assigned))
            except TessellaError as error:
                self._discovery.orchestrator_reachable(not isinstance(error, TransportError))
                self.last_refusal = str(error)
                log.warning("not registered yet", retry_s=retry_s, code=error.code, reason=str(error))
                await trio.sleep(retry_s)
                retry_s = min(retry_s * 2, _LAST_RETRY_S)
            else:
                self.last_refusal = None
                self._discovery.orchestrator_reachable(True)
                return assignment

    def _request(self) -> m.Register:
        offer = self._offer
        return m.Register(
            addresses=self._context.network.addresses,
            api_url=offer.api_url,
            canary=offer.canary,
            claim_mb=offer.claim_mb,
            device=offer.device,
            model_id=offer.model_id,
            total_layers=offer.total_layers,
            manifest_root=offer.manifest_root,
            contract_hash=offer.contract_hash,
            recipe=offer.recipe,
            layers=offer.layers.as_tuple() if offer.layers else None,
            instance=self.instance,
        )

    def accept(self, assigned: m.Assigned) -> Assignment:
        """The assignment in an answer.

        Raises:
            RemoteProtocolError: its lease is not what peers would accept of this node.
        """
        assignment = self._granted(assigned.lease, assigned.layers)
        self._discovery.observe(assigned.records, "orchestrator")
        return assignment

    def accept_order(self, order: m.UpdateAssignment, signer: PeerId, current: Assignment) -> Assignment:
        """The assignment that an order brings.

        Raises:
            RemoteProtocolError: its lease is not its signer's, or is not what peers would accept of this node.
            InvalidRequest: layers beyond this node's own bound, or those that it serves.
            NotAuthorized: a canary is a copy and stays one; or the lease is no newer than the one in force.
        """
        assignment = self._granted(order.lease, order.layers)
        offer = self._offer
        if assignment.issuer != signer or order.model_id != offer.model_id:
            raise RemoteProtocolError("the lease of an order is another orchestrator's, or for another model")
        if offer.canary != "off":
            raise NotAuthorized("this node is a canary: it copies the range that it registered for")
        if offer.layers is not None and not offer.layers.contains(assignment.layers):
            raise InvalidRequest(f"this node serves layers within {offer.layers} only", param="layers")
        if assignment.layers == current.layers:
            raise InvalidRequest(f"layers {current.layers} are served here already", param="layers")
        if assignment.issuer == current.issuer and assignment.serial <= current.serial:
            raise NotAuthorized(f"lease {assignment.serial} is no newer than lease {current.serial}, which is in force")
        return assignment

    def _granted(self, sealed: bytes, layers: tuple[int, int]) -> Assignment:
        """Check a lease before anything is done with it: it is what peers will check too."""
        envelope = open_envelope(sealed, m.LEASE, now_ms=self._context.clock.unix_ms())
        if envelope.signer not in self._client.orchestrators:
            raise RemoteProtocolError(f"a lease of {envelope.signer}, which this node does not pin")
        lease = envelope.message(m.Lease)
        offer = self._offer
        granted = (lease.peer_id, lease.model_id, lease.manifest_root, lease.recipe, lease.layers, lease.canary)
        own, canary = self._context.key.peer_id, offer.canary != "off"
        expected = (own, offer.model_id, offer.manifest_root, offer.recipe, layers, canary)
        if granted != expected or lease.layers[1] > offer.total_layers:
            raise RemoteProtocolError("the orchestrator's lease is for something else than was asked for")
        return Assignment(LayerRange(*lease.layers), lease.serial, sealed, envelope.expires_at, envelope.signer)
