"""`smelt load-test`: measure latencies, throughput and goodput of a server under load."""

from __future__ import annotations

import math
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smelt.cli.output import JsonOption, SeedOption, console, say, table, write_json
from smelt.errors import SmeltError
from smelt.files import check_writable
from smelt.progress import progress_bars
from smelt.report.load_test import latency_rows, render_load, throughput_rows
from smelt.report.page import write_page

if TYPE_CHECKING:
    from smelt.loadtest.generator import LoadTestResult

_MAX_KEY_LENGTH = 4096


def run(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server, such as http://localhost:8000.")],
    rate: Annotated[
        float, typer.Option("--request-rate", help="Mean requests per second; inf: all at once.")
    ] = math.inf,
    requests: Annotated[int, typer.Option("--num-requests", min=1, max=1_000_000, help="Requests to send.")] = 100,
    burstiness: Annotated[float, typer.Option(help="1: Poisson; less: in bursts; more: evenly.")] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Maximum concurrent requests; others wait in the client.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="By default the first that the server lists.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions, not /v1/completions.")] = False,
    input_length: Annotated[
        str, typer.Option("--input-len", metavar="N|A:B", help="Tokens of a random prompt.")
    ] = "128",
    output_length: Annotated[str, typer.Option("--output-len", metavar="N|A:B", help="Tokens of an answer.")] = "128",
    prompts: Annotated[Path | None, typer.Option(help="JSONL rows with `prompt` or `messages`.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Generate the full length.")] = True,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0: the most likely token.")] = 0.0,
    slo: Annotated[
        list[str] | None, typer.Option(metavar="NAME=MS", help="Goodput objective: ttft, tpot or e2el.")
    ] = None,
    warmups: Annotated[int, typer.Option("--num-warmups", min=0, max=1000, help="Requests before the run.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds per request.")] = 600.0,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the server's API key.")] = None,
    report: Annotated[Path | None, typer.Option("-o", "--report", help="Also write an HTML report.")] = None,
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    from smelt.loadtest.generator import LoadTest, load_test
    from smelt.loadtest.prompts import LengthRange
    from smelt.loadtest.summary import parse_limits, series, timelines_to_json
    from smelt.measure.machine import machine

    if report is not None:
        check_writable(report)
    test = LoadTest(
        url, requests, rate, burstiness, max_concurrency, model, chat, LengthRange.parse(input_length),
        LengthRange.parse(output_length), prompts, ignore_eos, temperature, warmups, timeout, _key(api_key_file), seed,
        parse_limits(slo or []),
    )  # fmt: skip
    # asyncio turns Ctrl-C into a cancellation, which keeps the finished requests, only under Python's own handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with progress_bars() as progress:
        result = load_test(test, progress)
    content: dict[str, Any] = {
        "settings": result.settings,
        "summary": result.summary.to_json(),
        "stopped": result.stopped,
        "created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),  # of the client
    }
    _show(result, content["summary"])
    write_json(json_file, {**content, "requests": timelines_to_json(result.timelines)})
    if report is not None:
        write_page(render_load({**content, "series": series(result.timelines)}), report)
        say(f"{report} was written.")


def _show(result: LoadTestResult, summary: dict[str, Any]) -> None:
    if result.stopped:
        say("stopped; only finished requests are included.")
    settings = result.settings
    title = f"{settings['model']} at {settings['url']}, prompts counted in {settings['input_unit']}"
    console.print(table(title, ["measure", "value"], throughput_rows(summary)))
    headings = ["milliseconds", "mean", "p50", "p90", "p99", "max"]
    console.print(table("latency", headings, latency_rows(summary)))


def _key(path: Path | None) -> str:
    """Read an API key: one line of printable ASCII."""
    if path is None:
        return ""
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SmeltError(f"{path} cannot be read as an API key ({type(error).__name__}).") from error
    if not key or len(key) > _MAX_KEY_LENGTH or not all(32 < ord(letter) < 127 for letter in key):
        raise SmeltError(f"{path} does not contain a key: one line of printable ASCII is expected.")
    return key
