"""Attention map reuse: against a network with tied maps, in generation, artifact and engine, and on a trained model."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compression.base import MethodContext
from smelt.compression.calibration.attention_similarity import LN2, jensen_shannon, map_divergences
from smelt.compression.distillation.intermediates import ObservedNetwork, block_paths
from smelt.compression.distillation.student import Student
from smelt.compression.distillation.teachers import DenseTeacher
from smelt.compression.methods import METHODS
from smelt.compression.pruning.attention_reuse import AttentionReuse
from smelt.errors import DataError, ModelError, RecipeError
from smelt.measure.cost import Workload, block_cost, block_parameters, unit_bytes
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.attention_reuse import reuse_attention
from smelt.models.model import Model
from smelt.models.verify import verify
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.serve.test_engine import SMALL, answers, expected, prompts
from tests.tiny import BUILDS, DECODER, build_network, inputs
from tests.trained import character_batches, character_model, divergence

SHAREABLE = ("bert", "roberta", "distilbert", "vit", "opt", "opt-post-norm", "llama", "mistral", "qwen2", "qwen3")


@torch.no_grad()
def logits(model: Model, name: str) -> Tensor:
    result: Tensor = model.network(**inputs(name)).logits
    return result


def shared(name: str, leaders: dict[int, int]) -> Model:
    model = Model(BUILDS[name]())
    reuse_attention(model.anatomy, leaders)
    return model


def apply(model: Model, batches: list[dict[str, Tensor]], **settings: Any) -> dict[str, Any]:
    return METHODS.build({"method": "attention-reuse", **settings}).apply(model, MethodContext(batches=batches))


@pytest.mark.parametrize("name", SHAREABLE)
def test_a_layer_computes_its_values_with_the_map_of_the_leader(name: str) -> None:
    """The oracle replaces the softmax of the second layer by the recorded map of the first, in transformers' module."""
    network = BUILDS[name]()
    network.set_attn_implementation("eager")
    softmax, maps, calls = F.softmax, [], [0]

    def replayed(scores: Tensor, *args: Any, **options: Any) -> Tensor:
        result = softmax(scores, *args, **options)
        maps.append(result)
        calls[0] += 1
        return maps[0] if calls[0] == 2 else result

    F.softmax, original = replayed, F.softmax
    try:
        wanted = logits(Model(network), name)
    finally:
        F.softmax = original
    assert calls[0] == 3
    model = shared(name, {1: 0})
    torch.testing.assert_close(logits(model, name), wanted, atol=1e-6, rtol=1e-5)
    part = next(part for part in model.anatomy.parts if part.map_of is not None)
    names = {child for child, _ in part.owner.named_children()}
    assert not names & {"q_proj", "k_proj", "query", "key", "q_lin", "k_lin", "q_norm", "k_norm"}
    slots = [module.smelt_map_slot for module in model.network.modules() if hasattr(module, "smelt_map_slot")]
    assert [slot._map for slot in slots] == [None], "the map is released after its last reader"


def test_layers_with_equal_weights_and_inputs_share_a_map_exactly() -> None:
    """The second layer gets the input of the first, because the first adds nothing."""
    network: Any = BUILDS["llama"]()
    first, second = network.model.layers[:2]
    with torch.no_grad():
        first.self_attn.o_proj.weight.zero_()
        first.mlp.down_proj.weight.zero_()
        for name in ("q_proj", "k_proj"):
            getattr(second.self_attn, name).weight.copy_(getattr(first.self_attn, name).weight)
        second.input_layernorm.weight.copy_(first.input_layernorm.weight)
    model = Model(network)
    before = logits(model, "llama")
    assert map_divergences(model.anatomy, [inputs("llama")])[1] < 1e-9
    reuse_attention(model.anatomy, {1: 0})
    torch.testing.assert_close(logits(model, "llama"), before, atol=1e-6, rtol=1e-5)


