"""A peer that speaks the hop and token protocols frame by frame, and does nothing that it is not told to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import TessellaError
from tessella_p2p.base.ids import LayerRange, PeerId, SessionId
from tessella_p2p.net.memory import MemoryFabric, MemoryNetwork
from tessella_p2p.net.network import Stream
from tessella_p2p.stages.frame_link import FrameReader
from tessella_p2p.stages.opening import open_hash, seal_capability
from tessella_p2p.stages.work import seal_receipt
from tessella_p2p.wire import messages as m
from tessella_p2p.wire import protocols
from tessella_p2p.wire.envelope import ClockSequencer, decode_message, encode_message, seal
from tessella_p2p.wire.frames import DType, Flag, Frame, Kind, TraceEntry, encode_frame
from tessella_p2p.wire.keys import NodeKey

DIGEST_KEY = b"k" * 32
PATIENCE_S = 300.0


@dataclass
class RawStream:
    """One stream, a frame at a time."""

    stream: Stream

    def __post_init__(self) -> None:
        self._reader = FrameReader(self.stream, lambda _: True)

    async def send(self, *frames: Frame) -> None:
        await self.stream.send_all(b"".join(encode_frame(frame) for frame in frames))

    async def receive(self, *kinds: Kind) -> Frame:
        """The next frame of these kinds (of any); others are passed over."""
        with trio.fail_after(PATIENCE_S):
            while True:
                item = await self._reader.receive()
                assert isinstance(item, Frame), "the stream ended, or a frame was damaged"
                if not kinds or item.kind in kinds:
                    return item

    async def error(self) -> m.ErrorBody:
        """The next error."""
        return decode_message(m.ErrorBody, bytes((await self.receive(Kind.ERROR)).body))

    async def ended(self) -> bool:
        """Read until the other end ends or resets the stream; True for a proper end."""
        with trio.fail_after(PATIENCE_S):
            try:
                while await self._reader.receive() is not None:
                    pass
            except TessellaError:
                return False
            return True


@dataclass
class RawPeer:
    """A peer on the in-memory network; every inbound stream waits in a channel."""

    key: NodeKey
    network: MemoryNetwork
    clock: WallClock
    sequencer: ClockSequencer = field(default_factory=ClockSequencer)
    opened: dict[bytes, bytes] = field(default_factory=dict)
    """The hash of the newest open of each session: what its digests begin with."""

    def __post_init__(self) -> None:
        self._inbound = {
            protocol: trio.open_memory_channel[RawStream](64) for protocol in (protocols.HOP, protocols.TOKENS)
        }

    @property
    def peer_id(self) -> PeerId:
        return self.key.peer_id

    def serve(self, protocol: str) -> None:
        """Accept streams of ``protocol``."""

        async def keep(stream: Stream) -> None:
            await self._inbound[protocol][0].send(RawStream(stream))
            await trio.sleep_forever()

        self.network.serve(protocol, keep)

    async def inbound(self, protocol: str) -> RawStream:
        """The next inbound stream."""
        with trio.fail_after(PATIENCE_S):
            return await self._inbound[protocol][1].receive()

    async def connect(self, peer: PeerId, addresses: Sequence[str], protocol: str = protocols.HOP) -> RawStream:
        self.network.add_addresses(peer, addresses)
        return RawStream(await self.network.open_stream(peer, protocol))

    def seal(self, domain: str, message: Any, **options: Any) -> bytes:
        now_ms = self.clock.unix_ms()
        return seal(self.key, domain, message, sequence=self.sequencer.next(domain, now_ms), now_ms=now_ms, **options)

    def open_frame(self, body: m.ChainOpen) -> Frame:
        """The OPEN of a chain that this peer is the entry of."""
        envelope = self.seal(m.CHAIN_OPEN, body)
        self.opened[body.session] = open_hash(envelope)
        capability = seal_capability(self.key, body, envelope, sequence=1, now_ms=self.clock.unix_ms(), ttl_ms=60_000)
        return Frame(
            Kind.OPEN,
            SessionId(body.session),
            body.epoch,
            body=encode_message(m.OpenFrame(open=envelope, capability=capability)),
        )

    def receipt(self, body: m.ChainOpen, sender: PeerId, positions: int, digest: bytes) -> Frame:
        """A receipt of this peer for what ``sender`` sent."""
        statement = m.ReceiptBody(
            request_id=body.request_id,
            session=body.session,
            epoch=body.epoch,
            sender=sender,
            positions=positions,
            digest=digest,
        )
        raw = seal_receipt(statement, self.key, self.sequencer, self.clock.unix_ms())
        return Frame(Kind.RECEIPT, SessionId(body.session), body.epoch, body=raw)


@asynccontextmanager
async def raw_peer(fabric: MemoryFabric, clock: WallClock, name: str) -> AsyncIterator[RawPeer]:
    key = NodeKey(name.encode().ljust(32, b"."))
    async with MemoryNetwork.open(fabric, key.peer_id) as network:
        yield RawPeer(key, network, clock)


def stage_of(peer: PeerId, layers: LayerRange, addresses: Sequence[str]) -> m.RouteStage:
    return m.RouteStage(peer_id=peer, layers=layers.as_tuple(), addresses=tuple(addresses))


def ids_step(chain: m.ChainOpen, position: int, ids: Sequence[int], *, sample: bool = False, **changes: Any) -> Frame:
    """A STEP of token ids, as an entry sends it."""
    fields: dict[str, Any] = {
        "step": 0,
        "position": position,
        "rows": len(ids),
        "dtype": DType.U32,
        "flags": Flag.SAMPLE if sample else Flag.NONE,
        "body": b"".join(token.to_bytes(4, "little") for token in ids),
    }
    return Frame(Kind.STEP, SessionId(chain.session), chain.epoch, **(fields | changes))


def rows_step(
    body: m.ChainOpen, position: int, rows: bytes, *, row_bytes: int = 32, traces: int = 1, sample: bool = False
) -> Frame:
    """A STEP of hidden states, as a stage sends it."""
    return Frame(
        Kind.STEP,
        SessionId(body.session),
        body.epoch,
        0,
        position,
        len(rows) // row_bytes,
        DType.F32,
        Flag.SAMPLE if sample else Flag.NONE,
        (TraceEntry(1, 1, 1),) * traces,
        rows,
    )


def close_frame(body: m.ChainOpen) -> Frame:
    return Frame(Kind.CLOSE, SessionId(body.session), body.epoch)


def error_frame(body: m.ChainOpen, code: str, met_by: PeerId, fault_of: PeerId, reason: str = "x") -> Frame:
    said = m.ErrorBody(code=code, reason=reason, met_by=met_by, fault_of=fault_of)
    return Frame(Kind.ERROR, SessionId(body.session), body.epoch, body=encode_message(said))


def damaged(frame: Frame) -> bytes:
    """The frame's bytes, of which the last one was flipped on the way."""
    data = bytearray(encode_frame(frame))
    data[-1] ^= 1
    return bytes(data)
