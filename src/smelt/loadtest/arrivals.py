"""When requests are sent. The times are drawn before the run, so that a slow server does not slow them down."""

from __future__ import annotations

import math
import random

from smelt.errors import RequestError


def arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds at which each of `count` requests is due, `rate` a second on average; infinity: all at once.

    The gaps are Gamma with shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is more even.
    """
    if not rate > 0:
        raise RequestError(f"a rate of {rate:g} requests a second is not possible; give one above 0, or inf.")
    if not 0 < burstiness < math.inf:
        raise RequestError(f"a burstiness of {burstiness:g} is not possible; 1 is Poisson, give a number above 0.")
    if math.isinf(rate):
        return [0.0] * count
    chance, now, times = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in range(count):
        times.append(now)  # the first at once
        now += chance.gammavariate(burstiness, 1 / (rate * burstiness))
    return times
