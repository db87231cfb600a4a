"""Encoders converted to integer graphs: close to the float network, independent of padding, errors that name layers."""

from __future__ import annotations

import math

import pytest
import torch
import transformers as hf
from torch import nn

from smelt.compression.calibration.ranges import observe_ranges
from smelt.errors import ConversionError
from smelt.models.model import Model
from smelt.runtime.integer.builder import GraphBuilder
from smelt.runtime.integer.debug import NONLINEAR, LayerSqnr, float_interpreter, layer_sqnr
from smelt.runtime.integer.encoders import check_encoder, convert_encoder, observed_modules
from smelt.runtime.integer.graph import IntegerGraph
from smelt.runtime.integer.network import IntegerNetwork
from smelt.runtime.integer.run import Interpreter, add_default_inputs
from tests.tiny import BUILDS, ENCODER, build_network

ENCODERS = ("bert", "roberta", "distilbert", "mpnet")
Batch = dict[str, torch.Tensor]


def padded_batch(length: int = 17, rows: int = 6, seed: int = 0, padding: int = 1) -> Batch:
    """Return random tokens, the later rows padded; position-counting families use 1 as the padding token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 99, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, length - row :] = 0
    return {"input_ids": ids.masked_fill(mask == 0, padding), "attention_mask": mask}


def converted(network: hf.PreTrainedModel, batches: list[Batch] | None = None) -> IntegerGraph:
    batches = batches or [padded_batch(seed=seed) for seed in range(4)]
    return convert_encoder(network, observe_ranges(network, observed_modules(network), batches))


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


@pytest.mark.parametrize("name", ENCODERS)
def test_integer_encoder_is_close_to_the_float_encoder(name: str) -> None:
    network = BUILDS[name]()
    graph, batch = converted(network), padded_batch(seed=9)
    outputs = Interpreter(graph, check_ranges=True).run(add_default_inputs(batch))
    with torch.no_grad():
        expected = network(**batch, output_hidden_states=True)
    visible = batch["attention_mask"].bool()
    hidden = graph.dequantize("last_hidden_state", outputs["last_hidden_state"])
    assert cosine(hidden[visible], expected.hidden_states[-1][visible]) > 0.999
    logits = graph.dequantize("logits", outputs["logits"])
    assert (logits - expected.logits).abs().max() < 0.05 * expected.logits.abs().max() + 0.01
    assert all(tensor.dtype == torch.int32 for tensor in outputs.values())


@pytest.mark.parametrize("name", ENCODERS)
def test_padding_does_not_change_a_single_bit(name: str) -> None:
    network = BUILDS[name]()
    interpreter = Interpreter(converted(network))
    batch = padded_batch()
    together = interpreter.run(add_default_inputs(batch))["logits"]
    for row in range(len(together)):
        length = int(batch["attention_mask"][row].sum())
        single = {key: value[row : row + 1, :length] for key, value in batch.items()}
        alone = interpreter.run(add_default_inputs(single))["logits"]
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("name", ENCODERS)
def test_kernels_give_the_bits_of_the_reference(name: str) -> None:
    network = BUILDS[name]()
    graph, batch = converted(network), padded_batch(seed=9)
    output = IntegerNetwork(graph, network)(**batch)
    expected = Interpreter(graph).run(add_default_inputs(batch))
    for key in graph.outputs:
        assert torch.equal(output[key], graph.dequantize(key, expected[key]))


def test_padding_is_not_part_of_the_ranges() -> None:
    network = BUILDS["bert"]()
    batch = padded_batch()
    with torch.no_grad():
        network.bert.embeddings.word_embeddings.weight[1] = 1000.0  # the padding token
    ranges = observe_ranges(network, observed_modules(network), [batch])
    assert ranges["bert.embeddings.LayerNorm"].inputs.max() < 10
    assert not any(module._forward_hooks for module in network.modules())


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_without_a_head_gives_hidden_states(name: str) -> None:
    network = BUILDS[name]().base_model
    integer = IntegerNetwork(converted(network), network)
    assert Model(integer).task == "embedding"
    output = integer(input_ids=padded_batch()["input_ids"])
    assert output[0] is output.last_hidden_state
    assert output.last_hidden_state.shape == (6, 17, 32)


def test_missing_mask_and_token_types_take_their_defaults() -> None:
    network = BUILDS["bert"]()
    integer = IntegerNetwork(converted(network), network)
    ids = padded_batch()["input_ids"]
    full = {"attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    assert torch.equal(integer(input_ids=ids).logits, integer(input_ids=ids, **full).logits)
    assert not torch.equal(
        integer(input_ids=ids).logits, integer(input_ids=ids, token_type_ids=torch.ones_like(ids)).logits
    )


def test_relu_is_the_minimum_of_a_requantization() -> None:
    config = hf.BertConfig(**ENCODER, num_labels=2, hidden_act="relu")
    network = build_network(hf.BertForSequenceClassification, config)
    graph, batch = converted(network), padded_batch(seed=9)
    assert "gelu" not in {node.op for node in graph.nodes}
    with torch.no_grad():
        expected = network(**batch).logits
    assert (
        cosine(graph.dequantize("logits", Interpreter(graph).run(add_default_inputs(batch))["logits"]), expected) > 0.99
    )


def test_sqnr_per_layer_and_nonlinearities_in_float() -> None:
    network = BUILDS["bert"]()
    graph, batch = converted(network), padded_batch(seed=9)
    rows = {(row.layer, row.op): row.decibels for row in layer_sqnr(network, graph, [batch])}
    assert rows["bert.embeddings.word_embeddings", "embedding"] > 40
    assert all(15 < decibels < 60 for decibels in rows.values()), rows
    exact = Interpreter(graph).run(add_default_inputs(batch))["logits"]
    for op in NONLINEAR:  # close, but not the integer form
        switched = float_interpreter(graph, [op]).run(add_default_inputs(batch))["logits"]
        assert cosine(switched, exact) > 0.99, op
    assert not torch.equal(float_interpreter(graph, NONLINEAR).run(add_default_inputs(batch))["logits"], exact)
    # A broken layer shows where it is.
    with torch.no_grad():
        network.bert.encoder.layer[1].output.dense.weight.mul_(1.5)
    broken = {(row.layer, row.op): row.decibels for row in layer_sqnr(network, graph, [batch])}
    assert broken["bert.encoder.layer.1.output.dense", "linear"] < 12
    assert broken["bert.encoder.layer.1.intermediate.dense", "linear"] > 15


def test_sqnr_without_noise_signal_or_mask() -> None:
    assert LayerSqnr("layer", "linear", signal=1.0).decibels == math.inf
    assert LayerSqnr("layer", "linear", noise=1.0).decibels == math.inf
    network = BUILDS["bert"]()
    rows = layer_sqnr(network, converted(network), [{"input_ids": padded_batch()["input_ids"]}])
    assert len(rows) == 3 * 6 + 2 + 3 + 7 and all(row.decibels > 15 for row in rows)


def test_operators_without_an_integer_form_are_named() -> None:
    with pytest.raises(ConversionError, match="no integer form of gpt2 networks"):
        check_encoder(BUILDS["gpt2"]())
    silu = build_network(hf.BertForSequenceClassification, hf.BertConfig(**ENCODER, hidden_act="silu"))
    with pytest.raises(ConversionError, match=r"bert\.encoder\.layer\.0\.intermediate\.\w+: the activation silu"):
        check_encoder(silu)
    network = BUILDS["bert"]()
    network.bert.encoder.layer[2].output.LayerNorm = nn.GroupNorm(4, 32)
    with pytest.raises(ConversionError, match=r"bert\.encoder\.layer\.2\.output\.LayerNorm: GroupNorm"):
        check_encoder(network)
    with pytest.raises(ConversionError, match="head of BertForMaskedLM"):
        check_encoder(build_network(hf.BertForMaskedLM, hf.BertConfig(**ENCODER)))


def test_scales_that_overflow_are_found_at_conversion() -> None:
    network = BUILDS["bert"]()
    with torch.no_grad():
        network.bert.encoder.layer[1].output.LayerNorm.weight.fill_(1e-12)
        network.bert.encoder.layer[1].output.LayerNorm.bias.fill_(1e3)
    with pytest.raises(ConversionError, match=r"bert\.encoder\.layer\.1\.output\.LayerNorm: .* too large for int32"):
        converted(network)
    network = BUILDS["bert"]()
    with torch.no_grad():
        network.bert.encoder.layer[0].intermediate.dense.weight[3, 3] = torch.nan
    with pytest.raises(ConversionError, match=r"bert\.encoder\.layer\.0"):
        converted(network)


def test_a_position_bias_that_overflows_is_found_at_conversion() -> None:
    network = BUILDS["mpnet"]()
    with torch.no_grad():
        network.mpnet.encoder.relative_attention_bias.weight.fill_(1e7)
    with pytest.raises(ConversionError, match=r"relative_bias can reach .* overflows int32"):
        converted(network)


def test_bounds_of_sums_and_requantized_values() -> None:
    builder = GraphBuilder({"a": "int32", "b": "int32"})
    a, b = (builder.input(name, scale=0.1, bound=100) for name in ("a", "b"))
    assert builder.add(a, b, "layer").bound == 200
    assert builder.requantize(a, 1.0, "layer").bound == 11  # 10, and one for rounding
    largest = builder.input("a", bound=2**30)
    with pytest.raises(ConversionError, match=f"layer: the result of add can reach {2**31}, which overflows int32"):
        builder.add(largest, largest, "layer")


def test_row_of_zero_weights_and_large_bias() -> None:
    network = BUILDS["bert"]()
    with torch.no_grad():
        network.classifier.weight[1] = 0.0
        network.classifier.bias[1] = 7.0
    graph = converted(network)
    logits = graph.dequantize("logits", Interpreter(graph).run(add_default_inputs(padded_batch()))["logits"])
    assert (logits[:, 1] - 7.0).abs().max() < 1e-3
