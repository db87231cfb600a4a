"""Overhead in front of the engine: how soon a server is ready, and what a streamed token costs its processes.

    PYTHONPATH=benchmarks python benchmarks/serve/server_overhead.py [--starts 3]

Startup is of `smelt serve smollm2-135m`, from the command to the first 200 of /health, with the model in the cache. The
cost is CPU time, as counted by the system, of a small model with random weights, whose network costs next to nothing.
Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx
from common import table, write
from tests.serve.server_process import Server, start, write_model

STREAMS, TOKENS = (1, 16, 64), 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=3)
    options = parser.parse_args()
    starts = [seconds_until_ready("smollm2-135m") for _ in range(options.starts)]
    rows: list[dict[str, Any]] = [{"what": "start", "seconds": starts}]
    with tempfile.TemporaryDirectory() as folder:
        server = start(write_model(Path(folder) / "tiny"), Path(folder), "--kv-cache-gib", "0.1")
        try:
            asyncio.run(streamed(server, 16))  # warmup
            rows += [{"what": "streams", **asyncio.run(streamed(server, streams))} for streams in STREAMS]
        finally:
            server.end()
    write("serve_overhead", rows, _text(rows))


def seconds_until_ready(model: str) -> float:
    command = [sys.executable, "-m", "smelt.cli.main", "serve", model, "--port", "0"]
    begun = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while True:
                log.seek(0)
                output = log.read().decode()
                if "http://" in output:
                    url = "http://" + output.split("http://")[1].split()[0].rstrip(".,/")
                    if httpx.get(f"{url}/health").status_code == 200:
                        return time.monotonic() - begun
                if process.poll() is not None:
                    raise SystemExit(output)
                time.sleep(0.02)
        finally:
            process.terminate()
            process.wait(30)


async def streamed(server: Server, streams: int) -> dict[str, Any]:
    """Stream TOKENS tokens to this many clients at once: tokens per second, and CPU time per token."""
    processes = {"server": server.process.pid, "engine": server.state()["worker"]}
    before, begun = {name: _cpu_seconds(pid) for name, pid in processes.items()}, time.monotonic()
    async with httpx.AsyncClient(timeout=120) as client:
        chunks = await asyncio.gather(*(_answer(client, server.url, number) for number in range(streams)))
    seconds, tokens = time.monotonic() - begun, streams * TOKENS
    cost = {f"{name}_us": 1e6 * (_cpu_seconds(pid) - before[name]) / tokens for name, pid in processes.items()}
    return {"streams": streams, "tokens_per_second": tokens / seconds, "tokens_a_chunk": tokens / sum(chunks), **cost}


async def _answer(client: httpx.AsyncClient, url: str, number: int) -> int:
    """Return the number of chunks of one answer."""
    body = {"prompt": f"client {number}", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    count = 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            count += line.startswith("data: {")
    return count


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _text(rows: list[dict[str, Any]]) -> str:
    starts = rows[0]["seconds"]
    cells = [
        [
            str(row["streams"]), f"{row['tokens_per_second']:,.0f}", f"{row['tokens_a_chunk']:.1f}",
            f"{row['server_us']:.0f}", f"{row['engine_us']:.0f}",
        ]
        for row in rows[1:]
    ]  # fmt: skip
    headings = ["clients", "tokens/s", "tokens per chunk", "server, us per token", "engine process, us per token"]
    return (
        "# Server overhead\n\n"
        f"`smelt serve smollm2-135m` answered after {statistics.median(starts):.1f} s (median of {len(starts)} starts, "
        f"{min(starts):.1f} to {max(starts):.1f}).\n\nStreamed answers of {TOKENS} tokens from a tiny random model "
        "that costs next to nothing; the clients run on the same machine.\n\n" + table(headings, cells)
    )


if __name__ == "__main__":
    main()
