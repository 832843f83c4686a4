"""The collapse doctor: checks a run's metrics after each step, or those of a finished run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from agentgym_rl.training.symptoms import RULES, WINDOW, Rows, Severity, is_number

QUIET_STEPS = 10
"""Steps without a symptom before its finding ends. A signal that oscillates around a limit thus warns once."""

SIGNALS: dict[str, str] = {
    "success/mean": "high",
    "reward/mean": "high",
    "reward/spread": "high",
    "judged/mean": "high",
    "groups/zero_variance": "low",
    "entropy/mean": "",
    "surprise/mean": "",
    "replies/dependence": "high",
    "replies/diversity": "",
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
"""Signals of a diagnosis, and whether high or low is good; empty if neither is."""


@dataclass(slots=True)
class Finding:
    """A rule that fired."""

    step: int
    """Step at which the rule fired."""
    rule: str
    severity: Severity
    message: str
    since: int
    """Step at which the symptom began, as far as the metrics show."""
    until: int | None = None
    """Last step with the symptom; None while it lasts."""

    def line(self) -> dict[str, Any]:
        """Return the line for doctor.jsonl, which is written when the rule fires."""
        names = ("step", "rule", "severity", "message", "since")
        return {name: getattr(self, name) for name in names}


class Doctor:
    """Checks every step once, in order. Its state depends on the rows alone, so a resumed run replays them."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.findings: list[Finding] = []
        self.steps = 0
        self._rows = Rows()
        self._open: dict[str, Finding] = {}
        self._last_held: dict[str, int] = {}
        for row in _by_step(rows):
            self.observe(row)

    def observe(self, row: Mapping[str, Any]) -> list[Finding]:
        """Return the findings that begin with this step. `row` has `step` and the step's metrics."""
        self._rows.add(row)
        self.steps += 1
        step, new_findings = int(row["step"]), []
        for name, (severity, rule) in RULES.items():
            symptom = rule(self._rows)
            finding = self._open.get(name)
            if symptom is not None:
                self._last_held[name] = step
                if finding is None:
                    new_findings.append(Finding(step, name, severity, symptom.message, symptom.since))
                    self._open[name] = new_findings[-1]
            elif finding is not None and step - self._last_held[name] >= QUIET_STEPS:
                finding.until = self._last_held[name]
                del self._open[name]
        self.findings += new_findings
        return new_findings


def signals(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return the means of every signal over its first, best and last window."""
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
    """Return the diagnosis of a run, ready for JSON: `steps`, `healthy`, `verdict`, `signals` and `findings`."""
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
    """Return one row per step, in order. Rows of the same step are merged."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        merged.setdefault(int(row["step"]), {}).update(row)
    return [merged[step] for step in sorted(merged)]
