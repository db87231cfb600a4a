"""Range clipping: clamp activations to the range seen on calibration data (Chen et al., Ranger, DSN 2021).

A flipped exponent bit makes one weight, and with it one output channel, astronomically large. Clamping the outputs of
the layers that read weights, of normalizations and of activation functions keeps it in that channel at a usual
magnitude. No retraining; outputs that are not a number become 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import activation as torch_activations
from transformers import activations as hf_activations
from transformers.pytorch_utils import Conv1D

from smelt.errors import ConfigError
from smelt.models.quantized import QuantizedLinear

_WEIGHTED = (nn.Linear, Conv1D, QuantizedLinear, nn.Conv1d, nn.Conv2d, nn.Embedding)
_ACTIVATIONS = {torch_activations.__name__, hf_activations.__name__}
Hook = Callable[[nn.Module, Any, Tensor], Tensor | None]


@dataclass(frozen=True)
class ActivationRanges:
    """The smallest and largest output of each clipped module, by path."""

    bounds: dict[str, tuple[float, float]]

    def widened(self, margin: float) -> ActivationRanges:
        """Move each bound away from zero by the factor `margin`."""
        if margin < 1:
            raise ConfigError(f"a margin of {margin:g} would clip the calibration data itself; use 1 or more.")
        return ActivationRanges(
            {
                path: (low * margin if low < 0 else low / margin, high * margin if high > 0 else high / margin)
                for path, (low, high) in self.bounds.items()
            }
        )


def clipped_modules(network: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose outputs are clipped: weight layers, normalizations and activation functions."""
    return {
        path: module
        for path, module in network.named_modules()
        if isinstance(module, _WEIGHTED) or _is_norm_or_activation(module)
    }


def profile_ranges(network: nn.Module, forwards: Iterable[Callable[[], object]]) -> ActivationRanges:
    """Run the forwards and record the range of each clipped module's output. The forwards set mode and gradients."""
    bounds: dict[str, tuple[float, float]] = {}

    def recorder(path: str) -> Hook:
        def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if isinstance(output, Tensor) and output.numel():
                low, high = (float(extreme) for extreme in torch.aminmax(output.detach().float()))
                before = bounds.get(path, (low, high))
                bounds[path] = (min(low, before[0]), max(high, before[1]))

        return record

    with _hooks({module: recorder(path) for path, module in clipped_modules(network).items()}):
        for forward in forwards:
            forward()
    if not bounds:
        raise ConfigError("no activation was recorded: range clipping needs calibration data and layers with weights.")
    return ActivationRanges(bounds)


@contextmanager
def range_clipping(network: nn.Module, ranges: ActivationRanges) -> Iterator[None]:
    """Clamp the outputs of the profiled modules inside the context."""

    def clamp(low: float, high: float) -> Hook:
        def apply(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
            if not isinstance(output, Tensor):
                return None
            if torch.is_grad_enabled() and output.requires_grad:
                return output.clamp(low, high).nan_to_num(nan=0.0)
            return output.clamp_(low, high).nan_to_num_(nan=0.0)

        return apply

    modules = dict(network.named_modules())
    with _hooks({modules[path]: clamp(*bounds) for path, bounds in ranges.bounds.items()}):
        yield


def _is_norm_or_activation(module: nn.Module) -> bool:
    if next(module.children(), None) is not None:
        return False
    return "Norm" in type(module).__name__ or type(module).__module__ in _ACTIVATIONS


@contextmanager
def _hooks(hooks: dict[nn.Module, Hook]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, hook in hooks.items():
            stack.callback(module.register_forward_hook(hook).remove)
        yield
