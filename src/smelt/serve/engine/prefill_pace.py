"""How much of a prompt is read per step while answers wait for it."""

from __future__ import annotations

INITIAL_TOKENS = 32  # before anything was measured
MIN_TOKENS = 16


class PrefillPace:
    """Limit the prompt tokens of a step so that it takes about `target_seconds`.

    On a slow device, a step that fills its batch with prompts would stop every running answer for seconds.
    """

    def __init__(self, target_seconds: float) -> None:
        self.target_seconds = target_seconds
        self._tokens_per_second = INITIAL_TOKENS / target_seconds

    @property
    def max_tokens(self) -> int:
        """Prompt tokens for the next step, if answers wait for it."""
        return max(int(self._tokens_per_second * self.target_seconds), MIN_TOKENS)

    def record(self, tokens: int, seconds: float) -> None:
        """Record a step of this many tokens. Short ones do not tell how fast prompts are read. A slower step counts at
        once, since the next one may be slower still: attention takes longer the more is cached."""
        if tokens >= MIN_TOKENS and seconds > 0:
            measured = tokens / seconds
            self._tokens_per_second = min(measured, (self._tokens_per_second + measured) / 2)
