"""Two muxers over a wire that delays and cuts as it likes: whatever ends and resets cross, no bytes are lost, doubled or misplaced."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import StreamReset
from tessella_p2p.base.limits import STREAM_WINDOW_BYTES
from tessella_p2p.net.yamux import YamuxConnection
from tessella_p2p.net.yamux_stream import YamuxStream
from tests.net.networks import ALICE, BOB
from tests.net.test_yamux import Recorder

SIDES = st.integers(0, 1)
STREAMS = st.integers(0, 3)
ACTIONS = st.one_of(
    st.tuples(st.just("open"), SIDES),
    st.tuples(st.just("send"), SIDES, STREAMS, st.integers(0, 200_000)),
    st.tuples(st.just("read"), SIDES, STREAMS, st.integers(1, 300_000)),
    st.tuples(st.just("end"), SIDES, STREAMS),
    st.tuples(st.just("reset"), SIDES, STREAMS),
    st.tuples(st.just("carry"), SIDES, st.integers(1, 250_000)),
)


@dataclass
class Side:
    """One muxer, what it has sent and received on each stream, and the bytes that are on their way to it."""

    connection: YamuxConnection
    channel: Recorder
    streams: dict[int, YamuxStream] = field(default_factory=dict)
    sent: dict[int, bytes] = field(default_factory=dict)
    received: dict[int, bytes] = field(default_factory=dict)
    inbound: deque[bytes] = field(default_factory=deque)
    was_reset: set[int] = field(default_factory=set)

    def enter(self, stream: YamuxStream) -> None:
        self.streams[stream.stream_id] = stream
        self.sent[stream.stream_id] = self.received[stream.stream_id] = b""


def sides() -> tuple[Side, Side]:
    near, far = Recorder(), Recorder()
    return (
        Side(YamuxConnection(near, BOB.peer_id, is_initiator=True), near),
        Side(YamuxConnection(far, ALICE.peer_id, is_initiator=False), far),
    )


def carry(source: Side, target: Side, size_bytes: int) -> None:
    """Bring so many bytes over, in packets that end where no frame does."""
    wire = b"".join([*target.inbound, *source.channel.sent])
    source.channel.sent.clear()
    target.inbound.clear()
    if wire[:size_bytes]:
        target.connection.receive(wire[:size_bytes])
    if wire[size_bytes:]:
        target.inbound.append(wire[size_bytes:])
    for stream_id, stream in target.connection._streams.items():
        if stream_id not in target.streams:
            target.enter(stream)


def act(both: tuple[Side, Side], action: tuple[object, ...], number: int) -> None:
    name, side_index, *rest = action
    assert isinstance(side_index, int)
    side, other = both[side_index], both[1 - side_index]
    if name == "open":
        side.enter(side.connection.open_stream())
        return
    amount = rest[-1]
    assert isinstance(amount, int)
    if name == "carry":
        carry(other, side, amount)
        return
    ids = sorted(side.streams)
    index = rest[0]
    assert isinstance(index, int)
    if index >= len(ids):
        return
    stream_id = ids[index]
    stream = side.streams[stream_id]
    try:
        if name == "send":
            data = bytes([number % 256]) * amount
            if stream.send_nowait(data):
                side.sent[stream_id] += data
        elif name == "read" and stream._chunks:
            side.received[stream_id] += stream._take(amount)
        elif name == "end":
            stream._send_fin()
        elif name == "reset":
            stream.reset_now("the test")
            side.was_reset.add(stream_id)
    except StreamReset:
        pass  # ended or reset before, from either side


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_crossing_ends_and_resets_lose_no_bytes(actions: list[tuple[object, ...]]) -> None:
    both = sides()
    for number, action in enumerate(actions):
        act(both, action, number)
        for side in both:
            assert all(0 <= s._receive_window <= STREAM_WINDOW_BYTES for s in side.connection._streams.values())
    for _ in range(4):  # answers to answers
        for near, far in (both, both[::-1]):
            carry(near, far, 1 << 40)
            for stream_id, stream in far.streams.items():
                while stream._chunks:
                    far.received[stream_id] += stream._take(1 << 20)
    for near, far in (both, both[::-1]):
        for stream_id, sent in near.sent.items():
            received = far.received.get(stream_id, b"")
            assert sent.startswith(received)
            if stream_id not in near.was_reset | far.was_reset:
                assert received == sent
    if not any(action[0] in ("end", "reset") for action in actions):
        assert both[0].connection.num_streams == both[1].connection.num_streams
