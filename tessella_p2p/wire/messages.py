"""Every payload that travels in an envelope. ``docs/protocols/`` has a page per protocol.

Times are Unix milliseconds; layer ranges are half-open ``(start, end)``; digests are 32 bytes of BLAKE2b under the session's digest
key; amounts are integer micro-credits.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tessella_p2p.base.errors import MalformedMessage
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import (
    KIB,
    MAX_ADDRESS_CHARS,
    MAX_ADDRESSES,
    MAX_DIGEST_MARKS,
    MAX_EPOCHS,
    MAX_HISTORY_IDS,
    MAX_LISTED_STAGES,
    MAX_LOGIT_BIASES,
    MAX_MODEL_LAYERS,
    MAX_OPEN_BYTES,
    MAX_POSITIONS,
    MAX_PROOFS_PER_BATCH,
    MAX_STAGES,
    MAX_TOP_LOGPROBS,
    MAX_VOCABULARY,
)
from tessella_p2p.wire.envelope import Message
from tessella_p2p.wire.keys import public_key_of

# Domains: what a signature is for.
LEASE = "lease"
STAGE_RECORD = "stage-record"
REQUEST = "orchestrator-request"
ANSWER = "orchestrator-answer"
TICKET = "ticket"
CHAIN_OPEN = "chain-open"
CAPABILITY = "capability"
RECEIPT = "receipt"
PROOF = "proof"


def _is_peer_id(value: str) -> str:
    try:
        public_key_of(PeerId(value))
    except MalformedMessage as error:
        raise ValueError(str(error)) from error
    return value


def _is_range(value: tuple[int, int]) -> tuple[int, int]:
    if LayerRange(*value).end > MAX_MODEL_LAYERS:
        raise ValueError(f"a range beyond layer {MAX_MODEL_LAYERS}")
    return value


Peer = Annotated[str, AfterValidator(_is_peer_id)]
Layers = Annotated[tuple[int, int], AfterValidator(_is_range)]
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
Session = Annotated[bytes, Field(min_length=16, max_length=16)]
Sealed = Annotated[bytes, Field(min_length=1, max_length=64 * KIB)]
"""An envelope inside a message."""
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:/@+-]+$")]
RequestName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")]
Addresses = Annotated[tuple[Annotated[str, Field(max_length=MAX_ADDRESS_CHARS)], ...], Field(max_length=MAX_ADDRESSES)]
TimeMs = Annotated[int, Field(ge=0, lt=2**53)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Positions = Annotated[int, Field(ge=0, le=MAX_POSITIONS)]
Epoch = Annotated[int, Field(ge=0, lt=MAX_EPOCHS)]
Tier = Literal["VIP", "Standard", "Leech"]


class Lease(Message):
    """The orchestrator's signed certificate of an assignment. Domain `LEASE`, audience anyone."""

    serial: Count
    peer_id: Peer
    model_id: Name
    manifest_root: Digest
    recipe: Name
    layers: Layers


StageState = Literal["ready", "draining", "saturated"]
"""``draining``: sessions end, none begins. ``saturated``: the engine failed too often; none begins for a while."""


class StageRecord(Message):
    """A peer's statement of a stage it serves. Domain `STAGE_RECORD`, audience anyone; the signer is the peer."""

    addresses: Addresses
    model_id: Name
    manifest_root: Digest
    recipe: Name
    layers: Layers
    total_layers: Annotated[int, Field(ge=1, le=MAX_MODEL_LAYERS)]
    lease: Sealed
    queue_depth: Count = 0
    state: StageState = "ready"
    max_positions: Positions


# ---- Orchestrator ----


class Register(Message):
    """A worker asks for a range. The signer is the worker."""

    kind: Literal["register"] = "register"
    addresses: Addresses
    api_url: Annotated[str, Field(max_length=MAX_ADDRESS_CHARS)] | None = None
    claim_mb: Annotated[int, Field(ge=1, le=1 << 24)]
    device: Name
    model_id: Name
    total_layers: Annotated[int, Field(ge=1, le=MAX_MODEL_LAYERS)]
    manifest_root: Digest
    contract_hash: Digest
    recipe: Name
    layers: Layers | None = None


