"""Confidence intervals of success rates, shared by plots, tables and reports."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054
"""Two-sided 95% quantile of the normal distribution."""


def wilson_interval(successes: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion: `wilson_interval(8, 10)` is about (0.49, 0.94).

    It stays inside [0, 1] and is honest at 0 and at n successes, where the normal approximation has width 0.
    Fractional successes are allowed, for rates that were stored rounded.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"a Wilson interval needs n >= 1 and 0 <= successes <= n, got successes={successes}, n={n}")
    rate = successes / n
    centre = rate + z * z / (2 * n)
    half_width = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At the two ends the exact bound is 0 or 1; rounding must not push it past.
    low = 0.0 if successes == 0 else (centre - half_width) / scale
    high = 1.0 if successes == n else (centre + half_width) / scale
    return low, high
