"""Decoders converted to integer graphs: close to the float network, the same bits with and without a cache."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import nn

from smelt.compression.calibration.ranges import observe_ranges
from smelt.errors import ConversionError, ModelError
from smelt.models.kv_cache import KVCacheFormat
from smelt.models.load import load
from smelt.models.model import Model
from smelt.runtime.integer.builder import GraphBuilder
from smelt.runtime.integer.conversion import NewBuilder
from smelt.runtime.integer.debug import float_interpreter, layer_sqnr
from smelt.runtime.integer.decoder_network import IntegerDecoder, decoder_inputs
from smelt.runtime.integer.decoders import check_decoder, convert_decoder, observed_modules
from smelt.runtime.integer.graph import DTYPES, IntegerGraph
from smelt.runtime.integer.run import Interpreter
from smelt.runtime.integer.table_builder import TableBuilder
from tests.runtime.integer.test_encoders import cosine
from tests.tiny import BUILDS, DECODER, build_network

DECODERS = ("llama", "llama-tied", "mistral", "qwen2")
BUILDERS = pytest.mark.parametrize("new_builder", [GraphBuilder, TableBuilder], ids=["i-bert", "nn-lut"])


def tokens(batch: int = 3, length: int = 29, seed: int = 9) -> torch.Tensor:
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(seed))


def converted(network: hf.PreTrainedModel, new_builder: NewBuilder = GraphBuilder) -> IntegerGraph:
    batches = [{"input_ids": tokens(seed=seed)} for seed in range(4)]
    return convert_decoder(network, observe_ranges(network, observed_modules(network), batches), new_builder)


def decoder(name: str = "llama", new_builder: NewBuilder = GraphBuilder) -> IntegerDecoder:
    network = BUILDS[name]()
    return IntegerDecoder(converted(network, new_builder), network)


@BUILDERS
@pytest.mark.parametrize("name", DECODERS)
def test_integer_decoder_is_close_to_the_float_decoder(name: str, new_builder: NewBuilder) -> None:
    network, ids = BUILDS[name](), tokens()
    graph = converted(network, new_builder)
    outputs = Interpreter(graph, check_ranges=True).run(decoder_inputs(network, ids))
    with torch.no_grad():
        expected = network(ids).logits
    logits = graph.dequantize("logits", outputs["logits"])
    assert cosine(logits, expected) > 0.998
    assert (logits - expected).abs().max() < 0.12 * expected.abs().max()
    assert outputs["present.2.key"].dtype == torch.int8
    assert outputs["present.2.key"].shape == (3, 2, 29, 8)


def test_outlier_channels_of_keys_cost_no_resolution() -> None:
    """Pairs of channels that RoPE rotates are ten times as large in the keys and a tenth in the queries."""
    errors = []
    for factor in (1.0, 10.0):
        network, ids = BUILDS["llama"](), tokens()
        with torch.no_grad():
            for layer in network.model.layers:
                layer.self_attn.q_proj.weight.mul_(8)  # so that attention depends on the scores
                for projection, scale in ((layer.self_attn.k_proj, factor), (layer.self_attn.q_proj, 1 / factor)):
                    projection.weight.unflatten(0, (-1, 2, 4))[:, :, 0] *= scale
            expected = network(ids).logits
        graph = converted(network)
        logits = graph.dequantize("logits", Interpreter(graph).run(decoder_inputs(network, ids))["logits"])
        errors.append(float((logits - expected).square().mean().sqrt()))
    assert errors[1] < 1.2 * errors[0]


def test_outlier_channels_of_activations_are_shared_with_the_weights() -> None:
    """One channel behind the norms is thirty times as large, and the weights that read it a thirtieth."""
    errors = []
    for factor in (1.0, 30.0):
        network, ids = BUILDS["llama"](), tokens()
        with torch.no_grad():
            for layer in network.model.layers:
                attention = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
                feed_forward = (layer.mlp.gate_proj, layer.mlp.up_proj)
                norms = (layer.input_layernorm, attention), (layer.post_attention_layernorm, feed_forward)
                for norm, readers in norms:
                    norm.weight[5] *= factor
                    for reader in readers:
                        reader.weight[:, 5] /= factor
            expected = network(ids).logits
        graph = converted(network)
        logits = graph.dequantize("logits", Interpreter(graph).run(decoder_inputs(network, ids))["logits"])
        errors.append(float((logits - expected).square().mean().sqrt()))
    assert errors[1] < 1.3 * errors[0]


@BUILDERS
def test_decoding_with_a_cache_gives_the_bits_of_the_whole_text(new_builder: NewBuilder) -> None:
    network, ids = decoder("llama", new_builder), tokens()
    whole = network(ids, use_cache=False)
    assert whole.past_key_values is None
    first = network(ids[:, :7])
    parts, cache = [first.logits], first.past_key_values
    for position in range(7, ids.shape[1]):
        output = network(ids[:, position : position + 1], past_key_values=cache)
        parts.append(output.logits)
    assert torch.equal(torch.cat(parts, 1), whole.logits)
    assert all(layer.keys.dtype == layer.values.dtype == torch.int8 for layer in cache.layers)


@BUILDERS
def test_padding_on_the_left_does_not_change_a_single_bit(new_builder: NewBuilder) -> None:
    network, ids = decoder("qwen2", new_builder), tokens(batch=2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    together = network(ids, attention_mask=mask).logits
    assert torch.equal(network(ids[1:, 5:]).logits[0], together[1, 5:])
    assert torch.equal(network(ids[:1]).logits[0], together[0])


@pytest.mark.parametrize("name", DECODERS)
def test_kernels_give_the_bits_of_the_reference(name: str) -> None:
    network, ids = decoder(name), tokens()
    expected = Interpreter(network.graph).run(decoder_inputs(network.outline, ids))
    assert torch.equal(network(ids).logits, network.graph.dequantize("logits", expected["logits"]))


@BUILDERS
def test_no_constant_and_no_result_is_float(new_builder: NewBuilder) -> None:
    network = decoder("llama", new_builder)
    assert not any(buffer.is_floating_point() for buffer in network.buffers())
    for node, tensor in Interpreter(network.graph).trace(decoder_inputs(network.outline, tokens())):
        assert tensor.dtype == DTYPES[node.dtype]


def test_generation_equals_the_most_likely_tokens_of_the_whole_text() -> None:
    network, ids = decoder(), tokens(batch=1, length=6)
    generated = network.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert generated.shape == (1, 14)
    best = network(generated).logits.argmax(-1)
    assert torch.equal(generated[:, 6:], best[:, 5:-1])
    beams = network.generate(ids, max_new_tokens=4, num_beams=2, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert beams.shape == (1, 10)  # beams reorder the cache


def test_a_text_longer_than_the_positions_is_refused() -> None:
    network = decoder()
    cache = network(tokens(batch=1, length=100)).past_key_values
    with pytest.raises(ModelError, match="129 tokens is longer than the 128 positions"):
        network(tokens(batch=1, length=29), past_key_values=cache)


def test_a_cache_in_another_format_is_refused() -> None:
    network = decoder()
    with pytest.raises(ModelError, match="leave out the KV cache format"):
        network(tokens(), past_key_values=KVCacheFormat("int8/row").cache(network.config))


def test_sqnr_per_layer_and_nonlinearities_in_float() -> None:
    network, ids = BUILDS["llama"](), tokens()
    graph = converted(network)
    graph_inputs = partial(_batch_inputs, network)
    rows = {
        (row.layer, row.op): row.decibels for row in layer_sqnr(network, graph, [{"input_ids": ids}], (), graph_inputs)
    }
    assert {"model.norm", "lm_head", "model.layers.1.mlp.down_proj"} <= {layer for layer, _ in rows}
    assert all(15 < decibels < 60 for decibels in rows.values()), rows
    exact = Interpreter(graph).run(decoder_inputs(network, ids))["logits"]
    for op in ("softmax", "rms_norm", "silu"):
        switched = float_interpreter(graph, [op]).run(decoder_inputs(network, ids))["logits"]
        assert cosine(switched, exact) > 0.99, op
        assert not torch.equal(switched, exact), op


def _batch_inputs(network: hf.PreTrainedModel, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return decoder_inputs(network, batch["input_ids"])


def test_operators_without_an_integer_form_are_named() -> None:
    network = build_network(hf.LlamaForCausalLM, hf.LlamaConfig(**DECODER, hidden_act="gelu"))
    with pytest.raises(ConversionError, match=r"model\.layers\.0\.mlp\.act_fn: the activation gelu"):
        check_decoder(network)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ConversionError, match="rotary embeddings of type dynamic"):
        check_decoder(build_network(hf.LlamaForCausalLM, hf.LlamaConfig(**DECODER, rope_parameters=dynamic)))
    with pytest.raises(ConversionError, match="sliding window of 16 tokens"):
        check_decoder(build_network(hf.MistralForCausalLM, hf.MistralConfig(**DECODER, sliding_window=16)))
    with pytest.raises(ConversionError, match="LlamaForSequenceClassification has no integer form"):
        check_decoder(build_network(hf.LlamaForSequenceClassification, hf.LlamaConfig(**DECODER)))
    network = BUILDS["llama"]()
    network.model.layers[2].mlp.gate_proj = nn.Bilinear(32, 32, 48)
    with pytest.raises(ConversionError, match=r"model\.layers\.2\.mlp\.gate_proj: Bilinear"):
        check_decoder(network)


def test_weights_that_overflow_are_found_at_conversion() -> None:
    network = BUILDS["llama"]()
    with torch.no_grad():
        network.model.layers[1].mlp.up_proj.weight[3, 3] = torch.inf
    with pytest.raises(ConversionError, match=r"model\.layers\.1"):
        converted(network)
    wide = build_network(hf.LlamaForCausalLM, hf.LlamaConfig(**{**DECODER, "max_position_embeddings": 2**23}))
    with pytest.raises(
        ConversionError, match=r"model\.layers\.0\.self_attn: a softmax over 8388608 positions overflows"
    ):
        converted(wide)


@pytest.mark.shared
def test_stories_stay_within_four_percent_of_the_perplexity(shared: Path) -> None:
    model = load(shared / "weights" / "stories260K")
    network = model.network
    torch.manual_seed(0)
    start = torch.full((20, 1), int(network.config.bos_token_id))
    stories = network.generate(start, max_new_tokens=120, do_sample=True, pad_token_id=0)
    calibration, evaluation = stories[:12], stories[12:]
    ranges = observe_ranges(network, observed_modules(network), [{"input_ids": calibration}])
    with torch.no_grad():
        before = _loss(network(evaluation).logits, evaluation)
    integer = IntegerDecoder(convert_decoder(network, ranges), network)
    assert Model(integer).task == "language"
    assert abs(_loss(integer(evaluation).logits, evaluation) - before) < 0.04


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return float(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
