"""Calibrate a network of convolutions and convert it to integers (Q-ASR): a part of the method `integer-only`."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from smelt.compression.calibration.observers import HistogramObserver
from smelt.errors import DataError
from smelt.models.model import Model
from smelt.progress import NullProgress, Progress
from smelt.runtime.integer.convolutions import BitWidths, convert_convolutions, tensor_sqnr
from smelt.runtime.integer.network import IntegerNetwork
from smelt.runtime.integer.traced_network import TracedNetwork

Batch = dict[str, Tensor]


def integer_convolutions(
    model: Model,
    batches: Sequence[Batch],
    *,
    bits: BitWidths = BitWidths(),  # noqa: B008
    percentile: float = 100.0,
    progress: Progress = NullProgress(),  # noqa: B008
) -> tuple[IntegerNetwork, dict[str, Any]]:
    """Return the integer network of a model, whose own network is left as it is, and facts about it.

    Ranges of activations are the percentiles of their magnitudes on the batches, of which each recording is read
    without its padding.
    """
    network, outline = (copy.deepcopy(model.network).cpu() for _ in range(2))
    name = network.main_input_name
    inputs = [each for batch in batches for each in _unpadded(batch, name)]
    if not inputs:
        raise DataError("integers need calibration data for the ranges of activations; there is none.")
    traced = TracedNetwork(network, {name: inputs[0]})
    observers: dict[str, HistogramObserver] = defaultdict(HistogramObserver)
    for values in progress.track(inputs, "ranges of activations"):
        traced.run(values, lambda tensor, value: observers[tensor](value))
    ranges = {tensor: observer.percentile(percentile) for tensor, observer in observers.items()}
    graph, sources = convert_convolutions(traced, ranges, bits, unsigned_input=observers[name].minimum >= 0)
    ratios = tensor_sqnr(traced, graph, sources, inputs[0])
    facts = {"nodes": len(graph.nodes), "sqnr_db": {tensor: round(ratio, 1) for tensor, ratio in ratios.items()}}
    if model.feature_extractor is not None:
        facts["front_end"] = "log-mel spectrogram in float"
    return IntegerNetwork(graph, outline), facts


def _unpadded(batch: Batch, name: str) -> list[Tensor]:
    """Return the inputs of a batch: all at once, or one by one without its padding."""
    values, mask = batch[name].float().cpu(), batch.get("attention_mask")
    if mask is None or bool(mask.all()):
        return [values]
    return [values[index : index + 1, :, : int(length)] for index, length in enumerate(mask.sum(1))]
