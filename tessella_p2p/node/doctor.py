"""Looks at everything that a node needs (shell)."""

from __future__ import annotations

import trio

from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.limits import MIB
from tessella_p2p.node.config import NodeConfig
from tessella_p2p.node.findings import Finding
from tessella_p2p.node.machine_checks import (
    check_disk,
    check_ipv6,
    check_key,
    check_memory,
    check_model,
    check_reachability,
)
from tessella_p2p.node.mesh_checks import Status, check_mesh, check_ports, check_status, read_status


async def examine(config: NodeConfig, api_key: str | None = None) -> list[Finding]:
    """What there is to find about a node of this configuration, whether or not it runs. Takes seconds; changes nothing.

    Args:
        config: the node's.
        api_key: for the HTTP API of the running node, where it asks for one.
    """
    status, running = await read_status(config, api_key)
    key, key_finding = await trio.to_thread.run_sync(check_key, config.keypair_path)
    findings = [running, key_finding]
    findings += check_status(status, key) if status else []
    findings += await check_ports(config, key, status)
    findings += [check_reachability(config), check_ipv6(config)]
    findings.append(await trio.to_thread.run_sync(check_disk, config.data_dir))
    findings.append(await trio.to_thread.run_sync(check_memory, config, _used_mb(status)))
    findings += await trio.to_thread.run_sync(check_model, config, SystemClock().unix_ms())
    return [*findings, *await check_mesh(config)]


def _used_mb(status: Status | None) -> int:
    """What the running node's stage has of the claim already."""
    stage = None if status is None else status.get("stage")
    used = stage.get("memory_bytes") if isinstance(stage, dict) else None
    return used // MIB if isinstance(used, int) and used > 0 else 0
