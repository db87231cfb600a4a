"""How a quantized layer is stored and computes, as plain data: enough to allocate it before its tensors are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smelt.errors import FormatError, ModelError
from smelt.numerics.catalog import format_name, get_format
from smelt.numerics.format import Format


@dataclass(frozen=True)
class QuantizationScheme:
    """How one layer computes: the formats of its weight and inputs, and the transformation of its inputs."""

    weight: Format
    inputs: Format | None = None
    static: bool = False  # the input scale is fixed; otherwise it is computed per input
    hadamard: bool = False  # the inputs are rotated by a Hadamard matrix, whose inverse is in the weight
    rank: int = 0  # of the low-rank factors added to the output
    clip: float = 1.0  # the fraction of the input range that the grid covers; values outside are clipped

    @property
    def has_static_zero_point(self) -> bool:
        """Whether the inputs have a fixed zero point beside their fixed scale."""
        return self.static and self.inputs is not None and self.inputs.has_integer_zero_point

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"weight": format_name(self.weight)}
        if self.inputs is not None:
            plain |= {"inputs": format_name(self.inputs), "static": self.static}
        if self.hadamard:
            plain["hadamard"] = True
        if self.rank:
            plain["rank"] = self.rank
        if self.clip != 1.0:
            plain["clip"] = self.clip
        return plain

    @classmethod
    def from_json(cls, plain: Any, where: str) -> QuantizationScheme:
        """Parse an untrusted description; raise unless it has the form that `to_json` writes."""
        known = {"weight": str, "inputs": str, "static": bool, "hadamard": bool, "rank": int, "clip": float}
        if not isinstance(plain, dict) or any(type(value) is not known.get(key) for key, value in plain.items()):
            raise ModelError(f"{where}: this is not the description of a quantized layer: {plain!r:.80}.")
        try:
            weight, inputs = get_format(plain.get("weight", "")), plain.get("inputs")
            scheme = cls(weight, None if inputs is None else get_format(inputs), plain.get("static", False))
        except FormatError as error:
            raise ModelError(f"{where}: {error}") from error
        if scheme.static and not _can_be_static(scheme.inputs):
            raise ModelError(f"{where}: a static scale is not possible for inputs in the format {inputs!r:.40}.")
        rank, clip = plain.get("rank", 0), plain.get("clip", 1.0)
        if not 0 <= rank <= 65536:
            raise ModelError(f"{where}: a rank of {rank} is not possible.")
        if not 0 < clip <= 1:
            raise ModelError(f"{where}: inputs cannot be clipped at {clip} of their range.")
        return cls(scheme.weight, scheme.inputs, scheme.static, plain.get("hadamard", False), rank, clip)


def _can_be_static(inputs: Format | None) -> bool:
    return inputs is not None and (inputs.has_scale_only or inputs.has_integer_zero_point)


@dataclass(frozen=True)
class LinearGroupSpec:
    """Linear layers that share an input, without their weights: what decides how fast they are."""

    in_features: int
    out_features: tuple[int, ...]  # of each layer
    bias: bool
    scheme: QuantizationScheme | None  # None: unquantized
    token_share: float = 1.0  # of the tokens of a step; below 1 for the experts of a mixture
    fused_input: bool = True  # a norm or gate produces the input, and may quantize it at no cost
