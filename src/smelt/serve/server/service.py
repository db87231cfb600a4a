"""What the routes share: the tokenizer, the engine or encoder, admission control, metrics."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.errors import ModelError, RequestError
from smelt.serve.engine.request import ANYONE, Tenant, check_prompt, check_tokens
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.server.errors import ApiError, as_api_error
from smelt.serve.server.metrics import ServerMetrics
from smelt.serve.server.parsers import OutputFormat, select_format
from smelt.serve.server.rate_limit import RateLimits
from smelt.serve.server.settings import ServeConfig, ServerSettings
from smelt.serve.server.shared_table import SharedTable
from smelt.serve.server.supervisor import EngineSupervisor, Supervisor
from smelt.serve.server.tokenization import AsyncTokenizer
from smelt.serve.worker.client import EngineClient, EngineConnection, Observer, OtherModelError
from smelt.version import __version__

if TYPE_CHECKING:
    from smelt.serve.encoder import Encoder

FREE_SHARE = 3  # of several keys one alone can hold three quarters of the queue, two 3/7 each, ...
SupervisorFactory = Callable[[ServerSettings, Observer, dict[str, Any]], Supervisor]  # the last: engine options


def supervise_subprocess(settings: ServerSettings, observe: Observer, options: dict[str, Any]) -> EngineSupervisor:
    """Run one engine in a subprocess."""
    client = EngineClient(settings.model, observe=observe, device=settings.device, **options)
    return EngineSupervisor(client, settings.limits, settings.adapters)


class AdmissionControl:
    """Bound the sequences that run and wait, so that the queue cannot grow without limit."""

    def __init__(self, capacity: int, metrics: ServerMetrics, table: SharedTable, keys: Collection[bytes] = ()) -> None:
        self.capacity, self.closed = capacity, False
        self._metrics, self._shared = metrics, len(keys) > 1
        self._columns = {key: column for column, key in enumerate([b"", *keys])}  # without a key: the first
        self._cells = table.allocate(len(self._columns))

    @property
    def admitted(self) -> int:
        """How many sequences run or wait, over all processes."""
        return int(sum(self._cells.totals()))

    def check(self, sequences: int, key: bytes = b"") -> None:
        """Refuse a request for which there is no room now.

        A key may hold at most `FREE_SHARE` times the room that is left (a dynamic threshold, Choudhury and Hahne,
        1998), so that no key, however many requests it sends, fills the queue for the others.
        """
        if self.closed:
            raise ApiError(503, "the server is shutting down.", code="shutting_down")
        if sequences > self.capacity:
            raise ApiError(400, f"the request asks for {sequences:,} answers; at most {self.capacity:,} are accepted.")
        admitted = self.admitted
        if admitted + sequences > self.capacity:
            self._metrics.refused.inc()
            raise ApiError(
                429, f"the queue is full: {admitted:,} answers are running or waiting; try again later.",
                code="queue_full", headers={"retry-after": "1"},
            )  # fmt: skip
        held = int(self._cells.total(self._columns[key])) if self._shared and key else 0
        if held and held + sequences > FREE_SHARE * (self.capacity - admitted):
            self._metrics.refused.inc()
            raise ApiError(
                429, f"{held:,} answers of this API key are running or waiting, and others need room; try again later.",
                code="queue_full", headers={"retry-after": "1"},
            )  # fmt: skip

    def acquire(self, sequences: int, key: bytes = b"") -> None:
        self.check(sequences, key)
        self._cells.own[self._columns[key]] += sequences

    def release(self, sequences: int, key: bytes = b"") -> None:
        self._cells.own[self._columns[key]] -= sequences

    def forget_process(self, row: int) -> None:
        """Release all that a process held when it died."""
        self._cells.clear(row)

    def close(self) -> None:
        """Admit no more requests."""
        self.closed = True


class Service:
    """One served model: a language model run by an engine in a subprocess, or an encoder run in a thread.

    `table` is where the processes of a server share their counts.
    """

    def __init__(
        self, settings: ServerSettings, supervisor_factory: SupervisorFactory = supervise_subprocess,
        table: SharedTable | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.limits, self._supervisor_factory = settings, settings.limits, supervisor_factory
        self._table = table or SharedTable(len(settings.keys))
        self.name, *self.aliases = settings.served_names
        self.created = int(time.time())
        identity = f"{settings.model} {self.name} {__version__}"
        self.system_fingerprint = f"fp_{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        self.supervisor: Supervisor | None = None
        self.encoder: Encoder | None = None
        self.max_model_len = self.vocab_size = 0
        self.metrics: ServerMetrics
        self.tokenizer: AsyncTokenizer
        self.output_format: OutputFormat
        self.admission: AdmissionControl
        self.rate_limits: RateLimits

    async def start(self) -> None:
        """Load everything. The engine's process starts first, so that both processes import in parallel."""
        supervisor = self._supervisor_factory(self.settings, self._observe, engine_options(self.settings))
        client = supervisor.client
        loading = asyncio.create_task(supervisor.start())
        try:
            await asyncio.sleep(0)  # starts the process
            load_tokenizer_only = await asyncio.to_thread(_import_tokenizer_loader)
            await loading
        except OtherModelError as error:
            await self._start_encoder(error.folder, error.task)
            return
        except BaseException:
            loading.cancel()
            await client.stop(0)
            raise
        self.supervisor, engine = supervisor, supervisor.engine
        assert engine is not None
        self.max_model_len, self.vocab_size = engine.max_model_len, engine.vocab_size
        tokenizer = await asyncio.to_thread(load_tokenizer_only, Path(engine.folder))
        if tokenizer is None:
            raise ModelError(f"{self.settings.model} has no tokenizer, which serving needs.")
        self._set_up(tokenizer, engine.max_request_tokens - 1)
        supervisor.count_in(self.metrics, lambda: self.admission.admitted)

    async def _start_encoder(self, path: str, task: str) -> None:
        from smelt.serve.encoder import Encoder

        if task not in ("embedding", "masked-language", "classification"):
            raise ModelError(f"{self.settings.model} is for {task}; language models and text encoders can be served.")
        self.encoder = await asyncio.to_thread(Encoder, path, self.settings.device)
        self.max_model_len, self.vocab_size = self.encoder.max_model_len, self.encoder.vocab_size
        self._set_up(self.encoder.tokenizer, self.max_model_len)

    def _set_up(self, tokenizer: Any, max_prompt_tokens: int) -> None:
        self.metrics, self.admission, self.rate_limits = shared_counts(
            self.settings, self.name, self.max_model_len, self._table
        )
        self.tokenizer = AsyncTokenizer(tokenizer, max_prompt_tokens)
        names = self.settings.tool_call_parser, self.settings.reasoning_parser
        self.output_format = select_format(self.tokenizer.template, self.tokenizer.added_tokens, *names)

    def _observe(self, state: dict[str, int]) -> None:
        if hasattr(self, "metrics"):
            self.metrics.update_engine_state(state)

    def require_supervisor(self) -> Supervisor:
        self.require_engine()
        assert self.supervisor is not None
        return self.supervisor

    def require_engine(self) -> EngineConnection:
        """Return the engine's client; refuse the request if the model is an encoder, which has none."""
        if self.supervisor is None:
            raise ApiError(400, f"{self.name} is an encoder and generates no text; use /v1/embeddings.", param="model")
        return self.supervisor.client

    @property
    def unhealthy_reason(self) -> str:
        """Why requests cannot be served now; empty if healthy."""
        if self.admission.closed:
            return "the server is shutting down."
        return self.supervisor.unhealthy_reason if self.supervisor is not None else ""

    @property
    def names(self) -> list[str]:
        """Names in the API: the model, under all of its names, and each of its adapters."""
        return [self.name, *self.aliases, *self.adapters]

    @property
    def adapters(self) -> Mapping[str, str]:
        """LoRA adapters served now: folders by name."""
        return self.supervisor.adapters if self.supervisor is not None else self.settings.adapters

    def adapter_name(self, model: str | None) -> str | None:
        return model if model in self.adapters else None

    def tenant(self, key: bytes) -> Tenant:
        """Return whom the scheduler counts the requests of a key for; without keys all are one."""
        return Tenant(self.settings.keys[key].name, self.settings.keys[key].weight) if key else ANYONE

    def check_priority(self, key: bytes, priority: int | None) -> None:
        """Refuse a priority of a client whose API key does not allow it; without keys everyone may set one."""
        if priority and key and not self.settings.keys[key].allow_priority:
            message = "this API key may not set a priority; leave it out, or have priority=allow set for the key."
            raise ApiError(403, message, param="priority", code="priority_not_allowed")

    def check_model(self, model: str | None) -> None:
        if model not in (None, "", *self.names):
            message = f"this server has no model of that name; it serves {', '.join(self.names)}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_prompt(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Apply the engine's check here too: after a stream has begun, a status of 400 would come too late.

        A prompt must also fit into the KV cache, which may be smaller than the context; a longer answer ends there.
        """
        max_tokens = max(sampling.max_tokens or 1, 1)
        max_model_len = min(self.max_model_len, self.tokenizer.max_tokens + max_tokens)
        try:
            check_prompt(prompt, max_model_len, self.vocab_size, max_tokens)
        except RequestError as error:
            raise as_api_error(error) from error

    def check_tokens(self, tokens: Sequence[int]) -> None:
        try:
            check_tokens(tokens, self.vocab_size)
        except RequestError as error:
            raise as_api_error(error) from error

    async def stop(self) -> None:
        if self.supervisor is not None:
            await self.supervisor.client.stop()
        if hasattr(self, "tokenizer"):
            self.tokenizer.close()


def engine_options(settings: ServerSettings) -> dict[str, Any]:
    """Return the options of the engine, which bounds its queue as the server does."""
    options = {**settings.engine, "max_num_seqs": _max_num_seqs(settings), "max_queued": _capacity(settings)}
    return {**options, "adapters": dict(settings.adapters)}


def shared_counts(
    settings: ServerSettings, name: str, max_model_len: int, table: SharedTable
) -> tuple[ServerMetrics, AdmissionControl, RateLimits]:
    """Return what the processes of a server count together, allocated in the same order in each of them."""
    metrics = ServerMetrics(name, max_model_len, table)
    admission = AdmissionControl(_capacity(settings), metrics, table, settings.keys.keys())
    return metrics, admission, RateLimits(settings.keys, table)


def _max_num_seqs(settings: ServerSettings) -> int:
    return int(settings.engine.get("max_num_seqs") or ServeConfig.max_num_seqs)


def _capacity(settings: ServerSettings) -> int:
    """Return how many sequences may run or wait, over all replicas."""
    return _max_num_seqs(settings) * settings.replicas + settings.limits.max_queued


def _import_tokenizer_loader() -> Callable[[Path], Any]:
    """Import the tokenizer loader in a thread, since it is slow."""
    from smelt.models.tokenizer import load_tokenizer_only

    return load_tokenizer_only
