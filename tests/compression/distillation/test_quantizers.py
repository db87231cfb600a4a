"""Quantizers of QAT: the card's values, gradients by finite differences, and values that are a format's bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from smelt.compression.distillation.quantizers import ACTIVATION_QUANTIZERS, WEIGHT_QUANTIZERS
from smelt.compression.distillation.quantizers.base import round_through
from smelt.compression.distillation.quantizers.dorefa import Dorefa, DorefaActivations
from smelt.compression.distillation.quantizers.lsq import Lsq
from smelt.compression.distillation.quantizers.minmax import MinMaxActivations
from smelt.compression.distillation.quantizers.pact import Pact
from smelt.compression.distillation.quantizers.pact2 import Pact2
from smelt.compression.distillation.quantizers.sawb import CONSTANTS, Sawb, clipping_level
from smelt.compression.distillation.quantizers.twn import Twn
from smelt.errors import DataError, RecipeError
from smelt.kernels.linear import ActivationQuant
from smelt.numerics.format import QuantizedTensor
from smelt.numerics.gradient import straight_through

WEIGHTS: list[dict[str, Any]] = [
    *({"quantizer": "sawb", "bits": bits, "zero": zero} for bits, zero in CONSTANTS),
    {"quantizer": "sawb", "bits": 2, "granularity": "channel", "gradient": "clip"},
    {"quantizer": "lsq", "weight_format": "int2/16"},
    {"quantizer": "lsq", "weight_format": "int3/row@float16"},
    {"quantizer": "lsq", "weight_format": "int4/tensor"},
    {"quantizer": "lsq", "weight_format": "ternary/16"},
    {"quantizer": "lsq", "weight_format": "int2-float-zero/16@float16", "scale_init": "mse"},
    {"quantizer": "lsq", "weight_format": "int3-float-zero/tensor", "scale_init": "mse"},
    {"quantizer": "dorefa", "bits": 2},
    {"quantizer": "dorefa", "bits": 4},
    {"quantizer": "twn"},
    {"quantizer": "twn", "group_size": 16},
    {"quantizer": "twn", "group_size": 0},
    {"quantizer": "minmax", "weight_format": "nvfp4"},
    {"quantizer": "minmax", "weight_format": "int4-asym/16@float16"},
]
INPUTS: list[dict[str, Any]] = [
    {"quantizer": "pact", "bits": 2, "alpha": 1.5},
    {"quantizer": "pact", "bits": 4, "alpha": 1.5, "gradient": "plus"},
    {"quantizer": "pact", "bits": 3, "alpha": 1.5, "gradient": "cg"},
    {"quantizer": "pact", "bits": 4, "alpha": 1.5, "signed": True},
    {"quantizer": "lsq", "bits": 3},
    {"quantizer": "lsq", "bits": 8, "signed": True},
    {"quantizer": "dorefa", "bits": 2},
    {"quantizer": "minmax", "bits": 4},
    {"quantizer": "minmax", "bits": 8, "signed": True},
    {"quantizer": "pact2", "bits": 4, "alpha_n": 0.3, "alpha_p": 1.5},
    {"quantizer": "pact2", "bits": 3, "alpha_n": 0.3, "alpha_p": 1.5, "gradient": "plus"},
    {"quantizer": "pact2", "bits": 8},
]


def names(settings: dict[str, Any]) -> str:
    return "-".join(str(value) for value in settings.values())


@pytest.mark.parametrize("settings", WEIGHTS, ids=names)
def test_weights_are_what_their_packed_form_holds(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    quantizer, weight = WEIGHT_QUANTIZERS.build(settings), torch.randn(12, 40 if "16" not in names(settings) else 48)
    learned = quantizer.init(weight)
    quantized = quantizer.quantize(weight, learned)
    packed = QuantizedTensor.from_packed(quantized.format, quantized.pack(), weight.shape[1])
    fake = quantizer.fake_quantize(weight, learned)
    assert torch.equal(packed.dequantize(), fake)
    groups = quantizer.format.split_groups(fake)
    assert len(fake.unique()) > 1 and max(len(group.unique()) for group in groups[0]) <= 2**quantizer.format.bits


@pytest.mark.parametrize("settings", INPUTS, ids=names)
def test_activations_are_what_packed_layers_compute(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    quantizer = ACTIVATION_QUANTIZERS.build(settings)
    x = torch.randn(4, 33) if quantizer.signed else torch.randn(4, 33).relu()
    learned = quantizer.init(x)
    for bits in (quantizer.bits, 8):
        scale = quantizer.scale(bits, learned).detach().reshape(1, 1, 1)
        zero = quantizer.zero_point(bits, learned)
        assert (zero is None) == quantizer.format(bits).has_scale_only
        expected = ActivationQuant(quantizer.format(bits), scale, zero=zero).fake_quantize(x)
        assert torch.equal(quantizer.fake_quantize(x, bits, learned), expected)


@pytest.mark.parametrize("zero", [False, True])
def test_clipping_levels_of_gaussian_weights_are_those_of_the_card(zero: bool) -> None:
    """From the formula; the levels of least squared error are 1.494, 1.224, 2.514, 2.474 and 3.894."""
    torch.manual_seed(0)
    weight = torch.randn(1000, 1000)
    for bits, expected in ({2: 1.236, 4: 2.436, 8: 3.802} if zero else {2: 1.473, 4: 2.467}).items():
        assert float(clipping_level(weight, bits, zero)) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("bits", "zero"), [(2, False), (2, True), (3, False), (4, False), (4, True)])
def test_sawb_is_near_the_least_squared_error(bits: int, zero: bool) -> None:
    torch.manual_seed(0)
    shapes = [torch.randn(100, 200), torch.distributions.Laplace(0.0, 1.0).sample(torch.Size((100, 200)))]
    for weight in shapes:
        best = min(_squared_error(weight, alpha, bits, zero) for alpha in torch.linspace(0.3, 6, 115).tolist())
        ours = (Sawb(bits, zero).fake_quantize(weight, {}) - weight).square().mean()
        assert float(ours) <= 1.02 * best


def _squared_error(weight: Tensor, alpha: float, bits: int, zero: bool) -> float:
    steps = 2**bits - 2 if zero else 2**bits - 1
    grid = torch.linspace(-alpha, alpha, steps + 1)
    nearest = grid[(weight[..., None] - grid).abs().argmin(-1)]
    return float((nearest - weight).square().mean())


def test_a_clipping_level_per_channel_is_that_of_the_channel_alone() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 3, 5, 5) * torch.tensor([0.1, 1.0, 3.0, 10.0]).reshape(4, 1, 1, 1)
    together = clipping_level(weight, 4, True, per_channel=True)
    assert together.shape == (4, 1, 1)
    for channel, alpha in zip(weight, together, strict=True):
        assert float(alpha) == pytest.approx(float(clipping_level(channel, 4, True)), rel=1e-5)
    matrix = weight.flatten(1)
    rows = torch.cat([Sawb(4, True).fake_quantize(row[None], {}) for row in matrix])
    assert torch.allclose(Sawb(4, True, granularity="channel").fake_quantize(matrix, {}), rows, rtol=1e-5)


@pytest.mark.parametrize("number_format", ["int3/row", "int4/row", "int4/tensor", "ternary/row", "int2-float-zero/row"])
def test_searched_scales_have_the_least_squared_error(number_format: str) -> None:
    """Of all scales up to that of the largest magnitude: a finer search of each group finds nothing much better."""
    torch.manual_seed(0)
    settings = {"quantizer": "lsq", "weight_format": f"{number_format}@float32", "scale_init": "mse"}
    quantizer = WEIGHT_QUANTIZERS.build(settings)
    assert isinstance(quantizer, Lsq)
    weight = torch.randn(4, 64)
    learned = quantizer.init(weight)
    largest = weight.abs().max() / quantizer.levels[1]

    def errors(scale: Tensor) -> Tensor:
        groups = quantizer.fake_quantize(weight, {**learned, "scale": scale}) - weight
        squares = groups.square().reshape(*learned["scale"].shape[:2], -1)
        return squares.sum(-1) if scale.numel() > 1 else squares.sum().reshape(1, 1)

    tried = [errors(torch.full_like(learned["scale"], float(largest) * step / 300)) for step in range(1, 301)]
    best = torch.stack(tried).amin(0)
    assert bool((errors(learned["scale"]) <= 1.02 * best).all())


def test_dorefa_by_hand() -> None:
    """Two bits: weights on -1, -1/3, 1/3 and 1 after the tanh, inputs on 0, 1/3, 2/3 and 1."""
    weight = torch.tensor([[1.0, 0.2, -0.5, -1.0]]).mul(0.8).atanh()
    quantized = Dorefa(2).fake_quantize(weight, {})
    assert torch.allclose(quantized, torch.tensor([[1, 1 / 3, -1 / 3, -1]]), atol=1e-6)
    inputs = DorefaActivations(2).fake_quantize(torch.tensor([-0.5, 0.2, 0.55, 0.9, 2.0]), 2, {})
    assert torch.allclose(inputs, torch.tensor([0, 1 / 3, 2 / 3, 1, 1]), atol=1e-6)


def test_weights_of_equal_magnitude_are_clipped_at_the_largest() -> None:
    assert float(clipping_level(torch.ones(4, 4), 8, True)) == 1.0


def test_ternary_weights_by_hand() -> None:
    weight = torch.tensor([[0.1, -0.35, 0.6, -1.0], [0.0, 0.0, 0.0, 0.0]])  # the threshold is 0.36
    assert torch.allclose(Twn().fake_quantize(weight, {}), torch.tensor([[0, 0, 0.8, -0.8], [0.0] * 4]))


def gradients(quantizer: Pact, x: Tensor, alpha: float, bits: int) -> tuple[Tensor, float]:
    inputs, level = x.clone().requires_grad_(), torch.tensor(alpha, requires_grad=True)
    quantizer.fake_quantize(inputs, bits, {"alpha": level}).sum().backward()
    assert inputs.grad is not None and level.grad is not None
    return inputs.grad, float(level.grad)


def test_gradients_of_pact() -> None:
    x, alpha, steps = torch.tensor([-0.5, 0.2, 0.7, 0.9, 1.5]), 1.0, 3
    z = x[1:4] / (alpha / steps)
    below = {"pact": 0.0, "cg": float((z.round() / steps).sum()), "plus": float(((z.round() - z) / steps).sum())}
    for gradient, expected in below.items():
        of_inputs, of_alpha = gradients(Pact(2, gradient=gradient), x, alpha, 2)
        assert of_inputs.tolist() == [0, 1, 1, 1, 0]
        assert of_alpha == pytest.approx(1 + expected, abs=1e-6), gradient
    of_inputs, of_alpha = gradients(Pact(4, signed=True), torch.tensor([-2.0, -0.5, 0.5, 2.0]), 1.0, 4)
    assert of_inputs.tolist() == [0, 1, 1, 0] and of_alpha == pytest.approx(1 - 8 / 7)


@pytest.mark.parametrize("settings", [*INPUTS[:6], *INPUTS[9:11]], ids=names)
def test_gradients_by_finite_differences_without_rounding(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rounding, whose gradient is a choice, every gradient is that of the clipped value."""
    monkeypatch.setattr(Tensor, "round", lambda self: self)
    torch.manual_seed(0)
    quantizer = ACTIVATION_QUANTIZERS.build({**settings, "quantizer": settings["quantizer"]})
    if settings.get("gradient") == "cg":
        pytest.skip("CG-PACT's gradient is no derivative")
    x = torch.randn(64, dtype=torch.float64)
    learned = {name: value.double() for name, value in quantizer.init(x.float()).items()}
    bits = quantizer.bits
    inputs = x.clone().requires_grad_()
    leaves = {name: value.clone().requires_grad_() for name, value in learned.items()}

    def total(name: str, change: float) -> Tensor:
        values = {**learned, name: learned[name] + change} if name in learned else learned
        return (quantizer.fake_quantize(x + change * (name == "x"), bits, values) ** 2).sum()

    (quantizer.fake_quantize(inputs, bits, leaves) ** 2).sum().backward()
    largest = 2 ** (bits - 1) - 1 if settings.get("signed") else 2**bits - 1
    scaled = (len(x) * largest) ** -0.5 if settings["quantizer"] == "lsq" else 1.0
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        expected = float((total(name, 1e-6) - total(name, -1e-6)) / 2e-6)
        assert float(leaf.grad) == pytest.approx(scaled * expected, rel=1e-4, abs=1e-7), name
    assert inputs.grad is not None
    expected = float((total("x", 1e-6) - total("x", -1e-6)) / 2e-6)
    assert float(inputs.grad.sum()) == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_gradients_of_weights() -> None:
    weight = torch.tensor([[-3.0, -0.4, 0.1, 0.2] + 12 * [0.3]], requires_grad=True)
    for settings, expected in (({"gradient": "plus"}, [1] * 16), ({"gradient": "clip"}, [0] + [1] * 15)):
        weight.grad = None
        Sawb(2, **settings).fake_quantize(weight, {}).sum().backward()
        assert weight.grad is not None and weight.grad.flatten().tolist() == expected
    scale = torch.tensor([[[1.0]]], requires_grad=True)
    lsq = WEIGHT_QUANTIZERS.build({"quantizer": "lsq", "weight_format": "int2/row"})
    lsq.fake_quantize(torch.tensor([[-3.0, -0.4, 0.1, 2.9]]), {"scale": scale}).sum().backward()
    assert scale.grad is not None
    by_hand = (-2 + (0 + 0.4) + (0 - 0.1) + 1) / 4**0.5  # clipped at -2, rounded to 0 twice, clipped at 1
    assert float(scale.grad) == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize("number_format", ["int2/16", "int4/tensor", "ternary/16", "int2-float-zero/16@float16"])