def test_the_divergence_by_hand_and_without_padding() -> None:
    first, second = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.5, 0.5])
    middle = (first + second) / 2
    by_hand = 0.5 * (2 * 0.5 * np.log(0.5 / 0.25) + 2 * 0.5 * np.log(0.5 / 0.5))
    assert float(jensen_shannon(first, second)) == pytest.approx(by_hand) and float(middle.sum()) == 1
    assert float(jensen_shannon(torch.eye(2)[0], torch.eye(2)[1])) == pytest.approx(LN2)
    network, batch = BUILDS["bert"](), inputs("bert")
    network.set_attn_implementation("eager")
    with torch.no_grad():
        maps = network(**batch, output_attentions=True).attentions
    mask = batch["attention_mask"].bool()
    wanted = [float(jensen_shannon(a, b).mean(1)[mask].mean()) for a, b in pairwise(maps)]
    hooks = [len(module._forward_hooks) for module in network.modules()]  # transformers has some of its own
    np.testing.assert_allclose(map_divergences(anatomy_of(network), [batch, batch]), [0.0, *wanted], rtol=1e-5)
    assert [len(module._forward_hooks) for module in network.modules()] == hooks


def test_the_most_similar_neighbors_are_merged_first() -> None:
    network = build_network(
        transformers.LlamaForCausalLM, transformers.LlamaConfig(**{**DECODER, "num_hidden_layers": 6})
    )
    anatomy = anatomy_of(network)

    def groups(divergences: list[float], **settings: Any) -> dict[int, int]:
        return AttentionReuse(**settings).group(anatomy, np.array(divergences))

    assert groups([0, 0.0, 0.4, 0.1, 0.3, 0.2]) == {3: 2, 5: 4}  # the first layer keeps its own map
    assert groups([0, 0.0, 0.4, 0.1, 0.3, 0.2], separate=0) == {1: 0, 3: 2}
    assert groups([0, 9.0, 9.0, 0.1, 0.2, 0.3], layers=0.34) == {3: 2, 4: 2}
    assert groups([0, 9.0, 9.0, 0.1, 0.2, 0.3], layers=0.34, max_group=2) == {3: 2, 5: 4}
    with pytest.raises(ModelError, match="at most 2 can"):
        AttentionReuse(layers=0.5, max_group=2).check(anatomy)
    with pytest.raises(ModelError, match="with the most similar layers in groups, 2 can"):
        groups([0, 9.0, 0.1, 0.3, 0.2, 0.4], layers=0.5, max_group=2)


@pytest.mark.parametrize("name", ["llama", "opt", "qwen3"])
def test_generation_keeps_no_keys_of_layers_without_a_map(name: str, tmp_path: Path) -> None:
    """(G + 1) / (2 G) of the KV cache, the tokens of a network without a cache, and the engine's too."""
    model = shared(name, {1: 0, 2: 0})
    network, ids = model.network, inputs(name)["input_ids"][:1]
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached = network.generate(ids, use_cache=True, **settings)
    assert torch.equal(cached, network.generate(ids, use_cache=False, **settings))

    def cache_bytes(network: Any) -> int:
        layers = network(ids, use_cache=True).past_key_values.layers
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    assert cache_bytes(network) * 6 == cache_bytes(BUILDS[name]()) * 4
    save_artifact(model, tmp_path)
    engine = Engine(load_artifact(tmp_path), **SMALL)
    assert engine.backend == ("eager" if name == "opt" else "compiled-cpu")
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    assert answers(engine, prompts(3), params) == [expected(network, text, 4) for text in prompts(3)]


@pytest.mark.parametrize("name", ["bert", "vit", "llama"])
def test_the_artifact_is_the_model_and_transformers_refuses_it(name: str, tmp_path: Path) -> None:
    model = Model(BUILDS[name]())
    before = block_parameters(model.anatomy)
    facts = apply(model, [inputs(name, seed=i) for i in range(3)])
    assert block_parameters(model.anatomy) == before - facts["parameters_removed"] < before
    save_artifact(model, tmp_path)
    again = load_artifact(tmp_path)
    assert torch.equal(logits(again, name), logits(model, name))
    assert [part.map_of for part in again.anatomy.parts] == [part.map_of for part in model.anatomy.parts]
    with pytest.raises(ValueError, match="attention_map_of"):
        transformers.AutoModel.from_pretrained(tmp_path)
    if name == "llama":
        verify(again, tmp_path)


def test_costs_fall_by_the_projections_the_scores_and_the_keys() -> None:
    dense, model = Model(BUILDS["llama"]()), shared("llama", {1: 0})
    workload = Workload(tokens=10, context=100)
    width, kv_width, heads = 32, 16, 32
    saved = 10 * width * (heads + kv_width) + heads * 10 * 10 / 2
    assert block_cost(dense.anatomy, "macs", workload) - block_cost(model.anatomy, "macs", workload) == saved
    before, after = (next(part for part in m.anatomy.parts if part.block == 1) for m in (dense, model))
    removed = 2 * (unit_bytes(before, workload) - unit_bytes(after, workload))
    assert removed == 4 * (width * (heads + kv_width) + kv_width * 100)


