"""`smelt serve`: an OpenAI-compatible server of one model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from smelt.cli.output import DeviceOption, ModelArgument, say
from smelt.errors import ConfigError, SmeltError

KeyOption = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="FILE", help="API keys, one per line; then every route requires one."),
]
NameOption = Annotated[
    str, typer.Option("--served-model-name", help="Model name in the API; by default the last part of MODEL.")
]
ContextOption = Annotated[
    int | None, typer.Option("--max-model-len", min=2, help="Maximum tokens of prompt and answer together.")
]
CacheOption = Annotated[float | None, typer.Option("--kv-cache-gib", min=0.0001, help="Memory of the KV cache in GiB.")]
SequencesOption = Annotated[
    int, typer.Option("--max-num-seqs", min=1, max=4096, help="Maximum sequences in one batch.")
]
TokensOption = Annotated[
    int, typer.Option("--max-num-batched-tokens", min=1, help="Maximum tokens computed in one step.")
]
PrefixOption = Annotated[
    bool,
    typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse the KV cache of shared prefixes."),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option("--kv-profile", metavar="FILE", help="Per-head KV cache budgets written by `smelt kv profile`."),
]
SelectOption = Annotated[
    str, typer.Option("--kv-select", metavar="pages", help="Sparse page attention: evict nothing, attend to few pages.")
]
BudgetOption = Annotated[
    int, typer.Option("--kv-budget", min=1, metavar="TOKENS", help="With --kv-select: tokens that a token attends to.")
]
OffloadOption = Annotated[
    bool, typer.Option("--kv-offload", help="With --kv-select: keep pages in host memory and fetch the important ones.")
]
CapOption = Annotated[
    int | None,
    typer.Option(
        "--kv-token-cap", metavar="TOKENS", help="Maximum tokens a request caches; longer texts are compressed."
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-dtype", metavar="DTYPE", help="model, int8, fp8 or int4; by default as the artifact says."
    ),
]
QueueOption = Annotated[
    int, typer.Option("--max-queued", min=0, help="Maximum waiting answers; more are refused with status 429.")
]
ShutdownOption = Annotated[
    float, typer.Option("--shutdown-timeout", min=0, help="Seconds that running requests get to finish on shutdown.")
]
StepOption = Annotated[
    float, typer.Option("--step-timeout", min=0.5, help="Seconds without a finished step before the engine is killed.")
]
ClientOption = Annotated[
    float, typer.Option("--client-timeout", min=0.5, help="Seconds after which a client that reads nothing is dropped.")
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option("--lora-modules", metavar="NAME=FOLDER", help="A LoRA adapter served as NAME; may be repeated."),
]
ParallelOption = Annotated[
    int, typer.Option("--tensor-parallel-size", min=1, max=64, help="Devices that the model is sharded over.")
]
ReplicasOption = Annotated[
    int,
    typer.Option(min=1, max=1024, help="Engines with a copy of the model each, run by Ray Serve (smelt\\[cluster])."),
]
ClusterOption = Annotated[
    str, typer.Option("--ray-address", metavar="ADDRESS", help="A running Ray cluster; by default this machine only.")
]
ReplicaCpusOption = Annotated[
    float | None, typer.Option(min=0.1, help="Cores per replica; by default an equal share of this machine.")
]
RestartsOption = Annotated[
    int, typer.Option("--max-restarts", min=0, help="Engine restarts within ten minutes before the server exits.")
]


def run(
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="Address to listen on; any but loopback requires API keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    api_key_file: KeyOption = None,
    name: NameOption = "",
    device: DeviceOption = "cpu",
    max_model_len: ContextOption = None,
    kv_cache_gib: CacheOption = None,
    max_num_seqs: SequencesOption = 256,
    max_num_batched_tokens: TokensOption = 2048,
    prefix_caching: PrefixOption = True,
    kv_profile: ProfileOption = None,
    kv_select: SelectOption = "",
    kv_budget: BudgetOption = 4096,
    kv_offload: OffloadOption = False,
    kv_token_cap: CapOption = None,
    kv_cache_dtype: DtypeOption = None,
    max_queued: QueueOption = 512,
    shutdown_timeout: ShutdownOption = 30.0,
    step_timeout: StepOption = 300.0,
    client_timeout: ClientOption = 30.0,
    lora_modules: LoraOption = None,
    tensor_parallel_size: ParallelOption = 1,
    replicas: ReplicasOption = 1,
    ray_address: ClusterOption = "",
    replica_cpus: ReplicaCpusOption = None,
    max_restarts: RestartsOption = 3,
) -> None:
    try:
        from smelt.serve.server.auth import check_binding, read_keys
        from smelt.serve.server.server import serve
        from smelt.serve.server.settings import ServerLimits, ServerSettings
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("smelt"):
            raise
        raise SmeltError(f"the server needs {error.name}; `pip install 'smelt[serve]'`.") from error
    keys = read_keys(api_key_file) if api_key_file is not None else frozenset()
    check_binding(host, keys)
    token_cap = _token_cap(kv_token_cap, kv_profile, kv_select)
    engine = {
        "max_model_len": max_model_len, "kv_cache_bytes": None if kv_cache_gib is None else int(kv_cache_gib * 2**30),
        "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "prefix_cache": prefix_caching,
        "tensor_parallel_size": tensor_parallel_size, "kv_profile": _profile(kv_profile),
        **_selection(kv_select, kv_budget, kv_offload), "kv_token_cap": token_cap,
        "kv_cache_dtype": _dtype(kv_cache_dtype),
    }  # fmt: skip
    limits = ServerLimits(
        max_queued=max_queued, shutdown_timeout=shutdown_timeout, step_timeout=step_timeout,
        client_timeout=client_timeout, max_restarts=max_restarts,
    )  # fmt: skip
    settings = ServerSettings(
        model, name, host, port, keys, device, engine, _adapters(lora_modules or []), limits, replicas
    )
    if replicas > 1 or ray_address:
        from smelt.serve.cluster.placement import placed
        from smelt.serve.cluster.supervisor import supervised

        placement = placed(replicas, ray_address, replica_cpus, device, tensor_parallel_size)
        say(f"loading {model}")
        code = serve(settings, partial(supervised, placement))
    else:
        say(f"loading {model}")
        code = serve(settings)
    if code:
        raise typer.Exit(code)


def _profile(path: Path | None) -> str | None:
    """Refuse a missing file before the model is loaded."""
    if path is not None and not path.is_file():
        raise ConfigError(f"--kv-profile {path} is not a file; `smelt kv profile` writes one.")
    return None if path is None else str(path)


def _selection(select: str, budget: int, offload: bool) -> dict[str, Any]:
    """Return the engine options of sparse page attention."""
    if select not in ("", "pages"):
        raise ConfigError(f"--kv-select {select!r} is unknown; the only choice is pages.")
    if offload and not select:
        raise ConfigError("--kv-offload requires --kv-select pages.")
    return {"page_selection": {"token_budget": budget} if select else None, "kv_offload": {} if offload else None}


def _token_cap(tokens: int | None, profile: Path | None, select: str) -> int | None:
    if tokens is not None and (profile is not None or select):
        other = "--kv-profile" if profile is not None else "--kv-select"
        raise ConfigError(f"--kv-token-cap and {other} cannot be combined; choose one of them.")
    if tokens is not None and tokens < 1:
        raise ConfigError(f"--kv-token-cap must be a positive number of tokens, not {tokens}; try some thousands.")
    return tokens


def _dtype(name: str | None) -> str | None:
    from smelt.serve.engine.kv_dtype import KV_CACHE_DTYPES

    if name is not None and name not in KV_CACHE_DTYPES:
        raise ConfigError(f"--kv-cache-dtype {name!r} is unknown; choose one of {', '.join(KV_CACHE_DTYPES)}.")
    return name


def _adapters(modules: list[str]) -> dict[str, str]:
    folders: dict[str, str] = {}
    for module in modules:
        name, equals, folder = module.partition("=")
        if not name or not equals or not folder:
            raise ConfigError(f"--lora-modules {module!r} is not NAME=FOLDER.")
        if name in folders:
            raise ConfigError(f"--lora-modules names {name!r} twice; give each adapter its own name.")
        folders[name] = folder
    return folders
