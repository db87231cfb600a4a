"""`smelt kv profile` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from smelt.kvcache.eviction.budgets import make_budget_rule
from smelt.kvcache.eviction.prefill import find_kv_shape
from smelt.kvcache.eviction.profile import EvictionProfile
from smelt.kvcache.eviction.profiling import measure_kept_ratios, sample_prompts
from smelt.kvcache.eviction.scorers import make_scorer
from smelt.models.load import load
from tests.cli.conftest import Place, Smelt


def arguments(place: Place, out: Path, *more: str) -> list[str]:
    return ["kv", "profile", place / "llama", "--data", place / "text.txt", "--samples", "3", "--length", "120",
            "-o", str(out), "--heads", "2", *more]  # fmt: skip


def test_a_profile(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    out = tmp_path / "llama.kv.json"
    done = smelt_here(*arguments(place, out, "--keep", "0.8", "--seed", "3", "--json", str(tmp_path / "r.json")))
    assert done.code == 0, done
    assert "layer" in done.out and "times the memory" in done.out
    contents, report, model = (
        json.loads((tmp_path / "r.json").read_text()),
        EvictionProfile.load(out),
        load(place / "llama"),
    )
    report.check_model(find_kv_shape(model))
    assert contents["keep"] == report.keep_ratio == 0.8 and contents["samples"] == 3 and contents["seed"] == 3
    assert torch.equal(torch.tensor(contents["budgets"], dtype=torch.float64), report.budgets)
    assert (
        contents["budget"] >= contents["mean"] > 0
        and contents["over_ideal"]["global"] <= contents["over_ideal"]["adjacent"]
    )
    assert model.tokenizer is not None
    tokens = model.tokenizer((Path(place / "text.txt")).read_text(), verbose=False)["input_ids"]
    assert sample_prompts(tokens, 3, 120, 3) != sample_prompts(tokens, 3, 120, 4)
    shares = measure_kept_ratios(
        model, sample_prompts(tokens, 3, 120, 3), make_scorer("snapkv"), make_budget_rule("ada"), 0.8
    )
    assert torch.allclose(shares.mean(0), torch.tensor(report.mean, dtype=torch.float64))


def test_a_scorer_that_repeats_the_prompt(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    done = smelt_here(*arguments(place, tmp_path / "p.json", "--scorer", "kvzip", "--keep", "0.7"))
    assert done.code == 0 and EvictionProfile.load(tmp_path / "p.json").scorer == "kvzip"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--keep", "0"], "above 0 and at most 1"),
        (["--keep", "2"], "above 0 and at most 1"),
        (["--keep", "0.3"], "of 120 tokens 0.3 are 36, and snapkv always keeps 68"),
        (["--scorer", "best"], "there is no scorer 'best'"),
        (["--length", "129"], "more than the model's 128 positions"),
        (["--length", "100000"], "give more, or a smaller length"),
    ],
)
def test_invalid_arguments_raise_one_sentence(
    more: list[str], told: str, place: Place, smelt_here: Smelt, tmp_path: Path
) -> None:
    smelt_here(*arguments(place, tmp_path / "p.json", *more)).refused(told)
    assert not (tmp_path / "p.json").exists()
