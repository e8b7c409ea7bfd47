"""API keys: what is kept, what opens, and what a key may use."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import MAX_KEY_LABEL_CHARS
from tessella_p2p.bridge.api_keys import SECRET_CHARS, ApiKey, ApiKeys, KeyLimits, bearer_of, digest_of, new_key
from tessella_p2p.bridge.key_rates import KeyRates, Refused

NOW = 1_800_000_000_000


def a_key(**changes: object) -> tuple[str, ApiKey]:
    return new_key(os.urandom, **{"label": "alice", "now_ms": NOW, **changes})  # type: ignore[arg-type]


def test_a_key_opens_and_nothing_of_it_is_kept() -> None:
    secret, key = a_key()
    assert (len(secret), secret[:4]) == (SECRET_CHARS, "tsl-")
    assert ApiKeys([key]).find(secret, NOW) is key
    assert key.digest == digest_of(secret)
    assert secret not in repr(key)
    assert (key.caller.name, key.caller.delegation, key.caller.tier) == (key.key_id, None, None)


def test_no_two_keys_are_the_same() -> None:
    made = [a_key() for _ in range(50)]
    assert len({secret for secret, _ in made}) == len({key.key_id for _, key in made}) == 50
    assert len(ApiKeys(key for _, key in made)) == 50


@given(st.text(max_size=80))
def test_no_other_text_opens_and_none_is_an_error(text: str) -> None:
    secret, key = a_key()
    keys = ApiKeys([key])
    for wrong in (text, secret[:-1], secret + "=", secret.upper(), "tsl-" + text[:43], secret[:-1] + "ä", key.key_id):
        assert keys.find(wrong, NOW) is None or wrong == secret


def test_a_key_opens_until_it_expires() -> None:
    secret, key = a_key(expires=NOW + 1000)
    keys = ApiKeys([key])
    assert keys.find(secret, NOW + 999) is key
    assert keys.find(secret, NOW + 1000) is None


def test_a_revoked_key_opens_nothing_and_the_others_do() -> None:
    (first, key), (second, other) = a_key(), a_key()
    keys = ApiKeys([key]).with_key(other).without(key.key_id)
    assert (keys.find(first, NOW), keys.find(second, NOW)) == (None, other)
    with pytest.raises(InvalidRequest, match="keys api list"):
        keys.without(key.key_id)


def test_two_keys_of_one_id_or_one_digest_are_refused() -> None:
    _, key = a_key()
    with pytest.raises(InvalidRequest):
        ApiKeys([key, key])
    with pytest.raises(InvalidRequest):
        ApiKeys([key, ApiKey("key-000000000000", "", key.digest, NOW)])


@pytest.mark.parametrize("label", ["x" * (MAX_KEY_LABEL_CHARS + 1), "two\nlines", "\x1b[2J"])
def test_a_label_prints_and_is_bounded(label: str) -> None:
    with pytest.raises(InvalidRequest, match="label"):
        a_key(label=label)


def test_a_key_that_would_be_over_already_is_not_made() -> None:
    with pytest.raises(InvalidRequest, match="over already"):
        a_key(expires=NOW)


@pytest.mark.parametrize(
    ("headers", "secret"),
    [
        (["Bearer tsl-x"], "tsl-x"),
        (["bearer  tsl-x "], "tsl-x"),
        ([], None),
        (["Basic tsl-x"], None),
        (["tsl-x"], None),
        (["Bearer tsl-x", "Bearer tsl-x"], None),
    ],
)
def test_one_bearer_is_what_a_request_says(headers: list[str], secret: str | None) -> None:
    assert bearer_of(headers) == secret


# ---- Rates ----


def test_a_minutes_requests_may_come_at_once_and_then_one_by_one() -> None:
    rates, limits = KeyRates(), KeyLimits(requests_per_minute=6)
    for _ in range(6):
        assert rates.enter("k", limits, 0.0) is None
        rates.leave("k")
    assert rates.enter("k", limits, 0.0) == Refused("requests", 10.0)
    assert rates.enter("k", limits, 9.0) == Refused("requests", pytest.approx(1.0))  # type: ignore[arg-type]
    assert rates.enter("another", limits, 0.0) is None
    assert rates.enter("k", limits, 10.001) is None


def test_tokens_are_counted_as_they_come_and_the_next_request_waits_for_them() -> None:
    rates, limits = KeyRates(), KeyLimits(tokens_per_minute=60)
    assert rates.enter("k", limits, 0.0) is None
    rates.spend("k", 100)
    rates.leave("k")
    assert rates.enter("k", limits, 0.0) == Refused("tokens", 41.0)
    assert rates.headers("k", limits, 0.0) == {
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "100.000s",
    }
    assert rates.enter("k", limits, 41.001) is None


def test_requests_at_a_time_are_bounded_and_a_refused_one_holds_no_place() -> None:
    rates, limits = KeyRates(), KeyLimits(concurrent=2, requests_per_minute=100)
    assert [rates.enter("k", limits, 0.0) for _ in range(2)] == [None, None]
    for _ in range(3):
        assert rates.enter("k", limits, 0.0) == Refused("concurrent", 1.0)
    assert rates.headers("k", limits, 0.0)["x-ratelimit-remaining-requests"] == "98"
    rates.leave("k")
    assert rates.enter("k", limits, 0.0) is None


def test_a_key_without_limits_has_no_headers_and_no_bound() -> None:
    rates = KeyRates()
    for _ in range(1000):
        assert rates.enter("k", KeyLimits(), 0.0) is None
    rates.spend("k", 10**9)
    rates.spend("unknown", 1)
    assert rates.headers("k", KeyLimits(), 0.0) == {}


def test_of_a_revoked_key_nothing_is_remembered_once_its_requests_are_over() -> None:
    rates, limits = KeyRates(), KeyLimits(requests_per_minute=1)
    assert rates.enter("k", limits, 0.0) is None
    rates.keep(())
    assert rates.enter("k", limits, 0.0) is not None, "one is under way"
    rates.leave("k")
    rates.keep(())
    assert rates.enter("k", limits, 0.0) is None


steps = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.floats(0, 40)),
        st.tuples(st.just("leave"), st.just(0.0)),
        st.tuples(st.just("spend"), st.floats(0, 50)),
    ),
    max_size=60,
)


@given(steps, st.integers(1, 20), st.integers(1, 100), st.integers(1, 3))
def test_no_key_ever_begins_more_than_its_limits(
    made: list[tuple[str, float]], per_minute: int, tokens: int, concurrent: int
) -> None:
    rates = KeyRates()
    limits = KeyLimits(requests_per_minute=per_minute, tokens_per_minute=tokens, concurrent=concurrent)
    now, begun, running, spent = 0.0, 0, 0, 0
    for act, value in made:
        if act == "enter":
            now += value
            refused = rates.enter("k", limits, now)
            if refused is None:
                assert running < concurrent
                assert spent < tokens + now * tokens / 60 + 1e-6
                begun, running = begun + 1, running + 1
                assert begun <= per_minute + now * per_minute / 60 + 1e-6
            else:
                assert refused.retry_s > 0
        elif act == "leave" and running:
            rates.leave("k")
            running -= 1
        elif act == "spend" and running:
            rates.spend("k", int(value))
            spent += int(value)
