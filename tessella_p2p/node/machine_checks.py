"""What `doctor` looks at on this machine (shell): key, disk, memory, addresses, and the model's file. Each check blocks; use a thread.

Nothing is written, made or locked: a node may run meanwhile.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from tessella_p2p.base.errors import ArtifactError, ConfigurationError, KeyFileError, TessellaError
from tessella_p2p.base.limits import MIB
from tessella_p2p.model.artifact import Artifact
from tessella_p2p.node.config import NodeConfig
from tessella_p2p.node.findings import Finding, ok, problem, warning
from tessella_p2p.node.keystore import load_key
from tessella_p2p.orchestrator.admission import is_private
from tessella_p2p.weights.catalog import CATALOG
from tessella_p2p.weights.store import resolve
from tessella_p2p.wire.keys import NodeKey

_LOW_DISK_BYTES = 1024 * MIB
_NO_DISK_BYTES = 64 * MIB
_READ_BYTES = 4 * MIB
_SAMPLE = "Grüße, 世界! 2 + 2 = 4"


def check_key(path: Path) -> tuple[NodeKey | None, Finding]:
    """The node's key, where it can be read, and how its file stands."""
    if not os.path.lexists(path):
        return None, warning("key", f"{path}: there is none yet", "the first start makes one; then keep a copy of it")
    try:
        key = load_key(path)
    except KeyFileError as error:
        says, _, fix = str(error).partition(": ")
        return None, problem("key", str(error), fix or says)
    return key, ok("key", f"{key.peer_id}, in {path} for its owner alone")


