"""Score the items of a local task file through a running server and directly, both with lm-eval.

lm-eval's `local-completions` sends tokens to `smelt serve` (`echo`, `logprobs`); the same items are scored by the model
of `smelt eval --harness` in this process. The prefix cache of the server is on, as by default, and lm-eval has several
requests in flight.

    PYTHONPATH=benchmarks python benchmarks/serve/lm_eval_server.py [--rows 100] [--more-rows 20]

Needs the extra `harness`, the packages of lm-eval's extra `api`, and the real data (SMELT_SHARED).
"""

from __future__ import annotations

import argparse
import gzip
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lm_eval
import yaml
from common import shared, write
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from tests.serve.server_process import Server, start

from smelt.harness.adapter import HarnessModel
from smelt.harness.task_files import isolated, load_tasks
from smelt.models.load import load

TASK = "arc_easy"


def task_file(folder: Path, rows: int) -> None:
    """Write the first rows of ARC-easy, and a task that reads them."""
    with gzip.open(shared() / "data" / "zeroshot" / f"{TASK}.jsonl.gz", "rt", encoding="utf-8") as lines:
        (folder / "rows.jsonl").write_text("".join(list(lines)[:rows]), encoding="utf-8")
    content = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(folder / "rows.jsonl")}},
        "output_type": "multiple_choice",
        "validation_split": "validation",
        "doc_to_text": "{{query}}",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / f"{TASK}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


def samples(model: LM, folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Return lm-eval's logged samples in order, and the seconds that they took."""
    began = time.monotonic()
    with isolated():
        results = evaluate(model, load_tasks([TASK], folder), log_samples=True, bootstrap_iters=0)
    assert results is not None
    return sorted(results["samples"][TASK], key=lambda sample: sample["doc_id"]), time.monotonic() - began


def likelihoods(items: list[dict[str, Any]]) -> list[tuple[float, bool]]:
    """Return the log-likelihood of every choice of every item, and whether it is the greedy continuation."""
    return [(float(value), greedy in (True, "True")) for item in items for value, greedy in item["filtered_resps"]]


def client(server: Server, folder: str, adds_bos: bool) -> LocalCompletionsAPI:
    """Connect lm-eval. Its client of the server's tokenizer never adds BOS: a model that has it needs a local one."""
    tokenizer = {"tokenizer_backend": "huggingface", "tokenizer": folder, "add_bos_token": True} if adds_bos else {}
    state = server.state()
    return LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model=state["model"], num_concurrent=4,
        max_length=state["max_model_len"], **tokenizer,
    )  # fmt: skip


def measure(name: str, rows: int, folder: Path) -> dict[str, Any]:
    """Score the items directly and through a server; compare the log-likelihoods of all choices."""
    task_file(folder, rows)
    model = load(name)
    assert model.tokenizer is not None
    adds_bos = model.tokenizer.bos_token_id in model.tokenizer("a")["input_ids"]
    direct, direct_seconds = samples(HarnessModel(model), folder)
    server = start(name, folder)
    served, served_seconds = samples(client(server, name, adds_bos), folder)
    backend = server.state()["backend"]
    assert server.end(signal.SIGINT) == 0
    pairs = list(zip(likelihoods(direct), likelihoods(served), strict=True))
    return {
        "model": Path(name).name, "backend": backend, "tokenizer": "local" if adds_bos else "the server's",
        "items": len(direct), "log_likelihoods": len(pairs),
        "largest_difference": max(abs(ours[0] - theirs[0]) for ours, theirs in pairs),
        "smallest_log_likelihood": min(ours[0] for ours, _ in pairs),
        "same_greedy": sum(ours[1] == theirs[1] for ours, theirs in pairs),
        "same_result": sum(ours["acc"] == theirs["acc"] for ours, theirs in zip(direct, served, strict=True)),
        "accuracy": [sum(item["acc"] for item in items) / len(items) for items in (direct, served)],
        "seconds": [direct_seconds, served_seconds],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100, help="items for stories260K")
    parser.add_argument("--more-rows", type=int, default=20, help="items for smollm2-135m; 0: leave it out")
    options = parser.parse_args()
    runs = {str(shared() / "weights" / "stories260K"): options.rows, "smollm2-135m": options.more_rows}
    with tempfile.TemporaryDirectory() as name:
        report([measure(model, rows, Path(name)) for model, rows in runs.items() if rows])


def report(rows: list[dict[str, Any]]) -> None:
    lines = [
        f"| {row['model']} | {row['tokenizer']} | {row['items']} | {row['accuracy'][0]:.3f}, {row['accuracy'][1]:.3f} "
        f"| {row['same_result']} of {row['items']} | {row['log_likelihoods']} | {row['largest_difference']:.1e} "
        f"| {row['smallest_log_likelihood']:.0f} | {row['same_greedy']} of {row['log_likelihoods']} "
        f"| {row['seconds'][0]:.0f}, {row['seconds'][1]:.0f} |"
        for row in rows
    ]
    text = f"""# lm-eval {lm_eval.__version__} through `smelt serve` and directly

Items of ARC-easy from a local task file. Server: `local-completions`, 4 requests in flight, prefix caching on, backend
`{rows[0]["backend"]}`. Direct: the model of `smelt eval --harness`. Where two values are given, the first is direct.

| model | tokenizer | items | accuracy | same result | log-likelihoods | largest difference | smallest log-likelihood \
| same greedy flag | seconds |
|---|---|---|---|---|---|---|---|---|---|
{chr(10).join(lines)}
"""
    write("serve_lm_eval", rows, text)


if __name__ == "__main__":
    main()