class Ready(Message):
    """The range of lease ``serial`` is loaded and serves."""

    kind: Literal["ready"] = "ready"
    serial: Count
    record: Sealed


class Announce(Message):
    """Heartbeat: liveness, queue depth and, while serving, the newest stage record."""

    kind: Literal["announce"] = "announce"
    serial: Count
    queue_depth: Count
    state: Literal["loading", "ready", "draining", "saturated"]
    record: Sealed | None = None


class Deregister(Message):
    """A worker leaves."""

    kind: Literal["deregister"] = "deregister"


class SessionGrant(Message):
    """An entry asks to start a request; the signer is the requester."""

    kind: Literal["session_grant"] = "session_grant"
    request_id: RequestName
    model_id: Name
    manifest_root: Digest
    recipe: Name
    max_positions: Positions


class WorkDone(Message):
    """Proofs to settle; each is an envelope of domain `PROOF`."""

    kind: Literal["work_done"] = "work_done"
    proofs: Annotated[tuple[Sealed, ...], Field(min_length=1, max_length=MAX_PROOFS_PER_BATCH)]


class ListStages(Message):
    """Which stages of a model are there; anyone may ask."""

    kind: Literal["list_stages"] = "list_stages"
    manifest_root: Digest | None = None


class ReadCredits(Message):
    """The signer's own balance."""

    kind: Literal["read_credits"] = "read_credits"


class ReportFailure(Message):
    """A peer failed the signer: a counter, not a verdict."""

    kind: Literal["report_failure"] = "report_failure"
    peer_id: Peer
    code: Name


class Assigned(Message):
    """Answer to `Register` and, with a renewed lease, to `Announce`: what to serve, and the peers to dial."""

    kind: Literal["assigned"] = "assigned"
    model_id: Name
    layers: Layers
    lease: Sealed
    records: Annotated[tuple[Sealed, ...], Field(max_length=MAX_LISTED_STAGES)] = ()


class Acknowledged(Message):
    """Done; nothing to tell."""

    kind: Literal["acknowledged"] = "acknowledged"


class Granted(Message):
    """Answer to `SessionGrant`: the tier and the ticket, in one round trip."""

    kind: Literal["granted"] = "granted"
    tier: Tier
    ticket: Sealed


class Settled(Message):
    """What became of one proof. ``status``: settled, duplicate (the same proof again: the same answer), held, refused."""

    status: Literal["settled", "duplicate", "held", "refused"]
    micro_credits: Count = 0
    code: Name | None = None
    reason: Annotated[str, Field(max_length=512)] | None = None


class WorkSettled(Message):
    """Answer to `WorkDone`, in the order of its proofs."""

    kind: Literal["work_settled"] = "work_settled"
    results: Annotated[tuple[Settled, ...], Field(max_length=MAX_PROOFS_PER_BATCH)]


class Stages(Message):
    """Answer to `ListStages`: stage records, as their peers signed them, and what is missing."""

    kind: Literal["stages"] = "stages"
    records: Annotated[tuple[Sealed, ...], Field(max_length=MAX_LISTED_STAGES)]
    health: Literal["healthy", "degraded", "incomplete"]
    missing: Annotated[tuple[Layers, ...], Field(max_length=MAX_MODEL_LAYERS)] = ()


class Credits(Message):
    """Answer to `ReadCredits`."""

    kind: Literal["credits"] = "credits"
    micro_credits: Annotated[int, Field(ge=-(2**53), lt=2**53)]
    tier: Tier
    settled_proofs: Count


class Refused(Message):
    """Any request may be refused; ``code`` is the error's code in ``base.errors``."""

    kind: Literal["refused"] = "refused"
    code: Name
    reason: Annotated[str, Field(max_length=1024)]


