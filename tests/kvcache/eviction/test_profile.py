"""Profiles of a model's heads: contents, rescaling, and which files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from smelt.errors import ConfigError, DataError, ModelError
from smelt.kvcache.eviction.profile import EvictionProfile, KVShape, rank_stability, retained_ratios, scale_budgets

SHAPE = KVShape("qwen3", 5, 3, 128)


def sample_ratios(samples: int = 7, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    heads = torch.rand(5, 3, generator=random, dtype=torch.float64) ** 3
    return (heads + 0.05 * torch.randn(samples, 5, 3, generator=random, dtype=torch.float64)).clamp(0, 1)


def made(**changed: Any) -> EvictionProfile:
    settings = {"scorer_params": {"window": 32, "pool": "max", "eps": 0.01}} | changed
    return EvictionProfile.from_ratios(SHAPE, "snapkv", 0.3, sample_ratios(), **settings)


def test_mean_and_deviation_match_the_samples() -> None:
    profile = made(alpha=1.5)
    assert profile.num_samples == 7
    assert np.allclose(profile.mean, sample_ratios().numpy().mean(0), rtol=0, atol=1e-15)
    assert np.allclose(profile.std, sample_ratios().numpy().std(0), rtol=0, atol=1e-15)
    expected = (sample_ratios().numpy().mean(0) + 1.5 * sample_ratios().numpy().std(0)).clip(0, 1)
    assert np.allclose(profile.budgets.numpy(), expected, rtol=0, atol=1e-15)
    assert made().alpha == 2.0


def test_budgets_are_shares() -> None:
    profile = EvictionProfile(KVShape("llama", 1, 2, 8), "knorm", 0.3, 3, ((0.9, 0.1),), ((0.2, 0.0),))
    assert profile.budgets.tolist() == [[1.0, 0.1]]


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.just(0.0) | st.floats(0.001, 1), min_size=1, max_size=20), share=st.floats(0, 1))
def test_scaled_budgets_have_the_requested_mean(values: list[float], share: float) -> None:
    budgets = torch.tensor(values, dtype=torch.float64)
    scaled = scale_budgets(budgets, share)
    assert scaled.mean().item() == pytest.approx(share, abs=1e-9)
    assert (scaled >= 0).all() and (scaled <= 1 + 1e-12).all()
    order = budgets.argsort()
    assert (scaled[order].diff() >= -1e-12).all()
    free = (budgets > 0) & (scaled < 1)
    if free.any() and share > 0:  # one factor for all below 1
        factors = (scaled / budgets)[free]
        assert factors.max().item() == pytest.approx(factors.min().item(), rel=1e-9)


def test_rescaling_uses_one_factor_and_caps_at_one() -> None:
    profile = EvictionProfile(
        KVShape("llama", 2, 2, 8), "knorm", 0.3, 3, ((0.1, 0.2), (0.2, 0.5)), ((0.0, 0.0), (0.0, 0.0))
    )
    assert torch.allclose(profile.rescaled(0.125), torch.tensor([[0.05, 0.1], [0.1, 0.25]], dtype=torch.float64))
    assert torch.allclose(profile.rescaled(0.625), torch.tensor([[0.3, 0.6], [0.6, 1.0]], dtype=torch.float64))
    for keep in (0.0, 2.0):
        with pytest.raises(ConfigError, match="share of a prompt"):
            profile.rescaled(keep)


def test_ratios_exclude_tokens_that_are_always_kept() -> None:
    counts = torch.tensor([[36, 136], [20, 1004]])
    assert retained_ratios(counts, 1004, sink=4, window=32).tolist() == [[0.0, 0.1], [0.0, 0.968]]
    with pytest.raises(DataError, match="4 tokens has none beyond the first 4"):
        retained_ratios(counts, 4, sink=4, window=0)


def test_rank_stability_is_the_correlation_of_ranks() -> None:
    values = sample_ratios()
    values[:, 0, :2] = 0.0  # ties
    expected = [spearmanr(row, values.flatten(1).mean(0)).statistic for row in values.flatten(1)]
    assert np.allclose(rank_stability(values), expected)
    assert np.allclose(rank_stability(values[:1].expand(3, 5, 3)), 1.0)
    assert np.isnan(rank_stability(torch.full((2, 5, 3), 0.3))).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), keep=st.floats(1e-6, 1), alpha=st.floats(0, 10))
def test_a_profile_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, seed: int, keep: float, alpha: float
) -> None:
    path = tmp_path_factory.mktemp("profile") / "model.kv.json"
    profile = EvictionProfile.from_ratios(
        SHAPE, "snapkv", keep, sample_ratios(seed=seed), {"window": 32, "max": True, "eps": 1e-2}, alpha
    )
    profile.save(path)
    reloaded = EvictionProfile.load(path)
    assert reloaded == profile and reloaded.budgets.equal(profile.budgets)
    before = path.read_bytes()
    reloaded.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "other",
    [KVShape("llama", 5, 3, 128), KVShape("qwen3", 6, 3, 128), KVShape("qwen3", 5, 4, 128), KVShape("qwen3", 5, 3, 64)],
)
def test_a_profile_of_another_model_is_refused(other: KVShape) -> None:
    made().check_model(SHAPE)
    with pytest.raises(ModelError, match=r"^the profile is of a qwen3 with 5 layers, 3 KV heads.*profile this model"):
        made().check_model(other)


@pytest.mark.parametrize("keep", [0, 2, -1.0])
def test_a_keep_outside_0_to_1_is_refused(keep: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keep is .* share of a prompt"):
        EvictionProfile.from_ratios(SHAPE, "snapkv", keep, sample_ratios())
    with pytest.raises(ConfigError, match="share of a prompt"):
        EvictionProfile.load(written(tmp_path, keep_ratio=keep))


def test_an_empty_sample_is_refused() -> None:
    with pytest.raises(DataError, match="at least one sample"):
        EvictionProfile.from_ratios(SHAPE, "snapkv", 0.3, sample_ratios()[:0])


def test_cluster_size_is_the_largest_divisor_and_round_trips(tmp_path: Path) -> None:
    profile = made().with_clusters(4)
    assert profile.clusters is not None and profile.clusters.size == 3 and len(profile.num_splits) == 5
    largest = profile.clusters.cluster_max(profile.rescaled(0.3))
    assert torch.equal(
        largest.argsort(descending=True), torch.tensor(profile.num_splits).argsort(descending=True, stable=True)
    )
    profile.save(tmp_path / "model.kv.json")
    assert EvictionProfile.load(tmp_path / "model.kv.json") == profile
    assert made().with_clusters(2, "per_layer").clusters.size == 1  # type: ignore[union-attr]


def written(folder: Path, **changed: Any) -> Path:
    """Write a valid profile with the given changes; None removes a field."""
    path = folder / "model.kv.json"
    made().with_clusters(3).save(path)
    content = json.loads(path.read_text()) | changed
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    return path


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"format": "smelt-kv-profile-0"}, "not a KV cache profile that this Smelt wrote"),
        ({"mean": None}, "the profile lacks 'mean'"),
        ({"extra": 1}, "has an unknown 'extra'"),
        ({"shape": [1]}, "its shape is missing"),
        ({"shape": {"model_type": "x", "num_layers": 5, "num_kv_heads": 3}}, "its shape lacks 'head_dim'"),
        (
            {"shape": {"model_type": "x", "num_layers": 5.0, "num_kv_heads": 3, "head_dim": 1}},
            "5.0 is no number of layers",
        ),
        ({"shape": {"model_type": 3, "num_layers": 5, "num_kv_heads": 3, "head_dim": 1}}, "must be text"),
        ({"scorer": 5}, "must be text"),
        ({"num_samples": 0}, "0 is no number of layers, heads or samples"),
        ({"num_samples": True}, "True is no number"),
        ({"keep_ratio": "0.3"}, "keep_ratio is no number"),
        ({"keep_ratio": True}, "keep_ratio is no number"),
        ({"alpha": float("nan")}, "alpha is no number"),
        ({"alpha": -1}, "must not be negative"),
        ({"scorer_params": {"window": [1]}}, "plain values"),
        ({"mean": 3}, "mean is not one list per layer"),
        ({"mean": [["a"]]}, "mean holds something that is no number"),
        ({"mean": [[0.5] * 3] * 4}, "one number per layer and KV head"),
        ({"std": [[0.5] * 2] * 5}, "one number per layer and KV head"),
        ({"mean": [[1.5] * 3] * 5}, "between 0 and 1"),
        ({"std": [[float("inf")] * 3] * 5}, "no number"),
        ({"num_splits": [1, 2]}, "a number of splits, at least 1, for each"),
        ({"num_splits": [0] * 5}, "a number of splits, at least 1, for each"),
        ({"num_splits": "8"}, "num_splits must be whole numbers"),
        ({"clusters": 3}, "its clusters are not a table"),
        (
            {"clusters": {"num_layers": 5, "num_kv_heads": 3, "members": [[[0, 0]]]}},
            "every head of every layer exactly once",
        ),
        ({"clusters": {"num_layers": 5, "num_kv_heads": 3, "members": [["a"]]}}, "no map of heads"),
        (
            {"clusters": {"num_layers": 1, "num_kv_heads": 1, "members": [[[0, 0]]]}, "num_splits": [1]},
            "of the same model",
        ),
    ],
)
def test_a_damaged_profile_is_one_sentence(changed: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=sentence):
        EvictionProfile.load(written(tmp_path, **changed))


def test_other_files_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "model.kv.json"
    with pytest.raises(ModelError, match="is missing or not a regular file"):
        EvictionProfile.load(path)
    path.write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        EvictionProfile.load(path)


def test_a_profile_of_version_0_1_loads_and_is_saved_in_the_new_format(tmp_path: Path) -> None:
    old = Path(__file__).parents[2] / "fixtures" / "v0.1" / "llama.kv.json"
    content = json.loads(old.read_text())
    assert content["format"] == "smelt-kv-profile-1"
    profile = EvictionProfile.load(old)
    assert profile.keep_ratio == content["keep"] and profile.num_samples == content["samples"]
    assert profile.shape.head_dim == content["shape"]["width"]
    assert [list(row) for row in profile.std] == content["deviation"]
    assert profile.scorer_params == content["parameters"] and list(profile.num_splits) == content["splits"]
    profile.save(tmp_path / "new.kv.json")
    assert json.loads((tmp_path / "new.kv.json").read_text())["format"] == "smelt-kv-profile-2"
    assert EvictionProfile.load(tmp_path / "new.kv.json") == profile
