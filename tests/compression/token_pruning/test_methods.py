"""Token pruning methods: budgets, learned thresholds on a task with distractors, resuming, and bad input."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.distillation.losses import Labels
from smelt.compression.methods import token_pruning  # noqa: F401  (puts the methods on the list)
from smelt.compression.token_pruning.base import TokenPruningRun, TokenPruningStudent
from smelt.errors import BudgetError, DataError, ModelError, RecipeError
from smelt.measure.token_cost import count_tokens, text_lengths, token_macs
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.model import Model
from smelt.models.token_pruning import SoftThresholds, install_token_pruning, token_pruning_of
from smelt.models.token_rules import ThresholdRule
from tests.tiny import BUILDS, ENCODER, inputs, labeled

MARKS, FIRST = (10, 11), 2  # tokens that decide the label; the first token of every text


@lru_cache(maxsize=4)
def texts(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, mask and labels of texts whose label is the mark that is in the majority among distractors."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(20, 99, (count, 24), generator=generator)
    lengths = torch.randint(16, 25, (count,), generator=generator)
    labels = torch.randint(2, (count,), generator=generator)
    for row, length in enumerate(lengths.tolist()):
        marks = int(torch.randint(1, 6, (1,), generator=generator))
        places = 1 + torch.randperm(length - 1, generator=generator)[:marks]
        ids[row, places] = MARKS[int(labels[row])]
    ids[:, 0] = FIRST
    mask = (torch.arange(24) < lengths[:, None]).long()
    return ids * mask, mask, labels


def batches(count: int = 256, seed: int = 0) -> list[dict[str, Tensor]]:
    ids, mask, labels = texts(count, seed)
    return [
        {"input_ids": ids[i : i + 32], "attention_mask": mask[i : i + 32], "labels": labels[i : i + 32]}
        for i in range(0, count, 32)
    ]


@lru_cache(maxsize=1)
def trained() -> hf.BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {**ENCODER, "num_hidden_layers": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    network = hf.BertForSequenceClassification(hf.BertConfig(**sizes, num_labels=2))
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    for _ in range(12):
        for batch in batches():
            optimizer.zero_grad()
            network(**batch).loss.backward()
            optimizer.step()
    return network.eval()


@torch.no_grad()
def accuracy(network: Any) -> float:
    ids, mask, labels = texts(256, 1)
    return float((network(input_ids=ids, attention_mask=mask).logits.argmax(-1) == labels).float().mean())


def apply(step: dict[str, Any], folder: Path | None = None, **context: Any) -> tuple[Model, dict[str, Any]]:
    model = Model(copy.deepcopy(trained()))
    step = {"batch_size": 32, "optimizer": {"lr": 1e-3}, **step}
    facts = METHODS.build(step).apply(model, MethodContext(batches=batches(), folder=folder, **context))
    return model, facts


def kept_macs(model: Model) -> float:
    data = batches(256, 1)
    counts = count_tokens(model, data)
    return token_macs(model.anatomy, counts) / token_macs(model.anatomy, text_lengths(data)[:, None].expand(-1, 5))


LTP = {"method": "ltp", "budget": "macs=0.5", "soft_epochs": 3, "threshold_lr": 3e-3, "epochs": 2, "trials": 2}


@pytest.fixture(scope="module")
def ltp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, dict[str, Any]]:
    return apply(LTP, tmp_path_factory.mktemp("ltp"))


def test_learned_thresholds_keep_what_decides(ltp: tuple[Model, dict[str, Any]]) -> None:
    model, facts = ltp
    assert accuracy(trained()) > 0.97, "the task is learned before anything is dropped"
    assert facts["macs_kept"] <= 0.5 and 0.35 < kept_macs(model) < 0.55
    assert accuracy(model.network) > 0.95
    assert facts["text_macs_after"] == pytest.approx(facts["macs_kept"] * facts["text_macs_before"])
    assert facts["tokens_per_layer"] == sorted(facts["tokens_per_layer"], reverse=True)
    first, second = facts["trials"]
    assert (first["macs_kept"] > 0.5) == (second["regularization"] > first["regularization"]) and first["macs_kept"] > 0
    assert facts["rule"]["rule"] == "threshold" and len(facts["rule"]["thresholds"]) == 4
    encoder = token_pruning_of(model.network)
    assert encoder is not None and encoder.soft is None
    assert model.network.state_dict().keys() == trained().state_dict().keys()


def test_learned_thresholds_keep_the_marks_and_drop_the_rest(ltp: tuple[Model, dict[str, Any]]) -> None:
    model, _ = ltp
    encoder, (ids, mask, _) = token_pruning_of(model.network), texts(256, 1)
    assert encoder is not None
    dropped = install_spy(encoder, model.network, ids, mask)
    marks = torch.isin(ids, torch.tensor(MARKS)) & mask.bool()
    others = mask.bool() & ~marks
    assert float(dropped[marks].float().mean()) < 0.1 < 0.5 < float(dropped[others].float().mean())


def install_spy(encoder: Any, network: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Return which tokens do not get through the second layer: [batch, tokens]."""
    encoder.masked, gone = True, {}
    rule = encoder.rule

    class Spy(ThresholdRule):
        def keep(self, *args: Any) -> Tensor:
            kept = rule.keep(*args)
            if args[-1] <= 1:
                gone[args[-1]] = ~kept
            return kept

    encoder.rule = Spy(rule.thresholds)
    with torch.no_grad():
        network(input_ids=ids, attention_mask=mask)
    encoder.rule, encoder.masked = rule, False
    return gone[max(gone)]


