"""Format numbers for people: 134.5 M, 538 MB, 12.3 GMACs, 61.2 s, +14.8 %."""

from __future__ import annotations

import math

MINUS = "−"


def _scaled(value: float, units: tuple[str, ...]) -> tuple[float, str]:
    """Scale the value to the largest unit that keeps it at 1 or more."""
    index = 0
    while abs(value) >= 999.95 and index < len(units) - 1:
        value /= 1000
        index += 1
    return value, units[index]


def _three_digits(value: float) -> str:
    decimals = 0 if abs(value) >= 99.95 or value == int(value) else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{decimals}f}"


def count(value: float) -> str:
    """Format a count: in full below ten thousand, then 12.3 k, 134.5 M, 7.2 B."""
    if abs(value) < 10_000:
        return f"{value:,.0f}"
    scaled, unit = _scaled(value, ("", "k", "M", "B", "T"))
    return f"{scaled:.1f} {unit}"


def per_second(value: float) -> str:
    """Format a rate per second: with three digits below a hundred, else as a count."""
    return _three_digits(value) if abs(value) < 99.95 else count(value)


def size(value: float) -> str:
    """Format bytes in decimal units."""
    scaled, unit = _scaled(value, ("B", "kB", "MB", "GB", "TB"))
    return f"{_three_digits(scaled)} {unit}"


def macs(value: float) -> str:
    scaled, unit = _scaled(value, ("MACs", "kMACs", "MMACs", "GMACs", "TMACs", "PMACs"))
    return f"{_three_digits(scaled)} {unit}"


def seconds(value: float) -> str:
    """Format a duration: 350 ms, 61.2 s, 4 min 12 s."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 119.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s"


def milliseconds(value: float, spread: float = 0.0) -> str:
    """Format a median with its ± spread, if any, to the same number of decimals."""
    decimals = 0 if value >= 1000 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{decimals}f} ± {spread:.{decimals}f} ms" if spread else f"{value:.{decimals}f} ms"


def metric(value: float) -> str:
    """Format a quality metric: four decimals below 1 (accuracy), two above (perplexity)."""
    if not math.isfinite(value):
        return "not finite"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.4f}"


def signed(value: float) -> str:
    """Format a difference, always with its sign."""
    text = metric(abs(value))
    return text if not math.isfinite(value) else f"{MINUS if value < 0 else '+'}{text}"


def rate(value: float) -> str:
    """Format a bit error rate with its exponent: 1e-6, 2.5e-4."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}" if value else "0"


def percent(value: float) -> str:
    """Format a relative change (0.148) as +14.8 %."""
    if not math.isfinite(value):
        return "not finite"
    digits = f"{abs(value) * 100:.1f}"
    sign = "" if digits == "0.0" else MINUS if value < 0 else "+"
    return f"{sign}{digits} %"


def probability(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def plain(value: object) -> str:
    """Format any value: integers with separators, floats with four digits, text unchanged."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