OrchestratorRequest = (
    Register | Ready | Announce | Deregister | SessionGrant | WorkDone | ListStages | ReadCredits | ReportFailure
)
OrchestratorAnswer = Assigned | Acknowledged | Granted | WorkSettled | Stages | Credits | Refused


class RequestBody(Message):
    """The payload of a request envelope (domain `REQUEST`, audience the orchestrator)."""

    body: Annotated[OrchestratorRequest, Field(discriminator="kind")]


class AnswerBody(Message):
    """The payload of an answer envelope (domain `ANSWER`, audience the asker); ``to`` is the request's sequence."""

    to: Count
    body: Annotated[OrchestratorAnswer, Field(discriminator="kind")]


# ---- Tickets, chains, proofs ----


class Ticket(Message):
    """The orchestrator's authority to be paid for one request. Domain `TICKET`, audience anyone (stages read it)."""

    request_id: RequestName
    requester: Peer
    manifest_root: Digest
    recipe: Name
    tier: Tier
    max_positions: Positions
    open_before: TimeMs
    settle_before: TimeMs


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

    @property
    def counts_answer(self) -> bool:
        """Whether a draw depends on the tokens of the answer before it."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.counts_prompt

    @property
    def counts_prompt(self) -> bool:
        """Whether a draw depends on the tokens of the prompt."""
        return self.repetition_penalty != 1.0


class ChainOpen(Message):
    """The entry opens (session, epoch) on a route. Domain `CHAIN_OPEN`, audience anyone; it travels head → tail as it is.

    ``digest_key`` keys every digest of the session: stages and auditors have it, the orchestrator never does. ``cache_scope`` names
    whose cached prefixes the stages may use; empty for none.

    ``history`` is what the tail's penalties have to know, as little-endian u32 ids: where they count the prompt, its distinct ids;
    then, where they count the answer, its first ``history_answer`` tokens in order, which an earlier epoch brought. Else it is empty.
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
    output: Literal["tokens", "logprobs"] = "tokens"
    sampling: Sampling
    history: Annotated[bytes, Field(max_length=4 * MAX_HISTORY_IDS), AfterValidator(_holds_whole_ids)] = b""
    history_answer: Annotated[int, Field(ge=0, le=MAX_HISTORY_IDS)] = 0
    cache_scope: Annotated[bytes, Field(max_length=32)] = b""
    digest_key: Digest
    ticket: Sealed | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if 4 * self.history_answer > len(self.history):
            raise ValueError("an answer that is longer than the history")
        if self.sampling.num_top and self.output != "logprobs":
            raise ValueError("alternatives without logprobs")
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


class ReceiptBody(Message):
    """What a receiver got from a stage. Domain `RECEIPT`, audience the sender; the signer is the receiver.

    ``digest`` runs over the rows of positions ``[0, positions)`` (or, from a tail, over its token ids as u32).
    """

    request_id: RequestName
    session: Session
    epoch: Epoch
    sender: Peer
    positions: Positions
    digest: Digest


class DigestMark(Message):
    """Running digests of a stage's input and output after ``positions`` positions."""

    positions: Positions
    input: Digest
    output: Digest


class Proof(Message):
    """A stage's statement of its work for one (session, epoch). Domain `PROOF`, audience the orchestrator that minted the ticket."""

    request_id: RequestName
    ticket: Sealed
    lease: Sealed
    session: Session
    epoch: Epoch
    opened_at: TimeMs
    manifest_root: Digest
    recipe: Name
    layers: Layers
    positions: Positions
    input_digest: Digest
    output_digest: Digest
    marks: Annotated[tuple[DigestMark, ...], Field(max_length=MAX_DIGEST_MARKS)] = ()
    upstream: Peer
    downstream: Peer
    receipt: Sealed | None = None
    compute_us: Count


class ErrorBody(Message):
    """Payload of an ERROR frame: a code of ``base.errors``, who met it, and which peer that one holds at fault."""

    code: Name
    reason: Annotated[str, Field(max_length=1024)]
    met_by: Peer
    fault_of: Peer
