"""Quality of SmolLM2-135M after evicting a part of its prompt's KV cache: scorers x budgets x keep.

    PYTHONPATH=benchmarks python benchmarks/kv_quality.py [--prompts 16] [--seeds 1] [--resume]

Every prompt is prefilled once and compressed before the question is seen. A needle in WikiText (1,024 tokens) and a
table of names and codes (512 tokens) are answered or not; for a text's continuation (128 tokens after 1,024) the
perplexity is measured. The static budgets come from a profile of other prompts, by the same scorer under `ada`. Tokens
are masked per head: the reference for what an engine frees.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from common import mean, previous_rows, table, write
from kv_tasks import Question, make_questions
from torch import Tensor

from smelt.kvcache.eviction.budget import retained_mask
from smelt.kvcache.eviction.budgets import make_budget_rule
from smelt.kvcache.eviction.prefill import RecordedPrefill, decode_logits, find_kv_shape
from smelt.kvcache.eviction.profile import EvictionProfile, retained_ratios
from smelt.kvcache.eviction.profiling import prefill_for, score_layers
from smelt.kvcache.eviction.scorers import SCORERS, make_scorer
from smelt.models.load import load
from smelt.models.model import Model

KEEP = (0.75, 0.5, 0.25, 0.1)
LENGTHS = {"needle": 1024, "lookup": 512, "continuation": 1024}
RULES = ("uniform", "pyramid", "ada", "global-topk", "static")
FORCED = {"sink": 4, "window": 32}  # for every scorer
BEFORE = 8  # prompts per profile
AT_ONCE = 14  # configurations per prompt in one batch


def main() -> None:
    options = _options()
    model = load("smollm2-135m")
    rows = previous_rows("kv_quality", options.resume)
    done = {(row["task"], row["seed"], row["number"]) for row in rows}
    for seed in range(options.seeds):
        for task, length in LENGTHS.items():
            if all((task, seed, number) in done for number in range(options.prompts)):
                continue
            others = make_questions(model.tokenizer, task, BEFORE, length, 1000 + seed)
            profiles = profiled(model, [prepared(model, question) for question in others])
            for number, question in enumerate(make_questions(model.tokenizer, task, options.prompts, length, seed)):
                if (task, seed, number) in done:
                    continue
                quality = evaluate(model, question, profiles)
                rows.append({"task": task, "seed": seed, "number": number, "results": quality})
                write("kv_quality", rows, _text(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="prompts per task")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def prepared(model: Model, each: Question) -> RecordedPrefill:
    """Prefill the prompts, and repeat them for scorers that need a second pass."""
    return prefill_for(model, each.prompt, make_scorer("kvzip"))


def profiled(model: Model, readings: list[RecordedPrefill]) -> dict[tuple[str, float], EvictionProfile]:
    """Return, for every scorer and keep ratio, how much `ada` lets each head keep of these prompts."""
    profiles = {}
    for name in SCORERS:
        scores = [score_layers(reading, make_scorer(name, **FORCED)) for reading in readings]
        for keep in KEEP:
            counts = [
                make_budget_rule("ada").counts(prompt_scores, keep)[:, 0] for prompt_scores in scores
            ]  # [layers, kv_heads]
            samples = torch.stack([
                retained_ratios(count, reading.seq_len, **FORCED)
                for count, reading in zip(counts, readings, strict=True)
            ])  # fmt: skip
            profiles[name, keep] = EvictionProfile.from_ratios(find_kv_shape(model), name, keep, samples, FORCED)
    return profiles


def evaluate(
    model: Model, each: Question, profiles: dict[tuple[str, float], EvictionProfile]
) -> dict[str, dict[str, float]]:
    """Score the full cache and every way to compress it: whether the answer is right, and its likelihood."""
    reading = prepared(model, each)
    masks: dict[str, Tensor] = {}
    for name in SCORERS:
        scores = score_layers(reading, make_scorer(name, **FORCED))
        for rule in RULES:
            for keep in KEEP:
                budget = make_budget_rule(rule, **({"profile": profiles[name, keep]} if rule == "static" else {}))
                counts = budget.counts(scores, keep)
                masks[f"{name}|{rule}|{keep:g}"] = retained_mask(scores, counts)
    answers = _answers(model, reading, each, {"all": torch.ones_like(next(iter(masks.values())))})
    names = list(masks)
    for start in range(0, len(names), AT_ONCE):
        answers |= _answers(model, reading, each, {name: masks[name] for name in names[start : start + AT_ONCE]})
    return answers


def _answers(
    model: Model, reading: RecordedPrefill, each: Question, ways: dict[str, Tensor]
) -> dict[str, dict[str, float]]:
    after = torch.tensor([each.after])
    logits = decode_logits(model, reading, torch.cat(list(ways.values()), dim=1), after)
    expected = after[0, -each.answer :]
    rows = logits[:, -each.answer - 1 : -1].log_softmax(-1)  # [configurations, answer, vocab]
    likelihoods = rows.gather(-1, expected.expand(len(rows), -1)[..., None])[..., 0]
    right = (rows.argmax(-1) == expected).all(-1)
    shares = [mask.double().mean().item() for mask in ways.values()]
    return {
        name: {"right": float(right[row]), "loss": float(-likelihoods[row].mean()), "kept": shares[row]}
        for row, name in enumerate(ways)
    }


def _text(rows: list[dict[str, Any]]) -> str:
    tasks = [task for task in LENGTHS if any(row["task"] == task for row in rows)]
    text = (
        "# Quality after KV cache eviction: scorers and budgets\n\n"
        "SmolLM2-135M in float32, prompts compressed before the question is seen; the first "
        f"{FORCED['sink']} and the last {FORCED['window']} tokens always stay. `needle` and `lookup`: the share of "
        "questions answered exactly; `continuation`: perplexity. Columns are the total share of the KV cache that is "
        "kept.\n"
    )
    for task in tasks:
        results = [row["results"] for row in rows if row["task"] == task]
        all_of_it = _figure(results, "all", task)
        text += f"\n## {task}, {len(results)} prompts: {all_of_it} with the full cache\n\n{_table(results, task)}\n"
    return text


def _table(results: list[dict[str, dict[str, float]]], task: str) -> str:
    headings = ["scorer", "budget", *(f"{keep:.0%}" for keep in KEEP)]
    cells = [
        [name, rule, *(_figure(results, f"{name}|{rule}|{keep:g}", task) for keep in KEEP)]
        for name in SCORERS
        for rule in RULES
    ]
    return table(headings, cells)


def _figure(results: list[dict[str, dict[str, float]]], way: str, task: str) -> str:
    if task == "continuation":
        return f"{math.exp(mean([result[way]['loss'] for result in results])):.2f}"
    return f"{mean([result[way]['right'] for result in results]):.2f}"


if __name__ == "__main__":
    main()