def test_gradients_of_a_learned_grid_are_those_of_its_formula(number_format: str) -> None:
    torch.manual_seed(0)
    quantizer = WEIGHT_QUANTIZERS.build({"quantizer": "lsq", "weight_format": number_format})
    assert isinstance(quantizer, Lsq)
    weight = torch.randn(8, 64)
    weighting = torch.randn_like(weight)

    def composed(weight: Tensor, learned: dict[str, Tensor]) -> Tensor:
        groups = quantizer.format.split_groups(weight)
        stored = quantizer.qparams(groups, learned)
        factor = (groups.numel() // stored.scale.numel() * quantizer.levels[1]) ** -0.5

        def with_gradient(learned: Tensor, stored: Tensor) -> Tensor:
            passed = straight_through(learned, stored)
            return (passed * (1 - factor)).detach() + passed * factor

        scale = with_gradient(learned["scale"], stored.scale)
        zero = None if stored.zero is None else with_gradient(learned["zero"], stored.zero)
        if zero is None:
            return (round_through((groups / scale).clamp(*quantizer.levels)) * scale).flatten(-2)
        return ((round_through((groups / scale + zero).clamp(0, 3)) - zero) * scale).flatten(-2)

    results = []
    for fake_quantize in (quantizer.fake_quantize, composed):
        leaves = {"weight": weight, **quantizer.init(weight)}
        leaves = {name: value.clone().requires_grad_() for name, value in leaves.items()}
        learned = {name: value for name, value in leaves.items() if name != "weight"}
        output = fake_quantize(leaves["weight"], learned)
        (output * weighting).sum().backward()
        results.append([output.detach(), *(leaf.grad for leaf in leaves.values())])
    for actual, expected in zip(*results, strict=True):
        assert actual is not None and expected is not None
        assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_learned_grid_takes_few_kernels() -> None:
    # A step of a small model waits for launches: with 80 for each layer it took 3.4 times as long as in float.
    class Count(TorchDispatchMode):
        launches = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            views = ("view", "detach", "alias", "slice", "unsqueeze", "expand", "empty", "t.default")
            self.launches += not any(name in str(func) for name in views)
            return func(*args, **(kwargs or {}))

    quantizer = WEIGHT_QUANTIZERS.build({"quantizer": "lsq", "weight_format": "int2-float-zero/16@float16"})
    weight = torch.randn(8, 64)
    learned = {name: value.requires_grad_() for name, value in quantizer.init(weight).items()}
    with Count() as count:
        quantizer.fake_quantize(weight.requires_grad_(), learned).sum().backward()
    assert count.launches < 36


def test_a_learned_zero_point_starts_between_two_levels() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 64)
    settings = {"quantizer": "lsq", "weight_format": "int2-float-zero/row", "scale_init": "mse"}
    quantizer = WEIGHT_QUANTIZERS.build(settings)
    learned = quantizer.init(weight)
    fake = quantizer.fake_quantize(weight, learned)
    assert torch.allclose(fake.abs().amax(-1), 1.5 * learned["scale"].flatten()) and bool(
        (learned["zero"] == 1.5).all()
    )
    errors = [float((quantizer.fake_quantize(weight, {**learned, "scale": f * learned["scale"]}) - weight).norm())
              for f in (0.9, 1.0, 1.1)]  # fmt: skip
    assert errors[1] <= min(errors[0], errors[2]), "the scales have the least squared error"
    mean = WEIGHT_QUANTIZERS.build({**settings, "scale_init": "mean"})
    assert float((mean.fake_quantize(weight, mean.init(weight)) - weight).norm()) > errors[1]
    # Clipped above, clipped below, between: (1.5 s - z s) per hand with s = 1, z = 1.5.
    scale, zero = (torch.tensor([[[value]]], requires_grad=True) for value in (1.0, 1.5))
    quantizer.fake_quantize(torch.tensor([[9.0, -9.0, 9.0, 0.2]]), {"scale": scale, "zero": zero}).sum().backward()
    assert scale.grad is not None and zero.grad is not None
    assert float(scale.grad) == pytest.approx((1.5 - 1.5 + 1.5 + (0.5 - 0.2)) / (4 * 1.5) ** 0.5, abs=1e-6)
    assert float(zero.grad) == pytest.approx(-3 / (4 * 1.5) ** 0.5, abs=1e-6)


