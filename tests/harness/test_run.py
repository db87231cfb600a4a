"""The adapter against brute force, results against our own measurements, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'smeltml[harness]'")

from lm_eval.api.metrics import bits_per_byte, mean, perplexity, weighted_perplexity

from smelt.data import MultipleChoiceData, MultipleChoiceItem, TextData
from smelt.errors import ConfigError, DataError, ModelError
from smelt.harness.adapter import HarnessModel
from smelt.harness.run import _scores, compare_tasks, evaluate_tasks
from smelt.measure.multiple_choice import evaluate_multiple_choice
from smelt.measure.perplexity import perplexity as measured_perplexity
from smelt.models.model import Model
from tests.character_tokenizer import character_tokenizer
from tests.harness.test_task_files import ROWS, task, write
from tests.tiny import BUILDS

PAIRS = [("The sky is", " blue"), ("a", " much longer continuation"), ("ends in a space ", "x"), ("", "no context")]


def decoder(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(BUILDS["llama"](), character_tokenizer(), source="llama")


def request(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


@torch.no_grad()
def token_scores(model: Model, tokens: list[int], scored: int) -> tuple[float, bool]:
    """Score the last tokens by one forward of the whole row."""
    logits = model.network(input_ids=torch.tensor([tokens[:-1]])).logits[0].double().log_softmax(-1)[-scored:]
    targets = torch.tensor(tokens[-scored:])
    return float(logits.gather(1, targets[:, None]).sum()), bool((logits.argmax(-1) == targets).all())


def test_log_likelihoods_match_brute_force() -> None:
    model = decoder()
    assert model.tokenizer is not None
    results = HarnessModel(model, batch_size=3).loglikelihood([request(*pair) for pair in PAIRS])
    for (context, continuation), (likelihood, greedy) in zip(PAIRS, results, strict=True):
        prefix = [] if context else [model.tokenizer.eos_token_id]
        tokens = prefix + model.tokenizer(context + continuation)["input_ids"]
        # lm-eval scores the spaces at the end of a context with the continuation.
        expected, most_likely = token_scores(model, tokens, len(context + continuation) - len(context.rstrip()))
        assert math.isclose(likelihood, expected, rel_tol=1e-5) and greedy == most_likely


def test_greedy_continuations_are_recognized() -> None:
    model = decoder()
    assert model.tokenizer is not None
    tokens = model.tokenizer("The sky is")["input_ids"]
    with torch.no_grad():
        best = int(model.network(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
    pairs = [(None, tokens, [best]), (None, tokens, [(best + 1) % 99])]
    assert [greedy for _, greedy in HarnessModel(model)._loglikelihood_tokens(pairs)] == [True, False]


def test_long_contexts_lose_their_beginning() -> None:
    model = decoder()
    tokens = [5 + index % 60 for index in range(40)]
    adapter = HarnessModel(model, max_length=16)
    ((likelihood, _),) = adapter._loglikelihood_tokens([(None, tokens[:-3], tokens[-3:])])
    assert math.isclose(likelihood, token_scores(model, tokens[-17:], 3)[0], rel_tol=1e-5)


def test_rolling_log_likelihoods_are_our_perplexity_over_the_same_windows() -> None:
    model = decoder()
    adapter = HarnessModel(model, max_length=16, batch_size=3)
    assert model.tokenizer is not None
    texts = ["The quick brown fox jumps over the lazy dog. 48."[:48], "Sixteen letters."]
    results = adapter.loglikelihood_rolling([request(text) for text in texts])
    for text, result in zip(texts, results, strict=True):
        assert len(text) % 16 == 0  # otherwise lm-eval gives the last window more context than ours
        tokens = [adapter.prefix_token_id, *model.tokenizer(text)["input_ids"]]
        windows = [tokens[start : start + 17] for start in range(0, len(text), 16)]
        assert math.isclose(result, sum(token_scores(model, window, 16)[0] for window in windows), rel_tol=1e-5)
    prefixed = TextData("text", ("[SEP]" + texts[0],))
    ours = measured_perplexity(model, prefixed, context=17, stride=16)
    assert ours.settings["tokens_scored"] == 48
    assert math.isclose(ours.value, math.exp(-results[0] / 48), rel_tol=1e-5)


def greedy_text(model: Model, prompt: str, count: int) -> str:
    assert model.tokenizer is not None
    tokens = list(model.tokenizer(prompt)["input_ids"])
    start = len(tokens)
    with torch.no_grad():
        while len(tokens) < start + count and tokens[-1] != model.tokenizer.eos_token_id:
            tokens.append(int(model.network(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return str(model.tokenizer.decode(tokens[start:], skip_special_tokens=True))


def test_generation_through_the_engine_is_greedy_and_stops() -> None:
    model = decoder()
    prompts = ["The sky is", "Question: 2 + 2?", "x"]
    expected = [greedy_text(model, prompt, 12).replace(" ", "") for prompt in prompts]
    adapter = HarnessModel(model)
    before = adapter.loglikelihood([request(*PAIRS[0])])
    texts = adapter.generate_until([request(prompt, {"until": [], "max_gen_toks": 12}) for prompt in prompts])
    assert [text.replace(" ", "") for text in texts] == expected
    stop = expected[0][3]
    (stopped,) = adapter.generate_until([request(prompts[0], {"until": stop, "max_gen_toks": 12})])
    assert stopped.replace(" ", "") == expected[0].split(stop)[0]
    ((likelihood, greedy),) = adapter.loglikelihood([request(*PAIRS[0])])  # the engine replaced the network's attention
    assert math.isclose(likelihood, before[0][0], rel_tol=1e-6) and greedy == before[0][1]


def test_repeated_samples_differ_and_are_reproducible() -> None:
    options = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    runs = [HarnessModel(decoder(), seed=3).generate_until([request("x", options)] * 2) for _ in range(2)]
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]


def test_generation_settings_without_a_counterpart_are_refused() -> None:
    with pytest.raises(ConfigError, match="'num_beams' of a task is not supported"):
        HarnessModel(decoder()).generate_until([request("x", {"until": [], "num_beams": 4})])
    with pytest.raises(ConfigError, match="does not fit into 128 positions"):
        HarnessModel(decoder()).generate_until([request("x", {"until": [], "max_gen_toks": 128})])
    with pytest.raises(ModelError, match="no language model"):
        HarnessModel(Model(BUILDS["bert"](), character_tokenizer()))


def multiple_choice() -> MultipleChoiceData:
    items = tuple(
        MultipleChoiceItem((row["query"],) * len(row["choices"]), tuple(row["choices"]), row["gold"])  # type: ignore
        for row in ROWS
    )
    return MultipleChoiceData("rows", items)


def test_the_metrics_are_those_of_our_multiple_choice(tmp_path: Path) -> None:
    names = {"acc": "none", "acc_norm": "characters", "acc_bytes": "bytes"}
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]
    write(tmp_path, task(tmp_path, metric_list=metrics))
    model = decoder()
    result = evaluate_tasks(model, ["two"], tasks_path=tmp_path)
    (only,) = result.tasks
    assert (only.items, only.num_fewshot, [metric.name for metric in only.metrics]) == (2, 0, list(names))
    for metric in only.metrics:
        ours = evaluate_multiple_choice(model, multiple_choice(), normalize=names[metric.name])
        assert metric.scores is not None and metric.scores.items.tolist() == ours.items.tolist()
        assert metric.value == ours.value and metric.stderr is not None
    assert json.loads(json.dumps(result.to_json()))["log_likelihoods"] == "module"
    (limited,) = evaluate_tasks(model, ["two"], tasks_path=tmp_path, limit=1, num_fewshot=1).tasks
    assert (limited.items, limited.num_fewshot) == (1, 1)


def test_models_are_compared_item_by_item(tmp_path: Path) -> None:
    write(tmp_path, task(tmp_path))
    new, base = (evaluate_tasks(decoder(seed), ["two"], tasks_path=tmp_path) for seed in (0, 1))
    (comparison,) = compare_tasks(new, base)
    items, before = (result.tasks[0].metrics[0].scores for result in (new, base))
    assert items is not None and before is not None
    assert comparison.comparison.difference == items.items.mean() - before.items.mean()
    assert comparison.comparison.gained == int(((items.items == 1) & (before.items == 0)).sum())
    with pytest.raises(DataError, match="no metric with the metric 'acc_norm' per item"):
        compare_tasks(new, base, metric="acc_norm")


def test_scores_reproduce_the_aggregations_of_lm_eval() -> None:
    tuples = [(-10.0, 4), (-30.0, 6), (-5.0, 1)]
    words = _scores("t", "word_perplexity", tuples, weighted_perplexity, False, {})
    assert words is not None and math.isclose(words.value, weighted_perplexity(tuples))
    assert math.isclose(float(np.exp(np.average(words.items, weights=words.weights))), words.value)
    likelihoods = [-1.0, -2.0, -4.0]
    plain = _scores("t", "perplexity", likelihoods, perplexity, False, {})
    assert plain is not None and math.isclose(plain.value, perplexity(likelihoods))
    parts = _scores("t", "f1", [0.5, 0.25, 1.0], mean, True, {})
    assert parts is not None and parts.metric == "f1" and parts.labels is None and math.isclose(parts.value, 1.75 / 3)
    assert _scores("t", "bits_per_byte", tuples, bits_per_byte, False, {}) is None
