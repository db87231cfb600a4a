"""`smelt compress` with `guard: speed` and a kernel made slow on purpose: exactly its layers stay as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from smelt.compression.quantization import speed_guard
from smelt.kernels.cpu.build import load_library
from smelt.kernels.cpu.program import Program
from smelt.models.load import load
from smelt.models.quantized import quantized_layers
from smelt.numerics.catalog import format_name
from smelt.serve.engine import layer_timing
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.layer_timing import LayerTimer
from smelt.serve.engine.sampling_params import SamplingParams
from tests.cli.conftest import Done, Forked, Moment, Place, Smelt, resume, same_bytes

TRACE = '{"prompt_tokens": 8, "output_tokens": 4}\n'
REPEATS = 300  # of the product in the slow kernel
SLOW_SHAPE = (32, 48)  # of the down projections
GPTQ = {"method": "gptq", "group_size": 16}
needs_library = pytest.mark.skipif(load_library() is None, reason="needs the compiled CPU kernels")


def recipe(place: Place, **keys: Any) -> str:
    content = {
        "data": {"source": place / "text.txt", "samples": 8, "seq_len": 32, "batch_size": 2},
        "evaluate": {"context": 64, "limit": 1500},
        "guard": "speed",
        "steps": [GPTQ],
        **keys,
    }
    return place.recipe("guarded.yaml", content)


def compress(smelt: Any, place: Place, out: Path, *more: str, model: str = "llama", **keys: Any) -> Done:
    trace = place.folder / "trace.jsonl"
    trace.write_text(TRACE)
    arguments = ["compress", place / model, "-r", recipe(place, **keys), "-o", str(out), "--workload", str(trace)]
    return smelt(*arguments, *more)


@pytest.fixture
def slow_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat the product of one shape in the compiled program; with a wide tolerance the clock cannot matter."""
    packed = Program.packed

    def slow(self: Program, plan: Any, *arguments: Any) -> None:
        slow_plan = (plan.rows, plan.columns) == SLOW_SHAPE and plan.bits == 4
        for _ in range(REPEATS if slow_plan else 1):
            packed(self, plan, *arguments)

    monkeypatch.setattr(Program, "packed", slow)
    monkeypatch.setattr(speed_guard, "TOLERANCE", 20.0)
    monkeypatch.setattr(layer_timing, "MAX_COPIES", 2)
    monkeypatch.setattr(layer_timing, "MIN_SECONDS", 0.0)


@pytest.fixture
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LayerTimer, spec: object) -> float:
        raise AssertionError("layers were timed again")

    monkeypatch.setattr(LayerTimer, "time_ratio", refuse)


