"""What ``/status`` and ``/metrics`` say of the stage that a node serves, and of its event loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tessella_p2p.stages.engine import KvUse
from tessella_p2p.stages.engine_life import StageState
from tessella_p2p.wire.messages import Tier


@dataclass(frozen=True, slots=True)
class StageView:
    """One moment of a stage.

    Attributes:
        sessions: that are open.
        waiting: steps that wait for a turn, by tier.
        crashes: failures of its engine since the range was loaded first.
        recent_failures: those within the window that decides about saturation.
        memory_bytes: weights, and KV with every page in use; 0 while it sleeps.
        kv: see `stages.engine.KvUse`; the counters in it begin anew when the engine is loaded again.
    """

    state: StageState
    sessions: int
    waiting: Mapping[Tier, int]
    crashes: int
    recent_failures: int
    memory_bytes: int
    kv: KvUse


@dataclass(frozen=True, slots=True)
class LoopView:
    """Stalls of the event loop since the node started."""

    stalls: int = 0
    longest_ms: float = 0.0
    total_ms: float = 0.0


def stage_json(stage: StageView) -> dict[str, Any]:
    """``stage`` in ``GET /status``."""
    return {
        "state": stage.state,
        "sessions": stage.sessions,
        "waiting": {tier: stage.waiting.get(tier, 0) for tier in get_args(Tier)},
        "crashes": stage.crashes,
        "recent_failures": stage.recent_failures,
        "memory_bytes": stage.memory_bytes,
        "kv": asdict(stage.kv),
    }


def loop_json(loop: LoopView) -> dict[str, Any]:
    """``event_loop`` in ``GET /status``."""
    return asdict(loop)


def stage_metrics(stage: StageView) -> Iterator[Metric]:
    """The stage's part of ``GET /metrics``."""
    states = GaugeMetricFamily("tessella_stage_state", "1 for the state of this stage", labels=("state",))
    for state in get_args(StageState):
        states.add_metric((state,), int(state == stage.state))
    yield states
    waiting = GaugeMetricFamily("tessella_steps_waiting", "Steps that wait for a turn, by tier", labels=("tier",))
    for tier in get_args(Tier):
        waiting.add_metric((tier,), stage.waiting.get(tier, 0))
    yield waiting
    yield CounterMetricFamily("tessella_engine_crashes", "Failures of the engine", stage.crashes)
    yield GaugeMetricFamily("tessella_stage_memory_bytes", "Weights, and KV with every page in use", stage.memory_bytes)
    pages = GaugeMetricFamily("tessella_kv_pages", "Pages of the KV, by use", labels=("use",))
    for use, count in (
        ("total", stage.kv.pages_total),
        ("used", stage.kv.pages_used),
        ("cached", stage.kv.pages_cached),
    ):
        pages.add_metric((use,), count)
    yield pages
    yield CounterMetricFamily(
        "tessella_prefix_positions_hit", "Positions that the prefix cache served", stage.kv.prefix_positions_hit
    )
    yield CounterMetricFamily(
        "tessella_sessions_evicted", "Sessions whose KV was given to others", stage.kv.sessions_evicted
    )


def loop_metrics(loop: LoopView) -> Iterator[Metric]:
    """The event loop's part of ``GET /metrics``."""
    yield CounterMetricFamily("tessella_loop_stalls", "Times that the event loop stood still", loop.stalls)
    yield CounterMetricFamily("tessella_loop_stall_seconds", "How long it did, all together", loop.total_ms / 1000)
