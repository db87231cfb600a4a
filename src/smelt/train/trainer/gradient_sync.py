"""Which compressor a run uses, from words or keys, and what its steps send, whether it has one or not."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import yaml
from torch.nn.parallel import DistributedDataParallel

from smelt.config import as_number, suggest
from smelt.errors import ConfigError
from smelt.train.gradients.autotune.auto import Auto, AutoCompression
from smelt.train.gradients.compression import Compression
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors import COMPRESSORS, DGC, compressor_named
from smelt.train.gradients.ddp import compress_gradients
from smelt.train.gradients.dense import Dense
from smelt.train.gradients.settings import Settings
from smelt.train.gradients.traffic import Traffic
from smelt.train.trainer.clock import PhaseTimer

NONE, BF16 = "none", "bf16"
_METHODS = (NONE, Auto.name, BF16, *COMPRESSORS)


def normalize_gradients(given: str | dict[str, Any] | None) -> dict[str, Any]:
    """`exdyna:density=0.001,blocks=64`, or the same as keys with the name under `method`: as keys."""
    if given is None:
        return {"method": NONE}
    if isinstance(given, str):
        name, _, parameters = given.partition(":")
        pairs = [pair.partition("=") for pair in parameters.split(",") if pair.strip()]
        for key, equals, value in pairs:
            if not equals or not value.strip():
                raise ConfigError(f"gradients is written as exdyna:density=0.001,blocks=64; {key!r} has no value.")
        given = {"method": name.strip(), **{key.strip(): yaml.safe_load(value) for key, _, value in pairs}}
    method = given.get("method")
    if method not in _METHODS:
        raise ConfigError(f"there is no way {method!r:.80} to send gradients{suggest(method, list(_METHODS))}")
    return {key: value if key == "method" else as_number(value) for key, value in given.items()}


def build_compressor(given: str | dict[str, Any] | None) -> Compressor | None:
    """None: plain DDP."""
    parameters = normalize_gradients(given)
    method = parameters.pop("method")
    if method == Auto.name:
        return _auto(parameters)
    if method in (NONE, BF16):
        if parameters:
            raise ConfigError(f"gradients: {method} has no parameter {next(iter(parameters))!r:.80}.")
        return None if method == NONE else Dense(values="bfloat16")
    return compressor_named(method, **parameters)


def _auto(parameters: dict[str, Any]) -> Auto:
    names = [field.name for field in fields(Auto)]
    for key, value in parameters.items():
        if key not in names:
            raise ConfigError(f"auto has no parameter {key!r:.80}{suggest(key, names)}")
        kind = {"density": (int, float), "steps": (int,), "methods": (list, tuple)}[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{key} of auto cannot be {value!r:.80}.")
    if "methods" in parameters:
        parameters["methods"] = tuple(str(name) for name in parameters["methods"])
    return Auto(**parameters)


def require_no_second_momentum(compressor: Compressor | None, optimizer_has: bool) -> None:
    """DGC's velocity is the momentum; an optimiser's own would be applied on top of it."""
    if isinstance(compressor, DGC) and compressor.momentum > 0 and optimizer_has:
        raise ConfigError(
            "dgc has a momentum of its own; use the optimizer sgd with momentum 0, or dgc:momentum=0 with any other."
        )


class GradientSync:
    """What sends the gradients of a model in DDP: a compressor, or DDP itself."""

    def __init__(
        self,
        model: DistributedDataParallel,
        compressor: Compressor | None,
        settings: Settings,
        vector_mb: float | None,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        clock: PhaseTimer,
    ) -> None:
        self._elements = sum(each.numel() for each in model.parameters() if each.requires_grad)
        self._workers = torch.distributed.get_world_size()
        self.compression: Compression | None = None
        if compressor is not None:
            self.compression = compress_gradients(
                model, compressor, settings, vector_mb=vector_mb, optimizer=optimizer, scaler=scaler
            )
            self.compression.around = lambda: clock.phase("reduce")

    def settle(self) -> None:
        """Read what the last step left to be read late."""
        if self.compression is not None:
            self.compression.settle()

    @property
    def traffic(self) -> Traffic:
        """Of the last step, on this worker; of plain DDP by the arithmetic of a ring, in float32."""
        if self.compression is not None:
            return self.compression.traffic
        values = 2 * (self._workers - 1) * 4 * self._elements // self._workers
        return Traffic(values=values, elements=self._elements, target=self._elements, chosen=self._elements)

    @property
    def decision(self) -> dict[str, Any] | None:
        """Of `auto`, once it is made, in this process."""
        made = self.compression.decision if isinstance(self.compression, AutoCompression) else None
        return None if made is None else made.to_json()
