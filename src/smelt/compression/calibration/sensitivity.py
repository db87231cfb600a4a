"""What each layer, head, group of channels and expert costs to remove: the loss without it, on the same samples.

Each is removed alone. Heads and channels are removed by masks of zeros, which compute what the smaller matrices would;
experts leave with their router rows for as long as the loss is computed; a layer returns its input.

The second measure removes nothing: it estimates the increase of the loss after the other weights have adapted, from
traces of the Hessian, as HAP does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smelt.compression.calibration.gradients import batch_loss
from smelt.compression.calibration.hessian import hessian_traces
from smelt.compression.calibration.masks import apply_mask
from smelt.errors import DataError, ModelError
from smelt.measure.cost import count_parameters, unit_parameters
from smelt.models.anatomy import Anatomy, Block, Mixture, Part
from smelt.models.expert_surgery import check_removable, without_expert
from smelt.models.quantized import QuantizedLinear
from smelt.progress import NullProgress, Progress

Batch = dict[str, Tensor]
LAYERS, PARTS, HEADS, CHANNELS, EXPERTS = "layers", "parts", "heads", "channels", "experts"
KINDS = (LAYERS, PARTS, HEADS, CHANNELS, EXPERTS)
HESSIAN_KINDS = (PARTS, HEADS, CHANNELS)
REMOVAL, HESSIAN = "removal", "hessian"
MEASURES = (REMOVAL, HESSIAN)


@dataclass(frozen=True)
class Removal:
    """One thing that was removed: what it is, and what that cost."""

    kind: str  # of KINDS
    block: int
    name: str  # of the part or mixture that it belongs to; of a layer: its path
    index: int | None  # of a head, group or expert
    parameters: int
    increase: float | None  # of the mean loss; None: it cannot be removed
    error: float | None  # standard error of the increase over samples, or over the probes of an estimate
    why_not: str | None = None


@dataclass(frozen=True)
class Sensitivity:
    """The loss of the whole network, and of it without each thing."""

    loss: float
    samples: int
    removals: list[Removal] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"loss": self.loss, "samples": self.samples, "removals": [asdict(removal) for removal in self.removals]}


@dataclass(frozen=True)
class _Candidate:
    """Something to remove, and how."""

    kind: str
    block: int
    name: str
    index: int | None
    parameters: int
    remove: Callable[[], AbstractContextManager[None]]
    why_not: str | None = None


def measure_sensitivity(
    anatomy: Anatomy,
    batches: Sequence[Batch],
    *,
    kinds: Sequence[str] = KINDS,
    channel_groups: int = 4,
    progress: Progress | None = None,
) -> Sensitivity:
    """Remove each thing alone and return what it costs; `batches` have one labeled sample each.

    The channels of a part are split into `channel_groups` groups of equal size, ordered by the sum of the absolute
    weights of each channel, the smallest first.
    """
    check_kinds(kinds)
    if channel_groups < 1:
        raise DataError(f"channels are removed in {channel_groups} groups; it must be at least 1.")
    candidates = [each for each in _candidates(anatomy, channel_groups) if each.kind in kinds]
    if not candidates:
        raise ModelError(f"this {anatomy.family.name} network has none of: {', '.join(kinds)}.")
    with _plain_loss(anatomy.network):
        base = _losses(anatomy.network, batches)
        removals = []
        for candidate in (progress or NullProgress()).track(candidates, "sensitivity"):
            removals.append(_measure(anatomy.network, batches, base, candidate))
    return Sensitivity(float(base.mean()), len(base), removals)


def estimate_sensitivity(
    anatomy: Anatomy,
    batches: Sequence[Batch],
    *,
    kinds: Sequence[str] = HESSIAN_KINDS,
    channel_groups: int = 4,
    probes: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> Sensitivity:
    """Estimate what removing heads and channels costs, from Hessian traces with so many random probes per sample.

    The same groups of channels as in `measure_sensitivity`, whose costs here add up.
    """
    check_kinds(kinds, HESSIAN_KINDS)
    if channel_groups < 1 or probes < 2:
        raise DataError(f"{channel_groups} groups of channels and {probes} probes: at least 1 and 2 are needed.")
    with _plain_loss(anatomy.network):
        base = _losses(anatomy.network, batches)
        traces = hessian_traces(anatomy, batches, probes, seed, progress)
    removals = []
    for part, estimates in zip(anatomy.parts, (each.sensitivity() for each in traces), strict=True):
        if part.mixture is not None or not part.units:
            continue
        groups = {PARTS: [list(range(part.units))], HEADS: [], CHANNELS: []}
        if part.kind == "heads":
            groups[HEADS] = [[unit] for unit in range(part.units)]
        else:
            groups[CHANNELS] = _channel_groups(part, channel_groups)
        removals += [
            _estimated(part, kind, None if kind == PARTS else index, units, estimates)
            for kind in kinds
            for index, units in enumerate(groups[kind])
        ]
    if not removals:
        raise ModelError(f"this {anatomy.family.name} network has none of: {', '.join(kinds)}.")
    return Sensitivity(float(base.mean()), len(base), removals)


def _estimated(part: Part, kind: str, index: int | None, units: Sequence[int], estimates: np.ndarray) -> Removal:
    """Return the sum of the estimates of some units; `estimates` are [probes, units of the part]."""
    known = (kind, part.block, part.name, index, len(units) * unit_parameters(part))
    if kind == HEADS and part.fixed is not None:
        return Removal(*known, None, None, f"its heads {part.fixed}")
    sums = estimates[:, list(units)].sum(1)
    return Removal(*known, float(sums.mean()), float(sums.std(ddof=1) / np.sqrt(len(sums))))


def check_kinds(kinds: Sequence[str], known: Sequence[str] = KINDS) -> Sequence[str]:
    """Return the kinds, or raise if one is not known to the measure."""
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise DataError(f"there are no {unknown[0]!r:.40} to remove; choose from {', '.join(known)}.")
    missing = [kind for kind in kinds if kind not in known]
    if missing:
        raise DataError(f"Hessian traces are of {', '.join(known)}, not of {missing[0]}; use --measure removal.")
    return kinds


def _measure(network: nn.Module, batches: Sequence[Batch], base: np.ndarray, candidate: _Candidate) -> Removal:
    known = (candidate.kind, candidate.block, candidate.name, candidate.index, candidate.parameters)
    if candidate.why_not is not None:
        return Removal(*known, None, None, candidate.why_not)
    try:
        with candidate.remove():
            increases = _losses(network, batches, check=False) - base
    except _ChangesShape:
        return Removal(*known, None, None, "its output has another shape than its input")
    if not np.isfinite(increases).all():
        return Removal(*known, None, None, "the loss without it is not a finite number")
    error = float(increases.std(ddof=1) / np.sqrt(len(increases))) if len(increases) > 1 else None
    return Removal(*known, float(increases.mean()), error)


@torch.no_grad()
def _losses(network: nn.Module, batches: Sequence[Batch], *, check: bool = True) -> np.ndarray:
    """Return the loss of each sample; without `check`, one may be infinite."""
    losses = []
    for batch in batches:
        try:
            losses.append(float(batch_loss(network, batch)))
        except DataError:
            if check or "labels" not in batch:
                raise
            losses.append(np.inf)
    return np.array(losses)


def _candidates(anatomy: Anatomy, channel_groups: int) -> Iterator[_Candidate]:
    """Yield everything that can be removed, block by block; what cannot, with the reason."""
    leaders = {part.map_of for part in anatomy.parts}
    for block in anatomy.blocks:
        yield _layer(block, shares_map=block.index in leaders)
        mixtures = {part.mixture.path: part.mixture for part in block.parts if part.mixture is not None}
        for part in (part for part in block.parts if part.mixture is None and part.units):
            parameters = part.units * unit_parameters(part)
            yield _Candidate(PARTS, block.index, part.name, None, parameters, _Masked(part, range(part.units)))
            if part.kind == "heads":
                for unit in range(part.units):
                    yield _Candidate(
                        HEADS, block.index, part.name, unit, unit_parameters(part), _Masked(part, [unit]),
                        None if part.fixed is None else f"its heads {part.fixed}",
                    )  # fmt: skip
                continue
            for index, group in enumerate(_channel_groups(part, channel_groups)):
                yield _Candidate(
                    CHANNELS, block.index, part.name, index, len(group) * unit_parameters(part), _Masked(part, group)
                )
        for mixture in mixtures.values():
            yield from _experts(anatomy, block, mixture)


def _layer(block: Block, *, shares_map: bool) -> _Candidate:
    why_not = "another layer uses its attention map" if shares_map else None
    if not block.path:
        why_not = "the network is one block"
    return _Candidate(
        LAYERS, block.index, block.path, None, count_parameters(block.module), lambda: _skipped(block.module), why_not
    )


def _experts(anatomy: Anatomy, block: Block, mixture: Mixture) -> Iterator[_Candidate]:
    why_not = None if mixture.num_experts > mixture.top_k else "a token uses all of them"
    try:
        check_removable(anatomy.network, mixture)
    except ModelError:
        why_not = "its router chooses among groups of equal size"
    for expert in range(mixture.num_experts):
        yield _Candidate(
            EXPERTS, block.index, mixture.path, expert, count_parameters(mixture.module[expert]),
            lambda expert=expert: without_expert(anatomy.network, mixture, expert), why_not,  # type: ignore[misc]
        )  # fmt: skip


def _channel_groups(part: Part, groups: int) -> list[list[int]]:
    """Split channels by the sum of their absolute weights, the smallest first, into groups of equal size."""
    order = np.argsort(_weight_sums(part), kind="stable")
    return [sorted(group.tolist()) for group in np.array_split(order, min(groups, len(order)))]


def _weight_sums(part: Part) -> np.ndarray:
    total = torch.zeros(part.units, dtype=torch.float64, device=part.output.device)
    for projection in part.input_projections:
        total += _weight(projection.module, projection)[projection.slice].abs().flatten(1).sum(1).double()
    total += _weight(part.output.module, part.output).abs().transpose(0, 1).flatten(1).sum(1).double()
    return total.cpu().numpy()


def _weight(module: Any, projection: Any) -> Tensor:
    """Return the weight of a whole layer [out, in, ...], dequantized."""
    if isinstance(module, QuantizedLinear):
        weight: Tensor = module.weight
    else:
        weight = module.weight.T if projection.transposed else module.weight
    return weight.detach()


class _Masked:
    """Sets the inputs of a part's output projection that come from some units to zero, in a context."""

    def __init__(self, part: Part, units: Sequence[int]) -> None:
        self.part, self.units = part, units

    @contextmanager
    def __call__(self) -> Iterator[None]:
        mask = torch.ones(self.part.units, device=self.part.output.device)
        mask[list(self.units)] = 0

        def zero(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (apply_mask(self.part, mask, args[0]), *args[1:])

        hook = self.part.output.module.register_forward_pre_hook(zero)
        try:
            yield
        finally:
            hook.remove()


class _ChangesShape(Exception):
    """A layer whose output has another shape than its input cannot be skipped."""


@contextmanager
def _skipped(block: nn.Module) -> Iterator[None]:
    """Let a block return its input, as hidden states or as the first of a tuple."""

    def replace(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape != (output[0] if isinstance(output, tuple) else output).shape:
            raise _ChangesShape
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    hook = block.register_forward_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _plain_loss(network: Any) -> Iterator[None]:
    """Leave a mixture's load-balancing loss out: it says nothing about quality, and needs all experts."""
    before = getattr(network.config, "output_router_logits", None)
    if before is not None:
        network.config.output_router_logits = False
    try:
        yield
    finally:
        if before is not None:
            network.config.output_router_logits = before
