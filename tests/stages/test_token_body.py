"""The body of a TOKEN frame: what a tail drew comes back, and what no honest tail can say is refused."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import RemoteProtocolError
from tessella_p2p.stages.engine import Sampled, TokenLogprob
from tessella_p2p.stages.token_body import encode_sampled, parse_sampled, token_body_bytes
from tessella_p2p.wire import messages as m

VOCABULARY = 100


def body(*scored: tuple[int, float]) -> bytes:
    return b"".join(struct.pack("<If", *each) for each in scored)


def test_a_draw_without_logprobs_is_four_bytes() -> None:
    assert encode_sampled(Sampled(7042)) == b"\x82\x1b\x00\x00"
    assert parse_sampled(b"\x63\x00\x00\x00", VOCABULARY) == Sampled(99)


@given(
    token=st.integers(0, VOCABULARY - 1),
    logprobs=st.lists(st.floats(-9999.0, 0.0, width=32), min_size=1, max_size=21),
)
def test_a_draw_with_logprobs_comes_back(token: int, logprobs: list[float]) -> None:
    own, *falling = logprobs
    falling.sort(reverse=True)
    top = tuple(TokenLogprob((token + 1 + rank) % VOCABULARY, each) for rank, each in enumerate(falling))
    sampled = Sampled(token, own, top)
    encoded = encode_sampled(sampled)
    sampling = m.Sampling(num_top=len(top))
    assert len(encoded) == token_body_bytes(sampling, "logprobs", VOCABULARY, 64)
    assert parse_sampled(memoryview(encoded), VOCABULARY) == sampled


def test_a_small_vocabulary_has_fewer_alternatives_than_were_asked_for() -> None:
    assert token_body_bytes(m.Sampling(num_top=20), "logprobs", 3, 64) == 8 + 3 * 8
    assert token_body_bytes(m.Sampling(), "tokens", 3, 64) == 4


def test_a_vector_is_as_wide_as_a_row() -> None:
    assert token_body_bytes(m.Sampling(), "embedding", 3, 64) == 64 * 4


@pytest.mark.parametrize(
    "wrong",
    [
        (VOCABULARY).to_bytes(4, "little"),
        b"\xff" * 4,
        body((VOCABULARY, -1.0)),
        body((1, math.nan)),
        body((1, 0.1)),
        body((1, math.inf)),
        body((1, -math.inf)),
        body((1, -10_000.0)),
        body((1, -1.0), (VOCABULARY, -1.0)),
        body((1, -1.0), (2, math.nan)),
        body((1, -1.0), (2, 0.5)),
        body((1, -1.0), (2, -2.0), (3, -1.0)),
        body((1, -1.0), (2, -2.0), (2, -2.0)),
        body((1, -1.0), (1, -2.0)),
    ],
)
def test_what_no_honest_tail_can_say_is_refused(wrong: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_sampled(wrong, VOCABULARY)


@given(st.integers(0, 21).flatmap(lambda count: st.binary(min_size=8 * count, max_size=8 * count)).filter(len))
def test_any_bytes_of_the_right_length_give_a_draw_or_a_typed_error(data: bytes) -> None:
    try:
        sampled = parse_sampled(data, VOCABULARY)
    except RemoteProtocolError:
        return
    assert encode_sampled(sampled) == data
