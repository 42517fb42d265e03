"""The limits of an API key, with a virtual clock."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.gateway.admission.rate_limits import Bucket, KeyLimiter, Refusal


def begin(limiter: KeyLimiter, tokens: int, now: float) -> Refusal | None:
    refused = limiter.begin(now)
    if refused is None and (refused := limiter.estimate(tokens, now)) is not None:
        limiter.end(0, 0, now)
    return refused


def test_a_key_without_limits_is_never_refused() -> None:
    limiter = KeyLimiter()
    assert all(begin(limiter, 10**9, 0.0) is None for _ in range(1000))
    assert limiter.num_open == 1000


def test_requests_a_minute() -> None:
    limiter = KeyLimiter(requests_per_minute=60)
    assert all(begin(limiter, 1, 0.0) is None for _ in range(60))
    refused = begin(limiter, 1, 0.0)
    assert refused is not None
    assert "60 requests per minute" in refused.message
    assert refused.retry_after_s == 1.0
    assert begin(limiter, 1, 0.99) is not None
    assert begin(limiter, 1, 1.0) is None
    assert limiter.num_open == 61


def test_tokens_are_taken_by_estimate_and_settled_at_the_end() -> None:
    limiter = KeyLimiter(tokens_per_minute=6000)
    assert begin(limiter, 5000, 0.0) is None
    refused = begin(limiter, 2000, 0.0)
    assert refused is not None
    assert "6000 tokens per minute" in refused.message
    assert refused.retry_after_s == 10.0
    limiter.end(5000, 1000, 0.0)  # most of the prompt was cached
    assert begin(limiter, 2000, 0.0) is None
    limiter.end(2000, 60_000, 0.0)  # a very long output
    refused = begin(limiter, 1, 0.0)
    assert refused is not None
    assert refused.retry_after_s > 500


def test_a_prompt_larger_than_the_bucket_needs_a_full_one() -> None:
    limiter = KeyLimiter(tokens_per_minute=1000)
    assert begin(limiter, 50_000, 0.0) is None
    assert begin(limiter, 1, 0.0) is not None
    assert begin(limiter, 1, 49 * 60.0 - 1) is not None
    assert begin(limiter, 1, 49 * 60.0 + 1) is None


def test_concurrency() -> None:
    limiter = KeyLimiter(concurrency=2)
    assert begin(limiter, 1, 0.0) is None
    assert begin(limiter, 1, 0.0) is None
    refused = begin(limiter, 1, 0.0)
    assert refused is not None
    assert "2 concurrent requests" in refused.message
    limiter.end(1, 1, 0.0)
    assert begin(limiter, 1, 0.0) is None


def test_a_refused_request_takes_nothing() -> None:
    limiter = KeyLimiter(requests_per_minute=10, tokens_per_minute=100)
    assert begin(limiter, 100, 0.0) is None
    for _ in range(50):
        assert begin(limiter, 100, 0.0) is not None
    assert all(begin(limiter, 0, 1.0) is None for _ in range(9))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 600),
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 50)), max_size=200),
)
def test_a_bucket_never_gives_more_than_its_rate(per_minute: int, steps: list[tuple[float, int]]) -> None:
    bucket, now, given_out = Bucket(per_minute), 0.0, 0
    for pause, amount in steps:
        now += pause
        wait_s = bucket.wait_s(amount, now)
        if wait_s == 0.0:
            bucket.take(amount, now)
            given_out += amount
        else:
            # after the announced wait the request is accepted
            assert Bucket.wait_s(_copy(bucket), amount, now + wait_s * 1.0001) == 0.0
    assert given_out <= per_minute + per_minute / 60 * now + 50


def _copy(bucket: Bucket) -> Bucket:
    other = Bucket(1)
    for name in Bucket.__slots__:
        setattr(other, name, getattr(bucket, name))
    return other
