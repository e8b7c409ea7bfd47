"""A whole mesh of real processes on loopback: one bootstrap node, one orchestrator, some workers, under one temporary home.

The demo, the process tests and the benchmarks all start their meshes here. Every child holds the reading end of a pipe whose writing
end only this process has, and leaves when that closes: no child outlives its parent, however the parent ends.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import trio

from tessella_p2p.base.errors import ConfigurationError, TessellaError

_POLL_S = 0.05
_TERM_S = 8.0
_LOG_TAIL_LINES = 15
_AUDIT_COUNTER = re.compile(r'^tessella_orchestrator_events_total\{event="audit:(\w+)"\} (\S+)$', re.MULTILINE)
_AUDIT_ENDS = ("passed", "failed", "copied", "inconclusive", "no_auditor", "passed_over")


class MeshError(TessellaError):
    """A process of the mesh ended, or the mesh did not become healthy in time."""

    code = "mesh_error"


@dataclass(slots=True)
class Node:
    """One process of the mesh."""

    name: str
    arguments: Sequence[str]
    home: Path
    process: trio.Process | None = None
    ready: Mapping[str, object] = field(default_factory=dict)

    @property
    def log_path(self) -> Path:
        """Where its output goes."""
        return self.home / "node.log"

    @property
    def peer_id(self) -> str:
        """Its identity; known once it is ready."""
        return str(self.ready["peer_id"])

    @property
    def api_url(self) -> str:
        """Its HTTP address; known once it is ready."""
        return str(self.ready["api_url"])

    @property
    def p2p_address(self) -> str:
        """Its multiaddr with its peer id; known once it is ready."""
        addresses = self.ready["p2p_addresses"]
        assert isinstance(addresses, list)
        return str(addresses[0])

    def log_tail(self) -> str:
        """The last lines that it logged."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(lines[-_LOG_TAIL_LINES:])


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """What to start.

    Attributes:
        home: an empty folder; keys, data and logs of every node go below it.
        model: a catalogue id, or a path to an artifact.
        models_dir: where pulled models are; None is the default.
        workers: how many; they share the model's layers.
        recipe: a name in `model.recipe.RECIPES`.
        layers: pins the range of each worker, or None to let the orchestrator split.
        extra: further flags for every worker.
        audit_share: of the proofs that another worker recomputes; None for the orchestrator's default.
    """

    home: Path
    model: str
    workers: int
    recipe: str
    models_dir: Path | None = None
    min_stages: int | None = None
    extra: Sequence[str] = ()
    log_level: str = "info"
    audit_share: float | None = None


