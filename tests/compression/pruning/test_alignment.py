"""`alignment: measured`: the smallest multiple on the fast path, whatever makes other widths slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from smelt.compression.base import METHODS, Choices, MethodContext, WidthTimer
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.pruning.alignment import CHOICE, neighboring_widths, part_specs, slow_multiples
from smelt.errors import RecipeError
from smelt.models.anatomy import Part
from smelt.models.model import Model
from smelt.models.quantization_scheme import LinearGroupSpec
from tests.compression.pruning.test_methods import wide_llama
from tests.compression.quantization.test_base import same

SETTINGS = {"method": "random", "seq_len": 11, "budget": {"parameters": 0.7}, "alignment": "measured"}


def timer(cost: Callable[[int], float], log: list[LinearGroupSpec] | None = None) -> WidthTimer:
    """Return a timer of a device where an FFN costs so much by its width, and attention nothing."""

    def seconds(specs: Sequence[LinearGroupSpec]) -> list[float]:
        (log if log is not None else []).extend(specs)
        return [
            1e-9 * cost(spec.in_features if len(spec.out_features) == 1 else spec.out_features[0]) for spec in specs
        ]

    return WidthTimer(seconds, "a device", "chat")


def tiles(size: int) -> Callable[[int], float]:
    return lambda width: -(-width // size) * size


def prune(cost: Callable[[int], float], **context: Any) -> tuple[Model, dict[str, Any]]:
    model = wide_llama(intermediate_size=1024)
    facts = METHODS.build(SETTINGS).apply(model, MethodContext(width_timer=timer(cost), **context))
    return model, facts


def ffn(model: Model) -> Part:
    return next(part for part in model.anatomy.parts if part.kind == "ffn_channels")


@pytest.mark.parametrize(
    ("cost", "multiple"),
    [
        (lambda width: width, 1),  # any width is fine
        (tiles(64), 64),
        (tiles(128), 128),
        (lambda width: width * (1 if width % 16 == 0 else 3), 16),  # odd widths take a slow path
        (lambda width: width * (1 if width % 8 == 0 else 1.01), 1),  # by less than 2 %
        (lambda width: width * (1 if width % 8 == 0 else 1.03), 8),
        (lambda width: width * (2 if width % 128 == 64 else 1), 128),  # smaller multiples contain that width, too
    ],
)
def test_the_smallest_multiple_on_the_fast_path_is_taken(cost: Callable[[int], float], multiple: int) -> None:
    model, facts = prune(cost)
    result = facts["measured_alignment"]
    assert (result["multiple"], result["device"], result["workload"]) == (multiple, "a device", "chat")
    number = {**SETTINGS, "alignment": multiple}
    expected = wide_llama(intermediate_size=1024)
    METHODS.build(number).apply(expected, MethodContext())
    assert same(model, expected)  # the same recipe with the number gives the same bytes
    widths = [part.units for part in model.anatomy.parts if part.kind == "ffn_channels"]
    assert all(width % multiple == 0 for width in widths) and min(widths) < 1024


def test_what_is_timed() -> None:
    """Equal parts once, in turns, unquantized; a part whose units are multiples already needs no alignment."""
    model, log = wide_llama(intermediate_size=1024), list[LinearGroupSpec]()
    step = METHODS.build(SETTINGS)
    facts = step.apply(model, MethodContext(width_timer=timer(float, log)))
    times = facts["measured_alignment"]["microseconds"]
    low = 640  # about 70 % remain
    widths = [low, low + 1, low + 8, low + 16, low + 32, low + 64, low + 128]
    name = next(part.name for part in wide_llama(intermediate_size=1024).anatomy.parts if part.kind == "ffn_channels")
    assert [int(width) for width in times[name]] == sorted(widths)
    outputs = [spec.in_features for spec in log if spec.fused_input and len(spec.out_features) == 1]
    assert sorted(outputs) == sorted(widths) and all(spec.scheme is None for spec in log)
    gate_and_up = [spec.out_features for spec in log if len(spec.out_features) == 2]
    assert sorted(gate_and_up) == sorted((width, width) for width in widths)
    assert times[name][str(low)] == pytest.approx(2e-3 * low)  # both groups


def test_parts_that_cannot_be_aligned_are_not_timed() -> None:
    part = ffn(wide_llama(intermediate_size=250))  # eight times 32 is more
    assert set(neighboring_widths(part, 0.7)) == {0, 1, 8, 16}
    heads = next(part for part in wide_llama().anatomy.parts if part.kind == "heads")
    assert neighboring_widths(heads, 0.5) == {0: 96, 1: 104, 16: 112, 32: 128}  # each has 8 columns
    specs = part_specs(part, 16)
    assert specs[0].out_features == (16, 16) and specs[1].in_features == 16
    assert slow_multiples({0: 128, 128: 256, 8: 136}, {128: 1.0, 256: 2.0, 136: 1.08}) == set()
    assert slow_multiples({0: 128, 128: 256, 8: 136}, {128: 1.0, 256: 2.0, 136: 1.09}) == {8}


def test_given_multiples_are_not_measured() -> None:
    log = list[LinearGroupSpec]()
    settings = {**SETTINGS, "ffn_multiple": 4, "head_multiple": 1}
    METHODS.build(settings).apply(wide_llama(), MethodContext(width_timer=timer(float, log)))
    assert not log


def test_a_decision_is_resumed_and_repeated(tmp_path: Path) -> None:
    choices, checkpoint = Choices(), Checkpoint(tmp_path)
    first, facts = prune(tiles(64), choices=choices, checkpoint=checkpoint)
    assert choices.made[CHOICE]["multiple"] == 64
    for more in ({"choices": Choices(choices.made)}, {"checkpoint": checkpoint}):
        again, repeated = prune(float, **more)
        assert same(first, again) and repeated["measured_alignment"] == facts["measured_alignment"]
    step = METHODS.build(SETTINGS)
    assert step.with_choices(choices.made).to_json()["alignment"] == 64 and step.to_json()["alignment"] == "measured"


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ([], "must be one of 1, 8"),
        ({"multiple": 5}, "must be one of 1, 8"),
        ({"multiple": 8}, "damaged"),
        ({"multiple": 8, "device": "a", "workload": "b", "microseconds": {"ffn": 1}}, "damaged"),
        ({"multiple": 8, "device": "a", "workload": "b", "microseconds": {"ffn": {"8": "1"}}}, "must be numbers"),
    ],
)
def test_a_recorded_decision_is_checked(recorded: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        prune(float, choices=Choices({CHOICE: recorded}))


def test_bad_values_are_one_sentence() -> None:
    with pytest.raises(RecipeError, match="alignment of random must be one of measured, not 'best'"):
        METHODS.build({**SETTINGS, "alignment": "best"})
    with pytest.raises(RecipeError, match="there is none here; give a number"):
        METHODS.build(SETTINGS).apply(wide_llama(), MethodContext())
