"""What the bridge counts, and the node's own numbers at the moment of a scrape. Each app has a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tessella_p2p.base.errors import LocalProtocolError, TessellaError
from tessella_p2p.bridge.node_view import NodeView
from tessella_p2p.bridge.stage_view import loop_metrics, stage_metrics
from tessella_p2p.entry.api import Finished

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


@dataclass(slots=True)
class Outcome:
    """How a generation ended: finished, with the code of an error, or with neither when its client left."""

    finished: Finished | None = None
    code: str | None = None


class HttpMetrics:
    """What is counted of one app's requests. Labels come from fixed sets, so that no request can make new series."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        """Further metrics of the app are registered here."""
        self._requests = Counter(
            "tessella_http_requests", "HTTP requests answered", ("method", "route", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "tessella_http_request_seconds", "From head to end", ("route",), registry=self.registry, buckets=_SECONDS
        )

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)


class BridgeMetrics(HttpMetrics):
    """The counters of a node's app."""

    def __init__(self, node: NodeView) -> None:
        super().__init__()
        registry = self.registry
        self._generating = Gauge("tessella_generations_in_flight", "Generations in flight", registry=registry)
        self._generations = Counter(
            "tessella_generations", "Generations, by how they ended", ("outcome",), registry=registry
        )
        self._tokens = Counter("tessella_tokens", "Tokens read and sampled", ("kind",), registry=registry)
        self._vectors = Counter("tessella_embeddings", "Inputs that vectors were made of", registry=registry)
        self._ttft = Histogram("tessella_ttft_seconds", "Time to the first token", registry=registry, buckets=_SECONDS)
        registry.register(_NodeCollector(node))

    @contextmanager
    def generating(self) -> Iterator[Outcome]:
        """Count one generation: in flight within the context, and afterwards by how it ended."""
        outcome = Outcome()
        self._generating.inc()
        try:
            yield outcome
        except TessellaError as error:
            outcome.code = error.code
            raise
        except Exception:  # a bug, which is counted as one and goes on up
            outcome.code = LocalProtocolError.code
            raise
        finally:
            self._generating.dec()
            self._count(outcome)

    def embedded(self, inputs: int, tokens: int) -> None:
        """Count an answered request for vectors."""
        self._vectors.inc(inputs)
        self._tokens.labels("prompt").inc(tokens)

    def _count(self, outcome: Outcome) -> None:
        end = outcome.finished
        if end is None:
            self._generations.labels(outcome.code or "cancelled").inc()
            return
        self._generations.labels(end.reason).inc()
        self._tokens.labels("prompt").inc(len(end.prompt_ids))
        self._tokens.labels("answer").inc(len(end.token_ids))
        self._ttft.observe(end.ttft_ms / 1000)


class _NodeCollector(Collector):
    def __init__(self, node: NodeView) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        status = self._node.status()
        yield GaugeMetricFamily("tessella_queue_depth", "Sessions open on this stage", status.queue_depth)
        yield GaugeMetricFamily(
            "tessella_hop_bodies_in_flight", "The same as tessella_queue_depth", status.hop_bodies_in_flight
        )
        yield GaugeMetricFamily("tessella_layers", "Layers this node serves", sum(map(len, status.layer_ranges)))
        yield GaugeMetricFamily("tessella_device_healthy", "1 while the device computes", int(status.device.healthy))
        yield GaugeMetricFamily(
            "tessella_orchestrator_reachable", "1 while the orchestrator answers", int(status.orchestrator.reachable)
        )
        yield CounterMetricFamily(
            "tessella_peer_failures", "Failures of peers, as this node met them", sum(status.peer_failures.values())
        )
        if status.credits is not None:
            yield GaugeMetricFamily("tessella_micro_credits", "Balance last told", status.credits.micro_credits)
        proofs = GaugeMetricFamily("tessella_proofs", "Proofs of this node, by state", labels=("state",))
        for state, count in asdict(status.proofs).items():
            proofs.add_metric((state,), count)
        yield proofs
        if status.stage is not None:
            yield from stage_metrics(status.stage)
        yield from loop_metrics(status.event_loop)
