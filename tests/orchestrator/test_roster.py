"""The roster counts what is taken as its members change: always what a look at every one of them says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.ids import LayerRange
from tessella_p2p.orchestrator.member import Member, MemberState, Move
from tessella_p2p.orchestrator.roster import Roster
from tests.orchestrator.paper_workers import MODEL_ID, key_of

PEERS = [key_of(f"worker {number}").peer_id for number in range(4)]
RANGES = [LayerRange(0, 4), LayerRange(4, 8), LayerRange(2, 6)]
MOVES = [Move(layers, serial=2, lease=b"lease", lease_expires_at=0, until=0) for layers in RANGES]
MESHES = [(bytes(32), "f32"), (bytes(32), "q8_0")]


@st.composite
def members(draw: st.DrawFn) -> Member:
    root, recipe = draw(st.sampled_from(MESHES))
    layers = draw(st.sampled_from(RANGES))
    member = Member(
        peer_id=draw(st.sampled_from(PEERS)),
        model_id=MODEL_ID,
        manifest_root=root,
        recipe=recipe,
        layers=layers,
        state=draw(st.sampled_from(MemberState)),
        serial=1,
        lease=b"lease",
        lease_expires_at=0,
        last_seen=0,
        silent_until=0,
        canary=draw(st.sampled_from(["off", "echo"])),
    )
    if draw(st.booleans()):
        member = replace(member, move=draw(st.sampled_from(MOVES)))
    return member


@given(st.lists(st.tuples(members(), st.booleans()), max_size=30))
def test_what_is_counted_is_what_is_there(steps: list[tuple[Member, bool]]) -> None:
    roster = Roster()
    for member, removes in steps:
        if removes and roster.get(member.peer_id) is not None:
            roster.remove(member.peer_id)
        else:
            roster.put(member)
        for mesh in MESHES:
            for but in (None, *PEERS):
                counted = [
                    layers
                    for one in roster.of(mesh)
                    if one.peer_id != but and not one.is_canary
                    for layers in one.taken
                ]
                assert roster.taken(mesh, but) == Counter(counted)
