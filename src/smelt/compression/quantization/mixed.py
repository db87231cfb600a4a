"""Mixed precision: assign bit widths by sensitivity, under an average number of bits.

Each layer group is quantized alone at every width, and the error at the output of its block is its sensitivity. An
integer program then chooses the widths, as in HAWQ-V3 (Yao et al., 2021), which takes sensitivities from the Hessian
instead. The average includes scales and zero points: it is the size on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

from smelt.compression.base import METHODS, CalibrationSize, MethodContext, ResourceEstimate, one_of, within
from smelt.compression.calibration.block_inputs import advance, capture_block_inputs, on_device
from smelt.compression.quantization.base import BlockWork, Quantization
from smelt.compression.quantization.gptq_rounding import ROUNDINGS, round_block
from smelt.compression.quantization.layers import LayerGroup, layer_groups
from smelt.compression.quantization.search_eval import BlockOutputError
from smelt.config import renamed
from smelt.errors import BudgetError, DataError, RecipeError
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.numerics.format import Format
from smelt.numerics.integer import Integer


@METHODS.register("mixed", paper="after Yao et al., 2021 (HAWQ-V3, arXiv 2011.10680)", needs=("calibration data",))
@dataclass(frozen=True)
class MixedPrecision(Quantization):
    """Use for the best quality at a fixed size: sensitive layers get more bits."""

    bits: float = 4.0  # type: ignore[assignment]  # mean per weight, scales and zero points included
    bit_widths: str = renamed("choices", default="2,3,4,8")  # widths to choose from
    rounding: str = "gptq"  # rtn or gptq
    search_tokens: int = renamed("tokens", default=4096)  # evaluated per trial, rounded to whole batches

    def __post_init__(self) -> None:
        if self.format is not None:
            raise RecipeError("mixed chooses among integer bit widths: set bit_widths, and leave format out.")
        if not all(choice.strip().isdecimal() for choice in self.bit_widths.split(",")):
            raise RecipeError(
                f"bit_widths of mixed are widths separated with commas, such as 2,3,4,8, not {self.bit_widths!r}."
            )
        super().__post_init__()
        one_of(self.name, "rounding", self.rounding, ROUNDINGS)
        within(self.name, "search_tokens", self.search_tokens, 1, 2**31)
        within(self.name, "bits", self.bits, 1.0, 16.0)

    @property
    def widths(self) -> list[int]:
        """Return the bit widths in ascending order."""
        return sorted({int(choice) for choice in self.bit_widths.split(",")})

    @property
    def formats(self) -> list[Format]:
        return [Integer(self.group_size, "float16", width, self.symmetric) for width in self.widths]

    @property
    def weight_format(self) -> Format:
        return self.formats[-1]

    def targets(self) -> dict[str, float]:
        return {"bits": self.bits}

    def bits_per_weight(self, rows: int, columns: int) -> float:
        return self.bits

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        groups = [group for block in anatomy.blocks for group in layer_groups(block)]
        least = sum(size_in_bits(group, self.formats[0]) for group in groups) / sum(map(num_weights, groups))
        if least > self.bits:
            raise BudgetError(
                f"mixed: the smallest width takes {least:.2f} bits per weight with its scales, more than the "
                f"{self.bits:g} allowed; allow more, add a smaller width or increase group_size."
            )

    def prepare(self, model: Model, context: MethodContext) -> dict[str, tuple[Format, list[float]]]:
        """Return the format of each group, by the path of its first layer, and its error at every width."""
        errors = context.checkpoint.load_facts("sensitivity")
        if errors is None:
            errors = self.sensitivity(model, context)
            context.checkpoint.save_facts("sensitivity", errors)
        groups = [group for block in model.anatomy.blocks for group in layer_groups(block)]
        costs = np.array([[size_in_bits(group, number_format) for number_format in self.formats] for group in groups])
        table = [errors[group.path] for group in groups]
        chosen = self._recorded_choice(context.choices.recorded("bit_widths"), groups)
        if chosen is None:
            chosen = assign_bit_widths(np.array(table), costs, self.bits * sum(map(num_weights, groups)))
        widths = {group.path: self.widths[choice] for group, choice in zip(groups, chosen, strict=True)}
        context.choices.record("bit_widths", widths)
        return {
            group.path: (self.formats[choice], row) for group, choice, row in zip(groups, chosen, table, strict=True)
        }

    def group_scheme(self, group: LayerGroup, prepared: dict[str, tuple[Format, list[float]]]) -> QuantizationScheme:
        return replace(self.scheme, weight=prepared[group.path][0])

    def _recorded_choice(self, widths: Any, groups: Sequence[LayerGroup]) -> Sequence[int] | None:
        """Return recorded bit widths as choices, after checking that they fit this network; None if there are none."""
        if widths is None:
            return None
        if not isinstance(widths, dict) or set(widths) != {group.path for group in groups}:
            raise RecipeError("the recorded bit widths do not fit this network.")
        if any(type(width) is not int or width not in self.widths for width in widths.values()):
            raise RecipeError(f"the recorded bit widths must be among {self.bit_widths}.")
        return [self.widths.index(widths[group.path]) for group in groups]

    def sensitivity(self, model: Model, context: MethodContext) -> dict[str, list[float]]:
        """Return, per group and width, the squared error of the block's output relative to its squared norm."""
        block_inputs = capture_block_inputs(
            model.anatomy, context.batches, limit=context.memory_limit, folder=context.folder, device=context.device
        )
        errors: dict[str, list[float]] = {}
        for block in context.progress.track(model.anatomy.blocks, f"{self.name}: sensitivity"):
            with on_device(block.module, context.device), torch.no_grad():
                groups = layer_groups(block)
                for group in groups:
                    output_error = BlockOutputError(block_inputs, block, group, self.search_tokens)
                    errors[group.path] = [self._error(group, output_error, choice) for choice in self.formats]
                errors |= estimate_unreached(groups, errors)
                advance(block_inputs, block)
        return errors

    def _error(self, group: LayerGroup, output_error: BlockOutputError, number_format: Format) -> float:
        error = (
            output_error.error([number_format.fake_quantize(layer.weight.float()) for layer in group.layers])
            / output_error.mean_square
        )
        if not error < float("inf"):
            raise DataError(f"the block of {group.path} outputs NaN or infinity on the calibration data.")
        return error

    def quantize(self, work: BlockWork) -> None:
        plan: dict[str, tuple[Format, list[float]]] = work.prepared
        for group, matrices in round_block(work, self.rounding):
            work.replace_layers(group, matrices)
            errors = dict(zip(map(str, self.widths), plan[group.path][1], strict=True))
            for layer in group.layers:
                work.facts[layer.path]["block_error"] = errors  # by width

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        plain = super().estimate_resources(anatomy, size, memory_limit)
        share = min(1.0, max(self.search_tokens, size.batch_size * size.seq_len) / max(size.tokens, 1))
        groups = max(len(layer_groups(block)) for block in anatomy.blocks)
        return replace(plain, passes=plain.passes + 1 + groups * len(self.formats) * share)


