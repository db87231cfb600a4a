"""Number formatting in reports."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from smelt.report import numbers


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (numbers.count, 0, "0"),
        (numbers.count, 9_999, "9,999"),
        (numbers.count, 12_345, "12.3 k"),
        (numbers.count, 134_515_008, "134.5 M"),
        (numbers.count, 7_241_000_000, "7.2 B"),
        (numbers.count, 999_990, "1.0 M"),
        (numbers.size, 512, "512 B"),
        (numbers.size, 538_060_032, "538 MB"),
        (numbers.size, 99_970_000, "100 MB"),
        (numbers.size, 1_210_000_000, "1.21 GB"),
        (numbers.macs, 12_345_000_000, "12.3 GMACs"),
        (numbers.macs, 0, "0 MACs"),
        (numbers.seconds, 0.35, "350 ms"),
        (numbers.seconds, 0.9996, "1.0 s"),
        (numbers.seconds, 61.2, "61.2 s"),
        (numbers.seconds, 119.97, "2 min 0 s"),
        (numbers.seconds, 252.4, "4 min 12 s"),
        (numbers.milliseconds, 0.1234, "0.123 ms"),
        (numbers.milliseconds, 1234.5, "1234 ms"),
        (numbers.metric, 23.6, "23.60"),
        (numbers.metric, 0.9002, "0.9002"),
        (numbers.metric, 12345.6, "12,346"),
        (numbers.metric, math.nan, "not finite"),
        (numbers.signed, -0.0107, "−0.0107"),
        (numbers.signed, 3.5, "+3.50"),
        (numbers.percent, -0.158, "−15.8 %"),
        (numbers.percent, -0.0004, "0.0 %"),
        (numbers.probability, 0.0004, "< 0.001"),
        (numbers.probability, 0.0321, "0.032"),
        (numbers.plain, 245760, "245,760"),
        (numbers.plain, 1824.0, "1,824"),
        (numbers.plain, 0.01, "0.01"),
        (numbers.plain, True, "True"),
        (numbers.plain, "kv group", "kv group"),
    ],
)
def test_numbers_are_formatted_readably(write: Callable[[object], str], value: object, text: str) -> None:
    assert write(value) == text


def test_spread_has_the_decimals_of_its_median() -> None:
    assert numbers.milliseconds(182.41, 4.56) == "182.4 ± 4.6 ms"


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.168, "1.17"), (0.0, "0"), (13.97, "14.0"), (99.4, "99.4"), (99.96, "100"), (1234.5, "1,234"), (2e4, "20.0 k")],
)
def test_rates_per_second(value: float, text: str) -> None:
    assert numbers.per_second(value) == text
