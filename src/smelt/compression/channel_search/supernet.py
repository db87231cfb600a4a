"""The supernet of a channel search: a network whose convolution blocks compute with several widths at once.

A part has candidate widths c_1 < ... < c_K, which share the filters of one convolution: a candidate computes with the
first c_j of them and has a batch norm of its own. For a set I of candidates with weights w_j, the part returns

    sum over j in I of w_j CWI(norm_j(y[:c_j]), max of I),

where CWI is channel-wise interpolation. Candidates that may be added later exist from the start, unused, so that
parameters and the states of their optimizer keep their shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compression.distillation.fake_quantize import FakeQuantizedLayer, prepare
from smelt.compression.distillation.quantizers import ActivationQuantizer, WeightQuantizer
from smelt.models.anatomy import Anatomy, Part
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.quantized_network import replace_module
from smelt.models.surgery import keep_units, widen_channels


def interpolate_channels(x: Tensor, channels: int) -> Tensor:
    """Return images [batch, channels, height, width] with another number of channels (CWI).

    Output channel i is the mean of the input channels that its share of the axis overlaps: adaptive average pooling.
    """
    if x.shape[1] == channels:
        return x
    return F.conv2d(x, _pooling_matrix(x.shape[1], channels, x.device).to(x.dtype)[:, :, None, None])


@lru_cache(maxsize=4096)
def _pooling_matrix(inputs: int, outputs: int, device: torch.device) -> Tensor:
    """Return the matrix [outputs, inputs] of adaptive average pooling."""
    matrix = torch.zeros(outputs, inputs)
    for row in range(outputs):
        start, stop = row * inputs // outputs, -(-(row + 1) * inputs // outputs)
        matrix[row, start:stop] = 1 / (stop - start)
    return matrix.to(device)


class WidthChoice:
    """The candidate widths of a part, their logits, and the candidates of the next forward pass.

    The logits are on CPU: the set that is drawn from them decides the shapes of the pass.
    """

    def __init__(self, part: Part, candidates: Sequence[int], count: int, generator: torch.Generator) -> None:
        self.name, self.before, self.candidates = part.name, part.units, tuple(candidates)
        self.count = count  # of the candidates that can be chosen; the others may be added
        self.logits = (0.01 * torch.randn(len(candidates), generator=generator)).requires_grad_()
        self.chosen: tuple[int, ...] = (0,)  # positions of candidates
        self.weights: Tensor | None = None  # of the chosen candidates: [chosen], None for a single one

    @property
    def widest(self) -> int:
        """The channels of the next pass."""
        return max(self.candidates[position] for position in self.chosen)

    @property
    def probabilities(self) -> Tensor:
        """softmax(logits) over the candidates that can be chosen: [count]."""
        return self.logits[: self.count].softmax(0)

    @property
    def best(self) -> int:
        """The position of the most probable candidate."""
        return int(self.logits[: self.count].argmax())

    def expected(self) -> Tensor:
        """Return the expected number of channels, []."""
        return (self.probabilities * torch.tensor(self.candidates[: self.count], dtype=torch.float32)).sum()

    def choose(self, position: int) -> None:
        """Compute with one candidate from now on."""
        self.chosen, self.weights = (position,), None

    def sample(self, temperature: float, size: int, generator: torch.Generator) -> None:
        """Draw a set of candidates from a Gumbel softmax; their weights are its values, normalized in the set."""
        uniform = torch.rand(self.count, generator=generator).clamp(min=1e-20)
        gumbel = -(-uniform.log()).clamp(min=1e-20).log()
        logits = (self.logits[: self.count].log_softmax(0) + gumbel) / temperature
        chosen = torch.multinomial(
            logits.detach().softmax(0) + 1e-7, min(size, self.count), replacement=False, generator=generator
        )
        self.chosen, self.weights = tuple(chosen.tolist()), logits[chosen].softmax(0)

    def expand(self) -> int:
        """Add the next candidate, as likely as the largest one; return its width."""
        with torch.no_grad():
            self.logits[self.count] = self.logits[self.count - 1]
        self.count += 1
        return self.candidates[self.count - 1]


class SearchedConvolution(FakeQuantizedLayer):
    """A fake-quantized convolution with the first filters of its choice, for as many channels as its input has."""

    def __init__(
        self, layer: nn.Conv2d, path: str, weights: WeightQuantizer, inputs: ActivationQuantizer | None,
        choice: WidthChoice | None,
    ) -> None:  # fmt: skip
        super().__init__(layer, path, weights, inputs)
        self.choice = choice  # of the output channels; None: all

    def forward(self, x: Tensor) -> Tensor:
        if self.inputs is not None and self.inputs_enabled:
            x = self._fake_quantize_inputs(x.float()).to(x.dtype)
        assert self.shape is not None
        rows = self.shape.out_channels if self.choice is None else self.choice.widest
        shape = replace(self.shape, out_channels=rows)
        weight = shape.to_matrix(self.layer.weight[:rows, : x.shape[1]])
        weight = self.weights.fake_quantize(weight, dict(self.weight_learned.items())).to(x.dtype)
        bias = None if self.layer.bias is None else self.layer.bias[:rows]
        return shape.convolve(x, weight, bias)


class SearchedNorm(nn.Module):
    """A batch norm for each candidate; returns the weighted sum of the chosen ones, interpolated to the widest."""

    def __init__(self, norm: nn.BatchNorm2d, choice: WidthChoice) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_resized_norm(norm, width) for width in choice.candidates)
        self.choice = choice

    def forward(self, x: Tensor) -> Tensor:
        choice = self.choice
        if choice.weights is None:
            only: Tensor = self.norms[choice.chosen[0]](x)
            return only
        total: Any = 0
        for weight, position in zip(choice.weights.to(x.device, x.dtype), choice.chosen, strict=True):
            normed = self.norms[position](x[:, : choice.candidates[position]])
            total = total + weight * interpolate_channels(normed, choice.widest)
        return torch.as_tensor(total)


class Supernet:
    """Replaces the convolutions and norms of all parts by searched ones, and other convolutions of the blocks by
    fake-quantized ones; `derive` undoes it with one width per part."""

    def __init__(
        self, anatomy: Anatomy, choices: Sequence[WidthChoice], weights: WeightQuantizer,
        inputs: ActivationQuantizer | None, others: Sequence[str],
    ) -> None:  # fmt: skip
        self.network, self.choices = anatomy.network, list(choices)
        names = {id(module): name for name, module in self.network.named_modules()}
        self._norms = [names[id(part.norm)] for part in anatomy.parts]
        _sort_channels(anatomy)
        for index, choice in enumerate(choices):
            widen_channels(anatomy_of(self.network).parts[index], choice.candidates[-1])
        outputs = {part.input_projections[0].path: choice for part, choice in zip(anatomy.parts, choices, strict=True)}
        self._convolutions = list(dict.fromkeys([*outputs, *(part.output.path for part in anatomy.parts)]))
        for path in self._convolutions:
            layer = self.network.get_submodule(path)
            assert isinstance(layer, nn.Conv2d)
            replace_module(self.network, path, SearchedConvolution(layer, path, weights, inputs, outputs.get(path)))
        for path, choice in zip(self._norms, choices, strict=True):
            norm = self.network.get_submodule(path)
            assert isinstance(norm, nn.BatchNorm2d)
            replace_module(self.network, path, SearchedNorm(norm, choice))
        self._others = prepare(self.network, dict.fromkeys(others, weights), inputs)

    def sample(self, temperature: float, size: int, generator: torch.Generator) -> None:
        for choice in self.choices:
            choice.sample(temperature, size, generator)

    def choose(self, positions: Sequence[int]) -> None:
        for choice, position in zip(self.choices, positions, strict=True):
            choice.choose(position)

    def derive(self, positions: Sequence[int]) -> None:
        """Leave a plain network with these candidates, and the weights they have in the supernet."""
        for path in self._convolutions:
            layer = self.network.get_submodule(path).layer
            assert isinstance(layer, nn.Conv2d)
            replace_module(self.network, path, layer)
        for layer in self._others:
            replace_module(self.network, layer.path, layer.layer)
        for path, position in zip(self._norms, positions, strict=True):
            norms = self.network.get_submodule(path).norms
            assert isinstance(norms, nn.ModuleList)
            replace_module(self.network, path, norms[position])
        for index, (choice, position) in enumerate(zip(self.choices, positions, strict=True)):
            keep_units(self.network, anatomy_of(self.network).parts[index], range(choice.candidates[position]))


def _sort_channels(anatomy: Anatomy) -> None:
    """Sort the channels of each part by what they contribute, since narrow candidates keep the first ones."""
    for index in range(len(anatomy.parts)):
        part = anatomy_of(anatomy.network).parts[index]
        columns = part.output.weight.detach().transpose(0, 1).flatten(1)
        contribution = part.norm.weight.detach().abs() * columns.norm(dim=1)
        keep_units(anatomy.network, part, contribution.argsort(descending=True, stable=True).tolist())


@torch.no_grad()
def _resized_norm(norm: nn.BatchNorm2d, channels: int) -> nn.BatchNorm2d:
    """Return a batch norm of the first channels."""
    resized = copy.deepcopy(norm)
    resized.num_features = channels
    resized.weight, resized.bias = (nn.Parameter(tensor[:channels].clone()) for tensor in (norm.weight, norm.bias))
    for name in ("running_mean", "running_var"):
        resized.register_buffer(name, getattr(norm, name)[:channels].clone())
    return resized
