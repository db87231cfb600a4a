"""The layers of a neural implant: a pointwise replacement of units that were removed from a part.

In a convolution, the implanted channels come from a 1x1 convolution over the same input. Beside attention or a
feed-forward, a low-rank product reads their input and is added to their output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.errors import ModelError


class ImplantedConv2d(nn.Module):
    """A convolution whose last output channels are computed by a 1x1 kernel: `kept` and `implant` side by side."""

    def __init__(self, kept: nn.Conv2d, implant: nn.Conv2d) -> None:
        super().__init__()
        self.kept, self.implant = kept, implant

    @classmethod
    def split(cls, convolution: nn.Conv2d, channels: int) -> ImplantedConv2d:
        """Split a convolution: its last `channels` kernels keep only their center."""
        kernel, stride = convolution.kernel_size, convolution.stride
        start = convolution.out_channels - channels
        kept = _convolution_of(convolution.weight[:start], convolution, padding=convolution.padding, stride=stride)
        center = convolution.weight[start:, :, kernel[0] // 2 : kernel[0] // 2 + 1, kernel[1] // 2 : kernel[1] // 2 + 1]
        implant = _convolution_of(center, convolution, padding=(0, 0), stride=stride)
        return cls(kept, implant).train(convolution.training)

    @property
    def out_channels(self) -> int:
        return self.kept.out_channels + self.implant.out_channels

    @property
    def weight(self) -> Tensor:
        """The weight of the equal dense convolution, [out, in, height, width]: a copy, the implant's taps centered."""
        height, width = self.kept.kernel_size
        above, left = height // 2, width // 2
        taps = F.pad(self.implant.weight, (left, width - 1 - left, above, height - 1 - above))
        return torch.cat([self.kept.weight, taps])

    @property
    def bias(self) -> None:
        return None

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.kept(images), self.implant(images)], 1)


def _convolution_of(weight: Tensor, like: nn.Conv2d, *, padding: object, stride: object) -> nn.Conv2d:
    """Return a convolution without bias that has this weight."""
    convolution = nn.utils.skip_init(
        nn.Conv2d, like.in_channels, len(weight), tuple(weight.shape[2:]), stride=stride, padding=padding, bias=False,
        device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    convolution.weight = nn.Parameter(weight.detach().clone(), requires_grad=like.weight.requires_grad)
    module: nn.Conv2d = convolution
    return module


class ImplantInput:
    """Holds the input of a part until its implant reads it."""

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def store(self, value: Tensor) -> None:
        self._input = value

    def take(self) -> Tensor:
        value, self._input = self._input, None
        if value is None:
            raise ModelError("an implant ran before the layer whose input it reads; run the whole block.")
        return value


class ImplantReader(nn.Module):
    """An input projection, as `base`, that shows its input to an implant."""

    def __init__(self, base: nn.Module, shared: ImplantInput) -> None:
        super().__init__()
        self.base, self.shared = base, shared

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.shared.store(hidden_states)
        output: Tensor = self.base(hidden_states)
        return output


class ImplantedOutput(nn.Module):
    """An output projection, as `base`, to whose result a low-rank product of the part's input is added."""

    def __init__(self, base: nn.Module, shared: ImplantInput, down: nn.Linear, up: nn.Linear) -> None:
        super().__init__()
        self.base, self.shared, self.down, self.up = base, shared, down, up

    @property
    def rank(self) -> int:
        return self.down.out_features

    @property
    def factors(self) -> tuple[nn.Linear, nn.Linear]:
        return self.down, self.up

    def forward(self, activations: Tensor) -> Tensor:
        output: Tensor = self.base(activations) + self.up(self.down(self.shared.take()))
        return output


WRAPPERS = (ImplantReader, ImplantedOutput)  # of a layer that is their `base`
