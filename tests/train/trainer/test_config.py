"""Valid training configs, and one-sentence errors for everything else."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smelt.errors import ConfigError
from smelt.train.gradients.autotune.auto import Auto
from smelt.train.gradients.compressors import DGC, ExDyna
from smelt.train.gradients.dense import Dense
from smelt.train.trainer import config
from smelt.train.trainer.config import ScheduleConfig, TrainConfig
from smelt.train.trainer.dataloader import ShuffledSampler, batch_start
from smelt.train.trainer.gradient_sync import build_compressor, normalize_gradients
from smelt.train.trainer.optimizer import lr_at
from tests.train.trainer.runs import parse_config, write_config

ROOT = Path(__file__).parents[3]
MODEL = {"model": "a-model"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"stepps": 3}, "the configuration has no key 'stepps'; did you mean 'steps'?"),
        ({"optimizer": {"learning": 3}}, "`optimizer` of the configuration has no key 'learning'; it has name, lr"),
        ({"optimizer": {"name": "adam"}}, "there is no name 'adam'; did you mean 'adamw'?"),
        ({"optimizer": {"lr": "fast"}}, "lr of `optimizer` of the configuration must be a number, not 'fast'"),
        ({"optimizer": {"lr": 0}}, "lr is 0; it must be above 0"),
        ({"optimizer": 3}, "`optimizer` of the configuration must be a mapping, not 3"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"steps": True}, "steps of the configuration must be an integer, not True"),
        ({"steps": 1.5}, "must be an integer"),
        ({"task": "vision"}, "there is no task 'vision'"),
        ({"precision": "fp61"}, "did you mean 'fp16'?"),
        ({"fp8": {"scaling": "block"}}, "there is no FP8 scaling 'block'; did you mean 'blockwise'?"),
        ({"fp8": {"amax_history_len": 0}}, "amax_history_len is 0"),
        ({"fp8_chunked": {"loss_scale": 0}}, "loss_scale is 0; it must be above 0"),
        ({"fp8_chunked": {"accumulator_bits": {"gradient": 0}}}, "accumulator_bits.gradient is 0"),
        ({"max_grad_norm": -1}, "max_grad_norm is -1"),
        ({"gradients": "exdyna:density=0"}, "density is 0; it is the share of gradients that is sent"),
        ({"gradients": "exdyna:density=2"}, "density is 2; it is the share of gradients that is sent"),
        ({"gradients": {"method": "exdyna", "density": 2.0}}, "density is 2"),
        ({"gradients": "exdina"}, "there is no gradient method 'exdina'; did you mean 'exdyna'?"),
        ({"gradients": "exdyna:density"}, "'density' has no value"),
        ({"gradients": "exdyna:dense=1"}, "has no parameter 'dense'"),
        ({"gradients": "none:density=1"}, "none has no parameter 'density'"),
        ({"gradients": "auto:densty=1"}, "auto has no parameter 'densty'; did you mean 'density'?"),
        ({"gradients": "dgc"}, "dgc has a momentum of its own"),
        ({"exchange": {"wire_dtype": "int4"}}, "wire_dtype is one of"),
        ({"exchange": {"wire_type": "int8"}}, "did you mean 'wire_dtype'?"),
        ({"checkpoint": {"keep": 0}}, "keep is 0"),
        ({"data": {"seq_len": 1}}, "seq_len is 1"),
    ],
)
def test_invalid_configs_raise_one_sentence(content: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({**MODEL, **content})
    assert words in str(caught.value)


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: a-model\noptimizer: {lr: 3e-4}\ngradients: micro\nmax_grad_norm: 1\nprecision: off\n")
    read = TrainConfig.load(path)
    assert (read.optimizer.lr, read.gradients, read.max_grad_norm) == (3e-4, {"method": "micro"}, 1.0)
    assert read.precision == "off"
    assert parse_config(read.to_json()) == read
    assert TrainConfig.load(path, "topk:density=1e-2").gradients == {"method": "topk", "density": 0.01}
    with pytest.raises(ConfigError, match="does not say which `model` to train"):
        TrainConfig.load(write_config(path, {"steps": 3}))
    path.write_text("model: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        TrainConfig.load(path)
    with pytest.raises(ConfigError, match="there is no configuration at"):
        TrainConfig.load(tmp_path / "none.yaml")


def test_old_keys_work_with_a_warning_and_runs_started_with_them_resume(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="`warm_up` .* is now called `warmup_steps`"):
        config = parse_config({**MODEL, "schedule": {"warm_up": 4}})
    assert config.schedule.warmup_steps == 4
    before = config.to_json()
    before["batch"], before["clip"] = before.pop("batch_size"), before.pop("max_grad_norm")
    before["schedule"]["warm_up"] = before["schedule"].pop("warmup_steps")
    config.check_same_run(before, tmp_path)
    before["batch"] = 9
    with pytest.raises(ConfigError, match="was started with batch_size = 9, and now it is 8"):
        config.check_same_run(before, tmp_path)


def test_a_run_of_a_version_without_fp8_resumes(tmp_path: Path) -> None:
    """Keys that it did not have count as defaults."""
    before = {key: value for key, value in parse_config(MODEL).to_json().items() if key not in ("fp8", "compile")}
    parse_config(MODEL).check_same_run(before, tmp_path)
    with pytest.raises(ConfigError, match="was started with compile = False, and now it is True"):
        parse_config({**MODEL, "compile": True}).check_same_run(before, tmp_path)


def test_gradient_compression_settings() -> None:
    assert build_compressor(None) is None and build_compressor("none") is None
    assert build_compressor("bf16") == Dense(wire_dtype="bfloat16")
    assert build_compressor("exdyna:density=0.001,balance=false") == ExDyna(density=0.001, balance=False)
    assert build_compressor({"method": "dgc", "momentum": 0}) == DGC(momentum=0)
    assert build_compressor({"method": "auto", "methods": ["micro"]}) == Auto(methods=("micro",))
    assert normalize_gradients("auto:density=0.01") == {"method": "auto", "density": 0.01}


def test_the_learning_rate_warms_up_and_decays() -> None:
    cosine = ScheduleConfig("cosine", warmup_steps=4, min_lr_ratio=0.1)
    rates = [lr_at(step, 12, 2.0, cosine) for step in range(13)]
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates[8] == pytest.approx(2.0 * 0.55)
    assert rates[12] == pytest.approx(0.2)
    assert lr_at(9, 12, 2.0, ScheduleConfig("constant")) == 2.0


def test_ranks_split_every_sample_once_per_epoch() -> None:
    """Also when the world size changes midway; another seed gives another order."""

    def seen(start: int, steps: int, workers: int, batch: int, accumulate: int) -> tuple[list[int], int]:
        results: list[int] = []
        for _ in range(steps):
            for part in range(accumulate):
                for rank in range(workers):
                    first = batch_start(start, part, batch, workers, rank)
                    results += ShuffledSampler(24, 7).indices(first, batch).tolist()
            start += workers * batch * accumulate
        return results, start

    first, position = seen(0, 2, 2, 3, 1)
    rest, position = seen(position, 1, 3, 2, 2)
    assert sorted(first + rest) == list(range(24))
    repeated, _ = seen(position, 2, 2, 3, 2)
    assert sorted(repeated) == list(range(24)) and repeated != first + rest
    assert not np.array_equal(ShuffledSampler(24, 7).indices(0, 24), ShuffledSampler(24, 8).indices(0, 24))


def test_the_docs_page_lists_exactly_the_keys() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    table = page.partition("| key | default | meaning |")[2].partition("\n\n")[0]
    shown = set(re.findall(r"^\| `([\w.]+)` \|", table, re.M))
    parts = {"data": "DataConfig", "optimizer": "OptimizerConfig", "schedule": "ScheduleConfig",
             "evaluate": "EvaluateConfig", "checkpoint": "CheckpointConfig", "fp8": "Fp8Settings",
             "fp8_chunked": "ChunkedSettings"}  # fmt: skip
    expected = {field.name for field in fields(TrainConfig)} - set(parts)
    for key, type_name in parts.items():
        expected |= {f"{key}.{field.name}" for field in fields(getattr(config, type_name))}
    assert shown == expected
