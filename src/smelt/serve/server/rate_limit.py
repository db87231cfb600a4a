"""Limits per API key: requests and tokens per minute, as token buckets that hold one minute's worth."""

from __future__ import annotations

import math
import time

from smelt.serve.server.auth import Keys
from smelt.serve.server.errors import ApiError
from smelt.serve.server.shared_table import SharedTable


class TokenBucket:
    """Refills continuously. What is taken may exceed what is there; the debt has to be paid back before the next."""

    def __init__(self, per_minute: int, table: SharedTable) -> None:
        self.capacity, self._table = float(per_minute), table
        self._state = table.allocate(2).common  # what is missing until it is full, and when that was computed

    def take(self, amount: float, *, force: bool = False) -> float:
        """Take the amount if it is there, or all that the bucket can hold; else return after how many seconds it is."""
        with self._table.lock():
            now = time.monotonic()
            missing = max(0.0, self._state[0] - (now - self._state[1]) * self.capacity / 60)
            wait = (min(amount, self.capacity) - (self.capacity - missing)) * 60 / self.capacity
            taken = force or wait <= 0
            self._state[0], self._state[1] = missing + amount * taken, now
            return 0.0 if taken else wait


class RateLimits:
    """The limits of all keys. Keys without a limit have no bucket."""

    def __init__(self, keys: Keys, table: SharedTable) -> None:
        self._requests = {
            key: TokenBucket(options.rpm, table) for key, options in keys.items() if options.rpm is not None
        }
        self._tokens = {
            key: TokenBucket(options.tpm, table) for key, options in keys.items() if options.tpm is not None
        }

    def admit_request(self, key: bytes) -> None:
        """Count a request; refuse it if there were too many."""
        _admit(self._requests.get(key), 1, "requests")

    def admit_tokens(self, key: bytes, tokens: int) -> None:
        """Count the tokens of prompts; refuse them if there were too many."""
        _admit(self._tokens.get(key), tokens, "tokens")

    def charge_tokens(self, key: bytes, tokens: int) -> None:
        """Count the tokens of an answer, whose number is known only when it has ended."""
        if key in self._tokens:
            self._tokens[key].take(tokens, force=True)


def _admit(bucket: TokenBucket | None, amount: int, unit: str) -> None:
    if bucket is None:
        return
    seconds = bucket.take(amount)
    if seconds > 0:
        message = f"this API key has used its {bucket.capacity:,.0f} {unit} per minute; try again later."
        headers = {"retry-after": str(math.ceil(seconds))}
        raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)