def check_disk(data_dir: Path) -> Finding:
    """Room for the journal, and leave to write there."""
    there = next(path for path in (data_dir, *data_dir.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return problem(
            "disk", f"{there} may not be written by this user", "`chown` it, or choose another folder with data_dir"
        )
    free = shutil.disk_usage(there).free
    says = f"{free // MIB} MiB free for {data_dir}"
    if free < _NO_DISK_BYTES:
        return problem("disk", says, "make room: without its journal a node is not paid")
    if free < _LOW_DISK_BYTES:
        return warning("disk", says, "make room, or move data_dir: proofs that cannot be settled wait there for a week")
    return ok("disk", says)


def check_memory(config: NodeConfig, used_mb: int = 0) -> Finding:
    """Memory against the claim; ``used_mb`` is what a stage of this node has already."""
    if config.device != "cpu":
        return _check_device(config)
    memory = psutil.virtual_memory()
    available_mb = memory.available // MIB + used_mb
    says = f"the claim is {config.vram_mb} MB; {available_mb} of {memory.total // MIB} MB can be used"
    if config.vram_mb * MIB > memory.total:
        return problem("memory", says, "lower vram_mb: this machine does not have what it claims")
    if config.vram_mb > available_mb:
        return warning(
            "memory", says, "lower vram_mb, or end what uses the memory: a stage that swaps holds the mesh up"
        )
    return ok("memory", says)


def _check_device(config: NodeConfig) -> Finding:
    import torch  # two seconds, and only where it computes

    if config.device == "metal":
        if not torch.backends.mps.is_available():
            return problem("memory", "this machine has no Metal device", "set device = cpu")
        return ok("memory", f"the claim is {config.vram_mb} MB of a Metal device's shared memory")
    if not torch.cuda.is_available():
        return problem(
            "memory", "torch sees no CUDA device", "install the driver and a CUDA build of torch, or set device = cpu"
        )
    free, total = torch.cuda.mem_get_info()
    says = f"the claim is {config.vram_mb} MB; {free // MIB} of {total // MIB} MiB of the CUDA device are free"
    if config.vram_mb * MIB > total:
        return problem("memory", says, "lower vram_mb: the device does not have what it claims")
    if config.vram_mb * MIB > free:
        return warning("memory", says, "lower vram_mb, or end what uses the device")
    return ok("memory", says)


def check_reachability(config: NodeConfig) -> Finding:
    """Whether peers elsewhere can dial this node, as far as its addresses tell."""
    subject, host = "reachability", ipaddress.ip_address(config.p2p_host)
    if config.public_ip is not None:
        port = config.public_p2p_port or config.p2p_port
        if is_private(f"/{'ip6' if ':' in config.public_ip else 'ip4'}/{config.public_ip}/tcp/{port}"):
            return warning(
                subject,
                f"public_ip is {config.public_ip}, which is not reached from everywhere",
                "set what the router has on the outside; only a mesh with allow_private_addrs admits a worker like this",
            )
        return ok(subject, f"peers are told {config.public_ip} port {port}; a NAT rule has to bring them here")
    if host.is_loopback:
        return warning(subject, f"p2p_host is {host}: peers on this machine alone", "set p2p_host = 0.0.0.0 for others")
    addresses = machine_addresses() if host.is_unspecified else [host]
    if any(address.is_global for address in addresses if address.version == host.version):
        return ok(subject, "this machine has a public address of its own")
    return warning(
        subject,
        "this machine has private addresses alone: peers of the same network can dial it, others cannot",
        "map a port of the router to p2p_port and set public_ip (and public_p2p_port), or ignore this in a private mesh",
    )


def check_ipv6(config: NodeConfig) -> Finding:
    """Whether addresses of the configuration need IPv6, and there is some."""
    wanted = [each for each in (*_peers_of(config), config.p2p_host) if "/ip6/" in each or ":" in each]
    has_ipv6 = any(address.version == 6 and address.is_global for address in machine_addresses())
    if not wanted:
        return ok(
            "IPv6",
            "there is some, and nothing here needs it" if has_ipv6 else "there is none, and nothing here needs it",
        )
    if not socket.has_ipv6 or not has_ipv6:
        if all(_is_loopback6(each) for each in wanted) and socket.has_ipv6:
            return ok("IPv6", "loopback alone, as the configuration needs")
        return problem(
            "IPv6",
            f"{wanted[0]} needs IPv6; this machine has no global address of it",
            "use an IPv4 address, or set IPv6 up",
        )
    return ok("IPv6", "there is some, as the configuration needs")


def _peers_of(config: NodeConfig) -> tuple[str, ...]:
    return (config.orchestrator.address, *config.orchestrators, *config.bootstrap)


def _is_loopback6(address: str) -> bool:
    return address == "::1" or address.startswith("/ip6/::1/")


def machine_addresses() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Those of every interface, without link-local ones: those need a zone."""
    families = (socket.AF_INET, socket.AF_INET6)
    known = [each.address for nic in psutil.net_if_addrs().values() for each in nic if each.family in families]
    return [ipaddress.ip_address(address) for address in known if "%" not in address]


def check_model(config: NodeConfig, now_ms: int) -> Sequence[Finding]:
    """The model's file and its hash, its tokenizer and its template."""
    try:
        path = resolve(config.default_model, config.models_dir)
    except ConfigurationError as error:
        pull = f"`tessella-p2p models pull {config.default_model}`, or " if config.default_model in CATALOG else ""
        return [
            problem("model", str(error), f"{pull}name a GGUF file, or a model that `tessella-p2p models list` knows")
        ]
    findings = [_check_file(config.default_model, path)]
    try:
        artifact = Artifact.open(path)
    except ArtifactError as error:
        return [*findings, problem("tokenizer", str(error), "pull the model anew, or take one that is certified")]
    with artifact:
        findings.append(_check_tokenizer(artifact))
        findings.append(_check_template(artifact, now_ms))
    return findings


def _check_file(model: str, path: Path) -> Finding:
    entry = CATALOG.get(model)
    try:
        size = path.stat().st_size
        if entry is None:
            return ok("model", f"{path}, {size // MIB} MiB; it is in no catalogue, so there is no hash to compare with")
        hashed = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(_READ_BYTES):
                hashed.update(part)
    except OSError as error:
        return problem("model", f"{path} cannot be read: {error.strerror}", "mend its permissions, or pull it anew")
    if hashed.hexdigest() != entry.sha256:
        return problem(
            "model",
            f"{path} is not what the catalogue says: SHA-256 {hashed.hexdigest()[:16]}…, not {entry.sha256[:16]}…",
            f"remove it, then `tessella-p2p models pull {model}`",
        )
    return ok("model", f"{path}, {size // MIB} MiB, as the catalogue says (SHA-256 {entry.sha256[:16]}…)")


def _check_tokenizer(artifact: Artifact) -> Finding:
    try:
        ids = artifact.tokenizer.encode(_SAMPLE)
        back = artifact.tokenizer.decode(ids)
    except TessellaError as error:
        return problem("tokenizer", str(error), "take a model whose tokenizer is certified")
    if back.strip() != _SAMPLE:
        return problem(
            "tokenizer", f"{_SAMPLE!r} comes back as {back!r}", "pull the model anew: its vocabulary is damaged"
        )
    return ok("tokenizer", f"{artifact.config.vocabulary} tokens; a sample of {len(ids)} comes back as it was")


def _check_template(artifact: Artifact, now_ms: int) -> Finding:
    try:
        ids = artifact.encode_messages([{"role": "user", "content": "hi"}], now_ms=now_ms)
    except TessellaError as error:
        return warning("template", str(error), "ask over /v1/completions, or take a model for chat")
    return ok("template", f"a chat of one message renders to {len(ids)} tokens")
