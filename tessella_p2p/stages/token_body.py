"""The body of a TOKEN frame (pure): the token that a tail drew and, where logprobs were asked for, what the model gave it; or the
vector of an embedding.

    u32 token id                                    with tokens and logprobs; receipts and proofs run over these four bytes alone
    f32 its logprob                                 with logprobs
    num_top × (u32 token id, f32 its logprob)       the likeliest tokens, likeliest first
    hidden size × f32: the vector                   with embedding, and nothing else; receipts and proofs run over all of it

All little-endian. What a tail says of probabilities cannot be verified here; what no honest tail can say is refused.
"""

from __future__ import annotations

import struct
from itertools import pairwise

from tessella_p2p.base.errors import RemoteProtocolError
from tessella_p2p.stages.engine import Sampled, TokenLogprob
from tessella_p2p.stages.pooling import VECTOR_DTYPE
from tessella_p2p.stages.sampler import LEAST_LOGPROB
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.frames import DType

TOKEN_ID_BYTES = DType.U32.size
_SCORED = struct.Struct("<If")


def encode_sampled(sampled: Sampled) -> bytes:
    """The body of a draw."""
    if sampled.logprob is None:
        return sampled.token_id.to_bytes(TOKEN_ID_BYTES, "little")
    scored = [(sampled.token_id, sampled.logprob), *((top.token_id, top.logprob) for top in sampled.top)]
    return b"".join(_SCORED.pack(*each) for each in scored)


def token_body_bytes(sampling: m.Sampling, output: str, vocabulary: int, hidden_size: int) -> int:
    """Length of the body that a tail owes, for a chain-open's ``sampling`` and ``output``."""
    if output == "embedding":
        return hidden_size * VECTOR_DTYPE.size
    if output != "logprobs":
        return TOKEN_ID_BYTES
    return _SCORED.size * (1 + min(sampling.num_top, vocabulary))


def parse_sampled(body: bytes | bytearray | memoryview, vocabulary: int) -> Sampled:
    """The draw in a body of the length that the tail owes.

    Raises:
        RemoteProtocolError: an id out of the vocabulary, a logprob that is none, alternatives that repeat themselves or are out of
            order.
    """
    if len(body) == TOKEN_ID_BYTES:
        return Sampled(_checked_id(int.from_bytes(body, "little"), vocabulary))
    scored = [
        TokenLogprob(_checked_id(token_id, vocabulary), _checked_logprob(logprob))
        # Of a copy: CPython 3.11 crashes when the collector finds a memoryview, that such an iterator holds, in an error's traceback.
        for token_id, logprob in _SCORED.iter_unpack(bytes(body))
    ]
    own, top = scored[0], tuple(scored[1:])
    if len({each.token_id for each in top}) != len(top) or any(a.logprob < b.logprob for a, b in pairwise(top)):
        raise RemoteProtocolError("alternatives that repeat themselves, or are not sorted")
    if any(each.token_id == own.token_id and each.logprob != own.logprob for each in top):
        raise RemoteProtocolError(f"two logprobs of token {own.token_id}")
    return Sampled(own.token_id, own.logprob, top)


def _checked_id(token_id: int, vocabulary: int) -> int:
    if token_id >= vocabulary:
        raise RemoteProtocolError(f"token {token_id} of a vocabulary of {vocabulary}")
    return token_id


def _checked_logprob(logprob: float) -> float:
    if not LEAST_LOGPROB <= logprob <= 0.0:  # nor NaN
        raise RemoteProtocolError(f"a logprob of {logprob}")
    return logprob
