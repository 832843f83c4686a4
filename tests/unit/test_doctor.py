"""The doctor's rules on artificial rows: each fires on its symptom, reports its start, and is silent otherwise."""

from __future__ import annotations

import ast
import json
import random
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from runs_for_tests import counting_config
from typer.testing import CliRunner

from agentgym_rl.cli import app
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.log import RunLog, read_metrics
from agentgym_rl.training import symptoms
from agentgym_rl.training.doctor import QUIET_STEPS, SIGNALS, Doctor, diagnose
from agentgym_rl.training.symptoms import RULES

Row = dict[str, Any]
HEALTHY: Row = {
    "success/mean": 0.4,
    "reward/mean": 0.4,
    "judged/mean": 0.3,
    "groups/zero_variance": 0.6,
    "entropy/mean": 0.7,
    "entropy/turn_1": 0.8,
    "entropy/turn_2": 0.6,
    "surprise/mean": 0.7,
    "replies/dependence": 0.5,
    "actions/repeated_rate": 0.2,
    "actions/alternating_rate": 0.05,
    "actions/invalid_rate": 0.2,
    "truncated/horizon_rate": 0.5,
    "truncated/length_rate": 0.02,
    "truncated/context_rate": 0.0,
    "tokens/per_reply": 20.0,
    "mismatch/abs": 0.01,
    "mismatch/kl": 0.001,
    "mismatch/turn_1": 0.01,
    "mismatch/turn_2": 0.012,
    "reward/spread": 0.3,
    "replies/diversity": 0.5,
    "kl/reference": 0.1,
    "grad/norm": 0.3,
    "clip/fraction": 0.02,
    "skipped": 0.0,
    "staleness/mean": 0.0,
    "episodes/usable": 64.0,
    "episodes/error": 1.0,
}
TURN = 21
"""First step with a symptom."""


def rows(count: int = 60, **ill: Any) -> list[Row]:
    """Return the rows of a healthy run, with changes from step TURN on. Names have `__` for the slash."""
    changes = {name.replace("__", "/"): value for name, value in ill.items()}
    return [{"step": s, **HEALTHY, **(changes if s >= TURN else {})} for s in range(1, count + 1)]


