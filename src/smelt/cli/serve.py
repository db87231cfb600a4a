"""`smelt serve`: an OpenAI-compatible server of one model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from smelt.cli.output import DeviceOption, ModelArgument, say
from smelt.errors import SmeltError

KeyOption = Annotated[
    Path | None, typer.Option("--api-key-file", metavar="F", help="API keys, one a line; then every route needs one.")
]
NameOption = Annotated[str, typer.Option(help="What clients call the model; by default the last part of MODEL.")]
ContextOption = Annotated[int | None, typer.Option(min=2, help="Tokens of prompt and answer together, at most.")]
CacheOption = Annotated[
    float | None, typer.Option("--cache-gib", min=0.0001, help="Memory for keys and values, in GiB.")
]
RequestsOption = Annotated[int, typer.Option("--batch-requests", min=1, max=4096, help="Answers computed at once.")]
TokensOption = Annotated[int, typer.Option("--batch-tokens", min=1, help="Tokens computed in a step, at most.")]
ReplicasOption = Annotated[
    int, typer.Option(min=1, max=1024, help="Engines, each with a copy of the model; by Ray Serve (smelt[cluster]).")
]
ClusterOption = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Of a Ray cluster that runs; without it replicas are on this machine.")
]
ReplicaCpusOption = Annotated[
    float | None, typer.Option(min=0.1, help="Cores of each replica; by default its share of this machine.")
]
PrefixOption = Annotated[bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Keep what prompts begin with.")]


KvOption = Annotated[
    Path | None,
    typer.Option("--kv", metavar="F", help="A profile by `smelt kv profile`: heads keep as many tokens as it says."),
]
SelectOption = Annotated[
    str, typer.Option("--kv-select", metavar="pages", help="Evict nothing; a token attends to the pages it points to.")
]
BudgetOption = Annotated[
    int, typer.Option("--kv-budget", min=1, metavar="TOKENS", help="With --kv-select: what a token attends to.")
]
CapOption = Annotated[
    int | None,
    typer.Option("--kv-cap", metavar="TOKENS", help="What a request holds, at most; longer texts are distilled."),
]
TypeOption = Annotated[
    str | None,
    typer.Option("--kv-type", metavar="TYPE", help="Of keys and values: model, int8, fp8 or int4; by default as made."),
]
HostOption = Annotated[
    bool,
    typer.Option("--kv-keep-host", help="With --kv-select: pages in the host's memory, the important ones fetched."),
]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="NAME=FOLDER", help="A LoRA adapter that clients may name; may be repeated."),
]


def run(
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="Where to listen; other than this machine only with keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key_file: KeyOption = None,
    name: NameOption = "",
    device: DeviceOption = "cpu",
    context: ContextOption = None,
    cache: CacheOption = None,
    batch_requests: RequestsOption = 256,
    batch_tokens: TokensOption = 2048,
    prefix_cache: PrefixOption = True,
    kv: KvOption = None,
    kv_select: SelectOption = "",
    kv_budget: BudgetOption = 4096,
    kv_keep_host: HostOption = False,
    kv_cap: CapOption = None,
    kv_type: TypeOption = None,
    queue: Annotated[int, typer.Option(min=0, help="Answers that may wait; more are told to come later.")] = 512,
    grace: Annotated[float, typer.Option(min=0, help="Seconds to finish what runs when stopped.")] = 30.0,
    silence: Annotated[float, typer.Option(min=0.5, help="Seconds without a step before the engine is dead.")] = 300.0,
    reader: Annotated[float, typer.Option(min=0.5, help="Seconds after which who does not read is dropped.")] = 30.0,
    adapter: AdapterOption = None,
    devices: Annotated[int, typer.Option(min=1, max=64, help="Over which the model is split.")] = 1,
    replicas: ReplicasOption = 1,
    cluster: ClusterOption = "",
    replica_cpus: ReplicaCpusOption = None,
    restarts: Annotated[int, typer.Option(min=0, help="Of the engine in ten minutes, before giving up.")] = 3,
) -> None:
    try:
        from smelt.serve.server.auth import check_binding, read_keys
        from smelt.serve.server.server import serve
        from smelt.serve.server.settings import Limits, Settings
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("smelt"):
            raise
        raise SmeltError(f"the server needs {error.name}; `pip install 'smelt[serve]'`.") from error
    keys = read_keys(api_key_file) if api_key_file is not None else frozenset()
    check_binding(host, keys)
    engine = {
        "context": context, "cache_bytes": None if cache is None else int(cache * 2**30),
        "batch_requests": batch_requests, "batch_tokens": batch_tokens, "prefix_cache": prefix_cache,
        "devices": devices, "kv": None if kv is None else str(kv),
        **_selected(kv_select, kv_budget, kv_keep_host), "cap": _cap(kv_cap, kv, kv_select), "kv_type": _type(kv_type),
    }  # fmt: skip
    limits = Limits(queue=queue, grace_seconds=grace, silence_seconds=silence, reader_seconds=reader, restarts=restarts)
    say(f"loading {model}")
    settings = Settings(model, name, host, port, keys, device, engine, _adapters(adapter or []), limits, replicas)
    if replicas > 1 or cluster:
        from smelt.serve.cluster.placement import placed
        from smelt.serve.cluster.supervisor import supervised

        placement = placed(replicas, cluster, replica_cpus, device, devices)
        code = serve(settings, partial(supervised, placement))
    else:
        code = serve(settings)
    if code:
        raise typer.Exit(code)


def _selected(what: str, budget: int, keep_host: bool) -> dict[str, Any]:
    """Options of the engine."""
    if what not in ("", "pages"):
        raise SmeltError(f"--kv-select {what!r} cannot be chosen; it is pages.")
    if keep_host and not what:
        raise SmeltError("--kv-keep-host is for --kv-select pages.")
    return {"select": {"token_budget": budget} if what else None, "residence": {} if keep_host else None}


def _cap(tokens: int | None, kv: Path | None, select: str) -> int | None:
    """Refused before a model is loaded, where that is possible."""
    if tokens is not None and (kv is not None or select):
        other = "--kv" if kv is not None else "--kv-select"
        raise SmeltError(f"--kv-cap and {other} are two ways to hold keys and values; give one of them.")
    if tokens is not None and tokens < 1:
        raise SmeltError(f"--kv-cap {tokens} holds nothing; it is a number of tokens, some hundreds or thousands.")
    return tokens


def _type(kind: str | None) -> str | None:
    from smelt.serve.engine.kv_dtype import KINDS

    if kind is not None and kind not in KINDS:
        raise SmeltError(f"--kv-type {kind!r} is unknown; there is {', '.join(KINDS)}.")
    return kind


def _adapters(given: list[str]) -> dict[str, str]:
    found = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not name or not equals or not folder or name in found:
            raise SmeltError(f"--adapter {each!r} is not NAME=FOLDER, or its name is taken.")
        found[name] = folder
    return found
