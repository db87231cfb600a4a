"""Linear layers and convolutions whose GEMMs run in a low precision, and their selection in a network.

A layer keeps its identity, parameters and hooks: only its class changes, and it gets a module `gemm`, whose buffers are
saved in checkpoints under the layer's name. `LowPrecisionTraining.restore` turns it into the plain layer again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

GEMM_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, Conv1D)


class LowPrecisionGemm(nn.Module, ABC):
    """The forward, backward and gradient GEMM of one layer."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply x [rows, in] by weight [out, in] -> [rows, out], differentiably."""

    def conv2d(self, x: Tensor, weight: Tensor, conv: nn.Conv2d) -> Tensor:
        """Convolve x [batch, in, height, width] -> [batch, out, height, width], differentiably."""
        columns = unfold(x, conv)
        return to_images(self.linear(columns, weight.flatten(1)), len(x), output_size(x, conv))


class GemmLinear(nn.Linear):
    """A linear layer that multiplies by its `gemm`."""

    gemm: LowPrecisionGemm

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():
            return F.linear(x, self.weight, self.bias)
        y = self.gemm.linear(x.reshape(-1, x.shape[-1]), self.weight)
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)


class GemmConv2d(nn.Conv2d):
    """A convolution that multiplies by its `gemm`."""

    gemm: LowPrecisionGemm

    def forward(self, x: Tensor) -> Tensor:
        y = self.gemm.conv2d(x, self.weight, self)
        return y if self.bias is None else y + self.bias.to(y.dtype).view(-1, 1, 1)


class GemmConv1D(Conv1D):
    """A linear layer of GPT-2, with weight [in, out], that multiplies by its `gemm`."""

    gemm: LowPrecisionGemm

    def forward(self, x: Tensor) -> Tensor:
        y = self.gemm.linear(x.reshape(-1, x.shape[-1]), self.weight.t())
        return (y + self.bias.to(y.dtype)).reshape(*x.shape[:-1], self.nf)


_CLASSES: dict[type, Any] = {nn.Linear: GemmLinear, nn.Conv2d: GemmConv2d, Conv1D: GemmConv1D}


@dataclass
class LowPrecisionTraining:
    """The layers of a network that were converted, and those that were not, with the reason."""

    converted: dict[str, nn.Module] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def convert(self, name: str, layer: nn.Module, gemm: LowPrecisionGemm) -> None:
        layer.__class__ = _CLASSES[type(layer)]
        layer.gemm = gemm
        self.converted[name] = layer

    def restore(self) -> None:
        """Turn the converted layers into plain ones with the same parameters."""
        for layer in self.converted.values():
            del layer.gemm
            layer.__class__ = type(layer).__base__  # type: ignore[assignment]
        self.converted = {}

    def on_load(self) -> None:
        """Read what depends on loaded buffers."""

    def after_step(self) -> None:
        """Update the state of layers after an optimizer step."""

    def to_json(self) -> dict[str, Any]:
        """Describe the layers for run.json."""
        return {"converted": len(self.converted), "kept": self.kept}


def gemm_layers(network: nn.Module) -> dict[str, Any]:
    """Return the linear layers and convolutions of a network by name."""
    return {name: module for name, module in network.named_modules() if isinstance(module, GEMM_LAYERS)}


def first_and_last(network: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the layer that reads the network's input, None behind an embedding, and the one that writes its output."""
    layers = list(gemm_layers(network).values())
    if not layers:
        return None, None
    reads_tokens = any(isinstance(module, nn.Embedding) for module in network.modules()) and (
        getattr(network, "main_input_name", "input_ids") == "input_ids"
    )
    output_embeddings: Any = getattr(network, "get_output_embeddings", lambda: None)
    head = output_embeddings()
    return None if reads_tokens else layers[0], layers[-1] if head is None else head


def unsupported(layer: nn.Module) -> str | None:
    """Return why the class of a layer cannot be converted; None if it can."""
    if type(layer) not in _CLASSES:
        return f"{type(layer).__name__} is not supported"
    if isinstance(layer, nn.Conv2d) and (
        layer.groups > 1 or isinstance(layer.padding, str) or layer.padding_mode != "zeros"
    ):
        return "groups, named and nonzero padding are not supported"
    return None


def unfold(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Return the inputs of every output position (im2col): [batch, in, height, width] -> [positions, in * kernel]."""
    assert not isinstance(conv.padding, str)
    columns = F.unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride)
    return columns.transpose(1, 2).flatten(0, 1)


def to_images(rows: Tensor, batch: int, size: tuple[int, int]) -> Tensor:
    """Turn [batch * height * width, channels] into [batch, channels, height, width]."""
    return rows.view(batch, *size, -1).permute(0, 3, 1, 2)


def output_size(x: Tensor, conv: nn.Conv2d) -> tuple[int, int]:
    """Return height and width of the output."""
    assert not isinstance(conv.padding, str)
    sizes = [
        (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for size, padding, dilation, kernel, stride in zip(
            x.shape[2:], conv.padding, conv.dilation, conv.kernel_size, conv.stride, strict=True
        )
    ]
    return sizes[0], sizes[1]


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a GEMM of x returns under the current autocast context."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