@pytest.mark.parametrize("method", ["token-topk", "token-ratio"])
@pytest.mark.parametrize("keep", [0.68, 0.8])
def test_fixed_counts_meet_the_budget(method: str, keep: float, tmp_path: Path) -> None:
    dense = {"dense_layers": 1} if method == "token-topk" else {}
    model, facts = apply({"method": method, "budget": {"macs": keep}, "epochs": 0, **dense}, tmp_path)
    assert keep - 0.05 < facts["macs_kept"] <= keep
    assert facts["text_macs_after"] == pytest.approx(facts["macs_kept"] * facts["text_macs_before"])
    counts = count_tokens(model, batches())
    assert all(len(column.unique()) <= 9 for column in counts[:, 1:].T), "the length alone decides"
    if method == "token-topk":
        assert counts[:, 1].equal(counts[:, 0])


def test_the_shares_of_fixed_counts() -> None:
    """Top-k falls linearly after the dense layers, three or 15 %; a ratio is applied in every layer."""
    ratio: Any = METHODS.build("token-ratio", budget="macs=0.5")
    assert ratio.fractions(0.5, 4) == (0.5, 0.25, 0.125, 0.0625) and not ratio.sums_layers
    topk: Any = METHODS.build("token-topk", budget="macs=0.5")
    assert topk.fractions(0.4, 6) == pytest.approx((1, 1, 1, 0.8, 0.6, 0.4)) and topk.sums_layers
    assert topk.fractions(0.4, 3) == (1, 1, 1) and topk.fractions(0.4, 40).count(1.0) == 6
    early: Any = METHODS.build("token-topk", budget="macs=0.5", dense_layers=1)
    assert early.fractions(0.1, 4) == pytest.approx((1, 0.7, 0.4, 0.1))


@pytest.mark.parametrize(("method", "sums_layers"), [("token-topk", True), ("token-ratio", False)])
def test_the_network_comes_back_ready_for_inference(method: str, sums_layers: bool, tmp_path: Path) -> None:
    """In its dtype, without dropout, and with the rule that was found."""
    model = Model(copy.deepcopy(trained()).to(torch.bfloat16).train())
    step = METHODS.build({"method": method, "budget": {"macs": 0.95}, "epochs": 0})
    facts = step.apply(model, MethodContext(batches=batches(), folder=tmp_path))
    assert not any(module.training for module in model.network.modules())
    assert {parameter.dtype for parameter in model.network.parameters()} == {torch.bfloat16}
    assert facts["rule"]["sums_layers"] is sums_layers


