"""Encoders that drop tokens: packed against masked execution, importance by hand, artifacts, and what is refused."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.quantization import rtn  # noqa: F401  (puts the method on the list)
from smelt.errors import ModelError
from smelt.measure.token_cost import count_tokens, text_lengths, token_macs
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.implants import implant_low_rank
from smelt.models.model import Model
from smelt.models.surgery import keep_units
from smelt.models.token_pruning import (
    TokenPruningEncoder,
    all_tokens,
    install_token_pruning,
    token_pruning_of,
)
from smelt.models.token_rules import ThresholdRule, TokenRule, TopKRule
from smelt.models.verify import verify
from smelt.serve.encoder import Encoder
from tests.character_tokenizer import character_tokenizer
from tests.tiny import BUILDS, ENCODER, build_network, inputs

ENCODERS = ("bert", "roberta", "distilbert", "mpnet")
RULES = (
    ThresholdRule((0.08, 0.09, 0.1)),
    ThresholdRule((0.0, 0.09, 9.0)),
    ThresholdRule((0.8, 0.9, 1.0), relative=True),
    TopKRule((0.8, 0.6, 0.3)),
    TopKRule((1.0, 0.6, 0.3), sums_layers=True),
)


def attentive(name: str) -> PreTrainedModel:
    """Return a network whose attention is far from uniform."""
    network = BUILDS[name]()
    with torch.no_grad():
        for part in anatomy_of(network).parts:
            for projection in part.input_projections if part.kind == "heads" else ():
                projection.weight.mul_(8)
    return network


def pruned(name: str, rule: TokenRule) -> tuple[PreTrainedModel, TokenPruningEncoder]:
    network = attentive(name)
    return network, install_token_pruning(anatomy_of(network), rule)


@torch.no_grad()
def states(network: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits and the last hidden states of the tokens that are no padding."""
    hidden = network.base_model(**batch).last_hidden_state
    return network(**batch).logits, hidden[batch["attention_mask"].bool()]


@pytest.mark.parametrize("name", ENCODERS)
def test_thresholds_of_zero_keep_all_tokens(name: str) -> None:
    network, batch = attentive(name), inputs(name)
    expected = states(network, batch)
    encoder = install_token_pruning(anatomy_of(network), ThresholdRule((0.0, 0.0, 0.0)))
    assert all(map(torch.allclose, states(network, batch), expected, [1e-4] * 2, [1e-5] * 2))
    assert encoder.token_counts is not None
    assert encoder.token_counts.tolist() == [[8] * 4, [11] * 4, [11] * 4]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", ENCODERS)
def test_packed_execution_computes_what_masked_execution_does(name: str, rule: TokenRule) -> None:
    network, encoder = pruned(name, rule)
    batch = inputs(name)
    dense = states(attentive(name), batch)[0]
    packed = states(network, batch)
    counts = encoder.token_counts
    encoder.masked = True
    masked = states(network, batch)
    assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in zip(packed, masked, strict=True))
    assert not torch.allclose(packed[0], dense, atol=1e-3)
    assert counts is not None and bool((counts.diff(dim=1) <= 0).all()) and bool((counts[:, -1] >= 1).all())
    if isinstance(rule, TopKRule):
        assert counts.equal(rule.counts(torch.tensor([8, 11, 11])))


