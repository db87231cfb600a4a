"""How many answers may be under way, so that a queue has an end and nobody waits in vain."""

from __future__ import annotations

from smelt.serve.server.errors import ApiError
from smelt.serve.server.metrics import Meters


class Admission:
    """Room for so many answers, running and waiting together."""

    def __init__(self, room: int, meters: Meters) -> None:
        self.room, self.taken, self.closed = room, 0, False
        self._meters = meters

    def take(self, answers: int) -> None:
        if self.closed:
            raise ApiError(503, "the server is shutting down.", code="shutting_down")
        if answers > self.room:
            raise ApiError(400, f"{answers:,} answers were asked for at once; there is room for {self.room:,}.")
        if self.taken + answers > self.room:
            self._meters.refused.add()
            raise ApiError(
                429, f"the queue is full: {self.taken:,} answers are under way or waiting; try again later.",
                code="queue_full", headers={"retry-after": "1"},
            )  # fmt: skip
        self.taken += answers

    def give_back(self, answers: int) -> None:
        self.taken -= answers

    def close(self) -> None:
        """Admit nobody any more."""
        self.closed = True
