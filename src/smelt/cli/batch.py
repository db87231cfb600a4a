"""`smelt batch`: answer a file of requests in OpenAI's batch format."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from smelt.cli.output import DeviceOption, ModelArgument, check_device, say
from smelt.errors import SmeltError, install_command
from smelt.files import check_writable
from smelt.serve.server.settings import ServeConfig


def run(
    model: ModelArgument,
    input_file: Annotated[
        Path, typer.Option("--input", "-i", metavar="FILE", help="JSON lines with custom_id, method, url and body.")
    ],
    output_file: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Answers, in the order of the requests.")
    ],
    served_model_name: Annotated[
        str, typer.Option(help="Model name in the requests; by default the last part of MODEL.")
    ] = "",
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens of prompt and answer together.")
    ] = None,
    kv_cache_gib: Annotated[float | None, typer.Option(min=0.0001, help="Memory of the KV cache in GiB.")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, max=4096, help="Maximum sequences in one batch.")] = 256,
    device: DeviceOption = "auto",
) -> None:
    try:
        from smelt.serve.server.batch import read_batch, run_batch
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("smelt"):
            raise
        raise SmeltError(f"a batch needs {error.name}; `{install_command('serve')}`.") from error
    check_device(device)
    if output_file.exists():
        raise SmeltError(f"{output_file} exists already; move it away, or choose another output.")
    check_writable(output_file)
    requests = read_batch(input_file)
    settings = ServeConfig(
        served_model_name=served_model_name, max_model_len=max_model_len, kv_cache_gib=kv_cache_gib,
        max_num_seqs=max_num_seqs, device=device, max_queued=max(512, 2 * max_num_seqs),
    ).resolve(model)  # fmt: skip
    say(f"loading {model}")

    def on_progress(done: int) -> None:
        if done % max(1, len(requests) // 20) == 0:
            say(f"{done:,} of {len(requests):,} requests answered")

    try:
        result = asyncio.run(run_batch(settings, requests, output_file, on_progress))
    except KeyboardInterrupt:
        raise SmeltError(f"stopped; the same command goes on from {output_file}.partial.") from None
    earlier = f", {result.resumed:,} of them by an earlier run" if result.resumed else ""
    say(f"{result.requests:,} requests answered{earlier}; {result.failed:,} failed: {output_file}")
    if result.failed:
        raise typer.Exit(1)
