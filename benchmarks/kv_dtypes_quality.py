"""Quality of a quantized KV cache by its dtype, with and without rotation, and how many requests fit into a GPU.

    PYTHONPATH=src:benchmarks python benchmarks/kv_dtypes_quality.py [--model smollm2-135m] [--texts 8] [--resume]

Every token attends to keys and values as pages store them: the rows that serving writes, read by its attention.
Perplexity is over WikiText-2 and over code, in chunks of 1,024 tokens; its ratio to the KV cache in the model's own
dtype has a paired confidence interval over windows of 128 tokens. `lookup` are the questions of `kv_quality.py` about a
table of names and codes, answered exactly or not. Greedy answers come from an engine on CPU. A second model is added by
`--model FILE.gguf --name NAME --resume`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from common import mean, previous_rows, shared, table, write
from kv_tasks import make_questions
from torch import Tensor

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.kv_quant import INT3, INT4, KV_QUANT_DTYPES, KVQuantFormat
from smelt.measure.eval_result import EvalResult
from smelt.measure.paired import compare
from smelt.models.load import load
from smelt.models.model import Model
from smelt.serve.engine.attention import ATTN_IMPLEMENTATION, PagedCache, paged_attention_fn, row_bytes, use_attention
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams

RESULT = "kv_dtypes_quality"
LENGTH, WINDOW, BLOCK = 1024, 128, 16
LOOKUP, LOOKUP_LENGTH = "lookup", 512  # task, and tokens of its prompts
ANSWER, PROMPT = 128, 128  # tokens of a greedy answer and of its prompt
CONFIGURATIONS: dict[str, tuple[str | None, bool]] = {  # dtype, rotated
    "model": (None, False), "int8": ("int8", False), "fp8": ("fp8", False), "int4, not rotated": (INT4, False),
    "int4": (INT4, True), "int3, not rotated": (INT3, False), "int3": (INT3, True),
}  # fmt: skip
LLAMA_8B = {"layers": 32, "kv_heads": 8, "head_dim": 128}
GPU_BYTES, CONTEXT = 139 * 2**30, 8192
FP8_WEIGHT_BYTES = 6_979_321_856 + 2 * 1_050_939_392  # linear layers of the blocks; embedding and LM head in bf16


def main() -> None:
    options = _options()
    rows = previous_rows(RESULT, options.resume)
    model = load(options.model)
    assert model.tokenizer is not None
    model.network.set_attn_implementation(ATTN_IMPLEMENTATION)
    texts = {"WikiText-2": _wikitext(model, options.texts), "code": _code(model, options.code_texts)}
    for label in CONFIGURATIONS:
        for data, chunks in texts.items():
            if not _has(rows, options.name, label, data):
                losses = [loss for chunk in chunks for loss in token_losses(model, chunk, label)]
                rows.append({"model": options.name, "cache": label, "data": data, "losses": _windows(losses)})
                write(RESULT, rows, _text(rows))
        if options.questions and not _has(rows, options.name, label, LOOKUP):
            questions = make_questions(model.tokenizer, LOOKUP, options.questions, LOOKUP_LENGTH, 0)
            right = [answers_question(model, question, label) for question in questions]
            rows.append({"model": options.name, "cache": label, "data": LOOKUP, "right": right})
            write(RESULT, rows, _text(rows))
    for dtype in (None, *KV_QUANT_DTYPES):
        if options.greedy and not _has(rows, options.name, dtype or "model", "greedy"):
            tokens = greedy_tokens(options.model, texts["WikiText-2"], options.greedy, dtype)
            rows.append({"model": options.name, "cache": dtype or "model", "data": "greedy", "tokens": tokens})
            write(RESULT, rows, _text(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--name", help="of the model in the results")
    parser.add_argument("--texts", type=int, default=8, help="chunks of WikiText-2")
    parser.add_argument("--code-texts", type=int, default=4, help="chunks of code")
    parser.add_argument("--questions", type=int, default=8, help="questions about a table")
    parser.add_argument("--greedy", type=int, default=20, help="prompts answered greedily")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    options.name = options.name or options.model
    return options


def _has(rows: list[dict[str, Any]], model: str, cache: str, data: str) -> bool:
    return any((row["model"], row["cache"], row["data"]) == (model, cache, data) for row in rows)


def _wikitext(model: Model, count: int) -> list[list[int]]:
    with gzip.open(shared() / "data/wikitext2/test.raw.txt.gz", "rt") as file:
        return _chunks(model, file.read(), count)


def _code(model: Model, count: int) -> list[list[int]]:
    with gzip.open(shared() / "data/code_eval/humaneval.jsonl.gz", "rt") as file:
        tasks = [json.loads(line) for line in file]
    return _chunks(model, "\n".join(task["prompt"] + task["canonical_solution"] for task in tasks), count)


def _chunks(model: Model, text: str, count: int) -> list[list[int]]:
    """Return chunks spread evenly over the text."""
    ids = model.tokenizer(text, verbose=False)["input_ids"]  # type: ignore[misc]
    step = (len(ids) - LENGTH) // max(count - 1, 1)
    return [ids[i * step : i * step + LENGTH] for i in range(count)]


@torch.inference_mode()
def logits_of(model: Model, tokens: list[int], label: str) -> Tensor:  # [tokens, vocabulary]
    """Run a text as one chunk, whose KV cache is written to pages and read from there."""
    dtype, rotated = CONFIGURATIONS[label]
    count, blocks = len(tokens), -(-len(tokens) // BLOCK)
    cache = PagedCache.empty(model.anatomy, blocks, BLOCK, model.network.dtype, model.device, dtype)
    formats = {
        layer: None if kv_quant is None else KVQuantFormat(kv_quant.name, kv_quant.head_dim, rotated)
        for layer, kv_quant in cache.kv_quant.items()
    }
    if rotated:
        assert formats == cache.kv_quant, "serving rotates this format"
    positions = torch.arange(count)
    metadata = AttentionMetadata(
        torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32),
        torch.arange(blocks, dtype=torch.int32)[None], positions, count, [count],
    )  # fmt: skip
    with use_attention(paged_attention_fn(replace(cache, kv_quant=formats), metadata)):
        output = model.network(torch.tensor([tokens]), position_ids=positions[None], use_cache=False)
    return output.logits[0].float()


def token_losses(model: Model, tokens: list[int], label: str) -> list[float]:
    logits = logits_of(model, tokens, label)
    losses: list[float] = torch.nn.functional.cross_entropy(
        logits[:-1], torch.tensor(tokens[1:]), reduction="none"
    ).tolist()
    return losses[: len(losses) // WINDOW * WINDOW]


def _windows(losses: list[float]) -> list[float]:
    return [mean(losses[first : first + WINDOW]) for first in range(0, len(losses), WINDOW)]


def answers_question(model: Model, question: Any, label: str) -> bool:
    tokens = [*question.prompt, *question.after]
    logits = logits_of(model, tokens, label)[-question.answer - 1 : -1]
    return logits.argmax(-1).tolist() == tokens[-question.answer :]


def greedy_tokens(model: str, texts: list[list[int]], count: int, dtype: str | None) -> list[list[int]]:
    engine = Engine(model, max_model_len=512, max_num_seqs=count, kv_cache_dtype=dtype, kv_cache_bytes=10**9)
    prompts = [texts[i % len(texts)][i // len(texts) * PROMPT :][:PROMPT] for i in range(count)]
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    requests = [engine.submit(prompt, sampling)[0] for prompt in prompts]
    while engine.busy:
        engine.step()
    return [request.output for request in requests]


def _perplexity(losses: list[float]) -> EvalResult:
    items = np.array(losses)
    return EvalResult("perplexity", math.exp(items.mean()), False, "", items, np.full(len(items), float(WINDOW)))


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=True)) if one != other), len(a))


def _text(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(row["model"] for row in rows))
    return (
        f"# Quality of a quantized KV cache, by dtype\n\nTexts in chunks of {LENGTH:,} tokens, float32 weights and "
        "activations. `of model`: the ratio of perplexities, with a paired 95 % interval. `lookup`: questions about a "
        f"table of {LOOKUP_LENGTH} tokens answered exactly. `greedy`: tokens of {ANSWER} before the first that differs "
        "from the model's own dtype, on average, and answers without any. The clip ratios of int4 and int3, and the "
        "rotation of values, were chosen on this split of WikiText-2, in part on these chunks; code, lookup and greedy "
        "answers were not used for any choice.\n\n"
        + "\n\n".join(f"## {name}\n\n{_quality_table(rows, name)}" for name in names)
        + f"\n\n## Capacity\n\nLlama 8B shape, {GPU_BYTES >> 30} GiB, weights in FP8 (embedding and LM head in "
        f"bf16): {FP8_WEIGHT_BYTES / 2**30:.1f} GiB, nothing else reserved. Requests of {CONTEXT:,} tokens.\n\n"
        + _capacity_table()
    )


def _quality_table(rows: list[dict[str, Any]], name: str) -> str:
    by_key = {(row["cache"], row["data"]): row for row in rows if row["model"] == name}
    sets = [data for data in ("WikiText-2", "code") if ("model", data) in by_key]
    headings = ["KV cache", *(cell for data in sets for cell in (data, "of model")), LOOKUP, "greedy"]
    cells = [
        [
            label,
            *(cell for data in sets for cell in _perplexity_cells(by_key, label, data)),
            _share(by_key.get((label, LOOKUP))),
            _greedy(by_key, label),
        ]
        for label in CONFIGURATIONS
    ]
    return table(headings, cells)


def _perplexity_cells(by_key: dict[tuple[str, str], dict[str, Any]], label: str, data: str) -> list[str]:
    if (label, data) not in by_key:
        return ["", ""]
    new, base = (_perplexity(by_key[cache, data]["losses"]) for cache in (label, "model"))
    if label == "model":
        return [f"{base.value:.2f}", ""]
    result = compare(new, base)
    assert result.ratio is not None and result.ratio_interval is not None
    low, high = result.ratio_interval
    return [f"{new.value:.2f}", f"{result.ratio:.3f} ({low:.3f} to {high:.3f})"]


def _share(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{sum(row['right'])}/{len(row['right'])}"


def _greedy(by_key: dict[tuple[str, str], dict[str, Any]], label: str) -> str:
    if label == "model" or (label, "greedy") not in by_key:
        return ""
    pairs = zip(by_key[label, "greedy"]["tokens"], by_key["model", "greedy"]["tokens"], strict=True)
    prefixes = [_common_prefix(new, base) for new, base in pairs]
    return f"{mean(prefixes):.0f}, {sum(prefix == ANSWER for prefix in prefixes)}/{len(prefixes)}"


def _capacity_table() -> str:
    cells = []
    for dtype in (None, *KV_QUANT_DTYPES):
        per_row = row_bytes(LLAMA_8B["head_dim"], torch.bfloat16, dtype)
        per_token = 2 * LLAMA_8B["layers"] * LLAMA_8B["kv_heads"] * per_row
        requests = (GPU_BYTES - FP8_WEIGHT_BYTES) // (CONTEXT * per_token)
        cells.append([dtype or "bf16", f"{per_token:,}", f"{8 * per_row / LLAMA_8B['head_dim']:.2f}", f"{requests:,}"])
    return table(["KV cache", "bytes per token", "bits per value", "requests"], cells)


if __name__ == "__main__":
    main()
