"""Limits of one key over a clock that the test sets."""

from __future__ import annotations

import random

import pytest

from holdfast.server.keys.limits import Account, Bucket, duration
from holdfast.server.keys.values import Limits
from holdfast.server.protocol import ApiError


def refused(account: Account, tokens: int, now: float) -> ApiError:
    with pytest.raises(ApiError) as error:
        account.admit(tokens, now)
    assert error.value.status == 429
    return error.value


def test_a_bucket_admits_a_minutes_amount_at_once_and_then_its_rate() -> None:
    bucket = Bucket(60, 0.0)
    for _ in range(60):
        assert bucket.wait(1, 0.0) == 0
        bucket.take(1, 0.0)
    assert bucket.wait(1, 0.0) == 1.0
    assert bucket.wait(1, 0.25) == 0.75
    assert bucket.wait(1, 1.0) == 0
    assert bucket.reset(1.0) == 59.0


def test_over_any_time_a_bucket_admits_its_rate_and_one_minutes_amount_at_most() -> None:
    draw = random.Random(3)
    bucket, taken, now = Bucket(120, 0.0), [], 0.0
    for _ in range(3000):
        now += draw.expovariate(4.0)
        amount = draw.randint(1, 5)
        if bucket.wait(amount, now) == 0:
            bucket.take(amount, now)
            taken.append((now, amount))
    for at in range(0, len(taken), 7):
        began, sum_so_far = taken[at][0], 0
        for then, amount in taken[at:]:
            sum_so_far += amount
            assert sum_so_far <= 120 + 2 * (then - began) + 1e-6


def test_more_than_the_limit_needs_a_full_bucket_and_is_paid_for_later() -> None:
    bucket = Bucket(60, 0.0)
    assert bucket.wait(100, 0.0) == 0
    bucket.take(100, 0.0)
    assert bucket.level(0.0) == -40
    assert bucket.wait(1, 0.0) == 41.0


def test_charges_of_other_servers_delay_by_a_minute_at_most() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take_late(10_000, 0.0)
    assert bucket.wait(0, 0.0) == 60.0
    bucket.take(30, 0.0)
    bucket.take_late(5, 0.0)
    assert bucket.level(0.0) == -90  # Own debts stay.


def test_a_request_beyond_the_requests_per_minute_is_refused_with_the_time_to_wait() -> None:
    account = Account("acme", Limits(requests_per_minute=2), 0.0)
    account.admit(0, 0.0)
    account.admit(0, 10.0)
    error = refused(account, 0, 10.0)
    assert error.code == "rate_limit_exceeded"
    assert error.headers == {"retry-after": "20", "retry-after-ms": "20000"}
    account.admit(0, 30.0)


def test_a_refused_request_charges_nothing() -> None:
    account = Account("acme", Limits(requests_per_minute=5, tokens_per_minute=100), 0.0)
    account.admit(90, 0.0)
    before = account.headers(0.0)
    refused(account, 50, 0.0)
    assert account.headers(0.0) == before
    assert (account.in_progress, account.requests, account.tokens) == (1, 1, 90)


def test_the_estimate_is_replaced_by_the_tokens_of_the_request() -> None:
    account = Account("acme", Limits(tokens_per_minute=100), 0.0)
    charge = account.admit(60, 0.0)
    assert account.headers(0.0)["x-ratelimit-remaining-tokens"] == "40"
    account.settle(charge, 25, 0.0)
    assert account.headers(0.0)["x-ratelimit-remaining-tokens"] == "75"
    account.settle(account.admit(10, 0.0), 0, 0.0)
    assert account.headers(0.0)["x-ratelimit-remaining-tokens"] == "75"
    assert account.tokens == 25


def test_an_answer_longer_than_expected_delays_the_next_request() -> None:
    account = Account("acme", Limits(tokens_per_minute=60), 0.0)
    account.settle(account.admit(1, 0.0), 90, 0.0)
    assert refused(account, 10, 0.0).retry_seconds == 40.0


def test_streams_are_counted_until_they_end() -> None:
    account = Account("acme", Limits(streams=2), 0.0)
    first, _ = account.admit(5, 0.0), account.admit(5, 0.0)
    assert refused(account, 5, 0.0).code == "rate_limit_exceeded"
    account.settle(first, 5, 0.0)
    account.admit(5, 0.0)


def test_a_budget_counts_what_is_spent_and_what_is_in_progress() -> None:
    account = Account("acme", Limits(budget_tokens=100), 0.0, spent=60)
    charge = account.admit(40, 0.0)
    assert refused(account, 1, 0.0).code == "insufficient_quota"
    account.settle(charge, 39, 0.0)
    account.settle(account.admit(1, 0.0), 1, 0.0)
    assert refused(account, 1, 1e6).code == "insufficient_quota"
    account.correct(0)  # The next month.
    account.admit(1, 0.0)


def test_a_request_without_tokens_waits_for_no_limit_on_tokens() -> None:
    account = Account("acme", Limits(tokens_per_minute=60, budget_tokens=100, requests_per_minute=3), 0.0)
    account.settle(account.admit(1, 0.0), 150, 0.0)
    assert refused(account, 1, 0.0).code == "insufficient_quota"
    account.settle(account.admit(None, 0.0), 0, 0.0)
    assert (account.spent, account.tokens, account.requests) == (150, 150, 2)
    account.admit(None, 0.0)
    with pytest.raises(ApiError, match=r"requests per min: limit 3, requested 1"):
        account.admit(None, 0.0)


def test_a_changed_limit_applies_at_once_and_what_was_taken_stays_taken() -> None:
    account = Account("acme", Limits(requests_per_minute=10), 0.0)
    for _ in range(10):
        account.admit(0, 0.0)
    account.follow(Limits(requests_per_minute=12), 0.0)
    assert account.headers(0.0)["x-ratelimit-remaining-requests"] == "2"
    account.follow(Limits(requests_per_minute=5, tokens_per_minute=7), 0.0)
    assert account.headers(0.0)["x-ratelimit-remaining-requests"] == "0"
    assert account.headers(0.0)["x-ratelimit-remaining-tokens"] == "7"
    account.follow(Limits(), 0.0)
    assert account.headers(0.0) == {}


def test_the_headers_are_openais() -> None:
    account = Account("acme", Limits(requests_per_minute=60, tokens_per_minute=1000), 0.0)
    account.admit(100, 0.0)
    assert account.headers(0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "900",
        "x-ratelimit-reset-tokens": "6s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0121, "13ms"),
        (0.9999, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (360.0, "6m0s"),
        (61.25, "1m1.25s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
