"""What a node of this machine needs to know to join a mesh: a little is asked, the rest is as ``daemon`` would have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import psutil

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.limits import MIB
from tessella_p2p.cli.wizard import default_claim_mb, first_free_port, is_free
from tessella_p2p.model.recipe import RECIPES
from tessella_p2p.node.config import NodeConfig, load_config
from tessella_p2p.node.config_file import found_config
from tessella_p2p.node.peer_address import PeerAddress
from tessella_p2p.node.settings import Given
from tessella_p2p.weights.catalog import CATALOG
from tessella_p2p.weights.store import resolve

_PLACES: Final = {"default_model": "the model", "vram_mb": "the claim", "api_port": "api_port", "p2p_port": "p2p_port"}
"""Where answers were given, in the words of an error."""


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """A node that is to be started.

    Attributes:
        settings: what it is told by flags; the rest it reads as every ``daemon`` does.
        model_id: its model.
        models_dir: where that is.
        pull_bytes: how much of it has to be pulled first; 0 where it is there.
    """

    settings: Mapping[str, object]
    model_id: str
    models_dir: str
    pull_bytes: int


def proposed(mesh: PeerAddress, model_id: str | None, environ: Mapping[str, str]) -> tuple[str, int]:
    """The model and the claim in MB that a node would have: those of its file where there is one.

    Raises:
        ConfigurationError: the node's file or the environment breaks a rule.
    """
    given = _given(mesh) | ({} if model_id is None else {"default_model": Given(model_id, "--model-id")})
    config = _config(given, environ)
    if "vram_mb" in config.model_fields_set:
        return config.default_model, config.vram_mb
    return config.default_model, default_claim_mb(psutil.virtual_memory().available)


def join_plan(
    mesh: PeerAddress, model_id: str, claim_mb: str, recipe: str | None, environ: Mapping[str, str]
) -> JoinPlan:
    """What was answered, held against the settings' own rules.

    Args:
        mesh: the orchestrator.
        model_id: a catalogue id, or a path.
        claim_mb: as it was typed.
        recipe: of the mesh's workers; None where nobody knows.
        environ: the process environment.

    Raises:
        ConfigurationError: an answer breaks a rule, or the model is not here and cannot be pulled.
    """
    answers: dict[str, object] = {"default_model": model_id.strip(), "vram_mb": claim_mb.strip()}
    if found_config("node", environ) is None:
        # where a file says which ports, they are the user's own choice, and a taken one is an error
        answers["api_port"] = _port("api_port")
        answers["p2p_port"] = _port("p2p_port")
    config = _config(_given(mesh) | {name: Given(value, _PLACES[name]) for name, value in answers.items()}, environ)
    if recipe in RECIPES and not {"recipe", "quantization"} & config.model_fields_set:
        answers["recipe"] = recipe
    settings = {name: given.value for name, given in _given(mesh).items()} | answers
    return JoinPlan(settings, config.default_model, str(config.models_dir), _pull_bytes(config))


def _given(mesh: PeerAddress) -> dict[str, Given]:
    return {
        "orchestrator_url": Given(mesh.multiaddr, "the mesh's address"),
        "orchestrator_peer_id": Given(mesh.peer_id, "the operator's key"),
    }


def _config(given: Mapping[str, Given], environ: Mapping[str, str]) -> NodeConfig:
    return load_config(NodeConfig, flags=given, environ=environ, file=found_config("node", environ))


def _port(name: str) -> int:
    return first_free_port(NodeConfig.model_fields[name].default, is_free)


def _pull_bytes(config: NodeConfig) -> int:
    try:
        resolve(config.default_model, config.models_dir)
    except ConfigurationError:
        known = CATALOG.get(config.default_model)
        if known is None:
            raise
        return known.source.size_bytes
    return 0


def megabytes(size_bytes: int) -> str:
    """A size, in words."""
    return f"{size_bytes / MIB:.0f} MiB"
