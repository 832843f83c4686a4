"""Parts of results/check.py: reading records, statistics and comparison with a page, by the standard library only."""

from __future__ import annotations

import json
import lzma
import math
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent
ROOT = RESULTS.parent
PROTOCOL = "docs/results/evidence-protocol.md"
PAGES = ("docs/results/evidence.md", "docs/results/evidence-details.md", PROTOCOL, "README.md")
"""Pages whose numbers are checked; of the README only the section README_SECTION and the picture's caption."""
README_SECTION = "## Do the paper's claims hold?"
NUMBER = r"[+−-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
SPACE = r"\s+"
NAMES = re.compile(
    r"^\d\. |`[^`\n]*`|\]\([^)]*\)|<!--.*?-->|^    .*$|Qwen2\.5(?:-Coder)?-[\d.]+B|SmolLM2(?:-135M)?|H\d00|agentgym-27"
    r"|\b\d+(?:\.\d+)?[MB]\b|\w+S\d+\b|95% interval|[\w-]+-[37]B|GPT-4o|pass@\w|4k turns"
    r"|fixed-\d+",
    re.MULTILINE,
)
"""Text whose digits are names: code, links, commands, models, sizes, levels."""
BOOTSTRAP = 0.25
"""Standard errors by which two bootstrap limits of 2,000 and 10,000 resamples may differ: four times their noise."""
Record = dict[str, Any]
Rates = dict[str, float]
Value = float | tuple[float, float]
"""A number, or a number and the slack it is allowed."""


def load(study: str) -> list[Record]:
    return [json.loads(path.read_text()) for path in sorted((RESULTS / study).glob("*.json"))]


def load_lines(study: str, name: str) -> list[dict[str, Any]]:
    """Return the episodes of `<name>.jsonl.xz`."""
    with lzma.open(RESULTS / study / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)


def item_rates(record: dict[str, Any], turns: int) -> Rates:
    return {item: mean(map(int, outcomes)) for item, outcomes in record["outcomes"][str(turns)].items()}


def best_of_by_item(record: dict[str, Any], turns: int, k: int) -> Rates:
    """Return each item's chance that one of k samples drawn without replacement succeeds."""
    chances = {}
    for item, outcomes in record["outcomes"][str(turns)].items():
        failures = outcomes.count("0")
        chances[item] = 1 - math.comb(failures, k) / math.comb(len(outcomes), k)
    return chances


def best_of(record: dict[str, Any], turns: int, k: int) -> float:
    return mean(best_of_by_item(record, turns, k).values())


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
    slack = 100 * (BOOTSTRAP * statistics.stdev(values) / math.sqrt(len(values)) + 0.001)
    return (100 * means[49], slack), (100 * means[1949], slack)


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


class Pages:
    """The pages, and the numbers on them that a check covered."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.covered: set[tuple[str, int]] = set()
        self.failures: list[str] = []
        self.checks = 0

    def expect(self, snippet: str, *values: Value) -> None:
        """Check every place that reads like `snippet` against the values, in the order of its `#`."""
        pattern = SPACE.join(map(re.escape, snippet.split())).replace(r"\#", f"({NUMBER})")
        matches = [(name, match) for name, text in self.texts.items() for match in re.finditer(pattern, text)]
        self.checks += 1
        if not matches or matches[0][1].re.groups != len(values):
            self.failures.append(f"not on the pages: {snippet}")
        for name, match in matches:
            for index, given in enumerate(values[: match.re.groups], 1):
                value, slack = given if isinstance(given, tuple) else (given, 0.0)
                self.covered.add((name, match.start(index)))
                if not agrees(match[index].replace("−", "-").replace(",", ""), value, slack):
                    self.failures.append(f"{snippet!r}: {name} has {match[index]}, the records give {value:.6g}")

    def require(self, statement: str, holds: bool) -> None:
        """Check words that the records must support."""
        self.checks += 1
        if not any(" ".join(statement.split()) in " ".join(text.split()) for text in self.texts.values()):
            self.failures.append(f"not on the pages: {statement}")
        elif not holds:
            self.failures.append(f"the records do not support: {statement}")

    def accept(self, *snippets: str) -> None:
        """Count the numbers of a text as covered: settings, names and published values, which no record has."""
        for snippet in snippets:
            pattern = SPACE.join(map(re.escape, snippet.split()))
            matches = [(name, match) for name, text in self.texts.items() for match in re.finditer(pattern, text)]
            if not matches:
                self.failures.append(f"not on the pages: {snippet}")
            for name, match in matches:
                self.covered |= {(name, match.start() + n.start()) for n in re.finditer(NUMBER, match[0])}

    def uncovered(self) -> list[str]:
        """Return the lines with a number that nothing covered, but for the protocol, which is full of settings.

        A name such as SmolLM2 or 1.5B holds no number.
        """
        lines: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name, text in self.texts.items():
            if name == PROTOCOL:
                continue
            plain = NAMES.sub(lambda match: "x" * len(match[0]), text)
            for match in re.finditer(NUMBER, plain):
                if (name, match.start()) not in self.covered:
                    lines[name, text.count("\n", 0, match.start()) + 1].append(match[0])
        return [f"{name}:{line}: {', '.join(numbers)}" for (name, line), numbers in lines.items()]


def read_pages(root: Path = ROOT) -> dict[str, str]:
    """Return the texts to check by page. Of the README these are the picture's caption and one section."""
    texts = {name: (root / name).read_text(encoding="utf-8") for name in PAGES}
    readme = texts["README.md"]
    caption = re.search(r"\(docs/images/qwen-textcraft\.png\)\n(.*)\n", readme)
    section = readme[readme.index(README_SECTION) :].split("\n## ")[0]
    texts["README.md"] = f"{caption[1] if caption else ''}\n{section}"
    return texts


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
