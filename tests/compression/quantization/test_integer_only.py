"""The method integer-only: a saved, verified artifact of integers that evaluates like any model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.recipe.recipe import Recipe
from smelt.compression.recipe.step_checks import check_steps
from smelt.data.text import TextData
from smelt.errors import ConversionError, FormatError, ModelError, RecipeError
from smelt.export.run import export
from smelt.measure.cost import count_parameters
from smelt.measure.perplexity import perplexity
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.load import load, skeleton, source_files
from smelt.models.model import Model
from smelt.models.verify import outputs, probe, verify
from smelt.runtime.integer.decoder_network import IntegerDecoder
from smelt.runtime.integer.graph import CONSTANTS_FILE, GRAPH_FILE
from smelt.runtime.integer.network import IntegerNetwork
from smelt.runtime.integer.run import Interpreter
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.character_tokenizer import character_tokenizer
from tests.models.test_quartznet import quartznet
from tests.runtime.integer.test_convolutions import converted, inputs, quantized
from tests.runtime.integer.test_encoders import padded_batch
from tests.tiny import BUILDS


def integer_model(name: str = "bert") -> Model:
    model = Model(BUILDS[name]())
    batches = [padded_batch(seed=seed) for seed in range(3)]
    facts = METHODS.build({"method": "integer-only"}).apply(model, MethodContext(batches=batches))
    assert facts["bytes_after"] < facts["bytes_before"] / 2
    assert "bert.pooler.dense (linear)" in facts["sqnr_db"] or name != "bert"
    return model


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_artifact_holds_integers_only_and_reloads_to_the_bit(name: str, tmp_path: Path) -> None:
    model = integer_model(name)
    save_artifact(model, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    verify(model, tmp_path)  # in a clean process
    loaded = load(tmp_path)
    assert isinstance(loaded.network, IntegerNetwork)
    assert not any(buffer.is_floating_point() for buffer in loaded.network.buffers())
    assert list(loaded.network.parameters()) == []
    assert loaded.task == "classification"
    assert torch.equal(outputs(model, probe(model)), outputs(loaded, probe(loaded)))
    assert loaded.anatomy.shape() == model.anatomy.shape()
    assert {CONSTANTS_FILE, GRAPH_FILE} <= source_files(tmp_path).keys()
    assert skeleton(tmp_path).device.type == "meta"


@pytest.mark.parametrize("nonlinear", ["i-bert", "nn-lut"])
def test_decoder_is_saved_evaluated_and_served(nonlinear: str, tmp_path: Path) -> None:
    model = Model(BUILDS["llama-tied"](), character_tokenizer())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    batches = [{"input_ids": torch.randint(3, 99, (3, 29), generator=torch.Generator().manual_seed(0))}]
    method = METHODS.build({"method": "integer-only", "nonlinear": nonlinear})
    facts = method.apply(model, MethodContext(batches=batches))
    assert {"lm_head (linear)"} < facts["sqnr_db"].keys()
    save_artifact(model, tmp_path)
    verify(model, tmp_path)  # in a clean process
    loaded = load(tmp_path)
    assert isinstance(loaded.network, IntegerDecoder)
    assert (loaded.task, count_parameters(loaded.network)) == ("language", parameters)
    text = TextData("text", ("hello world, hello integers. " * 8,))
    assert perplexity(loaded, text, context=32).value == perplexity(model, text, context=32).value
    engine = Engine(loaded, max_model_len=48)
    (answer,) = engine.generate(["hello"], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    prompt = torch.tensor([loaded.tokenizer("hello")["input_ids"]])
    expected = loaded.network.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert answer.tokens == expected[0, prompt.shape[1] :].tolist()
    with pytest.raises(ModelError, match="runs as one program"):
        Engine(loaded, max_model_len=48, kv_cache_dtype="int8")
    for to in ("c", "onnx-int"):
        with pytest.raises(FormatError, match=r"no form of an integer-only decoder|needs onnx"):
            export(loaded, to, tmp_path / to)


def test_float_constant_in_a_saved_graph_is_refused(tmp_path: Path) -> None:
    save_artifact(integer_model(), tmp_path)
    graph = json.loads((tmp_path / GRAPH_FILE).read_text())
    node = next(node for node in graph["nodes"] if node["op"] == "gelu")
    node["attributes"]["q_b"] = 0.5
    (tmp_path / GRAPH_FILE).write_text(json.dumps(graph))
    with pytest.raises(ModelError, match=r"'q_b' in node '.*gelu' \(gelu\) of layer 'bert\.encoder\.layer\.0"):
        load_artifact(tmp_path)


def test_unknown_program_is_refused(tmp_path: Path) -> None:
    save_artifact(integer_model(), tmp_path)
    content = json.loads((tmp_path / "smelt.json").read_text())
    (tmp_path / "smelt.json").write_text(json.dumps({**content, "program": "os.system"}))
    with pytest.raises(ModelError, match=r"the program 'os\.system'"):
        load_artifact(tmp_path)


def test_moving_the_network_moves_the_constants_of_the_graph() -> None:
    network = integer_model().network
    assert isinstance(network, IntegerNetwork)
    network.to("meta")
    assert {tensor.device.type for node in network.graph.nodes for tensor in node.constants.values()} == {"meta"}


def test_features_are_quantized_by_the_scale_of_the_input() -> None:
    network = quartznet()
    _, graph = converted(network)
    values = inputs(network, seed=1)
    expected = Interpreter(graph).run(quantized(graph, values))["logits"]
    actual = IntegerNetwork(graph, network)(input_features=values).logits
    assert torch.equal(actual, graph.dequantize("logits", expected))


def test_nothing_can_follow_and_other_networks_are_refused(tmp_path: Path) -> None:
    alone, followed = tmp_path / "alone.yaml", tmp_path / "followed.yaml"
    alone.write_text("steps:\n- method: integer-only\n")
    followed.write_text("steps:\n- method: integer-only\n- method: rtn\n")
    with pytest.raises(RecipeError, match="no step can follow integer-only"):
        check_steps(BUILDS["bert"]().to("meta"), Recipe.load(followed))
    with pytest.raises(ConversionError, match="no integer form of gpt2"):
        check_steps(BUILDS["gpt2"]().to("meta"), Recipe.load(alone))
