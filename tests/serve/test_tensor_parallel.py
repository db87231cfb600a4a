"""Tensor parallelism gives the tokens of one process, also quantized or with adapters; a dead rank is noticed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, distributed

from smelt.errors import ModelError
from smelt.kernels.hadamard import hadamard_transform
from smelt.models.artifact import save_artifact
from smelt.models.experts import split_experts
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear, quantized_layers
from smelt.models.quantized_network import linear_weight, replace_module
from smelt.numerics.catalog import get_format
from smelt.serve.engine.adapters import Adapters
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.shard import partition_units, shard
from tests.mixtures import fused
from tests.serve.test_adapters import merged, write_adapter
from tests.serve.test_engine import GREEDY, SMALL, answers, expected, prompts, run
from tests.tiny import BUILDS, DECODER

RANK = 3


def saved(model: Model, folder: Path) -> str:
    folder.mkdir()
    save_artifact(model, folder)
    return str(folder)


@contextmanager
def split(folder: str, **options: Any) -> Iterator[tuple[Engine, Any]]:
    """Yield an engine over two processes, and check that the other one is gone afterwards."""
    engine = Engine(folder, tensor_parallel_size=2, **SMALL, **options)
    runner: Any = engine.runner
    try:
        assert runner.backend == "eager, tensor parallel over 2 devices"
        yield engine, runner
    finally:
        runner._workers[0].kill()
        distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_two_processes_match_one(name: str, tmp_path: Path) -> None:
    folder = saved(Model(BUILDS[name](), source=name), tmp_path / "model")
    reference = [expected(load(folder).network, text) for text in prompts(3)]
    with split(folder) as (engine, runner):
        assert answers(engine, prompts(3)) == reference
        runner._workers[0].kill()
        runner._workers[0].wait()
        engine.submit(prompts()[0], GREEDY)
        with pytest.raises(RuntimeError, match="exited with -9"):
            engine.step()


def test_adapters_over_two_processes(tmp_path: Path) -> None:
    """A mixed batch matches merged models."""
    network = BUILDS["llama"]()
    folders = {f"a{seed}": write_adapter(tmp_path / f"a{seed}", network, seed, rank=seed + 1) for seed in range(2)}
    names, text = [None, "a0", "a1", None, "a1"], prompts()[0]
    reference = [expected(merged(network, folders[n], 8 / (int(n[1:]) + 1)) if n else network, text) for n in names]
    with split(saved(Model(network), tmp_path / "model"), adapters=folders) as (engine, _):
        requests = [engine.submit(text, GREEDY, adapter=name)[0] for name in names]
        run(engine)
        assert [request.output for request in requests] == reference
    assert len({tuple(answer) for answer in reference}) == 3


def wide_llama() -> Model:
    """Build a network wide enough for groups of 32 on two devices; three such groups of FFN channels, an odd number."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(**{**DECODER, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96})
    network = hf.LlamaForCausalLM(config).eval()
    with torch.no_grad():  # so that answers differ
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return Model(network)


def small_gpt2() -> Model:
    return Model(BUILDS["gpt2"]())


def quantize_model(model: Model, schemes: list[QuantizationScheme]) -> Model:
    """Quantize every linear layer of block i with the i-th scheme; factors and static scales as the scheme requires."""
    for block, scheme in zip(model.anatomy.blocks, schemes, strict=True):
        layers = {p.path: p.module for part in block.parts for p in (*part.input_projections, part.output)}
        for path, module in layers.items():
            replace_module(model.network, path, _packed(module, scheme))
    return model


def _packed(module: Any, scheme: QuantizationScheme) -> QuantizedLinear:
    weight = linear_weight(module).detach()
    rotated = hadamard_transform(weight) if scheme.hadamard else weight
    matrix = scheme.weight.quantize(rotated)
    layer = QuantizedLinear.from_quantized(matrix, replace(scheme, rank=0), bias=module.bias, dtype=torch.float32)
    if scheme.static:
        layer.set_static_input_scale(torch.full((weight.shape[1],), 2.0))
    if scheme.rank:
        out, columns = weight.shape
        layer.add_low_rank_factors(torch.randn(scheme.rank, columns) / 8, torch.randn(out, scheme.rank) / 8)
    return layer


def described(weight: str, inputs: str | None = None, **changes: Any) -> QuantizationScheme:
    return QuantizationScheme(get_format(weight), get_format(inputs) if inputs else None, **changes)


PLACES = {  # in one network: weight-only, quantized inputs, low-rank factors
    "int4/16@float16": {"inputs": "int8", "static": True},
    "int8": {"inputs": "int8"},
    "mxfp4": {"inputs": "mxfp4"},
}


@pytest.mark.parametrize("weight", PLACES)
def test_a_quantized_model_over_two_processes_gives_the_same_tokens(weight: str, tmp_path: Path) -> None:
    schemes = [described(weight), described(weight, **PLACES[weight]), described(weight, rank=RANK)]
    folder = saved(quantize_model(wide_llama(), schemes), tmp_path / "model")
    reference = [expected(load(folder).network, text) for text in prompts(3)]
    assert len({tuple(answer) for answer in reference}) == 3
    with split(folder) as (engine, _):
        assert answers(engine, prompts(3)) == reference
        quantized = quantized_layers(engine.model.network)
        down, up = quantized["model.layers.0.mlp.down_proj"], quantized["model.layers.0.mlp.up_proj"]
        assert down.in_features == up.out_features == (64 if weight == "mxfp4" else 48)
        assert down.packed.tensors["codes"].shape[1] == down.in_features * down.scheme.weight.bits // 8


