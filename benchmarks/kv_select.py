"""Quality of SmolLM2-135M with sparse page attention, and the cost of fetching pages from the host.

    PYTHONPATH=benchmarks python benchmarks/kv_select.py [--resume]

Prompts are prefilled once with full attention; then tokens are fed one by one, as when decoding, for every page summary
and share of pages. `continuation`: perplexity of the next 40 tokens of a text. `needle`: a fact in WikiText; its
question is fed token by token too, and is evaluate exactly or not. Overlap is the share of a step's selection that the
step before had selected. Copies go from the engine's own host pages to a second buffer, counted in bytes from the
second token on; there are slots for all pages.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from common import mean, previous_rows, table, write
from kv_tasks import Question, make_questions

from smelt.kvcache.selection.config import SparseAttentionConfig, sparse_attention_heads
from smelt.kvcache.selection.host_store import HostPageStore
from smelt.kvcache.selection.page_cache import OffloadConfig, ResidentPages
from smelt.kvcache.selection.page_summary import PAGE_SUMMARIES, PageSummary, PageSummaryTable
from smelt.kvcache.selection.sparse_attention import SparsePageAttention
from smelt.kvcache.selection.trace import Trace, TraceRecorder, trace_metadata
from smelt.models.load import load
from smelt.models.model import Model
from smelt.serve.engine.request import Request, RequestId, RequestStatus
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk
from smelt.serve.engine.sparse_runner import SparseRunner

SINK, WINDOW = 2, 2
SHARES = (1.0, 0.5, 0.25, 0.125)
CASES = (  # task, tokens, prompts, page_size
    ("needle", 2048, 6, 32), ("needle", 2048, 6, 16),
    ("continuation", 2048, 3, 32), ("continuation", 4096, 2, 32), ("continuation", 8064, 1, 32),
)  # fmt: skip
NEXT = 40  # continuation length
KEEP_STEPS = (0, 1, 8)  # keep_steps, for continuations with arkvale at a share of 25%
CHUNK = 512
SEED = 0  # of the prompts


@dataclass(frozen=True)
class SelectionCase:
    """How pages are selected and kept."""

    summary: PageSummary
    share: float
    keep_steps: int = 8

    def selection(self, page: int) -> SparseAttentionConfig:
        return SparseAttentionConfig(self.summary, page, (SINK + WINDOW) * page, self.share, SINK, WINDOW)


def main() -> None:
    options = _options()
    model = load("smollm2-135m")
    rows = previous_rows("kv_select", options.resume)
    done = {(row["task"], row["length"], row["page"]) for row in rows}
    for task, length, count, page in CASES:
        if (task, length, page) not in done:
            start = time.process_time()  # other work on the machine does not count
            result = evaluate(model, make_questions(model.tokenizer, task, count, length, SEED), page)
            facts = {"task": task, "length": length, "prompts": count, "page": page}
            rows.append({**facts, "cpu_seconds": time.process_time() - start, "results": result})
            write("kv_select", rows, _text(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def evaluate(model: Model, questions: list[Question], page: int) -> dict[str, dict[str, float]]:
    """Return, for every configuration, likelihood and accuracy of the answers, the selection, and the bytes copied."""
    prompts = PrefilledPrompts(model, questions, page)
    configurations = {
        _key(name, share): SelectionCase(PAGE_SUMMARIES.build(name), share)
        for name in PAGE_SUMMARIES
        for share in SHARES[1:]
    }
    if questions[0].task == "continuation":
        configurations |= {
            _key("arkvale", 0.25, keep_steps): SelectionCase(PAGE_SUMMARIES.build("arkvale"), 0.25, keep_steps)
            for keep_steps in KEEP_STEPS
        }
    configurations["all"] = SelectionCase(PAGE_SUMMARIES.build("arkvale"), 1.0)
    return {name: prompts.evaluate(configuration) for name, configuration in configurations.items()}


def _key(summary: str, share: float, keep_steps: int = 8) -> str:
    return f"{summary}|{share:g}|{keep_steps}"


class PrefilledPrompts:
    """Prompts prefilled by one runner in one batch, to be continued under many configurations."""

    def __init__(self, model: Model, questions: list[Question], page: int) -> None:
        self.model, self.questions, self.page = model, [_shortened(question) for question in questions], page
        max_pages = max(-(-(len(question.prompt) + len(question.after)) // page) for question in self.questions)
        self.blocks = max_pages * len(self.questions)
        self.offload = OffloadConfig(num_slots=self.blocks)
        self.runner = SparseRunner(
            model,
            num_blocks=self.blocks,
            block_size=page,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=len(self.questions),
            max_model_len=max_pages * page,
            selection=SelectionCase(PAGE_SUMMARIES.build("quest"), 1.0).selection(page),
            kv_offload=self.offload,
        )
        assert isinstance(self.runner.host, HostPageStore)
        self.pages = self.runner.host
        self.requests = [
            Request(
                RequestId(str(number)),
                question.prompt,
                SamplingParams(),
                limit=max_pages * page,
                slot=number,
                state=RequestStatus.RUNNING,
                tokens=question.prompt + question.after,
                blocks=list(range(number * max_pages, (number + 1) * max_pages)),
            )
            for number, question in enumerate(self.questions)
        ]
        for request in self.requests:
            for start in range(0, len(request.prompt), CHUNK):
                count = min(CHUNK, len(request.prompt) - start)
                self.runner.launch(ScheduledBatch([ScheduledChunk(request, start, count, False)]))

    def evaluate(self, case: SelectionCase) -> dict[str, float]:
        recorder = self._begin(case)
        copied = 0
        losses: list[list[float]] = [[] for _ in self.requests]
        right = [True] * len(self.requests)
        steps = max(len(item.after) for item in self.questions) - 1
        for step in range(steps):
            active = [number for number, item in enumerate(self.questions) if step < len(item.after) - 1]
            for number, (loss, is_best) in zip(active, self._next(active, step), strict=True):
                if step >= len(self.questions[number].after) - 1 - self.questions[number].answer:
                    losses[number].append(-loss)
                    right[number] &= is_best
            copied = copied or self.pages.recalled_bytes  # the device is empty at the first token
        overlap, free = overlaps(recorder.trace())
        return {
            "loss": mean([mean(item) for item in losses]), "right": mean([float(item) for item in right]),
            "chosen": selected_share(recorder.trace()), "overlap": overlap, "overlap_free": free,
            "copied": (self.pages.recalled_bytes - copied) / (steps - 1) / len(self.requests),
        }  # fmt: skip

    def _begin(self, case: SelectionCase) -> TraceRecorder:
        """Start a configuration: summaries of the prefilled pages, an empty device, and a new trace."""
        heads, device = sparse_attention_heads(self.model), self.model.device
        summaries = PageSummaryTable(case.summary, heads, self.blocks, self.model.network.dtype, device)
        full = torch.cat(
            [torch.tensor(request.blocks[: len(request.prompt) // self.page]) for request in self.requests]
        )
        for layer in heads:
            summaries.update(layer, full, self.pages.gather_keys(layer, full))
        offload = OffloadConfig(self.offload.num_slots, case.keep_steps)
        self.pages.residents = {
            layer: ResidentPages(kv_heads, self.blocks, offload) for layer, (kv_heads, _) in heads.items()
        }
        selection = case.selection(self.page)
        recorder = TraceRecorder(trace_metadata(self.model, selection, offload, {}))
        self.runner.attention = SparsePageAttention(selection, self.pages, summaries, recorder)
        return recorder

    def _next(self, active: list[int], step: int) -> list[tuple[float, bool]]:
        """Feed one token to each; return the likelihood of the next one, and whether it was the most likely. A logit
        bias forces it to be sampled, which changes no reported probability.
        """
        chunks = []
        for number in active:
            request = self.requests[number]
            position = len(request.prompt) + step
            request.sampling = SamplingParams(
                temperature=0, logprobs=1, logit_bias={request.tokens[position + 1]: 100.0}
            )
            chunks.append(ScheduledChunk(request, position, 1, True))
        sampled = self.runner.launch(ScheduledBatch(chunks)).sampler_output
        assert sampled is not None
        likelihoods = []
        for row, chunk in enumerate(chunks):
            expected = chunk.request.tokens[chunk.start + 1]
            assert int(sampled.tokens[row]) == expected
            logprob = sampled.logprobs(row, 1)
            likelihoods.append((logprob.own, logprob.top[0][0] == expected))
        return likelihoods


def _shortened(each: Question) -> Question:
    if each.task != "continuation":
        return each
    return Question(each.task, each.prompt, each.after[: NEXT + 1], NEXT)


def overlaps(trace: Trace) -> tuple[float, float]:
    """Return the share of a step's selected pages that the step before had selected: of all pages, and of those that
    could be selected freely.
    """
    before: dict[tuple[str, int, int], set[int]] = {}
    every: list[float] = []
    free: list[float] = []
    for row in trace.rows():
        pages, last = set(row.pages), before.get((row.request, row.layer, row.head))
        before[row.request, row.layer, row.head] = pages
        if last is not None:
            num_pages = max(pages) + 1
            selected = {page for page in pages if SINK <= page < num_pages - WINDOW}
            every.append(len(pages & last) / len(pages))
            free.append(len(selected & last) / max(len(selected), 1))
    return mean(every), mean(free)


def selected_share(trace: Trace) -> float:
    """Return the share of pages that were attended to."""
    counts = trace.ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
    num_pages = trace.pages[trace.ends - 1].long() + 1  # the last page is always selected
    return float(counts.sum() / num_pages.sum())


def _text(rows: list[dict[str, Any]]) -> str:
    text = (
        "# Sparse page attention: quality, and bytes copied\n\n"
        f"SmolLM2-135M in float32, {SINK} first and {WINDOW} last pages always selected "
        "as part of the share. Prompts use full attention; all tokens after them, questions too, "
        "attend to the selected pages. Overlap: the share of a step's pages that the step before had selected; `free` "
        "excludes the first and last pages. Copied: from host pages, MB per token and request, where pages stay for 8 "
        f"steps; the first token is excluded. A continuation is {NEXT} tokens. Seed {SEED}.\n"
    )
    for row in rows:
        unit = "evaluate" if row["task"] == "needle" else "perplexity"
        pages = f"pages of {row['page']}, {row['prompts']} prompts"
        text += f"\n## {row['task']}, {row['length']:,} tokens, {pages}\n\n"
        text += table(["summary", "share", "pages selected", unit, "overlap", "free", "copied"], _quality(row)) + "\n"
    keep_steps = [_steady(row) for row in rows if row["task"] == "continuation"]
    if keep_steps:
        text += "\n## Keeping pages for several steps (arkvale, 25% of the pages): MB copied per token and request\n\n"
        text += table(["tokens", *(f"kept {steps} steps" for steps in KEEP_STEPS)], keep_steps) + "\n"
    seconds = sum(row["cpu_seconds"] for row in rows)
    return f"{text}\nTotal: {seconds / 60:.1f} minutes of CPU time.\n"


def _quality(row: dict[str, Any]) -> list[list[str]]:
    cells = [["any", "100%", *_figures(row, "all")]]
    for name in PAGE_SUMMARIES:
        cells += [[name, f"{share:.1%}", *_figures(row, _key(name, share))] for share in SHARES[1:]]
    return cells


def _figures(row: dict[str, Any], key: str) -> list[str]:
    figures = row["results"][key]
    figure = f"{figures['right']:.2f}" if row["task"] == "needle" else f"{math.exp(figures['loss']):.2f}"
    shares = [f"{figures[name]:.1%}" for name in ("overlap", "overlap_free")]
    return [f"{figures['chosen']:.1%}", figure, *shares, _megabytes(figures)]


def _steady(row: dict[str, Any]) -> list[str]:
    copied = [_megabytes(row["results"][_key("arkvale", 0.25, keep_steps)]) for keep_steps in KEEP_STEPS]
    return [f"{row['length']:,}", *copied]


def _megabytes(results: dict[str, float]) -> str:
    return f"{results['copied'] / 1e6:.2f}"


if __name__ == "__main__":
    main()