ILL: dict[str, tuple[list[Row], str]] = {
    "entropy_collapse": (rows(entropy__mean=0.02), "entropy fell from 0.70 to"),
    "entropy_explosion": (rows(entropy__mean=3.0), "entropy rose from 0.70 to"),
    "zero_advantage": (rows(groups__zero_variance=1.0), "no advantage"),
    "repeated_actions": (rows(actions__repeated_rate=0.9, success__mean=0.21), "repeat the one before"),
    "invalid_actions": (rows(actions__invalid_rate=0.9), "invalid"),
    "horizon_truncation": (
        [row | {"truncated/horizon_rate": 1.0, "success/mean": 0.0, "reward/mean": 0.0} for row in rows()],
        "end at the horizon",
    ),
    "length_truncation": (rows(truncated__length_rate=0.8), "cut at agent.max_new_tokens"),
    "context_truncation": (rows(truncated__context_rate=0.8), "out of context"),
    "length_runaway": (rows(tokens__per_reply=90.0), "grew from 20 to"),
    "length_collapse": (rows(tokens__per_reply=2.0), "shrank from 20 to"),
    "sampler_mismatch": (rows(mismatch__abs=0.4), "mismatch/abs"),
    "mismatch_over_turns": (rows(mismatch__turn_2=0.08), "in turn 2"),
    "kl_runaway": (rows(kl__reference=4.0), "KL to the reference"),
    "gradient_spikes": (rows(grad__norm=30.0), "gradient norms rose from 0.3 to 30"),
    "skipped_updates": (rows(skipped=0.5), "skipped"),
    "success_collapse": (rows(success__mean=0.05), "success fell from 40%"),
    "reward_hacking": (rows(success__mean=0.25, judged__mean=0.9), "rose from 0.30 to"),
    "template_collapse": (rows(replies__dependence=0.01), "dependence of replies"),
    "echo_trap": (rows(reward__spread=0.01, replies__diversity=0.02), "the echo trap"),
    "clipping": (rows(clip__fraction=0.5), "clipped"),
    "episode_errors": (rows(episodes__error=40.0), "of episodes fail"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_names_its_symptom_and_when_it_began(rule: str) -> None:
    ill, words = ILL[rule]
    doctor = Doctor(ill)
    (finding,) = [finding for finding in doctor.findings if finding.rule == rule]
    assert words in finding.message
    assert f" since step {finding.since}: " in finding.message
    assert finding.severity == RULES[rule][0]
    began = 1 if rule == "horizon_truncation" else TURN
    # A window that starts before the change may already be beyond the limit.
    assert began - 4 <= finding.since <= began
    assert began <= finding.step <= began + 20
    # Gradients are compared with the recent past, so a lasting change becomes normal.
    assert finding.until is None or rule == "gradient_spikes"


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_silent_in_a_healthy_run_and_without_its_metric(rule: str) -> None:
    assert Doctor(rows()).findings == []
    assert Doctor([{"step": step} for step in range(1, 30)]).findings == []
    broken = dict.fromkeys(HEALTHY) | {"nonfinite": list(HEALTHY)}
    assert Doctor([{"step": step, **broken} for step in range(1, 30)]).findings == []
    nan = dict.fromkeys(HEALTHY, float("nan"))
    assert Doctor([{"step": step, **nan} for step in range(1, 30)]).findings == []


def test_the_message_has_the_documented_form() -> None:
    (finding,) = Doctor(rows(entropy__mean=0.0)).findings
    assert finding.message == (
        f"entropy fell from 0.70 to 0 since step {TURN}: the policy stopped exploring; "
        "raise rl.entropy_coef or rl.kl_coef, or lower rl.optimizer.lr"
    )


def test_every_setting_in_a_remedy_exists() -> None:
    config = counting_config()
    sources = [node.value for node in ast.walk(ast.parse(Path(symptoms.__file__).read_text()))
               if isinstance(node, ast.Constant) and isinstance(node.value, str)]  # fmt: skip
    keys = {
        key for text in sources for key in re.findall(r"\b(?:rl|agent|model|horizon|warm_start)(?:\.[a-z_]+)+", text)
    }
    assert len(keys) > 15
    for key in keys:
        value: Any = config
        for part in key.split("."):
            assert hasattr(value, part), f"{key} is no setting"
            value = getattr(value, part)


@pytest.mark.parametrize(
    ("rule", "well"),
    [
        ("entropy_collapse", {"success__mean": 0.95}),
        ("zero_advantage", {"success__mean": 0.95}),
        ("template_collapse", {"success__mean": 0.95}),
        ("echo_trap", {"success__mean": 0.95}),
        ("echo_trap", {"reward__mean": 0.9}),
        ("echo_trap", {"replies__diversity": 0.4}),
        ("echo_trap", {"reward__spread": 0.2}),
        ("repeated_actions", {"success__mean": 0.6}),
        ("invalid_actions", {"success__mean": 0.6}),
        ("length_runaway", {"success__mean": 0.6}),
        ("length_collapse", {"success__mean": 0.6}),
    ],
)
def test_rules_are_silent_while_the_run_succeeds(rule: str, well: dict[str, float]) -> None:
    ill = [
        row if row["step"] < TURN - 5 else row | {k.replace("__", "/"): v for k, v in well.items()}
        for row in ILL[rule][0]
    ]
    assert rule in {finding.rule for finding in Doctor(ILL[rule][0]).findings}
    assert rule not in {finding.rule for finding in Doctor(ill).findings}


@pytest.mark.parametrize("rule", ["entropy_collapse", "zero_advantage", "template_collapse", "echo_trap"])
def test_in_self_play_only_held_out_success_shows_that_a_run_succeeds(rule: str) -> None:
    def found(**changes: float) -> set[str]:
        self_play = [row | {"elo/learner": 1000.0, "heldout/success": 0.4} for row in ILL[rule][0]]
        late = {name.replace("__", "/"): value for name, value in changes.items()}
        changed = [row | (late if row["step"] > TURN - symptoms.WINDOW else {}) for row in self_play]
        return {finding.rule for finding in Doctor(changed).findings}

    assert rule in found(elo__learner=1300.0)
    assert rule in found(elo__learner=1300.0, success__mean=0.95, reward__mean=0.9)
    assert rule not in found(heldout__success=0.95)


@pytest.mark.parametrize("rule", ["entropy_collapse", "echo_trap"])
def test_in_self_play_certainty_is_normal_while_held_out_success_is_near_its_best(rule: str) -> None:
    rising, falling = ([0.4] * 15 + [0.6] * 25 + [end] * 20 for end in (0.7, 0.3))
    for curve, expected in ((rising, False), (falling, True)):
        self_play = [row | {"heldout/success": x} for row, x in zip(ILL[rule][0], curve, strict=True)]
        assert (rule in {finding.rule for finding in Doctor(self_play).findings}) == expected


def test_a_short_first_stage_with_rising_reward_is_not_reported() -> None:
    stage = [row | {"truncated/horizon_rate": 0.97, "success/mean": 0.03, "reward/mean": 0.03} for row in rows(30)]
    assert "horizon_truncation" in {f.rule for f in Doctor(stage).findings}
    rising = [row | {"reward/mean": 0.02 * row["step"]} for row in stage]
    assert Doctor(rising).findings == []


def test_one_bad_step_is_noise() -> None:
    for name, value in {
        "groups/zero_variance": 1.0,
        "entropy/mean": 2.9,
        "kl/reference": 28.0,
        "grad/norm": 90.0,
        "clip/fraction": 0.6,
        "actions/invalid_rate": 1.0,
        "truncated/length_rate": 1.0,
        "success/mean": 0.0,
        "tokens/per_reply": 60.0,
        "replies/dependence": 0.0,
    }.items():
        noisy = [row | ({name: value} if row["step"] == TURN else {}) for row in rows()]
        assert Doctor(noisy).findings == [], name


def test_old_tokens_may_differ_more_and_a_mismatch_tells_their_age() -> None:
    def advice(age: float, **ill: float) -> list[str]:
        findings = diagnose(row | {"staleness/mean": age} for row in rows(**ill))["findings"]
        return [finding["message"] for finding in findings if finding["rule"] == "sampler_mismatch"]

    assert advice(2.0, mismatch__abs=0.25, mismatch__kl=0.1) == []
    (old,) = advice(2.0, mismatch__abs=0.4)
    assert "2.0 updates old" in old
    assert "rl.max_staleness" in old
    (fresh,) = advice(0.0, mismatch__abs=0.25)
    assert "agent.temperature" in fresh


def test_one_step_does_not_make_a_mismatch() -> None:
    def rules(*last: float) -> set[str]:
        healthy = rows()
        ill = [row | {"mismatch/abs": gap} for row, gap in zip(healthy[-3:], last, strict=True)]
        return {finding["rule"] for finding in diagnose([*healthy[:-3], *ill])["findings"]}

    assert "sampler_mismatch" not in rules(0.01, 0.01, 0.4)
    assert "sampler_mismatch" in rules(0.01, 0.2, 0.2)


def test_a_rule_cannot_read_a_metric_that_is_not_kept() -> None:
    kept = symptoms.Rows()
    kept.add({"step": 1, "time/step_s": 2.0})
    with pytest.raises(KeyError, match="time/step_s"):
        kept.last("time/step_s", 1)


def test_alternating_replies_and_single_turns_are_reported() -> None:
    assert "alternate" in Doctor(rows(actions__alternating_rate=0.6, success__mean=0.21)).findings[0].message
    assert "entropy in turn 2 rose" in Doctor(rows(entropy__turn_2=2.0)).findings[0].message
    (finding,) = Doctor(rows(surprise__mean=0.01)).findings
    assert finding.rule == "entropy_collapse"


def test_the_metric_of_late_turns_sorts_last() -> None:
    late = {f"mismatch/turn_{turn}": 0.01 for turn in range(2, 9)} | {"mismatch/turn_9+": 0.2}
    (finding,) = Doctor([row | late for row in rows()]).findings
    assert "in turn 9 and later" in finding.message


def findings_of(values: Callable[[int], float]) -> list[tuple[int, int | None]]:
    run_rows = [row | {"groups/zero_variance": values(row["step"])} for row in rows(120)]
    return [(finding.step, finding.until) for finding in Doctor(run_rows).findings]


def test_a_rule_warns_once_until_its_symptom_has_ended() -> None:
    assert findings_of(lambda step: 1.0 if step > 20 else 0.5) == [(25, None)]
    assert findings_of(lambda step: 1.0 if step > 20 and step % 12 else 0.5) == [(29, None)]
    first, second = findings_of(lambda step: 1.0 if 20 < step <= 40 or step > 80 else 0.5)
    assert first == (25, 40)
    assert second == (85, None)
    assert QUIET_STEPS > 5


def test_findings_after_a_run_equal_those_during_it() -> None:
    run_rows = ILL["success_collapse"][0]
    live_doctor = Doctor()
    lines = [finding.line() for row in run_rows for finding in live_doctor.observe(row)]
    assert lines == [finding.line() for finding in Doctor(run_rows).findings] != []
    resumed = Doctor(run_rows[:30])
    more = [finding.line() for row in run_rows[30:] for finding in resumed.observe(row)]
    assert lines == [f.line() for f in Doctor(run_rows[:30]).findings] + more
    assert set(lines[0]) == {"step", "rule", "severity", "message", "since"}


def test_lines_of_the_same_step_are_merged() -> None:
    run_rows = ILL["clipping"][0]
    split = [part for row in run_rows for part in ({"step": row["step"]}, row)]
    assert diagnose(split) == diagnose(run_rows)


def test_a_long_run_is_diagnosed_quickly() -> None:
    started = time.process_time()
    Doctor(rows(2000, groups__zero_variance=1.0))
    assert time.process_time() - started < 5.0


def test_recent_values_are_the_numbers_among_twice_as_many_rows() -> None:
    kept = symptoms.Rows()
    for step in range(10, 300, 10):
        kept.add({"step": step, "skipped": None if step > 250 else step / 10, "grad/norm": float("nan")})
    assert kept.last("skipped", 4) == [(220, 22.0), (230, 23.0), (240, 24.0), (250, 25.0)]
    assert kept.last("skipped", 3) == [(240, 24.0), (250, 25.0)]
    assert kept.last("skipped", 2) == kept.last("grad/norm", 100) == kept.last("clip/fraction", 100) == []
    assert kept.last("skipped", 100) == [(step, step / 10) for step in range(10, 260, 10)]


def kept_bytes(steps: int, others: int) -> int:
    """Return the bytes that a doctor holds after rows with `others` metrics that no rule reads."""
    names = [*HEALTHY, *(f"other/{number}" for number in range(others))]
    tracemalloc.start()
    try:
        doctor = Doctor()
        for step in range(1, steps + 1):
            luck = 1.0 + step % 7 * 1e-3
            doctor.observe({"step": step} | {name: luck * HEALTHY.get(name, 1.0) for name in names})
        assert doctor.steps == steps
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_memory_grows_neither_with_steps_nor_with_unused_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentgym_rl.training.doctor.RULES", {})  # rules keep no state and are slow to trace
    whole = kept_bytes(2 * symptoms.MEMORY, 0)
    assert kept_bytes(6 * symptoms.MEMORY, 0) < 1.05 * whole
    assert kept_bytes(2 * symptoms.MEMORY, 100) < 1.05 * whole
    assert kept_bytes(symptoms.MEMORY, 0) < 0.6 * whole


def test_a_doctor_keeps_the_metrics_that_its_rules_name() -> None:
    rules = [node for node in ast.parse(Path(symptoms.__file__).read_text()).body if isinstance(node, ast.FunctionDef)]
    words = {node.value for rule in rules for node in ast.walk(rule) if isinstance(node, ast.Constant)}
    assert words & {*HEALTHY, *SIGNALS, *symptoms.METRICS} == symptoms.METRICS
    assert words >= {name.removesuffix("/turn_") for name in symptoms.METRICS_BY_TURN}


def test_the_start_of_a_run_is_kept_after_its_rows_are_dropped() -> None:
    run_rows = [row | {"entropy/mean": 0.02 if row["step"] > 500 else 0.7} for row in rows(520)]
    (finding,) = Doctor(run_rows).findings
    assert "entropy fell from 0.70" in finding.message
    assert 496 <= finding.since <= 501


def test_every_rule_is_short_and_every_signal_is_documented() -> None:
    for function in ast.parse(Path(symptoms.__file__).read_text()).body:
        if isinstance(function, ast.FunctionDef):
            assert function.end_lineno is not None
            assert function.end_lineno - function.lineno < 50, function.name
    docs = Path(__file__).parents[2] / "docs"
    described, listed = (docs / "reference/run-directory.md").read_text(), (docs / "guides/doctor.md").read_text()
    assert [name for name in SIGNALS if f"`{name}`" not in described] == []
    assert [rule for rule in RULES if f"`{rule}`" not in listed] == []


def test_diagnosis() -> None:
    diagnosis = diagnose(ILL["success_collapse"][0])
    assert diagnosis["signals"]["success/mean"] == {
        "first": pytest.approx(0.4),
        "best": pytest.approx(0.4),
        "last": pytest.approx(0.05),
    }
    assert diagnosis["signals"]["entropy/mean"]["best"] is None
    assert not diagnosis["healthy"]
    assert "still holding at the end: success_collapse" in diagnosis["verdict"]
    assert "passed: clipping" in diagnose(rows(80, clip__fraction=0.5)[:40] + rows(80)[40:])["verdict"]
    assert diagnose(rows(3))["verdict"].startswith("too short to judge: 3 steps")
    assert diagnose([])["steps"] == 0
    assert diagnose(rows())["verdict"].startswith("healthy")


def write_run(folder: Path, run_rows: list[Row]) -> Path:
    with RunLog.create(folder, {"seed": 0}) as log:
        for row in run_rows:
            log.log(row["step"], {name: value for name, value in row.items() if name != "step"})
    return folder


def test_the_command_prints_findings_as_text_and_json(tmp_path: Path) -> None:
    runner = CliRunner()
    well, ill = write_run(tmp_path / "well", rows()), write_run(tmp_path / "ill", ILL["kl_runaway"][0])
    healthy = runner.invoke(app, ["doctor", str(well)])
    assert (healthy.exit_code, "healthy: none of" in healthy.output) == (0, True)
    sick = runner.invoke(app, ["doctor", str(ill)])
    assert sick.exit_code == 1
    for words in ("kl_runaway", "KL to the reference is 4 per token since step", "rl.kl_coef", "kl/reference"):
        assert words in sick.output
    as_json = runner.invoke(app, ["doctor", str(ill / "metrics.jsonl"), "--json"])
    assert as_json.exit_code == 1
    assert [finding["rule"] for finding in json.loads(as_json.output)["findings"]] == ["kl_runaway"]


@pytest.mark.parametrize("name", ["nowhere", ""])
def test_the_command_needs_a_run(tmp_path: Path, name: str) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / name)])
    assert isinstance(result.exception, ConfigError)
    assert "needs a run directory" in str(result.exception)


