"""Demonstrations from NumPy archives, environments by name, and one sentence for what is neither."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smelt.data import Demonstrations, Environment, LabeledImages, demonstration_batches, load_data
from smelt.data.environments import load_environment
from smelt.errors import DataError

STATES = np.random.default_rng(0).normal(size=(10, 4))
ACTIONS = np.arange(10) % 3


def saved(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "steps.npz", **{"observations": STATES, "actions": ACTIONS, **arrays})
    return folder / "steps.npz"


def test_archives_of_demonstrations_and_of_images_are_told_apart(tmp_path: Path) -> None:
    discrete = load_data(saved(tmp_path))
    assert isinstance(discrete, Demonstrations) and discrete.action_space == "discrete" and len(discrete) == 10
    assert discrete.observations.dtype == np.float32 and discrete.actions.tolist() == ACTIONS.tolist()
    continuous = load_data(saved(tmp_path, actions=STATES[:, :2]), kind="demonstrations")
    assert isinstance(continuous, Demonstrations) and continuous.action_space == "continuous"
    assert continuous.actions.dtype == np.float32 and continuous.actions.shape == (10, 2)
    np.savez(tmp_path / "images.npz", images=np.zeros((2, 4, 4), np.uint8), labels=np.array([0, 1]))
    assert isinstance(load_data(tmp_path / "images.npz"), LabeledImages)


def test_batches_draw_each_step_at_most_once(tmp_path: Path) -> None:
    data = load_data(saved(tmp_path))
    assert isinstance(data, Demonstrations)
    ordered = demonstration_batches(data, samples=None, batch_size=4, seed=0)
    assert [len(batch["labels"]) for batch in ordered] == [4, 4, 2]
    assert ordered[0]["observations"].tolist() == data.observations[:4].tolist()
    drawn = demonstration_batches(data, samples=7, batch_size=7, seed=1)[0]
    rows = {tuple(row): int(action) for row, action in zip(data.observations.tolist(), data.actions, strict=True)}
    assert len({tuple(row) for row in drawn["observations"].tolist()}) == 7, "no step twice"
    assert [rows[tuple(row)] for row in drawn["observations"].tolist()] == drawn["labels"].tolist()
    other = demonstration_batches(data, samples=7, batch_size=7, seed=2)[0]
    assert drawn["labels"].tolist() != other["labels"].tolist()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"observations": STATES[:, 0]}, r"observations float64 \[10\]: expected numbers \[steps, features\]"),
        ({"observations": STATES.astype(str)}, r"expected numbers \[steps, features\]"),
        ({"actions": ACTIONS[:9]}, r"actions int64 \[9\] for 10 observations"),
        ({"actions": ACTIONS.astype(float)}, r"actions float64 \[10\] for 10 observations: expected whole numbers"),
        ({"actions": ACTIONS - 1}, "negative actions: discrete actions are numbered from 0"),
        ({"observations": np.full_like(STATES, np.nan)}, "contains NaN or infinity"),
        ({"actions": np.array([{}] * 10)}, "holds Python objects, which Smelt never unpickles"),
    ],
)
def test_a_bad_archive_is_refused(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_data(saved(tmp_path, **arrays))


def test_an_archive_is_not_read_as_another_kind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds demonstrations and cannot be read as images data"):
        load_data(saved(tmp_path), kind="images")
    (tmp_path / "rows.csv").write_text("text,label\na,0\n")
    with pytest.raises(DataError, match=r"is a table: demonstrations are a NumPy archive \(\.npz\)"):
        load_data(tmp_path / "rows.csv", kind="demonstrations")


def test_an_environment_has_a_name_and_episodes() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    assert load_data("gym:CartPole-v1") == Environment("CartPole-v1", 20)
    assert load_data("gym:CartPole-v1@3") == Environment("CartPole-v1", 3)
    assert load_environment("gym:CartPole-v1@3").name == "gym:CartPole-v1@3"


@pytest.mark.parametrize("source", ["gym:", "gym:CartPole-v1@0", "gym:CartPole-v1@", "gym:os:CartPole-v1", "gym:a/b/c"])
def test_what_is_no_environment_is_refused(source: str) -> None:
    with pytest.raises(DataError, match="is not an environment: expected gym:NAME or gym:NAME@EPISODES"):
        load_data(source)


def test_an_unknown_environment_is_one_sentence() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    with pytest.raises(DataError, match=r"gym:CartPool-v1 cannot be made \(.+\)\."):
        load_data("gym:CartPool-v1")


def test_without_gymnasium_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_gymnasium(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "gymnasium":
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_gymnasium)
    with pytest.raises(DataError, match=r"environments need one more package: pip install '\w+\[policies\]'\."):
        load_data("gym:CartPole-v1")
