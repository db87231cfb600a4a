"""The base of all quantization methods: reported counts, resuming, and refused inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import smelt.compression.quantization  # noqa: F401  (puts the methods on the list)
from smelt.compression.base import METHODS, MethodContext
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.quantization.base import Quantization
from smelt.errors import DataError, ModelError, RecipeError, SmeltError
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.progress import NullProgress
from tests.tiny import BUILDS, TRANSFORMERS, inputs

METHODS_HERE = ("rtn", "gptq", "hqq", "awq", "smoothquant", "aqas", "mixed")
NEED_DATA = tuple(method for method in METHODS_HERE if method not in ("rtn", "hqq"))
SMALL = {"group_size": 16}


def batches(name: str, count: int = 3) -> list[dict[str, Tensor]]:
    return [inputs(name, seed=seed) for seed in range(count)]


def quantize_tiny(name: str, settings: dict[str, Any], **context: Any) -> Model:
    model = Model(BUILDS[name]())
    METHODS.build(settings).apply(model, MethodContext(batches=batches(name), **context))
    return model


def same(one: Model, two: Model) -> bool:
    a, b = one.network.state_dict(), two.network.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


class InterruptedRunError(Exception):
    pass


class InterruptingProgress(NullProgress):
    """Stop the run when a block is about to start."""

    def __init__(self, after: int) -> None:
        self.after = after

    def track(self, items: Any, description: str) -> Any:
        for position, item in enumerate(items):
            if position == self.after and "sensitivity" not in description:
                raise InterruptedRunError
            yield item


def test_it_counts_the_changed_weights() -> None:
    model = Model(BUILDS["llama"]())
    facts = METHODS.build({"method": "rtn", **SMALL}).apply(model, MethodContext())
    layers = quantized_layers(model.network)
    assert facts["layers_quantized"] == len(layers) == len(facts["layers"]) == 3 * 7
    assert facts["bits_per_weight"] == pytest.approx(4 + (16 + 8) / 16)
    saved = sum(layer.in_features * layer.out_features for layer in layers.values()) * (4 - 5.5 / 8)
    assert facts["bytes_before"] - facts["bytes_after"] == pytest.approx(saved)
    for path, fact in facts["layers"].items():
        true = BUILDS["llama"]().get_submodule(path).weight.detach()
        error = float((layers[path].weight - true).square().sum() / true.square().sum())
        assert fact["relative_error"] == pytest.approx(error, rel=1e-4)
        assert fact["scheme"] == {"weight": "int4-asym/16@float16"}


def test_nothing_to_quantize_is_an_error() -> None:
    model = Model(BUILDS["llama"]())
    model.network.model.layers = torch.nn.ModuleList()
    with pytest.raises(ModelError):
        METHODS.build({"method": "rtn", **SMALL}).apply(model, MethodContext())


SEARCHES = ("awq", "aqas", "mixed")  # slow methods: one family per architecture
TAKEN = [(name, method) for name in TRANSFORMERS for method in ("gptq", "smoothquant")]
TAKEN += [(name, method) for name in ("bert", "vit", "gpt2", "opt", "qwen2") for method in ("rtn", "hqq", *SEARCHES)]


@pytest.mark.parametrize(("name", "method"), TAKEN)
def test_every_method_supports_every_family(name: str, method: str) -> None:
    settings = {"method": method, "group_size": 16, "bits": 10.0 if method == "mixed" else 8}
    model = quantize_tiny(name, {**settings, **({"search_tokens": 30} if method in SEARCHES else {})})
    with torch.no_grad():
        logits, true = model.network(**inputs(name)).logits, BUILDS[name]()(**inputs(name)).logits
    assert float((logits - true).norm() / true.norm()) < 0.05
    gated = any("gate" in path for path in quantized_layers(model.network))
    assert len(quantized_layers(model.network)) == 3 * (4 if name in ("gpt2", "all-attention") else 6 + gated)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "gptq", **SMALL},
        {"method": "gptq", **SMALL, "input_activations": "int8", "static_activations": True},
        {"method": "awq", **SMALL, "rounding": "gptq", "search_tokens": 30},
        {"method": "smoothquant"},
        {"method": "aqas", "search_tokens": 30},
        {"method": "mixed", **SMALL, "bits": 5.0},
    ],
    ids=lambda s: "-".join(str(value) for value in s.values()),
)
def test_a_resumed_run_is_bit_identical(settings: dict[str, Any], tmp_path: Path) -> None:
    after = 2
    uninterrupted = quantize_tiny("llama", settings)
    with pytest.raises(InterruptedRunError):
        quantize_tiny("llama", settings, checkpoint=Checkpoint(tmp_path), progress=InterruptingProgress(after))
    assert len(list(tmp_path.glob("block-*.json"))) == after
    resumed = quantize_tiny("llama", settings, checkpoint=Checkpoint(tmp_path))
    assert same(uninterrupted, resumed)
    schemes = [
        [layer.scheme for layer in quantized_layers(model.network).values()] for model in (uninterrupted, resumed)
    ]
    assert schemes[0] == schemes[1]


def test_finished_blocks_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_tiny("llama", {"method": "gptq", **SMALL}, checkpoint=Checkpoint(tmp_path))
    seen = []
    monkeypatch.setattr(METHODS["gptq"], "quantize", lambda self, work: seen.append(work))
    quantize_tiny("llama", {"method": "gptq", **SMALL}, checkpoint=Checkpoint(tmp_path))
    assert not seen


@pytest.mark.parametrize("method", ["gptq", "awq", "mixed"])
def test_a_memory_limit_is_bit_identical(method: str, tmp_path: Path) -> None:
    settings = {"method": method, **SMALL, **({"bits": 5.0} if method == "mixed" else {})}
    free, limited = (
        quantize_tiny("llama", settings),
        quantize_tiny("llama", settings, memory_limit=1500, folder=tmp_path),
    )
    assert same(free, limited)


def test_static_scales_come_from_the_largest_input() -> None:
    model = quantize_tiny("llama", {"method": "rtn", **SMALL, "input_activations": "int8", "static_activations": True})
    layer = model.network.model.layers[1].mlp.down_proj
    largest = []
    hook = layer.register_forward_pre_hook(lambda _, args: largest.append(float(args[0].abs().max())))
    with torch.no_grad():
        for batch in batches("llama"):
            model.network(**batch)
    hook.remove()
    assert float(layer.input_scale) == pytest.approx(max(largest) / 127, rel=1e-5)
    assert all(layer.inputs.scale.shape == (1, 1, 1) for layer in quantized_layers(model.network).values())


FORMATS_SAVED = {
    "llama": ["int4-asym/16@float16", "int3/row", "dint4/16", "nvfp4", "amxfp4", "mxfp4", "nf4/32", "ternary"],
    "gpt2": ["int5/tensor", "int7-asym", "mxfp6-e3m2", "int4-float-zero/16"],
    "bert": ["fp8-e4m3", "mxint8", "int2-asym/8", "dint3-sym"],
}


@pytest.mark.parametrize(("name", "number_format"), [(n, f) for n, result in FORMATS_SAVED.items() for f in result])
def test_save_and_load_is_bit_identical(name: str, number_format: str, tmp_path: Path) -> None:
    settings = {
        "method": "rtn",
        "format": number_format,
        "allow_partial_group": True,
        "input_activations": "int8",
        "static_activations": name == "gpt2",
    }
    model = quantize_tiny(name, settings)
    save_artifact(model, tmp_path)
    reloaded = load_artifact(tmp_path)
    assert same(model, reloaded)
    with torch.no_grad():
        assert torch.equal(model.network(**inputs(name)).logits, reloaded.network(**inputs(name)).logits)


def tampered_artifact(tmp_path: Path, change: Any) -> Path:
    """A saved artifact with a tampered list of quantized layers."""
    save_artifact(quantize_tiny("llama", {"method": "rtn", **SMALL}), tmp_path)
    content = json.loads((tmp_path / "smelt.json").read_text())
    change(content["quantized"])
    (tmp_path / "smelt.json").write_text(json.dumps(content))
    return tmp_path


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layers: layers[DOWN].update(weight="int4711"), "there is no number format"),
        (lambda layers: layers[DOWN].update(weight="int4-asym/0"), "the group size in"),
        (lambda layers: layers[DOWN].update(weight="int4-asym/16@float32"), "torch.float16 and not torch.float32"),
        (lambda layers: layers[DOWN].update(weight="int8-asym/16@float16"), "as smelt.json says"),
        (lambda layers: layers[DOWN].update(weight="int4/16@float16"), "does not describe"),
        (lambda layers: layers[DOWN].update(weight=4), "not the description"),
        (lambda layers: layers[DOWN].update(rank=10**9), "not possible"),
        (lambda layers: layers[DOWN].update(rank=8), "lack"),
        (lambda layers: layers[DOWN].update(rank=-1), "not possible"),
        (lambda layers: layers[DOWN].update(inputs="int8", static=True), "lack"),
        (lambda layers: layers[DOWN].update(secret=1), "not the description"),
        (lambda layers: layers.update({"model.norm": {"weight": "int4"}}), "not a linear layer"),
        (lambda layers: layers.update({"model.layers.9.mlp.down_proj": {"weight": "int4"}}), "not a linear layer"),
        (lambda layers: layers.pop(DOWN), "lack"),
        (lambda layers: layers.update({DOWN: None}), "not the description"),
    ],
)
def test_a_forged_list_of_layers_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SmeltError, match=message) as caught:
        load_artifact(tampered_artifact(tmp_path, change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("method", METHODS_HERE)
def test_nan_weights(method: str, bad: float) -> None:
    model = Model(BUILDS["llama"]())
    before = {key: tensor.clone() for key, tensor in model.network.state_dict().items()}
    with torch.no_grad():
        model.network.model.layers[2].mlp.up_proj.weight[3, 4] = bad
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj contains NaN or infinity") as caught:
        METHODS.build({"method": method, **SMALL}).apply(model, MethodContext(batches=batches("llama")))
    assert "\n" not in str(caught.value)
    after = model.network.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before if "layers.2.mlp.up_proj" not in key)


@pytest.mark.parametrize(
    "settings",
    [
        *({"method": method} for method in NEED_DATA),
        {"method": "rtn", "input_activations": "int8", "static_activations": True},
    ],
    ids=lambda s: s["method"],
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_calibration_activations(settings: dict[str, Any], bad: float) -> None:
    model = Model(BUILDS["llama"]())
    with torch.no_grad():
        model.network.model.embed_tokens.weight[int(batches("llama")[0]["input_ids"][0, 0])] = bad
    with pytest.raises(DataError, match=r"NaN or infini.* on the calibration data") as caught:
        METHODS.build({**SMALL, **settings}).apply(model, MethodContext(batches=batches("llama")))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 9}, "2 to 8 bits, not 9"),
        ({"bits": 1}, "2 to 8 bits, not 1"),
        ({"bits": "4"}, "must be an integer"),
        ({"group_size": -2}, "-1 means one group per row"),
        ({"format": "int4711"}, "there is no number format"),
        ({"input_activations": "int4711"}, "there is no number format"),
        ({"static_activations": True}, "give their format"),
        ({"static_activations": True, "input_activations": "int8-asym"}, "no zero point"),
        ({"static_activations": True, "input_activations": "amxfp4"}, "no zero point"),
        ({"color": 1}, "no parameter"),
    ],
)
def test_invalid_settings_raise_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        METHODS.build({"method": "gptq", **settings})
    assert "\n" not in str(caught.value)


def test_a_group_size_that_does_not_divide_the_columns() -> None:
    with pytest.raises(RecipeError, match="groups of 40 do not divide; use group_size 32, 16 or -1"):
        quantize_tiny("llama", {"method": "gptq", "group_size": 40})
    model = quantize_tiny("llama", {"method": "gptq", "group_size": 40, "allow_partial_group": True})
    assert model.network.model.layers[0].mlp.down_proj.scale.shape == (32, 2, 1)  # 48 columns


def test_quantizing_twice_is_refused() -> None:
    model = quantize_tiny("llama", {"method": "rtn", **SMALL})
    with pytest.raises(ModelError, match="quantized already"):
        METHODS.build({"method": "rtn", **SMALL}).apply(model, MethodContext())


@pytest.mark.parametrize("method", NEED_DATA)
def test_missing_data_is_reported_at_once(method: str) -> None:
    with pytest.raises(DataError, match=f"{method} needs calibration data"):
        METHODS.build({"method": method, **SMALL}).apply(Model(BUILDS["llama"]()), MethodContext())


def test_all_methods_are_registered_with_their_papers() -> None:
    assert set(METHODS_HERE) <= set(METHODS)
    results = [cls for name, cls in METHODS.items() if name in METHODS_HERE]
    assert all(issubclass(cls, Quantization) and cls.paper and cls.summary.endswith(".") for cls in results)
