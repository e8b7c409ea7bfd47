"""What a network serves, asked of its orchestrator by a machine that is no node of it yet (shell)."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass

import trio

from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.errors import HopTimeout
from tessella_p2p.base.limits import MAX_PAGE_ROWS, ORCHESTRATOR_REQUEST_S
from tessella_p2p.ledger.client import OrchestratorClient
from tessella_p2p.node.peer_address import PeerAddress
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import ClockSequencer
from tessella_p2p.wire.keys import SEED_BYTES, NodeKey


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """A model of a network: how many workers serve it, and the recipe of most of them (None where nobody says)."""

    model_id: str
    num_workers: int
    recipe: str | None


async def read_network_models(orchestrator: PeerAddress) -> tuple[NetworkModel, ...]:
    """The models that an orchestrator knows, those with the most workers first. Asked under a key that nobody sees again.

    Raises:
        TransportError: it cannot be reached, or is not the peer that was pinned.
        NotAuthorized: a private mesh; it is there, and tells strangers nothing.
        TessellaError: it refused otherwise, or broke a rule.
    """
    from tessella_p2p.net.libp2p_host import (
        Libp2pNetwork,  # it takes seconds to import, and the first question need not wait
    )

    key = NodeKey(secrets.token_bytes(SEED_BYTES))
    with trio.move_on_after(2 * ORCHESTRATOR_REQUEST_S):
        async with Libp2pNetwork.open(key, []) as network:
            client = OrchestratorClient(
                network, key, SystemClock(), ClockSequencer(), orchestrator.peer_id, orchestrator.address
            )
            listed = await client.ask(m.ListModels(), m.Models)
            models = [
                NetworkModel(each.model_id, each.active_workers, await _recipe_of(client, each.model_id))
                for each in listed.models
            ]
            return tuple(sorted(models, key=lambda model: (-model.num_workers, model.model_id)))
    raise HopTimeout(f"{orchestrator.address} did not answer in time")


async def _recipe_of(client: OrchestratorClient, model_id: str) -> str | None:
    """The recipe, without its drift class, that most of the first workers have."""
    page = await client.ask(m.ListPeers(model_id=model_id, limit=MAX_PAGE_ROWS), m.Peers)
    recipes = Counter(peer.recipe.partition("@")[0] for peer in page.peers if not peer.canary)
    return recipes.most_common(1)[0][0] if recipes else None