class Together:
    """Ranks that are threads of one process: all-reduce runs over the threads."""

    def __init__(self, ranks: int) -> None:
        self.slots: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=300)
        self.me = threading.local()

    def all_reduce(self, tensor: Tensor, op: Any = distributed.ReduceOp.SUM) -> None:
        self.slots[self.me.rank] = tensor.clone()
        self.barrier.wait()
        all_of_them = torch.stack(self.slots)
        self.barrier.wait()
        tensor.copy_(all_of_them.amax(0) if op == distributed.ReduceOp.MAX else all_of_them.sum(0))

    def run(self, calls: list[Callable[[], Tensor]]) -> list[Tensor]:
        result: list[Any] = [None] * len(calls)

        def one(rank: int) -> None:
            self.me.rank = rank
            result[rank] = calls[rank]()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return result


def logits(model: Model, adapters: Adapters) -> Tensor:
    """Return the logits of nine tokens, three of them with an adapter."""
    ids = torch.randint(3, 99, (1, 9), generator=torch.Generator().manual_seed(1))
    with adapters.apply_by_index(torch.tensor([0, 1, 1, 0, 0, 0, 0, 1, 0])), torch.no_grad():
        result: Tensor = model.network(ids).logits
    return result


def logits_of_ranks(
    model: Model, ranks: int, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    group = Together(ranks)
    monkeypatch.setattr(distributed, "all_reduce", group.all_reduce)
    calls: list[Callable[[], Tensor]] = []
    for rank in range(ranks):
        one = copy.deepcopy(model)
        adapters = Adapters(one, folders)
        shard(one, rank, ranks, adapters)
        calls.append(partial(logits, one, adapters))
    return group.run(calls)


SPLIT = [
    *map(described, ["int3-asym/32", "int4/tensor", "nvfp4", "amxfp4", "dint4/16", "ternary", "nf4/32", "fp8-e4m3"]),
    *(described("int8", inputs) for inputs in ("int8", "int8-asym", "fp8-e4m3", "int8/tensor", "amxfp4/row")),
    described("int4/16", "int8/16"),
    described("int4/16", "int8", clip=0.8, rank=RANK),
    described("int4/16", "int8", static=True, rank=RANK),
    described("mxfp4", "mxfp4", rank=RANK),
    described("int4", "mxfp4-up"),
]


NARROW = [described("int4-asym/8@float16"), described("int8", "int8"), described("int4", "int8-asym", clip=0.9)]


@pytest.mark.parametrize(
    ("build", "scheme"),
    [*((wide_llama, scheme) for scheme in SPLIT), *((small_gpt2, scheme) for scheme in NARROW)],
    ids=lambda value: value.__name__ if callable(value) else str(value.to_json()),
)
def test_ranks_match_the_unsplit_model(
    build: Callable[[], Model], scheme: QuantizationScheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with input quantization whose scale covers all inputs, with biases, with fused QKV, and with adapters, which
    read unquantized inputs.
    """
    model = quantize_model(build(), [scheme] * 3)
    folders = {"a": write_adapter(tmp_path / "a", model.network, 0)} if build is wide_llama else {}
    for result in logits_of_ranks(model, 2, folders, monkeypatch):
        unsplit = copy.deepcopy(model)
        assert torch.allclose(result, logits(unsplit, Adapters(unsplit, folders)), rtol=1e-4, atol=2e-4)


def test_shards_are_as_even_as_groups_allow() -> None:
    model = quantize_model(wide_llama(), [described("int8"), described("int4/16"), described("mxfp4")])
    assert partition_units(model, 2) == [[0, 1, 2], [0, 48, 96], [0, 1, 2], [0, 48, 96], [0, 1, 2], [0, 64, 96]]
    assert partition_units(wide_llama(), 2)[1] == [0, 48, 96]


def test_unsupported_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="2 heads, too few for 3"):
        shard(Model(BUILDS["llama"]()), 0, 3)
    with pytest.raises(ModelError, match="normalized together and cannot be split"):
        partition_units(Model(split_experts(fused("olmoe"))), 2)
    cases = [
        (described("int4", hadamard=True), "o_proj cannot be split .*: its inputs are rotated together; use one"),
        (described("int4", "nvfp4"), "the scale of its nvfp4 inputs depends on all of them"),
        (described("int4", "ternary"), "the scale of its ternary inputs depends on all of them"),
        (
            described("int4/48"),
            "the 2 heads of .* cannot be split over 2 devices: 48 inputs of the output projection share",
        ),
    ]
    for scheme, sentence in cases:
        model = quantize_model(wide_llama(), [scheme] * 3)
        before = {name: tensor.clone() for name, tensor in model.network.state_dict().items()}
        with pytest.raises(ModelError, match=sentence):
            shard(model, 0, 2)
        after = model.network.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)  # nothing was split before the refusal
    monkeypatch.setattr(
        "smelt.serve.engine.tensor_parallel._start_workers", lambda *_: pytest.fail("a process was started")
    )
    with pytest.raises(ModelError, match=sentence):
        Engine(model, tensor_parallel_size=2, **SMALL)
