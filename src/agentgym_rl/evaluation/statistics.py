"""How much a set of episodes says. Pure functions; docs/reference/evaluation.md defines every number in words.

An *item* is the unit that is independent of the others; samples of one item are not. `values` are one number an item.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy

from agentgym_rl.common.intervals import wilson_interval

NUM_RESAMPLES = 10_000
EXACT_SIGN_FLIPS = 14
"""Up to so many differences that are not 0 all assignments of signs are counted; beyond, NUM_RESAMPLES are drawn."""


def pass_at_k(num_samples: int, num_successes: int, k: int) -> float:
    """Chance that at least one of k samples, drawn without replacement, is a success: 1 - C(n-c, k) / C(n, k).

    Unbiased for the success of the best of k. `pass_at_k(4, 1, 2)` is 0.5.
    """
    if not 1 <= k <= num_samples or not 0 <= num_successes <= num_samples:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got k={k}, n={num_samples}, c={num_successes}")
    return 1.0 - math.comb(num_samples - num_successes, k) / math.comb(num_samples, k)


def rate_interval(values: Sequence[float], num_samples: int) -> tuple[float, float]:
    """95% Wilson interval of the mean of per-item rates in [0, 1], `num_samples` episodes in all.

    With one sample an item it is the Wilson interval of the proportion. With several, samples of one item agree more
    than samples of different items: the sample size that goes in is the one whose proportion would vary as much as
    these item means do, never less than the number of items and never more than the number of samples.
    """
    n = len(values)
    rate = math.fsum(values) / n
    variance = math.fsum((value - rate) ** 2 for value in values) / (n - 1) / n if n > 1 else 0.0
    effective = rate * (1 - rate) / variance if variance > 0 else n
    size = min(max(effective, n), num_samples)
    # Wilson's formula takes any positive size; the shared function takes whole ones, and rounding down is cautious.
    size = max(n, math.floor(size + 1e-9))
    return wilson_interval(min(rate * size, size), size)


def mean_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95% percentile bootstrap interval of a mean over items."""
    array = numpy.asarray(values, dtype=float)
    if len(array) == 1 or array.min() == array.max():
        return float(array.mean()), float(array.mean())
    low, high = numpy.quantile(_resampled_means(array, seed), (0.025, 0.975))
    return float(low), float(high)


def combined_interval(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """95% interval of the plain mean of independent rates, each given as (rate, low, high).

    MOVER, the method of variance estimates recovery: the distances to the single bounds add up in squares.
    """
    rates = [rate for rate, _, _ in parts]
    mean = math.fsum(rates) / len(rates)
    below = math.sqrt(math.fsum((rate - low) ** 2 for rate, low, _ in parts)) / len(parts)
    above = math.sqrt(math.fsum((high - rate) ** 2 for rate, _, high in parts)) / len(parts)
    return max(0.0, mean - below), min(1.0, mean + above)


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided exact McNemar test: under no difference each discordant pair is a fair coin. 1.0 without any."""
    pairs = only_first + only_second
    tail, ways = 0, 1
    for i in range(min(only_first, only_second) + 1):
        tail += ways
        ways = ways * (pairs - i) // (i + 1)  # the binomial coefficient of i + 1
    return min(1.0, 2 * tail / 2**pairs)


def sign_flip_test(differences: Sequence[float], seed: int = 0) -> float:
    """Two-sided p-value that paired differences have mean 0: how often random signs give a mean as far out.

    For differences of -1, 0 and 1 it is McNemar's exact test.
    """
    array = numpy.asarray([value for value in differences if value != 0], dtype=float)
    if not len(array):
        return 1.0
    observed = abs(array.sum()) * (1 - 1e-12)  # Sums in another order differ in the last bits.
    if len(array) <= EXACT_SIGN_FLIPS:
        bits = (numpy.arange(2 ** len(array))[:, None] >> numpy.arange(len(array))) & 1
        return float((numpy.abs((2 * bits - 1) @ array) >= observed).mean())
    generator = numpy.random.default_rng(seed)
    as_far = 0
    for _ in range(10):
        signs = generator.integers(0, 2, (NUM_RESAMPLES // 10, len(array))) * 2 - 1
        as_far += int((numpy.abs(signs @ array) >= observed).sum())
    return (1 + as_far) / (1 + NUM_RESAMPLES)


def _resampled_means(array: numpy.ndarray, seed: int) -> numpy.ndarray:
    """Means of NUM_RESAMPLES draws with replacement, in blocks that bound the memory."""
    generator = numpy.random.default_rng(seed)
    block = max(1, min(NUM_RESAMPLES, 2_000_000 // len(array)))
    means = [
        array[generator.integers(0, len(array), (min(block, NUM_RESAMPLES - done), len(array)))].mean(axis=1)
        for done in range(0, NUM_RESAMPLES, block)
    ]
    return numpy.concatenate(means)
