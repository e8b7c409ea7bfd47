"""What the bridge asks of the entry role: the types that cross between them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from tessella_p2p.base.ids import LayerRange, PeerId


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. Exactly one of ``messages``, ``prompt`` and ``prompt_ids`` is given.

    ``messages`` go through the model's chat template; ``prompt`` is tokenised as it stands; ``prompt_ids`` is taken as it is.
    """

    model: str
    messages: Sequence[Mapping[str, object]] | None = None
    prompt: str | None = None
    prompt_ids: Sequence[int] | None = None
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
    requester: str = ""
    """Whose cached prefixes the request may use: what the client gave as its API key; all that gave none are one requester."""


@dataclass(frozen=True, slots=True)
class HopReport:
    """One stage of the route as a client sees it; ``hop_ms`` is the median over the steps: transfer, wait and compute."""

    peer_id: PeerId
    layers: LayerRange
    hop_ms: float
    compute_ms: float


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

    def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """`Delta` after `Delta`, then one `Finished`; iterate it under `aclosing`. Raises a `TessellaError` when no stage can go on."""
        ...


class Entry(Protocol):
    """The entry role, as the bridge sees it."""

    def model_ids(self) -> tuple[str, ...]:
        """Models that a complete route of ready stages serves right now."""
        ...

    def generate(self, request: GenerateRequest) -> AbstractAsyncContextManager[Generation]:
        """Admit a request and open its session.

        Leaving the context, or cancelling inside it, closes the session: every stage frees its KV within a step.

        Raises:
            InvalidRequest, UnknownModel, PromptTooLong, HopBodyTooLarge, NoRoute, Overloaded: before any peer works for the request.
            TooManyHopBodies: its stages stayed full.
        """
        ...
