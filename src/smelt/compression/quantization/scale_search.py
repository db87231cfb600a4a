"""Search input-channel scales: choose the candidate with the least error at the output of the enclosing module.

Base class of AWQ (Lin et al., 2024) and AQAS (Lee et al., 2023), which differ in their candidates, in whether inputs
are quantized during the search, and in whether weights are clipped afterwards.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smelt.compression.base import CalibrationSize, ResourceEstimate, one_of, within
from smelt.compression.calibration.observers import AbsMaxObserver, MeanAbsObserver
from smelt.compression.quantization.base import BlockWork, Quantization
from smelt.compression.quantization.gptq_rounding import ROUNDINGS, round_block
from smelt.compression.quantization.layers import LayerGroup, LinearLayer, is_unreached, observed
from smelt.compression.quantization.scaling import ScaleSource, fold_scale, scale_source
from smelt.compression.quantization.search_eval import InputTransform, LayerOutputError, ModuleOutputError, OutputError
from smelt.config import renamed
from smelt.errors import DataError
from smelt.models.anatomy import Anatomy, Projection
from smelt.numerics.format import Format, QuantizedTensor

STEPS = 20  # exponents 0, 1/20, ..., 19/20
CLIP_RATIOS = tuple(1 - step / 20 for step in range(10))  # 1, 0.95, ..., 0.55
CLIP_TOKENS = 512  # inputs that the clip search sees per group
CLIP_ROWS = 64  # of a weight, searched at once
NO_SOURCE = "the scale cannot be folded exactly into what produces these inputs"
NO_TOKENS = "no token of the calibration data reached this expert"


class InputStatistics:
    """Observer of the mean and maximum magnitude of each input channel of a group."""

    def __init__(self) -> None:
        self._mean, self._amax = MeanAbsObserver(), AbsMaxObserver()

    def __call__(self, x: Tensor) -> None:
        self._mean(x)
        self._amax(x)

    def is_unreached(self, group: LayerGroup) -> bool:
        return is_unreached(group, self._mean.values)

    def mean_and_max(self, group: LayerGroup) -> tuple[Tensor, Tensor]:
        return observed(group.path, self._mean.values), observed(group.path, self._amax.values)


@dataclass(frozen=True)
class Candidate:
    """A scale, and the family and exponent it was computed with."""

    family: str
    exponent: float
    scale: Tensor  # [columns]


@dataclass(frozen=True)
class ScaleSearchResult:
    """The best candidate of a group, its error, and the error without scaling."""

    candidate: Candidate
    error: float
    unscaled_error: float


@dataclass(frozen=True)
class ScaleSearch(Quantization):
    """Scale input channels by search, then quantize."""

    rounding: str = "rtn"  # after scaling: rtn or gptq
    clip: bool = False  # search a clip range per group after scaling; never for queries and keys
    search_tokens: int = renamed("tokens", default=4096)  # evaluated per trial, rounded to whole batches

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.name, "rounding", self.rounding, ROUNDINGS)
        within(self.name, "search_tokens", self.search_tokens, 1, 2**31)

    @abstractmethod
    def candidates(self, group: LayerGroup, mean: Tensor, amax: Tensor) -> Iterator[Candidate]:
        """Yield scales to try from a group's input statistics. Exponent 0 of the first family means no scaling."""

    @property
    def search_input_format(self) -> Format | None:
        """Return the format of inputs during the search; None: not quantized."""
        return None

    def quantize(self, work: BlockWork) -> None:
        notes = self.scale(work)
        if self.clip:
            clip_block(work)
        for group, matrices in round_block(work, self.rounding):
            all_facts = [self.layer_facts(layer, matrix) for layer, matrix in zip(group.layers, matrices, strict=True)]
            work.replace_layers(group, matrices)
            for layer, layer_facts in zip(group.layers, all_facts, strict=True):
                work.facts[layer.path] |= {"scaling": notes[layer.path], **layer_facts}

    def layer_facts(self, layer: LinearLayer, matrix: QuantizedTensor) -> dict[str, Any]:
        """Return additional facts about a quantized layer."""
        return {}

    def scale(self, work: BlockWork) -> dict[str, dict[str, Any]]:
        """Fold the best scale of every group; return facts by layer path."""
        statistics = [(group, InputStatistics()) for group in work.scale_groups]
        work.observe(statistics)
        notes: dict[str, dict[str, Any]] = {}
        for group, observer in statistics:
            source = scale_source(work.block, group)
            note: dict[str, Any] = {"into": None, "reason": NO_SOURCE}
            if observer.is_unreached(group):
                note["reason"] = NO_TOKENS
            elif source is not None:
                output_error = self.make_output_error(work, group)
                formats = [
                    work.schemes[layer.path].weight if layer.path in work.schemes else None for layer in group.layers
                ]
                best = self.best(group, source, output_error, *observer.mean_and_max(group), formats)
                fold_scale(group, source, best.candidate.scale)
                note = {
                    "into": source.name, "family": best.candidate.family, "exponent": best.candidate.exponent,
                    "error": best.error, "error_unscaled": best.unscaled_error,
                }  # fmt: skip
            notes |= {layer.path: note for layer in group.layers}
        return notes

    def make_output_error(self, work: BlockWork, group: LayerGroup) -> OutputError:
        """Return where the error is measured: at the output of attention or FFN for their input projections, else at
        the layer's own output."""
        assert work.block_inputs is not None
        error_class = ModuleOutputError if group.is_input_group else LayerOutputError
        return error_class(work.block_inputs, work.block, group, self.search_tokens)

    def best(
        self, group: LayerGroup, source: ScaleSource, output_error: OutputError, mean: Tensor, amax: Tensor,
        formats: Sequence[Format | None] | None = None,
    ) -> ScaleSearchResult:  # fmt: skip
        """Return the best candidate, each rounded to what its source can fold; `formats` as in `trial_error`."""
        best, unscaled_error = None, None
        for candidate in self.candidates(group, mean, amax):
            candidate = replace(candidate, scale=source.foldable(candidate.scale))
            error = self.trial_error(group, output_error, candidate.scale, formats)
            unscaled_error = error if unscaled_error is None else unscaled_error
            if best is None or error < best.error:
                best = ScaleSearchResult(candidate, error, unscaled_error)
        assert best is not None
        if not best.error < torch.inf:
            raise DataError(f"{group.path} outputs NaN or infinity on the calibration data; cannot quantize it.")
        return best

    def trial_error(
        self, group: LayerGroup, output_error: OutputError, scale: Tensor,
        formats: Sequence[Format | None] | None = None,
    ) -> float:  # fmt: skip
        """Return the output error of the quantized product `Q(x / s) Q(W s)^T`.

        `formats` are those of the group's layers, None for one that stays unquantized; by default, the method's.
        """
        weights = [
            layer.weight.float()
            if number_format is None
            else number_format.fake_quantize(layer.weight.float() * scale) / scale
            for layer, number_format in zip(
                group.layers, formats or [self.weight_format] * len(group.layers), strict=True
            )
        ]
        return output_error.error(weights, self._input_quantizer(scale))

    def _input_quantizer(self, scale: Tensor) -> InputTransform | None:
        number_format = self.search_input_format
        if number_format is None:
            return None
        return lambda x: (number_format.fake_quantize(x.float() / scale) * scale).to(x.dtype)

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        """Count one pass for the statistics, one for GPTQ, and the trials: four groups, each about a third of a block,
        plus one pass over the inputs of every further expert."""
        plain = super().estimate_resources(anatomy, size, memory_limit)
        share = min(1.0, max(self.search_tokens, size.batch_size * size.seq_len) / max(size.tokens, 1))
        experts = max(sum(part.mixture is not None for part in block.parts) for block in anatomy.blocks)
        return replace(plain, passes=plain.passes + 1 + (STEPS * 4 / 3 + max(0, experts - 1)) * share)


