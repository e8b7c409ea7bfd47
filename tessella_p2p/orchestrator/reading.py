"""What anybody may read of an orchestrator: its models, its workers, its own identity, its counters.

Every answer is made from memory, but for the reputations, which are the ledger's. Nothing is changed by a read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import MAX_ADDRESSES, MAX_COUNTERS, MAX_LISTED_BYTES
from tessella_p2p.model.coverage import Coverage
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.context import Handlers, OrchestratorContext
from tessella_p2p.orchestrator.member import ASSIGNED, Member, MemberState
from tessella_p2p.orchestrator.membership import Membership
from tessella_p2p.orchestrator.terms import ModelTerms, ServedModel
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import encode_message

_DIALLED = (MemberState.READY, MemberState.HEALTHY, MemberState.DRAINING, MemberState.OFFLINE)
"""States in which clients are told of a worker; see `peers`."""


class Reading:
    """Answers the public requests, but for the federation's.

    Args:
        catalogue: the models.
        membership: the workers.
    """

    def __init__(self, context: OrchestratorContext, catalogue: Catalogue, membership: Membership) -> None:
        self._context = context
        self._catalogue = catalogue
        self._membership = membership

    def handlers(self) -> Handlers:
        """What this part answers."""
        return {
            m.ListPeers: self._peers,
            m.ListModels: self._models,
            m.ListWorkers: self._workers,
            m.ReadModelHealth: self._health,
            m.PreviewAssignment: self._preview,
            m.ReadManifest: self._manifest,
            m.ListManifests: self._manifests,
            m.ReadIdentity: self._identity,
            m.ReadMetrics: self._metrics,
        }

    def coverage(self) -> dict[str, Coverage]:
        """The walk over the healthy stages of each model, by its name."""
        own = self._context.recipe
        return {
            model.model_id: self._membership.coverage(model.manifest_root, recipe_of(model, None, own))
            for model in self._catalogue.models()
        }

    async def _peers(self, _: PeerId, request: m.ListPeers) -> m.Peers:
        members = self._membership.members()
        groups = replica_groups(members)
        listed = sorted((each for each in members if is_dialled(each, request.model_id)), key=lambda each: each.peer_id)
        page, more = page_of(listed, request.after, request.limit)
        reputation = await self._reputations([each.peer_id for each in page])
        failures = self._membership.reported_failures
        entries = [
            peer_entry(
                each,
                failures=failures[each.peer_id],
                reputation=reputation[each.peer_id],
                replica_group_id=groups.get(each.peer_id, 0),
            )
            for each in page
        ]
        shown = within_an_answer(entries)
        return m.Peers(peers=shown, more=more or len(shown) < len(entries))

    async def _models(self, _: PeerId, __: m.ListModels) -> m.Models:
        active = Counter(each.model_id for each in self._membership.members() if each.state is MemberState.HEALTHY)
        models = (model.model_id for model in self._catalogue.models())
        return m.Models(models=tuple(m.ModelEntry(model_id=name, active_workers=active[name]) for name in models))

    async def _workers(self, _: PeerId, request: m.ListWorkers) -> m.Workers:
        known = [each for each in self._membership.members() if each.state is not MemberState.LEFT]
        page, more = page_of(sorted(known, key=lambda each: each.peer_id), request.after, request.limit)
        return m.Workers(workers=tuple(worker_entry(each) for each in page), more=more)

    async def _health(self, _: PeerId, request: m.ReadModelHealth) -> m.ModelHealth:
        model = self._catalogue.by_name(request.model_id)
        recipe = recipe_of(model, request.recipe, self._context.recipe)
        terms = model.terms_for(recipe, request.device)
        coverage = self._membership.coverage(model.manifest_root, recipe)
        return model_health(model, recipe, request.device, terms, coverage)

    async def _preview(self, _: PeerId, request: m.PreviewAssignment) -> m.AssignmentPreview:
        model = self._catalogue.by_name(request.model_id)
        recipe = recipe_of(model, request.recipe, self._context.recipe)
        terms = model.terms_for(recipe, request.device)
        core = self._membership.core
        layers = core.preview(model, recipe, terms, request.vram_mb)
        held = (each for each in core.in_mesh(model.manifest_root, recipe) if not each.is_canary)
        assigned = [taken for each in held for taken in each.taken]
        return m.AssignmentPreview(
            model_repo=model.model_id,
            layer_ranges=(layers.as_tuple(),),
            replica_group_id=replica_group(layers, assigned),
            claim_mb=terms.claim_mb(layers),
        )

    async def _manifest(self, _: PeerId, request: m.ReadManifest) -> m.ManifestSummary:
        return manifest_of(self._catalogue.by_name(request.model_id))

    async def _manifests(self, _: PeerId, __: m.ListManifests) -> m.Manifests:
        return m.Manifests(manifests=tuple(manifest_of(model) for model in self._catalogue.models()))

    async def _identity(self, _: PeerId, __: m.ReadIdentity) -> m.Identity:
        network = self._context.network
        addresses = [f"{address}/p2p/{network.peer_id}" for address in network.addresses]
        return m.Identity(peer_id=network.peer_id, addresses=tuple(addresses[:MAX_ADDRESSES]))

    async def _metrics(self, _: PeerId, __: m.ReadMetrics) -> m.Metrics:
        states = self._membership.core.count()
        counters = {**{f"members:{state}": states[state] for state in MemberState}, **self._context.outcomes}
        return m.Metrics(counters=tuple(sorted(counters.items())[:MAX_COUNTERS]))

    async def _reputations(self, peers: Sequence[PeerId]) -> Mapping[PeerId, int]:
        store, now_ms = self._context.store, self._context.clock.unix_ms()
        return await self._context.run_blocking(lambda: {peer: store.reputation(peer, now_ms).score for peer in peers})


# ---- Pure ----


def recipe_of(model: ServedModel, wanted: str | None, own: str) -> str:
    """The recipe that a request is about: the one that it names, or the orchestrator's own, or else the model's first one."""
    if wanted is not None:
        return wanted
    return own if model.serves(own) else model.recipes[0]


def is_dialled(member: Member, model_id: str) -> bool:
    """Whether clients are told of a worker of a model: it has served, and says where it is.

    A worker that loads is not told of, a silent or draining one is, with its state: who dials filters by it.
    """
    return member.model_id == model_id and member.state in _DIALLED and member.record is not None


def page_of(rows: Sequence[Member], after: str | None, limit: int) -> tuple[Sequence[Member], bool]:
    """Up to ``limit`` of ``rows`` (in the order of their peer ids) behind ``after``, and whether there are more."""
    behind = [row for row in rows if after is None or row.peer_id > after]
    return behind[:limit], len(behind) > limit


def within_an_answer(entries: Sequence[m.PeerEntry]) -> tuple[m.PeerEntry, ...]:
    """As many entries from the first one on as fit into one answer: how long its addresses are each worker decides."""
    left_bytes = MAX_LISTED_BYTES
    for number, entry in enumerate(entries):
        left_bytes -= len(encode_message(entry))
        if left_bytes < 0:
            return tuple(entries[:number])
    return tuple(entries)


def replica_group(layers: LayerRange, assigned: Iterable[LayerRange]) -> int:
    """How many copies of all of ``layers`` there are in ``assigned``: the number of the copy that this range is, from 0."""
    copies = [0] * len(layers)
    for other in assigned:
        for layer in range(max(layers.start, other.start), min(layers.end, other.end)):
            copies[layer - layers.start] += 1
    return min(copies)


def replica_groups(members: Iterable[Member]) -> dict[PeerId, int]:
    """The number of the copy that each worker with an assignment holds, in the order of ``members``: 0 for who was first."""
    copies: defaultdict[tuple[bytes, str], Counter[int]] = defaultdict(Counter)
    groups: dict[PeerId, int] = {}
    for member in members:
        if member.state in ASSIGNED:
            held = copies[member.manifest_root, member.recipe]
            groups[member.peer_id] = min(held[layer] for layer in member.layers)
            held.update(member.layers)
    return groups


def peer_entry(member: Member, *, failures: int, reputation: int, replica_group_id: int) -> m.PeerEntry:
    """A worker as clients and its peers see it."""
    return m.PeerEntry(
        peer_id=member.peer_id,
        model_id=member.model_id,
        recipe=member.recipe,
        layer_ranges=(member.layers.as_tuple(),),
        status=member.state.value,
        p2p_addrs=member.addresses,
        http_addr=host_of(member.addresses),
        http_api_url=member.api_url,
        queue_depth=member.queue_depth,
        canary=member.is_canary,
        failures=failures,
        reputation=reputation,
        replica_group_id=replica_group_id,
    )


def host_of(addresses: Sequence[str]) -> str | None:
    """The host in the first multiaddr that has one: ``203.0.113.7`` of ``/ip4/203.0.113.7/tcp/9080``."""
    for address in addresses:
        parts = address.split("/")
        if len(parts) > 2 and parts[1] in ("ip4", "ip6", "dns", "dns4", "dns6"):
            return parts[2]
    return None


def worker_entry(member: Member) -> m.WorkerEntry:
    """A worker as an observer sees it: no address."""
    return m.WorkerEntry(
        peer_id=member.peer_id,
        model_id=member.model_id,
        status=member.state.value,
        vram_mb=member.claim_mb,
        queue_depth=member.queue_depth,
    )


def model_health(model: ServedModel, recipe: str, device: str, terms: ModelTerms, coverage: Coverage) -> m.ModelHealth:
    """What a repair needs: the holes, and the terms that a claim is sized with."""
    first = coverage.covered[0] if coverage.covered else None
    repaired = coverage.holes[0] if coverage.holes else LayerRange(0, model.total_layers)
    return m.ModelHealth(
        model_id=model.model_id,
        recipe=recipe,
        device=device,
        health=coverage.health,
        total_layers=model.total_layers,
        covered_layers=coverage.num_covered,
        rendered_layers=first.end if first is not None and first.start == 0 else 0,
        holes=tuple(hole.as_tuple() for hole in coverage.holes),
        mem_per_layer_mb=terms.mem_per_layer_mb,
        weights_per_layer_mb=terms.layer_mb,
        kv_per_layer_mb=terms.kv_mb,
        global_tensor_mb=terms.overhead_mb + terms.global_tensor_mb(repaired),
        head_global_mb=terms.embedding_mb,
        tail_global_mb=terms.head_mb,
        overhead_mb=terms.overhead_mb,
        usable_vram_pct=terms.usable_pct,
        min_vram_mb=terms.min_mb,
    )


def manifest_of(model: ServedModel) -> m.ManifestSummary:
    """A model's manifest, by its root."""
    return m.ManifestSummary(
        model_id=model.model_id,
        manifest_root=model.manifest_root,
        contract_hash=model.contract_hash,
        total_layers=model.total_layers,
    )
