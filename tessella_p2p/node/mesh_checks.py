"""What `doctor` looks at beyond this machine (shell): ports, the orchestrator and its clock, bootstrap nodes, and the node if it runs.

It asks under a key that nobody sees again, so that it disturbs no node that runs with the real one.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping
from typing import Any

import httpx
import trio

from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.errors import (
    ConfigurationError,
    NotAuthorized,
    PortInUseError,
    RefusalError,
    RemoteProtocolError,
    TessellaError,
    TransportError,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import CLOCK_SKEW_MS, MAX_HTTP_BODY_BYTES
from tessella_p2p.ledger.client import OrchestratorClient
from tessella_p2p.model.artifact import model_id_of
from tessella_p2p.net.libp2p_host import Libp2pNetwork
from tessella_p2p.net.listening import bind
from tessella_p2p.net.network import Network
from tessella_p2p.node.config import NodeConfig
from tessella_p2p.node.findings import Finding, ok, problem, warning
from tessella_p2p.node.peer_address import PeerAddress, parse_peer_address
from tessella_p2p.weights.store import resolve
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import ClockSequencer
from tessella_p2p.wire.keys import SEED_BYTES, NodeKey

_PATIENCE_S = 12.0
_HTTP_S = 5.0
_MAX_REASON_CHARS = 240
_BOOTSTRAP_FIX = "start it, or take its line out of bootstrap"
_UNEASY_SKEW_MS = 5_000
Status = Mapping[str, Any]
"""A node's ``/status``."""


async def read_status(config: NodeConfig, api_key: str | None) -> tuple[Status | None, Finding]:
    """What the node says of itself, if it runs, and how that stands; nothing where it asks for a key that was not given."""
    url = _own_url(config)
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        async with httpx.AsyncClient(timeout=_HTTP_S, headers=headers, trust_env=False) as client:  # its own address
            async with client.stream("GET", f"{url}/status") as answer:
                body = await _bounded(answer)
            if answer.status_code == httpx.codes.UNAUTHORIZED:
                says = "asks for an API key" if api_key is None else "does not take this API key"
                fix = "give one that counts: --api-key before the command, or TESSELLA_API_KEY"
                return {}, warning("node", f"something at {url} {says}", fix)
            status = httpx.Response(answer.status_code, content=body).json()
    except httpx.TransportError:
        return None, ok("node", f"nothing answers at {url}: it does not run, so what follows is about its next start")
    except ValueError:
        status = None
    if not isinstance(status, dict) or "peer_id" not in status or "state" not in status:
        return None, problem("node", f"what answers at {url} is no Tessella node", "choose another api_port, or end it")
    return status, ok("node", f"it runs at {url} and is {status['state']}")


def _own_url(config: NodeConfig) -> str:
    host = ipaddress.ip_address(config.api_host)
    if host.is_unspecified:
        host = ipaddress.ip_address("127.0.0.1" if host.version == 4 else "::1")
    return f"http://{f'[{host}]' if host.version == 6 else host}:{config.api_port}"


async def _bounded(answer: httpx.Response) -> bytes:
    content = bytearray()
    async for part in answer.aiter_bytes():
        content += part
        if len(content) > MAX_HTTP_BODY_BYTES:
            raise ValueError("an answer that is too long")
    return bytes(content)


async def check_ports(config: NodeConfig, key: NodeKey | None, status: Status | None) -> list[Finding]:
    """Whether both ports are free, or taken by this very node; ``status`` is as `read_status` has it."""
    own = None if status == {} else key is not None and status is not None and status.get("peer_id") == key.peer_id
    return [
        await _check_port("api_port", config.api_host, config.api_port, own=own),
        await _check_port("p2p_port", config.p2p_host, config.p2p_port, own=own),
    ]


