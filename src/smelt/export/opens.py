"""Which other programs open a model, and by which export; a plan asks before the weights exist."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from smelt.errors import FormatError
from smelt.export.compressed_tensors import CompressedTensors
from smelt.export.gguf import Gguf
from smelt.models.artifact import layer_fields
from smelt.models.carved_experts import carved_routes_of
from smelt.models.implants import implants_of
from smelt.models.model import Model
from smelt.models.program_network import ProgramNetwork
from smelt.models.quantized import quantized_layers
from smelt.models.token_pruning import token_pruning_of


@dataclass(frozen=True)
class Opener:
    """A program that opens the model: its own folder, or what `smelt export --to` writes."""

    program: str
    export: str | None = None

    def __str__(self) -> str:
        return self.program if self.export is None else f"{self.program} (smelt export --to {self.export})"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def opens_in(model: Model) -> list[Opener]:
    """Return the programs that open a model; its weights may be on the meta device.

    transformers is tested with the result; vLLM reads the same folders. Of values that only the weights show, such as
    scales that GGUF must represent exactly, the export itself is the judge.
    """
    openers = [Opener("Smelt")]
    if (
        isinstance(model.network, ProgramNetwork)
        or token_pruning_of(model.network) is not None
        or implants_of(model.anatomy)
        or carved_routes_of(model.network) is not None
    ):
        return openers
    if type(model.network).__module__.startswith("smelt."):  # an architecture of Smelt's own
        return openers
    export = None
    if quantized_layers(model.network):
        export = CompressedTensors.name if _accepts(CompressedTensors(), model) else None
        plain = export is not None
    else:
        plain = "per_layer_config" not in layer_fields(model.anatomy)
    if plain:
        programs = ("transformers", "vLLM") if model.task == "language" else ("transformers",)
        openers += [Opener(program, export) for program in programs]
    if _accepts(Gguf(), model):
        openers.append(Opener("llama.cpp", Gguf.name))
    return openers


def _accepts(export: CompressedTensors | Gguf, model: Model) -> bool:
    try:
        export.check(model)
    except FormatError:
        return False
    return True
