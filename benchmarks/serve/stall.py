"""What one client can do to another: the longest gap in a stream while costly requests arrive.

    PYTHONPATH=src:benchmarks python benchmarks/serve/stall.py [--model smollm2-135m] [--repeat 3]

A bystander streams one answer from `smelt serve` on this machine's CPU and asks for /health every 20 ms. Meanwhile an
attacker sends at once: 4 requests of 256 prompts of 3,960 characters (which leave no room for their answers), 4 chats
of 2,048 messages (longer than the context), 8 schemas of 6,000 values each, 8 nested regular expressions, or 2 prompts
that nearly fill the context. The worst of all repetitions is reported, beside that of an idle server.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import table, write
from tests.serve.server_process import start
from tests.serve.stalls import ATTACKS, Gaps, measure

MAX_MODEL_LEN = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--name", default="serve_stall", help="of the results file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        server = start(options.model, Path(folder), "--max-model-len", str(MAX_MODEL_LEN), threads=os.cpu_count())
        try:
            measure(server.url, None)  # warmup
            for name, attack in ({"idle": None} | ATTACKS).items():
                results = [measure(server.url, attack) for _ in range(options.repeat)]
                rows.append({"meanwhile": name, **_worst(results)})
                print(rows[-1], flush=True)
        finally:
            server.end()
    write(options.name, rows, text(rows, options))


def _worst(results: list[Gaps]) -> dict[str, Any]:
    statuses = sorted({status for result in results for status in result.statuses})
    return {
        "token_gap_s": max(result.token for result in results),
        "health_s": max(result.health for result in results),
        "statuses": statuses,
    }


def text(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    cells = [
        [
            row["meanwhile"], f"{1e3 * row['token_gap_s']:.0f}",
            f"{1e3 * (row['token_gap_s'] - rows[0]['token_gap_s']):+.0f}", f"{1e3 * row['health_s']:.0f}",
            ", ".join(map(str, row["statuses"])),
        ]
        for row in rows
    ]  # fmt: skip
    headings = ["meanwhile", "longest token gap, ms", "against idle, ms", "slowest /health, ms", "statuses"]
    return (
        f"# Stalls\n\n{options.model} on {os.cpu_count()} CPU cores, worst of "
        f"{options.repeat} runs each.\n\n" + table(headings, cells)
    )


if __name__ == "__main__":
    main()
