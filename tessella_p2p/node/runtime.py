"""The three daemons (shell): configuration in, roles wired and running, until told to leave."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

import structlog
import trio

from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.errors import StorageError
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.bridge.app import create_app
from tessella_p2p.bridge.server import serve
from tessella_p2p.dht.service import Discovery
from tessella_p2p.entry.codec import ArtifactCodec
from tessella_p2p.entry.service import ServedModel
from tessella_p2p.ledger.blocking import in_thread
from tessella_p2p.ledger.proof_log import ProofLog
from tessella_p2p.ledger.store import LedgerStore
from tessella_p2p.model.artifact import Artifact
from tessella_p2p.model.recipe import RECIPES
from tessella_p2p.net.libp2p_host import Libp2pNetwork
from tessella_p2p.node.assembly import NodePlan, NodeRoles, Surroundings
from tessella_p2p.node.config import BootstrapConfig, ModelRoleConfig, NodeConfig, OrchestratorConfig, RoleConfig
from tessella_p2p.node.keystore import held_key
from tessella_p2p.node.lifetime import until_told, write_ready_file
from tessella_p2p.node.model_terms import model_terms
from tessella_p2p.node.view import LiveNodeView, NodeFacts
from tessella_p2p.orchestrator.service import Orchestrator
from tessella_p2p.orchestrator.terms import ANY_DEVICE
from tessella_p2p.orchestrator.terms import ServedModel as OrchestratedModel
from tessella_p2p.stages.service import StageService
from tessella_p2p.weights.store import resolve
from tessella_p2p.wire.envelope import ClockSequencer
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.worker.service import Offer

log = structlog.get_logger(__name__)

_SEQUENCE_SAVE_S = 15.0
MAX_SESSIONS = 16
"""Sessions whose KV a stage holds at once."""
DEFAULT_MAX_POSITIONS = 2048
_HTTP_DRAIN_S = 5.0


@asynccontextmanager
async def _network(config: RoleConfig, key: NodeKey, host: str, port: int) -> AsyncIterator[Libp2pNetwork]:
    """This node's libp2p host, announcing its public address where a NAT rule has one."""
    announce = []
    if config.public_ip is not None:
        family = "ip6" if ":" in config.public_ip else "ip4"
        announce.append(f"/{family}/{config.public_ip}/tcp/{config.public_p2p_port or port}")
    family = "ip6" if ":" in host else "ip4"
    async with Libp2pNetwork.open(key, [f"/{family}/{host}/tcp/{port}"], announce) as network:
        yield network


def _p2p_addresses(network: Libp2pNetwork) -> list[str]:
    return [f"{address}/p2p/{network.peer_id}" for address in network.addresses]


async def _open_artifact(config: ModelRoleConfig, models_dir: os.PathLike[str]) -> Artifact:
    """Map the configured model and hash it, on a thread."""

    def blocking() -> Artifact:
        path = resolve(config.default_model, models_dir)  # type: ignore[arg-type]
        artifact = Artifact.open(path)
        artifact.hash()
        return artifact

    return await trio.to_thread.run_sync(blocking)


# ---- bootstrap ----


async def run_bootstrap(config: BootstrapConfig) -> None:
    """Be a place to join the DHT through, until told to leave.

    Raises:
        ConfigurationError: a key file, port or address that cannot be used.
    """
    with held_key(config.keypair_path) as key:
        async with (
            _network(config, key, config.p2p_host, config.p2p_port) as network,
            trio.open_nursery() as nursery,
        ):
            discovery = Discovery(network, SystemClock(), random.Random(), pins=frozenset(), bootstrap=config.bootstrap)
            await nursery.start(discovery.run)
            leaving = await _up(nursery, config, network)
            await leaving.wait()
            nursery.cancel_scope.cancel()


async def _up(
    nursery: trio.Nursery, config: RoleConfig, network: Libp2pNetwork, api_url: str | None = None
) -> trio.Event:
    """Say that the node is up; the event is set when it is told to leave."""
    leaving = trio.Event()

    async def watch(task_status: trio.TaskStatus[None]) -> None:
        await until_told(exit_with_stdin=config.exit_with_stdin, task_status=task_status)
        leaving.set()

    await nursery.start(watch)
    addresses = _p2p_addresses(network)
    ready = {"peer_id": network.peer_id, "p2p_addresses": addresses, "api_url": api_url, "pid": os.getpid()}
    write_ready_file(config.ready_file, ready)
    log.info("up", peer_id=network.peer_id, addresses=addresses, api_url=api_url)
    return leaving


# ---- orchestrator ----


async def run_orchestrator(config: OrchestratorConfig) -> None:
    """Admit, split, mint and settle, until told to leave. Everything acknowledged is in the ledger by then.

    Raises:
        ConfigurationError, ArtifactError, StorageError: what the node cannot start without.
    """
    config.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with held_key(config.keypair_path) as key, closing(LedgerStore(config.data_dir / "ledger")) as store:
        artifact = await _open_artifact(config, config.models_dir)
        with artifact:
            model = _orchestrated(artifact, config)
        sequencer = ClockSequencer(store.sequence_floor())
        async with (
            _network(config, key, config.p2p_host, config.p2p_port) as network,
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
                allow=frozenset(config.allow) or None,
                sequencer=sequencer,
            )
            discovery = Discovery(
                network, SystemClock(), random.Random(), pins=frozenset({key.peer_id}), bootstrap=config.bootstrap
            )
            await nursery.start(discovery.run)
            await nursery.start(orchestrator.run)
            nursery.start_soon(_save_sequences, sequencer, store)
            leaving = await _up(nursery, config, network)
            await leaving.wait()
            nursery.cancel_scope.cancel()


