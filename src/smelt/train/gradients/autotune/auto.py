"""`auto`: measures the link and the step, predicts what every method would cost, and takes the cheapest if one pays.

The first steps send everything. In the last of them the link is measured and every candidate is tried out on the real
gradients of every vector (`rehearsal.py`); from the next step on each vector has the method whose predicted wait is the
shortest. Without a gain nothing is compressed: under DDP its buckets then travel as if there were no hook, so that all
that `auto` costs is its measuring. The arithmetic goes to the log "smelt.train", and is in `AutoCompression.decision`.

Only time is compared. What a method does to the loss at the given density is not part of the arithmetic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.train.gradients.autotune.auto_reducer import AutoReducer, settings_for
from smelt.train.gradients.autotune.cost_model import (
    CostPrediction,
    agree_on_prediction,
    predict_compressor,
    predict_ddp,
)
from smelt.train.gradients.autotune.decision import AutoDecision, choose_methods
from smelt.train.gradients.autotune.dry_run import dry_run_compressor
from smelt.train.gradients.autotune.link import Link, measure_link
from smelt.train.gradients.autotune.timed_comm import max_over_ranks, synchronized_time
from smelt.train.gradients.bucket import Vector
from smelt.train.gradients.compression import Compression
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors import COMPRESSORS, PowerSGD, compressor_named
from smelt.train.gradients.dense import Dense
from smelt.train.gradients.gradient_views import flat_of
from smelt.train.gradients.layout import Layout

log = logging.getLogger("smelt.train")

_BF16 = "bf16"
_REPEATS = 2  # of each message that measures the link: a run that has begun should not wait long for it


@dataclass(frozen=True)
class Auto(Compressor):
    """Which methods it may choose from, and how long it looks on."""

    name: ClassVar[str] = "auto"
    paper: ClassVar[str] = "none: the alpha-beta cost model and measurements"

    density: float = 0.001  # of the methods that have one
    methods: tuple[str, ...] = (_BF16, "exdyna", "micro", "powersgd", "qsgd")  # besides dense
    steps: int = 2  # that send everything before the measuring

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ConfigError(f"auto: steps is {self.steps}; it must be at least 2, as the first one only warms up.")
        self.candidates()

    def candidates(self) -> list[Compressor]:
        """The first is dense."""
        return [Dense(), *(build_candidate(name, self.density) for name in self.methods)]

    def target(self, elements: int) -> float:
        return elements


def build_candidate(name: str, density: float) -> Compressor:
    """A method by its name, with the density if it has one."""
    if name == _BF16:
        return Dense(values="bfloat16")
    if name == PowerSGD.name:  # `auto` itself has sent everything long enough
        return PowerSGD(plain=2)
    has_density = name in COMPRESSORS and "density" in COMPRESSORS[name].__dataclass_fields__
    return compressor_named(name, **({"density": density} if has_density else {}))


def resolve_compressor(name: str) -> Compressor:
    return Auto() if name == Auto.name else compressor_named(name)


def compression_class(compressor: Compressor) -> type[Compression]:
    return AutoCompression if isinstance(compressor, Auto) else Compression


class AutoCompression(Compression):
    """Compression that settles on its methods after some steps."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.decision: AutoDecision | None = None  # None: not yet, or it was made by the run that this one goes on from
        self.overlaps_backward = (
            False  # whether gradients can be sent while backward goes on when nothing is compressed
        )
        self._link: Link | None = None
        self._plain_link: Link | None = None  # of DDP itself, which knows no nodes
        self._tried: dict[int, tuple[CostPrediction, ...]] = {}  # by the place of the vector
        self._places: list[int] = []  # of the candidates that were tried
        self._finite = True
        self._clock = _StepClock()
        super().__init__(*arguments, **options)

    @property
    def decided(self) -> bool:
        return all(reducer.decided for reducer in self._own())

    @property
    def plain(self) -> bool:
        return self.overlaps_backward and all(reducer.choice == 0 for reducer in self._own())

    def pass_by(self) -> None:
        """DDP has sent the gradients of a step itself."""
        workers = self.workers.size
        for reducer, layout in zip(self._own(), self.layouts, strict=True):
            reducer.pass_by(2 * (workers - 1) * 4 * layout.size // workers)

    def make_reducer(
        self, layout: Layout, device: torch.device, rate: Callable[[], float] | None, rollback: bool
    ) -> AutoReducer:
        assert isinstance(self.compressor, Auto)
        candidates, settings = self.compressor.candidates(), replace(self.settings, node=None)
        return AutoReducer(
            self.compressor, candidates, layout, self.between, settings, device, rate=rate, rollback=rollback
        )

    def put(self, name: str, gradient: Tensor) -> bool:
        if not self.decided and not self._next and not any(vector.arrived for vector in self.vectors):
            self._clock.begin()
        return super().put(name, gradient)

    def reduce_vector(self, vector: Vector) -> None:
        if self.decided:
            super().reduce_vector(vector)
            return
        assert isinstance(self.compressor, Auto)
        last = self.is_last(vector)
        start = perf_counter()
        looking = self._clock.steps > self.compressor.steps
        if looking:
            self._try(vector)
        super().reduce_vector(vector)
        self._clock.held(start, last)
        if looking and last:
            self._decide()

    def is_last(self, vector: Vector) -> bool:
        """Whether all others of this step have been reduced."""
        return vector is self.vectors[-1]

    def _own(self) -> list[AutoReducer]:
        return [vector.reducer for vector in self.vectors if isinstance(vector.reducer, AutoReducer)]

    def _try(self, vector: Vector) -> None:
        """Rehearse all candidates on a vector, if its gradients are finite everywhere."""
        if self.workers.size == 1:
            return
        gradient = flat_of(vector.given(self._scale()))
        finite = self.workers.gather(gradient.isfinite().all().view(1), "agreement")
        self._finite &= bool(finite.all())
        if not self._finite:
            return
        assert isinstance(self.compressor, Auto)
        if self._link is None:
            self._link = measure_link(self.between, gradient.device, _REPEATS)
            everybody = self.nodes is None
            self._plain_link = self._link if everybody else measure_link(self.workers, gradient.device, _REPEATS)
        handling = max_over_ranks([_handling(vector)], self.workers, gradient.device)[0]
        found: dict[int, CostPrediction] = {}
        for place, compressor in enumerate(self.compressor.candidates()):
            settings = settings_for(compressor, replace(self.settings, check=False, node=None))
            try:
                layout = vector.reducer.layout
                enough = min((made.exposed for made in found.values()), default=inf)
                tried = dry_run_compressor(compressor, gradient, layout, self.between, self._link, settings, enough)
            except ConfigError as error:  # the same on every worker: it does not go with the settings
                log.info("auto leaves %s out: %s", compressor.name, error)
                continue
            made = predict_compressor(tried, handling)
            found[place] = (
                made if self.between is self.workers else agree_on_prediction(made, self.workers, gradient.device)
            )
        self._places = list(found)
        self._tried[self.vectors.index(vector)] = tuple(found.values())

    def _decide(self) -> None:
        if self.workers.size == 1:
            log.warning("auto: there is one worker, so there is nothing to send and nothing is compressed.")
            self._use([0] * len(self.vectors))
            return
        if not self._finite:  # a step that the gradient scaler will skip; look again at the next
            self._finite, self._tried = True, {}
            return
        assert self._link is not None
        assert self._plain_link is not None
        device = self.vectors[0].device
        tried = tuple(self._tried[place] for place in range(len(self.vectors)))
        backward, rest = max_over_ranks([median(self._clock.backward), median(self._clock.rest)], self.workers, device)
        elements = sum(layout.size for layout in self.layouts)
        dense = predict_ddp(elements, self._plain_link, backward, name="dense by DDP")
        if not self.overlaps_backward:
            dense = _total([methods[0] for methods in tried])
        chosen = torch.tensor(choose_methods(tried, dense, rest), device=device)
        choices = tuple(self.workers.broadcast(chosen, 0, "agreement").tolist())
        self.decision = AutoDecision(self._link, tried, dense, backward, rest, choices)
        if self.workers.rank == 0:
            log.info("auto: %s", self.decision.text())
            if not any(choices):
                log.warning("auto: on this link no method is predicted to pay; the gradients are sent as they are.")
        self._use([self._places[choice] for choice in choices])
        self._tried = {}

    def _use(self, choices: list[int]) -> None:
        for reducer, choice in zip(self._own(), choices, strict=True):
            reducer.use(choice)


class _StepClock:
    """Of steps that send everything: how long backward went on beside the gradients' arrival, and all the rest."""

    def __init__(self) -> None:
        self.steps = 0
        self.backward: list[float] = []
        self.rest: list[float] = []
        self._first = 0.0
        self._waited = 0.0

    def begin(self) -> None:
        """The first gradient of a step is there."""
        start = perf_counter()
        if self.steps > 1:  # the step before was not the first
            self.rest.append(start - self._first - self._waited)
        self.steps += 1
        self._first, self._waited = start, 0.0

    def held(self, since: float, last: bool) -> None:
        """A vector was reduced; `last`: it was the last one of the step."""
        if last and self.steps > 1:
            self.backward.append(max(since - self._first - self._waited, 0.0))
        self._waited += perf_counter() - since


def _handling(vector: Vector) -> float:
    """Seconds in which the frame takes a vector in and hands it out, inside a node too."""
    flat, device = vector.flat, vector.device
    other = flat.clone()
    start = synchronized_time(device)
    other.copy_(flat)
    if device.type != "cpu" or vector.nodes is not None:  # otherwise gradients are taken where they are
        flat.copy_(other)
        other.copy_(flat)
    if vector.nodes is not None:
        vector.nodes.gather(flat_of(vector.given(None)))
    return synchronized_time(device) - start


def _total(predictions: list[CostPrediction]) -> CostPrediction:
    first, *others = predictions
    for each in others:
        parts = (first.communication + each.communication, 0.0, first.computing + each.computing)
        first = CostPrediction(first.method, first.bytes + each.bytes, first.calls + each.calls, *parts)
    return first