def test_the_repair_fits_the_outputs_of_the_layer_before() -> None:
    """On a trained model: closer to it than without repair, and far closer than with a map from random Q and K."""
    batches = character_batches(samples=32)
    distances = {}
    for repair in ("none", "full"):
        model = character_model()
        facts = apply(model, batches, repair=repair, layers=0.34)
        distances[repair] = divergence(model).kl
        assert facts["kv_cache_share"] == pytest.approx(5 / 6)
    random = character_model()
    leader = random.network.model.layers[next(iter(facts["maps_of"].values()))]
    reuse_attention(random.anatomy, {int(block): leader for block, leader in facts["maps_of"].items()})
    with torch.no_grad():
        for layer in (leader.self_attn.q_proj, leader.self_attn.k_proj):
            layer.weight.normal_(0, 0.2)
    assert distances["full"] < 0.8 * distances["none"] < divergence(random).kl


def test_training_reaches_the_map_of_the_leader_and_lowers_the_distance(tmp_path: Path) -> None:
    """`qat` in a later step, with the model before as teacher, is the fine-tuning that the paper has."""
    teacher = character_model()
    save_artifact(teacher, tmp_path)
    model = character_model()
    apply(model, character_batches(samples=16), repair="none", layers=0.67, separate=0)
    before = divergence(model).kl
    batches = [{**batch, "labels": batch["input_ids"]} for batch in character_batches(samples=64)]
    step = {
        "method": "qat", "weights": {"quantizer": "minmax", "weight_format": "int8/row"}, "teacher": str(tmp_path),
        "losses": [{"loss": "logits"}], "epochs": 8, "batch_size": 8, "optimizer": {"lr": 1e-3},
    }  # fmt: skip
    leader = next(part for part in model.anatomy.parts if part.map_of is None and hasattr(part.owner, "smelt_map_slot"))
    queries = leader.input_projections[0].weight.detach().clone()
    METHODS.build(step).apply(model, MethodContext(batches=batches))
    assert divergence(model).kl < 0.3 * before
    trained = model.network.get_submodule(leader.input_projections[0].path)
    assert not torch.allclose(trained.weight, queries, atol=1e-3)


def test_distillation_by_the_method_lowers_the_distance(tmp_path: Path) -> None:
    """The network before teaches; the result computes eagerly, and is the artifact that is saved."""
    distances, settings = {}, {"layers": 0.67, "separate": 0, "batch_size": 8, "optimizer": {"lr": 4e-3}}
    batches = character_batches(samples=48)
    for epochs in (0, 3):
        model = character_model()
        facts = apply(model, batches, epochs=epochs, **settings)
        distances[epochs] = divergence(model).kl
    assert distances[3] < 0.3 * distances[0]
    assert facts["steps"] == 18 and facts["maps_of"] == {"1": 0, "2": 0}  # of the 48 samples 2 are held out
    assert not model.network.training and model.network.config._attn_implementation == "eager"
    assert all(parameter.requires_grad for parameter in model.network.parameters())
    save_artifact(model, tmp_path)
    again = load_artifact(tmp_path)
    assert torch.equal(logits(again, "llama"), logits(model, "llama"))


@pytest.mark.parametrize("name", ["bert", "vit", "llama"])
def test_the_teacher_shows_the_maps_of_the_layers_that_still_have_one(name: str) -> None:
    """And all hidden states, in the order of the student's; with the same weights only layers that share differ."""
    names, batch = ("attention_maps", "hidden_states"), inputs(name)
    model = shared(name, {1: 0})
    network = model.network
    student = Student(network, (), None)
    student.observed = ObservedNetwork(network, block_paths(model.anatomy), names)
    teacher = DenseTeacher(BUILDS[name](), names, {1})
    with torch.no_grad():
        ours, theirs = student.eval()(**batch).intermediates, teacher.outputs(student, batch).intermediates
    student.observed.close()
    assert [len(ours[each]) for each in names] == [len(theirs[each]) for each in names] == [2, 4]
    torch.testing.assert_close(ours["attention_maps"][0], theirs["attention_maps"][0])
    assert not torch.allclose(ours["attention_maps"][1], theirs["attention_maps"][1], atol=1e-4)
    network.set_attn_implementation("eager")
    dense = BUILDS[name]()
    dense.set_attn_implementation("eager")
    with torch.no_grad():
        maps = dense(**batch, output_attentions=True).attentions
    torch.testing.assert_close(theirs["attention_maps"][1], maps[2])


