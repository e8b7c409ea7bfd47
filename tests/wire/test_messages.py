"""Messages: every field has its bounds, and any bytes give a message or `MalformedMessage`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import MalformedMessage
from tessella_p2p.base.limits import MAX_ADDRESSES, MAX_MODEL_LAYERS, MAX_POSITIONS, MAX_STAGES
from tessella_p2p.wire import cbor, messages
from tessella_p2p.wire.envelope import Message, decode_message, encode_message
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import (
    AnswerBody,
    ChainOpen,
    Lease,
    Register,
    RequestBody,
    RouteStage,
    Sampling,
    StageRecord,
    Stages,
)

PEER = NodeKey(bytes(32)).peer_id
DIGEST = bytes(32)
KINDS = sorted(
    (
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
    ),
    key=lambda kind: kind.__name__,
)
FIELD_NAMES = sorted({name for kind in KINDS for name in kind.model_fields})
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64) + 1, 2**64 - 1)
    | st.floats()
    | st.sampled_from([PEER, "register", "lease", "tokens", "VIP", "", "x" * 200])
    | st.sampled_from([DIGEST, bytes(16), b""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELD_NAMES), inner, max_size=4),
    max_leaves=12,
)

REGISTER = Register(
    addresses=("/ip4/127.0.0.1/tcp/1",),
    claim_mb=100,
    device="cpu",
    model_id="smollm2-135m-instruct",
    total_layers=30,
    manifest_root=DIGEST,
    contract_hash=DIGEST,
    recipe="f32",
    layers=(0, 10),
)
STAGE = RouteStage(peer_id=PEER, layers=(0, 10), addresses=())
OPEN = ChainOpen(
    session=bytes(16),
    epoch=0,
    request_id="r-1",
    model_id="m",
    manifest_root=DIGEST,
    recipe="f32",
    route=(STAGE,),
    entry_addresses=(),
    max_positions=10,
    sampling=Sampling(temperature=0.7, seed=2**64 - 1),
    digest_key=DIGEST,
)
RECORD = StageRecord(
    addresses=(),
    model_id="m",
    manifest_root=DIGEST,
    recipe="f32",
    layers=(0, 30),
    total_layers=30,
    lease=b"x",
    max_positions=MAX_POSITIONS,
)


@pytest.mark.parametrize(
    "message",
    [
        REGISTER,
        REGISTER.model_copy(update={"layers": None}),
        OPEN,
        RECORD,
        RequestBody(body=REGISTER),
        AnswerBody(to=1, body=Stages(records=(b"a", b"b"), health="incomplete", missing=((0, 3),))),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_decodes_as_it_was(message: Message) -> None:
    assert decode_message(type(message), encode_message(message)) == message


@given(st.sampled_from(KINDS), VALUES.map(cbor.encode) | st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_a_message_or_a_typed_error(kind: type[Message], data: bytes) -> None:
    try:
        message = decode_message(kind, data)
    except MalformedMessage:
        return
    assert decode_message(kind, encode_message(message)) == message


@given(st.sampled_from([REGISTER, OPEN, RECORD]), st.data())
@settings(max_examples=150, deadline=None)
def test_a_message_with_one_other_field_is_a_message_or_a_typed_error(message: Message, data: st.DataObject) -> None:
    fields = message.model_dump(exclude_none=True)
    fields[data.draw(st.sampled_from(FIELD_NAMES))] = data.draw(VALUES)
    raw = cbor.encode(fields)
    try:
        again = decode_message(type(message), raw)
    except MalformedMessage:
        return
    assert decode_message(type(message), encode_message(again)) == again


OUT_OF_BOUNDS: list[tuple[Message, dict[str, object]]] = [
    (RECORD, {"layers": [5, 5]}),
    (RECORD, {"layers": [-1, 5]}),
    (RECORD, {"layers": [0, MAX_MODEL_LAYERS + 1]}),
    (RECORD, {"layers": [0, 2**63]}),
    (RECORD, {"layers": [0, 1, 2]}),
    (RECORD, {"layers": [0.0, 5]}),
    (RECORD, {"layers": [False, 5]}),
    (RECORD, {"total_layers": 0}),
    (RECORD, {"total_layers": MAX_MODEL_LAYERS + 1}),
    (RECORD, {"manifest_root": bytes(31)}),
    (RECORD, {"manifest_root": "0" * 32}),
    (RECORD, {"model_id": ""}),
    (RECORD, {"model_id": "a b"}),
    (RECORD, {"model_id": "a\n"}),
    (RECORD, {"model_id": "x" * 129}),
    (RECORD, {"addresses": ["a"] * (MAX_ADDRESSES + 1)}),
    (RECORD, {"addresses": ["a" * 257]}),
    (RECORD, {"addresses": "a"}),
    (RECORD, {"lease": b""}),
    (RECORD, {"lease": bytes(65_537)}),
    (RECORD, {"queue_depth": -1}),
    (RECORD, {"queue_depth": 2**53}),
    (RECORD, {"queue_depth": True}),
    (RECORD, {"state": "loading"}),
    (RECORD, {"max_positions": MAX_POSITIONS + 1}),
    (RECORD, {"unknown": 1}),
    (OPEN, {"route": []}),
    (OPEN, {"route": [STAGE.model_dump()] * (MAX_STAGES + 1)}),
    (OPEN, {"route": [STAGE.model_dump() | {"peer_id": PEER + " "}]}),
    (OPEN, {"session": bytes(15)}),
    (OPEN, {"epoch": -1}),
    (OPEN, {"sampling": {"temperature": float("nan")}}),
    (OPEN, {"sampling": {"temperature": float("inf")}}),
    (OPEN, {"sampling": {"temperature": -0.5}}),
    (OPEN, {"sampling": {"seed": -1}}),
    (OPEN, {"request_id": "a/b"}),
    (OPEN, {"output": "logits"}),
    (REGISTER, {"claim_mb": 0}),
    (REGISTER, {"kind": "ready"}),
]


@pytest.mark.parametrize(("message", "change"), OUT_OF_BOUNDS, ids=lambda part: str(part)[:40])
def test_a_value_out_of_bounds_is_refused(message: Message, change: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage, match=type(message).__name__):
        decode_message(type(message), cbor.encode(message.model_dump(exclude_none=True) | change))


@pytest.mark.parametrize("field", sorted(Lease.model_fields))
def test_no_field_of_a_lease_may_be_missing(field: str) -> None:
    lease = Lease(serial=1, peer_id=PEER, model_id="m", manifest_root=DIGEST, recipe="f32", layers=(0, 1))
    fields = lease.model_dump()
    del fields[field]
    with pytest.raises(MalformedMessage, match=field):
        decode_message(Lease, cbor.encode(fields))


def test_an_answer_is_no_request() -> None:
    with pytest.raises(MalformedMessage):
        decode_message(RequestBody, cbor.encode({"body": {"kind": "acknowledged"}}))
