"""Draws: reproducible from the tokens before them and (seed, position), and distributed as the parameters say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.entry.plan import tail_history
from tessella_p2p.stages.engine import Sampled
from tessella_p2p.stages.sampler import Sampler, sampler_for, uniform_at
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.messages import Sampling
from tests.stages.openings import ENTRY, opened

LOGITS = np.array([0.0, 2.0, 1.0, -1.0, 2.0], np.float32)
TAIL = 2

Probabilities = npt.NDArray[np.float64]


def drawn_by(sampler: Sampler, logits: npt.NDArray[np.float32], position: int) -> Sampled:
    drawn = sampler.draw(logits, position)
    assert isinstance(drawn, Sampled)
    return drawn


def draws(params: Sampling, positions: Sequence[int], logits: npt.NDArray[np.float32] = LOGITS) -> list[int]:
    """Tokens at ``positions``, each by a sampler of its own."""
    return [drawn_by(Sampler(params), logits, position).token_id for position in positions]


# ---- the reference: transformers' processors in their own form (full sorts, masks of −inf), one after the other ----


def reference(
    logits: npt.NDArray[np.float32], params: Sampling, prompt: Sequence[int] = (), answer: Sequence[int] = ()
) -> Probabilities:
    """The distribution that a token is drawn from, [vocabulary]; temperature above 0."""
    scores = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        scores[token] += bias
    for token in {*prompt, *answer}:  # RepetitionPenaltyLogitsProcessor
        factor = params.repetition_penalty
        scores[token] = scores[token] * factor if scores[token] < 0 else scores[token] / factor
    for token in answer:  # OpenAI: mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence
        scores[token] -= params.frequency_penalty
    for token in set(answer):
        scores[token] -= params.presence_penalty
    scores = scores / params.temperature  # TemperatureLogitsWarper
    if params.top_k:  # TopKLogitsWarper
        scores[scores < np.sort(scores)[::-1][min(params.top_k, len(scores)) - 1]] = -np.inf
    if params.top_p < 1.0:  # TopPLogitsWarper
        rising = np.argsort(scores, kind="stable")
        is_out = np.cumsum(softmax(scores[rising])) <= 1 - params.top_p
        is_out[-1] = False
        scores[rising[is_out]] = -np.inf
    if params.min_p > 0.0:  # MinPLogitsWarper
        probabilities = softmax(scores)
        scores[probabilities < params.min_p * probabilities.max()] = -np.inf
    return softmax(scores)


def softmax(scores: Probabilities) -> Probabilities:
    weights: Probabilities = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights


PARAMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "top-k of one": {"temperature": 1.0, "top_k": 1},
    "top-k of more than there are": {"temperature": 1.0, "top_k": 5000},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "top-p of a flat distribution": {"temperature": 2.0, "top_p": 0.99},
    "top-p of nothing": {"temperature": 1.0, "top_p": 0.0},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "min-p of one": {"temperature": 1.5, "min_p": 1.0},
    "all of them": {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.8},
    "repetition encouraged": {"temperature": 1.0, "repetition_penalty": 0.6},
    "presence": {"temperature": 1.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 1.0, "frequency_penalty": 0.7},
    "bias": {"temperature": 1.0, "logit_bias": ((3, 5.0), (9, -100.0), (200, 100.0))},
    "everything": {
        "temperature": 1.2,
        "top_k": 120,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.3,
        "logit_bias": ((17, 2.0), (250, -3.0)),
    },
}
PROMPT = (1, 5, 9, 9, 120, 299)
ANSWER = (4, 9, 4, 4, 30, 298)


@pytest.mark.parametrize("fields", PARAMS.values(), ids=PARAMS)
def test_each_draw_is_the_one_that_the_reference_distribution_gives(fields: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    for position in range(100):
        logits = (rng.standard_normal(300) * 3).astype(np.float32)
        params = Sampling(**fields, seed=position)
        token = drawn_by(Sampler(params, PROMPT, ANSWER), logits, position).token_id
        below = np.cumsum(reference(logits, params, PROMPT, ANSWER))
        assert token == int(np.searchsorted(below, uniform_at(position, position), side="right"))


@pytest.mark.parametrize("name", ["temperature", "top-k", "top-p", "min-p", "everything"])
def test_frequencies_follow_the_distribution(name: str) -> None:
    logits = (np.random.default_rng(3).standard_normal(300) * 2).astype(np.float32)
    params = Sampling(**PARAMS[name], seed=42)
    count = 5_000
    sampler = Sampler(params, PROMPT, ANSWER)
    drawn = [
        drawn_by(sampler, logits, position).token_id for position in reversed(range(count))
    ]  # each before all others
    expected = reference(logits, params, PROMPT, ANSWER) * count
    assert set(drawn) <= set(np.flatnonzero(expected))
    seen = np.bincount(drawn, minlength=300)
    likely = expected >= 5
    seen, expected = (np.append(each[likely], each[~likely].sum()) for each in (seen, expected))
    chi_squared = float(((seen - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    freedom = len(expected) - 1
    assert chi_squared < freedom + 3.1 * math.sqrt(2 * freedom) + 5  # about p = 0.001


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.999, 1.0 - 2**-53])
def test_a_large_vocabulary_gives_the_reference_too_be_its_distribution_flat_or_not(top_p: float) -> None:
    rng = np.random.default_rng(11)
    for position, spread in enumerate((0.01, 1.0, 4.0, 12.0)):
        logits = (rng.standard_normal(20_000) * spread).astype(np.float32)
        params = Sampling(temperature=1.0, top_p=top_p, seed=position)
        token = drawn_by(Sampler(params), logits, position).token_id
        below = np.cumsum(reference(logits, params))
        assert token == int(np.searchsorted(below, uniform_at(position, position), side="right"))


# ---- what a draw depends on ----


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals() -> None:
    assert draws(Sampling(seed=1), [2]) == [1]
    assert draws(Sampling(seed=9), [9], LOGITS[::-1].copy()) == [0]


def test_greedy_heeds_bias_and_penalties() -> None:
    assert draws(Sampling(logit_bias=((3, 3.5),)), [0]) == [3]
    assert drawn_by(Sampler(Sampling(presence_penalty=0.5), answer=[1]), LOGITS, 0).token_id == 4
    assert drawn_by(Sampler(Sampling(frequency_penalty=0.6), answer=[1, 1, 4, 4]), LOGITS, 0).token_id == 2
    assert drawn_by(Sampler(Sampling(repetition_penalty=1.5), prompt=[1], answer=[4]), LOGITS, 0).token_id == 1
    assert drawn_by(Sampler(Sampling(repetition_penalty=2.5), prompt=[1], answer=[4]), LOGITS, 0).token_id == 2
    assert drawn_by(Sampler(Sampling(presence_penalty=2.0), prompt=[1]), LOGITS, 0).token_id == 1, "not the prompt"


@pytest.mark.parametrize("fields", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.6}])
def test_of_equal_logits_the_lowest_ids_are_kept(fields: dict[str, Any]) -> None:
    equal = np.zeros(4, np.float32)
    assert set(draws(Sampling(temperature=1.0, **fields), range(200), equal)) == {0, 1}


def test_a_truncation_that_leaves_all_changes_no_draw() -> None:
    plain = draws(Sampling(temperature=1.0, seed=3), range(300))
    assert draws(Sampling(temperature=1.0, seed=3, top_k=5, min_p=1e-9), range(300)) == plain


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    params = Sampling(temperature=1.0, seed=7)
    drawn = draws(params, range(200))
    np.random.seed(3)
    assert draws(params, range(199, -1, -1)) == drawn[::-1]
    assert draws(Sampling(temperature=1.0, seed=8), range(200)) != drawn
    assert len(set(drawn)) == 5


def test_draws_are_pinned_across_versions() -> None:
    """A new generator would be another recipe: sessions that two nodes share would part ways."""
    assert uniform_at(0, 0) == 0.5602518355491615
    assert uniform_at(2**64 - 1, 4096) == 0.7754281359085055


def test_uniforms_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in ([uniform_at(1, i) for i in range(4000)], [uniform_at(i, 1) for i in range(4000)]):
        assert min(numbers) >= 0.0
        assert max(numbers) < 1.0
        counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
        assert float(((counts - 400) ** 2 / 400).sum()) < 27.9  # 9 degrees of freedom, p = 0.001


def logits_at(position: int) -> npt.NDArray[np.float32]:
    """A model of 12 tokens whose favourites change little, so that penalties decide."""
    return (np.random.default_rng(position % 3).standard_normal(12) * 1.5).astype(np.float32)


params_of_any_kind = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, -1.0, 1.2]),
    frequency_penalty=st.sampled_from([0.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.6]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (5, -2.0))]),
    seed=st.integers(0, 2**64 - 1),
)
prompts = st.lists(st.integers(0, 11), min_size=1, max_size=8)


@settings(max_examples=80, deadline=None)
@given(params=params_of_any_kind, prompt=prompts, cut=st.integers(0, 24), again=st.integers(0, 24))
def test_a_run_that_is_resumed_or_replayed_anywhere_goes_on_with_the_same_draws(
    params: Sampling, prompt: list[int], cut: int, again: int
) -> None:
    first = len(prompt)
    whole = Sampler(params, prompt)
    drawn = [drawn_by(whole, logits_at(p), p) for p in range(first, first + 24)]
    tokens = [each.token_id for each in drawn]

    resumed = Sampler(params, prompt, tokens[:cut])
    assert [drawn_by(resumed, logits_at(p), p) for p in range(first + cut, first + 24)] == drawn[cut:]
    assert [drawn_by(whole, logits_at(p), p) for p in range(first + again, first + 24)] == drawn[again:], "replayed"
    assert [drawn_by(whole, logits_at(first + 23), first + 23) for _ in range(3)] == [drawn[23]] * 3, "repeated"


@settings(max_examples=50, deadline=None)
@given(params=params_of_any_kind, prompt=prompts, cut=st.integers(0, 24), logprobs=st.booleans())
def test_a_tail_rebuilds_the_sampler_from_what_the_entry_sends_with_each_epoch(
    params: Sampling, prompt: list[int], cut: int, logprobs: bool
) -> None:
    def tail_at(answer: Sequence[int]) -> Sampler:
        history, history_answer = tail_history(params, prompt, answer)
        assert bool(history) <= params.counts_answer
        opening = opened(
            TAIL,
            sampling=params,
            output="logprobs" if logprobs else "tokens",
            history=history,
            history_answer=history_answer,
        )
        return sampler_for(opening, 12)

    first = len(prompt)
    whole, direct = tail_at([]), Sampler(params, prompt, logprobs=logprobs)
    drawn = [drawn_by(whole, logits_at(p), p) for p in range(first, first + 24)]
    assert [drawn_by(direct, logits_at(p), p) for p in range(first, first + 24)] == drawn
    resumed = tail_at([each.token_id for each in drawn[:cut]])
    assert [drawn_by(resumed, logits_at(p), p) for p in range(first + cut, first + 24)] == drawn[cut:]


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=50),
    fields=st.fixed_dictionaries(
        {"temperature": st.floats(0.0, 2.0), "seed": st.integers(0, 2**64 - 1)},
        optional={
            "top_k": st.integers(0, 60),
            "top_p": st.floats(0.0, 1.0),
            "min_p": st.floats(0.0, 1.0),
            "repetition_penalty": st.floats(0.1, 10.0),
            "presence_penalty": st.floats(-2.0, 2.0),
        },
    ),
    num_top=st.integers(0, 20),
    position=st.integers(0, 2**20),
)
def test_every_finite_input_gives_a_token_that_is_possible_and_logprobs_that_are_numbers(
    logits: list[float], fields: dict[str, Any], num_top: int, position: int
) -> None:
    array = np.array(logits, np.float32)
    sampler = Sampler(Sampling(**fields, num_top=num_top), prompt=[0], answer=[len(logits) - 1], logprobs=True)
    sampled = drawn_by(sampler, array, position)
    assert 0 <= sampled.token_id < len(logits)
    if fields["temperature"] < 1e-30 and not fields.keys() & {"repetition_penalty", "presence_penalty"}:
        assert array[sampled.token_id] == array.max()
    assert len(sampled.top) == min(num_top, len(logits))
    for logprob in (sampled.logprob, *(each.logprob for each in sampled.top)):
        assert logprob is not None
        assert -9999.0 <= logprob <= 0.0
    assert [each.logprob for each in sampled.top] == sorted((each.logprob for each in sampled.top), reverse=True)


# ---- logprobs ----


@pytest.mark.parametrize("fields", [{}, PARAMS["everything"]], ids=["greedy", "everything"])
def test_logprobs_are_the_models_own_whatever_is_done_to_its_logits(fields: dict[str, Any]) -> None:
    logits = (np.random.default_rng(5).standard_normal(300) * 4).astype(np.float32)
    sampled = drawn_by(Sampler(Sampling(**fields, num_top=20), PROMPT, ANSWER, logprobs=True), logits, 77)
    expected = np.log(softmax(logits.astype(np.float64)))
    likeliest = np.argsort(-expected)[:20]
    assert [each.token_id for each in sampled.top] == likeliest.tolist()
    assert np.allclose([each.logprob for each in sampled.top], expected[likeliest], rtol=0, atol=1e-12)
    assert sampled.logprob == pytest.approx(expected[sampled.token_id], abs=1e-12)


def test_alternatives_with_equal_logprobs_come_by_id() -> None:
    sampled = drawn_by(Sampler(Sampling(num_top=3), logprobs=True), np.array([1, 5, 5, 1, 5, 1], np.float32), 0)
    assert [each.token_id for each in sampled.top] == [1, 2, 4]
    two = drawn_by(Sampler(Sampling(num_top=4), logprobs=True), np.array([1, 5, 5, 1, 5, 1], np.float32), 0)
    assert [each.token_id for each in two.top] == [1, 2, 4, 0]


def test_nothing_is_told_that_was_not_asked_for() -> None:
    sampled = drawn_by(Sampler(Sampling()), LOGITS, 0)
    assert (sampled.logprob, sampled.top) == (None, ())


# ---- wrong values ----


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": m.Sampling(logit_bias=((12, 1.0),))},
        {"sampling": m.Sampling(repetition_penalty=1.1), "history": (12).to_bytes(4, "little")},
        {"sampling": m.Sampling(), "history": b"\x01\x00\x00\x00\xff\xff\xff\xff", "history_answer": 1},
    ],
    ids=["bias", "prompt", "answer"],
)
def test_a_token_out_of_the_vocabulary_is_refused_at_the_tail_and_the_entrys_fault(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="out of the vocabulary of 12") as caught:
        sampler_for(opened(TAIL, **changes), 12)
    assert caught.value.peer == ENTRY.peer_id
