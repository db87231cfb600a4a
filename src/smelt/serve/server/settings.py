"""Options of `smelt serve`, the settings that a server is built from, and the limits of every request.

Nothing here imports torch: the server starts while the engine's process still does.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from smelt.device import resolve_device
from smelt.errors import ConfigError
from smelt.serve.server.access_log import check_access_log
from smelt.serve.server.auth import ApiKey, Keys, check_binding, read_keys
from smelt.serve.server.parsers import AUTO, NONE, REASONING_PARSERS, TOOL_CALL_PARSERS, check_parser_names


@dataclass(frozen=True)
class ServerLimits:
    """Limits checked before the engine sees a request. Timeouts are in seconds."""

    max_body_bytes: int = 4 << 20
    max_header_bytes: int = 32 << 10  # including path and query
    max_connections: int = 4096
    max_sequences: int = 256  # per request: prompts times n
    max_queued: int = 512  # sequences that wait for the engine, over all requests
    header_timeout: float = 20.0  # for the headers of a request to arrive
    body_timeout: float = 60.0
    client_timeout: float = 30.0  # without the client reading a byte: the connection is dropped
    request_timeout: float = 3600.0  # from arrival to the end of the answer
    grammar_timeout: float = 10.0  # for the constraint of a structured output to be compiled
    step_timeout: float = 300.0  # for a step, if the steps before it do not say how long it may take
    heartbeat_timeout: float = 8.0  # without a sign of life from the engine's process: it is killed
    shutdown_timeout: float = 30.0  # for running requests to finish after SIGTERM or SIGINT
    max_restarts: int = 3  # of the engine within `restart_window`, before the server exits
    restart_window: float = 600.0


@dataclass(frozen=True)
class TlsFiles:
    certificate: str  # with its chain
    key: str
    password_file: str | None = None  # of the key


@dataclass(frozen=True)
class ServerSettings:
    """Everything that a running server needs: resolved, with hashed API keys."""

    model: str
    name: str = (
        ""  # in the API, or several with commas; by default the last part of `model`; several, separated by commas
    )
    host: str = "127.0.0.1"
    port: int = 8000
    keys: Keys = field(default_factory=dict)  # by the SHA-256 of each API key; if empty, none is required
    device: str = "cpu"
    engine: dict[str, Any] = field(default_factory=dict)  # fields of EngineConfig and KVCacheConfig
    adapters: dict[str, str] = field(default_factory=dict)  # LoRA adapters: folders by name
    limits: ServerLimits = ServerLimits()
    replicas: int = 1
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    root_path: str = ""  # prefix of all paths, as clients of a proxy see them
    allowed_origins: tuple[str, ...] = ()  # of pages of other sites (CORS)
    tls: TlsFiles | None = None
    access_log: str = ""  # a file, or - for standard output
    otlp_endpoint: str = ""
    allow_lora_updates: bool = False
    lora_roots: tuple[str, ...] = ()  # folders that adapters may be loaded from
    enable_sleep_mode: bool = False
    api_server_count: int = 1  # processes that serve HTTP

    @property
    def served_names(self) -> list[str]:
        """The model's name in the API, and its other names."""
        names = dict.fromkeys(name for part in self.name.split(",") if (name := part.strip()))
        return [*names] or [Path(self.model).name]

    def to_json(self) -> dict[str, Any]:
        """Return the settings for another process."""
        return {**dataclasses.asdict(self), "keys": {key.hex(): vars(options) for key, options in self.keys.items()}}

    @staticmethod
    def from_json(content: dict[str, Any]) -> ServerSettings:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
        }
        values["keys"] = {bytes.fromhex(key): ApiKey(**options) for key, options in content["keys"].items()}
        values["limits"] = ServerLimits(**content["limits"])
        values["tls"] = None if content["tls"] is None else TlsFiles(**content["tls"])
        return ServerSettings(**values)


def _option(default: Any, description: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"description": description, **metadata})


