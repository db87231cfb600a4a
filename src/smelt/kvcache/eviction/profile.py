"""What the heads of one model keep under one scorer, found once over samples: Tangram's profile.

The share of tokens a head keeps is nearly a property of the model, so the count can be fixed before a prompt is seen;
which tokens they are is still for the scorer to say.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from smelt.errors import ConfigError, DataError, ModelError
from smelt.files import write_whole
from smelt.kvcache.eviction.budget import check_keep
from smelt.kvcache.eviction.clusters import Clusters, clusters
from smelt.kvcache.eviction.splits import splits
from smelt.models.jsonfile import read_object

Table = tuple[tuple[float, ...], ...]  # [layers, kv_heads]
Parameter = bool | int | float | str

FORMAT = "smelt-kv-profile-1"


@dataclass(frozen=True)
class Shape:
    """What tells the model of a profile from others."""

    model_type: str
    layers: int
    kv_heads: int
    width: int  # of a head

    def __str__(self) -> str:
        return f"a {self.model_type} with {self.layers} layers of {self.kv_heads} heads of keys, {self.width} wide"


@dataclass(frozen=True)
class Profile:
    """Mean and deviation, over samples, of the share that each head keeps of what may go."""

    shape: Shape
    scorer: str
    keep: float  # what was asked of the scorer
    samples: int
    mean: Table
    deviation: Table
    parameters: Mapping[str, Parameter] = field(default_factory=dict)  # of the scorer
    alpha: float = 2.0  # deviations above the mean that a budget leaves room for
    clusters: Clusters | None = None  # heads that share pages
    splits: tuple[int, ...] = ()  # of each cluster: parts of its keys, relative to one another, when a token is decoded

    def __post_init__(self) -> None:
        check_keep(self.keep)
        if self.samples < 1:
            raise ModelError("a profile needs at least one sample.")
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ModelError(f"alpha of a profile is {self.alpha!r}; it must not be negative, such as 2.")
        for name, table in (("mean", self.mean), ("deviation", self.deviation)):
            if len(table) != self.shape.layers or any(len(row) != self.shape.kv_heads for row in table):
                raise ModelError(f"the {name} of a profile must have one number a layer and head: {self.shape}.")
            if not all(0 <= value <= 1 for row in table for value in row):
                raise ModelError(f"the {name} of a profile must lie between 0 and 1 for every head.")
        if self.clusters is not None:
            if (self.clusters.layers, self.clusters.kv_heads) != (self.shape.layers, self.shape.kv_heads):
                raise ModelError(f"the clusters of a profile must be those of the same model: {self.shape}.")
            if len(self.splits) != len(self.clusters.members) or min(self.splits) < 1:
                raise ModelError("a profile must have a number of splits, at least 1, for each of its clusters.")

    @classmethod
    def of(
        cls,
        shape: Shape,
        scorer: str,
        keep: float,
        found: Tensor,  # [samples, layers, kv_heads], from `ratios`
        parameters: Mapping[str, Parameter] | None = None,
        alpha: float = 2.0,
    ) -> Profile:
        """From what each sample kept."""
        if not len(found):
            raise DataError("a profile needs at least one sample: give prompts that are longer than sink and window.")
        mean, deviation = found.double().mean(0), found.double().std(0, correction=0)
        return cls(shape, scorer, keep, len(found), _table(mean), _table(deviation), dict(parameters or {}), alpha)

    @property
    def budgets(self) -> Tensor:
        """clip(mean + alpha * deviation, 0, 1): [layers, kv_heads], float64. More than the samples kept."""
        mean, deviation = (torch.tensor(table, dtype=torch.float64) for table in (self.mean, self.deviation))
        return (mean + self.alpha * deviation).clamp(0, 1)

    def clustered(self, heads: int = 4, scope: str = "global") -> Profile:
        """With clusters of so many heads, or of the next smaller number that divides, and their splits."""
        budgets = self.rescaled(self.keep)
        whole = budgets.shape[1] if scope == "per_layer" else budgets.numel()
        size = max(number for number in range(1, max(heads, 1) + 1) if whole % number == 0)
        made = clusters(budgets, size, scope)
        return dataclasses.replace(self, clusters=made, splits=tuple(splits(made.largest(budgets)).tolist()))

    def rescaled(self, keep: float) -> Tensor:
        """The budgets times one factor, none above 1, so that heads keep `keep` of what may go on average."""
        check_keep(keep)
        return scaled(self.budgets, keep)

    def check_model(self, shape: Shape) -> None:
        """Refuse another model than the one that was profiled."""
        if shape != self.shape:
            raise ModelError(f"the profile is of {self.shape}; the model is {shape}: make a profile of it.")

    def save(self, path: Path) -> None:
        """Write the profile whole or not at all."""
        content = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, allow_nan=False)
        write_whole(path, lambda temporary: temporary.write_text(content + "\n", encoding="utf-8"))

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read what `save` wrote; anything else is one sentence."""
        content = read_object(path)
        if content.pop("format", None) != FORMAT:
            raise ModelError(f"{path} is not a profile of keys and values that this Smelt wrote: make it again.")
        try:
            return cls(**_checked(content))
        except _Damage as error:
            raise ModelError(f"{path} is not a sound profile ({error}): make it again.") from error


