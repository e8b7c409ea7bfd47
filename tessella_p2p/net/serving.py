"""What both networks share: the table of handlers with its guard, the fan-out of events, and the book of addresses."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence

import structlog
import trio

from tessella_p2p.base.errors import RemoteProtocolError, TransportError, VersionMismatch
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import EVENT_BACKLOG, MAX_ADDRESS_CHARS, MAX_ADDRESSES, MAX_KNOWN_PEERS
from tessella_p2p.net.network import Handler, NetworkEvent, Stream
from tessella_p2p.net.pipe import open_pipe

log = structlog.get_logger(__name__)


class Handlers:
    """Handlers by protocol. `run` is the one guard through which each of them is called."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self.failures: Counter[str] = Counter()
        """Per protocol: handlers that ended with an exception."""

    def add(self, protocol: str, handler: Handler) -> None:
        """Serve ``protocol`` with ``handler``; a later one replaces it."""
        self._handlers[protocol] = handler

    @property
    def protocols(self) -> Collection[str]:
        """The protocols that are served."""
        return self._handlers.keys()

    async def run(self, protocol: str, stream: Stream) -> None:
        """Call the handler of ``protocol``, and close the stream after it; an exception resets the stream and goes no further."""
        await self.guard(protocol, stream, lambda: self._handlers[protocol](stream))

    async def guard(self, protocol: str, stream: Stream, serve: Callable[[], Awaitable[None]]) -> None:
        """`run` with any ``serve`` in the handler's place."""
        try:
            await serve()
        except BaseException as error:  # a cancellation, too, has to leave no stream behind
            with trio.CancelScope(shield=True):
                await stream.reset()
            self._record(protocol, stream.peer, error)
            if isinstance(error, Exception):  # a handler's failure, whatever it is, must not end the node
                return
            if isinstance(error, BaseExceptionGroup):
                _, error_rest = error.split(Exception)
                if error_rest is None:
                    return
                raise error_rest from None
            raise
        else:
            await stream.aclose()

    def _record(self, protocol: str, peer: PeerId, error: BaseException) -> None:
        if isinstance(error, trio.Cancelled) or (
            isinstance(error, BaseExceptionGroup) and error.split(trio.Cancelled)[1] is None
        ):
            return
        self.failures[protocol] += 1
        if isinstance(error, TransportError | RemoteProtocolError):
            log.info("stream_ended", protocol=protocol, peer=peer, error=error.code, reason=str(error))
        else:
            log.error("handler_failed", protocol=protocol, peer=peer, exc_info=error)

    def open_to_self(self, peer: PeerId, protocol: str, nursery: trio.Nursery) -> Stream:
        """A pipe to this node's own handler.

        Raises:
            VersionMismatch: this node does not serve ``protocol``.
        """
        if protocol not in self._handlers:
            raise VersionMismatch(f"{peer} (this node) does not serve {protocol}")
        near, far = open_pipe(peer)
        nursery.start_soon(self.run, protocol, far)
        return near


class EventFan:
    """Events to every subscriber; one that falls `EVENT_BACKLOG` behind loses the oldest."""

    def __init__(self) -> None:
        self._subscribers: list[
            tuple[trio.MemorySendChannel[NetworkEvent], trio.MemoryReceiveChannel[NetworkEvent]]
        ] = []

    def subscribe(self) -> trio.MemoryReceiveChannel[NetworkEvent]:
        """Events from now on."""
        send, receive = trio.open_memory_channel[NetworkEvent](EVENT_BACKLOG)
        self._subscribers.append((send, receive.clone()))
        return receive

    def publish(self, event: NetworkEvent) -> None:
        """Tell everybody who still listens."""
        for subscriber in list(self._subscribers):
            send, own_end = subscriber
            statistics = send.statistics()
            if statistics.open_receive_channels == 1:  # only our own end is left
                self._drop(subscriber)
                continue
            if statistics.current_buffer_used == EVENT_BACKLOG:
                own_end.receive_nowait()
            send.send_nowait(event)

    def close(self) -> None:
        """No more events: subscribers see the end of their channel after what is buffered."""
        for subscriber in list(self._subscribers):
            self._drop(subscriber)

    def _drop(
        self, subscriber: tuple[trio.MemorySendChannel[NetworkEvent], trio.MemoryReceiveChannel[NetworkEvent]]
    ) -> None:
        self._subscribers.remove(subscriber)
        subscriber[0].close()
        subscriber[1].close()


class AddressBook:
    """Where peers may be dialled: at most `MAX_ADDRESSES` for each of the `MAX_KNOWN_PEERS` that were heard of last."""

    def __init__(self) -> None:
        self._addresses: OrderedDict[PeerId, tuple[str, ...]] = OrderedDict()

    def add(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Remember addresses; the newest come first."""
        fresh = [address for address in addresses[:MAX_ADDRESSES] if 0 < len(address) <= MAX_ADDRESS_CHARS]
        known = self._addresses.pop(peer, ())
        merged = (
            known if known[: len(fresh)] == tuple(fresh) else tuple(dict.fromkeys([*fresh, *known]))[:MAX_ADDRESSES]
        )
        if merged:
            self._addresses[peer] = merged
        while len(self._addresses) > MAX_KNOWN_PEERS:
            self._addresses.popitem(last=False)

    def of(self, peer: PeerId) -> tuple[str, ...]:
        """The addresses of ``peer``, newest first."""
        return self._addresses.get(peer, ())
