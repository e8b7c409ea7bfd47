"""Who is there: the members by name and by mesh, what of them is durable, and what they cover together (pure).

A mesh is everybody who serves one manifest under one published recipe: only they can form a chain.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import MAX_LISTED_BYTES, MAX_LISTED_STAGES
from tessella_p2p.ledger.assignments import Assignment
from tessella_p2p.model.coverage import Coverage, walk
from tessella_p2p.model.recipe import base_name
from tessella_p2p.orchestrator.assignments import kept
from tessella_p2p.orchestrator.member import KeepAssignment, Member, MemberEffect, MemberState, TopologyChanged

Mesh: TypeAlias = tuple[bytes, str]
"""Manifest root and published recipe."""


def mesh_of(member: Member) -> Mesh:
    """The mesh that a member belongs to."""
    return (member.manifest_root, member.recipe)


class Roster:
    """The members that are remembered."""

    def __init__(self) -> None:
        self._members: dict[PeerId, Member] = {}
        self._meshes: dict[Mesh, dict[PeerId, Member]] = {}
        self._taken: dict[Mesh, Counter[LayerRange]] = {}
        self._kept: dict[PeerId, Assignment] = {}
        self._complete: set[Mesh] = set()

    def __len__(self) -> int:
        return len(self._members)

    def members(self) -> tuple[Member, ...]:
        """Everybody, in the order of registration."""
        return tuple(self._members.values())

    def get(self, peer: PeerId) -> Member | None:
        """One member."""
        return self._members.get(peer)

    def of(self, mesh: Mesh) -> tuple[Member, ...]:
        """The members of one mesh."""
        return tuple(self._meshes.get(mesh, {}).values())

    def meshes(self) -> tuple[Mesh, ...]:
        """Every mesh that has a member."""
        return tuple(self._meshes)

    def count(self) -> Counter[MemberState]:
        """How many members are in each state."""
        return Counter(member.state for member in self._members.values())

    # ---- What changes ----

    def restore(self, member: Member, row: Assignment) -> None:
        """Take up a member as its durable row says it was."""
        self._set(member)
        self._kept[member.peer_id] = row
        if row.mesh_complete:
            self._complete.add(mesh_of(member))

    def put(self, member: Member) -> list[MemberEffect]:
        """Enter a member, or what it is now."""
        before = self._members.get(member.peer_id)
        self._set(member)
        effects = self._keep(member.peer_id, kept(member, mesh_complete=self.is_complete(mesh_of(member))))
        if before is None or _standing(before) != _standing(member):
            effects.append(TopologyChanged(member.peer_id, None if before is None else before.state, member.state))
        return effects

    def remove(self, peer: PeerId) -> list[MemberEffect]:
        """Forget a member."""
        member = self._members.pop(peer)
        self._leave_mesh(member)
        return self._keep(peer, None)

    def is_complete(self, mesh: Mesh) -> bool:
        """Whether `min_stages` workers of a mesh had registered at some time."""
        return mesh in self._complete

    def complete(self, mesh: Mesh) -> None:
        """Enough workers of a mesh have registered; it stays so, as long as one of them is remembered."""
        self._complete.add(mesh)

    def _set(self, member: Member) -> None:
        before = self._members.get(member.peer_id)
        if before is not None:
            if mesh_of(before) != mesh_of(member):
                self._leave_mesh(before)
            else:
                self._count(before, -1)
        self._members[member.peer_id] = member
        self._meshes.setdefault(mesh_of(member), {})[member.peer_id] = member
        self._count(member, 1)

    def _leave_mesh(self, member: Member) -> None:
        self._count(member, -1)
        mesh = self._meshes[mesh_of(member)]
        del mesh[member.peer_id]
        if not mesh:
            del self._meshes[mesh_of(member)], self._taken[mesh_of(member)]
            self._complete.discard(mesh_of(member))  # drift classes are anybody's words: there is no end of them

    def _count(self, member: Member, change: int) -> None:
        """Count what a member takes, so that a registration in a mesh of thousands need not."""
        taken = self._taken.setdefault(mesh_of(member), Counter())
        for layers in () if member.is_canary else member.taken:
            taken[layers] += change
            if not taken[layers]:
                del taken[layers]

    def _keep(self, peer: PeerId, assignment: Assignment | None) -> list[MemberEffect]:
        """Keep what differs from what is kept already: most heartbeats change nothing on disk."""
        if assignment == self._kept.get(peer):
            return []
        if assignment is None:
            del self._kept[peer]
        else:
            self._kept[peer] = assignment
        return [KeepAssignment(peer, assignment)]

    # ---- What they cover and list ----

    def taken(self, mesh: Mesh, but: PeerId | None = None) -> Counter[LayerRange]:
        """What everybody of a mesh but one holds or was ordered to, each range with how many take it: what the allocator works from.

        Canaries hold nothing.
        """
        taken = self._taken.get(mesh, Counter())
        member = None if but is None else self._meshes.get(mesh, {}).get(but)
        if member is None or member.is_canary:
            return +taken
        return taken - Counter(member.taken)

    def coverage(self, manifest_root: bytes, recipe: str, total_layers: int) -> Coverage:
        """The walk over the healthy stages of a model; a recipe's own name stands for its drift class that renders the most layers."""
        walks = [
            walk((member.layers for member in members.values() if _covers(member)), total_layers)
            for (root, published), members in self._meshes.items()
            if root == manifest_root and recipe in (published, base_name(published))
        ]
        return max(walks, key=lambda coverage: coverage.num_covered, default=walk((), total_layers))

    def listed(self, manifest_root: bytes | None, now_ms: int) -> tuple[bytes, ...]:
        """Sealed stage records of the healthy members, unexpired, bounded in number and bytes; a None lists every model's."""
        records: list[bytes] = []
        size_bytes = 0
        for member in self._members.values():
            if member.state is not MemberState.HEALTHY or member.record is None or member.record_expires_at <= now_ms:
                continue
            if manifest_root is not None and member.manifest_root != manifest_root:
                continue
            size_bytes += len(member.record)
            if len(records) == MAX_LISTED_STAGES or size_bytes > MAX_LISTED_BYTES:
                break
            records.append(member.record)
        return tuple(records)


def _covers(member: Member) -> bool:
    return member.state is MemberState.HEALTHY and not member.is_canary


def _standing(member: Member) -> tuple[object, ...]:
    """What others are told of at once, when it changes."""
    return (member.state, mesh_of(member), member.layers, member.canary, member.move)
