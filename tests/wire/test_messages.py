"""Messages: every field has its bounds, and any bytes give a message or `MalformedMessage`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import MalformedMessage
from tessella_p2p.base.limits import (
    KIB,
    MAX_ADDRESS_CHARS,
    MAX_ADDRESSES,
    MAX_GRAMMAR_CHARS,
    MAX_HISTORY_IDS,
    MAX_LOGIT_BIASES,
    MAX_MODEL_LAYERS,
    MAX_OPEN_ADDRESS_BYTES,
    MAX_OPEN_BYTES,
    MAX_POSITIONS,
    MAX_STAGES,
    MAX_TOP_LOGPROBS,
    MAX_VOCABULARY,
)
from tessella_p2p.wire import cbor, messages
from tessella_p2p.wire.envelope import Message, decode_message, encode_message, seal
from tessella_p2p.wire.frames import MAX_CONTROL_BYTES
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.messages import (
    AnswerBody,
    ChainOpen,
    Grammar,
    Lease,
    OpenFrame,
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
SAMPLED = OPEN.model_copy(
    update={
        "output": "logprobs",
        "sampling": Sampling(
            temperature=0.7,
            top_k=40,
            top_p=0.9,
            min_p=0.05,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            repetition_penalty=1.1,
            logit_bias=tuple((token, -100.0) for token in range(MAX_LOGIT_BIASES)),
            num_top=MAX_TOP_LOGPROBS,
            grammar=Grammar(kind="json_schema", text="é" * (MAX_GRAMMAR_CHARS // 2)),
        ),
        "history": bytes(4 * MAX_HISTORY_IDS),
        "history_answer": MAX_HISTORY_IDS,
        "cache_scope": bytes(32),
    }
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
        SAMPLED,
        RECORD,
        RequestBody(body=REGISTER),
        AnswerBody(to=1, body=Stages(records=(b"a", b"b"), health="incomplete", missing=((0, 3),))),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_decodes_as_it_was(message: Message) -> None:
    raw = encode_message(message)
    assert decode_message(type(message), raw) == message
    assert raw == cbor.encode(message.model_dump(exclude_none=True))


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
    assert encode_message(again) == cbor.encode(again.model_dump(exclude_none=True))


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
    (OPEN, {"sampling": {"temperature": 2.1}}),
    (OPEN, {"sampling": {"temperature": float("nan")}}),
    (OPEN, {"sampling": {"temperature": True}}),
    (OPEN, {"sampling": {"top_k": -1}}),
    (OPEN, {"sampling": {"top_k": MAX_VOCABULARY + 1}}),
    (OPEN, {"sampling": {"top_k": 1.0}}),
    (OPEN, {"sampling": {"top_p": -0.1}}),
    (OPEN, {"sampling": {"top_p": 1.1}}),
    (OPEN, {"sampling": {"top_p": float("nan")}}),
    (OPEN, {"sampling": {"min_p": 1.1}}),
    (OPEN, {"sampling": {"min_p": float("nan")}}),
    (OPEN, {"sampling": {"presence_penalty": 2.1}}),
    (OPEN, {"sampling": {"presence_penalty": float("nan")}}),
    (OPEN, {"sampling": {"frequency_penalty": -2.1}}),
    (OPEN, {"sampling": {"frequency_penalty": float("-inf")}}),
    (OPEN, {"sampling": {"repetition_penalty": 0.0}}),
    (OPEN, {"sampling": {"repetition_penalty": 10.1}}),
    (OPEN, {"sampling": {"repetition_penalty": float("nan")}}),
    (OPEN, {"sampling": {"logit_bias": [[5, 100.5]]}}),
    (OPEN, {"sampling": {"logit_bias": [[5, -100.5]]}}),
    (OPEN, {"sampling": {"logit_bias": [[5, float("nan")]]}}),
    (OPEN, {"sampling": {"logit_bias": [[5]]}}),
    (OPEN, {"sampling": {"logit_bias": [[-1, 1.0]]}}),
    (OPEN, {"sampling": {"logit_bias": [[MAX_VOCABULARY, 1.0]]}}),
    (OPEN, {"sampling": {"logit_bias": [[5, 1.0], [5, 2.0]]}}),
    (OPEN, {"sampling": {"logit_bias": [[token, 1.0] for token in range(MAX_LOGIT_BIASES + 1)]}}),
    (OPEN, {"output": "logprobs", "sampling": {"num_top": MAX_TOP_LOGPROBS + 1}}),
    (OPEN, {"output": "tokens", "sampling": {"num_top": 1}}),
    (OPEN, {"history": bytes(5)}),
    (OPEN, {"history": bytes(4 * MAX_HISTORY_IDS + 4)}),
    (OPEN, {"history": bytes(8), "history_answer": 3}),
    (OPEN, {"history": bytes(8), "history_answer": -1}),
    (OPEN, {"cache_scope": bytes(33)}),
    (OPEN, {"request_id": "a/b"}),
    (OPEN, {"output": "logits"}),
    (REGISTER, {"claim_mb": 0}),
    (REGISTER, {"kind": "ready"}),
]


@pytest.mark.parametrize(("message", "change"), OUT_OF_BOUNDS, ids=lambda part: str(part)[:40])
def test_a_value_out_of_bounds_is_refused(message: Message, change: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage, match=type(message).__name__):
        decode_message(type(message), cbor.encode(message.model_dump(exclude_none=True) | change))


def test_the_longest_chain_open_of_an_honest_entry_fits_into_its_frame() -> None:
    per_stage = MAX_OPEN_ADDRESS_BYTES // (MAX_STAGES + 1) // (MAX_ADDRESS_CHARS + 3)
    addresses = ("a" * MAX_ADDRESS_CHARS,) * per_stage
    longest = SAMPLED.model_copy(
        update={
            "request_id": "r" * 64,
            "model_id": "m" * 128,
            "recipe": "f" * 128,
            "route": (STAGE.model_copy(update={"addresses": addresses}),) * MAX_STAGES,
            "entry_addresses": addresses,
            "ticket": bytes(2 * KIB),
        }
    )
    sealed = seal(NodeKey(bytes(32)), "chain-open", longest, sequence=2**60, now_ms=2**50)
    assert len(sealed) <= MAX_OPEN_BYTES
    assert len(encode_message(OpenFrame(open=bytes(MAX_OPEN_BYTES), capability=bytes(KIB)))) <= MAX_CONTROL_BYTES


@pytest.mark.parametrize("field", sorted(name for name, field in Lease.model_fields.items() if field.is_required()))
def test_no_field_of_a_lease_may_be_missing(field: str) -> None:
    lease = Lease(serial=1, peer_id=PEER, model_id="m", manifest_root=DIGEST, recipe="f32", layers=(0, 1))
    fields = lease.model_dump()
    del fields[field]
    with pytest.raises(MalformedMessage, match=field):
        decode_message(Lease, cbor.encode(fields))


def test_an_answer_is_no_request() -> None:
    with pytest.raises(MalformedMessage):
        decode_message(RequestBody, cbor.encode({"body": {"kind": "acknowledged"}}))