def test_layers_of_other_windows_keep_a_map_of_their_own() -> None:
    model = Model(BUILDS["qwen3"]())
    batches = [inputs("qwen3")]
    assert apply(model, batches, layers=0.34)["maps_of"] == {"2": 1}
    model = Model(BUILDS["qwen3"]())
    model.network.config.layer_types = ["full_attention", "full_attention", "sliding_attention"]
    with pytest.raises(ModelError, match="it attends to other positions"):
        apply(model, batches, layers=0.34)


def test_bad_settings_of_distillation_are_refused() -> None:
    with pytest.raises(RecipeError, match="at least one term of the loss"):
        AttentionReuse(losses=())
    with pytest.raises(RecipeError, match="epochs"):
        AttentionReuse(epochs=-1.0)
    batches = [{name: tensor for name, tensor in batch.items() if name != "labels"} for batch in character_batches()]
    with pytest.raises(DataError, match="evaluates what it trains with labels"):
        apply(character_model(), batches, epochs=1)


@pytest.mark.parametrize("method", ["rtn", "gptq", "magnitude"])
def test_later_steps_know_the_layers(method: str, tmp_path: Path) -> None:
    """Calibration runs the whole network for such a block; heads that share a map stay, channels go."""
    model = shared("llama", {2: 1})
    batches = [inputs("llama", seed=i) for i in range(2)]
    settings: dict[str, Any] = {"bits": 8, "group_size": 8}
    if method == "magnitude":
        settings = {"budget": {"parameters": 0.8}, "repair": "none", "ffn_multiple": 1, "head_multiple": 1}
    METHODS.build({"method": method, **settings}).apply(model, MethodContext(batches=batches))
    heads = [part.units for part in model.anatomy.parts if part.kind == "heads"]
    assert heads[1:] == [2, 2]
    save_artifact(model, tmp_path)
    assert torch.equal(logits(load_artifact(tmp_path), "llama"), logits(model, "llama"))


def test_what_cannot_share_is_refused() -> None:
    for name, message in (("gpt2", "one layer computes its queries, keys and values"), ("mpnet", "does not return")):
        with pytest.raises(ModelError, match=message):
            apply(Model(BUILDS[name]()), [inputs(name)])
    with pytest.raises(ModelError, match="2 of 3 layers cannot use the map of another: at most 1 can"):
        apply(Model(BUILDS["llama"]()), [inputs("llama")], layers=0.7)
    with pytest.raises(ModelError, match="does not have"):
        apply(Model(BUILDS["resnet"]()), [inputs("resnet")])
    model = shared("llama", {2: 1})
    with pytest.raises(ModelError, match="a map of their own each"):
        apply(model, [inputs("llama")])
    model.network.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="set the attention implementation to eager"):
        logits(model, "llama")


@pytest.mark.parametrize(
    "entries",
    [
        [{"layer": "model.layers.0.self_attn", "map_of": "model.layers.1.self_attn"}],
        [{"layer": "model.layers.1.self_attn", "map_of": "model.layers.1.self_attn"}],
        [{"layer": "model.layers.1.self_attn", "map_of": "model.layers.0.self_attn"}] * 2,
        [
            {"layer": "model.layers.1.self_attn", "map_of": "model.layers.0.self_attn"},
            {"layer": "model.layers.2.self_attn", "map_of": "model.layers.1.self_attn"},
        ],
        [{"layer": "model.layers.7.self_attn", "map_of": "model.layers.0.self_attn"}],
        {"layer": 1},
    ],
)
def test_forged_entries_are_refused(entries: Any, tmp_path: Path) -> None:
    import json

    save_artifact(shared("llama", {1: 0}), tmp_path)
    content = json.loads((tmp_path / "smelt.json").read_text())
    content["attention_reuse"] = entries
    (tmp_path / "smelt.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"in smelt\.json"):
        load_artifact(tmp_path)


def test_a_copy_shares_its_own_maps() -> None:
    """A copied network must not read the maps of the one it was copied from."""
    model = shared("llama", {1: 0})
    network: nn.Module = copy.deepcopy(model.network)
    with torch.no_grad():
        for parameter in model.network.model.layers[0].self_attn.parameters():
            parameter.normal_()
    torch.testing.assert_close(logits(Model(network), "llama"), logits(shared("llama", {1: 0}), "llama"))
