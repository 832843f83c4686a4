"""Statistics of evaluations compared with independent slow implementations."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest

from agentgym_rl.evaluation.statistics import (
    combined_interval,
    mcnemar_exact,
    mean_interval,
    pass_at_k,
    rate_interval,
    sign_flip_test,
)

Z = 1.959963984540054


def slow_pass_at_k(outcomes: list[bool], k: int) -> Fraction:
    """Return the share of all choices of k samples with a success, by enumeration."""
    choices = list(itertools.combinations(outcomes, k))
    return Fraction(sum(any(choice) for choice in choices), len(choices))


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_matches_enumeration(n: int) -> None:
    for successes in range(n + 1):
        outcomes = [True] * successes + [False] * (n - successes)
        for k in range(1, n + 1):
            assert pass_at_k(n, successes, k) == pytest.approx(float(slow_pass_at_k(outcomes, k)), abs=1e-12)


def test_pass_at_k_is_unbiased_and_the_plug_in_estimate_is_not() -> None:
    """Check that the mean over all outcomes of 4 samples at p = 0.3, weighted by probability, is the true pass@2."""
    p, n, k = 0.3, 4, 2
    ours = plug_in = 0.0
    for successes in range(n + 1):
        chance = math.comb(n, successes) * p**successes * (1 - p) ** (n - successes)
        ours += chance * pass_at_k(n, successes, k)
        plug_in += chance * (1 - (1 - successes / n) ** k)
    assert ours == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert abs(plug_in - (1 - (1 - p) ** k)) > 0.01


def test_pass_at_k_refuses_a_k_above_the_number_of_samples() -> None:
    with pytest.raises(ValueError, match="1 <= k <= n"):
        pass_at_k(3, 1, 4)


def slow_wilson(rate: float, n: float) -> tuple[float, float]:
    """Return the p at which the observed rate is exactly z standard errors away, by bisection on each side."""

    def distance(p: float) -> float:
        return abs(rate - p) - Z * math.sqrt(p * (1 - p) / n)

    bounds = []
    for far in (0.0, 1.0):
        outside, inside = far, rate
        if distance(far) <= 0:
            bounds.append(far)
            continue
        for _ in range(200):
            middle = (outside + inside) / 2
            outside, inside = (middle, inside) if distance(middle) > 0 else (outside, middle)
        bounds.append(inside)
    return bounds[0], bounds[1]


@pytest.mark.parametrize(("successes", "n"), [(0, 5), (5, 5), (1, 1), (8, 10), (31, 100), (99, 100), (400, 900)])
def test_one_sample_per_item_gives_the_wilson_interval(successes: int, n: int) -> None:
    values = [1.0] * successes + [0.0] * (n - successes)
    assert rate_interval(values, n) == pytest.approx(slow_wilson(successes / n, n), abs=1e-9)


def test_agreeing_samples_of_an_item_widen_the_interval() -> None:
    agreeing = rate_interval([1.0] * 10 + [0.0] * 10, 20 * 8)
    assert agreeing == pytest.approx(slow_wilson(0.5, 20), abs=1e-9)  # 8 copies of an item count as one
    independent = rate_interval([0.5] * 19 + [0.4999], 20 * 8)
    assert independent == pytest.approx(slow_wilson(0.5, 160), abs=1e-3)  # at most the number of all samples
    low, high = rate_interval([0.0] * 20, 160)
    assert (low, high) == pytest.approx(slow_wilson(0.0, 20), abs=1e-9)


def test_the_interval_covers_correlated_samples_of_an_item() -> None:
    """Draw items with different rates and 4 samples each: about 95% of the intervals contain the true mean."""
    rng = random.Random(0)
    covered, naive = 0, 0
    for _ in range(400):
        values = []
        for _ in range(40):
            rate = rng.choice([0.05, 0.1, 0.95])  # true mean 0.3667
            values.append(sum(rng.random() < rate for _ in range(4)) / 4)
        low, high = rate_interval(values, 160)
        covered += low <= 1.1 / 3 <= high
        mean = sum(values) / 40
        low, high = slow_wilson(mean, 160)
        naive += low <= 1.1 / 3 <= high
    assert covered >= 400 * 0.92
    assert naive < 400 * 0.85  # pooling the samples covers too rarely


def slow_mcnemar(only_first: int, only_second: int) -> Fraction:
    """Return the p-value by enumerating all equally likely outcomes of the discordant pairs."""
    observed = abs(only_first - only_second)
    outcomes = list(itertools.product((1, -1), repeat=only_first + only_second))
    return Fraction(sum(abs(sum(signs)) >= observed for signs in outcomes), len(outcomes))


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (0, 5), (3, 3), (2, 9), (10, 1), (6, 0)])
def test_mcnemar_agrees_with_enumeration(b: int, c: int) -> None:
    assert mcnemar_exact(b, c) == pytest.approx(float(slow_mcnemar(b, c)), abs=1e-12)
    assert sign_flip_test([1.0] * c + [-1.0] * b + [0.0] * 7) == pytest.approx(mcnemar_exact(b, c), abs=1e-12)


def test_mcnemar_of_many_pairs_does_not_overflow() -> None:
    assert mcnemar_exact(2000, 2000) == 1.0
    assert 0 < mcnemar_exact(400, 600) < 1e-9


def test_the_sign_flip_test_of_real_numbers() -> None:
    rng = random.Random(1)
    differences = [rng.gauss(0.4, 1.0) for _ in range(10)]
    observed = abs(sum(differences))
    flips = itertools.product((1, -1), repeat=10)
    extreme = [abs(sum(s * d for s, d in zip(f, differences, strict=True))) >= observed - 1e-9 for f in flips]
    assert sign_flip_test(differences) == pytest.approx(sum(extreme) / 1024, abs=1e-12)
    many = [*differences, *(rng.gauss(0.0, 1.0) for _ in range(40))]
    drawn = sum(abs(sum(rng.choice((1, -1)) * d for d in many)) >= abs(sum(many)) for _ in range(4000)) / 4000
    assert sign_flip_test(many) == pytest.approx(drawn, abs=0.03)
    assert sign_flip_test([0.0, 0.0]) == 1.0
    assert sign_flip_test([1.0] * 60) < 0.001


def test_the_sign_flip_test_drops_differences_that_are_rounding_errors() -> None:
    rounding = 0.1 + 0.2 - 0.3
    assert rounding != 0
    assert sign_flip_test([0.25] * 22 + [rounding] * 75) == sign_flip_test([0.25] * 22)


def test_the_sign_flip_test_counts_many_rates_of_few_samples_exactly() -> None:
    assert sign_flip_test([1.0] * 60) == pytest.approx(2 / 2**60, rel=1e-9)
    assert sign_flip_test([0.25] * 22 + [0.0] * 75) == pytest.approx(2 / 2**22, rel=1e-9)
    for wins, losses in ((30, 12), (21, 20), (44, 21)):
        expected = mcnemar_exact(wins, losses)
        assert sign_flip_test([1.0] * wins + [-1.0] * losses) == pytest.approx(expected, rel=1e-9)
    quarters = [0.25, -0.5, 0.75, 1.0, 0.25, -0.25, 0.5, 0.5, -0.75, 0.25, 1.0, 0.25]  # listed: 12 differences
    longer = [*quarters, 0.25, -0.25, 0.5, -0.5]  # counted: 16 differences
    flips = itertools.product((1, -1), repeat=len(longer))
    observed = abs(sum(longer))
    extreme = sum(abs(sum(s * d for s, d in zip(f, longer, strict=True))) >= observed - 1e-9 for f in flips)
    assert sign_flip_test(longer) == pytest.approx(extreme / 2 ** len(longer), rel=1e-9)


def test_the_bootstrap_interval_matches_resampling() -> None:
    rng = random.Random(2)
    values = [rng.random() for _ in range(60)]
    means = sorted(sum(rng.choices(values, k=60)) / 60 for _ in range(3000))
    low, high = mean_interval(values)
    assert low == pytest.approx(means[75], abs=0.01)
    assert high == pytest.approx(means[-75], abs=0.01)
    assert mean_interval(values) == (low, high)  # seeded
    assert mean_interval([0.25]) == (0.25, 0.25)


def test_the_interval_of_a_mean_of_rates_covers_the_mean() -> None:
    part = (0.5, *slow_wilson(0.5, 100))
    low, high = combined_interval([part])
    assert (low, high) == pytest.approx(part[1:])
    low, high = combined_interval([part] * 4)
    assert high - low == pytest.approx((part[2] - part[1]) / 2)  # the error of a mean of 4 is half that of one
    rng = random.Random(3)
    covered = 0
    for _ in range(500):
        rates = [sum(rng.random() < p for _ in range(30)) / 30 for p in (0.05, 0.4, 0.9)]
        low, high = combined_interval([(rate, *slow_wilson(rate, 30)) for rate in rates])
        covered += low <= 0.45 <= high
    assert covered >= 500 * 0.92


def test_sign_flips_of_large_whole_numbers_are_drawn() -> None:
    small = [3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0, -6.0, 5.0, 3.0, 5.0, -8.0, 9.0, 7.0, 9.0, 3.0]
    assert sign_flip_test([x * 1e8 for x in small]) == pytest.approx(sign_flip_test(small), abs=0.02)
