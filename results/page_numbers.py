"""Parts of results/check.py: reading records, statistics and comparison with a page, by the standard library only."""

from __future__ import annotations

import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent
PAGE = RESULTS.parent / "docs/results/evidence.md"
NUMBER = r"[+−-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
SPACE = r"\s+"
BOOTSTRAP = 0.6
"""Points by which two bootstrap limits of 2,000 and 10,000 resamples may differ."""
Rates = dict[str, float]
Value = float | tuple[float, float]
"""A number, or a number and the slack it is allowed."""


def load(study: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((RESULTS / study).glob("*.json"))]


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)


def item_rates(record: dict[str, Any], turns: int) -> Rates:
    return {item: mean(map(int, outcomes)) for item, outcomes in record["outcomes"][str(turns)].items()}


def best_of(record: dict[str, Any], turns: int, k: int) -> float:
    """Return the chance that one of k samples drawn without replacement succeeds, mean over items."""
    chances = []
    for outcomes in record["outcomes"][str(turns)].values():
        failures = outcomes.count("0")
        chances.append(1 - math.comb(failures, k) / math.comb(len(outcomes), k))
    return mean(chances)


def wilson(rates: Sequence[float], episodes: int) -> tuple[float, float]:
    """Return the Wilson interval with the number of samples at which a proportion varies as much as these items."""
    n, p = len(rates), mean(rates)
    variance = math.fsum((r - p) ** 2 for r in rates) / (n - 1) / n
    size = max(n, math.floor(min(max(p * (1 - p) / variance, n), episodes) + 1e-9)) if variance else n
    z = 1.959963984540054
    center, half_width = p + z * z / (2 * size), z * math.sqrt(p * (1 - p) / size + z * z / (4 * size * size))
    return (center - half_width) / (1 + z * z / size), (center + half_width) / (1 + z * z / size)


def bootstrap(values: Sequence[float]) -> tuple[Value, Value]:
    """Return the limits of a 95% percentile bootstrap in points, with the noise of resampling as slack."""
    rng = random.Random(7)
    means = sorted(mean(rng.choices(values, k=len(values))) for _ in range(2000))
    return (100 * means[49], BOOTSTRAP), (100 * means[1949], BOOTSTRAP)


def sign_flips(values: Sequence[float], unit: int) -> float:
    """Return the exact two-sided p-value for differences that are multiples of 1 / unit."""
    steps = [round(v * unit) for v in values if round(v * unit)]
    counts = {0: 1}
    for step in steps:
        following: dict[int, int] = defaultdict(int)
        for total, count in counts.items():
            following[total + step] += count
            following[total - step] += count
        counts = following
    observed = abs(sum(steps))
    extreme = sum(count for total, count in counts.items() if abs(total) >= observed)
    return extreme / 2 ** len(steps)


def holm(values: Sequence[float]) -> list[float]:
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, values[index] * (len(values) - rank)))
        adjusted[index] = highest
    return adjusted


class Page:
    """The page, and the numbers on it that a check covered."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.covered: set[int] = set()
        self.failures: list[str] = []
        self.checks = 0

    def expect(self, snippet: str, *values: Value) -> None:
        """Check the first place that reads like `snippet` against the values, in the order of its `#`."""
        pattern = SPACE.join(map(re.escape, snippet.split())).replace(r"\#", f"({NUMBER})")
        match = re.search(pattern, self.text)
        self.checks += 1
        if match is None or match.re.groups != len(values):
            self.failures.append(f"not on the page: {snippet}")
            return
        for index, given in enumerate(values, 1):
            value, slack = given if isinstance(given, tuple) else (given, 0.0)
            self.covered.add(match.start(index))
            if not agrees(match[index].replace("−", "-").replace(",", ""), value, slack):
                self.failures.append(f"{snippet!r}: the page has {match[index]}, the records give {value:.6g}")

    def uncovered(self) -> list[str]:
        """Return the lines of verdicts and results with a number that no check covered."""
        history = self.text.index("The protocol below was committed"), self.text.index("## Results")
        end = self.text.index("## How to repeat it")
        lines: dict[int, list[str]] = defaultdict(list)
        for match in re.finditer(NUMBER, self.text[:end]):
            if match.start() not in self.covered and not history[0] <= match.start() < history[1]:
                lines[self.text.count("\n", 0, match.start()) + 1].append(match[0])
        return [f"line {line}: {', '.join(numbers)}" for line, numbers in lines.items()]


def agrees(written: str, value: float, slack: float) -> bool:
    """Return whether a value rounds to what is written, within `slack` and half a unit of the last digit."""
    digits, _, exponent = written.partition("e")
    unit = 10.0 ** -len(digits.partition(".")[2]) * 10.0 ** int(exponent or 0)
    return abs(float(written) - value) <= 0.5000001 * unit + slack


def by_arm(records: Iterable[dict[str, Any]], key: str) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """Return records with the field `key` by task, arm and seed."""
    groups: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for record in records:
        if key in record:
            groups[record["task"], record["arm"]][record["seed"]] = record
    return groups
