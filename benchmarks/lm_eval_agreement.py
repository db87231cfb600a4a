"""Compare our multiple choice and our model adapter with lm-eval's own Hugging Face model, item by item.

The same network answers COPA and the first rows of ARC-easy in three ways: `smelt eval` (our multiple choice), lm-eval
with Smelt's adapter (`--harness`), and lm-eval with its `HFLM`. Then a text is scored by `loglikelihood_rolling` and by
our perplexity over the same windows, and short answers are generated greedily by our engine and by transformers.

    python benchmarks/lm_eval_agreement.py [--rows 100] [--tokens 1024]

Needs the extra `harness`, the package `accelerate` (for HFLM) and the real data (SMELT_SHARED).
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import yaml
from common import shared, write
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from smelt.data import TextData, load_data
from smelt.harness.adapter import HarnessModel
from smelt.harness.run import evaluate_tasks
from smelt.harness.task_files import isolated, load_tasks
from smelt.measure import multiple_choice
from smelt.measure.multiple_choice import evaluate_multiple_choice
from smelt.measure.perplexity import perplexity
from smelt.models.load import load
from smelt.models.model import Model

METRICS = {"acc": "none", "acc_norm": "characters", "acc_bytes": "bytes"}
WINDOW = 512


def task_file(folder: Path, name: str, rows: int) -> Path:
    """Write the first rows of a data set and a task that reads them; return the rows."""
    source = shared() / "data" / "zeroshot" / f"{name}.jsonl.gz"
    data = folder / f"{name}.jsonl"
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        data.write_text("".join(list(lines)[:rows]), encoding="utf-8")
    content = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(data)}},
        "output_type": "multiple_choice",
        "validation_split": "validation",
        "doc_to_text": "{{query}}",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in METRICS],
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return data


def samples_of_hflm(model: Model, name: str, folder: Path) -> list[dict[str, Any]]:
    """Return lm-eval's logged samples with its own model class."""
    peer = HFLM(pretrained=model.network, tokenizer=model.tokenizer, batch_size=8)
    with isolated():
        results = evaluate(peer, load_tasks([name], folder), log_samples=True, bootstrap_iters=0)
    assert results is not None
    return sorted(results["samples"][name], key=lambda sample: sample["doc_id"])


_passes: dict[int, np.ndarray] = {}


@contextmanager
def one_pass() -> Iterator[None]:
    """Let our measurements of one data set share their log-likelihoods, which do not depend on the normalization."""
    computed = multiple_choice._likelihoods

    def shared_likelihoods(model: Model, options: list[multiple_choice.Option], *settings: Any) -> np.ndarray:
        key = hash(tuple(option.continuation for option in options))
        if key not in _passes:
            _passes[key] = computed(model, options, *settings)
        return _passes[key]

    multiple_choice._likelihoods = shared_likelihoods
    try:
        yield
    finally:
        multiple_choice._likelihoods = computed


def choice_rows(model: Model, name: str, rows: int, folder: Path) -> list[dict[str, Any]]:
    """Compare the items of one data set, metric by metric."""
    data = load_data(str(task_file(folder, name, rows)))
    peer = samples_of_hflm(model, name, folder)
    (task,) = evaluate_tasks(model, [name], tasks_path=folder).tasks
    table = []
    for metric, normalize in METRICS.items():
        with one_pass():
            ours = evaluate_multiple_choice(model, data, normalize=normalize)
        expected = np.array([sample[metric] for sample in peer])
        adapter = next(value.scores for value in task.metrics if value.name == metric)
        assert adapter is not None
        table.append(
            {
                "data": name, "items": len(expected), "metric": metric, "lm_eval": float(expected.mean()),
                "ours": ours.value, "adapter": adapter.value,
                "ours_agrees": int((ours.items == expected).sum()),
                "adapter_agrees": int((adapter.items == expected).sum()),
            }
        )  # fmt: skip
    return table


