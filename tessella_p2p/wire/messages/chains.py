"""What opens a chain of stages, and what ends it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tessella_p2p.base.limits import (
    MAX_GRAMMAR_CHARS,
    MAX_HISTORY_IDS,
    MAX_LOGIT_BIASES,
    MAX_OPEN_BYTES,
    MAX_PLACE_WAIT_MS,
    MAX_REFUSAL_CHARS,
    MAX_STAGES,
    MAX_TOP_LOGPROBS,
    MAX_VOCABULARY,
)
from tessella_p2p.wire.envelope import Message
from tessella_p2p.wire.messages.types import (
    Addresses,
    Digest,
    Epoch,
    Layers,
    Name,
    Peer,
    Positions,
    RequestName,
    Sealed,
    SealedRoute,
    Session,
)


class RouteStage(Message):
    """One stage of a route."""

    peer_id: Peer
    layers: Layers
    addresses: Addresses


def _has_each_id_once(biases: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    if len({token for token, _ in biases}) != len(biases):
        raise ValueError("a token has two biases")
    return biases


def _holds_whole_ids(value: bytes) -> bytes:
    if len(value) % 4:
        raise ValueError(f"{len(value)} bytes are no u32 ids")
    return value


Probability = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
LogitBias = Annotated[
    tuple[
        tuple[
            Annotated[int, Field(ge=0, lt=MAX_VOCABULARY)],
            Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)],
        ],
        ...,
    ],
    Field(max_length=MAX_LOGIT_BIASES),
    AfterValidator(_has_each_id_once),
]


def _is_short_in_bytes(text: str) -> str:
    if len(text.encode()) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"a grammar of over {MAX_GRAMMAR_CHARS} bytes")
    return text


class Grammar(Message):
    """What an answer has to be a sentence of, in the words of llguidance: a JSON schema, or a grammar in its dialect of Lark.

    The text is the requester's: whoever compiles it bounds the work, see `model.grammar`.
    """

    kind: Literal["json_schema", "lark"]
    text: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS), AfterValidator(_is_short_in_bytes)]


class Sampling(Message):
    """How the tail draws; `stages.sampler` says in which order. The defaults are greedy, and change no logit.

    A draw depends on the logits, these, the history and (seed, position) alone. ``num_top`` is how many alternatives come with a
    token, where the output is ``logprobs``.
    """

    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] = 0.0
    top_k: Annotated[int, Field(ge=0, le=MAX_VOCABULARY)] = 0
    top_p: Probability = 1.0
    min_p: Probability = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10.0, allow_inf_nan=False)] = 1.0
    logit_bias: LogitBias = ()
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    num_top: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    grammar: Grammar | None = None

    @property
    def counts_answer(self) -> bool:
        """Whether a draw depends on the tokens of the answer before it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.grammar) or self.counts_prompt

    @property
    def counts_prompt(self) -> bool:
        """Whether a draw depends on the tokens of the prompt."""
        return self.repetition_penalty != 1.0


class RouteStatement(Message):
    """Who serves which layers of (session, epoch). Domain `ROUTE`, audience anyone, signer the requester.

    What a chain-open says of its route, without its secrets: a stage's proof carries it to the orchestrator, so that the requester and
    not the stage says whose receipt counts.
    """

    request_id: RequestName
    session: Session
    epoch: Epoch
    stages: Annotated[tuple[tuple[Peer, Layers], ...], Field(min_length=1, max_length=MAX_STAGES)]

    @model_validator(mode="after")
    def _is_a_chain(self) -> Self:
        end = 0
        for _, layers in self.stages:
            if layers[0] != end:
                raise ValueError(f"a gap or an overlap at layer {end}")
            end = layers[1]
        if len({peer for peer, _ in self.stages}) != len(self.stages):
            raise ValueError("a peer is in it twice")
        return self


class ChainOpen(Message):
    """The entry opens (session, epoch) on a route. Domain `CHAIN_OPEN`, audience anyone; it travels head → tail as it is.

    ``digest_key`` keys every digest of the session: stages and auditors have it, the orchestrator never does. ``cache_scope`` names
    whose cached prefixes the stages may use; empty for none.

    ``wait_ms`` is how long it may wait for a place at a stage that is full; 0 has it refused at once: the entry may know another one.

    ``history`` is what the tail's penalties have to know, as little-endian u32 ids: where they count the prompt, its distinct ids;
    then, where they count the answer, its first ``history_answer`` tokens in order, which an earlier epoch brought. Else it is empty.

    ``route_statement`` says the route once more, for the proofs of its stages: it is there where a ``ticket`` is.
    """

    session: Session
    epoch: Epoch
    request_id: RequestName
    model_id: Name
    manifest_root: Digest
    recipe: Name
    route: Annotated[tuple[RouteStage, ...], Field(min_length=1, max_length=MAX_STAGES)]
    entry_addresses: Addresses
    max_positions: Positions
    output: Literal["tokens", "logprobs", "embedding"] = "tokens"
    sampling: Sampling
    history: Annotated[bytes, Field(max_length=4 * MAX_HISTORY_IDS), AfterValidator(_holds_whole_ids)] = b""
    history_answer: Annotated[int, Field(ge=0, le=MAX_HISTORY_IDS)] = 0
    cache_scope: Annotated[bytes, Field(max_length=32)] = b""
    digest_key: Digest
    ticket: Sealed | None = None
    route_statement: SealedRoute | None = None
    wait_ms: Annotated[int, Field(ge=0, le=MAX_PLACE_WAIT_MS)] = 0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.ticket is None) != (self.route_statement is None):
            raise ValueError("a ticket and a route statement come together")
        if 4 * self.history_answer > len(self.history):
            raise ValueError("an answer that is longer than the history")
        if self.sampling.num_top and self.output != "logprobs":
            raise ValueError("alternatives without logprobs")
        if self.output == "embedding" and self.sampling != Sampling():
            raise ValueError("an embedding draws no token")
        return self


class CapabilityGrant(Message):
    """The single-use right to send a session's tokens. Domain `CAPABILITY`, audience the tail.

    ``open_hash`` is the SHA-256 of the chain-open envelope it belongs to.
    """

    session: Session
    epoch: Epoch
    open_hash: Digest
    tail: Peer


class OpenFrame(Message):
    """Payload of an OPEN frame: the chain-open envelope, and the capability envelope for its tail."""

    open: Annotated[bytes, Field(min_length=1, max_length=MAX_OPEN_BYTES)]
    capability: Sealed


class ErrorBody(Message):
    """Payload of an ERROR frame: a code of ``base.errors``, who met it, and which peer that one holds at fault."""

    code: Name
    reason: Annotated[str, Field(max_length=MAX_REFUSAL_CHARS)]
    met_by: Peer
    fault_of: Peer