@pytest.mark.parametrize("name", ENCODERS)
def test_a_text_alone_computes_what_it_does_in_a_batch(name: str) -> None:
    network, _ = pruned(name, ThresholdRule((0.05, 0.06, 0.07)))
    batch = inputs(name, batch=4, length=23)  # no test has seen this length
    logits = states(network, batch)[0]
    for row in range(4):
        length = int(batch["attention_mask"][row].sum())
        alone = {key: tensor[row : row + 1, :length] for key, tensor in batch.items()}
        assert torch.allclose(states(network, alone)[0][0], logits[row], atol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_a_text_alone_drops_the_tokens_that_it_drops_in_a_batch(name: str, rule: TokenRule) -> None:
    """One text without padding has an execution of its own: it keeps the last states of dropped tokens, too."""
    network, encoder = pruned(name, rule)
    batch = inputs(name, batch=4, length=23)
    hidden = network.base_model(**batch).last_hidden_state
    counts = encoder.token_counts
    assert counts is not None and counts[:, -1].max() < 23
    for row in range(4):
        length = int(batch["attention_mask"][row].sum())
        alone = {key: tensor[row : row + 1, :length] for key, tensor in batch.items()}
        torch.testing.assert_close(
            network.base_model(**alone).last_hidden_state[0], hidden[row, :length], atol=1e-5, rtol=1e-4
        )
        assert torch.equal(encoder.token_counts, counts[row : row + 1])


def test_layers_compute_the_tokens_that_are_left_and_no_others() -> None:
    network, encoder = pruned("bert", RULES[0])
    rows: list[tuple[int, int]] = []
    for layer in network.bert.encoder.layer:
        both = (layer.attention.self.query, layer.intermediate.dense)
        both[0].register_forward_hook(lambda _, args, __: rows.append((len(args[0]), 0)))
        both[1].register_forward_hook(lambda _, args, __: rows.append((rows.pop()[0], len(args[0]))))
    network(**inputs("bert"))
    assert encoder.token_counts is not None
    sums = encoder.token_counts.sum(0).tolist()
    assert rows == list(itertools.pairwise(sums)) and sums[0] == 30 and sums[-1] < 15


def test_uniform_attention_gives_each_token_one_part_of_the_length() -> None:
    """1/8 in the text of 8 tokens and 1/11 in the others, whatever the padding."""
    network, batch = BUILDS["bert"](), inputs("bert")
    with torch.no_grad():
        for layer in network.bert.encoder.layer:
            layer.attention.self.query.weight.zero_()
            layer.attention.self.query.bias.zero_()
    encoder = install_token_pruning(anatomy_of(network), ThresholdRule((0.1, 0.0, 0.0)))
    network(**batch)
    assert encoder.token_counts is not None and encoder.token_counts[:, 1].tolist() == [8, 1, 1]
    encoder.rule = ThresholdRule((1 / 8 + 1e-4, 0.0, 0.0))
    network(**batch)
    assert encoder.token_counts[:, 1].tolist() == [1, 1, 1], "the first token stays"
    for threshold, expected in ((0.99, [8, 11, 11]), (1.01, [1, 1, 1])):
        encoder.rule = ThresholdRule((threshold, 0.0, 0.0), relative=True)
        network(**batch)
        assert encoder.token_counts[:, 1].tolist() == expected, "relative to the mean, each token has 1"


@pytest.mark.parametrize("cumulative", [False, True])
def test_importance_is_the_attention_that_a_token_receives(cumulative: bool) -> None:
    """By hand, from the maps of transformers' own eager attention: nothing is dropped before the last layer."""
    network, batch = attentive("bert"), inputs("bert")
    network.set_attn_implementation("eager")
    with torch.no_grad():
        maps = network(**batch, output_attentions=True).attentions
    expected = []
    for row, length in enumerate((8, 11, 11)):
        importance = torch.zeros(length)
        for layer in (0, 1, 2) if cumulative else (2,):
            for head in range(4):
                for query in range(length):
                    importance += maps[layer][row, head, query, :length] / (4 * length)
        importance[0] = torch.inf
        expected.append(sorted(importance.argsort(descending=True)[: -(-length // 2)].tolist()))
    rule = TopKRule((1.0, 1.0, 0.5), sums_layers=cumulative)
    encoder = install_token_pruning(anatomy_of(network), rule)
    dense, dropped = attentive("bert"), []
    with torch.no_grad():
        before = dense.bert(**batch).last_hidden_state
        after = network.bert(**batch).last_hidden_state
    for row, length in enumerate((8, 11, 11)):  # the feed-forward of the last layer is skipped for dropped tokens
        same = torch.isclose(before[row, :length], after[row, :length], atol=1e-5).all(dim=1)
        dropped.append(same.nonzero()[:, 0].tolist())
    assert dropped == expected
    assert encoder.token_counts is not None and encoder.token_counts[:, -1].tolist() == [4, 6, 6]


@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_pruned_heads_and_an_attention_without_heads(name: str) -> None:
    network, batch = attentive(name), inputs(name)
    parts = [part for part in anatomy_of(network).parts if part.kind == "heads"]
    keep_units(network, parts[0], [1, 3])
    keep_units(network, parts[1], [])
    expected = states(network, batch)[0]
    encoder = install_token_pruning(anatomy_of(network), ThresholdRule((0.0, 0.0, 0.0)))
    assert torch.allclose(states(network, batch)[0], expected, atol=1e-5)
    encoder.rule = ThresholdRule((0.09, 0.09, 0.09))
    packed = states(network, batch)
    assert encoder.token_counts is not None
    assert encoder.token_counts[:, 1].equal(encoder.token_counts[:, 2]), "nothing is scored without heads"
    encoder.masked = True
    assert all(map(torch.allclose, states(network, batch), packed, [1e-4] * 2, [1e-5] * 2))


def test_a_text_of_padding_alone_keeps_its_first_token() -> None:
    network, encoder = pruned("bert", RULES[0])
    batch = inputs("bert")
    batch["attention_mask"][1] = 0
    assert torch.isfinite(network(**batch).logits).all()
    assert encoder.token_counts is not None and encoder.token_counts[1].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_masks_of_both_attention_implementations(implementation: str) -> None:
    network, _ = pruned("bert", RULES[0])
    expected = states(network, inputs("bert"))[0]
    network.set_attn_implementation(implementation)
    assert torch.allclose(states(network, inputs("bert"))[0], expected, atol=1e-6)
    batch = {**inputs("bert"), "attention_mask": torch.ones(3, 11, dtype=torch.long)}
    without = {"input_ids": batch["input_ids"]}
    assert torch.allclose(network(**batch).logits, network(**without).logits, atol=1e-6)


@pytest.mark.parametrize(("hidden", "attention"), [(0.5, 0.0), (0.0, 0.5), (0.0, 0.0)])
def test_training_has_the_dropout_of_the_config(hidden: float, attention: float) -> None:
    """Of hidden states and of attention maps; that of embeddings and head is not the encoder's."""
    config = hf.BertConfig(**ENCODER, hidden_dropout_prob=hidden, attention_probs_dropout_prob=attention)
    network = build_network(hf.BertForSequenceClassification, config)
    install_token_pruning(anatomy_of(network), ThresholdRule((0.0, 0.0, 0.0)))
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batch, expected = inputs("bert"), states(network, inputs("bert"))[0]
    network.train()
    assert torch.allclose(states(network, batch)[0], expected, atol=1e-5) is (hidden == attention)


def test_a_copy_drops_tokens_of_its_own() -> None:
    network, encoder = pruned("bert", RULES[0])
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.bert.encoder.layer[0].output.dense.weight.zero_()
    changed = token_pruning_of(other)
    assert changed is not None and changed is not encoder
    assert not torch.allclose(states(other, inputs("bert"))[0], states(network, inputs("bert"))[0], atol=1e-3)
    changed.enabled = False
    expected = attentive("bert")
    with torch.no_grad():
        expected.bert.encoder.layer[0].output.dense.weight.zero_()
    assert torch.allclose(states(other, inputs("bert"))[0], states(expected, inputs("bert"))[0], atol=1e-6)


def test_all_tokens_stay_inside_the_context() -> None:
    network, encoder = pruned("bert", RULES[0])
    with all_tokens(network):
        assert torch.allclose(states(network, inputs("bert"))[0], states(attentive("bert"), inputs("bert"))[0])
    assert encoder.enabled
    with all_tokens(attentive("bert")):
        pass


def test_macs_are_counted_by_the_tokens_of_each_layer() -> None:
    """Per layer: 4 d^2 n + 2 d n^2 of attention, 2 d f m of the feed-forward, after which m tokens are left."""
    network, _ = pruned("bert", RULES[0])
    model, batch = Model(network), inputs("bert")
    counts = count_tokens(model, [batch, batch])
    d, f, expected = 32, 48, 0
    for row in counts.tolist():
        for n, m in itertools.pairwise(row):
            expected += 4 * d * d * n + 2 * d * n * n + 2 * d * f * m
    assert token_macs(model.anatomy, counts) == expected and len(counts) == 6
    dense = count_tokens(Model(attentive("bert")), [batch])
    assert dense.tolist() == [[8] * 4, [11] * 4, [11] * 4] and text_lengths([batch]).tolist() == [8, 11, 11]


def test_counting_tokens_leaves_the_network_in_its_mode() -> None:
    network, _ = pruned("bert", RULES[0])
    network.train()
    assert not count_tokens(Model(network), [inputs("bert")]).requires_grad and network.training
    too_large = {**inputs("bert"), "input_ids": torch.full_like(inputs("bert")["input_ids"], 10**6)}
    with pytest.raises(IndexError):
        count_tokens(Model(network), [too_large])
    assert network.training


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("rule", [RULES[0], RULES[3]], ids=str)
def test_an_artifact_drops_the_same_tokens(name: str, rule: TokenRule, tmp_path: Path) -> None:
    network, _ = pruned(name, rule)
    METHODS.build("rtn", bits=8, group_size=-1).apply(Model(network), MethodContext())
    save_artifact(Model(network), tmp_path)
    loaded = load_artifact(tmp_path).network
    encoder = token_pruning_of(loaded)
    assert encoder is not None and encoder.rule == rule
    assert torch.equal(states(loaded, inputs(name))[0], states(network, inputs(name))[0])
    if name == "bert":
        verify(Model(network), tmp_path)


def test_damaged_rules_are_refused(tmp_path: Path) -> None:
    network, _ = pruned("bert", RULES[0])
    save_artifact(Model(network), tmp_path)
    content = json.loads((tmp_path / "smelt.json").read_text())
    good = content["token_pruning"]
    wrong: list[Any] = [
        None, [], {}, {**good, "rule": "other"}, {**good, "thresholds": good["thresholds"][:2]},
        {**good, "relative": 1}, {**good, "thresholds": [0.1, "0.1", 0.1]}, {**good, "thresholds": [0.1, -1, 0.1]},
        {"rule": "top-k", "fractions": [0.5, 0.7, 0.1], "sums_layers": True},
        {"rule": "top-k", "fractions": [0.5, 0.5, 0.1], "sums_layers": 1},
        {"rule": "top-k", "fractions": [1.5, 0.5, 0.1], "sums_layers": True},
    ]  # fmt: skip
    for rule in wrong:
        (tmp_path / "smelt.json").write_text(json.dumps({**content, "token_pruning": rule}))
        with pytest.raises(ModelError, match=r"token pruning in smelt\.json"):
            load_artifact(tmp_path)


def test_networks_whose_tokens_cannot_be_pruned_are_refused() -> None:
    for name in ("gpt2", "llama", "vit"):
        with pytest.raises(ModelError, match="encoders of the types bert"):
            install_token_pruning(anatomy_of(BUILDS[name]()), RULES[0])
    decoder = hf.BertLMHeadModel(hf.BertConfig(**ENCODER, is_decoder=True))
    with pytest.raises(ModelError, match="encoders of the types bert"):
        install_token_pruning(anatomy_of(decoder), RULES[0])
    network, _ = pruned("bert", RULES[0])
    with pytest.raises(ModelError, match="drops tokens already"):
        install_token_pruning(anatomy_of(network), RULES[0])
    implanted = BUILDS["bert"]()
    implant_low_rank(implanted, next(part for part in anatomy_of(implanted).parts if part.kind == "ffn_channels"), 2)
    with pytest.raises(ModelError, match="reads all tokens of a layer"):
        install_token_pruning(anatomy_of(implanted), RULES[0])


def test_the_server_drops_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = hf.BertConfig(**ENCODER, max_position_embeddings=64, num_labels=3)
    network = build_network(hf.BertForSequenceClassification, config)
    with torch.no_grad():
        for layer in network.bert.encoder.layer:
            layer.attention.self.query.weight.mul_(8)
    install_token_pruning(anatomy_of(network), ThresholdRule((0.02, 0.03, 0.04)))
    save_artifact(Model(network, character_tokenizer(encoder=True)), tmp_path)
    encoder = Encoder(str(tmp_path))
    texts = [encoder.tokenizer(text)["input_ids"] for text in ("hello", "a longer text, so that there is padding", "x")]
    rows = asyncio.run(encoder.classify(texts))
    computed = token_pruning_of(encoder.model.network)
    assert computed is not None and computed.token_counts is not None
    counts = computed.token_counts
    assert counts[:, 0].tolist() == sorted(map(len, texts)) and int(counts[:, -1].sum()) < 0.7 * int(counts[:, 0].sum())
    with torch.no_grad():
        alone = [network(input_ids=torch.tensor([text])).logits.softmax(-1)[0] for text in texts]
    assert torch.allclose(torch.tensor(rows), torch.stack(alone), atol=1e-5)
    vectors = torch.tensor(asyncio.run(encoder.embed(texts)))
    assert torch.allclose(vectors.norm(dim=1), torch.ones(3))
