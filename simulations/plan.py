"""What happens when (pure): faults and requests, drawn from a scenario before anything runs.

So what goes wrong does not depend on how the mesh takes it, and the report can say what was meant to happen.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from simulations.scenario import ChurnTable, LoadTable, Scenario

_BURST = 5
_WAVE_S = 60.0
_WAVE_DEPTH = 0.9


class FaultKind(Enum):
    """What a fault does."""

    CRASH = "crash"
    LEAVE = "leave"
    RETURN = "return"
    FREEZE = "freeze"
    THAW = "thaw"
    CUT = "cut"
    HEAL = "heal"
    ORCHESTRATOR_DOWN = "orchestrator down"
    ORCHESTRATOR_UP = "orchestrator up"


@dataclass(frozen=True, slots=True)
class Fault:
    """At ``at_s`` something happens to ``nodes`` (their indices)."""

    at_s: float
    kind: FaultKind
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One client's request.

    Attributes:
        number: counts from 0.
        at_s: when it is asked.
        entry_draw: in [0, 1): which of the nodes that are up then is asked.
        prompt, max_tokens, temperature, seed: what is asked.
        leaves_after: after so many tokens the client leaves; None for one that stays.
    """

    number: int
    at_s: float
    entry_draw: float
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    leaves_after: int | None


def join_times(scenario: Scenario, rng: random.Random) -> tuple[float, ...]:
    """When each node starts, by index; ascending."""
    return tuple(sorted(rng.uniform(0.0, scenario.mesh.join_within_s) for _ in range(scenario.nodes)))


def plan_faults(scenario: Scenario, rng: random.Random) -> tuple[Fault, ...]:
    """Every fault of a scenario, in the order of time. No node crashes while it is down or frozen."""
    faults: list[Fault] = []
    busy: list[tuple[float, float, tuple[int, ...]]] = []

    def draw(share: float, from_s: float, until_s: float) -> tuple[int, ...]:
        taken = {node for start, end, nodes in busy if start < until_s and from_s < end for node in nodes}
        free = [node for node in range(scenario.nodes) if node not in taken]
        wanted = math.ceil(share * scenario.nodes)
        chosen = tuple(rng.sample(free, min(wanted, len(free))))
        busy.append((from_s, until_s, chosen))
        return chosen

    for churn in scenario.churn:
        faults += _churn(churn, draw(churn.share, churn.from_s, churn.until_s), rng)
    for freeze in scenario.freezes:
        frozen = draw(freeze.share, freeze.from_s, freeze.until_s)
        faults += [Fault(freeze.from_s, FaultKind.FREEZE, frozen), Fault(freeze.until_s, FaultKind.THAW, frozen)]
    for cut in scenario.partitions:
        apart = tuple(rng.sample(range(scenario.nodes), math.ceil(cut.share * scenario.nodes)))
        faults += [Fault(cut.from_s, FaultKind.CUT, apart), Fault(cut.until_s, FaultKind.HEAL)]
    for outage in scenario.outages:
        faults += [
            Fault(outage.from_s, FaultKind.ORCHESTRATOR_DOWN),
            Fault(outage.until_s, FaultKind.ORCHESTRATOR_UP),
        ]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _churn(churn: ChurnTable, nodes: tuple[int, ...], rng: random.Random) -> Iterator[Fault]:
    num_graceful = round(churn.graceful * len(nodes))
    for position, node in enumerate(nodes):
        down_s = rng.uniform(*churn.down_s)
        at_s = rng.uniform(churn.from_s, churn.until_s - down_s)
        yield Fault(at_s, FaultKind.LEAVE if position < num_graceful else FaultKind.CRASH, (node,))
        yield Fault(at_s + down_s, FaultKind.RETURN, (node,))


def plan_requests(load: LoadTable, vocabulary: int, rng: random.Random) -> tuple[PlannedRequest, ...]:
    """Every request of a scenario, in the order of time."""
    return tuple(
        _request(number, at_s, load, vocabulary, rng) for number, at_s in enumerate(list(_arrivals(load, rng)))
    )


def _arrivals(load: LoadTable, rng: random.Random) -> Iterator[float]:
    """A Poisson process; for waves one of the peak's rate, thinned (Lewis and Shedler, 1979)."""
    size = _BURST if load.shape == "bursts" else 1
    peak = load.per_s * (1 + _WAVE_DEPTH if load.shape == "waves" else 1)
    at_s = load.from_s
    while True:
        at_s += rng.expovariate(peak / size)
        if at_s >= load.until_s:
            return
        if load.shape == "waves":
            rate = load.per_s * (1 + _WAVE_DEPTH * math.sin(2 * math.pi * at_s / _WAVE_S))
            if rng.random() * peak > rate:
                continue
        yield from [at_s] * size


def _request(number: int, at_s: float, load: LoadTable, vocabulary: int, rng: random.Random) -> PlannedRequest:
    max_tokens = rng.randint(*load.max_tokens)
    prompt = tuple(rng.randrange(vocabulary) for _ in range(rng.randint(*load.prompt_tokens)))
    sampled, leaves = rng.random() < load.sampled, rng.random() < load.abandoned
    return PlannedRequest(
        number=number,
        at_s=at_s,
        entry_draw=rng.random(),
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=rng.choice((0.5, 1.0)) if sampled else 0.0,
        seed=rng.getrandbits(64),
        leaves_after=rng.randrange(max_tokens) if leaves else None,
    )
