"""Places for inbound streams."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tessella_p2p.base.ids import PeerId
from tessella_p2p.dht.inbound import InboundStreams

ONE, TWO, THREE = PeerId("one"), PeerId("two"), PeerId("three")


def test_a_peer_has_so_many_places_and_all_peers_so_many_together() -> None:
    inbound = InboundStreams(per_peer=2, total=3)
    with ExitStack() as streams:
        assert [streams.enter_context(inbound.place(peer)) for peer in (ONE, ONE, ONE)] == [True, True, False]
        assert [streams.enter_context(inbound.place(peer)) for peer in (TWO, TWO, THREE)] == [True, False, False]


def test_a_place_is_free_again_however_its_stream_ended() -> None:
    inbound = InboundStreams(per_peer=1, total=1)
    with pytest.raises(OSError, match="lost"), inbound.place(ONE):
        raise OSError("lost")
    with inbound.place(TWO) as has_place:
        assert has_place


def test_a_stream_that_was_refused_frees_nobody_elses_place() -> None:
    inbound = InboundStreams(per_peer=1, total=1)
    with inbound.place(ONE):
        with inbound.place(ONE) as has_place:
            assert not has_place
        with inbound.place(TWO) as has_place:
            assert not has_place
