"""Limits of one key: token buckets per minute, requests in progress, and a monthly budget. Time is an argument."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.server.keys.values import Limits
from holdfast.server.protocol import ApiError

MINUTE = 60.0
BUCKETS = {"requests": "requests_per_minute", "tokens": "tokens_per_minute"}
"""Field of `Limits` by the name of its bucket. The names are those of OpenAI's headers."""


class Bucket:
    """A token bucket. It holds at most the amount of a minute, and refills at a steady rate.

    Work whose size is known only afterwards may take more than there is. The level is then negative, and refills first.
    """

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        """Amount that may be taken per minute."""
        self._level = float(limit)
        self._at = now

    def level(self, now: float) -> float:
        """Return the amount that is there at a time."""
        refilled = self._level + max(0.0, now - self._at) * self.limit / MINUTE
        self._level, self._at = min(float(self.limit), refilled), max(now, self._at)
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take an amount, or give a negative one back."""
        self._level = min(float(self.limit), self.level(now) - amount)

    def take_late(self, amount: float, now: float) -> None:
        """Take what other servers took earlier. The level does not fall below that of a minute's wait."""
        level = self.level(now)
        self._level = max(level - amount, min(level, -float(self.limit)))

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until an amount is there. More than the limit needs a full bucket only."""
        wait = max(0.0, min(amount, self.limit) - self.level(now)) * MINUTE / self.limit
        return round(wait, 6)  # Otherwise an error of floats would add a whole second to `retry-after`.

    def reset(self, now: float) -> float:
        """Return the seconds until the bucket is full."""
        return (self.limit - self.level(now)) * MINUTE / self.limit

    def resized(self, limit: int, now: float) -> Bucket:
        """Return a bucket with another limit, from which as much has been taken as from this one."""
        other = Bucket(limit, now)
        other.take(self.limit - self.level(now), now)
        return other


@dataclass(frozen=True, slots=True)
class Charge:
    """Amount charged to a key when a request arrived."""

    account: Account
    tokens: int
    """Estimated number of prompt tokens."""


class Account:
    """State of one key's limits in this server process."""

    def __init__(self, name: str, limits: Limits, now: float, spent: int = 0) -> None:
        self.name = name
        self.limits = limits
        self.spent = spent
        """Tokens of ended requests in this month, those of other servers included."""
        self.reserved = 0
        """Estimated prompt tokens of requests in progress."""
        self.in_progress = 0
        """Number of requests in progress."""
        self.requests = self.tokens = 0
        """Requests and tokens charged since the process started."""
        self._buckets = fresh(limits, {}, now)

    def follow(self, limits: Limits, now: float) -> None:
        """Apply changed limits at once. Amounts taken earlier stay taken."""
        if limits != self.limits:
            self._buckets = fresh(limits, self._buckets, now)
            self.limits = limits

    def admit(self, tokens: int | None, now: float) -> Charge:
        """Charge an arriving request with its estimated prompt tokens. Raises ApiError 429, which charges nothing.

        `tokens` is None for a request that computes no tokens. No limit on tokens holds it up.
        """
        limits = self.limits
        needed = {"requests": 1} | ({} if tokens is None else {"tokens": tokens})
        spent = limits.budget_tokens is not None and self.spent + self.reserved >= limits.budget_tokens
        if spent and tokens is not None:
            reason = f"this API key has used its budget of {limits.budget_tokens} tokens for this month"
            raise ApiError(reason, status=429, code="insufficient_quota", final=True)
        if limits.streams is not None and self.in_progress >= limits.streams:
            reason = f"this API key has {self.in_progress} requests in progress, and at most {limits.streams} are taken"
            raise ApiError(f"{reason}; try again", status=429, code="rate_limit_exceeded", retry_after=1)
        for name, amount in needed.items():
            bucket = self._buckets.get(name)
            if bucket is not None and (wait := bucket.wait(amount, now)) > 0:
                reason = (
                    f"Rate limit reached for this API key on {name} per min: limit {bucket.limit}, "
                    f"requested {amount}. Please try again in {duration(wait)}"
                )
                raise ApiError(reason, status=429, code="rate_limit_exceeded", retry_seconds=wait)
        self._charge(1, tokens or 0, now)
        self.in_progress += 1
        self.reserved += tokens or 0
        return Charge(self, tokens or 0)

    def cancel(self, charge: Charge, now: float) -> ApiError:
        """Take a charge back, because all servers together have too many requests. Returns the error for the client."""
        self._charge(-1, -charge.tokens, now)
        self.in_progress -= 1
        self.reserved -= charge.tokens
        reason = f"this API key has {self.limits.streams} requests in progress at all servers, and no more are taken"
        return ApiError(f"{reason}; try again", status=429, code="rate_limit_exceeded", retry_after=1)

    def settle(self, charge: Charge, tokens: int, now: float) -> None:
        """End a request. `tokens` are those of its prompt and answer, and replace the estimate."""
        self._charge(0, tokens - charge.tokens, now)
        self.in_progress -= 1
        self.reserved -= charge.tokens
        self.spent += tokens

    def spend(self, tokens: int) -> None:
        """Take tokens from the month's budget only, as batches do, which run when there is room."""
        self.spent += tokens

    def correct(self, spent: int) -> None:
        """Set the tokens of this month to what all servers have spent."""
        self.spent = spent

    def take_late(self, requests: int, tokens: int, now: float) -> None:
        """Charge what other servers have charged to this key since the last exchange."""
        for name, amount in (("requests", requests), ("tokens", tokens)):
            if amount and name in self._buckets:
                self._buckets[name].take_late(amount, now)

    def headers(self, now: float) -> dict[str, str]:
        """Return OpenAI's headers of the limits per minute; none for a key without them."""
        found = {}
        for name, bucket in self._buckets.items():
            found[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
            found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level(now))))
            found[f"x-ratelimit-reset-{name}"] = duration(bucket.reset(now))
        return found

    def _charge(self, requests: int, tokens: int, now: float) -> None:
        self.requests += requests
        self.tokens += tokens
        for name, amount in (("requests", requests), ("tokens", tokens)):
            if name in self._buckets:
                self._buckets[name].take(amount, now)


def fresh(limits: Limits, before: Mapping[str, Bucket], now: float) -> dict[str, Bucket]:
    """Return the buckets of these limits. A bucket that was there `before` keeps the amount taken from it."""
    given = {name: getattr(limits, field) for name, field in BUCKETS.items()}
    return {
        name: before[name].resized(limit, now) if name in before else Bucket(limit, now)
        for name, limit in given.items()
        if limit is not None
    }


def duration(seconds: float) -> str:
    """Return a time in OpenAI's form: 12ms, 1.5s or 6m0s."""
    thousandths = math.ceil(seconds * 1000 - 1e-6)
    if thousandths < 1000:
        return f"{max(0, thousandths)}ms"
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
