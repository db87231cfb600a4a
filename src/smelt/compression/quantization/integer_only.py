"""Networks without floating point between input and logits: encoders and decoders as in I-BERT (Kim et al., 2021),
networks of convolutions as in Q-ASR (Kim et al., 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor
from transformers import PreTrainedModel

from smelt.compression.base import METHODS, CalibrationSize, Method, MethodContext, ResourceEstimate, within
from smelt.compression.calibration.ranges import observe_ranges
from smelt.compression.quantization.integer_convolutions import integer_convolutions
from smelt.errors import ConfigError, RecipeError
from smelt.measure.cost import count_bytes
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model
from smelt.numerics.nn_lut import SIZES
from smelt.runtime.integer import decoders, encoders
from smelt.runtime.integer.builder import GraphBuilder
from smelt.runtime.integer.conversion import NewBuilder
from smelt.runtime.integer.convolutions import BitWidths, check_convolutions, is_convolutional
from smelt.runtime.integer.debug import LayerSqnr, layer_sqnr
from smelt.runtime.integer.decoder_network import IntegerDecoder, decoder_inputs
from smelt.runtime.integer.graph import IntegerGraph
from smelt.runtime.integer.network import IntegerNetwork
from smelt.runtime.integer.shift_builder import ShiftBuilder
from smelt.runtime.integer.table_builder import TableBuilder
from smelt.runtime.integer.vision import (
    check_vision,
    convert_vision,
    is_vision_transformer,
    observed_vision_modules,
)

# For the signal-to-noise ratio of every layer.
_DEBUGGED_BATCHES = 1
_DEBUGGED_TOKENS = 128  # of decoders, whose logits are large


@METHODS.register(
    "integer-only",
    paper="Kim et al., 2021 (I-BERT, arXiv 2101.01321); Li and Gu, 2023 (I-ViT, arXiv 2207.01405); "
    "Kim et al., 2022 (Q-ASR, arXiv 2103.16827)",
    needs=("calibration data",),
)
@dataclass(frozen=True)
class IntegerOnly(Method):
    """Use for hardware without floating point: everything between the input and the logits is integers.

    It converts encoders, ViT, decoders of the Llama type (with an int8 KV cache) and networks of convolutions, with
    their nonlinear functions and heads. Ranges of activations are static, from the calibration data; `--data none`
    synthesizes it for networks with batch norms. The result is a graph of integer operators. The spectrogram of a
    speech model is computed in float before it. With `nonlinear: nn-lut`, GELU, SiLU, softmax, norms and tanh are
    looked up in tables (Yu et al., 2022); with `nonlinear: shift`, GELU and softmax are shifts and additions (I-ViT).
    """

    last: ClassVar[bool] = True

    bits: int = 8  # of weights and activations, 2 to 8; transformers have 8
    percentile: float = 100.0  # of the magnitudes of an activation that its range covers; transformers take all
    nonlinear: Literal["i-bert", "nn-lut", "shift"] = "i-bert"  # of transformers: polynomials, tables, or shifts
    entries: int = 16  # of each table: 8, 16 or 32

    def __post_init__(self) -> None:
        within("integer-only", "bits", self.bits, 2, 8)
        within("integer-only", "percentile", self.percentile, 50, 100)
        if self.entries not in SIZES:
            raise ConfigError(f"the tables of nn-lut have {', '.join(map(str, SIZES))} entries, not {self.entries}.")

    def check(self, anatomy: Anatomy) -> None:
        if is_convolutional(anatomy.network):
            check_convolutions(anatomy.network)
            return
        if self.bits != 8 or self.percentile != 100:
            raise RecipeError("bits and percentile of integer-only are for networks of convolutions; leave them out.")
        if decoders.is_decoder(anatomy.network):
            if self.nonlinear == "shift":
                raise RecipeError("the shift-based functions are for encoders and ViT; use i-bert or nn-lut.")
            decoders.check_decoder(anatomy.network)
        elif is_vision_transformer(anatomy.network):
            check_vision(anatomy.network)
        else:
            encoders.check_encoder(anatomy.network)

    def targets(self) -> dict[str, float]:
        return {"bits": self.bits}

    def bytes_change(self, anatomy: Anatomy) -> int:
        return -3 * sum(count_bytes(block.module) for block in anatomy.blocks) // 4

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        return ResourceEstimate(passes=1.0, memory=2 * count_bytes(anatomy.network))

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        self.check(model.anatomy)
        network, device = model.network, model.device
        before = count_bytes(network)
        if is_convolutional(network):
            widths = BitWidths(self.bits, self.bits)
            model.network, facts = integer_convolutions(
                model, context.batches, bits=widths, percentile=self.percentile, progress=context.progress
            )
            model.network.to(device)
            return {**facts, "bytes_before": before, "bytes_after": count_bytes(model.network)}
        graph, rows = self._convert(network, context)
        integer = IntegerDecoder if decoders.is_decoder(network) else IntegerNetwork
        model.network = integer(graph, network).to(device)
        return {
            "nodes": len(graph.nodes),
            "bytes_before": before,
            "bytes_after": count_bytes(model.network),
            "sqnr_db": {f"{row.layer} ({row.op})": round(row.decibels, 1) for row in rows},
        }

    def _convert(self, network: PreTrainedModel, context: MethodContext) -> tuple[IntegerGraph, list[LayerSqnr]]:
        """Return the graph of a transformer and the noise of its layers; the network moves to the CPU."""
        builders: dict[str, NewBuilder] = {
            "i-bert": GraphBuilder, "nn-lut": partial(TableBuilder, entries=self.entries), "shift": ShiftBuilder,
        }  # fmt: skip
        is_decoder = decoders.is_decoder(network)
        if is_decoder:
            modules, convert = decoders.observed_modules(network), decoders.convert_decoder
        elif is_vision_transformer(network):
            modules, convert = observed_vision_modules(network), convert_vision
        else:
            modules, convert = encoders.observed_modules(network), encoders.convert_encoder
        ranges = observe_ranges(network, modules, context.batches, context.progress)
        graph = convert(network, ranges, builders[self.nonlinear])
        network.cpu()
        batches = context.batches[:_DEBUGGED_BATCHES]
        if not is_decoder:
            return graph, layer_sqnr(network, graph, batches)
        rows = [{name: tensor[:1, :_DEBUGGED_TOKENS] for name, tensor in batch.items()} for batch in batches]
        return graph, layer_sqnr(network, graph, rows, graph_inputs=partial(_decoder_batch, network))


def _decoder_batch(network: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return decoder_inputs(network, batch["input_ids"], batch.get("attention_mask"))
