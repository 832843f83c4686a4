"""Table of docs/results/evidence-details.md about gradients by horizon. scripts/docs_pages.py fills it in."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradient_noise import estimates

RECORDS = Path(__file__).parent / "gradient-noise"
NAME = re.compile(r"(?P<arm>.+)-(?P<condition>calm|paper-like)-(?P<seed>\d+)-(?P<step>\d+)")
Table = tuple[list[str], list[list[str]]]
"""A header and rows."""


def by_horizon(folder: Path = RECORDS) -> Table:
    """Return a row per arm, condition, step and horizon, and one per horizon over all models.

    Rows are means over the models, which are seeds if arm, condition and step are given, with their range if there are
    several. The standard errors are those of the groups alone. They do not count how models differ.
    """
    measured: dict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    of_all: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        if (name := NAME.fullmatch(path.stem)) is None:
            raise ValueError(f"{path} is not named ARM-CONDITION-SEED-STEP.json")
        horizons = json.loads(path.read_text(encoding="utf-8"))["horizons"]
        longest = horizons[-1]["turns"]
        for row in estimates(horizons):
            model = row | {"groups": len(horizons[0]["own"]), "is_longest": row["turns"] == longest}
            measured[f"{name['arm']}, {name['condition']}", int(name["step"]), row["turns"]].append(model)
            of_all[row["turns"]].append(model)
    rows = [[run, str(step), str(turns), *_cells(models)] for (run, step, turns), models in sorted(measured.items())]
    rows += [["all", "", str(turns), *_cells(models)] for turns, models in sorted(of_all.items())]
    columns = ["run", "step", "turns", "models × groups", "groups with a gradient", "processed tokens a group"]
    ratio = "signal / noise per 1,000 processed tokens, thousandths"
    return [*columns, ratio, "agreement", "agreement less that of the longest horizon"], rows


def _cells(models: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"{len(models)} × {statistics.fmean(model['groups'] for model in models):.0f}",
        f"{statistics.fmean(model['contrast'] for model in models):.0%}",
        f"{statistics.fmean(model['tokens'] for model in models):,.0f}",
        mean_with_error([[1000 * x for x in model["ratio"]] for model in models]),
        mean_with_error([model["agreement"] for model in models]),
        "" if models[0]["is_longest"] else mean_with_error([model["gain"] for model in models], "+"),
    ]


def mean_with_error(models: Sequence[Sequence[float]], sign: str = "") -> str:
    """Return the mean of (estimate, standard error) over models, with the range of several estimates.

    A dash stands for an estimate that is not a number: a gradient that the groups did not show.
    """
    values, errors = zip(*models, strict=True)
    mean, error = statistics.fmean(values), math.hypot(*errors) / len(models)
    if not math.isfinite(mean + error):
        return "–"
    text = f"{mean:{sign}.2f} ± {error:.2f}"
    return text if len(models) == 1 else f"{text} ({min(values):{sign}.2f} to {max(values):{sign}.2f})"
