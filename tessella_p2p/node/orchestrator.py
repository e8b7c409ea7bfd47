"""The orchestrator daemon (shell)."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from math import ceil
from pathlib import Path

import trio

from tessella_p2p.audits.tolerance import NONE_MEASURED, Tolerances
from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import DEFAULT_MAX_POSITIONS, DEFAULT_MAX_SESSIONS, KIB, MICRO_PER_CREDIT
from tessella_p2p.bridge.known_host import own_names
from tessella_p2p.bridge.orchestrator_app import create_orchestrator_app
from tessella_p2p.bridge.server import serve
from tessella_p2p.dht.service import Discovery
from tessella_p2p.ledger.blocking import in_thread
from tessella_p2p.ledger.mirrors import Mirrors
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.ledger.verifiers import ProofVerifiers
from tessella_p2p.model.artifact import Artifact
from tessella_p2p.model.recipe import RECIPES
from tessella_p2p.node.artifacts import open_artifact
from tessella_p2p.node.config import OrchestratorConfig
from tessella_p2p.node.keystore import held_key
from tessella_p2p.node.log import set_log_level
from tessella_p2p.node.model_terms import model_terms
from tessella_p2p.node.peer_address import parse_peer_address
from tessella_p2p.node.reload import Reread, reload_on_hangup
from tessella_p2p.node.standing import come_up, open_network, save_sequences
from tessella_p2p.node.terms_file import parse_terms
from tessella_p2p.orchestrator.admission import MemberRules
from tessella_p2p.orchestrator.auditing import AuditPolicy
from tessella_p2p.orchestrator.operator_log import FILE_NAME as OPERATOR_LOG
from tessella_p2p.orchestrator.operator_log import OperatorLog
from tessella_p2p.orchestrator.service import Orchestrator
from tessella_p2p.orchestrator.terms import ANY_DEVICE, ModelTerms
from tessella_p2p.orchestrator.terms import ServedModel as OrchestratedModel
from tessella_p2p.wire.envelope import ClockSequencer


async def run_orchestrator(config: OrchestratorConfig, reread: Reread | None = None) -> None:
    """Admit, split, mint and settle, until told to leave. Everything acknowledged is in the ledger by then.

    Args:
        config: its settings.
        reread: reads them again, at a SIGHUP; None leaves that signal alone.

    Raises:
        ConfigurationError, ArtifactError, StorageError: what the node cannot start without.
    """
    audits = AuditPolicy(share=config.audit_share, tolerances=_tolerances(config.audit_tolerances))
    config.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (
        held_key(config.keypair_path) as key,
        closing(ProofVerifiers(config.settle_processes)) as verify,
        closing(LedgerStore(config.data_dir / "ledger", verify=verify)) as store,
        closing(OperatorLog(config.data_dir / OPERATOR_LOG)) as operator_log,
        closing(_mirrors(config, federation := _federation(config, key.peer_id))) as mirrors,
    ):
        artifact = await open_artifact(config, config.models_dir)
        with artifact:
            model = _orchestrated(artifact, config)
        sequencer = ClockSequencer(store.sequence_floor())
        async with (
            open_network(config, key, config.p2p_host, config.p2p_port) as network,
            trio.open_nursery() as nursery,
        ):
            orchestrator = Orchestrator(
                network,
                key,
                SystemClock(),
                store,
                models=[model],
                recipe=config.recipe,
                min_stages=config.min_stages,
                rules=MemberRules(
                    registration_grace_s=config.registration_grace_secs,
                    allow_private_addrs=config.allow_private_addrs,
                    min_claim_mb=ceil(config.min_vram_gb * KIB),
                ),
                repair_after_s=config.repair_after_secs or None,
                issuance_per_day=config.issuance_per_day * MICRO_PER_CREDIT,
                requester_pays=config.requester_pays,
                allow=frozenset(config.allow) or None,
                sequencer=sequencer,
                operator_log=operator_log,
                mirrors=mirrors,
                federation=federation,
                audits=audits,
            )
            orchestrator.operating.admin_token = config.admin_token
            discovery = Discovery(
                network,
                SystemClock(),
                random.Random(),
                pins=orchestrator.federating.peers | {key.peer_id},
                bootstrap=config.bootstrap,
            )
            if reread is not None:
                reload = partial(_reload, orchestrator, discovery, key.peer_id, reread)
                await nursery.start(reload_on_hangup, config, reload)
            await nursery.start(discovery.run)
            await nursery.start(orchestrator.run)
            nursery.start_soon(save_sequences, sequencer, store)
            app = create_orchestrator_app(orchestrator, names=own_names(config.api_host, config.api_names))
            url = await nursery.start(partial(serve, app, config.api_host, config.api_port))
            leaving = await come_up(nursery, config, network, url)
            await leaving.wait()
            nursery.cancel_scope.cancel()


def _tolerances(path: Path | None) -> Tolerances:
    """What was measured between recipes.

    Raises:
        ConfigurationError: the file cannot be read, or is wrong.
    """
    if path is None:
        return NONE_MEASURED
    try:
        return Tolerances.of_file(tomllib.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as error:  # a TOMLDecodeError and a UnicodeDecodeError are ValueErrors
        raise ConfigurationError(f"audit_tolerances: {path}: {error}") from error


def _mirrors(config: OrchestratorConfig, federation: Iterable[PeerId]) -> Mirrors:
    return Mirrors(config.data_dir / "federation", federation, config.trust_limit * MICRO_PER_CREDIT)


def _federation(config: OrchestratorConfig, own: PeerId) -> dict[PeerId, str | None]:
    """The orchestrators that are followed, and where they are dialled.

    Raises:
        ConfigurationError: this orchestrator is one of them.
    """
    federation: dict[PeerId, str | None] = {
        other.peer_id: other.address for other in map(parse_peer_address, config.federation)
    }
    if own in federation:
        raise ConfigurationError(f"federation names {own}, which is this orchestrator: leave it out")
    return federation


async def _reload(orchestrator: Orchestrator, discovery: Discovery, own: PeerId, reread: Reread) -> OrchestratorConfig:
    """Read the settings again and put into effect what can be; see `RELOADED`."""
    async with orchestrator.operating.action("signal SIGHUP", "reload", {}):
        config = await in_thread(reread)
        federation = _federation(config, own)
        orchestrator.operating.admin_token = config.admin_token
        set_log_level(config.log_level)
        orchestrator.membership.core.min_stages = config.min_stages
        await orchestrator.repin(federation)
        discovery.view.pins = orchestrator.federating.peers | {own}
        await orchestrator.admit_only(frozenset(config.allow) or None)
    return config


def _orchestrated(artifact: Artifact, config: OrchestratorConfig) -> OrchestratedModel:
    positions = config.max_positions or min(DEFAULT_MAX_POSITIONS, artifact.config.context_length)
    recipe = RECIPES[config.recipe]
    computed: dict[tuple[str, str], ModelTerms] = {
        (config.recipe, device): model_terms(
            artifact.config,
            artifact.file.tensors,
            recipe,
            num_sessions=DEFAULT_MAX_SESSIONS,
            max_positions=positions,
            device=device,
        )
        for device in (ANY_DEVICE, "cuda", "metal")
    }
    return OrchestratedModel(
        model_id=artifact.model_id,
        manifest_root=artifact.root,
        contract_hash=artifact.contract_hash,
        total_layers=artifact.config.layers,
        terms={**computed, **_measured(config.terms, artifact)},
    )


def _measured(path: Path | None, artifact: Artifact) -> dict[tuple[str, str], ModelTerms]:
    """What the operator's file says of the model.

    Raises:
        ConfigurationError: the file cannot be read, or is wrong.
    """
    if path is None:
        return {}
    try:
        return parse_terms(path.read_text("utf-8"), artifact.model_id, artifact.config.layers)
    except (OSError, UnicodeDecodeError, ConfigurationError) as error:
        raise ConfigurationError(f"terms: {path}: {error}") from error
