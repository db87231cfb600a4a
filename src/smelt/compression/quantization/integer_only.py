"""I-BERT: an encoder without floating point between its embeddings and its logits (Kim et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from smelt.compression.base import METHODS, CalibrationSize, Method, MethodContext, ResourceEstimate
from smelt.compression.calibration.ranges import observe_ranges
from smelt.measure.cost import count_bytes
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model
from smelt.runtime.integer.debug import layer_sqnr
from smelt.runtime.integer.encoders import check_encoder, convert_encoder, observed_modules
from smelt.runtime.integer.network import IntegerNetwork

_DEBUGGED_BATCHES = 1  # for the signal-to-noise ratio of every layer


@METHODS.register("integer-only", paper="Kim et al., 2021 (I-BERT, arXiv 2101.01321)", needs=("calibration data",))
@dataclass(frozen=True)
class IntegerOnly(Method):
    """Use for hardware without floating point: an encoder in int8, its nonlinear functions and its head in integers.

    Ranges of activations are static, from the calibration data. The result is a graph of integer operators.
    """

    last: ClassVar[bool] = True

    def check(self, anatomy: Anatomy) -> None:
        check_encoder(anatomy.network)

    def bytes_change(self, anatomy: Anatomy) -> int:
        return -3 * sum(count_bytes(block.module) for block in anatomy.blocks) // 4

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        return ResourceEstimate(passes=1.0, memory=2 * count_bytes(anatomy.network))

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        self.check(model.anatomy)
        network, device = model.network, model.device
        before = count_bytes(network)
        ranges = observe_ranges(network, observed_modules(network), context.batches, context.progress)
        graph = convert_encoder(network, ranges)
        network.cpu()
        rows = layer_sqnr(network, graph, context.batches[:_DEBUGGED_BATCHES])
        model.network = IntegerNetwork(graph, network).to(device)
        return {
            "nodes": len(graph.nodes),
            "bytes_before": before,
            "bytes_after": count_bytes(model.network),
            "sqnr_db": {f"{row.layer} ({row.op})": round(row.decibels, 1) for row in rows},
        }
