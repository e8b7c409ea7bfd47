"""Workers are moved to other layers while they serve (shell): what ``rebalance`` planned is ordered, wave by wave.

There is one plan at a time. A wave begins when everybody of the one before serves its new layers; where somebody refuses, leaves, or
does not get there in time, the rest of the plan is dropped, and what was done stays. A worker whose claim has room for both ranges
loads the new one beside the old and is told to change over once it has; another one drains first. Those of a wave that go together are
told to change over at the same time, so a chain without replicas is never without a stage, and its open sessions go on.

A hole that stays is repaired without being asked: one replica at a time, seldom.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
import trio

from tessella_p2p.base.errors import (
    HopTimeout,
    Overloaded,
    StorageError,
    StreamReset,
    TessellaError,
    UnknownModel,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_MOVES_TOLD, MOVE_TIMEOUT_S, REPAIR_LOOK_S, REPAIR_PERIOD_S
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.context import Handlers, OrchestratorContext
from tessella_p2p.orchestrator.member import ASSIGNED, SERVING, Member, MemberState, MoveAbandoned, MoveOrdered
from tessella_p2p.orchestrator.membership import Membership
from tessella_p2p.orchestrator.orders import Orders
from tessella_p2p.orchestrator.rebalance import Plan, plan_rebalance, plan_repair
from tessella_p2p.orchestrator.roster import Mesh, mesh_of
from tessella_p2p.orchestrator.terms import ModelTerms
from tessella_p2p.orchestrator.waves import Holder, PlannedMove, Wave
from tessella_p2p.wire import messages as m

_LOG: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Work:
    """A plan for one mesh, and why."""

    mesh: Mesh
    plan: Plan
    reason: str


class Resharding:
    """Plans moves, and has them made.

    Args:
        repair_after_s: how long a hole stays before a replica is moved to it; None moves nobody unasked.
    """

    def __init__(
        self,
        context: OrchestratorContext,
        catalogue: Catalogue,
        membership: Membership,
        orders: Orders,
        repair_after_s: float | None,
    ) -> None:
        self._context = context
        self._catalogue = catalogue
        self._membership = membership
        self._orders = orders
        self._repair_after_s = repair_after_s
        self._asked: list[_Work] = []
        self._news = trio.Event()
        self._is_busy = False
        self._hole_since: dict[Mesh, float] = {}
        self._repaired_at: dict[Mesh, float] = {}

    def operator_handlers(self) -> Handlers:
        """What this part answers, for the operator alone."""
        return {m.Rebalance: self._rebalance}

    @property
    def is_busy(self) -> bool:
        """Whether a plan is being carried out, or waits."""
        return self._is_busy or bool(self._asked)

    async def _rebalance(self, _: PeerId, request: m.Rebalance) -> m.RebalancePlan:
        if not request.dry_run and self.is_busy:
            raise Overloaded("workers are being moved already: wait until they serve, then ask again")
        name = request.model_id
        models = self._catalogue.models() if name is None else (self._catalogue.by_name(name),)
        roots = {model.manifest_root for model in models}
        found = [_Work(mesh, self._plan(mesh), "rebalance") for mesh in self._meshes() if mesh[0] in roots]
        work = [one for one in found if one.plan.moves]
        if not request.dry_run and work:
            self._asked += work
            self._news.set()
        return told([one.plan for one in found], begun=bool(work) and not request.dry_run)

    # ---- Plans ----

    def _meshes(self) -> tuple[Mesh, ...]:
        return tuple(sorted(self._membership.core.meshes()))

    def _plan(self, mesh: Mesh) -> Plan:
        total_layers = self._catalogue.by_root(mesh[0]).total_layers
        return plan_rebalance(total_layers, self._holders(mesh), min_stages=self._membership.core.min_stages)

    def _holders(self, mesh: Mesh) -> list[Holder]:
        """Who holds layers or loads them; who was ordered elsewhere, or was not heard since a restart, stays where it is."""
        members = self._membership.core.in_mesh(*mesh)
        return [self._holder(member) for member in members if member.state in ASSIGNED and not member.is_canary]

    def _holder(self, member: Member) -> Holder:
        is_known = member.move is None and bool(member.addresses) and member.claim_mb > 0
        terms = self._terms(member) if is_known else None
        return Holder(member.peer_id, member.layers, member.claim_mb, terms, member.bound)

    def _terms(self, member: Member) -> ModelTerms | None:
        model = self._catalogue.find(member.manifest_root)
        try:
            return None if model is None or member.device is None else model.terms_for(member.recipe, member.device)
        except UnknownModel:  # its terms were withdrawn since it registered
            return None

    def _repair(self, now: float) -> _Work | None:
        """The repair that is due, if any."""
        if self._repair_after_s is None:
            return None
        meshes = self._meshes()
        for known in (self._hole_since, self._repaired_at):
            for gone in known.keys() - meshes:
                del known[gone]
        for mesh in meshes:
            plan = self._repair_of(mesh, now)
            if not plan.moves:
                self._hole_since.pop(mesh, None)
                continue
            since = self._hole_since.setdefault(mesh, now)
            rested = now - self._repaired_at.get(mesh, -REPAIR_PERIOD_S) >= REPAIR_PERIOD_S
            if rested and now - since >= self._repair_after_s:
                self._repaired_at[mesh] = now
                return _Work(mesh, plan, "repair")
        return None

    def _repair_of(self, mesh: Mesh, now: float) -> Plan:
        model = self._catalogue.find(mesh[0])
        holders = self._holders(mesh)
        if model is None or any(member.move is not None for member in self._membership.core.in_mesh(*mesh)):
            return Plan((), 0, 0)
        lost = self._membership.suspicion.suspects([holder.peer for holder in holders], now)
        return plan_repair(model.total_layers, holders, lost)

    # ---- What is done ----

    async def run(self) -> None:
        """Carry out plans until cancelled; orders that are out then are forgotten, and workers that took them are taken in."""
        while True:
            with trio.move_on_after(REPAIR_LOOK_S):
                await self._news.wait()
            self._news = trio.Event()
            work = self._asked.pop(0) if self._asked else self._repair(trio.current_time())
            if work is None:
                continue
            if self._asked:
                self._news.set()
            self._is_busy = True
            try:
                await self._carry_out(work)
            except StorageError as error:
                _LOG.error("ledger_unwritable", reason=str(error))
            finally:
                self._is_busy = False

    async def _carry_out(self, work: _Work) -> None:
        _LOG.info("moves_begun", reason=work.reason, moves=len(work.plan.moves), waves=len(work.plan.waves))
        for wave in work.plan.waves:
            if not await self._carry_out_wave(wave, work):
                _LOG.warning("moves_dropped", reason=work.reason)
                self._context.outcomes["moves:dropped"] += 1
                return
        self._context.outcomes["moves:done"] += 1
        _LOG.info("moves_done", reason=work.reason)

    async def _carry_out_wave(self, wave: Wave, work: _Work) -> bool:
        """Whether everybody of the wave serves its new layers."""
        beside = [move for move in wave.moves if move.beside]
        prepared = await _all([partial(self._prepare, move, work) for move in beside])
        if wave.together and not all(prepared):
            for move in beside:
                await self._membership.handle(MoveAbandoned(move.peer))
            return False
        ready = [move for move, done in zip(beside, prepared, strict=True) if done]
        going = [*ready, *(move for move in wave.moves if not move.beside)]
        done = await _all([partial(self._change_over, move, work) for move in going])
        return len(going) == len(wave.moves) and all(done)

    async def _prepare(self, move: PlannedMove, work: _Work) -> bool:
        """Have layers loaded beside what is served; whether they are."""
        if not await self._order(move, work, beside=True):
            return False

        def is_prepared(member: Member) -> bool:
            return member.move is not None and member.move.prepared

        return await self._until(move.peer, is_prepared, lambda member: member.move is None)

    async def _change_over(self, move: PlannedMove, work: _Work) -> bool:
        """Have a worker serve its new layers; whether it does."""
        if not await self._order(move, work, beside=False):
            return False

        def serves(member: Member) -> bool:
            return member.layers == move.after and member.state in SERVING

        def failed(member: Member) -> bool:
            return member.move is None and member.layers != move.after

        return await self._until(move.peer, serves, failed)

    async def _order(self, move: PlannedMove, work: _Work, *, beside: bool) -> bool:
        """Send an order; whether it was taken, as far as can be told."""
        member = self._membership.core.get(move.peer)
        if member is None or mesh_of(member) != work.mesh or member.layers != move.before:
            return False  # the mesh is not the one that was planned for any more
        try:
            order = await self._membership.order(MoveOrdered(move.peer, move.after, beside, work.reason))
            answer = await self._orders.send(order.peer, order.addresses, order.body)
        except (HopTimeout, StreamReset):
            return True  # it may have been taken: what the worker shows next will tell
        except StorageError:
            raise
        except TessellaError as error:
            _LOG.info("move_refused", peer=move.peer, code=error.code, reason=str(error))
        else:
            if isinstance(answer, m.OrderTaken):
                return True
            _LOG.info("move_refused", peer=move.peer, code=answer.code, reason=answer.reason)
        await self._membership.handle(MoveAbandoned(move.peer))
        return False

    async def _until(self, peer: PeerId, done: Callable[[Member], bool], failed: Callable[[Member], bool]) -> bool:
        """Wait until a member is ``done``; False where it ``failed``, left, or took too long."""
        with trio.move_on_after(MOVE_TIMEOUT_S):
            while True:
                changed = self._membership.changed
                member = self._membership.core.get(peer)
                if member is None or member.state in (MemberState.OFFLINE, MemberState.LEFT):
                    return False
                if done(member):
                    return True
                if failed(member):
                    return False
                await changed.wait()
        return False


def told(plans: Sequence[Plan], *, begun: bool) -> m.RebalancePlan:
    """Plans as the operator is told of them."""
    moves = [move for plan in plans for move in plan.moves]
    return m.RebalancePlan(
        moves=tuple(
            m.Move(peer_id=move.peer, before=move.before.as_tuple(), after=move.after.as_tuple())
            for move in moves[:MAX_MOVES_TOLD]
        ),
        num_moves=len(moves),
        dearest_before=max((plan.dearest_before for plan in plans), default=0),
        dearest_after=max((plan.dearest_after for plan in plans), default=0),
        begun=begun,
    )


async def _all(calls: Sequence[Callable[[], Awaitable[bool]]]) -> list[bool]:
    """What each call gives, in order; they run at the same time."""
    results = [False] * len(calls)

    async def run(index: int) -> None:
        results[index] = await calls[index]()

    async with trio.open_nursery() as nursery:
        for index in range(len(calls)):
            nursery.start_soon(run, index)
    return results
