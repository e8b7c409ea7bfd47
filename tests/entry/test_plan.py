"""What an entry asks the tail for: every wrong value is refused by its name in the request, before any peer works."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import HopBodyTooLarge, InvalidRequest
from tessella_p2p.base.limits import MAX_HISTORY_IDS, MAX_HOP_BYTES, MAX_POSITIONS, MAX_QUEUED_STEPS, PREFILL_CHUNK
from tessella_p2p.entry.api import GenerateRequest
from tessella_p2p.entry.plan import check_history, check_hop_body, prefill_chunk, sampling_of, tail_history
from tessella_p2p.wire import messages as m

VOCABULARY = 100


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="toy", prompt="hi", **fields)


def test_a_request_becomes_what_the_tail_is_asked_for() -> None:
    asked = request(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias=[(99, -100.0)],
        logprobs=True,
        top_logprobs=20,
    )
    assert sampling_of(asked, 7, VOCABULARY) == m.Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias=((99, -100.0),),
        seed=7,
        num_top=20,
    )
    assert sampling_of(request(), 0, VOCABULARY) == m.Sampling()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"frequency_penalty": 3.0}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": [(1, 101.0)]}, "logit_bias"),
        ({"logit_bias": [(1, 1.0), (1, 2.0)]}, "logit_bias"),
        ({"logit_bias": [(-1, 1.0)]}, "logit_bias"),
        ({"logit_bias": [(VOCABULARY, 1.0)]}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=param) as caught:
        sampling_of(request(**fields), 0, VOCABULARY)
    assert caught.value.param == param


def test_an_answer_whose_history_would_not_fit_is_refused_beforehand() -> None:
    prompt = [1, 2, 2, 3]
    check_history(m.Sampling(), prompt, 10**6)
    check_history(m.Sampling(temperature=1.0, logit_bias=((1, 1.0),)), prompt, 10**6)
    check_history(m.Sampling(presence_penalty=1.0), prompt, MAX_HISTORY_IDS)
    check_history(m.Sampling(repetition_penalty=1.1), prompt, MAX_HISTORY_IDS - 3)
    for sampling, most in (
        (m.Sampling(frequency_penalty=1.0), MAX_HISTORY_IDS),
        (m.Sampling(repetition_penalty=1.1), MAX_HISTORY_IDS - 3),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check_history(sampling, prompt, most + 1)
        assert caught.value.param == "max_tokens"


@given(
    repetition=st.sampled_from([1.0, 1.3]),
    presence=st.sampled_from([0.0, 0.5]),
    prompt=st.lists(st.integers(0, 20)),
    answer=st.lists(st.integers(0, 20)),
)
def test_a_history_that_was_admitted_fits_at_every_point_of_the_answer(
    repetition: float, presence: float, prompt: list[int], answer: list[int]
) -> None:
    sampling = m.Sampling(repetition_penalty=repetition, presence_penalty=presence)
    history, history_answer = tail_history(sampling, prompt, answer)
    of_prompt = len(set(prompt)) if repetition != 1.0 else 0
    assert history_answer == (len(answer) if repetition != 1.0 or presence else 0)
    assert len(history) == 4 * (of_prompt + history_answer)


# ---- hops ----


@given(st.integers(1, MAX_POSITIONS), st.sampled_from([0, 64, 576, 2048, 8192, 16384]))
def test_what_passes_the_check_goes_through_in_few_enough_steps_that_fit_into_a_hop(
    positions: int, hidden_size: int
) -> None:
    chunk = prefill_chunk(positions)
    assert chunk >= PREFILL_CHUNK
    assert -(-positions // chunk) <= MAX_QUEUED_STEPS
    if min(chunk, positions) * hidden_size * 4 <= MAX_HOP_BYTES:
        check_hop_body(hidden_size, positions)
    else:
        with pytest.raises(HopBodyTooLarge, match="64 MiB"):
            check_hop_body(hidden_size, positions)


def test_only_very_long_prompts_of_very_wide_models_are_too_large_for_a_hop() -> None:
    check_hop_body(2048, MAX_POSITIONS)
    check_hop_body(16384, 131_072)
    with pytest.raises(HopBodyTooLarge) as caught:
        check_hop_body(16384, MAX_POSITIONS)
    assert caught.value.http_status == 413