def rolling_row(model: Model, tokens: int) -> dict[str, Any]:
    """Score a text of WikiText-2 in windows: HFLM, the adapter, and our perplexity with the prefix token in front."""
    assert model.tokenizer is not None
    with gzip.open(shared() / "data" / "wikitext2" / "test.raw.txt.gz", "rt", encoding="utf-8") as file:
        text = file.read(20 * tokens)
    ids = model.tokenizer(text)["input_ids"][: tokens // WINDOW * WINDOW]
    text = model.tokenizer.decode(ids)
    assert model.tokenizer(text)["input_ids"] == ids  # the windows of the three are then the same
    request = [Instance("loglikelihood_rolling", {}, (text,), 0)]
    peer = HFLM(pretrained=model.network, tokenizer=model.tokenizer, batch_size=4, max_length=WINDOW)
    expected = peer.loglikelihood_rolling(request, disable_tqdm=True)[0]
    adapter = HarnessModel(model, batch_size=4, max_length=WINDOW).loglikelihood_rolling(request)[0]
    data = TextData("wikitext2", (model.tokenizer.decode([peer.prefix_token_id]) + text,))
    ours = perplexity(model, data, context=WINDOW + 1, stride=WINDOW, batch_size=4)
    values = {"lm_eval": expected, "adapter": adapter, "ours": -np.log(ours.value) * len(ids)}
    return {"tokens": len(ids), "window": WINDOW} | {name: float(np.exp(-v / len(ids))) for name, v in values.items()}


def generation_row(model: Model, folder: Path, prompts: int = 10) -> dict[str, Any]:
    """Continue contexts of COPA greedily."""
    lines = (folder / "copa.jsonl").read_text(encoding="utf-8").splitlines()[:prompts]
    arguments = [(json.loads(line)["query"], {"until": ["\n"], "max_gen_toks": 16}) for line in lines]
    requests = [Instance("generate_until", {}, argument, index) for index, argument in enumerate(arguments)]
    peer = HFLM(pretrained=model.network, tokenizer=model.tokenizer, batch_size=8)
    expected, texts = peer.generate_until(requests, disable_tqdm=True), HarnessModel(model).generate_until(requests)
    return {"prompts": prompts, "same_text": sum(a == b for a, b in zip(texts, expected, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    model = load("smollm2-135m")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        choices = choice_rows(model, "copa", options.rows, folder)
        choices += choice_rows(model, "arc_easy", options.rows, folder)
        rolling = rolling_row(model, options.tokens)
        # Last, because the engine replaces the attention of the network.
        report(choices, rolling, generation_row(model, folder))


def report(choices: list[dict[str, Any]], rolling: dict[str, Any], generated: dict[str, Any]) -> None:
    """Write the tables."""
    lines = [
        f"| {row['data']} | {row['metric']} | {row['lm_eval']:.2f} | {row['adapter']:.2f} | {row['ours']:.2f} "
        f"| {row['adapter_agrees']} of {row['items']} | {row['ours_agrees']} of {row['items']} |"
        for row in choices
    ]
    text = f"""# Agreement with lm-eval {lm_eval.__version__}, SmolLM2-135M-Instruct in float32

`lm-eval` is its own Hugging Face model (HFLM), `--harness` is lm-eval with Smelt's adapter, `smelt eval` is our
multiple choice. The last two columns count the items on which each gives the same result as HFLM.

| data | metric | lm-eval | --harness | smelt eval | --harness agrees | smelt eval agrees |
|---|---|---|---|---|---|---|
{chr(10).join(lines)}

Perplexity per token of {rolling["tokens"]:,} tokens of WikiText-2 (raw test) in windows of {rolling["window"]}
(`loglikelihood_rolling`): lm-eval {rolling["lm_eval"]:.6f}, --harness {rolling["adapter"]:.6f}, our perplexity over
the same windows {rolling["ours"]:.6f}.

Greedy answers of at most 16 tokens (`generate_until`): our engine writes the same text as transformers on
{generated["same_text"]} of {generated["prompts"]} prompts.
"""
    write("lm_eval_agreement", [*choices, {"rolling": rolling}, {"generation": generated}], text)


if __name__ == "__main__":
    main()