@needs_library
def test_the_layers_of_a_slow_kernel_stay_as_they_were(
    place: Place, smelt_here: Smelt, quick: None, slow_kernel: None, tmp_path: Path
) -> None:
    done = compress(smelt_here, place, tmp_path / "out", "--speed-seconds", "1")
    assert done.code == 0, done
    model, source = load(tmp_path / "out"), load(place / "llama")
    down = [f"model.layers.{block}.mlp.down_proj" for block in range(3)]
    assert len(quantized_layers(model.network)) == 18 and not set(down) & set(quantized_layers(model.network))
    for path in down:
        assert torch.equal(model.network.get_submodule(path).weight, source.network.get_submodule(path).weight)
    engine = Engine(load(tmp_path / "out"))
    (answer,) = engine.submit([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
    while engine.busy:
        engine.step()
    assert len(answer.output) == 3
    sentence = "3 of 21 layers stay unquantized"
    assert sentence in done.err + done.out and sentence in (tmp_path / "out" / "report.html").read_text()
    record = json.loads((tmp_path / "out" / "measurements.json").read_text())
    guard = record["steps"][0]["speed_guard"]
    assert guard["unquantized"] == down and guard["extra_bytes"] > 0 and len(guard["time_ratios"]) == 21
    assert all(guard["time_ratios"][path] > 21 for path in down)
    backends = record["engine"]["after"]["layer_backends"]
    assert {backends[path] for path in down} == {"dense float32"}
    described = json.loads((tmp_path / "out" / "smelt.json").read_text())
    assert described["recipe"]["guard"] == "speed"
    layers = described["history"][0]["speed_guard"]["layers"]
    assert (
        layers == guard["layers"]
        and list(layers) == down
        and {layers[path]["became"] for path in down} == {"unquantized"}
    )
    passport = json.loads((tmp_path / "out" / "passport.json").read_text())
    assert passport["choices"]["steps"]["step-0"]["speed_guard"]["unquantized"] == down


@needs_library
def test_the_layers_of_a_slow_kernel_get_another_format(
    place: Place, smelt_here: Smelt, quick: None, slow_kernel: None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The kernel is slow for its shape at 4 bits only, so that of the formats named, 8 bits are fast enough."""
    done = compress(smelt_here, place, tmp_path / "out", "--no-speed", guard={"speed": ["int4/16", "int8"]})
    assert done.code == 0, done
    down = [f"model.layers.{block}.mlp.down_proj" for block in range(3)]
    quantized = quantized_layers(load(tmp_path / "out").network)
    assert len(quantized) == 21
    assert {format_name(quantized[path].scheme.weight) for path in down} == {"int8"}
    sentence = "3 of 21 layers become int8"
    assert sentence in done.err + done.out and sentence in (tmp_path / "out" / "report.html").read_text()
    described = json.loads((tmp_path / "out" / "smelt.json").read_text())
    assert described["recipe"]["guard"] == {"speed": ["int4/16", "int8"]}
    for path, layer in described["history"][0]["speed_guard"]["layers"].items():
        assert path in down and layer["became"] == "int8"
        own, four, eight = layer["time_ratios"].values()
        assert min(own, four) > 21 > eight
        assert f"int4/16 {four:.2f}x, int8 {eight:.2f}x" in (tmp_path / "out" / "report.html").read_text()
    request.getfixturevalue("no_timing")
    repeated = smelt_here("verify", str(tmp_path / "out"), "--reproduce")
    assert repeated.code == 0, repeated


@needs_library
def test_a_pruned_layer_keeps_its_pruned_weights(
    place: Place, smelt_here: Smelt, quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(LayerTimer, "time_ratio", lambda self, spec: 2.0)
    pruning = {"method": "magnitude", "budget": {"parameters": 0.9}, "ffn_multiple": 16}
    done = compress(smelt_here, place, tmp_path / "both", "--no-speed", steps=[pruning, GPTQ])
    assert done.code == 0 and "all 21 layers stay unquantized" in done.err + done.out
    assert compress(smelt_here, place, tmp_path / "pruned", "--no-speed", steps=[pruning], guard=None).code == 0
    both, pruned = (load(tmp_path / name).network.state_dict() for name in ("both", "pruned"))
    assert both.keys() == pruned.keys() and all(torch.equal(both[name], pruned[name]) for name in both)


def test_without_slow_layers_the_guard_changes_no_weight(
    place: Place, smelt_here: Smelt, quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(LayerTimer, "time_ratio", lambda self, spec: 1.0)
    done = compress(smelt_here, place, tmp_path / "guarded", "--no-speed")
    assert done.code == 0 and "none of the 21 layers" in done.err + done.out
    assert "none of the 21 layers" in (tmp_path / "guarded" / "report.html").read_text()
    assert compress(smelt_here, place, tmp_path / "plain", "--no-speed", guard=None).code == 0
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("guarded", "plain")]
    assert files[0] == files[1]


@needs_library
def test_a_repeated_run_gives_the_same_bytes_without_timing(
    place: Place, smelt_here: Smelt, quick: None, slow_kernel: None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert compress(smelt_here, place, tmp_path / "out", "--no-speed").code == 0
    request.getfixturevalue("no_timing")
    done = smelt_here("verify", str(tmp_path / "out"), "--reproduce")
    assert done.code == 0, done


def test_a_killed_run_keeps_its_decision(place: Place, forked: Forked, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert compress(forked_at("speed_guard.json", forked), place, out, "--no-speed").code == -9
    decision = json.loads((tmp_path / "out.partial" / "step-0-work" / "speed_guard.json").read_text())
    decision.pop("sha256")
    assert compress(forked_at("block-1.json", forked), place, out, "--no-speed", *resume(str(out))).code == -9
    other = compress(forked, place, out, "--no-speed", "--workload", "chat", "--resume")
    other.refused("its workload differs")
    done = compress(forked, place, out, "--no-speed", "--resume")
    assert done.code == 0, done
    assert json.loads((out / "passport.json").read_text())["choices"]["steps"]["step-0"]["speed_guard"] == decision
    repeated = forked("verify", str(out), "--reproduce")
    assert repeated.code == 0, repeated


def forked_at(file: str, forked: Forked) -> Any:
    return lambda *arguments: forked(*arguments, moment=Moment(file))


def test_bad_guards_are_one_sentence(place: Place, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    bad_guards: list[Any] = ["sped", ["speed"], {"speed": []}, {"speed": "int8"}, {"speed": [8]}, {"size": ["int8"]}]
    for bad in bad_guards:
        compress(smelt_here, place, out, guard=bad).refused("guard of the recipe must be speed, or {speed: [int8]}")
    compress(smelt_here, place, out, "--guard", "size").refused("guard of the recipe must be speed, or")
    compress(smelt_here, place, out, guard={"speed": ["int9"]}).refused("there is no number format 'int9'")
    compress(smelt_here, place, out, "--guard", "speed:int9").refused("there is no number format 'int9'")
    compress(smelt_here, place, out, guard={"speed": ["int8", "int8/row"]}).refused("names a format twice")
    pruning = {"method": "magnitude", "budget": {"parameters": 0.9}}
    compress(smelt_here, place, out, steps=[pruning]).refused("no step quantizes")
    compress(smelt_here, place, out, model="bert", steps=[{"method": "rtn", "group_size": 16}]).refused(
        "no language model"
    )
    assert not list(tmp_path.iterdir())


def test_the_option_sets_the_guard(
    place: Place, smelt_here: Smelt, quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(LayerTimer, "time_ratio", lambda self, spec: 2.0 if spec.in_features == 48 else 1.0)
    options = ["--method", "rtn", "--group-size", "16", "--eval-data", place / "text.txt"]
    for name in ("one", "two"):
        out = str(tmp_path / name)
        done = smelt_here("compress", place / "llama", *options, "--guard", "speed", "--no-speed", "-o", out)
        assert done.code == 0 and "3 of 21 layers" in done.err + done.out
    assert same_bytes(tmp_path / "one", tmp_path / "two")
    out = str(tmp_path / "three")
    done = smelt_here("compress", place / "llama", *options, "--guard", "speed:nf4/16,int8", "--no-speed", "-o", out)
    assert done.code == 0, done
    assert json.loads((tmp_path / "three" / "smelt.json").read_text())["recipe"]["guard"] == {
        "speed": ["nf4/16", "int8"]
    }
