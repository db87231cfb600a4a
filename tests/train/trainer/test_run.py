"""Complete runs on real ranks: they learn, resume bit for bit, and log the traffic."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import smelt
from smelt.compression.base import MethodContext
from smelt.compression.distillation.training_run import process_group
from smelt.compression.methods import METHODS
from smelt.models.artifact import save_artifact
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.run_folder import RunFolder
from smelt.train.trainer.trainer import Trainer
from tests.train.trainer.runs import RESNET, TEXT, images, language, parse_config, run_refused, run_training
from tests.trained import character_model

ROOT = Path(__file__).parents[3]


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoints" / f"step-{step}" / "model.safetensors")


def timeless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in ("seconds", "phases")} for line in lines]


def everything(folder: Path) -> dict[str, Any]:
    """Return the content of every checkpoint file, without times."""
    results: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".safetensors":
            results[str(path.relative_to(folder))] = path.read_bytes()
        elif path.name == "position.json":
            results["position"] = {
                key: value for key, value in json.loads(path.read_text()).items() if key != "seconds"
            }
    return results


@pytest.mark.parametrize(
    "changes",
    [
        {"gradients": "exdyna:density=0.05,sampled_steps=2", "max_grad_norm": 1.0, "gradient_accumulation_steps": 2},
        {
            "gradients": "topk:density=0.05",
            "exchange": {"fixed_capacity": 2.0},
            "precision": "fp16",
            "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        },
    ],
    ids=["exdyna-accumulated", "topk-fp16"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(changes: dict[str, Any], tmp_path: Path) -> None:
    """Weights, optimizer, residuals, thresholds, scaler and data position match bit for bit."""
    content = language(tmp_path, **changes)
    uninterrupted = run_training(2, content, tmp_path / "run")
    kept = everything(tmp_path / "run" / "checkpoints" / "step-6")
    assert sum(name.startswith("gradients/") for name in kept) == 2
    report = json.loads((tmp_path / "run" / "checkpoints" / "step-6" / "gradients" / "gradients.json").read_text())
    assert report["steps"] == 6  # accumulated passes send nothing
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
    resumed = run_training(2, content, tmp_path / "run", resume=True)
    assert everything(tmp_path / "run" / "checkpoints" / "step-6") == kept
    assert timeless(resumed) == timeless(uninterrupted)
    assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5, 6]
    assert all(before["seconds"] <= after["seconds"] for before, after in pairwise(resumed))
    assert all(line["bytes"] > 0 and 0.02 < line["density"] < 0.2 for line in resumed)


def test_density_one_and_no_compression_train_the_same(tmp_path: Path) -> None:
    plain = run_training(2, language(tmp_path, gradients="none"), tmp_path / "plain")
    dense = run_training(2, language(tmp_path, gradients={"method": "topk", "density": 1}), tmp_path / "dense")
    for name, tensor in weights(tmp_path / "plain", 6).items():
        assert torch.allclose(tensor, weights(tmp_path / "dense", 6)[name], atol=1e-5), name
    assert (
        plain[-1]["bytes"] == 4 * RunFolder(tmp_path / "plain").read_metadata()["parameters"]
    )  # 2 (n-1)/n of float32, n = 2
    assert dense[-1]["density"] == 1


def test_the_loss_falls_and_the_log_reports_the_traffic(tmp_path: Path) -> None:
    lines = run_training(
        2, language(tmp_path, steps=40, gradients="exdyna:density=0.2,sampled_steps=5"), tmp_path / "run"
    )
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert lines[-1]["evaluation"]["loss"] < 0.8 * lines[2]["evaluation"]["loss"]
    assert all(0.1 < line["density"] < 0.4 for line in lines)
    facts = RunFolder(tmp_path / "run").read_metadata()
    for line in lines:
        assert line["build_up"] == pytest.approx(line["density"] / 0.2, rel=0.01)
        assert line["padding"] >= 0
        assert 0 < line["bytes"] < 0.6 * 4 * facts["parameters"]
        assert all(seconds >= 0 for seconds in line["phases"].values()) and line["phases"]["reduce"] > 0
        assert sum(line["phases"].values()) <= line["seconds"]
    assert lines[-1]["total_bytes"] == pytest.approx(sum(line["bytes"] for line in lines))
    assert "/" not in json.dumps(facts["machine"]["cpu"]) and facts["world_size"] == 2
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-36",
        "step-39",
        "step-40",
    ]
    model = smelt.load(tmp_path / "run" / "model")
    assert set(model.generate("3 times ", 4)) <= set(TEXT)  # the tokenizer is saved too
    assert model.tokenizer is not None and model.tokenizer.encode("é\n") == [
        *model.tokenizer.encode("é"),
        *model.tokenizer.encode("\n"),
    ]


def test_hierarchical_runs_send_inside_and_between_nodes_and_resume_bit_identically(tmp_path: Path) -> None:
    content = language(tmp_path, exchange={"ranks_per_node": 2}, checkpoint={"every": 2}, steps=4)
    uninterrupted = run_training(4, content, tmp_path / "run")
    assert all(line["intra_node_bytes"] > 0 and line["bytes"] > 0 for line in uninterrupted)
    kept = everything(tmp_path / "run" / "checkpoints" / "step-4")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    run_training(4, content, tmp_path / "run", resume=True)
    assert everything(tmp_path / "run" / "checkpoints" / "step-4") == kept


def test_accumulated_passes_equal_one_larger_batch(tmp_path: Path) -> None:
    still = {**language(tmp_path)["model"], "attention_dropout": 0.0}
    common = {"model": still, "gradients": "none", "steps": 3}
    run_training(2, language(tmp_path, **common, batch_size=2, gradient_accumulation_steps=2), tmp_path / "parts")
    run_training(2, language(tmp_path, **common, batch_size=4), tmp_path / "whole")
    for name, tensor in weights(tmp_path / "parts", 3).items():
        assert torch.allclose(tensor, weights(tmp_path / "whole", 3)[name], atol=2e-4), name


def test_a_classifier_learns_and_is_saved(tmp_path: Path) -> None:
    """The checkpoint includes the running means of batch norms."""
    lines = run_training(2, images(tmp_path, gradients="micro:density=0.1", precision="bf16"), tmp_path / "run")
    assert lines[-1]["evaluation"]["accuracy"] > 0.9
    facts = RunFolder(tmp_path / "run").read_metadata()["data"]
    assert (facts["images"], facts["held_out"], facts["classes"]) == (256, 64, 2)
    assert any("running_mean" in name for name in weights(tmp_path / "run", 20))
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_another_world_size_is_refused_and_resplit_resumes(tmp_path: Path) -> None:
    content = language(tmp_path, steps=3)
    run_training(2, content, tmp_path / "run")
    longer = {**content, "steps": 6}
    (error,) = run_refused(1, longer, tmp_path / "run", resume=True)
    assert "was written by 2 ranks and there are 1; start as many, or give --resplit" in error
    lines = run_training(1, longer, tmp_path / "run", resume=True, resplit=True)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["samples"] for line in lines] == [8, 16, 24, 28, 32, 36]
    assert lines[-1]["bytes"] == 0


def test_nonfinite_gradients_fail_every_rank_with_one_sentence(tmp_path: Path) -> None:
    for method in ("none", "exdyna:density=0.05"):
        content = language(tmp_path, gradients=method, optimizer={"name": "sgd", "lr": 1e30})
        errors = run_refused(2, content, tmp_path / method[:4])
        assert len(errors) == 2
        assert all("Error: the " in error and "not finite" in error for error in errors), errors


def test_a_run_is_not_overwritten_nor_resumed_with_other_settings(tmp_path: Path) -> None:
    content = language(tmp_path, steps=1, gradients="none")
    run_training(1, content, tmp_path / "run")
    before = everything(tmp_path / "run")
    (error,) = run_refused(1, content, tmp_path / "run")
    assert "holds a run already; give --resume to continue it, or another --out" in error
    (error,) = run_refused(1, {**content, "seed": 1}, tmp_path / "run", resume=True)
    assert "was started with seed = 0, and now it is 1" in error
    (error,) = run_refused(1, content, tmp_path)
    assert "is not empty and holds no run" in error
    assert everything(tmp_path / "run") == before


def test_a_run_killed_before_its_first_step_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cpu = parse_config(language(tmp_path, steps=1, gradients="none")), torch.device("cpu")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    for write in ("write_metadata", "truncate_log"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt), process_group(cpu):
            patched.setattr(RunFolder, write, killed)
            Trainer(config, tmp_path / "run", cpu, resume=False, resplit=False)
        RunFolder(tmp_path / "run").check_usable(config, resume=True)
    with process_group(cpu):
        Trainer(config, tmp_path / "run", cpu, resume=True, resplit=False).train()
    assert [line["step"] for line in RunFolder(tmp_path / "run").read_log()] == [1]


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    content = language(tmp_path, steps=1, gradients="none")
    run_training(1, content, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-1" / "optimizer.safetensors").write_bytes(b"no")
    (error,) = run_refused(1, content, tmp_path / "run", resume=True)
    assert "optimizer.safetensors cannot be read" in error and "remove" in error


def test_incompatible_models_raise_one_sentence(tmp_path: Path) -> None:
    small_vocab = {**language(tmp_path)["model"], "vocab_size": 50}
    (error,) = run_refused(1, language(tmp_path, model=small_vocab), tmp_path / "few")
    assert "the model knows 50; set vocab_size" in error
    (error,) = run_refused(1, language(tmp_path, model={**small_vocab, "hiden_size": 3}), tmp_path / "key")
    assert "llama has no key 'hiden_size'" in error
    (error,) = run_refused(1, language(tmp_path, data={**language(tmp_path)["data"], "seq_len": 65}), tmp_path / "long")
    assert "the model reads 64 tokens and data.seq_len is 65" in error
    (error,) = run_refused(1, images(tmp_path, model={**RESNET, "num_labels": 1}), tmp_path / "labels")
    assert "num_labels = 1" in error


@pytest.mark.parametrize("name", ["bytes", "digits"])
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    config = TrainConfig.load(ROOT / "examples" / "train" / f"{name}.yaml", "exdyna:density=0.01")
    content = {**config.to_json(), "steps": 2, "evaluate": {"samples": 8}, "device": "cpu"}
    if name == "digits":
        content["data"] = images(tmp_path)["data"]
    assert len(run_training(2, content, tmp_path / "run")) == 2


@pytest.mark.parametrize("changes", [{}, {"tokenizer": "model"}], ids=["own-tokenizer", "named-tokenizer"])
def test_an_artifact_is_saved_as_one(changes: dict[str, Any], tmp_path: Path) -> None:
    """Its layers differ in width, which transformers' folders cannot say."""
    model = character_model()
    METHODS.build("random", budget={"parameters": 0.6}).apply(model, MethodContext())
    model.history = [{"method": "random"}]
    (tmp_path / "pruned").mkdir()
    save_artifact(model, tmp_path / "pruned")
    named = {name: str(tmp_path / "pruned") for name in changes}
    lines = run_training(1, language(tmp_path, model=str(tmp_path / "pruned"), **named, steps=2), tmp_path / "run")
    trained = smelt.load(tmp_path / "run" / "model")
    assert trained.anatomy.shape() == model.anatomy.shape() and trained.history == model.history
    assert trained.tokenizer is not None and trained.tokenizer.encode("cat") == model.tokenizer.encode("cat")
    saved = weights(tmp_path / "run", 2)
    assert len(lines) == 2 and all(
        torch.equal(saved[name], tensor) for name, tensor in trained.network.named_parameters()
    )
    assert not torch.equal(trained.network.lm_head.weight, model.network.lm_head.weight)
