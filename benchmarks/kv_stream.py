"""Streams in bounded memory: does the cache keep its size and speed, and what does it still know?

    PYTHONPATH=benchmarks python benchmarks/kv_stream.py [--parts stream passkey alpha video] [--seeds 2]

`stream`: 200,000 tokens of WikiText-2 through SmolLM2-135M. `passkey`: a number hidden at five depths of a long text
and asked for at its end. `alpha`: the perplexity of a text's continuation, by the share of tokens kept for novelty.
`video`: 2,000 synthetic frames through a small vision-language model with random weights. A part that runs replaces its
own rows and leaves those of the others.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import mean, previous_rows, table, write
from kv_stream_text import QUESTION, drawn_text, with_passkey
from kv_stream_video import film, small_network
from torch.nn import functional as F

from smelt.kvcache.streaming import InfiniPot, InfiniPotV, RecentFrames, TextStream, UniformFrames, VideoStream
from smelt.models.load import load
from smelt.models.model import Model

PARTS = ("stream", "passkey", "alpha", "video")
CAP = 1024
TOKENS, STEP = 200_000, 2_000  # of the long stream
BEFORE, AFTER = 4096, 128  # tokens of context and of continuation for the perplexity
FRAMES, FRAME_STEP = 2_000, 40
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
WAYS = {
    "InfiniPot": InfiniPot(),
    "without CR-RoPE": InfiniPot(renumber=False),
    "CaP alone": InfiniPot(alpha=0.0),
    "NuC alone": InfiniPot(alpha=1.0),
    "CaP pooled over 5": InfiniPot(kernel=5),
}
KEYS_CAP = 512
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
KEYS = (  # text, tokens, tokens kept; the network was trained on 8192 tokens
    ("filler", 4096, ("everything", "truncation", *WAYS)),
    ("filler", 32 * KEYS_CAP, ("truncation", "InfiniPot", "without CR-RoPE")),
    ("WikiText-2", 2048, ("everything", "truncation", *WAYS)),
)


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    rows = [row for row in previous_rows("kv_stream", True) if options.resume or row["part"] not in options.parts]
    for part in options.parts:
        done = {_key(row) for row in rows if row["part"] == part}
        for row in _RUNS[part](options, done):
            rows.append({"part": part, **row})
            rows.sort(key=lambda row: PARTS.index(row["part"]))
            write("kv_stream", rows, _text(rows))


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key that identifies a row, so that it need not be measured again."""
    return tuple(row.get(name) for name in ("haystack", "length", "depth", "seed", "way", "number", "rule"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seeds", type=int, default=2, help="passkey texts per haystack and depth")
    parser.add_argument("--texts", type=int, default=8, help="texts for the perplexity")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--resume", action="store_true", help="resume interrupted parts")
    return parser.parse_args()


def _model(options: argparse.Namespace) -> Model:
    model = load("smollm2-135m")
    model.network.to(getattr(torch, options.dtype))
    return model


# Parts


def long_stream(options: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    if done:
        return
    model = _model(options)
    ids = drawn_text(model.tokenizer, "train", 0, TOKENS)
    stream = TextStream(model, CAP)
    steps = []
    for start in range(0, TOKENS, STEP):
        wall, busy = time.perf_counter(), time.process_time()
        stream.push(ids[start : start + STEP])
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
        steps.append((stream.nbytes, stream.length, _resident(), STEP / wall, STEP / busy))
        print(start, steps[-1], flush=True)
    counts = {"tokens": stream.num_seen, "num_compressions": stream.num_compressions, "cap": CAP}
    yield {**counts, "dtype": options.dtype, **_over_time(steps)}


def _over_time(steps: list[tuple[int, int, int, float, float]]) -> dict[str, Any]:
    """Measure steps of a stream: cache bytes and tokens, resident memory, speed by wall clock and by CPU time."""
    nbytes, lengths, resident, wall, busy = ([step[column] for step in steps] for column in range(5))
    tenth = len(steps) // 10
    return {
        "sizes": sorted(set(nbytes)), "longest": max(lengths), "resident": resident, "wall": wall, "busy": busy,
        "first": mean(wall[:tenth]), "last": mean(wall[-tenth:]),
        "first_busy": mean(busy[:tenth]), "last_busy": mean(busy[-tenth:]),
    }  # fmt: skip


def passkeys(options: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    model = _model(options)
    for seed in range(options.seeds):
        for haystack, length, methods in KEYS:
            for depth in DEPTHS:
                number = random.Random(f"{haystack} {length} {depth} {seed}").randrange(10_000, 100_000)
                text = with_passkey(model.tokenizer, haystack, length, depth, number)
                for method in methods:
                    row = {"haystack": haystack, "length": length, "depth": depth, "seed": seed, "way": method}
                    if _key(row) not in done:
                        answer = _kept(model, text, method).ask(QUESTION, 6)
                        yield {**row, "right": answer.strip() == str(number), "cap": KEYS_CAP, "dtype": options.dtype}


def _kept(model: Model, text: list[int], way: str) -> TextStream:
    if way == "everything":
        stream = TextStream(model, len(text) + 64, keep=1, reserved=64)
    else:
        stream = TextStream(model, KEYS_CAP, method=WAYS.get(way))
    stream.push(text[-(stream.capacity - stream.reserved) :] if way == "truncation" else text)
    return stream


def shares(options: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    model = _model(options)
    for number in range(options.texts):
        start = random.Random(f"alpha {number}").randrange(200_000)
        ids = drawn_text(model.tokenizer, "test", start, BEFORE + AFTER)
        before, after = ids[:BEFORE], ids[BEFORE:]
        for method in ("everything", "truncation", *(f"alpha {alpha:g}" for alpha in ALPHAS)):
            if _key({"number": number, "way": method}) in done:
                continue
            if method == "everything":
                stream = TextStream(model, BEFORE + AFTER + 64, keep=1, reserved=AFTER + 64)
            else:
                rule = InfiniPot(alpha=float(method.split()[1])) if method != "truncation" else None
                stream = TextStream(model, CAP, method=rule)
            stream.push(before[-(CAP - stream.reserved) :] if method == "truncation" else before)
            loss = float(F.cross_entropy(stream.logits(after).float(), torch.tensor(after)))
            yield {"number": number, "way": method, "loss": loss, "cap": CAP, "dtype": options.dtype}


def video(_: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    network = small_network(0)
    for rule in (InfiniPotV(), InfiniPotV(pooling=True), RecentFrames(), UniformFrames()):
        name = rule.name + (", pooled" if getattr(rule, "pooling", False) else "")
        if _key({"rule": name}) in done:
            continue
        stream, steps = VideoStream(network, max_frames=32, keep_frames=24, rule=rule), []
        for start in range(0, FRAMES, FRAME_STEP):
            frames = film(start, FRAME_STEP, 0)
            wall, busy = time.perf_counter(), time.process_time()
            stream.push(frames)
            wall, busy = time.perf_counter() - wall, time.process_time() - busy
            steps.append((stream.nbytes, stream.length, _resident(), FRAME_STEP / wall, FRAME_STEP / busy))
        counts = {"frames": FRAMES, "seen": stream.num_seen, "num_compressions": stream.num_compressions}
        yield {"rule": name, **counts, **_over_time(steps)}


_RUNS = {"stream": long_stream, "passkey": passkeys, "alpha": shares, "video": video}


def _resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# The page


def _text(rows: list[dict[str, Any]]) -> str:
    text = "# Streams in bounded memory\n"
    pages = {"stream": _stream_page, "passkey": _passkey_page, "alpha": _alpha_page, "video": _video_page}
    for part in PARTS:
        if part_rows := [row for row in rows if row["part"] == part]:
            text += f"\n{pages[part](part_rows)}\n"
    return text


def _stream_page(rows: list[dict[str, Any]]) -> str:
    row = rows[0]
    resident = [size / 2**20 for size in row["resident"]]
    tenths = [resident[len(resident) * tenth // 10 - 1] for tenth in range(1, 11)]
    sizes = ", ".join(f"{size:,}" for size in row["sizes"])
    return (
        f"## {row['tokens']:,} tokens of WikiText-2 through a cache of {row['cap']}\n\n"
        f"SmolLM2-135M in {row['dtype']} on one thread, {shared_keep(row['cap'])}. After every {STEP:,} tokens the "
        f"stream used {sizes} bytes and at most {row['longest']} tokens; it was compressed "
        f"{row['num_compressions']} times. Tokens per second of CPU time: {row['first_busy']:.0f} in the first "
        f"tenth, {row['last_busy']:.0f} in the last; by wall clock, on a shared machine, {row['first']:.0f} and "
        f"{row['last']:.0f}. Resident memory of the process in MiB after each tenth: "
        f"{', '.join(f'{size:.0f}' for size in tenths)}."
    )


def shared_keep(cap: int) -> str:
    return f"compressed to {cap // 2}, {cap // 8} reserved for questions"


def _passkey_page(rows: list[dict[str, Any]]) -> str:
    cells = []
    for haystack, length, method in dict.fromkeys((row["haystack"], row["length"], row["way"]) for row in rows):
        method_rows = [
            row for row in rows if (row["haystack"], row["length"], row["way"]) == (haystack, length, method)
        ]
        by_depth = [[float(row["right"]) for row in method_rows if row["depth"] == depth] for depth in DEPTHS]
        figures = [f"{mean(right):.2f}" if right else "" for right in by_depth]
        overall = mean([mean(right) for right in by_depth if right])
        cells.append([haystack, f"{length:,}", method, f"{len(method_rows)}", *figures, f"{overall:.2f}"])
    cap = rows[0]["cap"]
    return (
        f"## A passkey\n\nSmolLM2-135M in {rows[0]['dtype']}, trained on 8,192 tokens; a cache of {cap}, "
        f"{shared_keep(cap)}. A number is stated twice at some depth of a text and asked for at its end; the share "
        "of correct answers.\n\n"
        + table(["text", "tokens", "method", "texts", *(f"depth {depth:.0%}" for depth in DEPTHS), "mean"], cells)
    )


def _alpha_page(rows: list[dict[str, Any]]) -> str:
    cap, methods = rows[0]["cap"], list(dict.fromkeys(row["way"] for row in rows))
    by_method = {method: {row["number"]: row["loss"] for row in rows if row["way"] == method} for method in methods}
    texts = set.intersection(*(set(losses) for losses in by_method.values()))  # read by all configurations
    cells = [[method, f"{math.exp(mean([by_method[method][number] for number in texts])):.2f}"] for method in methods]
    return (
        f"## The share kept for novelty\n\nPerplexity of {AFTER} tokens after {BEFORE:,} of WikiText-2, {len(texts)} "
        f"texts, SmolLM2-135M in {rows[0]['dtype']}; a cache of {cap}, {shared_keep(cap)}; truncation sees the last "
        f"{cap - cap // 8} tokens.\n\n" + table(["method", "perplexity"], cells)
    )


def _video_page(rows: list[dict[str, Any]]) -> str:
    cells = [[
        row["rule"], f"{row['frames']:,}", f"{row['num_compressions']}",
        ", ".join(f"{size:,}" for size in row["sizes"]),
        f"{row['longest']:,}", f"{row['first_busy']:.0f}", f"{row['last_busy']:.0f}",
        f"{row['resident'][len(row['resident']) // 10] / 2**20:.0f}", f"{row['resident'][-1] / 2**20:.0f}",
    ] for row in rows]  # fmt: skip
    headings = ["rule", "frames", "compressions", "bytes", "max tokens", "frames/s, first tenth", "last tenth"]
    return (
        "## Frames\n\nA Qwen2-VL with random weights (4 layers, width 64, float32), which merges frames in pairs of 16 "
        "tokens; a cache of 32 pairs, compressed to 24; frames of 56 x 56 pixels with a still background and a moving "
        "square. Speed by CPU time; resident memory of the process.\n\n"
        + table([*headings, "MiB, first tenth", "end"], cells)
    )


if __name__ == "__main__":
    main()
