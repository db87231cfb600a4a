"""What happened to one request, on the client's clock. Times are seconds since the run began.

    TTFT  = first piece of text - sent             E2EL = last piece - sent
    ITL   = gaps between pieces of text            TPOT = (E2EL - TTFT) / (output tokens - 1), 0 for one token

`sent` is taken before the connection is opened: a user waits for that too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Timeline:
    """A request that was answered, or the kind of failure that ended it."""

    due: float = 0.0  # when it should have been sent
    sent: float = 0.0
    pieces: list[float] = field(default_factory=list)  # when text came
    ended: float = 0.0  # when the answer was whole, or had failed
    input_tokens: int = 0
    output_tokens: int = 0
    failure: str = ""  # empty: it was answered
    detail: str = ""  # what the server said to a failure

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.sent

    @property
    def latency(self) -> float:
        return self.ended - self.sent

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.pieces)]

    @property
    def tpot(self) -> float:
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def late(self) -> float:
        """How long after its time it was sent: the client was busy, or waited for its turn."""
        return self.sent - self.due
