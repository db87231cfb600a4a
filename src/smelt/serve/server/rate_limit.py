"""Limits per API key: requests and tokens per minute, as token buckets that hold one minute's worth."""

from __future__ import annotations

import math
import time

from smelt.serve.server.auth import Keys
from smelt.serve.server.errors import ApiError


class TokenBucket:
    """Refills continuously. What is taken may exceed what is there; the debt has to be paid back before the next."""

    def __init__(self, per_minute: int) -> None:
        self.capacity = self._level = float(per_minute)
        self._updated = time.monotonic()

    def seconds_until(self, amount: float) -> float:
        """Return after how many seconds `amount` is there, or all that the bucket can hold."""
        self._refill()
        return max(0.0, (min(amount, self.capacity) - self._level) * 60 / self.capacity)

    def take(self, amount: float) -> None:
        self._refill()
        self._level -= amount

    def _refill(self) -> None:
        now = time.monotonic()
        self._level = min(self.capacity, self._level + (now - self._updated) * self.capacity / 60)
        self._updated = now


class RateLimits:
    """The limits of all keys. Keys without a limit have no bucket."""

    def __init__(self, keys: Keys) -> None:
        self._requests = {key: TokenBucket(options.rpm) for key, options in keys.items() if options.rpm is not None}
        self._tokens = {key: TokenBucket(options.tpm) for key, options in keys.items() if options.tpm is not None}

    def admit_request(self, key: bytes) -> None:
        """Count a request; refuse it if there were too many."""
        _admit(self._requests.get(key), 1, "requests")

    def admit_tokens(self, key: bytes, tokens: int) -> None:
        """Count the tokens of prompts; refuse them if there were too many."""
        _admit(self._tokens.get(key), tokens, "tokens")

    def charge_tokens(self, key: bytes, tokens: int) -> None:
        """Count the tokens of an answer, whose number is known only when it has ended."""
        if key in self._tokens:
            self._tokens[key].take(tokens)


def _admit(bucket: TokenBucket | None, amount: int, unit: str) -> None:
    if bucket is None:
        return
    seconds = bucket.seconds_until(amount)
    if seconds > 0:
        message = f"this API key has used its {bucket.capacity:,.0f} {unit} per minute; try again later."
        headers = {"retry-after": str(math.ceil(seconds))}
        raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)
    bucket.take(amount)
