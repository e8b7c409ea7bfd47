"""Where the terminal UI is to go: a node that runs, or a mesh that a node of this machine is to join; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.urls import check_http_url
from tessella_p2p.node.peer_address import PeerAddress, check_peer_id, parse_orchestrator

_WEB = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class Goal:
    """One of both is set.

    Attributes:
        api_url: a running node's HTTP address.
        mesh: the orchestrator of a mesh, with its pin.
        operator: the peer id of the orchestrator that the node has to follow; None takes the one that it names.
    """

    api_url: str | None = None
    mesh: PeerAddress | None = None
    operator: PeerId | None = None


def goal_of(address: str, operator: str) -> Goal:
    """What was typed, as a goal.

    Args:
        address: a node's URL, or an orchestrator as ``orchestrator_url`` takes it.
        operator: the orchestrator's peer id; empty where the address has it, or where it is not known.

    Raises:
        ConfigurationError: one of both has no such form, or the address of a mesh lacks the operator's key.
    """
    address, operator = address.strip(), operator.strip()
    if not address:
        raise ConfigurationError(
            "an address is needed: a node's http://HOST:PORT, or an orchestrator's with its peer id"
        )
    if address.lower().startswith(_WEB):
        try:
            check_http_url(address)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        return Goal(api_url=address.rstrip("/"), operator=check_peer_id(operator) if operator else None)
    if "/" not in address and ":" in address:
        raise ConfigurationError(
            f"write http://{address} for a node; an orchestrator is /ip4/HOST/tcp/PORT/p2p/PEER_ID"
        )
    mesh = parse_orchestrator(address, operator or None)
    return Goal(mesh=mesh, operator=mesh.peer_id)


def operator_of(status: Mapping[str, Any]) -> PeerId | None:
    """The peer id of the orchestrator that a node follows, as its ``/status`` says; None where it names none."""
    orchestrator = status.get("orchestrator")
    try:
        return check_peer_id(str(orchestrator["peer_id"]) if isinstance(orchestrator, dict) else "")
    except (ConfigurationError, KeyError):
        return None


def check_operator(wanted: PeerId | None, said: PeerId | None) -> None:
    """Whether a node follows the orchestrator that it should.

    Raises:
        ConfigurationError: it follows another one.
    """
    if wanted is not None and said != wanted:
        raise ConfigurationError(
            f"this node follows another operator: {said or 'none'} and not {wanted}. "
            "Clear or change the operator's key if that is right"
        )
