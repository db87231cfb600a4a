"""Two thousand clients against a real server, many of which leave, cancel or read slowly: is every block freed, and
does memory stay flat?

    python benchmarks/serve/robustness.py [--requests 2000] [--out results/robustness.json]

The model is small with random weights, so that the server and not the network is tested.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.serve.clients import run_clients
from tests.serve.server_process import start, write_model

from smelt.measure.machine import machine

WARMUP_REQUESTS = 200
PARTS = 10  # memory is measure after each


def measure(requests: int, concurrency: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        server = start(
            write_model(Path(folder) / "tiny"), Path(folder), "--kv-cache-gib", "0.02", "--client-timeout", "5"
        )
        try:
            asyncio.run(run_clients(server.url, range(10**6, 10**6 + WARMUP_REQUESTS), concurrency))
            server.wait_until_idle(60)
            memory, outcomes, began = [server.resident_bytes()], {}, time.monotonic()
            for part in range(PARTS):
                numbers = range(part * requests // PARTS, (part + 1) * requests // PARTS)
                for name, count in asyncio.run(run_clients(server.url, numbers, concurrency)).items():
                    outcomes[name] = outcomes.get(name, 0) + count
                server.wait_until_idle(60)
                memory.append(server.resident_bytes())
                print(f"{numbers.stop:>6} requests, {memory[-1] / 2**20:.1f} MiB", file=sys.stderr, flush=True)
            state = server.state()
            seconds = time.monotonic() - began
        finally:
            code = server.end()
    return {
        "requests": requests, "concurrency": concurrency, "seconds": round(seconds, 1), "outcomes": outcomes,
        "blocks_used_at_the_end": state["blocks_used"], "admitted_at_the_end": state["admitted"],
        "ended": state["finished"],
        "restarts": state["restarts"], "memory_mib": [round(value / 2**20, 1) for value in memory], "exit_code": code,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "serve_robustness.json")
    arguments = parser.parse_args()
    result = {"machine": machine(), **measure(arguments.requests, arguments.concurrency)}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    wrong = result["outcomes"].get("wrong", 0) or result["blocks_used_at_the_end"] or result["admitted_at_the_end"]
    sys.exit(1 if wrong or result["exit_code"] else 0)


if __name__ == "__main__":
    main()