def test_two_sided_pact_by_hand() -> None:
    """Two bits between -0.5 and 1: steps of a half, one below zero and two above."""
    x = torch.tensor([-2.0, -0.7, -0.3, 0.1, 0.6, 0.8, 3.0])
    z = torch.tensor([-0.6, 0.2, 1.2, 1.6])  # of those between
    for gradient in ("pact", "plus"):
        quantizer, inputs = Pact2(2, gradient=gradient), x.clone().requires_grad_()
        levels = {"alpha_n": 0.5, "alpha_p": 1.0}
        learned = {name: torch.tensor(level, requires_grad=True) for name, level in levels.items()}
        y = quantizer.fake_quantize(inputs, 2, learned)
        assert y.tolist() == [-0.5, -0.5, -0.5, 0, 0.5, 1, 1]
        y.sum().backward()
        between = 0.0 if gradient == "pact" else float(((z.round() - z) / 3).sum())
        assert learned["alpha_p"].grad is not None and learned["alpha_n"].grad is not None
        assert float(learned["alpha_p"].grad) == pytest.approx(1 + between, abs=1e-6)
        assert float(learned["alpha_n"].grad) == pytest.approx(-2 + between, abs=1e-6)
        assert inputs.grad is not None and inputs.grad[2:6].tolist() == [1, 1, 1, 1]
        assert float(inputs.grad[0]) == float(inputs.grad[6]) == 0


