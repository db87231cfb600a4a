"""The timeline of one request on the client's clock, in seconds since the start of the run.

    TTFT  = first chunk of text - sent             E2EL = last chunk - sent
    ITL   = gaps between chunks of text            TPOT = (E2EL - TTFT) / (output tokens - 1), 0 for one token

`sent` is taken before the connection is opened: a user waits for that too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class RequestTimeline:
    """A finished request, or the failure that ended it."""

    due: float = 0.0  # scheduled send time
    sent: float = 0.0
    chunk_times: list[float] = field(default_factory=list)  # arrival times of text
    ended: float = 0.0  # end of the answer, or failure
    input_tokens: int = 0
    output_tokens: int = 0
    failure: str = ""  # empty: success
    detail: str = ""  # the server's message

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] - self.sent

    @property
    def latency(self) -> float:
        return self.ended - self.sent

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]

    @property
    def tpot(self) -> float:
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def late(self) -> float:
        """Delay between schedule and sending: the client was busy, or at its maximum concurrency."""
        return self.sent - self.due
