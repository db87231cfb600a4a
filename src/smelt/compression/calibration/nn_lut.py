"""Train the tables of NN-LUT: a ReLU network with one hidden layer per scalar function (Yu et al., 2022).

The network of N - 1 hidden units is exactly a table of N entries with learned breakpoints, see
`numerics/piecewise_linear`. It is trained on samples of an input distribution, or on the inputs recorded at one place
of a model, without labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.errors import ConfigError
from smelt.numerics.piecewise_linear import Function, Line, PiecewiseLinear

_GRID = 4096  # points at which the curvature of a function is measured
_LEAST_ERROR = 1e-7  # relative to the largest output; bounds the weights of reweighted least squares
_BINS = 64  # of the histogram of the inputs


@dataclass(frozen=True)
class TableFunction:
    """A scalar function, the range its table is trained on, and its asymptotes outside of that range.

    `flat` says which end of the range the function is flat at. Units whose weights are positive leave the leftmost
    segment flat, negative ones the rightmost.
    """

    function: Function
    low: float
    high: float
    flat: Literal["left", "right"] | None = None
    left: Line | None = None
    right: Line | None = None

    def on(self, low: float, high: float) -> TableFunction:
        """Return the function on another range."""
        return replace(self, low=low, high=high)

    def samples(self, count: int, seed: int = 0) -> Tensor:
        """Draw uniform samples of the range in float64."""
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(count, generator=generator, dtype=torch.float64) * (self.high - self.low) + self.low


# 1/x and 1/sqrt(x) are looked up after a shift of the input by bits (two at a time for the root), so that their tables
# cover one octave or two.
FUNCTIONS = {
    "gelu": TableFunction(F.gelu, -5.0, 5.0, "left", left=(0.0, 0.0), right=(1.0, 0.0)),
    "silu": TableFunction(F.silu, -10.0, 10.0, "left", left=(0.0, 0.0), right=(1.0, 0.0)),
    "tanh": TableFunction(torch.tanh, -5.0, 5.0, "left", left=(0.0, -1.0), right=(0.0, 1.0)),
    "exp": TableFunction(torch.exp, -16.0, 0.0, "left", left=(0.0, 0.0)),
    "reciprocal": TableFunction(torch.reciprocal, 1.0, 2.0),
    "rsqrt": TableFunction(torch.rsqrt, 1.0, 4.0),
}


@dataclass(frozen=True)
class TableTraining:
    """How a table is trained: L1 loss, Adam with cosine decay, the best of several seeds."""

    entries: int = 16
    steps: int = 20_000
    batch_size: int = 1024
    learning_rate: float = 1e-3
    min_learning_rate: float = 5e-6
    seeds: int = 3
    samples: int = 100_000
    fit_iterations: int = 30

    def __post_init__(self) -> None:
        if self.entries < 2:
            raise ConfigError(f"a table has at least 2 entries, not {self.entries}.")
        if min(self.steps, self.batch_size, self.seeds, self.samples, self.fit_iterations) < 1:
            raise ConfigError("the counts of a table's training are at least 1.")


def train_table(
    target: TableFunction, training: TableTraining | None = None, inputs: Tensor | None = None, seed: int = 0
) -> PiecewiseLinear:
    """Train the table of a function, on uniform samples of its range or on recorded inputs; returns float64.

    Inputs and outputs are normalized while training, since breakpoints far from 1 are out of Adam's reach. All seeds
    are trained side by side; the best table is selected with its asymptotes pinned.
    """
    training = training or TableTraining()
    x = target.samples(training.samples, seed) if inputs is None else _mix(target, inputs, training.samples, seed)
    low, high = float(x.min()), float(x.max())
    center, half, y = (high + low) / 2, (high - low) / 2, target.function(x)
    amplitude = float(y.abs().max()) or 1.0
    samples = ((x - center) / half).float(), (y / amplitude).float()
    curvature = target.function(torch.linspace(low, high, _GRID, dtype=torch.float64)).diff(n=2).abs()
    generator = torch.Generator().manual_seed(seed)
    initial = _initial_networks(*samples, curvature, target.flat, training, generator)
    trained = _train(*samples, initial, training, generator)
    networks = []
    for weight, bias, *output in (initial, trained):
        fitted = _fit_output(*samples, weight, bias, training.fit_iterations)
        networks += [*zip(weight, bias, *output, strict=True), *zip(weight, bias, *fitted, strict=True)]
    tables = [
        PiecewiseLinear.of_relu_network(
            weight / half, bias - weight * (center / half), output_weight * amplitude, float(output_bias) * amplitude
        ).pin(target.left, target.right)
        for weight, bias, output_weight, output_bias in networks
    ]
    return min(tables, key=lambda table: float((table(x) - y).abs().mean()))


def _mix(target: TableFunction, inputs: Tensor, count: int, seed: int) -> Tensor:
    """Draw samples of recorded inputs, and a tenth of uniform ones, so that the table holds on its range elsewhere."""
    recorded = inputs.detach().flatten().double()
    if len(recorded) == 0 or not bool(recorded.isfinite().all()):
        raise ConfigError("the inputs that a table is trained on must be finite, and at least one.")
    picks = torch.randint(len(recorded), (count,), generator=torch.Generator().manual_seed(seed))
    return torch.cat((recorded[picks], target.samples(max(count // 10, 2), seed)))


def _initial_networks(
    x: Tensor, y: Tensor, curvature: Tensor, flat: str | None, training: TableTraining, generator: torch.Generator
) -> list[Tensor]:
    """Place the breakpoints where the function bends, and solve for the output weights by least squares.

    The density (p |f''|)^(1/3), for inputs of density p, minimizes the mean error of many segments. The first seed
    takes its quantiles, the others jitter them within their strata. Breakpoints at random over a wide range would be
    dead entries: almost all of exp on (-256, 0) is flat.
    """
    units = training.entries - 1
    bins = torch.histc(x, _BINS, -1, 1).double()
    grid = torch.linspace(-1, 1, len(curvature), dtype=torch.float64)
    density = (curvature * bins[((grid + 1) / 2 * _BINS).long().clamp(max=_BINS - 1)]) ** (1 / 3)
    cumulative = (density + 1e-3 * density.mean() + 1e-30).cumsum(0)
    jitter = torch.rand(training.seeds, units, generator=generator, dtype=torch.float64)
    jitter[0] = 0.5
    quantiles = (torch.arange(units) + jitter) / units
    position = grid[torch.searchsorted(cumulative / cumulative[-1], quantiles).clamp(max=len(grid) - 1)]
    if flat is None:
        position[:, 0] = -1.0  # a unit that is active everywhere adds the slope which the leftmost segment lacks
    weight = torch.full_like(position, -1.0 if flat == "right" else 1.0)
    bias = -weight * position
    return [weight, bias, *_fit_output(x, y, weight, bias, iterations=1)]


def _fit_output(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Solve for the output weights [seeds, units] and biases [seeds] of least absolute error for given breakpoints.

    Least squares, reweighted by the inverse of the errors that the iteration before left; the first one has equal
    weights.
    """
    hidden = (weight.double()[:, None] * x.double()[:, None] + bias.double()[:, None]).relu()
    features = torch.cat((hidden, torch.ones_like(hidden[..., :1])), dim=-1)  # [seeds, samples, units + 1]
    importance = torch.ones_like(features[..., :1])
    for _ in range(iterations):
        gram = features.mT @ (importance * features)
        ridge = 1e-12 * gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[:, None, None]
        solution = torch.linalg.solve(
            gram + ridge * torch.eye(gram.shape[-1], dtype=gram.dtype), features.mT @ (importance * y.double()[:, None])
        )
        errors = (features @ solution - y.double()[:, None]).abs()
        importance = 1 / errors.clamp(min=_LEAST_ERROR)
    return solution[:, :-1, 0], solution[:, -1, 0]


def _train(
    x: Tensor, y: Tensor, initial: list[Tensor], training: TableTraining, generator: torch.Generator
) -> list[Tensor]:
    """Train one network per seed; `initial` is weight, bias, output weight [seeds, units] and output bias [seeds]."""
    parameters = [tensor.float().requires_grad_() for tensor in initial]
    weight, bias, output_weight, output_bias = parameters
    optimizer = torch.optim.Adam(parameters, lr=training.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps, training.min_learning_rate)
    for _ in range(training.steps):
        batch = torch.randint(len(x), (training.batch_size,), generator=generator)
        hidden = torch.addcmul(bias[:, None], weight[:, None], x[batch][:, None]).relu()  # [seeds, samples, units]
        predicted = (hidden @ output_weight[:, :, None])[..., 0] + output_bias[:, None]
        loss = (predicted - y[batch]).abs().mean(dim=1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return [parameter.detach().double() for parameter in parameters]
