"""Preferences of people: clicked in a real browser, stored, exported as DPO's pairs, and trained on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser_for_tests import WAIT_MS, chromium, go
from playwright.sync_api import Page, expect
from runs_for_tests import counting_config, train_counting
from typer.testing import CliRunner
from viewer_for_tests import library_of, viewer_in_thread, write_run

from agentgym_rl.cli import app
from agentgym_rl.config import Config
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.log import read_metrics, read_trajectories
from agentgym_rl.training.preferences import PreferredPair, export_pairs, find_preferences, read_preferences
from agentgym_rl.types import Message, Task, Trajectory
from agentgym_rl.viewer.discovery import RunFolder
from agentgym_rl.viewer.preference_store import preferences_of, store_preference

PAIR = "a=small%7Cstep_000002.0&b=small%7Cstep_000002.1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "small")
    return tmp_path / "runs"


@pytest.fixture
def url(root: Path, tmp_path: Path) -> Iterator[str]:
    with viewer_in_thread(library_of(root, tmp_path)) as address:
        yield address


@pytest.fixture
def page() -> Iterator[Page]:
    with chromium() as browser:
        context = browser.new_context(viewport={"width": 1280, "height": 860})
        context.set_default_timeout(WAIT_MS)
        tab = context.new_page()
        problems: list[str] = []
        tab.on("pageerror", lambda error: problems.append(f"{error}"))
        yield tab
        context.close()
        assert not problems


def test_a_click_stores_which_episode_is_better_with_who_and_when(page: Page, url: str, root: Path) -> None:
    path = root / "small" / "preferences.jsonl"
    go(page, f"{url}#/compare?{PAIR}&pictures=no")
    page.click(".prefer-left")
    expect(page.locator(".said")).to_contain_text("Give your name first")
    assert not path.exists()
    page.fill(".prefer input", "Ada")
    page.click(".prefer-left")
    expect(page.locator(".said")).to_have_text("Ada: A is better")
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (row["by"], row["better"], row["time"] > 1e9) == ("Ada", "left", True)
    (pair,) = read_preferences([path])
    assert (pair.chosen.id, pair.rejected.id) == ("train-2-0-0-0", "train-2-0-1-0")
    assert pair.chosen.messages[-1].content

    page.keyboard.press("b")  # the name is known, and the same person may think again
    expect(page.locator(".said")).to_have_text("Ada: B is better")
    page.keyboard.press("s")
    expect(page.locator(".said")).to_have_text("Ada: A is better")  # the sides are swapped
    (pair,) = read_preferences([path])
    assert pair.chosen.id == "train-2-0-1-0"
    page.click(".prefer >> text=Another pair")
    expect(page.locator(".said")).to_have_text("")
    expect(page.locator(".prefer input")).to_have_value("Ada")

    out = root / "pairs.jsonl"
    result = CliRunner().invoke(app, ["preferences", str(root / "small"), str(out)])
    assert "wrote 1 pairs" in result.output
    (exported,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert [m["role"] for m in exported["prompt"]] == ["system", "user"]
    assert exported["chosen"][0]["role"] == exported["rejected"][0]["role"] == "assistant"
    assert (exported["env"], exported["by"]) == ("maze", "Ada")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"by": " "}, "needs the name"),
        ({"by": "x" * 81}, "needs the name"),
        ({"better": "up"}, "better must be"),
        ({"right_key": "step_000002.4"}, "different items"),
        ({"right_key": "step_000002.0"}, "one and the same"),
    ],
)
def test_a_preference_that_means_nothing_is_refused(url: str, root: Path, change: dict[str, str], message: str) -> None:
    pair = {"left_run": "small", "left_key": "step_000002.0", "right_run": "small", "right_key": "step_000002.1"}
    body = {**pair, "better": "left", "by": "Ada", **change}
    answer = httpx.post(f"{url}api/prefer", json=body, headers={"origin": url.rstrip("/")}, timeout=60)
    assert answer.status_code == 400
    assert message in answer.json()["detail"]
    foreign = httpx.post(f"{url}api/prefer", json=body, headers={"origin": "http://evil.example"}, timeout=60)
    assert foreign.status_code == 403
    assert not (root / "small" / "preferences.jsonl").exists()


def downs(trajectory: Trajectory) -> float:
    replies = [m.content for m in trajectory.messages if m.role == "assistant"]
    return replies.count("down") / max(1, len(replies))


def test_dpo_learns_what_people_prefer(tmp_path: Path) -> None:
    """The environment pays for counting up, people prefer counting down."""
    played = tmp_path / "played"
    asyncio.run(train_counting(counting_config(rl__groups_per_step=24, checkpoint={"every": 1, "keep": 9}), played))
    folder = RunFolder("played", played, "run")
    count = 0
    for path in sorted((played / "trajectories").glob("step_*.jsonl")):
        by_task: dict[Any, list[Trajectory]] = {}
        for trajectory in read_trajectories(path):
            by_task.setdefault(trajectory.task, []).append(trajectory)
        for episodes in by_task.values():
            ordered = sorted(episodes, key=downs)
            if downs(ordered[-1]) > downs(ordered[0]):
                worse, better = (("played", json.loads(t.to_json())) for t in (ordered[0], ordered[-1]))
                store_preference(folder, worse, better, "right", "Ada")
                count += 1
    assert count >= 10
    raw = counting_config().model_dump(exclude_none=True)
    kept = {name: raw[name] for name in ("threads", "environments", "agent", "eval", "checkpoint")}
    dpo = {"preferences": [str(played)], "epochs": 6, "batch_size": 8, "optimizer": {"lr": 3e-3}}
    model = {"path": str(played / "checkpoints" / "step_000000" / "model")}
    config = Config.model_validate(kept | {"method": "dpo", "model": model, "dpo": dpo})
    summary = asyncio.run(train_counting(config, tmp_path / "dpo"))
    rows = read_metrics(tmp_path / "dpo" / "metrics.jsonl")
    assert rows[0]["round/preferred"] == summary["rounds"][0]["pairs"] == count
    assert rows[-1]["dpo/accuracy"] > 0.9
    before, after = (
        list(read_trajectories(tmp_path / "dpo" / "trajectories" / f"eval_{step:06d}.jsonl"))
        for step in (0, summary["steps"])
    )
    assert sum(map(downs, after)) > sum(map(downs, before)) + 1.0


def episode(text: str, *, name: str = "train-1", reply: bool = True, prompt: str = "go") -> dict[str, Any]:
    messages = [Message("user", word) for word in prompt.split()]
    messages += [Message("assistant", text, [1], [-0.5])] * reply
    return dict(json.loads(Trajectory(name, Task("maze", 1), messages, [0.0] * reply, [{}] * reply).to_json()))


def texts(pairs: list[PreferredPair]) -> list[tuple[str, str]]:
    return [(p.chosen.messages[-1].content, p.rejected.messages[-1].content) for p in pairs]


def test_a_text_may_contain_any_line_separator(tmp_path: Path) -> None:
    folder = RunFolder("r", tmp_path, "run")
    strange = "a\u2028b\u2029c\x85d\x0be\x1ef"
    store_preference(folder, ("r", episode(strange)), ("r", episode("plain", name="train-2")), "left", "Ada")
    with (tmp_path / "preferences.jsonl").open("ab") as file:
        file.write('{"torn": "\u2028'.encode())
    assert texts(read_preferences([tmp_path / "preferences.jsonl"])) == [(strange, "plain")]


def test_runs_with_equal_names_and_ids_do_not_replace_each_others_choices(tmp_path: Path) -> None:
    """Ids follow from the seed, so two runs of one recipe have the same."""
    for name in ("first", "second"):
        folder = RunFolder("run", tmp_path / name, "run")
        folder.path.mkdir()
        left, right = (("run", episode(f"{side} of {name}", name=side)) for side in ("left", "right"))
        store_preference(folder, left, right, "right", "Ada")
    pairs = read_preferences(find_preferences([str(tmp_path / "first"), str(tmp_path / "second")]))
    assert texts(pairs) == [("right of first", "left of first"), ("right of second", "left of second")]


def test_a_later_choice_replaces_an_earlier_one_under_another_name_of_the_run(tmp_path: Path) -> None:
    folder = RunFolder("run", tmp_path, "run")
    left, right = episode("a", name="train-1"), episode("b", name="train-2")
    store_preference(folder, ("run", left), ("run", right), "left", "Ada")
    store_preference(folder, ("runs/run", right), ("runs/run", left), "left", "Ada")
    assert texts(read_preferences([tmp_path / "preferences.jsonl"])) == [("b", "a")]
    (said,) = preferences_of((folder, "train-1"), (folder, "train-2"))
    assert said["better"] == "right"


def test_a_choice_between_runs_is_shown_from_both_sides(tmp_path: Path) -> None:
    first, second = (RunFolder(name, tmp_path / name, "run") for name in ("first", "second"))
    first.path.mkdir()
    second.path.mkdir()
    store_preference(first, ("first", episode("a")), ("second", episode("b")), "left", "Ada")
    assert [s["better"] for s in preferences_of((first, "train-1"), (second, "train-1"))] == ["left"]
    assert [s["better"] for s in preferences_of((second, "train-1"), (first, "train-1"))] == ["right"]
    store_preference(second, ("second", episode("b")), ("first", episode("a")), "left", "Ada")
    assert [s["better"] for s in preferences_of((first, "train-1"), (second, "train-1"))] == ["right"]
    assert preferences_of((first, "train-1"), (first, "train-2")) == []


def test_exported_pairs_start_with_a_reply(tmp_path: Path) -> None:
    """The two episodes may come from runs with different instructions."""
    folder = RunFolder("r", tmp_path, "run")
    store_preference(folder, ("r", episode("a", prompt="be quick")), ("s", episode("b", prompt="go")), "left", "Ada")
    store_preference(folder, ("r", episode("a")), ("s", episode("", name="train-2", reply=False)), "left", "Ada")
    assert export_pairs([str(tmp_path)], tmp_path / "pairs.jsonl") == (1, 0)
    row = json.loads((tmp_path / "pairs.jsonl").read_text())
    assert [m["content"] for m in row["prompt"]] == ["be", "quick"]
    assert [row[side] for side in ("chosen", "rejected")] == [
        [{"role": "assistant", "content": "a"}],
        [{"role": "assistant", "content": "b"}],
    ]


def test_the_export_says_how_many_pairs_are_of_held_out_items(url: str, root: Path) -> None:
    """Pairs of evaluation episodes are exported, and marked. Training leaves them out."""
    pairs = [("step_000002.0", "step_000002.1"), ("eval_000000.1", "eval_000003.1"), ("eval_000000.2", "eval_000003.2")]
    out, rows = root / "pairs.jsonl", []
    for left, right in pairs:
        sides = {"left_run": "small", "left_key": left, "right_run": "small", "right_key": right}
        body = {**sides, "better": "right", "by": "Ada"}
        answer = httpx.post(f"{url}api/prefer", json=body, headers={"origin": url.rstrip("/")}, timeout=60)
        assert answer.status_code == 200, answer.text
        result = CliRunner().invoke(app, ["preferences", str(root / "small"), str(out)])
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        count = sum(row["held_out"] for row in rows)
        assert (f"{count} of them are of held-out items" in result.output) is (count > 0)
    assert [row["held_out"] for row in rows] == [False, True, True]
    assert [row["item"] for row in rows] == [20, 1, 2]


def test_preferences_that_are_missing_or_damaged_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: choose between episodes"):
        find_preferences([str(tmp_path)])
    (tmp_path / "preferences.jsonl").write_text('{"by": "Ada"}\n{"torn')
    with pytest.raises(ConfigError, match="line 1 is not a preference"):
        read_preferences(find_preferences([str(tmp_path)]))
