"""The rounding at the end of a method that only prepares the weights: to nearest, or with GPTQ's error feedback."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from smelt.calibrate.observe import SecondMoment
from smelt.numerics.format import Format, Quantized
from smelt.quantize.feedback import round_group
from smelt.quantize.frame import BlockWork
from smelt.quantize.layers import Group
from smelt.quantize.nearest import nearest

ROUNDINGS = ("rtn", "gptq")


def rounded(
    work: BlockWork, rounding: str, format_of: Callable[[Group], Format]
) -> Iterator[tuple[Group, list[Quantized]]]:
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
