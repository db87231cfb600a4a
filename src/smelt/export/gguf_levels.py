"""Convert packed layers to GGML blocks exactly: integer levels times a float16 step.

A group of any multiple of 32 becomes blocks of 32 with the same scale, which is exact. Levels from -8 to 7 are Q4_0, to
15 Q5_0, to 127 Q8_0. Weights with zero points are Q4_1 if the minimum is a float16 number; otherwise their levels are
signed and need the next larger type: more bits, the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.errors import FormatError
from smelt.export.gguf_blocks import BLOCK, Levels, lay_q4_0, lay_q4_1, lay_q5_0, lay_q8_0
from smelt.models.gguf.blocks import Bytes, Floats
from smelt.models.quantized import QuantizedLinear
from smelt.numerics.catalog import format_name
from smelt.numerics.format import QuantizedTensor
from smelt.numerics.integer import DenormalInteger, Integer
from smelt.numerics.scaled import Scaled, Ternary

_RANGES = {"Q4_0": (8, lay_q4_0), "Q5_0": (16, lay_q5_0), "Q8_0": (128, lay_q8_0)}
_WIDEST = 8  # element values are tried as multiples of 1/8 at most


@dataclass(frozen=True)
class Blocks:
    """A matrix as levels, with one step per block of 32, and the type that represents it."""

    kind: str
    levels: Levels  # [rows, columns]
    step: Floats  # [rows, blocks of a row]
    minimum: Floats | None = None  # of Q4_1, [rows, blocks of a row]

    def to_bytes(self, rows: Tensor | None = None) -> Bytes:
        """Return the bytes, with rows in the given order if any."""
        order = slice(None) if rows is None else rows.numpy()
        levels, step = self.levels[order].reshape(-1, BLOCK), self.step[order].reshape(-1)
        if self.minimum is not None:
            return lay_q4_1(levels, step, self.minimum[order].reshape(-1))
        return _RANGES[self.kind][1](levels, step)


def exact_blocks(path: str, layer: QuantizedLinear) -> Blocks:
    """Return the blocks that represent a layer exactly, or raise FormatError with the reason."""
    form = layer.scheme.weight
    stored = {name: tensor.cpu() for name, tensor in layer.packed.tensors.items()}
    quantized = QuantizedTensor.from_packed(form, stored, layer.in_features)
    size = form.effective_group_size(layer.in_features)
    if size % BLOCK or layer.in_features % size:
        raise FormatError(
            f"{path} has groups of {size}, and a block of GGUF has {BLOCK} weights; quantize with a group_size of "
            f"{BLOCK} or a multiple of it, which must divide the {layer.in_features} inputs."
        )
    if has_fractions(layer):
        return _from_minimum(path, quantized, size)
    levels, step = _levels(path, quantized)
    per_block = step.expand(layer.out_features, -1).repeat_interleave(size // BLOCK, dim=1)  # [rows, blocks of a row]
    if not torch.equal(per_block.half().float(), per_block):
        raise FormatError(
            f"the scales of {path} are not float16 numbers, as GGUF needs; quantize with scales in float16 "
            f"(format {format_name(form).partition('@')[0]}@float16)."
        )
    lowest, highest = int(levels.min()), int(levels.max())
    shifted = _with_minimum(quantized, per_block, size)
    if shifted is not None and (lowest < -8 or highest > 7):
        return shifted
    for kind, (limit, _) in _RANGES.items():
        if -limit <= lowest and highest < limit:
            return Blocks(kind, levels.to(torch.int16).numpy(), per_block.numpy())
    raise FormatError(f"{path} has {form.bits} bits and zero points, which exceeds Q8_0; quantize it symmetrically.")


def has_fractions(layer: QuantizedLinear) -> bool:
    """Return whether the zero points are float32, converted from the minima of a GGUF file."""
    form = layer.scheme.weight
    return type(form) is Integer and form.zero_dtype == "float32"


def _from_minimum(path: str, quantized: QuantizedTensor, size: int) -> Blocks:
    """Convert codes from a GGUF file back to Q4_1, with zero points that come from float16 minima."""
    scale, zero = quantized.qparams.scale, quantized.qparams.zero
    assert zero is not None
    minimum = (-zero * scale).half().float()
    if (
        quantized.format.bits > 4
        or not torch.equal(scale.half().float(), scale)
        or not torch.equal(-minimum / scale, zero)
    ):
        raise FormatError(
            f"{path} is in {format_name(quantized.format)}, and Q4_1 has four bits with minima in float16."
        )
    step, minimum = (tensor.squeeze(-1).repeat_interleave(size // BLOCK, dim=1) for tensor in (scale, minimum))
    return Blocks("Q4_1", quantized.codes.to(torch.int16).numpy(), step.numpy(), minimum.numpy())


def _levels(path: str, quantized: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Return integer levels [rows, columns] and the step between them [rows or 1, groups]."""
    form, grid = quantized.format, quantized.qparams
    columns, size = quantized.codes.shape[-1], quantized.format.effective_group_size(quantized.codes.shape[-1])
    codes = quantized.codes.unflatten(-1, (-1, size))
    if isinstance(form, DenormalInteger):
        levels, step = form.doubled(codes, grid), grid.scale / 2
    elif isinstance(form, Integer) and form.zero_dtype == "code":
        levels, step = codes.float() - form.zero_point(grid), grid.scale
    elif type(form) in (Scaled, Ternary) and (parts := _parts(form)):  # type: ignore[arg-type]
        levels, step = form.elements.decode(codes) * parts, grid.scale / parts  # type: ignore[attr-defined]
    else:
        raise FormatError(
            f"{path} is in {format_name(form)}, whose values are not integer multiples of a float16; GGUF supports "
            "int2 to int8, dint, ternary and mxfp4, or export the unquantized model with --type."
        )
    return levels.flatten(-2)[..., :columns], step.squeeze(-1)


def _parts(form: Scaled) -> int:
    """Return the smallest factor that makes every element value an integer; 0 if none is small enough."""
    values = torch.tensor([value for value in form.elements.values if value == value])
    fitting = (parts for parts in (1, 2, 4, _WIDEST) if bool((values * parts == (values * parts).round()).all()))
    parts = next(fitting, 0)
    return parts if float(values.abs().max()) * parts <= 127 else 0


def _with_minimum(quantized: QuantizedTensor, per_block: Tensor, size: int) -> Blocks | None:
    """Return Q4_1 blocks if the codes have at most four bits and every minimum is exactly a float16; else None."""
    form, grid = quantized.format, quantized.qparams
    if type(form) is not Integer or form.symmetric or form.bits > 4 or grid.zero is None:
        return None
    zero = grid.zero.squeeze(-1).expand(per_block.shape[0], -1).repeat_interleave(size // BLOCK, dim=1)
    minimum = -zero * per_block
    if not torch.equal(minimum.half().float(), minimum):
        return None
    return Blocks("Q4_1", quantized.codes.to(torch.int16).numpy(), per_block.numpy(), minimum.numpy())
