"""Mixtures of experts in the GPU runner: transformers' logits and tokens, dense, quantized and pruned.

On a CUDA device with CUDA graphs, elsewhere under Triton's interpreter.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.kernels.triton_device import DEVICE, HALF, distance  # isort: skip  (before anything imports Triton)

from smelt.kernels.gpu.fused_ops import norm_and_clip_qkv
from smelt.kernels.gpu.grouped import GroupedDense, GroupedPacked
from smelt.models.experts import split_experts
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear
from smelt.models.quantized_network import dequantize_without_kernel
from smelt.numerics import get_format
from smelt.runtime.decoder import mixtures
from smelt.runtime.gpu_experts import FusedExperts, unsupported_reason
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.mixtures import BUILDS, HIDDEN, PLAIN, fused
from tests.serve.gpu_runner import small_tiles  # noqa: F401  (a fixture)
from tests.serve.test_engine import SMALL, answers, expected, prompts

TOLERANCE = 2e-2  # of half precision: a rounding of activations that are quantized next may change their codes


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Model:
    return Model(split_experts(copy.deepcopy(fused(name))).to(DEVICE, dtype))


@pytest.mark.parametrize("name", BUILDS)
def test_greedy_tokens_match_transformers(name: str) -> None:
    """The reference is the module of transformers with fused experts. Prompts in chunks, then decoding."""
    network = copy.deepcopy(fused(name))  # its own config, in which an engine replaces the attention
    model = Model(split_experts(copy.deepcopy(network)).to(DEVICE))
    engine = Engine(model, **SMALL, prefill_chunk_size=9)
    texts, params = [text[-6:] for text in prompts(2)], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    assert engine.runner.backend.startswith("fused-gpu")
    assert answers(engine, texts, params) == [expected(network, text, 3) for text in texts]


def quantize_experts(model: Model, weight: str, inputs: str | None = None, *, static: bool = False) -> None:
    scheme = QuantizationScheme(get_format(weight), None if inputs is None else get_format(inputs), static)
    for path, module in list(model.network.named_modules()):
        if type(module) is nn.Linear and ".experts." in path:
            quantized = scheme.weight.quantize(module.weight.detach().float())
            layer = QuantizedLinear.from_quantized(quantized, scheme, bias=None, dtype=module.weight.dtype)
            if static:
                largest = 0.3 if path.endswith("down_proj") else 3.0  # gated activations are small
                layer.set_static_input_scale(torch.full((module.in_features,), largest, device=DEVICE))
            parent, _, child = path.rpartition(".")
            setattr(model.network.get_submodule(parent), child, layer)


def hidden_states(model: Model, tokens: int) -> Tensor:
    """Return small values: what a mixture adds to larger ones would be lost when the sum is rounded."""
    values = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)) / 256
    return values.to(DEVICE, model.network.dtype)


def mostly_close(actual: Tensor, reference: Tensor, tolerance: float) -> bool:
    """Compare tokens; a few may have other experts, whose probabilities are closer than rounding."""
    errors = [distance(*rows) for rows in zip(actual, reference, strict=True)]
    return sum(error < tolerance for error in errors) >= 0.85 * len(errors)


def mixture_outputs(model: Model, tokens: int) -> tuple[Tensor, Tensor, FusedExperts]:
    """Return what the last mixture adds to random hidden states: the module's result, and ours."""
    hidden = hidden_states(model, tokens)
    block: Any = model.network.model.layers[-1]
    reference = block.mlp(block.post_attention_layernorm(hidden)[None])[0]
    part = mixtures(model)[-1]
    layer, output = FusedExperts(part, model.network.dtype), hidden.clone()
    layer.add(output, None, None)
    return reference, output - hidden, layer


@pytest.mark.parametrize("tokens", [1, 20] if DEVICE == "cuda" else [20])
@pytest.mark.parametrize(
    ("weight", "inputs", "static"),
    [("int4/32@float16", None, False), ("nvfp4", None, False), ("int8/row", "int8", False), ("int8/row", "int8", True),
     ("int4/row", "int8", False)],
)  # fmt: skip
@torch.no_grad()
def test_quantized_experts_match_the_module(weight: str, inputs: str | None, static: bool, tokens: int) -> None:
    """The module computes with the same codes; afterwards it shares the stacked tensors, and computes the same."""
    model = model_of("qwen3-moe", HALF)
    quantize_experts(model, weight, inputs, static=static)
    assert unsupported_reason(model) is None
    plain = copy.deepcopy(model)
    reference, actual, layer = mixture_outputs(model, tokens)
    assert isinstance(layer.experts.gate_up, GroupedPacked)  # rows that do not fill tiles of 64, on any GPU
    assert mostly_close(actual, reference, TOLERANCE)
    again = mixture_outputs(plain, tokens)[0]
    assert torch.equal(reference, again)
    block: Any = model.network.model.layers[-1]
    hidden = hidden_states(model, tokens)
    assert torch.equal(block.mlp(block.post_attention_layernorm(hidden)[None])[0], reference)


