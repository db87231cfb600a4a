"""LoRA in the fused GPU network: the tokens of merged models, and those of the hooks on the module.

On a CUDA device with CUDA graphs, elsewhere under Triton's interpreter.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.kernels.triton_device import DEVICE, HALF, distance  # isort: skip  (before anything imports Triton)

from smelt.compression.base import MethodContext
from smelt.compression.quantization.rtn import RoundToNearest
from smelt.errors import ModelError, RequestError
from smelt.kernels.lora import LoraTiles
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear
from smelt.numerics import get_format
from smelt.runtime.decoder import build_decoder, linear_groups
from smelt.serve.engine import factory
from smelt.serve.engine.adapters import Adapters
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.factory import paged_gpu_runner, paged_runner
from smelt.serve.engine.sampling_params import SamplingParams
from tests.models.test_surgery import cut, random_masks
from tests.serve.test_adapters import merged
from tests.serve.test_engine import SMALL, expected, prompts, run
from tests.tiny import BUILDS

ALL = tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
NUM_TOKENS = 3
SHORT = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
ALPHA = 8
Adapted = tuple[Any, dict[str, Path]]


@pytest.fixture(autouse=True)
def _gpu_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the GPU runner also without a CUDA device."""

    def select_runner(resolved: Any, num_blocks: int) -> Any:
        return (paged_gpu_runner if resolved.config.compiled else paged_runner)(resolved, num_blocks)

    monkeypatch.setattr(factory, "paged_runner", select_runner)


