"""What the routes work with: the model's texts, its engine or its encoder, the queue, the meters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.errors import ModelError, RequestError
from smelt.serve.engine.request import check_tokens
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.server.admission import Admission
from smelt.serve.server.errors import ApiError
from smelt.serve.server.metrics import Meters
from smelt.serve.server.settings import ServerSettings
from smelt.serve.server.supervisor import Supervisor
from smelt.serve.server.tokenization import Texts
from smelt.serve.worker.client import EngineClient, Observer, OtherModelError

if TYPE_CHECKING:
    from smelt.serve.encoder import Encoder

RUNNING = 256  # answers that the engine computes at once, unless told otherwise
Supervise = Callable[[ServerSettings, Observer, dict[str, Any]], Supervisor]  # given the options of the engine


def own_process(settings: ServerSettings, observe: Observer, options: dict[str, Any]) -> Supervisor:
    """One engine, in a process beside the server."""
    client = EngineClient(settings.model, observe=observe, device=settings.device, **options)
    return Supervisor(client, settings.limits)


class Service:
    """One model that is served: a language model by an engine in its own process, or an encoder in a thread."""

    def __init__(self, settings: ServerSettings, supervise: Supervise = own_process) -> None:
        self.settings, self.limits, self._supervise = settings, settings.limits, supervise
        self.name = settings.name or Path(settings.model).name
        self.created = int(time.time())
        self.supervisor: Supervisor | None = None
        self.encoder: Encoder | None = None
        self.context = self.vocabulary = 0
        self.meters: Meters
        self.texts: Texts
        self.admission: Admission

    async def start(self) -> None:
        """Load everything. The engine's process starts first, so that both processes import at the same time."""
        options = {**self.settings.engine, "max_num_seqs": self._running, "max_queued": self._room}
        options["adapters"] = dict(self.settings.adapters)
        supervisor = self._supervise(self.settings, self._observe, options)
        client = supervisor.client
        loading = asyncio.create_task(supervisor.start())
        try:
            await asyncio.sleep(0)  # the process is started here
            tokenizer_of = await asyncio.to_thread(_tokenizers)
            await loading
        except OtherModelError as other:
            await self._start_encoder(other.folder, other.task)
            return
        except BaseException:
            loading.cancel()
            await client.stop(0)
            raise
        self.supervisor, facts = supervisor, supervisor.facts
        self.context, self.vocabulary = facts["context"], facts["vocabulary"]
        tokenizer = await asyncio.to_thread(tokenizer_of, Path(facts["folder"]))
        if tokenizer is None:
            raise ModelError(f"{self.settings.model} has no tokenizer: text cannot be served with it.")
        self._settle(tokenizer, facts["longest"] - 1)
        supervisor.meters = self.meters
        self.meters.observe_engine(client.state)

    async def _start_encoder(self, path: str, task: str) -> None:
        from smelt.serve.encoder import Encoder

        if task not in ("embedding", "masked-language"):
            raise ModelError(f"{self.settings.model} is for {task}; language models and text encoders can be served.")
        self.encoder = await asyncio.to_thread(Encoder, path, self.settings.device)
        self.context, self.vocabulary = self.encoder.context, self.encoder.vocabulary
        self._settle(self.encoder.tokenizer, self.context)

    @property
    def _running(self) -> int:
        """Answers that an engine computes at once."""
        return int(self.settings.engine.get("max_num_seqs") or RUNNING)

    @property
    def _room(self) -> int:
        """Answers that may be under way or wait."""
        return self._running * self.settings.replicas + self.limits.max_queued

    def _settle(self, tokenizer: Any, longest: int) -> None:
        self.meters = Meters(self.name, self.context)
        self.texts = Texts(tokenizer, longest)
        self.admission = Admission(self._room, self.meters)

    def _observe(self, state: dict[str, int]) -> None:
        if hasattr(self, "meters"):
            self.meters.observe_engine(state)

    @property
    def client(self) -> EngineClient:
        """The engine, where there is one."""
        if self.supervisor is None:
            raise ApiError(400, f"{self.name} is an encoder and generates no text; use /v1/embeddings.", param="model")
        return self.supervisor.client

    @property
    def trouble(self) -> str:
        """Why this server is of no use at the moment; empty when all is well."""
        if self.admission.closed:
            return "the server is shutting down."
        return self.supervisor.trouble if self.supervisor is not None else ""

    @property
    def names(self) -> list[str]:
        """What clients may call: the model, and each of its adapters."""
        return [self.name, *self.settings.adapters]

    def adapter_of(self, asked: str | None) -> str | None:
        return asked if asked in self.settings.adapters else None

    def check_model(self, asked: str | None) -> None:
        if asked not in (None, "", *self.names):
            told = f"this server has no model of that name; it serves {', '.join(self.names)}."
            raise ApiError(404, told, param="model", code="model_not_found")

    def check_prompt(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        if not prompt:
            raise ApiError(400, "the prompt is empty; give at least one token.", param="prompt")
        wanted = len(prompt) + (sampling.max_tokens or 1)
        if len(prompt) > self.texts.most or wanted > self.context:
            told = (
                f"the prompt has {len(prompt):,} tokens and {sampling.max_tokens or 1:,} are asked for; prompt and "
                f"answer together may have {min(self.context, self.texts.most + 1):,}."
            )
            raise ApiError(400, told, code="context_length_exceeded")
        self.check_tokens(prompt)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        try:
            check_tokens(tokens, self.vocabulary)
        except RequestError as error:
            raise ApiError(400, str(error)) from error

    async def stop(self) -> None:
        if self.supervisor is not None:
            await self.supervisor.client.stop()
        if hasattr(self, "texts"):
            self.texts.close()


def _tokenizers() -> Callable[[Path], Any]:
    """Slow to import, hence not at the top."""
    from smelt.models.tokenizer import tokenizer_of

    return tokenizer_of