class Mesh:
    """Running processes. Create it with `run_mesh`."""

    def __init__(self, plan: MeshPlan, report: Callable[[str], None]) -> None:
        self.plan = plan
        self._report = report
        self.bootstrap = self._node("bootstrap", [])
        self.orchestrator = self._node("orchestrator", [])
        self.workers: list[Node] = []

    def _node(self, name: str, arguments: Sequence[str]) -> Node:
        home = self.plan.home / name
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Node(name, arguments, home)

    @property
    def nodes(self) -> list[Node]:
        """Every node, in the order of their start."""
        return [self.bootstrap, self.orchestrator, *self.workers]

    @property
    def entry_url(self) -> str:
        """The HTTP bridge of the first worker."""
        return self.workers[0].api_url

    async def start(self) -> None:
        """Start everything and wait until each process is up.

        Raises:
            MeshError: one of them ended; its log's end is in the message.
        """
        plan = self.plan
        models = ["--models-dir", str(plan.models_dir)] if plan.models_dir else []
        self._report("starting the bootstrap node")
        self.bootstrap.arguments = ["--p2p-host", "127.0.0.1", "--p2p-port", "0"]
        await self.launch(self.bootstrap, "bootstrap", self.bootstrap.arguments)
        await self.wait_ready(self.bootstrap)
        self._report("starting the orchestrator")
        min_stages = plan.min_stages if plan.min_stages is not None else plan.workers
        self.orchestrator.arguments = [
            *("--p2p-host", "127.0.0.1", "--p2p-port", "0", "--bootstrap", self.bootstrap.p2p_address),
            *("--api-host", "127.0.0.1", "--api-port", "0", "--allow-private-addrs"),
            *("--model-id", plan.model, "--recipe", plan.recipe, "--min-stages", str(min_stages), *models),
            *(() if plan.audit_share is None else ("--audit-share", str(plan.audit_share))),
        ]
        await self.launch(self.orchestrator, "orchestrator", self.orchestrator.arguments)
        await self.wait_ready(self.orchestrator)
        self._report(f"starting {plan.workers} workers" if plan.workers > 1 else "starting one worker")
        for index in range(plan.workers):
            await self.add_worker(index)
        for worker in self.workers:
            await self.wait_ready(worker)

    async def add_worker(self, index: int, extra: Sequence[str] = ()) -> Node:
        """Start one more worker; `wait_ready` for it."""
        plan = self.plan
        models = ["--models-dir", str(plan.models_dir)] if plan.models_dir else []
        node = self._node(
            f"worker-{index}",
            [
                *("--tracker-url", self.orchestrator.p2p_address, "--bootstrap", self.bootstrap.p2p_address),
                *("--model-id", plan.model, "--recipe", plan.recipe, "--vram-gb", "4", "--threads", "1", *models),
                *("--api-host", "127.0.0.1", "--api-port", "0", "--p2p-host", "127.0.0.1", "--p2p-port", "0"),
                *(*plan.extra, *extra),
            ],
        )
        self.workers.append(node)
        await self.launch(node, "daemon", node.arguments)
        return node

    async def launch(self, node: Node, command: str, arguments: Sequence[str]) -> None:
        """Start a node's process, or start it again after its end (same key, same data, new ports)."""
        ready_file = node.home / "ready.json"
        ready_file.unlink(missing_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TESSELLA_") and k != "ORCHESTRATOR_URL"}
        environment["TESSELLA_CONFIG_DIR"] = str(node.home)
        command_line = [
            *(sys.executable, "-m", "tessella_p2p", command, *arguments),
            *("--keypair-path", str(node.home / "node.key")),
            *(() if command == "bootstrap" else ("--data-dir", str(node.home / "data"))),
            *("--log-format", "json", "--log-level", self.plan.log_level),
            *("--ready-file", str(ready_file), "--exit-with-stdin"),
        ]
        with node.log_path.open("ab") as log:
            node.process = await trio.lowlevel.open_process(
                command_line, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        node.ready = {}

    async def restart(self, node: Node) -> None:
        """Start a node again after its end: the same key, data and ports; waits until it is up."""
        command = {"bootstrap": "bootstrap", "orchestrator": "orchestrator"}.get(node.name, "daemon")
        ports = ["--p2p-port", node.p2p_address.split("/")[4]]
        if command != "bootstrap":
            ports += ["--api-port", node.api_url.rpartition(":")[2]]
        await self.launch(node, command, [*node.arguments, *ports])
        await self.wait_ready(node)

    async def wait_ready(self, node: Node) -> None:
        """Wait until a node has written its addresses.

        Raises:
            MeshError: it ended instead.
        """
        ready_file = node.home / "ready.json"
        while not ready_file.exists():
            self.check(node)
            await trio.sleep(_POLL_S)
        node.ready = json.loads(ready_file.read_text())

    def check(self, node: Node) -> None:
        """Raise a `MeshError` when a node's process has ended."""
        if node.process is not None and node.process.poll() is not None:
            raise MeshError(
                f"{node.name} ended with status {node.process.returncode}; its log ends with:\n{node.log_tail()}"
            )

    async def wait_healthy(self, timeout_s: float) -> None:
        """Wait until every worker is ready and the entry lists the model: a complete route of ready stages.

        Raises:
            MeshError: a process ended, or the time is up; says what every worker is doing.
        """
        try:
            with trio.fail_after(timeout_s):
                async with httpx.AsyncClient(timeout=5.0) as client:
                    while not (await self._all_ready(client) and await self._lists_model(client)):
                        for node in self.nodes:
                            self.check(node)
                        await trio.sleep(_POLL_S)
        except trio.TooSlowError:
            states = "\n".join(f"{node.name}:\n{node.log_tail()}" for node in self.workers)
            raise MeshError(f"the mesh is not healthy after {timeout_s:.0f} s\n{states}") from None

    async def _all_ready(self, client: httpx.AsyncClient) -> bool:
        for worker in self.workers:
            try:
                answer = await client.get(f"{worker.api_url}/status")
            except httpx.TransportError:
                return False
            if answer.status_code != 200 or answer.json()["state"] != "ready":
                return False
        return True

    async def _lists_model(self, client: httpx.AsyncClient) -> bool:
        try:
            answer = await client.get(f"{self.entry_url}/v1/models")
        except httpx.TransportError:
            return False
        return answer.status_code == 200 and bool(answer.json()["data"])

    async def status(self, node: Node) -> dict[str, object]:
        """A worker's ``/status``."""
        async with httpx.AsyncClient(timeout=10.0) as client:
            answer = await client.get(f"{node.api_url}/status")
            answer.raise_for_status()
            status: dict[str, object] = answer.json()
            return status

    async def settled(self, routes: Sequence[Sequence[str]], timeout_s: float) -> list[dict[str, object]]:
        """Every worker's status once the proofs of all ``routes`` (peer ids) are settled, or when the time is up."""
        expected = Counter(peer_id for route in routes for peer_id in route)
        statuses: list[dict[str, object]] = []
        with trio.move_on_after(timeout_s):
            while True:
                statuses = [await self.status(worker) for worker in self.workers]
                if all(_num_judged(status) >= expected[str(status["peer_id"])] for status in statuses):
                    break
                await trio.sleep(_POLL_S)
        return statuses

    async def audits(self) -> dict[str, int]:
        """What the orchestrator counted of audits, by what came of them: ``passed``, ``failed``, ``no_auditor``, …"""
        async with httpx.AsyncClient(timeout=10.0) as client:
            answer = await client.get(f"{self.orchestrator.api_url}/metrics")
            answer.raise_for_status()
        return {name: round(float(value)) for name, value in _AUDIT_COUNTER.findall(answer.text)}

    async def audited(self, proofs: int, timeout_s: float) -> dict[str, int]:
        """`audits` once so many proofs are audited, or nobody could be asked, or when the time is up."""
        counts: dict[str, int] = {}
        with trio.move_on_after(timeout_s):
            while sum(counts.get(word, 0) for word in _AUDIT_ENDS) < proofs:
                await trio.sleep(_POLL_S)
                counts = await self.audits()
        return counts

    async def stop(self, node: Node, signal_number: signal.Signals = signal.SIGTERM) -> None:
        """End one node and wait for it; it is killed when it takes too long."""
        process = node.process
        if process is None:
            return
        if process.stdin is not None and signal_number == signal.SIGTERM:
            await process.stdin.aclose()
        if process.poll() is None:
            process.send_signal(signal_number)
        with trio.move_on_after(_TERM_S):
            await process.wait()
        if process.poll() is None:
            process.kill()
            await process.wait()
        if process.stdin is not None:
            await process.stdin.aclose()

    async def stop_all(self) -> None:
        """End every node, workers first; bounded in time."""
        async with trio.open_nursery() as nursery:
            for worker in self.workers:
                nursery.start_soon(self.stop, worker)
        for node in (self.orchestrator, self.bootstrap):
            await self.stop(node)


def _num_judged(status: Mapping[str, object]) -> int:
    """Proofs that the orchestrator has answered for."""
    proofs = status["proofs"]
    assert isinstance(proofs, dict)
    return sum(int(proofs[kind]) for kind in ("settled", "held", "refused"))


@asynccontextmanager
async def run_mesh(plan: MeshPlan, report: Callable[[str], None] = lambda line: None) -> AsyncIterator[Mesh]:
    """A started mesh; on the way out every process is ended, also when this task is cancelled.

    Raises:
        MeshError: a process did not come up.
        ConfigurationError: the plan makes no sense.
    """
    if plan.workers < 1:
        raise ConfigurationError(f"a mesh needs at least one worker, not {plan.workers}")
    mesh = Mesh(plan, report)
    try:
        await mesh.start()
        yield mesh
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 3 * _TERM_S):
            await mesh.stop_all()