def _orchestrated(artifact: Artifact, config: OrchestratorConfig) -> OrchestratedModel:
    positions = config.max_positions or min(DEFAULT_MAX_POSITIONS, artifact.config.context_length)
    recipe = RECIPES[config.recipe]
    terms = model_terms(artifact.config, artifact.costs, recipe, num_sessions=MAX_SESSIONS, max_positions=positions)
    return OrchestratedModel(
        model_id=artifact.model_id,
        manifest_root=artifact.root,
        contract_hash=artifact.contract_hash,
        total_layers=artifact.config.layers,
        terms={(config.recipe, ANY_DEVICE): terms},
    )


async def _save_sequences(sequencer: ClockSequencer, store: LedgerStore | ProofLog) -> None:
    """Keep the sequence floor on disk, ahead of what was given out: a clock that is set back cannot repeat one."""
    while True:
        ahead = sequencer.floor + int(_SEQUENCE_SAVE_S * 2e6)
        try:
            await in_thread(partial(store.raise_sequence_floor, ahead))
        except StorageError as error:  # sequences follow the clock: they matter when that is set back
            log.error("the sequence floor cannot be saved", reason=str(error))
        await trio.sleep(_SEQUENCE_SAVE_S)


# ---- daemon ----


async def run_daemon(config: NodeConfig) -> None:
    """Be a worker and an entry until told to leave; then answers in flight finish, sessions end and their proofs are written.

    Raises:
        ConfigurationError, ArtifactError, StorageError: what the node cannot start without. An orchestrator or bootstrap
            node that cannot be reached is no such thing: the node says so, retries, and serves what it can.
    """
    with held_key(config.keypair_path) as key, closing(ProofLog(_own_folder(config.data_dir, key))) as proof_log:
        artifact = await _open_artifact(config, config.models_dir)
        sequencer = ClockSequencer(proof_log.sequence_floor())
        with artifact:
            async with (
                _network(config, key, config.p2p_host, config.p2p_port) as network,
                trio.open_nursery() as nursery,
            ):
                around = _surroundings(config, key, network, sequencer, proof_log, artifact)
                roles = NodeRoles(_plan(config, artifact), around)
                view = LiveNodeView(_facts(config, key, artifact), roles, around.clock, proof_log, in_thread)
                drain = trio.Event()
                url = await nursery.start(
                    partial(serve, create_app(roles.entry, view), config.api_host, config.api_port, drain=drain)
                )
                await nursery.start(roles.run)
                nursery.start_soon(view.run)
                nursery.start_soon(_save_sequences, sequencer, proof_log)
                leaving = await _up(nursery, config, network, url)
                await leaving.wait()
                drain.set()
                await _finish_answers(roles)
                nursery.cancel_scope.cancel()


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
    artifact: Artifact,
) -> Surroundings:
    async def load(layers: LayerRange) -> StageService:
        from tessella_p2p.stages.loading import load_engine

        engine = await trio.to_thread.run_sync(
            partial(
                load_engine,
                artifact.path,
                layers,
                RECIPES[config.recipe],
                threads=config.threads,
                max_sessions=MAX_SESSIONS,
                max_positions=config.max_positions or min(DEFAULT_MAX_POSITIONS, artifact.config.context_length),
            )
        )
        return StageService(engine)

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
    )


def _plan(config: NodeConfig, artifact: Artifact) -> NodePlan:
    orchestrator = config.orchestrator
    offer = Offer(
        model_id=artifact.model_id,
        manifest_root=artifact.root,
        contract_hash=artifact.contract_hash,
        total_layers=artifact.config.layers,
        recipe=config.recipe,
        claim_mb=config.vram_mb,
        device=config.device,
        layers=config.layers,
    )
    return NodePlan(
        model=ServedModel(
            model_id=artifact.model_id,
            codec=ArtifactCodec(artifact, SystemClock()),
            manifest_root=artifact.root,
            recipes=(config.recipe, *(name for name in RECIPES if name != config.recipe)),
        ),
        orchestrator=orchestrator.peer_id,
        orchestrator_address=orchestrator.address,
        offer=offer,
        bootstrap=config.bootstrap,
        kademlia_enabled=config.kademlia_enabled,
        hop_timeout_s=config.p2p_inference_timeout_secs,
        checkpoint_s=config.wal_checkpoint_interval_secs,
        max_input_tokens=config.max_input_tokens,
    )


def _facts(config: NodeConfig, key: NodeKey, artifact: Artifact) -> NodeFacts:
    return NodeFacts(
        peer_id=key.peer_id,
        model_id=artifact.model_id,
        recipe=config.recipe,
        hidden_size=artifact.config.hidden,
        context_length=artifact.config.context_length,
        device=config.device,
        orchestrator=config.orchestrator.peer_id,
        hop_timeout_s=config.p2p_inference_timeout_secs,
        max_input_tokens=config.max_input_tokens,
    )