def test_findings_after_a_checkpoint_are_removed_on_resume(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, {"seed": 0}) as log:
        for step in (3, 7, 9):
            log.log_finding({"step": step, "rule": "clipping"})
    with (tmp_path / "doctor.jsonl").open("ab") as file:
        file.write(b'{"step": 11, "ru')
    with RunLog.create(tmp_path, {"seed": 0}, resume=True) as log:
        assert [row["step"] for row in read_metrics(log.doctor_path)] == [3, 7, 9]
        log.truncate_after(7)
        assert [row["step"] for row in read_metrics(log.doctor_path)] == [3, 7]


@pytest.mark.parametrize(("falls", "expected"), [(False, []), (True, ["success_collapse"])])
def test_noisy_success_counts_as_a_collapse_only_if_it_remains_low(falls: bool, expected: list[str]) -> None:
    """Sixteen tasks per step, some of them too hard: success varies between 5% and 45% by chance."""
    luck = random.Random(0)
    run_rows = rows(250)
    for row in run_rows:
        level = 0.02 if falls and row["step"] > 180 else 0.22
        row["success/mean"] = fmean(luck.random() < level for _ in range(16))
    findings = diagnose(run_rows)["findings"]
    assert [finding["rule"] for finding in findings] == expected
    assert all(180 < finding["step"] <= 210 for finding in findings)
