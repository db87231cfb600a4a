"""Load LoRA adapters in PEFT's format.

Only plain LoRA is supported: y = W x + s B (A x), with s = alpha / rank (or alpha / sqrt(rank)). Anything else in the
folder that would change the result is rejected.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from smelt.errors import ModelError
from smelt.models.json_file import read_object
from smelt.models.weights import check_safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# Keys that select another method or change other weights, unless they have these values.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "lora_bias": (None, False),
}
RANK_MULTIPLE = 8  # rows of stacked up factors are aligned for vector loads


@dataclass(frozen=True)
class Factors:
    """The LoRA factors of one layer; the scale is folded into `up`."""

    down: Tensor  # A [rank, in]
    up: Tensor  # s B [out, rank]


class StackedFactors:
    """Buffers for the factors of several adapters, one slot each, of layers that share an input.

    Kernels read them by slot, so they are replaced in place. Ranks are padded with zeros, and a layer that an adapter
    does not change has zeros.
    """

    def __init__(
        self, layers: Sequence[nn.Module], num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        in_features: int = layers[0].in_features  # type: ignore[assignment]
        self.out_features: list[int] = [layer.out_features for layer in layers]  # type: ignore[misc]
        self.rank = -(-max_rank // RANK_MULTIPLE) * RANK_MULTIPLE
        self.down = torch.zeros(num_slots, len(layers) * self.rank, in_features, dtype=dtype, device=device)
        self.up = torch.zeros(num_slots, sum(self.out_features), self.rank, dtype=dtype, device=device)
        self.offsets = torch.tensor(
            [0, *itertools.accumulate(self.out_features)], dtype=torch.int32, device=device
        )  # where each layer starts in the outputs, and the end

    def write(self, slot: int, factors: Sequence[Factors | None]) -> list[Factors | None]:
        """Replace the factors of all layers in a slot; return views of them in the buffers."""
        self.down[slot].zero_()
        self.up[slot].zero_()
        views: list[Factors | None] = []
        downs = self.down[slot].split(self.rank)
        for down, up, given in zip(downs, self.up[slot].split(self.out_features), factors, strict=True):
            if given is None:
                views.append(None)
                continue
            rank = len(given.down)
            view = Factors(down[:rank], up[:, :rank])
            view.down.copy_(given.down)
            view.up.copy_(given.up)
            views.append(view)
        return views


def read_lora(folder: str | Path, network: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Factors]:
    """Read the factors by layer path, checked against the network."""
    folder = Path(folder)
    scale = _scale(read_object(folder / CONFIG), folder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise ModelError(f"{folder} has no {WEIGHTS}; adapters are read from safetensors only.")
    check_safetensors(path)
    tensors = load_file(path)
    pairs = {name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)}
    unexpected = [name for name in tensors if not name.endswith((DOWN, UP)) or name[: -len(DOWN)] not in pairs]
    if unexpected or not pairs or 2 * len(pairs) != len(tensors):
        raise ModelError(
            f"{path} holds more than pairs of low-rank matrices (such as {(unexpected or ['nothing'])[0]})."
        )
    layers = {}
    for name in sorted(pairs):
        layer = name.removeprefix(PREFIX)
        down, up = tensors[name + DOWN].float(), tensors[name + UP].float() * scale
        _check_shapes(network, layer, down, up, path)
        layers[layer] = Factors(down.to(device, dtype), up.to(device, dtype))
    return layers


def _scale(config: dict[str, Any], folder: Path) -> float:
    adapter_type = config.get("peft_type")
    if adapter_type != "LORA":
        raise ModelError(f"{folder} is an adapter of type {adapter_type!r:.40}; only LORA can be served.")
    for key, plain in _PLAIN.items():
        if config.get(key) not in plain:
            raise ModelError(f"{folder} uses {key}, which is not plain LoRA; merge it into the model before serving.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not 1 <= rank <= 4096:
        raise ModelError(f"{folder / CONFIG} has no usable rank and alpha ({rank!r:.40}, {alpha!r:.40}).")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _check_shapes(network: nn.Module, layer: str, down: Tensor, up: Tensor, path: Path) -> None:
    try:
        module: Any = network.get_submodule(layer)
        expected = (module.in_features, module.out_features)
    except AttributeError as error:
        raise ModelError(f"{path} adapts {layer}, which is not a linear layer of this model.") from error
    if down.shape[1] != expected[0] or up.shape[0] != expected[1] or down.shape[0] != up.shape[1]:
        raise ModelError(
            f"{path}: the matrices of {layer} are for {down.shape[1]} inputs and {up.shape[0]} outputs; the model has "
            f"{expected[0]} and {expected[1]}."
        )
