"""The arithmetic of `auto`: what every method would cost for every vector, what was chosen, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smelt.train.gradients.autotune.cost_model import CostPrediction, format_table
from smelt.train.gradients.autotune.link import Link

# A step must be predicted so many times faster: times are guessed to a fifth, and a changed gradient costs steps (in
# `benchmarks/train_time.py` 8 to 45 % more of them to the same loss).
MIN_SPEEDUP = 1.2


@dataclass(frozen=True)
class AutoDecision:
    """Plain data, the same on every worker."""

    link: Link
    vectors: tuple[tuple[CostPrediction, ...], ...]  # of each vector each method's; the first one is dense
    uncompressed: CostPrediction  # the whole model without compression, as it would be sent then
    backward: float  # seconds that backward goes on after its first gradients are there
    rest: float  # seconds of a step without its communication
    choices: tuple[int, ...]  # of each vector the place of its method

    @property
    def exposed(self) -> float:
        """Seconds that a step is predicted to wait, as it was chosen."""
        if not any(self.choices):
            return self.uncompressed.exposed
        return sum(each[choice].exposed for each, choice in zip(self.vectors, self.choices, strict=True))

    def text(self) -> str:
        """For the log."""
        line = self.link.collectives["all-reduce"]
        told = [
            f"{self.link.workers} workers, {self.link.backend}: an all-reduce takes {1e6 * line.alpha:.0f} us and a "
            f"second for every {line.bandwidth / 1e6:.1f} MB (spread {100 * line.spread:.0f} %)",
            f"a step without its communication: {1000 * self.rest:.3f} ms, of which DDP could use "
            f"{1000 * self.backward:.3f} ms to hide its own all-reduce; compressors hide nothing",
        ]
        for number, (methods, choice) in enumerate(zip(self.vectors, self.choices, strict=True)):
            told += [f"vector {number}: {methods[choice].method}", format_table(methods, methods[0])]
        without, chosen = self.rest + self.uncompressed.exposed, self.rest + self.exposed
        told.append(
            f"predicted step: {1000 * chosen:.3f} ms as chosen, {1000 * without:.3f} ms without compression "
            f"({self.uncompressed.method}), {without / max(chosen, 1e-9):.2f}x"
        )
        return "\n".join(told)

    def to_json(self) -> dict[str, Any]:
        return {
            "link": self.link.to_json(),
            "vectors": [[each.to_json() for each in methods] for methods in self.vectors],
            "uncompressed": self.uncompressed.to_json(),
            "backward": self.backward,
            "rest": self.rest,
            "choices": [methods[choice].method for methods, choice in zip(self.vectors, self.choices, strict=True)],
            "exposed": self.exposed,
        }


def choose_methods(
    vectors: Sequence[Sequence[CostPrediction]], uncompressed: CostPrediction, rest: float = 0.0
) -> tuple[int, ...]:
    """Of each vector the method with the shortest wait; all dense unless a step gains enough. `rest`: the seconds of a
    step that are the same whatever is sent."""
    best = [min(range(len(methods)), key=lambda place: methods[place].exposed) for methods in vectors]
    total = sum(methods[place].exposed for methods, place in zip(vectors, best, strict=True))
    if not any(best) or MIN_SPEEDUP * (rest + total) > rest + uncompressed.exposed:
        return (0,) * len(best)
    return tuple(best)
