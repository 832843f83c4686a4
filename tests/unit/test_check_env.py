"""The command check-env: a good environment passes, and each defect is found and named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym_rl.commands.check_env import findings_of

EXAMPLES = Path(__file__).parents[2] / "examples"
DEFECTS = """
import random
import time

import numpy

from number_guessing import NumberGuessing
from agentgym_rl.errors import EnvUnavailable
from agentgym_rl.types import Step


class Clock(NumberGuessing):
    def reset(self, item):
        super().reset(item)
        return f"It is {time.perf_counter_ns()}."


class GlobalRandom(NumberGuessing):
    def reset(self, item):
        super().reset(item)
        return f"I have a number from 1 to 100. Luck: {random.random()}"


class SharedState(NumberGuessing):
    shared = {}

    def reset(self, item):
        self.shared["item"] = item
        return super().reset(item)

    def step(self, text):
        step = super().step(text)
        step.observation += str(self.shared["item"])
        return step


class SetOrder(NumberGuessing):
    def reset(self, item):
        super().reset(item)
        return "Words: " + " ".join({f"word{number}" for number in range(20)})


class Raising(NumberGuessing):
    def step(self, text):
        int(text)
        return super().step(text)


class Gullible(NumberGuessing):
    def step(self, text):
        if "success" in text:
            return Step("You said it.", 1.0, True, {"success": True})
        return super().step(text)


class NotJson(NumberGuessing):
    def step(self, text):
        step = super().step(text)
        step.info["seen"] = {1, 2}
        return step


class Silent(NumberGuessing):
    def step(self, text):
        step = super().step(text)
        step.info.pop("success", None)
        return step


class Slow(NumberGuessing):
    def step(self, text):
        time.sleep(0.02)
        return super().step(text)


class Stuck(NumberGuessing):
    def oracle(self):
        return "1"


class Lost(NumberGuessing):
    def oracle(self):
        return "what?"


class NoSubset(NumberGuessing):
    @classmethod
    def subsets_of(cls, item):
        return ("middle",)


class NoPicture(NumberGuessing):
    def render(self):
        return "<svg></svg>"


class OneSession(NumberGuessing):
    is_open = False

    def reset(self, item):
        if OneSession.is_open and not vars(self):
            raise EnvUnavailable("the server is full")
        OneSession.is_open = True
        return super().reset(item)

    def close(self):
        if vars(self):
            OneSession.is_open = False


class Float32(NumberGuessing):
    def step(self, text):
        step = super().step(text)
        step.reward = numpy.float32(step.reward)
        return step


class Digits(NumberGuessing):
    def step(self, text):
        return super().step(str(int(text)) if text.isdigit() else text)


class Sketch:
    name, subsets = "sketch", ["easy"]

    def reset(self, item):
        return ""


class Modest(NumberGuessing):
    cheap = False
    oracle = actions = render = None

    def step(self, text):
        return Step("Wrong.", info={"valid": True})
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "defects_for_tests.py").write_text(DEFECTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES}:{':'.join(sys.path)}")
    monkeypatch.delitem(sys.modules, "defects_for_tests", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "check", "words"),
    [
        ("Clock", "determinism", ["is not the same game when it is reset again", "observation of the reset"]),
        ("GlobalRandom", "determinism", ["is not the same game", "Luck"]),
        ("SetOrder", "determinism", ["differs between processes", "order of a set"]),
        ("SharedState", "concurrency", ["is another game while others are played", "keep state in the instance"]),
        ("OneSession", "concurrency", ["6 sessions at once are not possible: the server is full", "agent.concurrency"]),
        ("Float32", "random play", ["must return a float as reward, got float32: write float(reward)"]),
        ("Digits", "hostile actions", ["only a long number", "raised ValueError"]),
        ("Raising", "hostile actions", ["'empty'", "raised ValueError"]),
        ("Gullible", "hostile actions", ["is rewarded"]),
        ("NotJson", "random play", ["an info that JSON can represent", "set"]),
        ("Silent", "random play", ["no info['success']"]),
        ("Slow", "speed", ["too slow for the event loop, set cheap = False"]),
        ("Stuck", "oracle", ["does not end within"]),
        ("Lost", "oracle", ["'what?' is invalid"]),
        ("NoSubset", "subsets", ["subsets_of(0) is ('middle',)"]),
        ("NoPicture", "optional methods", ["an SVG needs xmlns"]),
    ],
)
def test_a_defect_is_found(name: str, check: str, words: list[str]) -> None:
    findings = findings_of(f"defects_for_tests:{name}", {})
    errors = {finding.check: finding.text for finding in findings if finding.level == "error"}
    assert list(errors) == [check], findings
    for word in words:
        assert word in errors[check]


def test_all_mistakes_in_the_shape_of_a_class_are_listed_at_once() -> None:
    findings = findings_of("defects_for_tests:Sketch", {})
    assert {finding.level for finding in findings} == {"error"}
    text = "\n".join(finding.text for finding in findings)
    for missing in ("no method step", "no method close", "no method subsets_of", "no attribute splits"):
        assert missing in text
    assert "subsets is ['easy']" in text


def test_advice_is_no_failure() -> None:
    findings = findings_of("defects_for_tests:Modest", {})
    advice = {finding.check: finding.text for finding in findings if finding.level == "advice"}
    assert {finding.level for finding in findings} == {"ok", "advice"}
    assert set(advice) - {"speed"} == {"random play", "hostile actions"}  # speed: if this machine is fast enough
    assert "info['valid'] = False" in advice["hostile actions"]


def test_the_command_prints_findings_and_exits_with_1_on_failure(folder: Path) -> None:
    def check(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "agentgym_rl", "check-env", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)

    good = check("number_guessing:NumberGuessing")
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.endswith("number_guessing:NumberGuessing is ready\n")
    bad = check("defects_for_tests:Raising", "--json")
    assert bad.returncode == 1
    assert [row["check"] for row in json.loads(bad.stdout) if row["level"] == "error"] == ["hostile actions"]
    unknown = check("defects_for_tests:Nothing")
    assert unknown.returncode == 2
    assert unknown.stderr.count("\n") == 1
