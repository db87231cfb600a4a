"""How a run synchronizes gradients: by plain DDP, or by a compressor that is configured as a string or as keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from smelt.config import parse, suggest
from smelt.errors import ConfigError
from smelt.strict_yaml import load_yaml
from smelt.train.gradients.autotune.auto import Auto, AutoCompression
from smelt.train.gradients.comm import Traffic
from smelt.train.gradients.compression import BucketedCompression
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors import COMPRESSORS, DGC, create_compressor
from smelt.train.gradients.ddp import compress_gradients
from smelt.train.gradients.dense import Dense
from smelt.train.gradients.settings import CompressionSettings
from smelt.train.timing import PhaseTimer

NONE, BF16 = "none", "bf16"
_METHODS = (NONE, Auto.name, BF16, *COMPRESSORS)


def normalize_gradients(spec: str | dict[str, Any] | None) -> dict[str, Any]:
    """Turn `exdyna:density=0.001,blocks=64` into keys, the method's name under `method`."""
    if spec is None:
        return {"method": NONE}
    if isinstance(spec, str):
        name, _, parameters = spec.partition(":")
        pairs = [pair.partition("=") for pair in parameters.split(",") if pair.strip()]
        for key, equals, value in pairs:
            if not equals or not value.strip():
                raise ConfigError(f"gradients has the form exdyna:density=0.001,blocks=64; {key!r} has no value.")
        spec = {"method": name.strip(), **{key.strip(): load_yaml(value) for key, _, value in pairs}}
    method = spec.get("method")
    if method not in _METHODS:
        raise ConfigError(f"there is no gradient method {method!r:.80}{suggest(method, list(_METHODS))}")
    return dict(spec)


def build_compressor(spec: str | dict[str, Any] | None) -> Compressor | None:
    """Build the compressor of a run; None: plain DDP."""
    parameters = normalize_gradients(spec)
    method = parameters.pop("method")
    if method == Auto.name:
        return parse(Auto, parameters, "auto", noun="parameter")
    if method in (NONE, BF16):
        if parameters:
            raise ConfigError(f"gradients: {method} has no parameter {next(iter(parameters))!r:.80}.")
        return None if method == NONE else Dense(wire_dtype="bfloat16")
    return create_compressor(method, **parameters)


def check_single_momentum(compressor: Compressor | None, optimizer_has_momentum: bool) -> None:
    """Refuse DGC, whose velocity is the momentum, with an optimizer that applies another one on top."""
    if isinstance(compressor, DGC) and compressor.momentum > 0 and optimizer_has_momentum:
        raise ConfigError(
            "dgc has a momentum of its own; use the optimizer sgd with momentum 0, or dgc:momentum=0 with any other."
        )


class GradientSync:
    """Synchronizes the gradients of a DDP model by a compressor or by DDP itself; one rank without needs neither."""

    def __init__(
        self,
        model: nn.Module,
        compressor: Compressor | None,
        settings: CompressionSettings,
        bucket_cap_mb: float | None,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        timer: PhaseTimer,
    ) -> None:
        self._elements = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self._world_size = torch.distributed.get_world_size()
        self.compression: BucketedCompression | None = None
        if compressor is not None:
            assert isinstance(model, DistributedDataParallel)
            self.compression = compress_gradients(
                model, compressor, settings, bucket_cap_mb=bucket_cap_mb, optimizer=optimizer, scaler=scaler
            )
            self.compression.reduce_context = lambda: timer.phase("reduce")

    def resolve_deferred(self) -> None:
        """Read the deferred status of the last step."""
        if self.compression is not None:
            self.compression.resolve_deferred()

    @property
    def traffic(self) -> Traffic:
        """The traffic of the last step on this rank; for plain DDP computed for a ring in float32."""
        if self.compression is not None:
            return self.compression.traffic
        values = 2 * (self._world_size - 1) * 4 * self._elements // self._world_size
        return Traffic(values=values, numel=self._elements, target_count=self._elements, num_selected=self._elements)

    @property
    def decision(self) -> dict[str, Any] | None:
        """What `auto` decided in this process, if it has."""
        decision = self.compression.decision if isinstance(self.compression, AutoCompression) else None
        return None if decision is None else decision.to_json()
