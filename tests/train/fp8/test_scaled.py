"""Scaled FP8 GEMMs: formats and scales against plain arithmetic, gradients, amax histories, and what stays in bf16."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from smelt.errors import ConfigError, ModelError
from smelt.numerics.float_format import FP8_E4M3, FP8_E5M2
from smelt.train.fp8.gemm_flops import count_gemm_flops
from smelt.train.fp8.scaled import (
    E4M3,
    E5M2,
    RECIPES,
    ROW,
    SQUARE,
    TENSOR,
    TILE,
    convert_to_float8_training,
    dequantize,
    quantize,
    scaled_mm,
    transpose,
)
from smelt.train.fp8.settings import SCALINGS, Fp8Settings
from tests.train.parallel import run


class Network(nn.Module):
    """Token embeddings, two linear layers of 256 and 128 features, and a head."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 128)
        self.up, self.down = nn.Linear(128, width), nn.Linear(width, 128, bias=False)
        self.head = nn.Linear(128, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.down(torch.relu(self.up(self.embedding(tokens)))))
        return y


def tokens(rows: int = 128) -> Tensor:
    return torch.randint(0, 50, (2, rows // 2), generator=torch.Generator().manual_seed(1))


def train_step(network: nn.Module, inputs: Tensor) -> Tensor:
    network.zero_grad()
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
        y: Tensor = network(inputs)
    y.float().square().mean().backward()
    return y.float()


def heavy_tailed(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x * torch.exp(2 * torch.randn(rows, columns, generator=generator))


@pytest.mark.parametrize("block", [TENSOR, ROW, TILE, SQUARE], ids=["tensor", "row", "tile", "square"])
@pytest.mark.parametrize(("dtype", "number_format"), [(E4M3, FP8_E4M3), (E5M2, FP8_E5M2)])
def test_each_block_is_rounded_to_the_format_at_its_own_scale(block: Any, dtype: Any, number_format: Any) -> None:
    x = heavy_tailed(128, 256, 0)
    matrix = quantize(x, dtype, block)
    rows, columns = block[0] or 128, block[1] or 256
    assert matrix.scale.shape == (128 // rows, 256 // columns)
    for i in range(0, 128, max(rows, 32)):
        for j in range(0, 256, columns):
            part = x[i : i + rows, j : j + columns]
            scale = number_format.max_value / part.abs().max()
            expected = number_format.round(part * scale)
            assert torch.equal(matrix.data[i : i + rows, j : j + columns].float(), expected)
            torch.testing.assert_close(matrix.scale[i // rows, j // columns], 1 / scale)
    if block[0] == block[1]:
        assert torch.equal(dequantize(transpose(matrix)), dequantize(matrix).t())


def test_power_of_two_scales_are_rounded_down() -> None:
    x = heavy_tailed(16, 64, 0)
    scales = 1 / quantize(x, E4M3, ROW, power_of_two=True).scale[:, 0]
    exact = 448 / x.abs().amax(1)
    assert torch.equal(scales, torch.tensor([2.0 ** math.floor(math.log2(value)) for value in exact.tolist()]))


@pytest.mark.parametrize("block", [TENSOR, ROW, TILE])
def test_rows_of_a_quantized_transpose_are_contiguous(block: Any) -> None:
    assert quantize(torch.randn(128, 256).t(), E4M3, block).data.is_contiguous()  # else a GPU refuses the product


def test_values_beyond_the_amax_saturate_and_infinities_become_nan() -> None:
    x = torch.tensor([[1.0, -3.0, math.inf, -math.inf, math.nan, 0.0]])
    delayed = quantize(x, E4M3, TENSOR, amax=torch.tensor(2.0))
    assert delayed.data.float()[0, :2].tolist() == [224.0, -448.0]
    assert delayed.data.float()[0].isnan().tolist() == [False, False, True, True, True, False]
    assert quantize(x, E4M3, TENSOR).data.float().isnan().any()
    assert torch.equal(dequantize(quantize(torch.zeros(2, 16), E5M2, TENSOR)), torch.zeros(2, 16))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_emulated_product_is_that_of_the_dequantized_operands(scaling: str) -> None:
    recipe = RECIPES[scaling]
    a = quantize(heavy_tailed(64, 384, 0), recipe.grad_dtype, recipe.activations)
    for block in {recipe.weights, recipe.activations}:
        b = quantize(heavy_tailed(256, 384, 1), E4M3, block)
        product = scaled_mm(a, b, torch.float32, native=False)
        exact = dequantize(a).double() @ dequantize(b).double().t()
        torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
        rounded = scaled_mm(a, b, torch.bfloat16, native=False)
        assert torch.equal(rounded, product.bfloat16())


@pytest.mark.parametrize("block", [TENSOR, ROW], ids=["tensor", "row"])
def test_the_emulation_agrees_with_torch_scaled_mm(block: Any) -> None:
    """PyTorch multiplies scaled FP8 on CPU too, with the arguments of the GPU."""
    a, b = quantize(heavy_tailed(48, 64, 0), E4M3, block), quantize(heavy_tailed(32, 64, 1), E4M3, block)
    try:
        native = scaled_mm(a, b, torch.float32, native=True)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this PyTorch has no scaled GEMM on CPU: {error}")
    emulated = scaled_mm(a, b, torch.float32, native=False)
    assert native.dtype == torch.float32
    torch.testing.assert_close(native, emulated, rtol=0.01, atol=1e-2)  # rows are rounded to bfloat16


@pytest.mark.parametrize("scaling", SCALINGS)
def test_forward_and_gradients_are_close_to_those_of_float32(scaling: str) -> None:
    plain, network = Network(), Network()
    expected = plain(tokens())
    expected.square().mean().backward()
    training = convert_to_float8_training(network, Fp8Settings(scaling))
    assert list(training.converted) == ["up", "down"] and training.kept == {"head": "the last layer"}
    for _ in range(2):  # the second with a history
        y = train_step(network, tokens())
        training.after_step()
        assert 0 < float((y.detach() - expected.detach()).norm() / expected.detach().norm()) < 0.08
        for parameter, exact in zip(network.parameters(), plain.parameters(), strict=True):
            assert parameter.grad is not None and exact.grad is not None
            assert float((parameter.grad - exact.grad).norm() / exact.grad.norm()) < 0.25
    training.restore()
    assert type(network.up) is nn.Linear and set(network.state_dict()) == set(plain.state_dict())
    torch.testing.assert_close(network(tokens()), plain(tokens()))


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise"])
def test_gradients_are_those_of_the_quantized_operands(scaling: str) -> None:
    """A layer alone in float32: each of its three products is computed again from quantized operands."""
    recipe = RECIPES[scaling]
    network = nn.Sequential(nn.Embedding(2, 2), nn.Linear(256, 128, bias=False), nn.Linear(1, 1))
    weight = network[1].weight
    convert_to_float8_training(network, Fp8Settings(scaling))
    x, grad = heavy_tailed(128, 256, 0).requires_grad_(), heavy_tailed(128, 128, 1)
    network[1](x).backward(grad)

    def values(matrix: Tensor, block: Any, dtype: torch.dtype = E4M3) -> Tensor:
        return dequantize(quantize(matrix.detach(), dtype, block))

    grad_x = values(grad, recipe.activations, recipe.grad_dtype) @ values(weight.t(), recipe.weights).t()
    grad_weight = values(grad.t(), recipe.activations, recipe.grad_dtype) @ values(x.t(), recipe.activations).t()
    for actual, expected in ((x.grad, grad_x), (weight.grad, grad_weight)):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_delayed_scaling_uses_the_largest_amax_of_the_history() -> None:
    network = nn.Sequential(nn.Embedding(2, 2), nn.Linear(16, 16, bias=False), nn.Linear(1, 1))
    training = convert_to_float8_training(network, Fp8Settings("delayed", amax_history_len=2))
    gemm: Any = network[1].gemm
    x = heavy_tailed(16, 16, 0)
    x /= x.abs().max()
    for factor in (1.0, 4.0, 2.0, 1.0):
        network[1](factor * x).sum().backward()
        training.after_step()
    assert gemm.amax_history[:, 0].tolist() == [1.0, 2.0]
    with torch.no_grad():
        y = network[1](8 * x)  # beyond the history: saturates
    saturated = dequantize(quantize(8 * x, E4M3, TENSOR, amax=torch.tensor(2.0)))
    weight = dequantize(quantize(network[1].weight.detach(), E4M3, TENSOR))
    torch.testing.assert_close(y, saturated @ weight.t(), rtol=1e-4, atol=1e-4)


def test_what_is_not_finite_does_not_enter_the_history_and_evaluation_neither() -> None:
    network = nn.Sequential(nn.Embedding(2, 2), nn.Linear(16, 16, bias=False), nn.Linear(1, 1))
    training = convert_to_float8_training(network, Fp8Settings("delayed"))
    gemm: Any = network[1].gemm
    network[1](torch.ones(16, 16)).sum().backward()
    training.after_step()
    before = gemm.amax_history.clone()
    for bad in (math.inf, math.nan):
        y = network[1](torch.full((16, 16), bad))
        assert y.isnan().all()  # noticed by the trainer
        y.backward(torch.full((16, 16), bad))
    network.eval()
    network[1](torch.full((16, 16), 100.0))
    training.after_step()
    assert torch.equal(gemm.amax_history[1], before[0]) and gemm.amax_history.isfinite().all()
    assert gemm.amax_history[0, 0] == 0 and gemm.amax_history[0, 2] == 0


def test_shapes_that_are_no_multiples_fall_back_and_are_counted() -> None:
    """98 rows are the inner dimension of the gradient GEMMs of both layers, which are not FP8 then."""
    network = Network(width=40)
    with pytest.raises(ModelError, match=r"no layer .* multiply in FP8 .*40x128: not multiples of 16"):
        convert_to_float8_training(network, Fp8Settings())
    shares = {}
    for rows in (96, 98):
        network = Network(width=48)
        convert_to_float8_training(network, Fp8Settings())
        inputs = tokens(rows)
        flops = count_gemm_flops(lambda network=network, inputs=inputs: train_step(network, inputs))
        layer, head = 2 * rows * 128 * 48, 2 * rows * 128 * 50
        assert flops["gemm_flops"] == 6 * layer + 3 * head and flops["fp8"] == 0
        shares[rows] = flops["emulated"] * flops["gemm_flops"] / layer
    assert shares == {96: pytest.approx(6), 98: pytest.approx(4)}


def test_layers_of_gpt2_are_converted() -> None:
    torch.manual_seed(0)
    network = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=50, n_positions=32)).eval()
    inputs = {"input_ids": tokens(64), "labels": tokens(64)}
    expected = network(**inputs).loss
    expected.backward()
    weight: Any = network.transformer.h[0].mlp.c_fc.weight
    exact = weight.grad.clone()
    network.zero_grad()
    training = convert_to_float8_training(network, Fp8Settings())
    assert len(training.converted) == 4 and list(training.kept) == ["lm_head"]
    loss = network(**inputs).loss
    loss.backward()
    assert loss != expected and abs(float((loss - expected).detach())) < 0.02
    assert float((weight.grad - exact).norm() / exact.norm()) < 0.15
    training.restore()
    assert torch.equal(network(**inputs).loss, expected)


def test_attention_is_counted_with_grouped_queries() -> None:
    """4 query heads share 2 key heads: [1, heads, 8 tokens, 16 channels]; backward has five products."""
    query, key, value = (torch.randn(1, heads, 8, 16, requires_grad=True) for heads in (4, 2, 2))

    def attend() -> None:
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        y.sum().backward()

    assert count_gemm_flops(attend)["gemm_flops"] in (7 * 2 * 4 * 8 * 8 * 16, 6 * 2 * 4 * 8 * 8 * 16)  # fused, or not


def test_scaled_products_of_pytorch_count_as_fp8() -> None:
    a, b = quantize(heavy_tailed(48, 64, 0), E4M3, TENSOR), quantize(heavy_tailed(32, 64, 1), E4M3, TENSOR)
    try:
        flops = count_gemm_flops(lambda: scaled_mm(a, b, torch.float32, native=True))
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this PyTorch has no scaled GEMM on CPU: {error}")
    assert flops == {"gemm_flops": 2 * 48 * 64 * 32, "fp8": 1, "emulated": 0}


def test_excluded_layers_and_convolutions() -> None:
    training = convert_to_float8_training(Network(), Fp8Settings(exclude=["down"]))
    assert list(training.converted) == ["up"] and training.kept["down"] == "excluded by 'down'"
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.Conv2d(32, 32, 3, groups=2),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    x = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    expected = network[:2](x)
    with pytest.raises(ModelError, match=r"set fp8\.convolutions"):
        convert_to_float8_training(network[:2].append(nn.Linear(32, 10)), Fp8Settings())
    training = convert_to_float8_training(network, Fp8Settings(convolutions=True))
    assert list(training.converted) == ["1"] and set(training.kept) == {"0", "2", "4"}
    assert 0 < float((network[:2](x) - expected).detach().norm() / expected.detach().norm()) < 0.06
    with pytest.raises(ConfigError, match="there is no FP8 scaling 'tensor'; did you mean 'tensorwise'"):
        Fp8Settings(scaling="tensor")


def test_a_cpu_is_told_that_fp8_is_emulated(caplog: pytest.LogCaptureFixture) -> None:
    convert_to_float8_training(Network(), Fp8Settings("blockwise"))
    assert "cpu has no FP8 GEMM for blockwise scaling here: FP8 is emulated" in caplog.text


@pytest.mark.parametrize("scaling", ["delayed", "blockwise"])
def test_compiled_steps_equal_eager_ones(scaling: str) -> None:
    """Traced without a graph break; amaxes of backward are recorded."""
    results = []
    for compiled in (False, True):
        network = Network()
        training = convert_to_float8_training(network, Fp8Settings(scaling))
        if compiled:
            network.compile(backend="aot_eager", fullgraph=True)
        for _ in range(2):
            train_step(network, tokens())
            training.after_step()
        results.append({**{name: p.grad for name, p in network.named_parameters()}, **dict(network.named_buffers())})
    for name, tensor in results[0].items():
        assert tensor is not None and torch.equal(tensor, results[1][name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiled_steps_are_close_to_eager_ones_on_a_gpu(scaling: str) -> None:
    gradients: list[list[Tensor]] = []
    for compiled in (False, True):
        network = Network().to("cuda")
        convert_to_float8_training(network, Fp8Settings(scaling))
        if compiled:
            network.compile(fullgraph=True, dynamic=False)
        train_step(network, tokens(256).to("cuda"))
        gradients.append([p.grad for p in network.parameters() if p.grad is not None])
    for actual, expected in zip(*reversed(gradients), strict=True):
        assert float((actual - expected).norm() / expected.norm()) < 0.06


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(
        16, 16, 3, padding=1, bias=False
    )  # behind it a bias would have a gradient of rounding errors only
    inner = [first, nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *inner, nn.Flatten(), nn.Linear(32 * 16 * 16, 10))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["linear", "convolutions", "convolutions of channels-last images"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_gpu_multiplies_as_the_emulation(scaling: str, kind: str) -> None:
    recipe, device = RECIPES[scaling], torch.device("cuda", 0)
    if not recipe.min_capability <= torch.cuda.get_device_capability(device) <= recipe.max_capability:
        pytest.skip(f"this GPU has no GEMM for {scaling} scaling")
    if kind != "linear" and recipe.multiple > 16:
        pytest.skip("its channels are no multiples of 128")
    gradients: list[list[Tensor]] = []
    for native in (True, False):
        network, inputs = (Network() if kind == "linear" else convolutions()).to(device), tokens(256).to(device)
        if kind != "linear":
            inputs = torch.randn(256, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(device)
        if "channels-last" in kind:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        training = convert_to_float8_training(network, Fp8Settings(scaling, convolutions=True))
        for layer in training.converted.values():
            gemm: Any = layer.gemm
            assert gemm.native
            gemm.native = native
        flops = count_gemm_flops(lambda network=network, inputs=inputs: train_step(network, inputs))
        assert flops["fp8" if native else "emulated"] > 0.5 and flops["emulated" if native else "fp8"] == 0
        gradients.append([p.grad for p in network.parameters() if p.grad is not None])
    for actual, expected in zip(*gradients, strict=True):
        # Sums in another order change bfloat16 outputs by a step, and that some FP8 inputs of the next layer.
        assert float((actual - expected).norm() / expected.norm()) < 0.06


def _history_of_rank(rank_inputs: list[float]) -> list[float]:
    rank = torch.distributed.get_rank()
    network = nn.Sequential(nn.Embedding(2, 2), nn.Linear(16, 16, bias=False), nn.Linear(1, 1))
    training = convert_to_float8_training(network, Fp8Settings("delayed"))
    network[1](torch.full((16, 16), rank_inputs[rank])).sum().backward()
    training.after_step()
    gemm: Any = network[1].gemm
    values: list[float] = gemm.amax_history[:, 0].tolist()
    return values[:2]


def test_ranks_share_the_largest_amax() -> None:
    assert run(2, _history_of_rank, [1.0, 3.0]) == [[3.0, 0.0], [3.0, 0.0]]
