"""What can be told to the frame, whatever the compressor."""

from __future__ import annotations

from dataclasses import dataclass

from smelt.errors import ConfigError
from smelt.train.gradients.compressor import Coder, Compressor, Sparsifier
from smelt.train.gradients.values import VALUES

FORMS = ("code", "paper")
_SLOT_ROUTES = ("exclusive", "union")
_ROOM = 1.2  # a count that is cut off at its target could not tell that it was passed


@dataclass(frozen=True)
class Settings:
    """Error feedback, the form of values on the wire, and checks."""

    form: str = "code"  # "code": the memory holds gradients; "paper": gradients times the learning rate of their step
    beta: float = (
        1.0  # low-pass filter of the memory (ScaleCom): 1 is plain error feedback, about 0.1 for large batches
    )
    values: str = "float32"  # or float16, bfloat16, int8; what rounding loses stays in the residual
    slots: float | None = None  # room for indices, as a multiple of the target; None: counts first, then their length
    node: int | str | None = None  # workers of a node, or "local": dense inside it, compressed between nodes; None: no
    check: bool = False  # compare what was applied and what is left with what was given, after every step

    def __post_init__(self) -> None:
        for key, value, options in (("form", self.form, FORMS), ("values", self.values, VALUES)):
            if value not in options:
                raise ConfigError(f"{key} is one of {', '.join(options)}, not {value!r}.")
        if not 0 < self.beta <= 1:
            raise ConfigError(f"beta is {self.beta:g}; it must be above 0 and at most 1, which is no filter.")
        if self.slots is not None and not self.slots >= 1:
            raise ConfigError(f"slots is {self.slots:g}; it must be at least 1, or None.")
        if self.node is not None and self.node != "local" and not (isinstance(self.node, int) and self.node >= 2):
            raise ConfigError(f'node is {self.node!r}; it is the number of workers in a node, at least 2, or "local".')

    def require_fit(self, compressor: Compressor, has_rate: bool) -> None:
        """Refuse what does not go together."""
        if self.form == "paper" and not has_rate:
            raise ConfigError("form='paper' keeps gradients times the learning rate; give the optimiser too.")
        if isinstance(compressor, Coder) and self.values != "float32":
            raise ConfigError(f"{compressor.name} writes values in its own way; leave values at float32.")
        if self.slots is not None:
            self._require_slots(compressor, self.slots)

    def _require_slots(self, compressor: Compressor, slots: float) -> None:
        name, route = compressor.name, compressor.route if isinstance(compressor, Sparsifier) else ""
        if route not in _SLOT_ROUTES:
            raise ConfigError(f"{name} has no selections to put into slots; leave slots at None.")
        if route == "union" and self.values != "float32":  # an element that stands in two slots would be rounded twice
            raise ConfigError(f"the workers of {name} choose the same elements; with slots, use values='float32'.")
        if route == "exclusive" and slots < _ROOM:
            raise ConfigError(f"slots is {slots:g}; {name} steers by its counts and needs at least {_ROOM:g}.")
