"""The rounding at the end of a method that only prepares the weights: to nearest, or with GPTQ's error feedback."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from smelt.compression.calibration.observe import SecondMoment
from smelt.compression.quantization.base import BlockWork
from smelt.compression.quantization.gptq_rounding import round_group
from smelt.compression.quantization.layers import Group
from smelt.compression.quantization.nearest import nearest
from smelt.numerics.format import Format, QuantizedTensor

ROUNDINGS = ("rtn", "gptq")


def rounded(
    work: BlockWork, rounding: str, format_of: Callable[[Group], Format]
) -> Iterator[tuple[Group, list[QuantizedTensor]]]:
    """Every group of a block with its matrices, rounded. The inputs are those of the block as it is now."""
    groups = work.groups
    moments = [SecondMoment() for _ in groups]
    if rounding == "gptq":
        work.observe(list(zip(groups, moments, strict=True)))
    for group, moment in zip(groups, moments, strict=True):
        if rounding == "gptq":
            yield group, round_group(group, moment, format_of(group))
        else:
            yield group, [nearest(layer.weight, format_of(group)) for layer in group.layers]
