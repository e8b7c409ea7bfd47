"""Driving engines by hand: sessions of tokens through a chain of stages, in any schedule of turns."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tessella_p2p.base.errors import TessellaError
from tessella_p2p.base.ids import SessionId
from tessella_p2p.stages.engine import (
    Sampled,
    SessionKey,
    StageEngine,
    StepAnswer,
    StepInput,
    StepOutput,
    TokenSampler,
)
from tessella_p2p.stages.sampler import Sampler
from tessella_p2p.wire.frames import DType
from tessella_p2p.wire.messages import Sampling

Turn = Sequence[tuple[int, int]]
"""(session, rows) of one forward."""

GREEDY = Sampler(Sampling())


def key_of(session: int, epoch: int = 0) -> SessionKey:
    return SessionKey(SessionId(session.to_bytes(16, "big")), epoch)


def ids_body(token_ids: Iterable[int]) -> bytes:
    return np.array(list(token_ids), "<u4").tobytes()


def first_step(
    session: int, token_ids: Sequence[int], *, position: int = 0, sample: TokenSampler | None = None
) -> StepInput:
    return StepInput(key_of(session), position, len(token_ids), DType.U32, ids_body(token_ids), sample)


@dataclass(frozen=True, slots=True)
class Played:
    """What a schedule brought out of a chain, per session: rows of hidden states in order, and tokens by position."""

    rows: Mapping[int, bytes]
    tokens: Mapping[tuple[int, int], int]


def through(engines: Sequence[StageEngine], steps: Sequence[StepInput]) -> list[StepAnswer]:
    """One turn through all stages; what crosses a boundary is bytes."""
    answers: list[StepAnswer] = []
    for index, engine in enumerate(engines):
        answers = engine.forward(steps)
        assert not any(isinstance(answer, TessellaError) for answer in answers), answers
        if index + 1 < len(engines):
            steps = [_onward(step, answer) for step, answer in zip(steps, answers, strict=True)]
    return answers


def _onward(step: StepInput, answer: StepAnswer) -> StepInput:
    assert isinstance(answer, StepOutput)
    return StepInput(step.session, step.position, step.rows, answer.dtype, bytes(answer.body), step.sample, step.normed)


def play(
    engines: Sequence[StageEngine],
    prompts: Mapping[int, Sequence[int]],
    turns: Iterable[Turn],
    sample: TokenSampler = GREEDY,
) -> Played:
    """Run ``prompts`` in ``turns``; where the chain ends in logits, a token is drawn after every step."""
    positions = dict.fromkeys(prompts, 0)
    rows: dict[int, list[bytes]] = {session: [] for session in prompts}
    tokens: dict[tuple[int, int], int] = {}
    for session in prompts:
        for engine in engines:
            engine.open_session(key_of(session), len(prompts[session]))
    for turn in turns:
        steps = []
        for session, count in turn:
            start = positions[session]
            steps.append(first_step(session, prompts[session][start : start + count], position=start, sample=sample))
            positions[session] += count
        for (session, _), answer in zip(turn, through(engines, steps), strict=True):
            if isinstance(answer, StepOutput):
                rows[session].append(bytes(answer.body))
            elif isinstance(answer, Sampled):
                tokens[session, positions[session]] = answer.token_id
    for session in prompts:
        for engine in engines:
            engine.close_session(key_of(session))
    assert positions == {session: len(prompt) for session, prompt in prompts.items()}
    return Played({session: b"".join(parts) for session, parts in rows.items()}, tokens)


def alone(prompts: Mapping[int, Sequence[int]], chunk: int) -> Iterator[Turn]:
    """One session after the other, in chunks."""
    for session, prompt in prompts.items():
        for start in range(0, len(prompt), chunk):
            yield [(session, min(chunk, len(prompt) - start))]


def ragged(prompts: Mapping[int, Sequence[int]], chunk: int) -> Iterator[Turn]:
    """All sessions at once, each in chunks, until each is through."""
    left = {session: len(prompt) for session, prompt in prompts.items()}
    while turn := [(session, min(chunk, count)) for session, count in left.items() if count]:
        for session, count in turn:
            left[session] -= count
        yield turn


def mixed(prompts: Mapping[int, Sequence[int]], seed: int) -> Iterator[Turn]:
    """Any sessions in any order, single rows among chunks of any size."""
    rng = random.Random(seed)
    left = {session: len(prompt) for session, prompt in prompts.items()}
    while active := [session for session, count in left.items() if count]:
        rng.shuffle(active)
        turn = []
        for session in active[: rng.randint(1, len(active))]:
            count = min(rng.choice([1, 1, 1, 2, 3, 5, 8, 13, 32, 47, 128]), left[session])
            left[session] -= count
            turn.append((session, count))
        yield turn


def random_prompts(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> dict[int, list[int]]:
    """One session per length."""
    rng = random.Random(seed)
    return {session: [rng.randrange(vocabulary) for _ in range(length)] for session, length in enumerate(lengths)}
