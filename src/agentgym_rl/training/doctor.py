"""The collapse doctor: watches a run's metrics step by step, or reads those of a finished one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from agentgym_rl.training.symptoms import RULES, WINDOW, Rows, Severity, is_number

QUIET_STEPS = 10
"""A symptom has ceased when it has not shown for so many steps; a signal that wavers about a limit warns once."""

SIGNALS: dict[str, str] = {
    "success/mean": "high",
    "reward/mean": "high",
    "groups/zero_variance": "low",
    "entropy/mean": "",
    "surprise/mean": "",
    "replies/dependence": "high",
    "actions/repeated_rate": "low",
    "actions/alternating_rate": "low",
    "actions/invalid_rate": "low",
    "truncated/horizon_rate": "low",
    "truncated/length_rate": "low",
    "truncated/context_rate": "low",
    "tokens/per_reply": "",
    "mismatch/abs": "low",
    "mismatch/kl": "low",
    "kl/reference": "low",
    "grad/norm": "low",
    "clip/fraction": "low",
    "skipped": "low",
    "episodes/error": "low",
}
"""What a diagnosis shows, and which end of each is the good one; of some neither is."""


@dataclass(slots=True)
class Finding:
    """A rule that began to hold."""

    step: int
    """When it was noticed."""
    rule: str
    severity: Severity
    message: str
    since: int
    """When it began, as far as the metrics show."""
    until: int | None = None
    """The last step it held at, once it has ceased."""

    def line(self) -> dict[str, Any]:
        """Its line in doctor.jsonl, written when it is noticed."""
        names = ("step", "rule", "severity", "message", "since")
        return {name: getattr(self, name) for name in names}


class Doctor:
    """Hears of every step once, in order. Its state is a function of the rows, so a resumed run replays them."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.findings: list[Finding] = []
        self.steps = 0
        self._rows = Rows()
        self._open: dict[str, Finding] = {}
        self._last_held: dict[str, int] = {}
        for row in _by_step(rows):
            self.observe(row)

    def observe(self, row: Mapping[str, Any]) -> list[Finding]:
        """What begins with this step. `row` has `step` and the step's metrics."""
        self._rows.add(row)
        self.steps += 1
        step, begun = int(row["step"]), []
        for name, (severity, rule) in RULES.items():
            symptom = rule(self._rows)
            finding = self._open.get(name)
            if symptom is not None:
                self._last_held[name] = step
                if finding is None:
                    begun.append(Finding(step, name, severity, symptom.message, symptom.since))
                    self._open[name] = begun[-1]
            elif finding is not None and step - self._last_held[name] >= QUIET_STEPS:
                finding.until = self._last_held[name]
                del self._open[name]
        self.findings += begun
        return begun


def signals(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """First, best and last of every signal that the rows have: means over the first, the best and the last window."""
    table: dict[str, dict[str, float | None]] = {}
    for name, good in SIGNALS.items():
        values = [float(row[name]) for row in rows if is_number(row.get(name))]
        if not values:
            continue
        size = min(WINDOW, len(values))
        means = [fmean(values[i : i + size]) for i in range(len(values) - size + 1)]
        best = {"high": max(means), "low": min(means)}.get(good)
        table[name] = {"first": means[0], "best": best, "last": means[-1]}
    return table


def diagnose(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The diagnosis of a run: `steps`, `healthy`, `verdict`, `signals` and `findings`; ready for JSON."""
    by_step = _by_step(rows)
    doctor = Doctor(by_step)
    findings = [finding.line() | {"until": finding.until} for finding in doctor.findings]
    return {
        "steps": doctor.steps,
        "healthy": not findings,
        "verdict": _verdict(doctor),
        "signals": signals(by_step),
        "findings": findings,
    }


def _verdict(doctor: Doctor) -> str:
    steps = doctor.steps
    if not doctor.findings:
        if steps < WINDOW:
            return f"too short to judge: {steps} steps, and most rules need {WINDOW}"
        return f"healthy: none of {len(RULES)} rules fired in {steps} steps"
    fired = list(dict.fromkeys(finding.rule for finding in doctor.findings))
    holding = [finding.rule for finding in doctor.findings if finding.until is None]
    ended = [rule for rule in fired if rule not in holding]
    parts = [f"still holding at the end: {', '.join(holding)}"] if holding else []
    parts += [f"passed: {', '.join(ended)}"] if ended else []
    return f"{len(fired)} of {len(RULES)} rules fired in {steps} steps; {'; '.join(parts)}"


def _by_step(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows that bear one step belong together."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        merged.setdefault(int(row["step"]), {}).update(row)
    return [merged[step] for step in sorted(merged)]