def test_two_sided_pact_starts_at_the_extremes_and_keeps_zero_a_level() -> None:
    x = torch.nn.functional.gelu(torch.linspace(-3, 3, 50))
    learned = Pact2(8).init(x)
    assert float(learned["alpha_p"]) == float(x.max()) and float(learned["alpha_n"]) == float(-x.min())
    assert float((Pact2(8).fake_quantize(x, 8, learned) - x).abs().max()) < 0.52 * float(x.max() - x.min()) / 255
    for n, p in ((-0.2, 1.0), (1.0, -0.2), (0.0, 1.0), (0.0, 0.0), (0.7, 0.9)):  # an update may cross zero
        levels = {"alpha_n": torch.tensor(n, requires_grad=True), "alpha_p": torch.tensor(p)}
        values = Pact2(3).fake_quantize(torch.tensor([-9.0, 0.0, 9.0]), 3, levels)
        assert values[1] == 0 and values.isfinite().all() and values[0] <= 0 <= values[2]
        values.sum().backward()
        assert levels["alpha_n"].grad is not None and float(levels["alpha_n"].grad) < 0, "it can come back"
    assert Pact2(4, penalty_weight=0.5).penalty({"alpha_n": torch.tensor(1.0), "alpha_p": torch.tensor(2.0)}) == 2.5
    started = Pact2(4, alpha_n=0.25).init(x)
    assert float(started["alpha_n"]) == 0.25 and float(started["alpha_p"]) == float(x.max())
    Pact2().check_input(-torch.ones(3), "block.dense")
    with pytest.raises(RecipeError, match="alpha_n of pact2 must lie"):
        Pact2(alpha_n=0.0)