async def _check_port(setting: str, host: str, port: int, *, own: bool | None) -> Finding:
    """``own``: whether this very node runs; None where it did not say."""
    if port == 0:
        return ok(setting, "the system chooses one at each start")
    family = "ip6" if ":" in host else "ip4"
    try:
        listeners = await bind([f"/{family}/{host}/tcp/{port}"])
    except PortInUseError:
        if own:
            return ok(setting, f"{port}, held by this node")
        if own is None:
            return warning(setting, f"{port} is taken, by this node or by another program", "an API key tells which")
        return problem(setting, f"{port} is taken by another process", f"end it, or choose another {setting}")
    except ConfigurationError as error:
        return problem(setting, str(error), f"choose another host or {setting}: below 1024 a port needs rights")
    for listener in listeners:
        await listener.aclose()
    return (
        ok(setting, f"{port}, free")
        if not own
        else warning(setting, f"{port} is free, though this node runs", "restart it: it runs with other settings")
    )


async def check_mesh(config: NodeConfig) -> list[Finding]:
    """Orchestrators, the clock and bootstrap nodes, all at once."""
    key = NodeKey(secrets.token_bytes(SEED_BYTES))
    found: dict[int, list[Finding]] = {}
    async with Libp2pNetwork.open(key, []) as network:
        clients = [_client(network, key, each) for each in (config.orchestrator, *config.standbys)]

        async def ask(place: int, client: OrchestratorClient) -> None:
            found[place] = await _check_orchestrator(client, config, is_first=place == 0)

        async def dial(place: int, address: str) -> None:
            found[place] = [await _check_bootstrap(network, address)]

        async with trio.open_nursery() as nursery:
            for place, client in enumerate(clients):
                nursery.start_soon(ask, place, client)
            for place, address in enumerate(config.bootstrap, len(clients)):
                nursery.start_soon(dial, place, address)
    findings = [finding for place in sorted(found) for finding in found[place]]
    return [*findings, *_check_discovery(config, findings)]


def _client(network: Network, key: NodeKey, orchestrator: PeerAddress) -> OrchestratorClient:
    return OrchestratorClient(network, key, SystemClock(), ClockSequencer(), orchestrator.peer_id, orchestrator.address)


async def _check_orchestrator(client: OrchestratorClient, config: NodeConfig, *, is_first: bool) -> list[Finding]:
    name = client.orchestrator
    level = problem if is_first else warning
    try:
        ahead_ms = await client.clock_ahead_ms(_PATIENCE_S)
    except TransportError as error:
        fix = "start it, or mend orchestrator_url; `tessella-p2p keys show --role orchestrator` says its peer id"
        return [level("orchestrator", _short(error, name), fix)]
    except RemoteProtocolError as error:
        return [
            level("orchestrator", f"{name} answers what it may not: {error}", "bring both machines to the same version")
        ]
    findings = [ok("orchestrator", f"{name} answers, under the peer id that is pinned"), _check_clock(name, ahead_ms)]
    if is_first:
        findings += await _check_coverage(client, config)
    return findings


def _check_clock(name: PeerId, ahead_ms: int) -> Finding:
    seconds = ahead_ms / 1000
    says = f"that of {name} is {abs(seconds):.1f} s {'ahead' if ahead_ms > 0 else 'behind'}"
    fix = "set this machine's clock by NTP (`timedatectl set-ntp true`)"
    if abs(ahead_ms) >= CLOCK_SKEW_MS:
        return problem(
            "clock", f"{says}: beyond {CLOCK_SKEW_MS // 1000} s nothing that this node signs is believed", fix
        )
    return warning("clock", says, fix) if abs(ahead_ms) >= _UNEASY_SKEW_MS else ok("clock", says)


