"""Carved feed-forwards compute what a dense network with a mask per token computes; the router is causal and sees a
window; generation with a cache, padding, saving and reloading change nothing.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from smelt.errors import ModelError
from smelt.export.opens import opens_in
from smelt.export.run import export
from smelt.kvcache.eviction.prefill import check_evictable
from smelt.measure.cost import Workload, active_parameters, block_macs, block_parameters
from smelt.measure.structure import describe_structure
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import save_artifact
from smelt.models.carved_experts import LayerChannels, carve, carved_layers, carved_routes_of, describe_carving
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.surgery import keep_units
from tests.carved import CHANNELS, OWN, SHARED, carved, ids, router
from tests.tiny import BUILDS

GATED = ["llama", "mistral", "qwen2", "qwen3"]


def logits(model: Model, tokens: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model.network(input_ids=tokens, **inputs).logits
    return output


def masked_dense(family: str, tokens: Tensor, experts: Tensor) -> Tensor:
    """Run the dense network with the hidden values of each token masked to the channels of its expert."""
    network = BUILDS[family]()
    masks = torch.zeros(3, 48)
    for index, own in enumerate(OWN):
        masks[index, [*SHARED, *own]] = 1
    for part in anatomy_of(network).parts:
        if part.kind == "ffn_channels":
            part.output.module.register_forward_pre_hook(lambda _, args: (args[0] * masks[experts].view_as(args[0]),))
    return logits(Model(network), tokens)


@pytest.mark.parametrize("family", GATED)
def test_each_token_uses_the_shared_channels_and_those_of_its_expert(family: str) -> None:
    model, tokens = carved(family), ids()
    experts = carved_routes_of(model.network).router.route(tokens)
    assert set(experts.flatten().tolist()) == {0, 1, 2}
    assert torch.allclose(logits(model, tokens), masked_dense(family, tokens, experts), atol=1e-5)


def test_keeping_all_channels_reproduces_the_dense_network() -> None:
    everything = tuple(range(48))
    for channels in (LayerChannels((), (everything,) * 3), LayerChannels(everything, ((),) * 3)):
        model = carved("llama", [channels] * 3)
        assert torch.allclose(logits(model, ids()), logits(Model(BUILDS["llama"]()), ids()), atol=1e-5)


def test_the_router_is_causal_and_sees_a_window() -> None:
    routing = router(BUILDS["llama"]())
    tokens = ids(length=40)
    changed = tokens.clone()
    changed[:, 25] = (changed[:, 25] + 1) % 99
    with torch.no_grad():
        before, after = routing(tokens), routing(changed)
    different = (before - after).abs().amax(dim=(0, 2)) > 1e-6
    context = routing.config.context
    assert context == 7
    assert different.nonzero()[:, 0].tolist() == list(range(25, 25 + context))


def test_the_last_ids_decide_the_expert_of_a_token() -> None:
    routing, tokens = router(BUILDS["llama"]()), ids(length=40)
    with torch.no_grad():
        alone = routing(tokens[:, -routing.config.context :])[:, -1]
        shorter = routing(tokens[:, 1 - routing.config.context :])[:, -1]
        full = routing(tokens)[:, -1]
    assert torch.allclose(alone, full, atol=1e-5) and not torch.allclose(shorter, full, atol=1e-4)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_last_token_alone_has_the_same_logits(layers: int) -> None:
    """Also of texts that are padded on the left."""
    built = router(BUILDS["llama"](), layers=layers, window=8)
    tokens, mask = ids(3, 20), torch.ones(3, 20, dtype=torch.int64)
    mask[1, :13] = mask[2, :19] = 0
    with torch.no_grad():
        logits = built(tokens, mask, last_only=True)
        assert logits.shape == (3, 1, 3)
        torch.testing.assert_close(logits, built(tokens, mask)[:, -1:])
    assert built.route(tokens, mask, last_only=True).tolist() == logits.argmax(-1).tolist()
    assert not any(name.endswith("bias") for name, _ in built.named_parameters())  # which no file would have


def test_mixed_precision_does_not_change_the_routes() -> None:
    routing, tokens = router(BUILDS["llama"]()), ids(batch=16, length=60)
    with torch.autocast("cpu", torch.bfloat16):
        inside = routing.route(tokens)
        rounded = routing(tokens).argmax(dim=-1)
    assert torch.equal(inside, routing.route(tokens)) and not torch.equal(rounded, inside)


def test_long_prompts_are_routed_in_parts() -> None:
    """600 tokens, of which 512 attend at once; a plain mask over all of them is the oracle."""
    routing, tokens = router(BUILDS["llama"](), window=5, layers=1), ids(batch=1, length=600)
    with torch.no_grad():
        full = routing(tokens)
        one_by_one = [routing(tokens[:, max(end - 5, 0) : end])[:, -1] for end in (1, 3, 511, 512, 513, 514, 600)]
    for end, expected in zip((1, 3, 511, 512, 513, 514, 600), one_by_one, strict=True):
        assert torch.allclose(full[:, end - 1], expected, atol=1e-5)


def test_generation_with_a_cache_routes_as_the_full_prompt() -> None:
    model, tokens = carved(), ids(length=30)
    with torch.no_grad():
        step = model.network(input_ids=tokens[:, :11], use_cache=True)
        parts = [step.logits]
        for start in (11, 12, 13, 20):
            stop = {11: 12, 12: 13, 13: 20, 20: 30}[start]
            step = model.network(input_ids=tokens[:, start:stop], past_key_values=step.past_key_values)
            parts.append(step.logits)
    assert torch.allclose(torch.cat(parts, dim=1), logits(model, tokens), atol=1e-5)


def test_padding_changes_no_answer() -> None:
    model, prompt = carved(), ids(batch=1, length=9)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), prompt], dim=1)
    mask = torch.tensor([[0] * 5 + [1] * 9])
    alone = model.network.generate(prompt, **settings)[0, 9:]
    assert torch.equal(model.network.generate(padded, attention_mask=mask, **settings)[0, 14:], alone)


def test_a_cache_of_another_model_is_refused() -> None:
    dense = BUILDS["llama"]()
    filled = dense(input_ids=ids(), use_cache=True).past_key_values
    with pytest.raises(ModelError, match="not filled by this model"):
        carved().network(input_ids=ids(length=1), past_key_values=filled)


def test_inputs_that_cannot_be_routed_are_refused() -> None:
    model = carved()
    with pytest.raises(ModelError, match="reads token ids"):
        model.network(inputs_embeds=torch.zeros(1, 3, 32))
    with pytest.raises(ModelError, match="one value per token"):
        model.network(input_ids=ids(), attention_mask=torch.ones(3, 1, 20, 20))
    with pytest.raises(ModelError, match="run the whole network"):
        carved_layers(model.network)[0](torch.zeros(1, 3, 32))


def test_a_layer_does_not_use_the_routing_of_the_pass_before() -> None:
    model = carved()
    logits(model, ids(batch=1, length=3))
    with pytest.raises(ModelError, match="run the whole network"):
        carved_layers(model.network)[0](torch.zeros(1, 3, 32))


def test_a_copy_routes_by_itself() -> None:
    model = carved()
    twin = copy.deepcopy(model.network)
    assert carved_routes_of(twin) is not carved_routes_of(model.network)
    assert carved_routes_of(twin).router is twin.expert_router
    assert torch.equal(logits(Model(twin), ids()), logits(model, ids()))


def test_every_parameter_gets_a_gradient_in_training() -> None:
    """Also those of experts that no token of the batch uses."""
    network = carved().network.train()
    tokens = torch.full((1, 4), 7)
    network(input_ids=tokens, labels=tokens).loss.backward()
    missing = [name for name, parameter in network.named_parameters() if parameter.grad is None]
    assert missing and all(name.startswith("expert_router.") for name in missing)


def test_costs_count_one_expert_per_token() -> None:
    model, dense = carved(), Model(BUILDS["llama"]())
    removed = 3 * 3 * 32 * (48 - 40)  # layers, matrices, hidden size, channels in none of 16 + 3 * 8
    assert block_parameters(model.anatomy) == block_parameters(dense.anatomy) - removed
    assert active_parameters(model.anatomy) == block_parameters(model.anatomy) - 3 * 3 * 32 * 16
    work = Workload(tokens=10)
    assert block_macs(model.anatomy, work) == block_macs(dense.anatomy, work) - 10 * 3 * 3 * 32 * 24
    row = describe_structure(model.anatomy, 10)["blocks"][0]
    assert row["feed_forward"] == "16 FFN channels and 1 of 3 experts of 8"


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_saved_model_is_the_same_after_loading(family: str, tmp_path: Path) -> None:
    model = carved(family)
    expected = logits(model, ids())
    save_artifact(model, tmp_path)
    again = load(tmp_path)
    assert torch.equal(logits(again, ids()), expected)
    assert describe_carving(again.network) == describe_carving(model.network)
    assert again.anatomy.shape() == model.anatomy.shape()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["intermediate_size"] == 48  # no plain field says that transformers could read it
    assert config["per_layer_config"]["0"]["carved_experts"] == [8, 8, 8]
    assert [str(opener) for opener in opens_in(again)] == ["Smelt"]


def test_heads_can_be_removed_before_carving(tmp_path: Path) -> None:
    network = BUILDS["llama"]()
    anatomy = anatomy_of(network)
    for part in anatomy.parts:
        if part.kind == "heads":
            keep_units(network, part, [1])
    carve(anatomy_of(network), [CHANNELS] * 3, router(network))
    model = Model(network)
    expected = logits(model, ids())
    save_artifact(model, tmp_path)
    assert torch.equal(logits(load(tmp_path), ids()), expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"router": None}, "not described by"),
        ({"layers": None}, "not a router and a list of layers"),
        ({"layers": []}, "do not fit"),
        ({"shared": 41}, "do not fit"),
        ({"shared": -1}, "do not fit"),
        ({"shared": 1.5}, "do not fit"),
        ({"experts": [8, 8]}, "do not fit"),
        ({"experts": [8, 8, 33]}, "do not fit"),
        ({"experts": [8, 8, "8"]}, "do not fit"),
        ({"vocab_size": 98}, "do not fit"),
        ({"width": 15}, "RoPE cannot use"),
        ({"width": 0}, "not described by"),
        ({"layers_of_router": 65}, "not described by"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_artifact(carved(), tmp_path)
    content = json.loads((tmp_path / "smelt.json").read_text())
    entry = content["carved_experts"]
    for key, value in change.items():
        if key in ("shared", "experts"):
            entry["layers"][1][key] = value
        elif key in ("vocab_size", "width"):
            entry["router"][key] = value
        elif key == "layers_of_router":
            entry["router"]["layers"] = value
        else:
            entry[key] = value
    (tmp_path / "smelt.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=words):
        load(tmp_path)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_artifact(carved(), tmp_path)
    content = json.loads((tmp_path / "smelt.json").read_text())
    content["carved_experts"]["layers"][1]["experts"][2] = 9
    for entry in content["shape"]:
        if entry["part"] == "model.layers.1.mlp.experts.2.ffn_channels":
            entry["units"] = entry["of"] = 9
    (tmp_path / "smelt.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="and not"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "words"),
    [("gpt2", "with a gate"), ("opt", "with a gate"), ("bert", "carved from decoders"), ("resnet", "from decoders")],
)
def test_networks_without_gated_feed_forwards_are_refused(family: str, words: str) -> None:
    network = BUILDS[family]()
    with pytest.raises(ModelError, match=words):
        carve(anatomy_of(network), [CHANNELS] * 3, None)  # type: ignore[arg-type]


def test_feed_forwards_with_more_than_a_gate_are_refused() -> None:
    for name, value in (("extra", torch.nn.Linear(2, 2)), ("act_fn", None)):
        network = BUILDS["llama"]()
        setattr(network.model.layers[1].mlp, name, value)
        with pytest.raises(ModelError, match="with a gate"):
            carve(anatomy_of(network), [CHANNELS] * 3, router(network))


def test_ids_may_be_given_by_position() -> None:
    model, tokens = carved(), ids()
    with torch.no_grad():
        by_name = model.network.model(input_ids=tokens).last_hidden_state
        assert torch.equal(model.network.model(tokens).last_hidden_state, by_name)


def test_what_knows_no_carved_experts_says_so(tmp_path: Path) -> None:
    model = carved()
    with pytest.raises(ModelError, match="carved into experts already"):
        carve(model.anatomy, [CHANNELS] * 3, router(model.network))
    with pytest.raises(ModelError, match="no router ahead of the layers"):
        export(model, "gguf", tmp_path / "x.gguf")
    with pytest.raises(ModelError, match="keeps every token"):
        check_evictable(model)
    with pytest.raises(ModelError, match="divided among experts"):
        keep_units(model.network, model.anatomy.parts[1], [0, 2])
