"""All-attention networks: against a plain implementation, in generation, after surgery, saved and trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.errors import ModelError
from smelt.measure.cost import Workload, block_macs, block_parameters, unit_bytes, unit_macs, unit_parameters
from smelt.models.all_attention import AllAttention, AllAttentionConfig, AllAttentionForCausalLM, encode_distances
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.surgery import keep_units
from smelt.models.verify import verify
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.tasks import build_task
from tests.character_tokenizer import character_tokenizer
from tests.tiny import BUILDS, inputs

NAME = "all-attention"


def layer(persistent: int = 5) -> AllAttention:
    torch.manual_seed(0)
    module = AllAttention(
        AllAttentionConfig(hidden_size=12, num_attention_heads=3, num_persistent_vectors=persistent), 0
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5)
    return module.eval()


def plain_attention(module: AllAttention, hidden: Tensor, padding: int) -> Tensor:
    """Compute the outputs of one sequence [tokens, hidden] head by head and query by query, in float64."""
    tokens, size = len(hidden), module.persistent_keys.shape[1]
    encoded = encode_distances(tokens, hidden.shape[1], hidden.device).double().flip(0)  # by distance, from 0
    outputs = []
    for head in range(module.persistent_keys.shape[0]):
        rows = slice(head * 4, head * 4 + 4)
        q, k, v = (hidden @ p.weight[rows].T for p in (module.q_proj, module.k_proj, module.v_proj))
        column = []
        for query in range(padding, tokens):
            seen = [key for key in range(tokens) if padding <= key <= query]
            scores = [
                (q[query] + module.content_bias[head]) @ k[key]
                + (q[query] + module.position_bias[head]) @ (module.position_weight[head] @ encoded[query - key])
                for key in seen
            ]
            scores += [q[query] @ vector * math.sqrt(4) for vector in module.persistent_keys[head]]
            weights = torch.softmax(torch.stack(scores) / math.sqrt(4), 0)
            values = [v[key] for key in seen] + [math.sqrt(size) * vector for vector in module.persistent_values[head]]
            column.append(sum(weight * value for weight, value in zip(weights, values, strict=True)))
        outputs.append(torch.stack(column))
    return torch.cat(outputs, 1) @ module.o_proj.weight.T


def visible(tokens: int, padding: int = 0) -> Tensor:
    return (torch.ones(tokens, tokens).tril().bool() & (torch.arange(tokens) >= padding))[None, None]


@torch.no_grad()
@pytest.mark.parametrize("persistent", [0, 5])
@pytest.mark.parametrize("padding", [0, 2])
def test_a_layer_is_the_formula(persistent: int, padding: int) -> None:
    """Without persistent vectors it is the relative attention of Transformer-XL."""
    module, hidden = layer(persistent).double(), torch.randn(7, 12, dtype=torch.float64)
    distances = encode_distances(7, 12, hidden.device).double()
    outputs, _ = module(hidden[None], visible=visible(7, padding), distances=distances)
    wanted = plain_attention(module, hidden, padding)
    torch.testing.assert_close(outputs[0, padding:], wanted, atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_without_a_context_a_layer_is_a_feed_forward_with_softmax() -> None:
    module, hidden = layer(), torch.randn(2, 7, 12)
    outputs, _ = module(
        hidden, visible=torch.zeros(1, 1, 7, 7, dtype=torch.bool), distances=encode_distances(7, 12, hidden.device)
    )
    queries = module.q_proj(hidden).unflatten(-1, (3, 4)).transpose(1, 2)
    inner = torch.softmax(queries @ module.persistent_keys.mT, -1) @ module.persistent_values * math.sqrt(5)
    torch.testing.assert_close(outputs, module.o_proj(inner.transpose(1, 2).flatten(2)))


@torch.no_grad()
def test_distances_are_encoded_by_sines_and_cosines() -> None:
    encoded = encode_distances(4, 6, torch.device("cpu"))
    assert encoded.shape == (4, 6)
    assert encoded[-1].tolist() == [0, 0, 0, 1, 1, 1], "the last one is distance 0"
    assert float(encoded[0, 1]) == pytest.approx(math.sin(3 / 10000 ** (2 / 6)), abs=1e-6)
    assert float(encoded[0, 5]) == pytest.approx(math.cos(3 / 10000 ** (4 / 6)), abs=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("empty", [False, True])
def test_generation_with_a_cache_equals_one_pass(empty: bool) -> None:
    network: Any = BUILDS[NAME]()
    if empty:
        keep_units(network, anatomy_of(network).parts[0], [])
    ids = inputs(NAME)["input_ids"]
    whole = network(ids, use_cache=False)
    assert whole.past_key_values is None
    first = network(ids[:, :4], use_cache=True)
    second = network(ids[:, 4:9], past_key_values=first.past_key_values)
    third = network(ids[:, 9:], past_key_values=second.past_key_values)
    steps = torch.cat([first.logits, second.logits, third.logits], 1)
    torch.testing.assert_close(steps, whole.logits, atol=1e-5, rtol=1e-5)
    text = network.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    again = network(text[:, :-1]).logits.argmax(-1)[:, -6:]
    assert text[:, -6:].equal(again)


@torch.no_grad()
def test_padding_on_the_left_changes_nothing() -> None:
    network: Any = BUILDS[NAME]()
    ids = inputs(NAME)["input_ids"]
    padded = torch.cat([torch.zeros_like(ids[:, :3]), ids], 1)
    mask = torch.cat([torch.zeros_like(ids[:, :3]), torch.ones_like(ids)], 1)
    logits = network(padded, attention_mask=mask).logits[:, 3:]
    torch.testing.assert_close(logits, network(ids).logits, atol=1e-5, rtol=1e-5)


def test_the_loss_is_that_of_the_next_token() -> None:
    network: Any = BUILDS[NAME]()
    ids = inputs(NAME)["input_ids"]
    output = network(ids, labels=ids)
    wanted = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(output.loss, wanted)
    torch.testing.assert_close(network(ids, logits_to_keep=2).logits, output.logits[:, -2:])


@torch.no_grad()
def test_a_removed_head_takes_its_vectors_along() -> None:
    network: Any = BUILDS[NAME]()
    anatomy, batch = anatomy_of(network), inputs(NAME)
    part, before = anatomy.parts[1], block_parameters(anatomy)
    work, macs = Workload(tokens=11), block_macs(anatomy, Workload(tokens=11))
    attention = network.model.layers[1].self_attn
    persistent, hidden, head_dim = attention.persistent_keys.shape[1], 32, 8
    products = 3 * head_dim * 11 * 11 / 2 + 11 * 2 * persistent * head_dim  # content, positions, values; persistent
    projections = 11 * 5 * hidden * head_dim + 11 * 2 * head_dim  # q, k, v, o, positions; and both biases
    assert unit_macs(part, work, causal=True) == products + projections
    attention.o_proj.weight[:, 8:24] = 0
    wanted = network(**batch).logits
    keep_units(network, part, [0, 3])
    torch.testing.assert_close(network(**batch).logits, wanted, atol=1e-6, rtol=1e-5)
    changed = anatomy_of(network)
    assert before - block_parameters(changed) == 2 * unit_parameters(part)
    assert macs - block_macs(changed, work) == 2 * unit_macs(part, work, causal=True)
    assert unit_bytes(part, Workload(context=0)) == 4 * unit_parameters(part)
    assert attention.persistent_values.shape == (2, persistent, 8) and attention.position_bias.shape == (2, 8)
    assert changed.parts[1].kept == (0, 3)


@torch.no_grad()
@pytest.mark.parametrize("keep", [([1, 2], [0, 3], [1, 3]), ([0], [], [0, 1, 2, 3])])
def test_a_pruned_network_is_saved_and_loaded(keep: tuple[list[int], ...], tmp_path: Path) -> None:
    network: Any = BUILDS[NAME]()
    for part, units in zip(anatomy_of(network).parts, keep, strict=True):
        keep_units(network, part, units)
    wanted = network(**inputs(NAME)).logits
    save_artifact(Model(network), tmp_path)
    loaded = load(tmp_path)
    assert loaded.task == "language" and [list(part.kept) for part in loaded.anatomy.parts] == list(keep)
    assert loaded.network(**inputs(NAME)).logits.equal(wanted)
    if not all(keep):  # in a process of its own
        verify(Model(network), tmp_path)


@torch.no_grad()
def test_a_pruned_network_is_served(tmp_path: Path) -> None:
    network: Any = BUILDS[NAME]()
    for part, units in zip(anatomy_of(network).parts, ([0], [0, 2, 3], [1, 3]), strict=True):
        keep_units(network, part, units)
    save_artifact(Model(network, character_tokenizer()), tmp_path)
    prompts = [[5, 17, 40, 8, 61], [9, 9, 30]]
    engine = Engine(load(tmp_path), max_model_len=32)
    answers = engine.generate(prompts, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer.tokens])
        assert network(ids).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == answer.tokens


@torch.no_grad()
def test_other_methods_know_the_persistent_vectors() -> None:
    """A rotation of values would miss the persistent ones, which the output projection reads too."""
    model, batch = Model(BUILDS[NAME]()), inputs(NAME)
    wanted = model.network(**batch).logits
    assert all(part.values is None for part in model.anatomy.parts)
    METHODS.build({"method": "rotate"}).apply(model, MethodContext())
    torch.testing.assert_close(model.network(**batch).logits, wanted, atol=1e-5, rtol=1e-4)
    with pytest.raises(ModelError, match="a latency budget knows"):
        METHODS.build({"method": "fisher", "budget": "latency=0.5"}).check(model.anatomy)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"position_size": 7}, "position_size must be even"),
        ({"num_attention_heads": 5}, "multiple of num_attention_heads"),
        ({"num_persistent_vectors": -1}, "num_persistent_vectors"),
        ({"intermediate_size": 64}, "no key 'intermediate_size'"),
    ],
)
def test_a_config_that_cannot_work(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc " * 1000)
    with pytest.raises(ModelError, match=words):
        build_task(TrainConfig(model={"model_type": "all_attention", **values}))


def test_the_example_trains_such_a_network() -> None:
    file = Path(__file__).parents[2] / "examples" / "train" / "all-attention.yaml"
    content = yaml.safe_load(file.read_text())
    config = TrainConfig.load(file)
    assert content["model"]["model_type"] == "all_attention" and content["steps"] == config.steps
    network = build_task(config).network
    assert isinstance(network, AllAttentionForCausalLM)
    spread = float(network.model.layers[0].self_attn.persistent_values.detach().std())
    assert spread == pytest.approx(network.config.hidden_size**-0.5, rel=0.05)
    assert float(network.model.embed_tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert not network.model.layers[0].self_attn.content_bias.any()
    ids = torch.arange(64).view(2, 32)
    network(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