def write_adapter(folder: Path, network: Any, rank: int, targets: tuple[str, ...] = ALL, size: float = 0.3) -> Path:
    """Write an adapter for some of the layers, different for every rank."""
    generator = torch.Generator().manual_seed(rank)
    tensors = {}
    for path, module in network.named_modules():
        if path.endswith(targets):
            shapes = {"A": (rank, module.in_features), "B": (module.out_features, rank)}
            for factor, shape in shapes.items():
                values = torch.randn(*shape, generator=generator) * size
                tensors[f"base_model.model.{path}.lora_{factor}.weight"] = values
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def served(tmp_path: Path) -> Adapted:
    """A network, and adapters of several ranks: of all layers, of all, and of some that share their input."""
    network = BUILDS["llama"]()
    kinds = {4: ALL, 9: ALL, 24: ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")}
    return network, {f"r{rank}": write_adapter(tmp_path / f"r{rank}", network, rank, kinds[rank]) for rank in kinds}


def texts_of(count: int) -> list[list[int]]:
    """Return short prompts: the interpreter is slow."""
    return [tokens[-6:] for tokens in prompts(count)]


def engine_of(network: Any, folders: dict[str, Path], **more: Any) -> Engine:
    return Engine(Model(copy.deepcopy(network).to(DEVICE)), adapters=folders, **{**SMALL, **more})


def answer(engine: Engine, texts: list[list[int]], names: list[str | None]) -> list[list[int]]:
    requests = [engine.submit(text, SHORT, adapter=name)[0] for text, name in zip(texts, names, strict=True)]
    run(engine)
    return [request.output for request in requests]


def merged_answer(served: Adapted, text: list[int], name: str | None) -> list[int]:
    network, folders = served
    return expected(
        network if name is None else merged(network, folders[name], ALPHA / int(name[1:])), text, NUM_TOKENS
    )


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_mixed_batch_equals_merged_models(served: Adapted, chunk: int | None) -> None:
    """Prompts in one captured step, or in chunks beside decode tokens."""
    engine = engine_of(*served, prefill_chunk_size=chunk)
    assert engine.runner.backend.startswith("fused-gpu")
    names: list[str | None] = ["r4", None, "r9", "r24"]
    texts = texts_of(len(names))
    reference = [merged_answer(served, text, name) for text, name in zip(texts, names, strict=True)]
    assert answer(engine, texts, names) == reference
    assert len({tuple(tokens) for tokens in reference}) == len(names)


def test_one_request_alone(served: Adapted) -> None:
    """A single token takes the GEMVs, but those that would hide what the adapter adds."""
    text = texts_of(1)[0]
    assert answer(engine_of(*served), [text], ["r24"]) == [merged_answer(served, text, "r24")]


@pytest.mark.gpu
def test_long_prompts_take_large_tiles(served: Adapted) -> None:
    options = {"max_model_len": 128, "enable_prefix_caching": False}
    texts = [(prompts()[0] * 16)[:120] for _ in range(3)]
    names: list[str | None] = ["r4", None, "r9"]
    assert answer(engine_of(*served, **options), texts, names) == [
        merged_answer(served, text, name) for text, name in zip(texts, names, strict=True)
    ]


def test_a_step_without_adapters_runs_no_adapter_kernel(served: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    from smelt.runtime import gpu

    engine, calls = engine_of(*served), []
    monkeypatch.setattr(gpu, "lora_shrink", lambda *args, shrink=gpu.lora_shrink: calls.append(1) or shrink(*args))
    text = texts_of(1)[0]
    assert answer(engine, [text], [None]) == [merged_answer(served, text, None)] and not calls
    assert answer(engine, [text], ["r4"]) == [merged_answer(served, text, "r4")] and calls


def test_a_pruned_model(tmp_path: Path) -> None:
    network: Any = BUILDS["llama"]()
    cut(network, random_masks(network))
    folders = {"r4": write_adapter(tmp_path / "r4", network, 4)}
    text = texts_of(1)[0]
    engine = engine_of(network, folders)
    assert answer(engine, [text, text], ["r4", None]) == [
        merged_answer((network, folders), text, "r4"), expected(network, text, NUM_TOKENS)
    ]  # fmt: skip


def test_over_int4_weights_the_tokens_equal_those_of_the_hooks(served: Adapted) -> None:
    network, folders = served
    RoundToNearest(bits=4, group_size=16).apply(Model(network), MethodContext())
    names: list[str | None] = [None, *folders]
    texts = texts_of(len(names))
    module = Engine(Model(copy.deepcopy(network)), adapters=folders, compiled=False, **SMALL)
    assert answer(engine_of(network, folders), texts, names) == answer(module, texts, names)


SCHEMES = {
    "half": None,
    "int4": QuantizationScheme(get_format("int4/32@float16")),
    "int8": QuantizationScheme(get_format("int8/row"), get_format("int8")),
    "fp8": QuantizationScheme(get_format("fp8-e4m3"), get_format("fp8-e4m3")),
}


def wide_network(scheme: QuantizationScheme | None) -> Any:
    """A network in half precision with widths that the kernels for quantized weights need."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=99, max_position_embeddings=128,
    )  # fmt: skip
    network = hf.LlamaForCausalLM(config).eval().to(HALF)
    for block in network.model.layers if scheme is not None else ():
        for path in ALL:
            parent, _, child = path.rpartition(".")
            weight = block.get_submodule(path).weight.data.float()
            layer = QuantizedLinear.from_quantized(scheme.weight.quantize(weight), scheme, bias=None, dtype=HALF)
            setattr(block.get_submodule(parent), child, layer)
    return network


@pytest.mark.parametrize("tokens", [1, 3, 24])
@pytest.mark.parametrize("name", SCHEMES)
def test_projections_in_half_precision_equal_hooks(tmp_path: Path, name: str, tokens: int) -> None:
    """Weights in half precision, quantized, and with quantized inputs: gated and plain projections of some tokens."""
    from smelt.runtime.gpu import FusedNetwork

    network = wide_network(SCHEMES[name]).to(DEVICE)
    folders = {f"r{rank}": write_adapter(tmp_path / f"r{rank}", network, rank, size=0.1) for rank in (16, 64)}
    model = Model(network)
    adapters = Adapters(model, folders)
    adapters.stack(linear_groups(model))
    fused = FusedNetwork(build_decoder(model, 32), 4, adapters.stacks)
    indices = torch.arange(tokens) % 3 if tokens > 1 else torch.tensor([2])
    tiles = LoraTiles.split(torch.from_numpy(LoraTiles.pack(indices.numpy(), tokens, 2)).to(DEVICE), tokens)
    x = torch.randn(tokens, 256).to(HALF).to(DEVICE)
    block = network.model.layers[0]
    with torch.inference_mode(), adapters.apply_by_index(indices.to(DEVICE)):
        normed = block.input_layernorm(x)
        qkv = torch.cat([getattr(block.self_attn, f"{each}_proj")(normed) for each in "qkv"], dim=-1)
        after = x + block.self_attn.o_proj(qkv[:, :256])
        reference = after + block.mlp(block.post_attention_layernorm(after))
    part, ffn = fused.decoder.parts[:2]
    attention, feed_forward = fused._layers[:2]
    with torch.inference_mode():
        hidden = x.clone()
        actual_qkv = attention[0].norm_forward(hidden, None, part.norm, tiles)
        residual = attention[1].forward_add(qkv[:, :256].contiguous(), hidden, tiles)
        gated = feed_forward[0].norm_forward_gated(hidden, residual, ffn.norm, ffn.activation, None, tiles)
        actual = hidden + feed_forward[1].forward_add(gated, hidden, tiles)
    tolerance = 0.02 if DEVICE == "cuda" else 0.004
    assert distance(actual_qkv, qkv) < tolerance
    assert distance(actual, reference) < tolerance
    with torch.inference_mode():
        plain = attention[0].norm_forward(x.clone(), None, part.norm)
    assert distance(plain, qkv) > 0.1  # what the adapters add is not lost in the tolerance


def test_a_replaced_adapter_takes_effect(served: Adapted, tmp_path: Path) -> None:
    """In graphs that are captured already, and not from the prefix cache of the one before."""
    network, folders = served
    engine = engine_of(network, {"r24": folders["r24"]}, max_loras=2)
    texts = texts_of(3)
    names: list[str | None] = ["r24", None, "r24"]
    before = answer(engine, texts, names)
    graphs = dict(engine.runner._captured_extended)  # type: ignore[attr-defined]
    engine.load_adapter("r24", str(folders["r9"]))
    after = answer(engine, texts, names)
    reference = ["r9", None, "r9"]
    assert after == [merged_answer(served, text, name) for text, name in zip(texts, reference, strict=True)]
    assert after[0] != before[0] and after[1] == before[1]
    assert engine.runner._captured_extended == graphs  # type: ignore[attr-defined]
    engine.load_adapter("r4", str(folders["r4"]))  # into the free slot
    assert answer(engine, texts[:2], ["r4", "r24"]) == [
        merged_answer(served, texts[0], "r4"), merged_answer(served, texts[1], "r9")
    ]  # fmt: skip
    engine.unload_adapter("r4")
    with pytest.raises(RequestError, match="there is no adapter 'r4'"):
        engine.submit(texts[0], SHORT, adapter="r4")
    engine.load_adapter("other", str(folders["r24"]))
    assert answer(engine, texts[:1], ["other"]) == [merged_answer(served, texts[0], "r24")]


def test_adapters_without_room_are_refused(served: Adapted, tmp_path: Path) -> None:
    network, folders = served
    with pytest.raises(ModelError, match="3 adapters do not fit into max_loras 2"):
        engine_of(network, folders, max_loras=2)
    with pytest.raises(ModelError, match="rank 24, and there is room for 16; set max_lora_rank"):
        engine_of(network, folders, max_lora_rank=16)
    engine = engine_of(network, {"r24": folders["r24"]})
    with pytest.raises(ModelError, match="all 1 slots for adapters are in use"):
        engine.load_adapter("r9", str(folders["r9"]))
    with pytest.raises(ModelError, match=r"mlp.down_proj, which no adapter did at the start; set max_loras"):
        engine.load_adapter("r24", str(folders["r4"]))
    request = engine.submit(texts_of(1)[0], SHORT, adapter="r24")[0]
    with pytest.raises(RequestError, match="requests are using the adapter 'r24'"):
        engine.load_adapter("r24", str(folders["r24"]))
    run(engine)
    assert request.output == merged_answer(served, texts_of(1)[0], "r24")  # a refused adapter changes nothing


def test_factors_are_in_memory_once(served: Adapted) -> None:
    adapters = engine_of(*served).adapters
    storages = {stack.down.untyped_storage().data_ptr() for stack in adapters.stacks.values()}
    factors = [factors for layers in adapters._factors.values() for factors in layers.values()]
    assert len(adapters.stacks) == 12 and all(each.down.untyped_storage().data_ptr() in storages for each in factors)


@pytest.mark.gpu
def test_after_warmup_nothing_is_captured_or_compiled(served: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    engine = engine_of(*served, max_num_seqs=12)
    engine.warmup()
    captured = set(engine.runner._captured_extended)  # type: ignore[attr-defined]
    assert {size for size, _ in captured} == {1, 2, 4, 8, 16} and engine.state()["steps"] == 0
    names: list[str | None] = [None, "r4", "r9", "r24", *[None, "r9"] * 4]
    texts, compiled = texts_of(12), []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **options: compiled.append(options["repr"]))
    assert answer(engine, texts, names) == [merged_answer(served, *each) for each in zip(texts, names, strict=True)]
    assert set(engine.runner._captured_extended) == captured and not compiled  # type: ignore[attr-defined]
