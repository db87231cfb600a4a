"""Eviction profile of a model: the ratio of tokens each KV head retains, measured over sample prompts.

Tangram (Kim et al., 2026, arXiv 2606.06302): the ratio of tokens a head retains is nearly a property of the model, so
the count can be fixed before a prompt arrives. Which tokens are retained is still decided by the scorer.
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
from smelt.files import write_atomically
from smelt.kvcache.eviction.budget import check_keep
from smelt.kvcache.eviction.clusters import HeadClusters, cluster_heads, splits_per_cluster
from smelt.models.json_file import read_object

Table = tuple[tuple[float, ...], ...]  # [layers, kv_heads]
Parameter = bool | int | float | str

FORMAT = "smelt-kv-profile-2"
_FORMAT_1 = "smelt-kv-profile-1"
_KEYS_OF_FORMAT_1 = {
    "keep": "keep_ratio", "samples": "num_samples", "deviation": "std", "parameters": "scorer_params",
    "splits": "num_splits",
}  # fmt: skip
_SHAPE_KEYS_OF_FORMAT_1 = {"layers": "num_layers", "kv_heads": "num_kv_heads", "width": "head_dim"}


@dataclass(frozen=True)
class KVShape:
    """KV cache dimensions that identify the model a profile belongs to."""

    model_type: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return (
            f"a {self.model_type} with {self.num_layers} layers, {self.num_kv_heads} KV heads and "
            f"head_dim {self.head_dim}"
        )


@dataclass(frozen=True)
class EvictionProfile:
    """Mean and standard deviation, over sample prompts, of the ratio of evictable tokens that each head retains."""

    shape: KVShape
    scorer: str
    keep_ratio: float  # of all tokens, over all heads
    num_samples: int
    mean: Table
    std: Table
    scorer_params: Mapping[str, Parameter] = field(default_factory=dict)
    alpha: float = 2.0  # standard deviations that a budget reserves above the mean
    clusters: HeadClusters | None = None  # heads that share pages
    num_splits: tuple[int, ...] = ()  # [clusters]: relative number of KV splits in decode attention

    def __post_init__(self) -> None:
        check_keep(self.keep_ratio)
        if self.num_samples < 1:
            raise ModelError("a profile needs at least one sample.")
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ModelError(f"alpha of a profile is {self.alpha!r}; it must not be negative, such as 2.")
        for name, table in (("mean", self.mean), ("std", self.std)):
            if len(table) != self.shape.num_layers or any(len(row) != self.shape.num_kv_heads for row in table):
                raise ModelError(f"the {name} of a profile must have one number per layer and KV head: {self.shape}.")
            if not all(0 <= value <= 1 for row in table for value in row):
                raise ModelError(f"the {name} of a profile must lie between 0 and 1 for every head.")
        if self.clusters is not None:
            if (self.clusters.num_layers, self.clusters.num_kv_heads) != (
                self.shape.num_layers,
                self.shape.num_kv_heads,
            ):
                raise ModelError(f"the clusters of a profile must be those of the same model: {self.shape}.")
            if len(self.num_splits) != len(self.clusters.members) or min(self.num_splits) < 1:
                raise ModelError("a profile must have a number of splits, at least 1, for each of its clusters.")

    @classmethod
    def from_ratios(
        cls,
        shape: KVShape,
        scorer: str,
        keep_ratio: float,
        ratios: Tensor,  # [samples, layers, kv_heads], from `retained_ratios`
        scorer_params: Mapping[str, Parameter] | None = None,
        alpha: float = 2.0,
    ) -> EvictionProfile:
        """Summarize the ratios measured on each sample prompt."""
        if not len(ratios):
            raise DataError("a profile needs at least one sample: give prompts that are longer than sink and window.")
        mean, std = ratios.double().mean(0), ratios.double().std(0, correction=0)
        params = dict(scorer_params or {})
        return cls(shape, scorer, keep_ratio, len(ratios), _table(mean), _table(std), params, alpha)

    @property
    def budgets(self) -> Tensor:
        """clip(mean + alpha * std, 0, 1): [layers, kv_heads], float64. Above what the samples retained."""
        mean, std = (torch.tensor(table, dtype=torch.float64) for table in (self.mean, self.std))
        return (mean + self.alpha * std).clamp(0, 1)

    def with_clusters(self, max_heads: int = 4, scope: str = "global") -> EvictionProfile:
        """Add clusters of `max_heads` heads, or of the largest smaller number that divides, and their KV splits."""
        budgets = self.rescaled(self.keep_ratio)
        num_heads = budgets.shape[1] if scope == "per_layer" else budgets.numel()
        size = max(number for number in range(1, max(max_heads, 1) + 1) if num_heads % number == 0)
        clusters = cluster_heads(budgets, size, scope)
        num_splits = tuple(splits_per_cluster(clusters.cluster_max(budgets)).tolist())
        return dataclasses.replace(self, clusters=clusters, num_splits=num_splits)

    def rescaled(self, keep_ratio: float) -> Tensor:
        """Scale the budgets by one factor, none above 1, so that their mean is `keep_ratio`."""
        check_keep(keep_ratio)
        return scale_budgets(self.budgets, keep_ratio)

    def check_model(self, shape: KVShape) -> None:
        """Refuse a model other than the profiled one."""
        if shape != self.shape:
            raise ModelError(f"the profile is of {self.shape}; the model is {shape}: profile this model.")

    def save(self, path: Path) -> None:
        """Write the profile atomically as JSON."""
        content = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, allow_nan=False)
        write_atomically(path, lambda temporary: temporary.write_text(content + "\n", encoding="utf-8"))

    @classmethod
    def load(cls, path: Path) -> EvictionProfile:
        """Read a profile written by this version or by version 0.1."""
        content = read_object(path)
        version = content.pop("format", None)
        if version not in (FORMAT, _FORMAT_1):
            raise ModelError(f"{path} is not a KV cache profile that this Smelt wrote: make it again.")
        try:
            return cls(**_checked(_upgraded(content) if version == _FORMAT_1 else content))
        except _DamagedProfileError as error:
            raise ModelError(f"{path} is not a sound profile ({error}): make it again.") from error


def retained_ratios(counts: Tensor, seq_len: int, sink: int, window: int) -> Tensor:
    """Return the ratio of tokens that each head retains, in the shape of `counts`: (retained - sink - window) /
    (seq_len - sink), at least 0."""
    if seq_len <= sink:
        raise DataError(f"a sample of {seq_len} tokens has none beyond the first {sink}: give longer ones.")
    return ((counts.double() - sink - window) / (seq_len - sink)).clamp(min=0)


def scale_budgets(budgets: Tensor, ratio: float) -> Tensor:
    """Compute min(1, factor * budgets) with the factor that makes their mean `ratio`. Where no factor can, because too
    many budgets are 0, those share the rest equally."""
    flat = budgets.double().flatten()
    target, num_positive = ratio * len(flat), int((flat > 0).sum())
    if target >= num_positive:
        rest = (target - num_positive) / max(len(flat) - num_positive, 1)
        return torch.full_like(flat, rest).masked_fill(flat > 0, 1.0).view_as(budgets)
    ordered = flat.sort(descending=True).values[:num_positive]
    tails = ordered.flip(0).cumsum(0).flip(0)
    num_clipped = torch.arange(num_positive, dtype=flat.dtype, device=flat.device)  # of the largest, at 1
    factors = (target - num_clipped) / tails
    factor = factors[(factors * ordered <= 1).nonzero()[0, 0]]
    return (flat * factor).clamp(max=1).view_as(budgets)


def rank_stability(ratios: Tensor) -> np.ndarray:
    """Return the Spearman correlation of each sample's ratios with their mean over samples: [samples] from [samples,
    layers, kv_heads]. NaN where all heads retain the same ratio."""
    samples = ratios.double().flatten(1).cpu().numpy()
    ranks = rankdata(np.concatenate([samples, samples.mean(0, keepdims=True)]), axis=1)
    ranks -= ranks.mean(1, keepdims=True)
    norms = np.linalg.norm(ranks, axis=1)
    with np.errstate(invalid="ignore"):
        correlation: np.ndarray = ranks[:-1] @ ranks[-1] / (norms[:-1] * norms[-1])
    return correlation


def _table(values: Tensor) -> Table:
    return tuple(tuple(row) for row in values.tolist())


class _DamagedProfileError(Exception):
    """The content of a profile file is invalid."""


def _upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """Rename the keys of format 1."""
    content = _renamed(content, _KEYS_OF_FORMAT_1)
    for name in ("shape", "clusters"):
        if isinstance(content.get(name), dict):
            content[name] = _renamed(content[name], _SHAPE_KEYS_OF_FORMAT_1)
    return content


def _renamed(content: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in content.items()}


def _checked(content: dict[str, Any]) -> dict[str, Any]:
    """Check the type of every field and build the nested ones."""
    _check_keys("the profile", content, EvictionProfile)
    shape = content["shape"]
    if not isinstance(shape, dict):
        raise _DamagedProfileError("its shape is missing")
    _check_keys("its shape", shape, KVShape)
    if not isinstance(shape["model_type"], str) or not isinstance(content["scorer"], str):
        raise _DamagedProfileError("the names of model and scorer must be text")
    for value in (*(shape[name] for name in ("num_layers", "num_kv_heads", "head_dim")), content["num_samples"]):
        if type(value) is not int or value < 1:
            raise _DamagedProfileError(f"{value!r} is no number of layers, heads or samples")
    for name in ("keep_ratio", "alpha"):
        if not _is_number(content[name]):
            raise _DamagedProfileError(f"{name} is no number")
    params = content["scorer_params"]
    if not isinstance(params, dict) or not all(isinstance(value, Parameter) for value in params.values()):
        raise _DamagedProfileError("the parameters of the scorer must be plain values")
    tables: dict[str, Table] = {}
    for name in ("mean", "std"):
        rows = content[name]
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise _DamagedProfileError(f"{name} is not one list per layer")
        if not all(_is_number(value) for row in rows for value in row):
            raise _DamagedProfileError(f"{name} holds something that is no number")
        tables[name] = tuple(tuple(row) for row in rows)
    clusters = None if content["clusters"] is None else _clusters(content["clusters"])
    num_splits = content["num_splits"]
    if not isinstance(num_splits, list) or not all(type(number) is int for number in num_splits):
        raise _DamagedProfileError("its num_splits must be whole numbers")
    return {
        **content, **tables, "shape": KVShape(**shape), "clusters": clusters, "num_splits": tuple(num_splits),
    }  # fmt: skip


def _clusters(content: Any) -> HeadClusters:
    if not isinstance(content, dict):
        raise _DamagedProfileError("its clusters are not a table")
    _check_keys("its clusters", content, HeadClusters)
    try:
        members = tuple(tuple((int(layer), int(head)) for layer, head in cluster) for cluster in content["members"])
        return HeadClusters(content["num_layers"], content["num_kv_heads"], members)
    except (TypeError, ValueError, ConfigError) as error:
        raise _DamagedProfileError(f"its clusters hold no map of heads: {error}") from error


def _check_keys(what: str, content: dict[str, Any], of: type) -> None:
    names = {item.name for item in dataclasses.fields(of)}
    if content.keys() != names:
        wrong = sorted(content.keys() ^ names)[0]
        raise _DamagedProfileError(f"{what} {'lacks' if wrong in names else 'has an unknown'} {wrong!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
