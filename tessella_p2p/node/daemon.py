"""The node daemon, worker and entry (shell)."""

from __future__ import annotations

import os
import random
from contextlib import closing
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import structlog
import trio

from tessella_p2p.base.clock import SystemClock, WallClock
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import DEFAULT_MAX_POSITIONS, DEFAULT_MAX_SESSIONS
from tessella_p2p.bridge.api_keys import ApiKeys
from tessella_p2p.bridge.app import create_app
from tessella_p2p.bridge.authorising import KeyRing
from tessella_p2p.bridge.known_host import own_names
from tessella_p2p.bridge.known_origin import OriginRules
from tessella_p2p.bridge.server import serve
from tessella_p2p.entry.codec import ArtifactCodec
from tessella_p2p.entry.finding import ServedModel
from tessella_p2p.ledger.blocking import in_thread
from tessella_p2p.ledger.proof_log import ProofLog
from tessella_p2p.model.artifact import Artifact
from tessella_p2p.model.recipe import RECIPES
from tessella_p2p.net.libp2p_host import Libp2pNetwork
from tessella_p2p.node.api_key_file import follow_keys, path_in
from tessella_p2p.node.artifacts import open_artifact
from tessella_p2p.node.assembly import NodePlan, NodeRoles, Surroundings
from tessella_p2p.node.config import NodeConfig
from tessella_p2p.node.keystore import held_key
from tessella_p2p.node.lifetime import outlive_hangups
from tessella_p2p.node.standing import come_up, open_network, save_sequences
from tessella_p2p.node.view import LiveNodeView, NodeFacts
from tessella_p2p.node.watchdog import LoopWatchdog
from tessella_p2p.stages.canary import dressed
from tessella_p2p.stages.engine_life import StageRules
from tessella_p2p.stages.pending import Loader
from tessella_p2p.stages.quantize import conversions
from tessella_p2p.stages.service import StageService
from tessella_p2p.wire.envelope import ClockSequencer
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.worker.open_journal import OpenJournal
from tessella_p2p.worker.registration import Offer

log = structlog.get_logger(__name__)

_HTTP_DRAIN_S = 5.0
_ENGINE_DEVICE = {"cpu": "cpu", "cuda": "cuda", "metal": "mps"}


async def run_daemon(config: NodeConfig) -> None:
    """Be a worker and an entry until told to leave; then answers in flight finish, sessions end and their proofs are written.

    Raises:
        ConfigurationError, ArtifactError, StorageError: what the node cannot start without. An orchestrator or bootstrap
            node that cannot be reached is no such thing: the node says so, retries, and serves what it can.
    """
    with held_key(config.keypair_path) as key, closing(ProofLog(_own_folder(config.data_dir, key))) as proof_log:
        recipe = await _published(config)
        artifact = await open_artifact(config, config.models_dir)
        sequencer = ClockSequencer(proof_log.sequence_floor())
        with artifact, closing(OpenJournal(_own_folder(config.data_dir, key))) as opens:
            async with (
                open_network(config, key, config.p2p_host, config.p2p_port) as network,
                trio.open_nursery() as nursery,
            ):
                around = _surroundings(config, key, network, sequencer, proof_log, opens, artifact)
                roles = NodeRoles(_plan(config, artifact, recipe), around)
                facts = _facts(config, key, artifact, recipe)
                log.info("recipe", recipe=recipe, conversions=facts.conversions)
                view = LiveNodeView(facts, roles, around.clock, proof_log, in_thread)
                drain = trio.Event()
                app = create_app(
                    roles.entry,
                    view,
                    names=own_names(config.api_host, _api_names(config), is_guarded=config.api_keys == "required"),
                    origins=_origins(config),
                    keys=await _key_ring(config, around.clock, nursery),
                )
                url = await nursery.start(partial(serve, app, config.api_host, config.api_port, drain=drain))
                await nursery.start(roles.run)
                nursery.start_soon(view.run)
                nursery.start_soon(save_sequences, sequencer, proof_log)
                leaving = await come_up(nursery, config, network, url)
                await leaving.wait()
                drain.set()
                await _finish_answers(roles)
                nursery.cancel_scope.cancel()


def _api_names(config: NodeConfig) -> tuple[str, ...]:
    """Under which clients are told to ask, or may."""
    public = config.announced_api_url
    host = None if public is None else urlsplit(public).hostname
    return config.api_names if host is None else (*config.api_names, host)


def _origins(config: NodeConfig) -> OriginRules:
    """Whose web pages may use it."""
    return OriginRules(frozenset(config.cors_origins), frozenset(name.lower() for name in _api_names(config)))


