"""The fan of events and the book of addresses stay within their bounds."""

from __future__ import annotations

import pytest
import trio

from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import EVENT_BACKLOG, MAX_ADDRESS_CHARS, MAX_ADDRESSES, MAX_KNOWN_PEERS
from tessella_p2p.net.network import PeerConnected
from tessella_p2p.net.serving import AddressBook, EventFan


def event(number: int) -> PeerConnected:
    return PeerConnected(PeerId(str(number)))


async def test_slow_subscriber_loses_the_oldest_events_and_nobody_waits() -> None:
    fan = EventFan()
    slow, fast = fan.subscribe(), fan.subscribe()
    for number in range(EVENT_BACKLOG + 10):
        fan.publish(event(number))
        assert fast.receive_nowait() == event(number)
    assert [slow.receive_nowait() for _ in range(EVENT_BACKLOG)] == [
        event(number) for number in range(10, EVENT_BACKLOG + 10)
    ]


async def test_subscriber_that_left_is_forgotten() -> None:
    fan = EventFan()
    subscriber = fan.subscribe()
    subscriber.close()
    fan.publish(event(1))
    assert fan._subscribers == []


async def test_closing_ends_every_subscription() -> None:
    fan = EventFan()
    subscriber = fan.subscribe()
    fan.publish(event(1))
    fan.close()
    assert [each async for each in subscriber] == [event(1)]
    with pytest.raises(trio.EndOfChannel):
        await subscriber.receive()


def test_newest_addresses_come_first_and_each_once() -> None:
    book = AddressBook()
    book.add(PeerId("a"), ["/ip4/1", "/ip4/2"])
    book.add(PeerId("a"), ["/ip4/3", "/ip4/1"])
    assert book.of(PeerId("a")) == ("/ip4/3", "/ip4/1", "/ip4/2")
    assert book.of(PeerId("b")) == ()


def test_addresses_are_bounded_in_number_and_length() -> None:
    book = AddressBook()
    book.add(PeerId("a"), [f"/ip4/{number}" for number in range(2 * MAX_ADDRESSES)])
    assert len(book.of(PeerId("a"))) == MAX_ADDRESSES
    book.add(PeerId("b"), ["", "/" + "x" * MAX_ADDRESS_CHARS])
    assert book.of(PeerId("b")) == ()
    for number in range(MAX_KNOWN_PEERS):
        book.add(PeerId(str(number)), ["/ip4/1"])
    assert book.of(PeerId("a")) == ()
    assert book.of(PeerId("0")) != ()