def estimate_unreached(
    groups: Sequence[LayerGroup], errors_by_path: Mapping[str, list[float]]
) -> dict[str, list[float]]:
    """Return errors for experts that no token reached: the mean of the other experts, as zeros would earn no bits."""
    unreached = [group for group in groups if group.may_be_unreached and not any(errors_by_path[group.path])]
    errors = {}
    for group in unreached:
        peers = [other for other in groups if other.may_be_unreached and other.is_input_group == group.is_input_group]
        table = [errors_by_path[other.path] for other in peers if any(errors_by_path[other.path])]
        errors[group.path] = [sum(column) / len(table) for column in zip(*table, strict=True)] or errors_by_path[
            group.path
        ]
    return errors


def num_weights(group: LayerGroup) -> int:
    return sum(layer.weight.numel() for layer in group.layers)


def size_in_bits(group: LayerGroup, number_format: Format) -> float:
    """Return the size of a group in bits, scales included."""
    shapes = [layer.weight.shape for layer in group.layers]
    return sum(rows * columns * number_format.bits_per_value(columns, rows) for rows, columns in shapes)


def assign_bit_widths(errors: np.ndarray, costs: np.ndarray, budget: float) -> Sequence[int]:  # [groups, choices] each
    """Return one choice per group, such that the total error is minimal and the total cost within the budget."""
    groups, choices = errors.shape
    one_each = np.kron(np.eye(groups), np.ones(choices))  # [groups, groups * choices]
    scale = errors.max() or 1.0  # small errors would vanish in the solver's tolerances
    solved = milp(
        (errors / scale).ravel(),
        integrality=np.ones(errors.size),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(costs.ravel()[None] / budget, ub=1.0),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if solved.x is None:
        raise BudgetError("mixed: no choice of widths meets the average; allow more bits, or add a smaller width.")
    return [int(choice) for choice in solved.x.reshape(groups, choices).argmax(1)]