async def _key_ring(config: NodeConfig, clock: WallClock, nursery: trio.Nursery) -> KeyRing | None:
    """The API keys, kept as the file has them and read again at SIGHUP; None where nobody needs one.

    Raises:
        ConfigurationError: the file is damaged, or others may read it.
    """
    if config.api_keys != "required":
        nursery.start_soon(outlive_hangups)
        return None
    ring = KeyRing(ApiKeys(), clock)
    await nursery.start(partial(follow_keys, path_in(config.data_dir), ring.replace))
    return ring


async def _published(config: NodeConfig) -> str:
    """The recipe as this machine publishes it: torch's carry the drift class of its build and device.

    Raises:
        ConfigurationError, NotCertified: the device is not there, or has no kernels for the recipe.
    """
    from tessella_p2p.stages.loading import published_name

    device = _ENGINE_DEVICE[config.device]
    return await trio.to_thread.run_sync(published_name, RECIPES[config.recipe], device)


def _own_folder(data_dir: Path, key: NodeKey) -> Path:
    """Where this identity keeps its proofs: they are paid to the peer that signed them, so two keys may share a ``data_dir``."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return data_dir / "proofs" / key.peer_id


async def _finish_answers(roles: NodeRoles) -> None:
    """Give answers in flight a moment to end by themselves."""
    with trio.move_on_after(_HTTP_DRAIN_S):
        await roles.entry.idle()


def _surroundings(
    config: NodeConfig,
    key: NodeKey,
    network: Libp2pNetwork,
    sequencer: ClockSequencer,
    proof_log: ProofLog,
    opens: OpenJournal,
    artifact: Artifact,
) -> Surroundings:
    async def load(layers: LayerRange) -> StageService:
        from tessella_p2p.stages.loading import load_engine

        engine: Loader = partial(
            load_engine,
            artifact.path,
            layers,
            RECIPES[config.recipe],
            device=_ENGINE_DEVICE[config.device],
            threads=config.compute_threads,
            max_sessions=DEFAULT_MAX_SESSIONS,
            max_positions=config.max_positions or min(DEFAULT_MAX_POSITIONS, artifact.config.context_length),
        )
        if config.canary_mode != "off":
            engine = dressed(engine, config.canary_mode, key.peer_id)
        return await StageService.loaded(engine, rules=_rules(config), cpus=config.cpus)

    return Surroundings(
        network=network,
        key=key,
        clock=SystemClock(),
        sequencer=sequencer,
        rng=random.Random(),
        random_bytes=os.urandom,
        run_blocking=in_thread,
        proof_log=proof_log,
        load=load,
        opens=opens,
        grammars=artifact.grammars,
        watchdog=LoopWatchdog(),
    )


def _rules(config: NodeConfig) -> StageRules:
    return StageRules(
        oom_streak=config.oom_streak,
        streak_window_s=config.streak_window_secs,
        sleep_after_s=config.sleep_after_secs or None,
        patience_s=config.p2p_inference_timeout_secs,
    )


def _plan(config: NodeConfig, artifact: Artifact, recipe: str) -> NodePlan:
    orchestrator = config.orchestrator
    offer = Offer(
        model_id=artifact.model_id,
        manifest_root=artifact.root,
        contract_hash=artifact.contract_hash,
        total_layers=artifact.config.layers,
        recipe=recipe,
        claim_mb=config.vram_mb,
        device=config.device,
        layers=config.layers,
        api_url=config.announced_api_url,
        canary=config.canary_mode,
    )
    return NodePlan(
        model=ServedModel(
            model_id=artifact.model_id,
            codec=ArtifactCodec(artifact, SystemClock()),
            manifest_root=artifact.root,
            recipes=(config.recipe, *(name for name in RECIPES if name != config.recipe)),
            hidden_size=artifact.config.hidden,
        ),
        orchestrator=orchestrator.peer_id,
        orchestrator_address=orchestrator.address,
        standbys=tuple((standby.peer_id, standby.address) for standby in config.standbys),
        offer=offer,
        bootstrap=config.bootstrap,
        kademlia_enabled=config.kademlia_enabled,
        hop_timeout_s=config.p2p_inference_timeout_secs,
        checkpoint_s=config.wal_checkpoint_interval_secs,
        max_input_tokens=config.max_input_tokens,
        outage_grace_s=config.outage_grace_secs,
    )


def _facts(config: NodeConfig, key: NodeKey, artifact: Artifact, recipe: str) -> NodeFacts:
    return NodeFacts(
        peer_id=key.peer_id,
        model_id=artifact.model_id,
        recipe=recipe,
        hidden_size=artifact.config.hidden,
        context_length=artifact.config.context_length,
        device=config.device,
        orchestrator=config.orchestrator.peer_id,
        hop_timeout_s=config.p2p_inference_timeout_secs,
        max_input_tokens=config.max_input_tokens,
        conversions=conversions(artifact.file.tensors.values(), RECIPES[config.recipe]),
    )
