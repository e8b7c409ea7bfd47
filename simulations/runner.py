"""Runs a scenario and reports: the command ``tessella-p2p sim`` (shell).

A run is a function of the scenario and its seed: the report has no wall-clock time in it, and the same seed gives the same bytes.
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import structlog
import trio

from simulations.checkers import check
from simulations.driving import Driver
from simulations.hostile import hostile_peers
from simulations.mesh import DEAD, MeshShape, node_key, simulate
from simulations.observations import Observations
from simulations.plan import join_times, plan_faults, plan_requests
from simulations.report import Report, print_report, replay_command, report_json, report_of
from simulations.scenario import Scenario, load_scenario
from simulations.watching import Watch
from tessella_p2p.net.memory import MemoryFabric, log_normal_latency
from tessella_p2p.net.virtual_clock import VirtualClock, run_deterministic

EXIT_CONTENT = 0
EXIT_VIOLATED = 1
_PROGRESS_S = 1.0
"""Wall-clock seconds between two lines of progress."""

Progress = Callable[[Driver], None]


def main(scenario: str, *, nodes: int | None = None, seed: int | None = None, as_json: bool = False) -> int:
    """Run the scenario of a name or in a file, and print its report.

    Returns:
        The exit status: 0 if every checker is content, else 1.

    Raises:
        ConfigurationError: no such scenario, or a key of it is wrong.
    """
    loaded = load_scenario(scenario, nodes=nodes, seed=seed)
    replay = replay_command(scenario, nodes=nodes, seed=loaded.seed)
    show = _progress_on_stderr(loaded)
    try:
        report = run_scenario(loaded, replay, show)
    except Exception:
        print(f"the simulation broke; replay it with: {replay}", file=sys.stderr)  # noqa: T201 - a command's own output
        raise
    if as_json:
        print(report_json(report))  # noqa: T201 - a command's own output
    else:
        print_report(report)
    return EXIT_CONTENT if report.content else EXIT_VIOLATED


def run_scenario(scenario: Scenario, replay: str = "", progress: Progress | None = None) -> Report:
    """Run a scenario in virtual time, and judge it.

    Args:
        scenario: what is simulated, its seed included.
        replay: the command line that the report names.
        progress: called every few virtual seconds while it runs.
    """
    seen = observe(scenario, progress or _show_nothing)
    return report_of(seen, scenario, check(seen, scenario), replay)


def _show_nothing(_driver: Driver) -> None:
    """The progress of a run that nobody watches."""


def observe(scenario: Scenario, progress: Progress = _show_nothing) -> Observations:
    """Run a scenario in virtual time; what was seen of it."""
    clock = VirtualClock()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tessella-sim-") as folder, quiet(failures), calm_collector():
        seen = run_deterministic(_run, scenario.seed, scenario, Path(folder), clock, progress, clock=clock)
    seen.failures += failures
    return seen


async def _run(scenario: Scenario, folder: Path, clock: VirtualClock, progress: Progress) -> Observations:
    seed = scenario.seed
    latency = log_normal_latency(scenario.network.latency_ms / 1000, scenario.network.sigma)
    fabric = MemoryFabric(random.Random(f"{seed} network"), clock, latency, scenario.network.loss)
    seen = Observations(scenario.mesh.layers, node_key(seed, "orchestrator", 0).peer_id)
    watch = Watch(seen, lambda: clock.now)
    async with simulate(_shape(scenario), seed, folder, clock, fabric, watch) as mesh:
        driver = Driver(mesh, seen)
        async with trio.open_nursery() as nursery:
            for liar in hostile_peers(mesh, scenario.liars.count, scenario.liars.kinds):
                seen.hostile.append(liar.key.peer_id)
                nursery.start_soon(liar.run)
            nursery.start_soon(driver.join, join_times(scenario, random.Random(f"{seed} joins")))
            nursery.start_soon(driver.inflict, plan_faults(scenario, random.Random(f"{seed} faults")))
            if scenario.load is not None:
                rng = random.Random(f"{seed} requests")
                nursery.start_soon(driver.ask, plan_requests(scenario.load, mesh.model.vocabulary, rng))
            nursery.start_soon(driver.look_up, scenario.lookups_per_s, random.Random(f"{seed} lookups"))
            nursery.start_soon(driver.sample)
            nursery.start_soon(_tick, progress, driver)
            await trio.sleep_until(scenario.duration_s)
            driver.note_end()
            nursery.cancel_scope.cancel()
    return seen


def _shape(scenario: Scenario) -> MeshShape:
    mesh = scenario.mesh
    return MeshShape(
        layers=mesh.layers,
        min_stages=mesh.min_stages,
        bootstraps=mesh.bootstraps,
        dead_bootstraps=mesh.dead_bootstraps,
        compute_s=mesh.compute_ms / 1000,
        checkpoint_s=mesh.checkpoint_s,
        hop_timeout_s=mesh.hop_timeout_s,
    )


async def _tick(progress: Progress, driver: Driver) -> NoReturn:
    # It runs whether anybody watches or not: one task more would be another order of tasks, and another run.
    while True:
        progress(driver)
        await trio.sleep(_PROGRESS_S)


def _progress_on_stderr(scenario: Scenario) -> Progress:
    """A line a second on standard error: in one place on a terminal."""
    began_s = shown_s = time.monotonic()
    terminal = sys.stderr.isatty()

    def show(driver: Driver) -> None:
        nonlocal shown_s
        wall_s = time.monotonic()
        if wall_s < shown_s + _PROGRESS_S * (1 if terminal else 5):
            return
        shown_s = wall_s
        answered = sum(asked.outcome == "answered" for asked in driver.seen.asked)
        line = (
            f"{scenario.name}: virtual second {driver.now:.0f} of {scenario.duration_s:.0f},"
            f" {driver.now / (wall_s - began_s):.1f} a wall second; {len(driver.reachable())} of {scenario.nodes} nodes up,"
            f" {answered} answered, {driver.waiting} waiting"
        )
        sys.stderr.write(f"\r{line}\x1b[K" if terminal else f"{line}\n")
        sys.stderr.flush()

    return show


@contextmanager
def quiet(failures: list[str]) -> Iterator[None]:
    """Keep logs off the terminal; what a role logs as an error goes to ``failures``."""
    before = structlog.get_config()

    def note(_logger: object, _method: str, event: MutableMapping[str, Any]) -> NoReturn:
        name = event.pop("event", "")
        if event.get("reason") == DEAD:
            raise structlog.DropEvent
        failures.append(" ".join([str(name), *(f"{key}={value!r}" for key, value in sorted(event.items()))]))
        raise structlog.DropEvent

    structlog.configure(processors=[note], wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        structlog.configure(**before)


@contextmanager
def calm_collector() -> Iterator[None]:
    """Collect rarely: tens of thousands of tasks live through the whole run, and each full collection walks over them."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