def test_minmax_activations_by_hand() -> None:
    quantizer = MinMaxActivations(2)
    assert not quantizer.signed and not MinMaxActivations.trainable
    learned = quantizer.init(torch.tensor([0.5, 0.25, -3.0]))
    assert float(learned["amax"]) == 3
    x = torch.tensor([-1.0, 0.6, 1.4, 3.0, 3.2], requires_grad=True)
    y = quantizer.fake_quantize(x, 2, learned)
    assert y.tolist() == [0, 1, 1, 3, 3]
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 1, 1, 1, 0]
    signed = MinMaxActivations(3, signed=True)
    x = torch.tensor([-3.0, -1.9, 0.2, 1.4, 1.9], requires_grad=True)
    y = signed.fake_quantize(x, 3, {"amax": torch.tensor(1.5)})  # steps of a half, from -2 to 1.5
    assert y.tolist() == [-2, -2, 0, 1.5, 1.5]
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 1, 1, 1, 0]


def test_pact_starts_at_the_level_of_the_least_squared_error() -> None:
    torch.manual_seed(0)
    x = torch.randn(2000)
    for bits, signed, values in ((2, False, x.relu()), (4, False, x.relu()), (4, True, x), (8, False, x.relu())):
        quantizer = Pact(bits, signed=signed)
        levels = [quantizer.init(values)] + [{"alpha": alpha} for alpha in torch.linspace(0.1, 4, 100)]
        errors = [float((quantizer.fake_quantize(values, bits, each) - values).square().mean()) for each in levels]
        assert errors[0] <= 1.05 * min(errors)  # in steps of a fiftieth of the largest magnitude
    assert float(Pact().init(torch.zeros(2))["alpha"]) > 0
    assert Pact().init(x.relu().repeat(100))["alpha"].shape == ()  # more values than are searched


