"""Neural implants of a network: install them, list them, restore them from an artifact.

Works on the meta device, which is how a saved artifact is restored before its weights are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy, Part
from smelt.models.implanted_layers import ImplantedConv2d, ImplantedOutput, ImplantInput, ImplantReader
from smelt.models.quantized_network import replace_module


def unimplantable_reason(anatomy: Anatomy, part: Part) -> str | None:
    """Return why a part cannot have an implant, or None if it can."""
    if part.fixed is not None or not part.units:
        return f"its units {part.fixed}" if part.units else "it has no units left"
    if part.implant is not None:
        return "it has one"
    if part.kind != "channels":
        if part.mixture is not None:
            return "it is an expert of a mixture"
        if anatomy.family.causal or getattr(anatomy.network.config, "is_encoder_decoder", False):
            return "decoders are served by programs that do not know implants"
        return None
    convolution = part.input_projections[0].module
    if not isinstance(convolution, nn.Conv2d) or convolution.groups != 1 or convolution.bias is not None:
        return "it is no plain convolution without bias"
    kernel, same = convolution.kernel_size, tuple(size // 2 for size in convolution.kernel_size)
    if kernel == (1, 1):
        return "it is pointwise itself"
    if any(size % 2 == 0 for size in kernel) or convolution.padding != same or convolution.dilation != (1, 1):
        return "its kernel has no center on its input"
    return None


def implant_channels(network: nn.Module, part: Part, channels: int) -> None:
    """Let a 1x1 convolution compute the last `channels` channels of a part; its weights are the centers of theirs."""
    projection = part.input_projections[0]
    replace_module(network, projection.path, ImplantedConv2d.split(projection.module, channels))


def implant_low_rank(network: nn.Module, part: Part, rank: int) -> ImplantedOutput:
    """Add a low-rank product of the input of a part to its output; return it to have its weights set."""
    reader, output, shared = part.input_projections[0], part.output, ImplantInput()
    options = {"bias": False, "device": output.device, "dtype": output.weight.dtype}
    down = nn.utils.skip_init(nn.Linear, reader.in_features, rank, **options)
    up = nn.utils.skip_init(nn.Linear, rank, output.out_features, **options)
    implanted = ImplantedOutput(output.module, shared, down, up).train(output.module.training)
    for path, module in ((reader.path, ImplantReader(reader.module, shared)), (output.path, implanted)):
        parent, _, name = path.rpartition(".")
        setattr(network.get_submodule(parent), name, module.train(output.module.training))
    return implanted


def implants_of(anatomy: Anatomy) -> list[dict[str, Any]]:
    """Return the implants as plain data, enough to rebuild them."""
    entries: list[dict[str, Any]] = []
    for part in anatomy.parts:
        if isinstance(part.implant, ImplantedConv2d):
            entries.append({"part": part.name, "channels": part.implant.implant.out_channels})
        elif part.implant is not None:
            entries.append({"part": part.name, "rank": part.implant.rank})
    return entries


def restore_implants(anatomy: Anatomy, entries: Any, where: str) -> None:
    """Restore the implants of a freshly built network from the `implants` of a smelt.json, which are checked first."""
    parts = {part.name: part for part in anatomy.parts}
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and entry.get("part") in parts and _fits(parts[entry["part"]], entry)
        for entry in entries
    ):
        raise ModelError(f"{where}: the implants in smelt.json do not fit the parts of this network.")
    if len({entry["part"] for entry in entries}) != len(entries):
        raise ModelError(f"{where}: smelt.json gives a part two implants.")
    for entry in entries:
        part = parts[entry["part"]]
        if (reason := unimplantable_reason(anatomy, part)) is not None:
            raise ModelError(f"{where}: {part.name} of smelt.json cannot have an implant: {reason}.")
        if part.kind == "channels":
            implant_channels(anatomy.network, part, entry["channels"])
        else:
            implant_low_rank(anatomy.network, part, entry["rank"])


def refuse_implants(
    network: PreTrainedModel, what: str, *, kinds: Sequence[type] = (ImplantedConv2d, ImplantedOutput)
) -> None:
    """Raise if a network has implants of these kinds; `what` cannot keep them."""
    path = next((path for path, module in network.named_modules() if isinstance(module, tuple(kinds))), None)
    if path is not None:
        raise ModelError(f"{path} of this model has a neural implant, and {what}; prune with `implant: 0` for that.")


def _fits(part: Part, entry: dict[str, Any]) -> bool:
    if part.kind == "channels":
        channels = entry.get("channels")
        return set(entry) == {"part", "channels"} and type(channels) is int and 0 < channels < part.units
    rank = entry.get("rank")
    # A product of a larger rank than its matrix could be replaced by the matrix.
    return set(entry) == {"part", "rank"} and type(rank) is int and 0 < rank <= part.output.out_features
