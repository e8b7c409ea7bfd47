"""The toy engine: any split gives the whole's tokens, and every fault of a route changes them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import CacheMiss, InvalidStep, PromptTooLong, StaleEpoch, TooManyHopBodies
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.stages.engine import Sampled, StepAnswer, StepInput, StepOutput, TokenSampler
from tessella_p2p.stages.sampler import Sampler
from tessella_p2p.stages.toy import ToyEngine, ToyModel
from tessella_p2p.wire.frames import DType
from tessella_p2p.wire.messages import Sampling
from tests.stages.stage_runs import GREEDY, alone, first_step, ids_body, key_of, mixed, play, random_prompts, through

MODEL = ToyModel(layers=6)
MODEL_LAYERS = LayerRange(0, 6)


def chain(*cuts: int) -> list[ToyEngine]:
    return [ToyEngine(MODEL, LayerRange(*pair)) for pair in pairwise(cuts)]


@settings(max_examples=40, deadline=None)
@given(cuts=st.sets(st.integers(1, 5)), seed=st.integers(0, 1000))
def test_any_split_and_schedule_gives_the_tokens_of_the_whole(cuts: set[int], seed: int) -> None:
    prompts = random_prompts([1, 5, 12, 30], MODEL.vocabulary, seed)
    sample = Sampler(Sampling(temperature=1.0, seed=seed))
    whole = play(chain(0, 6), prompts, alone(prompts, 1), sample).tokens
    assert len(whole) == 48
    split = play(chain(0, *sorted(cuts), 6), prompts, mixed(prompts, seed), sample).tokens
    assert split.items() <= whole.items()
    assert {position for session, position in split if session == 3} <= set(range(1, 31))


def token_after(token_ids: list[int], sample: TokenSampler = GREEDY) -> int:
    (engine,) = chain(0, 6)
    engine.open_session(key_of(1), 64)
    (answer,) = engine.forward([first_step(1, token_ids, sample=sample)])
    assert isinstance(answer, Sampled)
    return answer.token_id


def test_every_fault_changes_the_tokens() -> None:
    right = token_after([1, 2, 3, 4])
    assert token_after([1, 2, 3, 4]) == right
    assert token_after([2, 1, 3, 4]) != right, "order"
    assert token_after([3, 4]) != right, "lost history"
    assert token_after([9, 2, 3, 4]) != right, "foreign history"
    draws = {token_after([1, 2, 3, 4], Sampler(Sampling(temperature=1.0, seed=seed))) for seed in range(20)}
    assert len(draws) > 10


def test_a_bad_step_is_an_error_for_its_session_only() -> None:
    (engine,) = chain(0, 6)
    for session in (1, 2):
        engine.open_session(key_of(session), 8)
    good = first_step(1, [1, 2], sample=GREEDY)
    answers = engine.forward(
        [
            first_step(2, [MODEL.vocabulary]),
            first_step(3, [1]),
            StepInput(key_of(2), 0, 2, DType.U32, ids_body([1])),
            good,
        ]
    )
    assert isinstance(answers[0], InvalidStep)
    assert isinstance(answers[1], CacheMiss)
    assert isinstance(answers[2], InvalidStep)
    assert answers[3] == Sampled(token_after([1, 2]))
    (late,) = engine.forward([first_step(1, [1], position=7)])
    assert isinstance(late, InvalidStep)
    (long,) = engine.forward([first_step(1, [1] * 7, position=2)])
    assert isinstance(long, PromptTooLong)


def test_a_middle_stage_refuses_tokens_and_a_tail_without_sampling_sends_nothing() -> None:
    head, tail = chain(0, 3, 6)
    for engine in (head, tail):
        engine.open_session(key_of(1), 8)
    (hidden,) = head.forward([first_step(1, [5])])
    assert isinstance(hidden, StepOutput)
    (refused,) = tail.forward([first_step(1, [5])])
    assert isinstance(refused, InvalidStep)
    assert tail.forward([StepInput(key_of(1), 0, 1, hidden.dtype, hidden.body)]) == [None]


def test_sessions_are_bounded_and_epochs_fenced() -> None:
    engine = ToyEngine(MODEL, MODEL_LAYERS, max_sessions=2, max_positions=4)
    engine.open_session(key_of(1, epoch=1), 4)
    with pytest.raises(StaleEpoch):
        engine.open_session(key_of(1, epoch=1), 4)
    with pytest.raises(StaleEpoch):
        engine.open_session(key_of(1, epoch=0), 4)
    with pytest.raises(PromptTooLong):
        engine.open_session(key_of(2), 5)
    engine.open_session(key_of(1, epoch=2), 4)
    with pytest.raises(TooManyHopBodies):
        engine.open_session(key_of(3), 4)
    engine.close_session(key_of(1, epoch=1))
    engine.close_session(key_of(1, epoch=1))
    engine.open_session(key_of(3), 4)


def test_layers_that_the_toy_does_not_have_are_our_own_bug() -> None:
    with pytest.raises(ValueError, match="5–7"):
        ToyEngine(MODEL, LayerRange(5, 7))


PAGE = 64
SCOPE = b"a requester"


@pytest.mark.parametrize("cut", [0, 3, 6])
def test_a_cached_prefix_changes_no_token_and_another_scope_has_none(cut: int) -> None:
    engines = [ToyEngine(MODEL, LayerRange(*pair)) for pair in ((0, cut), (cut, 6)) if pair[0] < pair[1]]
    prompt = [index % 7 for index in range(2 * PAGE + 5)]

    def token(session: int, token_ids: list[int], scope: bytes) -> StepAnswer:
        for engine in engines:
            engine.open_session(key_of(session), 200, scope)
        (answer,) = through(engines, [first_step(session, token_ids, sample=GREEDY)])
        cached.append([engine.cached_positions(key_of(session)) for engine in engines])
        for engine in engines:
            engine.close_session(key_of(session))
        return answer

    cached: list[list[int]] = []
    right, longer = token(1, prompt, b""), token(2, [*prompt, 5], b"")
    assert token(3, prompt, SCOPE) == right
    assert [engine.kv.prefix_positions_hit for engine in engines] == [0] * len(engines)
    assert token(4, prompt, SCOPE) == right
    assert token(5, [*prompt, 5], SCOPE) == longer
    assert [engine.kv.prefix_positions_hit for engine in engines] == [4 * PAGE] * len(engines)
    assert token(6, prompt, b"another") == right
    assert token(7, [9, *prompt[1:]], SCOPE) != right
    assert [engine.kv.prefix_positions_hit for engine in engines] == [4 * PAGE] * len(engines)
    assert [engine.kv.pages_used for engine in engines] == [0] * len(engines)
    assert cached == [[served] * len(engines) for served in (0, 0, 0, 2 * PAGE, 2 * PAGE, 0, 0)]
    assert engines[0].cached_positions(key_of(5)) == 0


def test_an_idle_session_makes_room_and_is_told_so() -> None:
    clock = [0.0]
    engine = ToyEngine(MODEL, MODEL_LAYERS, num_pages=2, max_positions=2 * PAGE, now=lambda: clock[0])
    for session in (1, 2):
        engine.open_session(key_of(session), PAGE)
    assert engine.forward([first_step(1, [1]), first_step(2, [1])]) == [None, None]
    with pytest.raises(TooManyHopBodies):
        engine.open_session(key_of(3), PAGE)
    clock[0] = 60.0
    assert engine.forward([first_step(2, [1], position=1)]) == [None]
    engine.open_session(key_of(3), PAGE)
    (room,) = engine.forward([first_step(3, [1, 2, 3, 4], sample=GREEDY)])
    assert room == Sampled(token_after([1, 2, 3, 4]))
    (missed,) = engine.forward([first_step(1, [1], position=1)])
    assert isinstance(missed, CacheMiss)
    assert (engine.kv.sessions_evicted, engine.kv.pages_used, engine.kv.pages_total) == (1, 2, 2)


def test_penalties_and_logprobs_come_from_the_sampler() -> None:
    best = token_after([1, 2, 3, 4])
    biased = Sampler(Sampling(logit_bias=((best, -100.0),), num_top=2), logprobs=True)
    (engine,) = chain(0, 6)
    engine.open_session(key_of(1), 64)
    (answer,) = engine.forward([first_step(1, [1, 2, 3, 4], sample=biased)])
    assert isinstance(answer, Sampled)
    assert [each.token_id for each in answer.top] == [best, answer.token_id]