@torch.no_grad()
def test_experts_of_different_widths_are_padded() -> None:
    """Channel pruning leaves each expert its own width; the tokens that are padding change nothing."""
    model = model_of("mixtral")
    for index, expert in enumerate(model.network.model.layers[-1].mlp.experts):  # type: ignore[union-attr]
        width = 48 - 5 * index
        expert.w1.weight.data, expert.w3.weight.data = expert.w1.weight.data[:width], expert.w3.weight.data[:width]
        expert.w2.weight.data = expert.w2.weight.data[:, :width]
    reference, actual, layer = mixture_outputs(model, 20)
    assert isinstance(layer.experts.gate_up, GroupedDense) and layer.experts.gate_up.rows == 96
    assert distance(actual, reference) < 1e-5
    active = torch.arange(20, device=DEVICE) < 5
    hidden = hidden_states(model, 20)
    output = hidden.clone()
    layer.add(output, None, active)
    assert torch.equal(output[5:], hidden[5:]) and distance((output - hidden)[:5], reference[:5]) < 1e-5


@torch.no_grad()
def test_dequantized_experts_are_stacked_as_dense_ones() -> None:
    model = model_of("olmoe", HALF)
    quantize_experts(model, "nf3/48")
    assert unsupported_reason(model) is None
    assert len(dequantize_without_kernel(model.network, HALF)) == 24 and unsupported_reason(model) is None
    reference, actual, layer = mixture_outputs(model, 20)
    assert isinstance(layer.experts.gate_up, GroupedDense) and mostly_close(actual, reference, TOLERANCE)


def _rotate(model: Model) -> None:
    quantize_experts(model, "int4/16")
    layer: Any = model.network.model.layers[0].mlp.experts[2].up_proj
    layer.scheme = QuantizationScheme(layer.scheme.weight, hadamard=True)


def _mix(model: Model) -> None:
    quantize_experts(model, "int4/32")
    expert: Any = model.network.model.layers[1].mlp.experts[3]
    expert.down_proj = nn.Linear(48, 64, bias=False, device=DEVICE, dtype=HALF)


def _different_scales(model: Model) -> None:
    quantize_experts(model, "int8/row", "int8", static=True)
    layer: Any = model.network.model.layers[1].mlp.experts[3].up_proj
    layer.input_scale *= 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_rotate, "differ in format"),
        (_mix, "differ in format"),
        (_different_scales, "differ in the scale of their inputs"),
        (lambda model: quantize_experts(model, "int3/32"), "no grouped kernel"),
        (lambda model: quantize_experts(model, "nvfp4", "nvfp4"), "no kernel on this device"),
    ],
)
def test_experts_without_a_grouped_kernel_have_a_reason(change: Callable[[Model], None], reason: str) -> None:
    model = model_of("qwen3-moe", HALF)
    change(model)
    assert reason in (unsupported_reason(model) or "")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are captured on a CUDA device")
@pytest.mark.parametrize("scheme", ["", "int4/128@float16", "nvfp4", "fp8-e4m3 fp8-e4m3", "int4/row int8", "nf3"])
def test_an_engine_gives_the_tokens_of_the_module(scheme: str) -> None:
    """Larger experts, for which Hopper GPUs have kernels. All batch sizes are captured; nothing is compiled later."""
    from triton import knobs

    weight, _, inputs = scheme.partition(" ")
    config = Qwen3MoeConfig(
        hidden_size=256, moe_intermediate_size=128, num_experts=16, num_experts_per_tok=4, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=512, max_position_embeddings=512,
    )  # fmt: skip

    def tokens(compiled: bool) -> list[list[int]]:
        torch.manual_seed(0)
        network = Qwen3MoeForCausalLM(copy.deepcopy(config))
        for block in network.model.layers:
            block.mlp.gate.weight.data.normal_()  # decisive
        model = Model(split_experts(network).to(DEVICE, HALF).eval())
        if weight:
            quantize_experts(model, weight, inputs or None)
        engine = Engine(model, max_model_len=256, max_num_seqs=8, kv_cache_bytes=10**8, compiled=compiled)
        assert engine.runner.backend.startswith("fused-gpu" if compiled else "eager")
        if compiled:
            engine.warmup()
        draw = random.Random(0)
        prompts = [[draw.randrange(512) for _ in range(draw.randrange(1, 40))] for _ in range(40)]
        late: list[str] = []
        knobs.runtime.jit_post_compile_hook = lambda **options: late.append(options["repr"])
        try:
            result = answers(engine, prompts, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        finally:
            knobs.runtime.jit_post_compile_hook = None
        assert not (compiled and late), late
        return result

    ours, theirs = tokens(True), tokens(False)
    # Random weights: a few of the largest logits, or of the experts' probabilities, are closer than rounding.
    assert sum(one == other for one, other in zip(ours, theirs, strict=True)) >= 28


@pytest.mark.parametrize("clip", [None, 0.7])
def test_heads_are_normalized_together(clip: float | None) -> None:
    torch.manual_seed(2)
    qkv, weights = (
        torch.randn(5, 80 + 2 * 40, device=DEVICE),
        [torch.rand(80, device=DEVICE), torch.rand(40, device=DEVICE)],
    )
    parts = list(qkv.split((80, 40, 40), dim=1))
    for index, weight in enumerate(weights):
        parts[index] = torch.nn.functional.rms_norm(parts[index], weight.shape, weight, 1e-5)
    reference = torch.cat(parts, dim=1)
    norm_and_clip_qkv(qkv, *weights, 1e-5, clip)
    torch.testing.assert_close(qkv, reference if clip is None else reference.clamp(-clip, clip))


def test_every_family_of_mixtures_is_fused() -> None:
    for name in PLAIN:
        model = model_of(name)
        assert unsupported_reason(model) is None and len(mixtures(model)) == 2