async def _check_coverage(client: OrchestratorClient, config: NodeConfig) -> list[Finding]:
    """Layers that nobody serves, as the orchestrator sees the mesh."""
    subject, request = "layers", m.ReadModelHealth(model_id=_model_name(config), device=config.device)
    try:
        health = await client.ask(request, m.ModelHealth, _PATIENCE_S)
    except NotAuthorized:
        return [
            ok(
                subject,
                "the mesh is private and tells strangers nothing; `tessella-p2p status` shows what the node sees",
            )
        ]
    except (RefusalError, TransportError) as error:
        return [warning(subject, f"not known: {error}", "look again later, or ask the operator which models it serves")]
    except TessellaError as error:
        return [warning(subject, f"not known: {error}", "bring both machines to the same version")]
    if not health.holes:
        return [ok(subject, f"all {health.total_layers} of {health.model_id} are served")]
    words = ", ".join(f"{start}–{end}" for start, end in health.holes[:8])
    return [
        warning(
            subject,
            f"nobody serves {words} of {health.total_layers}: no request is answered until somebody does",
            f"start this node, or more of them: {health.mem_per_layer_mb} MB a layer and {health.global_tensor_mb} MB beside it",
        )
    ]


def _model_name(config: NodeConfig) -> str:
    try:
        return model_id_of(resolve(config.default_model, config.models_dir))
    except ConfigurationError:
        return config.default_model  # its own finding says that it is not here


async def _check_bootstrap(network: Network, address: str) -> Finding:
    try:
        with trio.fail_after(_PATIENCE_S):
            await network.connect(address)
    except trio.TooSlowError:
        pass
    except TransportError as error:
        return warning("bootstrap", _short(error, address), _BOOTSTRAP_FIX)
    else:
        return ok("bootstrap", f"{parse_peer_address(address).peer_id} answers")
    return warning("bootstrap", f"{address}: it did not answer in time", _BOOTSTRAP_FIX)


def _short(error: TessellaError, whom: str) -> str:
    """An error that says whom it is about, and goes on for a while at most."""
    peer = whom.rpartition("/")[2]
    text = str(error) if peer in str(error) else f"{whom}: {error}"
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]}…"


def _check_discovery(config: NodeConfig, findings: list[Finding]) -> list[Finding]:
    if not config.kademlia_enabled:
        return [ok("DHT", "it is switched off; routes come from the orchestrator and from gossip")]
    reached = any(finding.subject == "bootstrap" and finding.level == "ok" for finding in findings)
    if reached:
        return [ok("DHT", "it can be joined")]
    if not config.bootstrap:
        return [
            warning(
                "DHT", "no bootstrap node is configured: without the orchestrator no route is found", "set bootstrap"
            )
        ]
    return [problem("DHT", "none of the bootstrap nodes answers", "mend bootstrap: one node that answers is enough")]


def check_status(status: Status, key: NodeKey | None) -> list[Finding]:
    """What a running node says of itself: whose it is, what it can see and answer. What it says is not trusted to have a shape."""
    findings = []
    if key is not None and status.get("peer_id") != key.peer_id:
        findings.append(
            problem(
                "identity",
                f"the node at api_port is {str(status.get('peer_id'))[:64]}, not this key's",
                "give each node its own api_port",
            )
        )
    orchestrator = status.get("orchestrator")
    if isinstance(orchestrator, dict) and orchestrator.get("reachable") is False:
        findings.append(
            warning(
                "node's orchestrator",
                "the node has lost it, and serves without it for a while",
                "see what is found of the orchestrator below",
            )
        )
    readiness = status.get("readiness")
    if isinstance(readiness, dict):
        findings.append(_check_readiness(readiness))
    return findings


def _check_readiness(readiness: Mapping[str, Any]) -> Finding:
    subject, state = "answers", readiness.get("state")
    missing = readiness.get("missing_layers")
    words = f" of layers {str(missing)[:200]}" if missing else ""
    if state in ("ready", "old"):
        return ok(subject, f"a complete route has answered {readiness.get('proven_secs_ago')} s ago")
    if state == "no_route":
        return warning(subject, f"no stage that this node sees is there{words}", "wait for workers, or start some")
    if state == "failed":
        return problem(
            subject,
            f"stages are listed but do not answer{words}",
            "`tessella-p2p peers` names them; restart the one that is stuck",
        )
    return ok(subject, "no request has been made yet; the first one shows")