def power_scale(base: Tensor, exponent: float) -> Tensor:
    """Return base^exponent, scaled so that its maximum is the inverse of its minimum."""
    return balance_scale(base.clamp(min=1e-4).pow(exponent))


def balance_scale(scale: Tensor) -> Tensor:
    return scale / (scale.max() * scale.min()).sqrt()


# --- clipping, as in AWQ ----------------------------------------------------------------------------------------------


def clip_block(work: BlockWork) -> None:
    """Clip each group of a block's weights to the range of least output error after quantization."""
    samples = [(group, RowSample(CLIP_TOKENS)) for group in work.groups]
    work.observe(samples)
    for group, sample in samples:
        if is_unreached(group, sample.rows):
            continue
        for projection in clipped_projections(group):
            clip_(projection.weight, observed(group.path, sample.rows), work.weight_format(group))


def clipped_projections(group: LayerGroup) -> tuple[Projection, ...]:
    """Return the projections to clip: all but queries and keys, whose product is too sensitive."""
    if not group.is_input_group:
        return tuple(Projection(layer.module, layer.path) for layer in group.layers)
    assert group.part is not None
    return group.part.input_projections[2:] if group.part.kind == "heads" else group.part.input_projections


class RowSample:
    """Observer that keeps the first `count` rows."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows: Tensor | None = None

    def __call__(self, x: Tensor) -> None:
        stored = 0 if self.rows is None else len(self.rows)
        if stored < self.count and len(x):
            rows = x[: self.count - stored].float()
            self.rows = rows if self.rows is None else torch.cat([self.rows, rows])


@torch.no_grad()
def clip_(weight: Tensor, x: Tensor, number_format: Format) -> None:
    """Clip each group of a matrix [out, in] to the range of least output error after quantization."""
    inputs = number_format.split_groups(x).transpose(0, 1)  # [groups, tokens, size]
    amax = number_format.tensor_amax(weight)
    for start in range(0, len(weight), CLIP_ROWS):
        rows = weight[start : start + CLIP_ROWS]
        grouped = number_format.split_groups(rows.detach())  # [rows, groups, size]
        limits = grouped.abs().amax(-1, keepdim=True)
        best, least = limits, torch.full_like(limits, torch.inf)
        for ratio in CLIP_RATIOS:
            clipped = grouped.clamp(-limits * ratio, limits * ratio)
            qparams = number_format.compute_qparams(clipped, tensor_amax=amax)
            difference = (
                number_format.dequantize_groups(number_format.quantize_groups(clipped, qparams), qparams) - grouped
            )
            error = torch.bmm(inputs, difference.permute(1, 2, 0)).square().sum(1).T[..., None]  # [rows, groups, 1]
            best, least = torch.where(error < least, limits * ratio, best), torch.minimum(error, least)
        rows.copy_(grouped.clamp(-best, best).flatten(-2)[:, : weight.shape[1]])