def test_macs_are_counted_on_the_first_sequences(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("smelt.compression.token_pruning.base.COUNTED_SEQUENCES", 40)
    method: Any = METHODS.build("token-ratio", budget="macs=0.5")
    data = batches()
    run = TokenPruningRun(method, Model(copy.deepcopy(trained())), MethodContext(batches=data, folder=tmp_path))
    assert run.lengths.tolist() == torch.cat([batch["attention_mask"].sum(1) for batch in data[:2]]).tolist()


def test_weights_train_with_tokens_dropped(tmp_path: Path) -> None:
    model = Model(copy.deepcopy(trained()))
    with torch.no_grad():
        model.network.classifier.weight.neg_()
    before = accuracy(model.network)
    assert before < 0.2
    step = {"method": "token-ratio", "budget": "macs=0.3", "epochs": 3, "batch_size": 32, "optimizer": {"lr": 3e-3}}
    facts = METHODS.build(step).apply(model, MethodContext(batches=batches(), folder=tmp_path))
    assert accuracy(model.network) > before + 0.4 and facts["steps"] == 23


def test_a_teacher_replaces_the_labels(tmp_path: Path) -> None:
    step = {"method": "token-ratio", "budget": "macs=0.4", "teacher": "source", "losses": [{"loss": "logits"}]}
    model, facts = apply({**step, "epochs": 3}, tmp_path)
    assert facts["final_loss"] < 0.3 and accuracy(model.network) > 0.9


def test_soft_thresholds_scale_hidden_states_and_are_penalized() -> None:
    """Of the first layer, whose scores do not depend on any gate: by hand, from the maps of transformers."""
    network, batch = BUILDS["bert"](), inputs("bert")
    network.set_attn_implementation("eager")
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    network.config.hidden_dropout_prob = network.config.attention_probs_dropout_prob = 0.0
    with torch.no_grad():
        maps = network(**batch, output_attentions=True).attentions[0]
        first = network.bert(**batch, output_hidden_states=True).hidden_states[1]
    mask = batch["attention_mask"].float()
    lengths = mask.sum(1)
    scores = (maps.mean(1) * mask[:, :, None]).sum(1) / lengths[:, None]
    gates = torch.sigmoid((scores - 0.09) / 0.01)
    gates[:, 0] = 1
    encoder = install_token_pruning(anatomy_of(network), ThresholdRule((0.0, 0.0, 0.0)))
    encoder.soft = SoftThresholds(torch.tensor([0.08, 0.5, 0.5]), torch.nn.Parameter(torch.full((3,), 0.1)), 0.1, 0.01)
    student = TokenPruningStudent(network, (Labels(),), None, encoder).train()
    student.regularization = 2.0
    seen: list[Tensor] = []
    network.bert.encoder.layer[1].attention.self.query.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    loss = student(**labeled("bert")).loss
    assert torch.allclose(seen[0], first * gates[..., None], atol=1e-5)
    mean_gates = torch.stack(encoder.soft.mean_gates)
    assert torch.allclose(mean_gates[0], (gates * mask).sum() / mask.sum(), atol=1e-5)
    student.regularization = 0.0
    assert torch.allclose(loss - student(**labeled("bert")).loss, 2 * mean_gates.sum(), atol=1e-5)
    loss.backward()
    gradient = encoder.soft.offsets.grad
    assert gradient is not None and float(gradient[0]) < 0, "a higher threshold lowers the penalty"


def search(checkpoint: Checkpoint | None = None, folder: Path | None = None, **step: Any) -> tuple[Any, dict[str, Any]]:
    """Search thresholds on few texts; return the network and the facts."""
    network = copy.deepcopy(trained())
    method = METHODS.build({"method": "ltp", "budget": "macs=0.5", "batch_size": 32, "epochs": 0, **step})
    context = MethodContext(batches=batches(64), folder=folder, **({"checkpoint": checkpoint} if checkpoint else {}))
    facts = method.apply(Model(network), context)
    encoder = token_pruning_of(network)
    assert encoder is not None and encoder.soft is None
    return network, facts


def start_of_search(folder: Path, **step: Any) -> tuple[list[float], dict[str, Any]]:
    """Return the thresholds after a soft training that moves no weight, and the facts."""
    settings = {"soft_epochs": 1, "regularization": 0.0, "optimizer": {"lr": 1e-9}}
    _, facts = search(folder=folder, **{**settings, **step})
    return facts["trials"][0]["thresholds"], facts


def test_thresholds_start_on_a_line_and_have_a_learning_rate_of_their_own(tmp_path: Path) -> None:
    line, length = [0.0, 0.0025, 0.005, 0.0075], float(text_lengths(batches(64)).double().mean())
    still, facts = start_of_search(tmp_path / "a")
    assert still == pytest.approx(line, abs=1e-6) and not facts["rule"]["relative"]
    relative, facts = start_of_search(tmp_path / "b", relative=True)
    assert relative == pytest.approx([length * value for value in line], abs=1e-4) and facts["rule"]["relative"]
    assert facts["macs_kept"] <= 0.5
    moved, _ = start_of_search(tmp_path / "c", threshold_lr=1e-3, regularization=1.0)
    assert max(after - before for before, after in zip(still, moved, strict=True)) > 5e-4, moved


@pytest.mark.parametrize(("keep", "start"), [(0.5, 0.02), (0.97, 0.2)])
def test_a_shift_of_the_thresholds_meets_the_budget(keep: float, start: float, tmp_path: Path) -> None:
    """Up or down, as far as it must be; no threshold is negative."""
    step = {"budget": f"macs={keep}", "final_threshold": start, "regularization": None, "trials": 2}
    before, facts = start_of_search(tmp_path, **step)
    after = facts["rule"]["thresholds"]
    assert keep - 0.03 < facts["macs_kept"] <= keep
    assert (facts["trials"][0]["macs_kept"] < keep) == (after[3] < before[3]) == (keep == 0.97)
    assert min(after) >= 0
    first, second = (trial["regularization"] for trial in facts["trials"])
    assert (second > first) == (keep == 0.5), "more tokens than allowed take a larger penalty"


def test_the_nearest_trial_is_kept_whole_and_resumed(tmp_path: Path) -> None:
    """The budget is just below what the first trial leaves: the second, with a larger penalty, is farther from it."""
    step = {
        "soft_epochs": 3,
        "optimizer": {"lr": 1e-3},
        "threshold_lr": 3e-3,
        "tolerance": 0.0,
        "final_threshold": 0.05,
    }
    _, probe = search(folder=tmp_path / "probe", **step, trials=1)
    step["budget"] = {"macs": probe["trials"][0]["macs_kept"] - 1e-3}
    checkpoint = Checkpoint(tmp_path / "cut")
    one, expected = search(checkpoint, **step, trials=1)
    assert not torch.equal(one.bert.pooler.dense.weight, trained().bert.pooler.dense.weight), "weights train, too"
    for again in (Checkpoint(tmp_path / "whole"), checkpoint):
        two, facts = search(again, **step, trials=2)
        assert len(facts["trials"]) == 2 and facts["rule"] == expected["rule"]
        assert all(map(torch.equal, two.state_dict().values(), one.state_dict().values()))


def test_an_interrupted_search_ends_with_the_same_weights(tmp_path: Path) -> None:
    step = {**LTP, "soft_epochs": 0.3, "epochs": 0.3, "trials": 2, "tolerance": 0.0}
    expected, facts = apply(step, checkpoint=Checkpoint(tmp_path / "whole"))
    interrupted = Checkpoint(tmp_path / "cut")
    apply({**step, "trials": 1, "epochs": 0}, checkpoint=interrupted)
    assert (tmp_path / "cut" / "trial-0.json").exists()
    resumed, again = apply(step, checkpoint=interrupted)
    assert again["trials"] == facts["trials"] and again["rule"] == facts["rule"]
    states = (model.network.state_dict() for model in (expected, resumed))
    assert all(torch.equal(*pair) for pair in zip(*(state.values() for state in states), strict=True))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"budget": "parameters=0.5"}, "give a budget of macs"),
        ({"budget": "macs=1.0"}, "would drop nothing"),
        ({"losses": []}, "at least one term"),
        ({"losses": [{"loss": "logits"}]}, "needs a teacher"),
        ({"losses": [{"loss": "hidden-states"}], "teacher": "source"}, "compares logits only"),
        ({"teacher": "other"}, "give `teacher: source`"),
        ({"temperature": 0.0}, "temperature of ltp"),
        ({"trials": 0}, "trials of ltp"),
    ],
)
def test_settings_that_cannot_work(step: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        METHODS.build({"method": "ltp", "budget": "macs=0.5", **step})


def test_settings_of_top_k_that_cannot_work() -> None:
    with pytest.raises(RecipeError, match="give a budget of macs"):
        METHODS.build({"method": "token-topk", "budget": "parameters=0.5"})
    with pytest.raises(RecipeError, match="dense_layers of token-topk"):
        METHODS.build({"method": "token-topk", "budget": "macs=0.5", "dense_layers": -1})


@pytest.mark.parametrize(
    ("step", "least"), [({"method": "ltp"}, 0.2), ({"method": "token-topk"}, 0.92), ({"method": "token-ratio"}, 0.2)]
)
def test_a_budget_that_nothing_reaches(step: dict[str, Any], least: float) -> None:
    """The attention of the first layer computes all tokens, and top-k keeps all of them in three of four layers."""
    with pytest.raises(BudgetError, match=r"no setting of .* reaches macs=0.03.* allow at least") as raised:
        apply({"budget": "macs=0.03", **step})
    allowed = float(str(raised.value).rpartition("=")[2].rstrip("."))
    assert allowed == pytest.approx(least, abs=0.011)
    _, facts = apply({**step, "budget": {"macs": allowed}, "epochs": 0, **({"regularization": 0.1, "soft_epochs": 0.2}
                      if step["method"] == "ltp" else {})})  # fmt: skip
    assert facts["macs_kept"] <= allowed, "what the sentence allows is enough"


def test_networks_and_data_that_cannot_work() -> None:
    step = METHODS.build({"method": "ltp", "budget": "macs=0.5"})
    for network, words in (
        (BUILDS["gpt2"](), "encoders of the types"),
        (hf.BertModel(hf.BertConfig(**ENCODER)), "labels of a classifier"),
    ):
        with pytest.raises(ModelError, match=words):
            step.check(anatomy_of(network))
    quantized = Model(copy.deepcopy(trained()))
    METHODS.build("rtn", bits=8, group_size=-1).apply(quantized, MethodContext())
    with pytest.raises(ModelError, match="quantized already"):
        step.check(quantized.anatomy)
    with pytest.raises(DataError, match="trains on labels"):
        unlabeled = [{"input_ids": batch["input_ids"]} for batch in batches()]
        step.apply(Model(copy.deepcopy(trained())), MethodContext(batches=unlabeled))


@pytest.mark.parametrize("name", ["qat", "integer-only", "ltp"])
def test_steps_that_would_lose_the_pruning_are_refused(name: str) -> None:
    network = copy.deepcopy(trained())
    install_token_pruning(anatomy_of(network), ThresholdRule((0.0,) * 4))
    more = {"budget": "macs=0.5"} if name == "ltp" else {}
    with pytest.raises(ModelError, match="drops tokens"):
        METHODS.build({"method": name, **more}).check(anatomy_of(network))
