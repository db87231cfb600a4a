"""Accuracy against the bit error rate: MiniLM fine-tuned on SST-2 in float and integer formats, with range clipping.

    python benchmarks/robustness.py [--items 128] [--seeds 3] [--resume]

Flips hit the same 36 matrices in every format, in the storage that an artifact ships: floats, or packed codes with
their scales. The last table flips one bit position at a time, which shows the bits that do the damage.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import RESULTS, mean, minilm_sst2, previous_rows, shared, table, write

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.data import LabeledData, labeled_batches, load_labeled
from smelt.measure.eval_result import EvalResult
from smelt.measure.logits import eval_mode
from smelt.measure.paired import compare
from smelt.measure.robustness.clipping import ActivationRanges, profile_ranges, range_clipping
from smelt.measure.robustness.storage import StoredTensor, select, stored_tensors
from smelt.measure.robustness.sweep import FaultPoint, bit_error_sweep
from smelt.measure.task import evaluate_task
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear

BERS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
INTEGERS = {"int8": 8, "int4": 4}
FORMATS = (*FLOATS, *INTEGERS)
LENGTH, BATCH, CALIBRATION, MARGIN = 64, 32, 256, 1.25
BIT_BER = 1e-3  # per element, for the table of bit positions
BITS = {"fp32": (31, 30, 29, 23, 22), "int8": (7, 6, 0), "int4": (3, 0)}


class HalfWeights(torch.nn.Linear):
    """A linear layer whose weight is stored in half precision and multiplied in float32, like quantized weights.

    It is a Linear so that range clipping clamps its outputs, as in every other format.
    """

    def __init__(self, linear: torch.nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight = torch.nn.Parameter(linear.weight.detach().to(dtype), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.float(), self.bias)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    rows = previous_rows("robustness", options.resume)
    dev = load_labeled(shared() / "data/glue/sst2/dev.jsonl.gz")
    train = load_labeled(shared() / "data/glue/sst2/train.jsonl.gz")
    items = np.random.default_rng(0).permutation(len(dev))[: options.items]
    for name in FORMATS:
        if not any(row["format"] == name for row in rows):
            rows += _measure(name, dev.take(items), train, options.seeds)
            write("robustness", rows, _text(rows, options.items, options.seeds))
    (RESULTS / "robustness.svg").write_text(_plot(rows))


def _model(name: str) -> tuple[Model, list[StoredTensor]]:
    """Return the model and the stored tensors of its block matrices, without biases."""
    quantized = minilm_sst2()
    bits = INTEGERS.get(name, 8)
    METHODS.build({"method": "rtn", "bits": bits, "group_size": -1}).apply(quantized, MethodContext(batches=[], seed=0))
    layers = [path for path, layer in quantized.network.named_modules() if isinstance(layer, QuantizedLinear)]
    model = quantized if name in INTEGERS else minilm_sst2()
    if name in ("fp16", "bf16"):
        for path in layers:
            parent, _, child = path.rpartition(".")
            linear = model.network.get_submodule(path)
            setattr(model.network.get_submodule(parent), child, HalfWeights(linear, FLOATS[name]))
    tensors = select(stored_tensors(model.network), layers=layers)
    return model, [entry for entry in tensors if entry.attribute != "bias"]


def _measure(name: str, data: LabeledData, train: LabeledData, seeds: int) -> list[dict[str, Any]]:
    model, tensors = _model(name)

    def evaluate() -> EvalResult:
        return evaluate_task(model, data, max_length=LENGTH, batch_size=BATCH)

    clean = evaluate()
    points = bit_error_sweep(tensors, evaluate, bers=BERS, seeds=seeds, target="matrices", clean=clean)
    rows = [_row(name, point) for point in points]
    with range_clipping(model.network, _ranges(model, train).widened(MARGIN)):
        clipped = evaluate()
        points = bit_error_sweep(tensors, evaluate, bers=BERS, seeds=seeds, target="matrices", clipped=True)
    cost = compare(clipped, clean).to_json()
    rows += [_row(name, point) for point in points]
    for target, part in (("codes", "codes"), ("scales", "qparams")) if name in INTEGERS else ():
        chosen = select(tensors, parts=[part])
        points = bit_error_sweep(chosen, evaluate, bers=BERS, seeds=seeds, target=target, clean=clean)
        rows += [_row(name, point) for point in points]
    codes = [entry for entry in tensors if entry.part != "qparams"]
    for bit in BITS.get(name, ()):
        (point,) = bit_error_sweep(codes, evaluate, bers=[BIT_BER], seeds=seeds, target="bit", bit=bit, clean=clean)
        rows.append({**_row(name, point), "bit": bit})
    rows.append({"format": name, "target": "clean", "value": clean.value, "clipping": cost})
    print(name, clean.value, [(row.get("ber"), row.get("mean")) for row in rows], flush=True)
    return rows


def _ranges(model: Model, train: LabeledData) -> ActivationRanges:
    batches = labeled_batches(train, model.tokenizer, samples=CALIBRATION, max_length=LENGTH, batch_size=BATCH, seed=0)

    def forward(batch: dict[str, torch.Tensor]) -> Callable[[], object]:
        return lambda: model.network(**{name: x for name, x in batch.items() if name != "labels"})

    with eval_mode(model.network):
        return profile_ranges(model.network, map(forward, batches))


def _row(name: str, point: FaultPoint) -> dict[str, Any]:
    return {"format": name, **point.to_json()}


def _select(rows: list[dict[str, Any]], **facts: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row.get(key) == value for key, value in facts.items())]


def _cell(rows: list[dict[str, Any]], **facts: Any) -> str:
    values = [value for row in _select(rows, **facts) for value in row["values"]]
    return f"{mean(values):.3f} ({min(values):.3f}-{max(values):.3f})" if values else "-"


def _text(rows: list[dict[str, Any]], items: int, seeds: int) -> str:
    names = [name for name in FORMATS if _select(rows, format=name)]
    clean = {row["format"]: row for row in _select(rows, target="clean")}
    cells = []
    for name in names:
        for clipped in (False, True):
            label = f"{name}, clipped" if clipped else name
            at_zero = clean[name]["clipping"]["new" if clipped else "base"]
            line = [_cell(rows, format=name, target="matrices", ber=ber, clipped=clipped) for ber in BERS]
            cells.append([label, f"{at_zero:.3f}", *line])
        for target in ("codes", "scales") if name in INTEGERS else ():
            line = [_cell(rows, format=name, target=target, ber=ber) for ber in BERS]
            cells.append([f"{name}, {target} only", f"{clean[name]['value']:.3f}", *line])
    costs = [
        [name, f"{row['clipping']['difference']:+.4f}", "[{:+.4f}, {:+.4f}]".format(*row["clipping"]["interval"])]
        for name, row in clean.items()
    ]
    bits = [
        [name, str(bit), _cell(rows, format=name, target="bit", bit=bit)]
        for name in names
        for bit in BITS.get(name, ())
    ]
    return (
        "# MiniLM-L6 on SST-2: accuracy under bit errors\n\n"
        f"Accuracy on {items} dev sentences, mean of {seeds} seeds and (lowest-highest). Bit flips hit the 36 matrices "
        "of the blocks as stored: float weights, or packed codes with a float16 scale and a uint8 zero point per row "
        "(*scales only* hits both); all products are in float32. An item without a finite output counts as wrong, so 0 "
        "is possible. Range clipping clamps activations "
        f"at {MARGIN} times the range on {CALIBRATION} training sentences.\n\n"
        + table(["format", "no flips", *(f"BER 1e{np.log10(ber):.0f}" for ber in BERS)], cells)
        + "\n\n![accuracy against bit error rate](robustness.svg)\n\n## Clean accuracy with clipping, minus without\n\n"
        + table(["format", "difference", "95 % interval"], costs)
        + f"\n\n## One bit position of every weight, at {BIT_BER:g} per weight\n\n"
        + table(["format", "bit (0 is the lowest)", "accuracy"], bits)
    )


def _plot(rows: list[dict[str, Any]]) -> str:
    """Draw mean accuracy over the logarithm of the rate: one color per format, dashed with clipping."""
    width, height, left, top = 560, 300, 50, 20
    colors = dict(zip(FORMATS, ("#0b6fb0", "#56b4e9", "#cc79a7", "#d55e00", "#009e73"), strict=True))

    def x(ber: float) -> float:
        return left + width * (np.log10(ber / BERS[0])) / np.log10(BERS[-1] / BERS[0])

    def y(accuracy: float) -> float:
        return top + height * (1 - accuracy)

    text = '<text x="{:.0f}" y="{:.0f}" text-anchor="{}">{}</text>'
    parts = [text.format(x(ber), top + height + 18, "middle", f"1e{np.log10(ber):.0f}") for ber in BERS]
    parts.append(text.format(left + width / 2, top + height + 36, "middle", "bit error rate"))
    parts.append(f'<text transform="translate(12 {top + height / 2}) rotate(-90)" text-anchor="middle">accuracy</text>')
    for accuracy in (0, 0.25, 0.5, 0.75, 1):
        parts.append(text.format(left - 8, y(accuracy) + 4, "end", f"{accuracy:g}"))
        parts.append(f'<path d="M{left} {y(accuracy):.0f}h{width}" stroke="#ddd"/>')
    for number, (name, color) in enumerate(colors.items()):
        for clipped in (False, True):
            points = _select(rows, format=name, target="matrices", clipped=clipped)
            path = " ".join(f"{x(row['ber']):.1f},{y(row['mean']):.1f}" for row in points)
            dashes = ' stroke-dasharray="6 4"' if clipped else ""
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
        label_y = top + 20 + 20 * number
        parts.append(f'<path d="M{left + width + 14} {label_y - 4}h24" stroke="{color}" stroke-width="2"/>')
        parts.append(text.format(left + width + 44, label_y, "start", name))
    parts.append(text.format(left + width + 14, top + 130, "start", "dashed: clipped"))
    size = f'width="{left + width + 140}" height="{top + height + 46}"'
    style = 'font-family="sans-serif" font-size="12"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    main()
