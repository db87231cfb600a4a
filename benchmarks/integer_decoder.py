"""Integer-only decoders: perplexity against float, each nonlinearity back in float, and the speed of decoding.

    python benchmarks/integer_decoder.py [--models stories260K smollm2-135m] [--tokens 1024] [--decoded 16] [--resume]

stories260K reads stories that it wrote itself (there is no other text of its kind here), SmolLM2-135M WikiText-2. All
forms of a model are converted with the ranges of the same calibration text. Decoding starts from a prompt of 32 tokens.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import previous_rows, shared, table, write
from torch import Tensor
from torch.nn.functional import cross_entropy

from smelt.compression.calibration.ranges import observe_ranges
from smelt.data import load_text
from smelt.models.generation import generate_text
from smelt.models.load import load
from smelt.models.model import Model
from smelt.runtime.integer.builder import GraphBuilder
from smelt.runtime.integer.conversion import NewBuilder
from smelt.runtime.integer.debug import float_interpreter
from smelt.runtime.integer.decoder_network import IntegerDecoder, decoder_inputs
from smelt.runtime.integer.decoders import convert_decoder, observed_modules
from smelt.runtime.integer.graph import IntegerGraph
from smelt.runtime.integer.table_builder import TableBuilder

WINDOW, PROMPT, SEED = 256, 32, 0
CALIBRATION_WINDOWS = 8
FORMS: dict[str, NewBuilder] = {"i-bert": GraphBuilder, "nn-lut": TableBuilder}
SWITCHED = {
    "i-bert, softmax in float": ("softmax",),
    "i-bert, RMSNorm in float": ("rms_norm",),
    "i-bert, SiLU in float": ("silu",),
    "i-bert, all three in float": ("softmax", "rms_norm", "silu"),
}
TEXTS = {
    "stories260K": "stories260K reads stories that it wrote itself.",
    "smollm2-135m": "SmolLM2-135M-Instruct reads WikiText-2.",
}
Row = dict[str, Any]
Logits = Callable[[Tensor], Tensor]


@dataclass
class Subject:
    """A float model, its windows of text [windows, tokens], and its integer graphs by form."""

    name: str
    model: Model
    calibration: Tensor
    evaluation: Tensor
    graphs: dict[str, IntegerGraph]


def subject(name: str, tokens: int) -> Subject:
    windows = tokens // WINDOW
    if name == "stories260K":
        model = load(shared() / "weights" / name)
        text = generate_text(model.network, samples=CALIBRATION_WINDOWS + windows, length=WINDOW, seed=SEED)
        calibration, evaluation = text[:CALIBRATION_WINDOWS], text[CALIBRATION_WINDOWS:]
    else:
        model = load(name)
        calibration = wikitext(model, "train", CALIBRATION_WINDOWS)
        evaluation = wikitext(model, "test", windows)
    network = model.network
    ranges = observe_ranges(network, observed_modules(network), [{"input_ids": row[None]} for row in calibration])
    graphs = {form: convert_decoder(network, ranges, builder) for form, builder in FORMS.items()}
    return Subject(name, model, calibration, evaluation, graphs)


def wikitext(model: Model, split: str, windows: int) -> Tensor:
    """Return the first tokens of a split. [windows, tokens]"""
    assert model.tokenizer is not None
    text = load_text(shared() / f"data/wikitext2/{split}.txt.gz").joined[: windows * WINDOW * 10]
    return torch.tensor(model.tokenizer(text, verbose=False)["input_ids"][: windows * WINDOW]).reshape(windows, -1)


@torch.no_grad()
def perplexity(logits: Logits, windows: Tensor) -> float:
    losses = [cross_entropy(logits(row[None])[0, :-1].double(), row[1:]) for row in windows]
    return float(torch.stack(losses).mean().exp())


@torch.no_grad()
def decoding_speed(network: Any, prompt: Tensor, tokens: int) -> float:
    """Return the tokens per second of greedy decoding after the prompt."""
    output = network(input_ids=prompt, use_cache=True)
    start = time.perf_counter()
    for _ in range(tokens):
        token = output.logits[:, -1:].argmax(-1)
        output = network(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
    return tokens / (time.perf_counter() - start)


def measure(case: Subject, form: str, decoded: int) -> Row:
    network = case.model.network
    speed: float | None = None
    if form in SWITCHED:
        graph = case.graphs["i-bert"]
        interpreter = float_interpreter(graph, SWITCHED[form])

        def logits(ids: Tensor) -> Tensor:
            return graph.dequantize("logits", interpreter.run(decoder_inputs(network, ids))["logits"])

        value = perplexity(logits, case.evaluation)
    else:
        decoder: Any = network
        if form != "float":
            decoder = IntegerDecoder(case.graphs[form], copy.deepcopy(network))
        value = perplexity(lambda ids: decoder(input_ids=ids).logits, case.evaluation)
        speed = decoding_speed(decoder, case.evaluation[:1, :PROMPT], decoded)
    return {
        "model": case.name, "form": form, "perplexity": value, "tokens": case.evaluation.numel(),
        "tokens_per_second": speed, "threads": torch.get_num_threads(), "seed": SEED,
    }  # fmt: skip


def text(rows: list[Row]) -> str:
    cells = []
    for row in rows:
        base = next(other for other in rows if other["model"] == row["model"] and other["form"] == "float")
        speed = row["tokens_per_second"]
        cells.append([
            row["model"], row["form"], str(row["tokens"]), f"{row['perplexity']:.3f}",
            f"{100 * (row['perplexity'] / base['perplexity'] - 1):+.1f} %", "" if speed is None else f"{speed:.2f}",
        ])  # fmt: skip
    headings = ["model", "form", "tokens", "perplexity", "against float", "tokens/s, decoding"]
    return (
        f"# Integer-only decoders\n\nPerplexity over windows of {WINDOW} tokens after post-training conversion with "
        f"the ranges of {CALIBRATION_WINDOWS} windows, and speed of greedy decoding with a KV cache (batch 1, "
        f"{rows[0]['threads']} thread, a CPU that other work shared: compare rows only roughly). "
        f"{' '.join(TEXTS[name] for name in dict.fromkeys(row['model'] for row in rows))} float is float32 in PyTorch."
        "\n\n"
    ) + table(headings, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--forms", nargs="+", default=["float", *FORMS, *SWITCHED], help="rows to measure")
    parser.add_argument("--tokens", type=int, default=1024, help="of evaluation text")
    parser.add_argument("--decoded", type=int, default=16, help="tokens to decode")
    parser.add_argument("--resume", action="store_true", help="keep the rows of a run that was cut off")
    options = parser.parse_args()
    rows = previous_rows("integer_decoder", options.resume)
    done = {(row["model"], row["form"]) for row in rows}
    for name in options.models:
        forms = [form for form in options.forms if (name, form) not in done]
        case = subject(name, options.tokens) if forms else None
        for form in forms:
            assert case is not None
            rows.append(measure(case, form, options.decoded))
            print(rows[-1], flush=True)
            write("integer_decoder", rows, text(rows))


if __name__ == "__main__":
    main()
