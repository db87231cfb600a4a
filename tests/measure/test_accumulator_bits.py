"""Accumulation lengths and zeros of the three GEMMs of each layer, against their definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.errors import ConfigError, DataError
from smelt.measure.accumulator_bits import (
    LayerStatistics,
    accumulator_bits,
    bits_by_length,
    example_inputs,
    layer_shapes,
    layer_statistics,
    resolve_seq_len,
)
from smelt.models.load import skeleton
from smelt.numerics.variance_retention import min_accumulator_bits
from tests import mixtures
from tests.tiny import BUILDS, inputs, labeled


def lengths(layers: list[LayerStatistics], batch_size: int) -> dict[str, dict[str, int]]:
    return {layer.name: layer.lengths(batch_size) for layer in layers}


def test_a_decoder() -> None:
    network = BUILDS["llama"]()
    found = lengths(layer_shapes(network, example_inputs(network, seq_len=20)), batch_size=8)
    assert len(found) == 3 * 7 + 1
    assert found["model.layers.1.self_attn.k_proj"] == {"forward": 32, "backward": 16, "gradient": 160}
    assert found["model.layers.2.mlp.down_proj"] == {"forward": 48, "backward": 32, "gradient": 160}
    assert found["lm_head"] == {"forward": 32, "backward": 99, "gradient": 160}


def test_transposed_weights_and_pooled_heads() -> None:
    network = BUILDS["gpt2"]()
    found = lengths(layer_shapes(network, example_inputs(network, seq_len=20)), batch_size=2)
    assert found["transformer.h.0.mlp.c_fc"] == {"forward": 32, "backward": 48, "gradient": 40}
    network = BUILDS["bert"]()
    found = lengths(layer_shapes(network, example_inputs(network, seq_len=20)), batch_size=2)
    assert found["classifier"] == {"forward": 32, "backward": 2, "gradient": 2}


def test_convolutions() -> None:
    """The first convolution reads the image, whose gradient nobody needs."""
    network = BUILDS["resnet"]()
    found = lengths(layer_shapes(network, example_inputs(network, seq_len=1, image_size=64)), batch_size=4)
    first, second, *_ = found
    assert found[first] == {"forward": 3 * 49, "gradient": 4 * 32 * 32}
    assert found[second]["backward"] == 16  # a shortcut of kernel 1
    assert found["resnet.encoder.stages.1.layers.1.layer.1.convolution"] == {
        "forward": 24 * 9, "backward": 24 * 9, "gradient": 4 * 8 * 8,
    }  # fmt: skip
    grouped = nn.Conv2d(8, 16, 3, groups=4)
    assert LayerStatistics("", grouped, samples=1, rows=5).lengths(2) == {
        "forward": 18, "backward": 36, "gradient": 10,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["bert", "distilbert", "vit", "gpt2", "opt", "llama-tied", "qwen3", "resnet"])
def test_shapes_need_no_weights(name: str, tmp_path: Path) -> None:
    network = BUILDS[name]()
    network.save_pretrained(tmp_path)
    sample = example_inputs(network, seq_len=16)
    on_meta = skeleton(tmp_path)
    assert next(on_meta.parameters()).is_meta
    assert lengths(layer_shapes(on_meta, sample), 3) == lengths(layer_shapes(network, sample), 3)


def test_experts_are_counted_by_their_tokens(tmp_path: Path) -> None:
    network = mixtures.loaded("mixtral", tmp_path).network
    found = lengths(layer_statistics(network, mixtures.batches(2)), batch_size=6)
    experts = [value["gradient"] for name, value in found.items() if ".experts." in name and name.endswith("w2")]
    config = network.config
    assert sum(experts) == pytest.approx(120 * config.num_experts_per_tok * config.num_hidden_layers, abs=len(experts))


def nonzero_by_definition(network: Any, module: nn.Module, batch: dict[str, Tensor]) -> tuple[float, float, float]:
    """Count products that are not zero, term by term, in the three GEMMs of a layer. Batch norms are in training."""
    network.train(isinstance(module, nn.Conv2d))
    seen: dict[str, Tensor] = {}
    module.register_forward_hook(lambda _, args, output: seen.update(x=args[0].detach()))
    module.register_full_backward_hook(lambda _, __, gradients: seen.update(g=gradients[0].detach()))
    network(**batch).loss.backward()
    if isinstance(module, nn.Conv2d):
        x = F.unfold(seen["x"], module.kernel_size, padding=module.padding, stride=module.stride).transpose(1, 2)
        g = seen["g"].flatten(2).transpose(1, 2)
    else:
        x, g = seen["x"], seen["g"]
    x, g = ((tensor.flatten(0, -2) != 0).double() for tensor in (x, g))
    return float(x.mean()), float(g.mean()), float((x[:, :, None] * g[:, None, :]).mean())


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("opt", "model.decoder.layers.1.fc2"),  # behind a ReLU
        ("opt", "model.decoder.layers.1.fc1"),
        ("bert", "bert.encoder.layer.0.output.dense"),
        ("resnet", "resnet.encoder.stages.1.layers.1.layer.1.convolution"),
        ("resnet", "resnet.embedder.embedder.convolution"),
    ],
)
def test_nonzero_ratios_are_those_of_the_products(name: str, path: str) -> None:
    network, batch = BUILDS[name](), labeled(name)
    layer = next(layer for layer in layer_statistics(network, [batch]) if layer.name == path)
    forward, backward, gradient = nonzero_by_definition(network, network.get_submodule(path), batch)
    ratios = layer.nonzero_ratios()
    assert ratios["forward"] == pytest.approx(forward, abs=1e-6)
    assert ratios["backward"] == pytest.approx(backward, abs=1e-6)
    assert ratios["gradient"] == pytest.approx(gradient, abs=1e-6)
    assert path.endswith("fc1") or min(forward, backward, gradient) < 1
    assert path != "resnet.encoder.stages.1.layers.1.layer.1.convolution" or backward == 1.0  # not behind a ReLU
    predicted = {gemm.name: gemm for each in accumulator_bits([layer], batch_size=10**5) for gemm in each.gemms}
    gemm = predicted["gradient"]
    assert gemm.bits == min_accumulator_bits(5, gemm.length, nonzero_ratio=ratios["gradient"])
    assert gemm.chunked_bits == min_accumulator_bits(5, gemm.length, 64, ratios["gradient"])


def test_without_labels_only_inputs_are_measured() -> None:
    layers = layer_statistics(BUILDS["opt"](), [inputs("opt")])
    assert all(set(layer.nonzero_ratios()) == {"forward"} for layer in layers)


def test_the_network_is_left_as_it_was() -> None:
    resnet = BUILDS["resnet"]()
    before = {name: tensor.clone() for name, tensor in resnet.state_dict().items()}
    layer_statistics(resnet, [labeled("resnet")])
    assert all(torch.equal(tensor, before[name]) for name, tensor in resnet.state_dict().items())
    assert all(module.track_running_stats for module in resnet.modules() if isinstance(module, nn.BatchNorm2d))
    assert not any(module.training for module in resnet.modules())
    network = BUILDS["bert"]().train()
    layer_statistics(network, [labeled("bert")])
    assert network.training and all(parameter.requires_grad for parameter in network.parameters())
    assert all(parameter.grad is None for parameter in network.parameters())
    assert not any(module._forward_hooks for module in network.modules())


def test_the_curve_reaches_beyond_the_longest_sum() -> None:
    layers = accumulator_bits(
        layer_shapes(BUILDS["llama"](), example_inputs(BUILDS["llama"](), seq_len=20)), batch_size=100
    )
    curve = bits_by_length(layers, 5, 64)
    assert curve[0][0] == 16 and curve[-1][0] >= 4000
    assert all(bits == min_accumulator_bits(5, length) for length, bits, _ in curve[::10])


def test_the_default_length_fits_the_context() -> None:
    network = BUILDS["llama"]()
    assert [resolve_seq_len(network, length) for length in (None, 5, 128)] == [128, 5, 128]
    network.config.max_position_embeddings = 4096
    for unlimited in (network, BUILDS["resnet"]()):
        assert [resolve_seq_len(unlimited, length) for length in (None, 600)] == [512, 600]


def test_bad_inputs() -> None:
    network = BUILDS["llama"]()
    with pytest.raises(ConfigError, match="the sequence length is 200 tokens; this model's context is 128"):
        resolve_seq_len(network, 200)
    with pytest.raises(ConfigError, match="takes images of 32 pixels, not 64"):
        example_inputs(BUILDS["vit"](), seq_len=1, image_size=64)
    with pytest.raises(ConfigError, match="a batch has at least one sample, not 0"):
        accumulator_bits([], batch_size=0)
    with pytest.raises(DataError, match="need at least two samples per batch"):
        layer_statistics(BUILDS["resnet"](), [{name: tensor[:1] for name, tensor in labeled("resnet").items()}])
    with torch.no_grad():
        network.lm_head.weight.fill_(float("nan"))
    with pytest.raises(DataError, match="the loss on the data is not a finite number"):
        layer_statistics(network, [labeled("llama")])
