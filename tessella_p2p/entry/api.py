"""What the bridge asks of the entry role: the types that cross between them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.wire.messages import Grammar, Tier

if TYPE_CHECKING:
    from tessella_p2p.entry.requests import RequestBook


@dataclass(frozen=True, slots=True)
class Caller:
    """For whom a request is made; the default is the node's own user.

    Attributes:
        name: keeps apart whose cached prefixes a request may use, and whose requests are shown to whom: the id of an API key, never
            the key. Everybody without a key is one caller.
        delegation: a sealed `wire.messages.Delegation`: the identity whose balance decides the tier; None for the entry's own.
        tier: the most that the caller may have; None for whatever the balance gives.
        trace_id: the trace that the request is a part of (W3C trace context), for logs and records; None where it tells none.
    """

    name: str = ""
    delegation: bytes | None = None
    tier: Tier | None = None
    trace_id: str | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """What is missing between two texts: ``prefix`` and ``suffix`` of what a fill-in-the-middle is asked for."""

    prefix: str
    suffix: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. Exactly one of ``messages``, ``prompt``, ``prompt_ids`` and ``gap`` is given.

    ``messages`` go through the model's chat template, with ``tools`` (OpenAI's tool objects) where some are given; ``prompt`` is
    tokenised as it stands; ``prompt_ids`` is taken as it is; ``gap`` is framed by the model's fill-in-the-middle tokens.
    """

    model: str
    messages: Sequence[Mapping[str, object]] | None = None
    tools: Sequence[Mapping[str, object]] = ()
    prompt: str | None = None
    prompt_ids: Sequence[int] | None = None
    gap: Gap | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Sequence[tuple[int, float]] = ()
    """(token id, what is added to its logit), each id once."""
    seed: int | None = None
    """None: the entry draws one."""
    logprobs: bool = False
    """Whether each token comes with its logprob, and those of the ``top_logprobs`` likeliest ones."""
    top_logprobs: int = 0
    stop: Sequence[str] = ()
    grammar: Grammar | None = None
    """What the answer has to be a sentence of; None for any text."""
    caller: Caller = Caller()


@dataclass(frozen=True, slots=True)
class HopReport:
    """One stage of the route as a client sees it; ``hop_ms`` is the median over the steps: transfer, wait and compute.

    ``cached`` counts the positions that the stage says its prefix cache served, of those that were known when the route began: the
    prompt, and behind a reroute the answer so far. None before the first token.
    """

    peer_id: PeerId
    layers: LayerRange
    hop_ms: float
    compute_ms: float
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, the bytes that it stands for (none for a control token), and its logprob: the model's own, see `stages.sampler`."""

    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenScores:
    """A token of the answer, and the likeliest ones at its place, likeliest first; it may be one of them."""

    chosen: ScoredToken
    top: tuple[ScoredToken, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that is certain to belong to the answer, and the tokens that were sampled since the last delta.

    ``scores`` has one entry per token where the request asked for logprobs, else none.
    """

    text: str
    token_ids: tuple[int, ...]
    scores: tuple[TokenScores, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a generation. ``token_ids`` are all sampled tokens without the end token."""

    reason: Literal["stop", "length"]
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    route: tuple[HopReport, ...]
    ttft_ms: float
    tokens_per_s: float
    tier: str
    paid: bool
    request_id: str
    hop_added_ms_p50: float | None = None
    """Median over the decode steps of (step − sum of the stages' compute) / transfers; None without a step or a transfer."""


GenerationEvent = Delta | Finished


@dataclass(frozen=True, slots=True)
class Prepared:
    """An admitted request: validated, tokenised, with a route, before the first step."""

    request_id: str
    model: str
    prompt_ids: tuple[int, ...]
    max_tokens: int


class Generation(Protocol):
    """A generation that has started."""

    @property
    def prepared(self) -> Prepared:
        """What was admitted."""
        ...

    def route(self) -> tuple[HopReport, ...]:
        """The stages that work on it now, with what the last steps took them: zeros before the first token."""
        ...

    def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """`Delta` after `Delta`, then one `Finished`; iterate it under `aclosing`. Raises a `TessellaError` when no stage can go on."""
        ...


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """Vectors of some inputs, each a text as it stands or token ids.

    ``admitted`` is told the tokens of each input as its session opens, whatever becomes of it then.
    """

    model: str
    inputs: Sequence[str | Sequence[int]]
    caller: Caller = Caller()
    admitted: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class Embedded:
    """One input's vector, ``[hidden_size]``: the mean over its positions of the hidden states behind the last norm, made 1 long."""

    vector: tuple[float, ...]
    num_tokens: int
    request_id: str
    route: tuple[HopReport, ...]


@dataclass(frozen=True, slots=True)
class ModelFeatures:
    """What a model can be asked for, beyond text: known from its artifact alone.

    Attributes:
        fill_in_the_middle: its vocabulary has the tokens for it.
        tools: its chat template shows tools to the model, and its calls can be read back.
        context_length: positions, prompt and answer.
        embedding_length: numbers of one vector: the hidden size.
    """

    fill_in_the_middle: bool
    tools: bool
    context_length: int
    embedding_length: int = 0


class Entry(Protocol):
    """The entry role, as the bridge sees it."""

    @property
    def requests(self) -> RequestBook:
        """The requests in flight and the last ones, without what was asked or answered."""
        ...

    def known_models(self) -> tuple[str, ...]:
        """Models that this node speaks for, whether or not it can answer for them now."""
        ...

    def model_ids(self) -> tuple[str, ...]:
        """Models that a complete route of ready stages serves right now, and has been proven to lately."""
        ...

    async def check_ready(self) -> None:
        """Prove a route now, unless one was proven lately, or failed a moment ago.

        Raises:
            NoRoute: there is none, or it does not answer: names the missing layers.
        """
        ...

    def features(self, model: str) -> ModelFeatures:
        """What the model can be asked for. Raises `UnknownModel`."""
        ...

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text that tokens stand for, U+FFFD where they are no whole character; control tokens have none."""
        ...

    async def embed(self, request: EmbedRequest) -> tuple[Embedded, ...]:
        """The vector of each input, in their order. Cancelled, its sessions are closed.

        Raises:
            InvalidRequest, UnknownModel, PromptTooLong, NoRoute, Overloaded: as `generate`.
        """
        ...

    def generate(self, request: GenerateRequest) -> AbstractAsyncContextManager[Generation]:
        """Admit a request and open its session.

        Leaving the context, or cancelling inside it, closes the session: every stage frees its KV within a step.

        Raises:
            InvalidRequest, UnknownModel, PromptTooLong, HopBodyTooLarge, NoRoute, Overloaded: before any peer works for the request.
            TooManyHopBodies: its stages stayed full.
        """
        ...
