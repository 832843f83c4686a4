"""Confidence intervals and significance tests, as pure functions. docs/reference/evaluation.md defines every number.

*Items* are independent of each other; samples of one item are not. `values` has one number per item.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy

from agentgym_rl.common.intervals import wilson_interval

NUM_RESAMPLES = 10_000
ROUNDING_ERROR = 1e-12
"""Differences of rates up to this size are 0: means over seeds that are equal may differ by it."""
MAX_EXACT_SIGN_FLIPS = 14
"""Number of nonzero differences up to which all sign assignments are listed."""
MAX_UNITS_PER_ONE = 100
"""Beyond that number, differences that are multiples of 1/d for a d up to this are counted exactly, too: those of rates
of a few samples are. For others NUM_RESAMPLES sign assignments are drawn."""
MAX_EXACT_SUMS = 50_000_000
"""Largest work of such a count, in differences times their sum: half a second. Large rewards are drawn."""


def pass_at_k(num_samples: int, num_successes: int, k: int) -> float:
    """Return the chance that one or more of k samples, drawn without replacement, succeed: 1 - C(n-c, k) / C(n, k).

    This is an unbiased estimate of the success of the best of k. `pass_at_k(4, 1, 2)` is 0.5.
    """
    if not 1 <= k <= num_samples or not 0 <= num_successes <= num_samples:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got k={k}, n={num_samples}, c={num_successes}")
    return 1.0 - math.comb(num_samples - num_successes, k) / math.comb(num_samples, k)


def rate_interval(values: Sequence[float], num_samples: int) -> tuple[float, float]:
    """Return the 95% Wilson interval of the mean of per-item rates in [0, 1], from `num_samples` episodes in all.

    With one sample per item it is the Wilson interval of the proportion. With several, samples of one item are
    correlated, so an effective sample size is used: the one at which a proportion would vary as much as these item
    means. It is at least the number of items and at most the number of samples.
    """
    n = len(values)
    rate = math.fsum(values) / n
    variance = math.fsum((value - rate) ** 2 for value in values) / (n - 1) / n if n > 1 else 0.0
    effective = rate * (1 - rate) / variance if variance > 0 else n
    size = min(max(effective, n), num_samples)
    # The shared function takes whole sizes. Rounding down widens the interval.
    size = max(n, math.floor(size + 1e-9))
    return wilson_interval(min(rate * size, size), size)


def mean_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of a mean over items."""
    array = numpy.asarray(values, dtype=float)
    if len(array) == 1 or array.min() == array.max():
        return float(array.mean()), float(array.mean())
    low, high = numpy.quantile(_resampled_means(array, seed), (0.025, 0.975))
    return float(low), float(high)


def combined_interval(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the 95% interval of the unweighted mean of independent rates, each given as (rate, low, high).

    Uses MOVER, the method of variance estimates recovery: squared distances to the single bounds are added.
    """
    rates = [rate for rate, _, _ in parts]
    mean = math.fsum(rates) / len(rates)
    below = math.sqrt(math.fsum((rate - low) ** 2 for rate, low, _ in parts)) / len(parts)
    above = math.sqrt(math.fsum((high - rate) ** 2 for rate, _, high in parts)) / len(parts)
    return max(0.0, mean - below), min(1.0, mean + above)


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Return the p-value of the two-sided exact McNemar test. It is 1.0 without discordant pairs."""
    pairs = only_first + only_second
    tail, combinations = 0, 1
    for i in range(min(only_first, only_second) + 1):
        tail += combinations
        combinations = combinations * (pairs - i) // (i + 1)  # pairs choose i + 1
    return min(1.0, 2 * tail / 2**pairs)


def sign_flip_test(differences: Sequence[float], seed: int = 0) -> float:
    """Return the two-sided p-value for a mean of 0: how often random signs give a mean at least as far from 0.

    For differences of -1, 0 and 1 it equals McNemar's exact test. The value is exact, except for more than
    MAX_EXACT_SIGN_FLIPS differences without a common unit, or with sums too large to count.
    """
    array = numpy.asarray([value for value in differences if abs(value) > ROUNDING_ERROR], dtype=float)
    if not len(array):
        return 1.0
    observed = abs(array.sum()) * (1 - 1e-12)  # tolerance for sums in another order
    if len(array) <= MAX_EXACT_SIGN_FLIPS:
        bits = (numpy.arange(2 ** len(array))[:, None] >> numpy.arange(len(array))) & 1
        return float((numpy.abs((2 * bits - 1) @ array) >= observed).mean())
    units = _in_units(array)
    if units is not None and len(units) * numpy.abs(units).sum() <= MAX_EXACT_SUMS:
        return _exact_tail(units)
    generator = numpy.random.default_rng(seed)
    extreme = 0
    for _ in range(10):
        signs = generator.integers(0, 2, (NUM_RESAMPLES // 10, len(array))) * 2 - 1
        extreme += int((numpy.abs(signs @ array) >= observed).sum())
    return (1 + extreme) / (1 + NUM_RESAMPLES)


def _in_units(array: numpy.ndarray) -> numpy.ndarray | None:
    """Return the differences as whole multiples of 1/d for the smallest possible d, or None if there is none."""
    for per_one in range(1, MAX_UNITS_PER_ONE + 1):
        units = numpy.rint(array * per_one)
        if numpy.abs(array * per_one - units).max() < 1e-9:
            return units.astype(int)
    return None


def _exact_tail(units: numpy.ndarray) -> float:
    """Return the chance that whole numbers with random signs sum to at least the observed distance from 0."""
    sizes = numpy.abs(units)
    total = int(sizes.sum())
    chances = numpy.zeros(2 * total + 1)  # of the sums from -total to total
    chances[total] = 1.0
    for size in sizes:
        flipped = numpy.zeros_like(chances)
        flipped[size:] += 0.5 * chances[:-size]
        flipped[:-size] += 0.5 * chances[size:]
        chances = flipped
    observed = abs(int(units.sum()))
    sums = numpy.abs(numpy.arange(-total, total + 1))
    return min(1.0, float(chances[sums >= observed].sum()))


def _resampled_means(array: numpy.ndarray, seed: int) -> numpy.ndarray:
    """Return the means of NUM_RESAMPLES draws with replacement, in blocks that bound the memory."""
    generator = numpy.random.default_rng(seed)
    block = max(1, min(NUM_RESAMPLES, 2_000_000 // len(array)))
    means = [
        array[generator.integers(0, len(array), (min(block, NUM_RESAMPLES - done), len(array)))].mean(axis=1)
        for done in range(0, NUM_RESAMPLES, block)
    ]
    return numpy.concatenate(means)
