"""Tokens per second through HTTP with one, two and four API processes, against the engine alone.

    PYTHONPATH=src:benchmarks:. python benchmarks/serve/front_end.py [--device cuda] [--processes 1 2 4] [--streams 256]

The model has random weights and few layers, so that the engine is faster than the HTTP front end: what is measured is
the server, not the network. Its vocabulary and tokenizer are those of SmolLM2-135M. Clients are processes of their own
that keep `--streams` streams of completions open and count the events that arrive within `--seconds`: a process that
cannot keep up sends several tokens in one event. The engine alone runs the same requests in this process, without any
messages. CPU time per token is that of the API processes, as counted by the system.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers as hf
from common import table, write
from tests.serve.server_process import Server, start

from smelt.models.load import load, resolve
from smelt.models.tokenizer import load_tokenizer_only
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams

CLIENTS = 8  # processes that read streams
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 1024
WARMUP_SECONDS = 4.0
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", default="smollm2-135m", help="model whose tokenizer and vocabulary are used")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--name", default="serve_front_end", help="of the results file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", options)
        rows = [{"processes": 0, "tokens_per_second": engine_alone(model, options)}]
        print(rows[-1], flush=True)
        for count in options.processes:
            rows.append({"processes": count, **through_http(model, Path(folder), count, options)})
            print(rows[-1], flush=True)
    write(options.name, rows, text(rows, options))


def write_model(folder: Path, options: argparse.Namespace) -> Path:
    tokenizer = load_tokenizer_only(resolve(options.tokenizer))
    assert tokenizer is not None
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(options.hidden // 256, 1), max_position_embeddings=4096, tie_word_embeddings=True,
        dtype=torch.bfloat16 if options.device == "cuda" else torch.float32,
    )  # fmt: skip
    hf.LlamaForCausalLM(config).to(config.dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prompt(stream: int) -> list[int]:
    return [1000 + (stream * PROMPT_TOKENS + position) % 40_000 for position in range(PROMPT_TOKENS)]


def engine_alone(model: Path, options: argparse.Namespace) -> float:
    """Return the tokens per second of the engine in this process, with a new request for each that has ended."""
    engine = Engine(load(str(model), device=options.device), max_num_seqs=options.streams)
    engine.warmup()
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=1.0, ignore_eos=True)
    for stream in range(options.streams):
        engine.submit(prompt(stream), sampling)
    tokens, begun, measuring = 0, time.monotonic(), False
    while time.monotonic() - begun < (options.seconds if measuring else WARMUP_SECONDS) or not measuring:
        if not measuring and time.monotonic() - begun >= WARMUP_SECONDS:
            tokens, begun, measuring = 0, time.monotonic(), True
        for event in engine.step():
            tokens += event.token is not None
            if event.reason:
                engine.submit(prompt(tokens), sampling)
    return tokens / (time.monotonic() - begun)


def through_http(model: Path, folder: Path, count: int, options: argparse.Namespace) -> Row:
    flags = ("--device", options.device, "--max-num-seqs", str(options.streams), "--api-server-count", str(count))
    begun = time.monotonic()
    server = start(model, folder, *flags, threads=os.cpu_count())
    ready = time.monotonic() - begun
    try:
        context = multiprocessing.get_context("spawn")
        pipes, clients = [], []
        for client in range(CLIENTS):
            ours, theirs = context.Pipe()
            streams = range(client, options.streams, CLIENTS)
            clients.append(context.Process(target=read_streams, args=(server.url, streams, theirs), daemon=True))
            clients[-1].start()
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()  # all its streams have begun
        time.sleep(WARMUP_SECONDS)
        api = _api_processes(server, count)
        cpu, state, events = cpu_seconds(api), server.state(), _ask(pipes)
        measured = time.monotonic()
        time.sleep(options.seconds)
        events_after, state_after, cpu_after = _ask(pipes), server.state(), cpu_seconds(api)
        seconds = time.monotonic() - measured
        tokens = state_after["generated_tokens"] - state["generated_tokens"]
        for process in clients:
            process.terminate()
            process.join()
        return {
            "tokens_per_second": tokens / seconds, "events_per_second": (events_after - events) / seconds,
            "running": state_after["running"], "cpu_us_per_token": 1e6 * (cpu_after - cpu) / max(tokens, 1),
            "start_s": ready,
        }  # fmt: skip
    finally:
        server.end(signal.SIGTERM)


def _api_processes(server: Server, count: int) -> list[int]:
    if count == 1:
        return [server.process.pid]
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if "api_process" in Path(f"/proc/{child}/cmdline").read_text()]


def cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _ask(pipes: list[Connection]) -> int:
    """Return how many events all clients have read."""
    for pipe in pipes:
        pipe.send(None)
    return sum(pipe.recv() for pipe in pipes)


def read_streams(url: str, streams: range, pipe: Connection) -> None:
    """Keep one request per stream open, and count the events that arrive; report the count whenever asked."""
    import selectors

    host, port = url.removeprefix("http://").split(":")
    selector, begun, count = selectors.DefaultSelector(), set(), 0

    def send(stream: int) -> None:
        body = json.dumps({
            "prompt": prompt(stream), "max_tokens": OUTPUT_TOKENS, "temperature": 1.0, "ignore_eos": True,
            "stream": True,
        })  # fmt: skip
        connection = socket.create_connection((host, int(port)))
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, stream)

    for stream in streams:
        send(stream)
    selector.register(pipe, selectors.EVENT_READ, None)
    announced = False
    while True:
        for key, _ in selector.select():
            if key.data is None:
                pipe.recv()
                pipe.send(count)
                continue
            assert isinstance(key.fileobj, socket.socket)
            content = key.fileobj.recv(1 << 16)
            count += content.count(b"data: {")
            begun.add(key.data)
            if not content:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                send(key.data)
        if not announced and len(begun) == len(streams):
            announced = True
            pipe.send(None)


def text(rows: list[Row], options: argparse.Namespace) -> str:
    cells = [
        [
            "the engine alone" if not row["processes"] else f"{row['processes']}", f"{row['tokens_per_second']:,.0f}",
            f"{row['events_per_second']:,.0f}" if "events_per_second" in row else "",
            f"{row['cpu_us_per_token']:.0f}" if "cpu_us_per_token" in row else "",
            f"{row['start_s']:.0f}" if "start_s" in row else "",
        ]
        for row in rows
    ]  # fmt: skip
    headings = ["API processes", "tokens/s", "events/s at the clients", "CPU time per token, us", "start, s"]
    return (
        f"# The HTTP front end\n\n{options.streams} streams of {PROMPT_TOKENS} and {OUTPUT_TOKENS} tokens, "
        f"{options.layers} layers of width {options.hidden} with random weights, {CLIENTS} client processes, "
        f"{os.cpu_count()} cores. A process that cannot keep up sends several tokens in one event.\n\n"
        + table(headings, cells)
    )


if __name__ == "__main__":
    main()
