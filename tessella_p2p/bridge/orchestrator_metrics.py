"""An orchestrator's counters as Prometheus metrics; pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tessella_p2p.bridge.orchestrator_routes import REQUEST_KINDS
from tessella_p2p.model.coverage import Coverage


@dataclass(slots=True, eq=False)
class OrchestratorReadings(Collector):
    """What the orchestrator said last; it is asked before each scrape."""

    counters: tuple[tuple[str, int], ...] = ()
    coverage: Mapping[str, Coverage] = field(default_factory=dict)

    def collect(self) -> Iterator[Metric]:
        """Every metric."""
        yield from counter_metrics(self.counters)
        yield from coverage_metrics(self.coverage)


def counter_metrics(counters: Iterable[tuple[str, int]]) -> Iterator[Metric]:
    """The counters of `ReadMetrics`, see `OrchestratorContext.outcomes`: ``kind`` or ``kind:code`` of requests, ``proof:status`` and
    ``members:state``; whatever else is counted is a metric of its own name."""
    requests = CounterMetricFamily(
        "tessella_orchestrator_requests", "Requests, by their kind and outcome", labels=("kind", "outcome")
    )
    proofs = CounterMetricFamily("tessella_orchestrator_proofs", "Proofs, by what became of them", labels=("status",))
    members = GaugeMetricFamily("tessella_orchestrator_members", "Workers that are remembered", labels=("state",))
    events = CounterMetricFamily("tessella_orchestrator_events", "What else is counted, by name", labels=("event",))
    for name, value in counters:
        head, _, tail = name.partition(":")
        if head == "proof":
            proofs.add_metric((tail,), value)
        elif head == "members":
            members.add_metric((tail,), value)
        elif head in REQUEST_KINDS or head == "request" or head.startswith("operate."):
            requests.add_metric((head, tail or "ok"), value)
        else:
            events.add_metric((name,), value)
    yield from (requests, proofs, members, events)


def coverage_metrics(coverage: Mapping[str, Coverage]) -> Iterator[Metric]:
    """How much of each model is served."""
    layers = GaugeMetricFamily(
        "tessella_orchestrator_layers", "Layers of a model, and those served", labels=("model", "which")
    )
    for model_id, walked in coverage.items():
        layers.add_metric((model_id, "total"), walked.total_layers)
        layers.add_metric((model_id, "covered"), walked.num_covered)
    yield layers