@dataclass(frozen=True)
class ServeConfig:
    """Options of `smelt serve`: each field is a flag, and a key of the file that --config names."""

    host: str = _option(
        ServerSettings.host, "Address to listen on; any but loopback requires API keys.", panel="Network"
    )
    port: int = _option(
        ServerSettings.port, "Port to listen on; 0: any free one.", minimum=0, maximum=65535, panel="Network"
    )
    api_key_file: str | None = _option(
        None, "API keys, one per line; then every route requires one.", metavar="FILE", panel="Network"
    )
    root_path: str = _option("", "Prefix of all paths behind a proxy, such as /llm.", metavar="PATH", panel="Network")
    allowed_origins: tuple[str, ...] = _option(
        (), "Origin of pages that may call the server (CORS); may be repeated.", metavar="ORIGIN", panel="Network"
    )
    ssl_certfile: str | None = _option(None, "TLS certificate and its chain.", metavar="FILE", panel="Network")
    ssl_keyfile: str | None = _option(None, "Private key of the certificate.", metavar="FILE", panel="Network")
    ssl_keyfile_password_file: str | None = _option(
        None, "Holds the password of the private key.", metavar="FILE", panel="Network"
    )
    access_log: str = _option(
        "", "Log every request as a line of JSON, without its text; -: standard output.", metavar="FILE",
        panel="Network",
    )  # fmt: skip
    otlp_endpoint: str = _option(
        "", "Send OpenTelemetry spans there, such as http://127.0.0.1:4318 (the extra otel).", metavar="URL",
        panel="Network",
    )  # fmt: skip
    api_server_count: int = _option(
        ServerSettings.api_server_count, "Processes that serve HTTP in front of the engine.",
        minimum=1, maximum=64, panel="Network",
    )  # fmt: skip
    served_model_name: str = _option(
        "", "Model name in the API, or several with commas; by default the last part of MODEL.", metavar="NAMES",
        panel="Network",
    )  # fmt: skip
    device: str = _option("auto", "Where to run: auto (a GPU if there is one), cpu or cuda.", panel="Engine")
    max_model_len: int | None = _option(
        None, "Maximum tokens of prompt and answer together.", minimum=2, panel="Engine"
    )
    kv_cache_gib: float | None = _option(None, "Memory of the KV cache in GiB.", minimum=0.0001, panel="KV cache")
    max_num_seqs: int = _option(256, "Maximum sequences in one batch.", minimum=1, maximum=4096, panel="Engine")
    max_num_batched_tokens: int = _option(2048, "Maximum tokens computed in one step.", minimum=1, panel="Engine")
    target_step_seconds: float = _option(
        0.2, "On CPU: seconds that a step with prompts takes while answers wait for it.", minimum=0.01, panel="Engine"
    )
    enable_prefix_caching: bool = _option(True, "Reuse the KV cache of shared prefixes.", panel="KV cache")
    kv_profile: str | None = _option(
        None, "Per-head KV cache budgets written by `smelt kv profile`.", metavar="FILE", panel="KV cache"
    )
    kv_min_tokens: int = _option(
        512, "With --kv-profile or --kv-select: shorter prompts stay complete.", minimum=0, metavar="TOKENS",
        panel="KV cache")  # fmt: skip
    kv_select: Literal["pages"] | None = _option(
        None, "Sparse page attention: evict nothing, attend to few pages.", metavar="pages", panel="KV cache"
    )
    kv_budget: int = _option(
        4096, "With --kv-select: tokens that a token attends to.", minimum=1, metavar="TOKENS", panel="KV cache"
    )
    kv_offload: bool = _option(
        False, "With --kv-select: keep pages in host memory and fetch the important ones.", panel="KV cache"
    )
    kv_token_cap: int | None = _option(
        None, "Maximum tokens a request caches; longer texts are compressed.", metavar="TOKENS", panel="KV cache"
    )
    kv_cache_dtype: Literal["model", "int8", "fp8", "int4", "int3"] | None = _option(
        None, "model, int8, fp8, int4 or int3; by default as the artifact says.", metavar="DTYPE", panel="KV cache"
    )
    expert_slots: int | None = _option(
        None, "Carved experts on the device at a time; by default all of them.", minimum=1, panel="Engine"
    )
    expert_policy: Literal["belady", "lru", "random"] = _option(
        "belady", "With --expert-slots: which expert leaves the device.", metavar="POLICY", panel="Engine"
    )
    expert_prefetch: bool = _option(
        True, "With --expert-slots: load the experts of a step ahead of its layers.", panel="Engine"
    )
    expert_batching: bool = _option(True, "Compute tokens of the same carved experts together.", panel="Engine")
    lm_head_dtype: Literal["int8"] | None = _option(
        None, "int8: quantize the LM head at load; by default as the model has it.", metavar="DTYPE", panel="Engine"
    )
    activation_dtype: Literal["int8"] | None = _option(
        None, "int8: quantize the inputs of 4- and 8-bit layers; by default as the model says.", metavar="DTYPE"
    )
    max_queued: int = _option(
        ServerLimits.max_queued, "Maximum waiting answers; more are refused with status 429.", minimum=0, panel="Limits"
    )
    shutdown_timeout: float = _option(
        ServerLimits.shutdown_timeout,
        "Seconds that running requests get to finish on shutdown.",
        minimum=0,
        panel="Limits",
    )
    step_timeout: float = _option(
        ServerLimits.step_timeout,
        "Seconds that a step may take at most; most steps have a shorter limit, from the steps before.",
        minimum=0.5,
        panel="Limits",
    )
    heartbeat_timeout: float = _option(
        ServerLimits.heartbeat_timeout,
        "Seconds without a sign of life from the engine's process before it is killed.",
        minimum=2,
        panel="Limits",
    )
    client_timeout: float = _option(
        ServerLimits.client_timeout,
        "Seconds after which a client that reads nothing is dropped.",
        minimum=0.5,
        panel="Limits",
    )
    lora_modules: tuple[str, ...] = _option(
        (), "A LoRA adapter served as NAME; may be repeated.", metavar="NAME=FOLDER", panel="Engine"
    )
    tool_call_parser: str = _option(
        AUTO, f"How the model writes tool calls: {', '.join((AUTO, NONE, *TOOL_CALL_PARSERS))}.",
        metavar="NAME", panel="Engine")  # fmt: skip
    reasoning_parser: str = _option(
        AUTO, f"How the model writes its reasoning: {', '.join((AUTO, NONE, *REASONING_PARSERS))}.",
        metavar="NAME", panel="Engine")  # fmt: skip
    allow_lora_updates: bool = _option(
        False, "Let clients load and unload LoRA adapters: /v1/load_lora_adapter.", panel="Engine"
    )
    lora_root: tuple[str, ...] = _option(
        (), "Folder below which such adapters are; may be repeated.", metavar="FOLDER", panel="Engine"
    )
    max_loras: int | None = _option(
        None, "Room for LoRA adapters; by default for --lora-modules, and 8 with --allow-lora-updates.", minimum=1,
        panel="Engine",
    )  # fmt: skip
    max_lora_rank: int | None = _option(None, "Largest rank of LoRA adapters.", minimum=1, panel="Engine")
    enable_sleep_mode: bool = _option(
        False, "Let clients free the engine's memory: /sleep, /wake_up, /is_sleeping.", panel="Engine"
    )
    tensor_parallel_size: int = _option(
        1, "Devices that the model is sharded over.", minimum=1, maximum=64, panel="Engine"
    )
    replicas: int = _option(
        ServerSettings.replicas, "Engines with a copy of the model each, run by Ray Serve (the extra cluster).",
        minimum=1, maximum=1024, panel="Replicas")  # fmt: skip
    ray_address: str = _option(
        "", "A running Ray cluster; by default this machine only.", metavar="ADDRESS", panel="Replicas"
    )
    replica_cpus: float | None = _option(
        None, "Cores per replica; by default an equal share of this machine.", minimum=0.1, panel="Replicas"
    )
    max_restarts: int = _option(
        ServerLimits.max_restarts,
        "Engine restarts within ten minutes before the server exits.",
        minimum=0,
        panel="Limits",
    )

    def resolve(self, model: str) -> ServerSettings:
        """Refuse what cannot work, before the model is loaded; return the settings of its server."""
        keys = read_keys(Path(self.api_key_file)) if self.api_key_file is not None else {}
        check_binding(self.host, keys)
        self._check_network()
        self._check_updates()
        self._check_kv_cache()
        check_parser_names(self.tool_call_parser, self.reasoning_parser)
        values = dataclasses.asdict(self)
        limits = ServerLimits(**{name: values[name] for name in _names(ServerLimits) & values.keys()})
        device = resolve_device(self.device)
        return ServerSettings(
            model, self.served_model_name, self.host, self.port, keys, device, self._engine_fields(),
            _adapter_folders(self.lora_modules), limits, self.replicas, self.tool_call_parser, self.reasoning_parser,
            self.root_path, self.allowed_origins, self._tls(), self.access_log, self.otlp_endpoint,
            self.allow_lora_updates, self.lora_root, self.enable_sleep_mode, self.api_server_count,
        )  # fmt: skip

    def _max_loras(self) -> int | None:
        return max(8, len(self.lora_modules)) if self.allow_lora_updates and self.max_loras is None else self.max_loras

    def _check_updates(self) -> None:
        if self.allow_lora_updates and not self.lora_root:
            raise ConfigError("--allow-lora-updates requires --lora-root, the folder that adapters are loaded from.")
        for folder in self.lora_root:
            if not Path(folder).is_dir():
                raise ConfigError(f"--lora-root {folder} is not a folder.")
        if (self.allow_lora_updates or self.enable_sleep_mode) and (self.replicas > 1 or self.ray_address):
            raise ConfigError("--allow-lora-updates and --enable-sleep-mode work with a single engine, not replicas.")

    def _check_network(self) -> None:
        if self.api_server_count > 1 and (self.replicas > 1 or self.ray_address):
            raise ConfigError("--api-server-count works with a single engine, not replicas; leave one of them out.")
        if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", self.root_path):
            raise ConfigError(f"--root-path {self.root_path!r} must begin with / and not end with it, such as /llm.")
        for origin in self.allowed_origins:
            if not re.fullmatch(r"https?://[a-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:]+\](:[0-9]{1,5})?", origin):
                raise ConfigError(f"--allowed-origins {origin!r} is not an origin such as https://app.example.org.")
        if self.otlp_endpoint and not re.fullmatch(r"https?://\S+", self.otlp_endpoint):
            raise ConfigError(f"--otlp-endpoint {self.otlp_endpoint!r} is not a URL such as http://127.0.0.1:4318.")
        if self.access_log:
            check_access_log(self.access_log)

    def _tls(self) -> TlsFiles | None:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile are given together or not at all.")
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            return None
        return TlsFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password_file)

    def _engine_fields(self) -> dict[str, Any]:
        return {
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "target_step_seconds": self.target_step_seconds,
            "tensor_parallel_size": self.tensor_parallel_size,
            "max_loras": self._max_loras(),
            "max_lora_rank": self.max_lora_rank,
            "kv_cache_bytes": None if self.kv_cache_gib is None else int(self.kv_cache_gib * 2**30),
            "kv_cache_dtype": self.kv_cache_dtype,
            "expert_slots": self.expert_slots,
            "expert_policy": self.expert_policy,
            "expert_prefetch": self.expert_prefetch,
            "expert_batching": self.expert_batching,
            "lm_head_dtype": self.lm_head_dtype,
            "activation_dtype": self.activation_dtype,
            "enable_prefix_caching": self.enable_prefix_caching,
            "kv_profile": self.kv_profile,
            "kv_min_tokens": self.kv_min_tokens,
            "page_selection": {"token_budget": self.kv_budget, "min_tokens": self.kv_min_tokens}
            if self.kv_select
            else None,
            "kv_offload": {} if self.kv_offload else None,
            "kv_token_cap": self.kv_token_cap,
        }

    def _check_kv_cache(self) -> None:
        if self.kv_token_cap is not None and (self.kv_profile is not None or self.kv_select):
            other = "--kv-profile" if self.kv_profile is not None else "--kv-select"
            raise ConfigError(f"--kv-token-cap and {other} cannot be combined; choose one of them.")
        if self.kv_token_cap is not None and self.kv_token_cap < 1:
            raise ConfigError(
                f"--kv-token-cap must be a positive number of tokens, not {self.kv_token_cap}; try some thousands."
            )
        if self.kv_profile is not None and not Path(self.kv_profile).is_file():
            raise ConfigError(f"--kv-profile {self.kv_profile} is not a file; `smelt kv profile` writes one.")
        if self.tensor_parallel_size > 1 and (self.kv_profile or self.kv_select or self.kv_token_cap):
            raise ConfigError("--kv-profile, --kv-select and --kv-token-cap run on one device; use no others.")
        if self.kv_offload and not self.kv_select:
            raise ConfigError("--kv-offload requires --kv-select pages.")


def _names(cls: type) -> set[str]:
    return {each.name for each in fields(cls)}


def _adapter_folders(modules: tuple[str, ...]) -> dict[str, str]:
    folders: dict[str, str] = {}
    for module in modules:
        name, equals, folder = module.partition("=")
        if not name or not equals or not folder:
            raise ConfigError(f"--lora-modules {module!r} is not NAME=FOLDER.")
        if name in folders:
            raise ConfigError(f"--lora-modules names {name!r} twice; give each adapter its own name.")
        folders[name] = folder
    return folders