def ratios(counts: Tensor, tokens: int, sink: int, window: int) -> Tensor:
    """The share each head keeps: (kept - sink - window) / (tokens - sink), none below 0. In the shape of `counts`."""
    if tokens <= sink:
        raise DataError(f"a sample of {tokens} tokens has none beyond the first {sink}: give longer ones.")
    return ((counts.double() - sink - window) / (tokens - sink)).clamp(min=0)


def scaled(budgets: Tensor, share: float) -> Tensor:
    """min(1, factor * budgets) with the factor that makes their mean `share`. Where no factor can, because too many are
    0, these get what is left in equal parts."""
    flat = budgets.double().flatten()
    aim, some = share * len(flat), int((flat > 0).sum())
    if aim >= some:
        rest = (aim - some) / max(len(flat) - some, 1)
        return torch.full_like(flat, rest).masked_fill(flat > 0, 1.0).view_as(budgets)
    ordered = flat.sort(descending=True).values[:some]
    tails = ordered.flip(0).cumsum(0).flip(0)
    factors = (
        aim - torch.arange(some, dtype=flat.dtype, device=flat.device)
    ) / tails  # where so many of the largest are at 1
    factor = factors[(factors * ordered <= 1).nonzero()[0, 0]]
    return (flat * factor).clamp(max=1).view_as(budgets)


def rank_stability(found: Tensor) -> np.ndarray:
    """How alike each sample ranks the heads: Spearman's correlation of its ratios with their mean over all samples,
    [samples] from [samples, layers, kv_heads]. Not a number where all heads keep the same, which is no ranking."""
    samples = found.double().flatten(1).cpu().numpy()
    rows = rankdata(np.concatenate([samples, samples.mean(0, keepdims=True)]), axis=1)
    rows -= rows.mean(1, keepdims=True)
    norms = np.linalg.norm(rows, axis=1)
    with np.errstate(invalid="ignore"):
        found_alike: np.ndarray = rows[:-1] @ rows[-1] / (norms[:-1] * norms[-1])
    return found_alike


def _table(values: Tensor) -> Table:
    return tuple(tuple(row) for row in values.tolist())


class _Damage(Exception):
    """What is wrong with the content of a file."""


def _checked(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of a profile from its JSON, each of the right type."""
    _fields("the profile", content, Profile)
    shape = content["shape"]
    if not isinstance(shape, dict):
        raise _Damage("its shape is missing")
    _fields("its shape", shape, Shape)
    if not isinstance(shape["model_type"], str) or not isinstance(content["scorer"], str):
        raise _Damage("the names of model and scorer must be text")
    for value in (*(shape[name] for name in ("layers", "kv_heads", "width")), content["samples"]):
        if type(value) is not int or value < 1:
            raise _Damage(f"{value!r} is no number of layers, heads or samples")
    for name in ("keep", "alpha"):
        if not _is_number(content[name]):
            raise _Damage(f"{name} is no number")
    parameters = content["parameters"]
    if not isinstance(parameters, dict) or not all(isinstance(value, Parameter) for value in parameters.values()):
        raise _Damage("the parameters of the scorer must be plain values")
    tables: dict[str, Table] = {}
    for name in ("mean", "deviation"):
        rows = content[name]
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise _Damage(f"{name} is not one list a layer")
        if not all(_is_number(value) for row in rows for value in row):
            raise _Damage(f"{name} holds something that is no number")
        tables[name] = tuple(tuple(row) for row in rows)
    groups = None if content["clusters"] is None else _clusters(content["clusters"])
    parts = content["splits"]
    if not isinstance(parts, list) or not all(type(part) is int for part in parts):
        raise _Damage("its splits must be whole numbers")
    return {**content, **tables, "shape": Shape(**shape), "clusters": groups, "splits": tuple(parts)}


def _clusters(content: Any) -> Clusters:
    if not isinstance(content, dict):
        raise _Damage("its clusters are not a table")
    _fields("its clusters", content, Clusters)
    try:
        members = tuple(tuple((int(layer), int(head)) for layer, head in group) for group in content["members"])
        return Clusters(content["layers"], content["kv_heads"], members)
    except (TypeError, ValueError, ConfigError) as error:
        raise _Damage(f"its clusters hold no map of heads: {error}") from error


def _fields(what: str, content: dict[str, Any], of: type) -> None:
    names = {item.name for item in dataclasses.fields(of)}
    if content.keys() != names:
        wrong = sorted(content.keys() ^ names)[0]
        raise _Damage(f"{what} {'lacks' if wrong in names else 'has an unknown'} {wrong!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
