"""Gradient-guided bit flips: progressive bit search (Rakin et al., Bit-Flip Attack, ICCV 2019) on integer codes.

Each iteration flips the bits that the gradient says raise the loss most, in the one layer where the loss really rises
most. Random flips and chosen ones rank formats differently: integers survive many random flips and few chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smelt.errors import ModelError
from smelt.measure.robustness.bit_flips import flipped_bits
from smelt.measure.robustness.storage import StoredTensor, select, stored_tensors
from smelt.measure.robustness.straight_through import straight_through
from smelt.models.quantized import QuantizedLinear, quantized_layers
from smelt.numerics.integer import DenormalInteger, Integer

_TOP_WEIGHTS = 10  # candidates per layer, those with the largest gradients
_CHANCE_FACTOR = 1.1  # the search ends when accuracy is at most this times chance
Loss = Callable[[], tuple[Tensor, float]]  # the loss of the attack batch, and its accuracy


@dataclass(frozen=True)
class BitSearchStep:
    """One committed step: the bits flipped in one layer, and the loss and accuracy after it."""

    layer: str
    flips: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class BitSearchResult:
    """The committed steps. `reached_chance` says whether accuracy fell to about chance."""

    loss: float  # before the first flip
    accuracy: float
    steps: tuple[BitSearchStep, ...]
    reached_chance: bool
    bits: int  # that could be flipped

    @property
    def flips(self) -> int:
        return sum(step.flips for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "steps": [asdict(step) for step in self.steps], "flips": self.flips}


def progressive_bit_search(
    network: nn.Module, loss: Loss, *, classes: int, max_steps: int = 20, max_layers: int | None = None
) -> BitSearchResult:
    """Search the fewest bits of integer codes whose flips bring accuracy down to chance; all flips are undone.

    `loss` runs the network on the attack batch in eval mode. `max_layers` tries only the layers with the largest
    predicted gain in each step; None tries all, as published.
    """
    search = _Search(network, loss)
    with torch.no_grad():
        first, first_accuracy = search.measure()
    best, accuracy, steps = first, first_accuracy, list[BitSearchStep]()
    with ExitStack() as committed:
        while len(steps) < max_steps and accuracy > _CHANCE_FACTOR / classes:
            step = search.step(best, max_layers)
            if step is None:
                break
            layer, positions, best, accuracy = step
            committed.enter_context(flipped_bits([search.codes[layer]], positions))
            steps.append(BitSearchStep(layer, len(positions), best, accuracy))
    bits = sum(entry.num_bits for entry in search.codes.values())
    return BitSearchResult(first, first_accuracy, tuple(steps), accuracy <= _CHANCE_FACTOR / classes, bits)


class _Search:
    """The codes that can be attacked, and the search for one step."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        self.network, self.loss = network, loss
        self.layers = integer_layers(network)
        if not self.layers:
            raise ModelError("the gradient-guided bit search needs weights in integer formats; this model has none.")
        self.codes: dict[str, StoredTensor] = {
            entry.layer: entry for entry in select(stored_tensors(network), parts=["codes"], layers=list(self.layers))
        }

    def measure(self) -> tuple[float, float]:
        """Return loss and accuracy; a loss that is not a number counts as infinite."""
        loss, accuracy = self.loss()
        value = float(loss)
        return (value if np.isfinite(value) else float("inf")), accuracy

    def step(self, loss: float, max_layers: int | None) -> tuple[str, np.ndarray, float, float] | None:
        """Return the layer, the bits to flip, and loss and accuracy after it; None if no flip raises the loss."""
        candidates = self._candidates()
        order = sorted(candidates, key=lambda path: -float(candidates[path][1][:1].sum()))[:max_layers]
        for count in range(1, _TOP_WEIGHTS + 1):
            trials = [self._try(path, candidates[path][0][:count]) for path in order if len(candidates[path][0])]
            raised = [trial for trial in trials if trial[2] > loss]
            if raised:
                return max(raised, key=lambda trial: trial[2])
        return None

    def _try(self, path: str, positions: np.ndarray) -> tuple[str, np.ndarray, float, float]:
        with flipped_bits([self.codes[path]], positions), torch.no_grad():
            return path, positions, *self.measure()

    def _candidates(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return, per layer, the bits that raise the loss and their predicted gains, largest first."""
        with straight_through(self.network, weight_gradients=True) as weights, torch.enable_grad():
            loss, _ = self.loss()
            paths = list(self.layers)
            gradients = torch.autograd.grad(loss, [weights[path] for path in paths], allow_unused=True)
        return {
            path: self._bits_of(path, gradient)
            for path, gradient in zip(paths, gradients, strict=True)
            if gradient is not None
        }

    def _bits_of(self, path: str, gradient: Tensor) -> tuple[np.ndarray, np.ndarray]:
        layer, entry = self.layers[path], self.codes[path]
        quantized = layer.packed.unpack()
        per_code = (gradient.float() * _steps(layer)).nan_to_num(0.0, 0.0, 0.0).flatten()
        chosen = per_code.abs().topk(min(_TOP_WEIGHTS, per_code.numel())).indices
        codes = quantized.codes.flatten()[chosen].cpu().long()
        slopes = per_code[chosen].cpu()
        positions, gains = [], []
        for bit in range(layer.scheme.weight.bits):
            rises = 1 - 2 * ((codes >> bit) & 1)  # a set bit falls when flipped
            positions.append(entry.bit_positions(chosen.cpu().numpy(), bit))
            gains.append((slopes * rises * 2**bit).numpy())
        all_positions, all_gains = np.concatenate(positions), np.concatenate(gains)
        order = np.argsort(-all_gains, kind="stable")
        order = order[all_gains[order] > 0]
        return all_positions[order], all_gains[order]


def integer_layers(network: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the layers whose weights are affine functions of their codes, which excludes dINT, by path."""
    return {
        path: layer
        for path, layer in quantized_layers(network).items()
        if isinstance(layer.scheme.weight, Integer) and not isinstance(layer.scheme.weight, DenormalInteger)
    }


def _steps(layer: QuantizedLinear) -> Tensor:
    """Return by how much each weight changes per code. [out, in]"""
    quantized = layer.packed.unpack()
    scale = quantized.qparams.scale  # [out or 1, groups, 1]
    size = layer.input_group_size
    rows = scale.expand(layer.out_features, scale.shape[1], 1)
    return rows.repeat_interleave(size, dim=1)[:, : layer.in_features, 0]


def classification_loss(logits: Callable[[], Tensor], labels: Tensor) -> Loss:
    """Return the loss of a classifier whose `logits` on the attack batch are recomputed on every call."""

    def loss() -> tuple[Tensor, float]:
        scores = logits().float()
        finite = torch.isfinite(scores).all(dim=1)
        correct = (scores.argmax(dim=1) == labels) & finite
        return nn.functional.cross_entropy(scores, labels), float(correct.float().mean())

    return loss