def test_pact_starts_where_the_paper_does_if_told_so() -> None:
    learned = Pact(alpha=10.0).init(torch.ones(2))
    assert float(learned["alpha"]) == 10 and float(Pact().penalty(learned)) == pytest.approx(0.02)
    for alpha in (0.0, 1.1e4):
        with pytest.raises(RecipeError, match="alpha of pact must lie"):
            Pact(alpha=alpha)
        with pytest.raises(RecipeError, match="alpha_p of pact2 must lie"):
            Pact2(alpha_p=alpha)


def test_one_sided_pact_refuses_negative_inputs() -> None:
    Pact().check_input(torch.ones(3), "block.conv")
    with pytest.raises(DataError, match=r"block\.conv have negative values.* `signed: true`"):
        Pact().check_input(-torch.ones(3), "block.conv")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"quantizer": "sawb", "bits": 6}, "use lsq for others"),
        ({"quantizer": "lsq", "weight_format": "nf4"}, "symmetric integers or ternary"),
        ({"quantizer": "lsq", "weight_format": "int99"}, "there is no number format"),
        ({"quantizer": "minmax", "weight_format": "x"}, "there is no number format"),
        ({"quantizer": "dorefa", "bits": 1}, "between 2 and 8"),
        ({"quantizer": "sawbb"}, "there is no weight quantizer 'sawbb'"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        WEIGHT_QUANTIZERS.build(settings)
