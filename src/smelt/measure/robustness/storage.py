"""The bits that a model ships: packed codes, quantization parameters and float tensors, addressable one by one.

A fault must hit the storage: a flip in a float copy of a quantized weight measures a model that nobody runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from torch import Tensor, nn

from smelt.models.quantized import QPARAM_NAMES, STATIC_SCALE, STATIC_ZERO, QuantizedLinear

Part = Literal["codes", "qparams", "floats"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor of a network as stored. Bit `b` of element `e` of a row starts at bit `e * element_bits + b`.

    Rows are whole bytes: the bits after the last code of a row are padding, which is stored and can be hit like any
    other bit.
    """

    module: nn.Module
    attribute: str
    layer: str  # the path of the module
    part: Part
    element_bits: int
    columns: int  # elements per row

    @property
    def tensor(self) -> Tensor:
        value = getattr(self.module, self.attribute)
        assert isinstance(value, Tensor)
        return value

    @property
    def num_bits(self) -> int:
        return 8 * self.tensor.numel() * self.tensor.element_size()

    @property
    def num_elements(self) -> int:
        return self.num_bits // self._row_bits * self.columns

    @property
    def _row_bits(self) -> int:
        return -(-self.columns * self.element_bits // 8) * 8

    def bit_positions(self, elements: np.ndarray, bit: int) -> np.ndarray:
        """Return the positions of one bit (0 is the lowest) of these elements within the tensor. [elements]"""
        if not 0 <= bit < self.element_bits:
            raise ValueError(f"an element of {self.element_bits} bits has no bit {bit}")
        return elements // self.columns * self._row_bits + elements % self.columns * self.element_bits + bit


def stored_tensors(network: nn.Module) -> list[StoredTensor]:
    """List everything that is stored for a network, each shared tensor once.

    Buffers that are not saved, and integer counters, are not part of a model's file.
    """
    seen: set[int] = set()
    result = []
    for path, module in network.named_modules():
        for entry in _tensors_of(path, module):
            if id(entry.tensor) not in seen and entry.num_bits:
                seen.add(id(entry.tensor))
                result.append(entry)
    return result


def select(
    tensors: Sequence[StoredTensor], *, parts: Collection[Part] = PARTS, layers: Collection[str] | None = None
) -> list[StoredTensor]:
    """Return the tensors of these parts and, if given, of these layers."""
    return [entry for entry in tensors if entry.part in parts and (layers is None or entry.layer in layers)]


def _tensors_of(path: str, module: nn.Module) -> Iterator[StoredTensor]:
    quantized = module if isinstance(module, QuantizedLinear) else None
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_floating_point():
            yield _float_tensor(path, module, name, parameter)
    for name, buffer in module._buffers.items():
        if buffer is None or name in module._non_persistent_buffers_set:
            continue
        if quantized is not None and name == "codes":
            yield StoredTensor(module, name, path, "codes", quantized.scheme.weight.bits, quantized.in_features)
        elif quantized is not None and name in (*QPARAM_NAMES, STATIC_SCALE, STATIC_ZERO):
            yield StoredTensor(module, name, path, "qparams", 8 * buffer.element_size(), 1)
        elif buffer.is_floating_point():
            yield _float_tensor(path, module, name, buffer)


def _float_tensor(path: str, module: nn.Module, name: str, tensor: Tensor) -> StoredTensor:
    return StoredTensor(module, name, path, "floats", 8 * tensor.element_size(), 1)
