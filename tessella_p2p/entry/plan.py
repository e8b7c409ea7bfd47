"""What the epochs of a session share, what the tail is told of it, and what comes out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from tessella_p2p.base.clock import WallClock
from tessella_p2p.base.errors import HopBodyTooLarge, InvalidRequest
from tessella_p2p.base.ids import SessionId
from tessella_p2p.base.limits import (
    CHECKPOINT_S,
    HOP_TIMEOUT_S,
    MAX_HISTORY_IDS,
    MAX_HOP_BYTES,
    MAX_QUEUED_STEPS,
    MIB,
    PREFILL_CHUNK,
)
from tessella_p2p.entry.api import GenerateRequest
from tessella_p2p.net.network import Network
from tessella_p2p.stages.engine import Sampled
from tessella_p2p.stages.history import History
from tessella_p2p.stages.hop_links import HopLinks
from tessella_p2p.stages.pooling import Pooled
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import Sequencer
from tessella_p2p.wire.frames import DType, TraceEntry
from tessella_p2p.wire.keys import NodeKey


@dataclass(frozen=True, slots=True)
class EntryContext:
    """What every session of an entry shares; ``history`` keeps what auditors may ask for, None keeps nothing."""

    network: Network
    key: NodeKey
    clock: WallClock
    sequencer: Sequencer
    links: HopLinks
    random_bytes: Callable[[int], bytes]
    hop_timeout_s: float = HOP_TIMEOUT_S
    checkpoint_s: float = CHECKPOINT_S
    history: History | None = None


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What stays the same over all epochs of a session. ``num_prompt`` is how many of its tokens are the prompt."""

    session: SessionId
    request_id: str
    model_id: str
    manifest_root: bytes
    vocabulary: int
    num_prompt: int
    max_positions: int
    sampling: m.Sampling
    output: Literal["tokens", "logprobs", "embedding"]
    cache_scope: bytes
    digest_key: bytes
    ticket: bytes | None
    ticket_open_before: int = 0
    """Until when it opens chains, in Unix milliseconds; a later epoch is served unpaid."""
    hidden_size: int = 0
    """Elements of the vector that an embedding comes to."""


@dataclass(frozen=True, slots=True)
class Token:
    """What the tail answered a step with, the step's wall time at the entry, and each stage's times."""

    drawn: Sampled | Pooled
    wall_us: int
    trace: tuple[TraceEntry, ...]


def sampling_of(request: GenerateRequest, seed: int, vocabulary: int) -> m.Sampling:
    """What the tail is asked for.

    Raises:
        InvalidRequest: a value out of its bounds, by its name in the request.
    """
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs: only allowed when logprobs is true", "top_logprobs")
    for token_id, _ in request.logit_bias:
        if token_id >= vocabulary:
            raise InvalidRequest(f"logit_bias: token ids are from 0 to {vocabulary - 1}", "logit_bias")
    try:
        return m.Sampling(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=tuple(request.logit_bias),
            seed=seed,
            num_top=request.top_logprobs,
            grammar=request.grammar,
        )
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_context=False, include_input=False)[0]
    name = str(first["loc"][0])
    param = "top_logprobs" if name == "num_top" else name
    raise InvalidRequest(f"{param}: {first['msg']}", param)


def tail_history(sampling: m.Sampling, prompt: Sequence[int], answer: Sequence[int]) -> tuple[bytes, int]:
    """What a draw has to know of the tokens before an epoch: `ChainOpen.history` and ``history_answer``."""
    of_prompt = sorted(set(prompt)) if sampling.counts_prompt else []
    of_answer = list(answer) if sampling.counts_answer else []
    return b"".join(token.to_bytes(4, "little") for token in (*of_prompt, *of_answer)), len(of_answer)


def check_history(sampling: m.Sampling, prompt: Sequence[int], max_tokens: int) -> None:
    """See to it beforehand that the history fits into a chain-open at every point of the answer.

    Raises:
        InvalidRequest: it would not.
    """
    of_prompt = len(set(prompt)) if sampling.counts_prompt else 0
    if sampling.counts_answer and of_prompt + max_tokens > MAX_HISTORY_IDS:
        raise InvalidRequest(
            f"max_tokens: with penalties or a grammar the answer, and with repetition_penalty the distinct tokens of the prompt, "
            f"are at most {MAX_HISTORY_IDS} tokens; {max_tokens} and {of_prompt} are asked for",
            "max_tokens",
        )


def prefill_chunk(num_ids: int) -> int:
    """Positions of one step out of so many known ones: a stage takes few enough steps at once that very many go in larger ones."""
    return max(PREFILL_CHUNK, -(-2 * num_ids // MAX_QUEUED_STEPS))


def check_hop_body(hidden_size: int, max_positions: int) -> None:
    """See to it beforehand that a step's hidden states fit into one hop, also in a new epoch late in the answer.

    Args:
        hidden_size: elements of a row, of at most 4 bytes each.
        max_positions: of the prompt and the answer that is asked for.

    Raises:
        HopBodyTooLarge: they would not.
    """
    body_bytes = min(prefill_chunk(max_positions), max_positions) * hidden_size * DType.F32.size
    if body_bytes > MAX_HOP_BYTES:
        raise HopBodyTooLarge(
            f"{max_positions} positions of this model go through the stages in pieces of {body_bytes / MIB:.0f} MiB; one hop "
            f"carries {MAX_HOP_BYTES // MIB} MiB. Ask for less at once"
        )
