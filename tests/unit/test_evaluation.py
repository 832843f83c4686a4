"""Records, metrics, folders, tables and comparisons of evaluations, on episodes made by hand."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentgym_rl.agent.engines.openai import Prices, Tokens
from agentgym_rl.commands.eval_options import parse_prices, parse_turns
from agentgym_rl.commands.report import report as write_report
from agentgym_rl.errors import ConfigError
from agentgym_rl.evaluation.compare import compare, load_side, verdict
from agentgym_rl.evaluation.folder import Folder, read_evaluation, read_records
from agentgym_rl.evaluation.metrics import results
from agentgym_rl.evaluation.plan import Episode, TaskPlan, episodes_of
from agentgym_rl.evaluation.plot import turns_plot
from agentgym_rl.evaluation.records import Record, record_of
from agentgym_rl.evaluation.report import (
    FEWER_ITEMS_NOTE,
    PARTIAL_NOTE,
    Entry,
    entry_of,
    format_dollars,
    grids,
    markdown,
    notes,
    published_entries,
)
from agentgym_rl.evaluation.suites import AGENTGYM_27, evenly_spaced
from agentgym_rl.evaluation.terminal import print_comparison, print_report
from agentgym_rl.run.log import read_trajectories
from agentgym_rl.types import Limits, Message, StopReason, Task, Trajectory


def plan(scenario: str, name: str, items: range, env: str = "toy", **changes: Any) -> TaskPlan:
    given = {"split": "test", "subset": None, "max_turns": 8, "style": "act", "max_context": 100, "data": "toys"}
    return TaskPlan(scenario, name, env, items=tuple(items), **{**given, **changes})


def trajectory(
    item: int,
    rewards: list[float],
    stop: StopReason = StopReason.DONE,
    env: str = "toy",
    *,
    tokens: bool = False,
    seen: bool = False,
) -> Trajectory:
    """Make an episode, solved if it is done and its rewards sum to 1. With tokens: 5 of prompt, 2 per reply, 3 between.

    A failure is that of the last step, or of the next reply if the last step was `seen`.
    """
    messages = [Message("user", "look", [1] * 5 if tokens else [])]
    for _ in rewards:
        messages.append(Message("assistant", "go", [2, 2] if tokens else [], [-1.0, -1.0] if tokens else None))
        messages.append(Message("user", "seen", [3] * 3 if tokens else []))
    error = "EnvError: broken" if stop is StopReason.ERROR else None
    if error and not seen:
        messages.pop()
    return Trajectory("t", Task(env, item), messages, rewards, [{} for _ in rewards], stop, error, 8)


def record(item: int, rewards: list[float], stop: StopReason = StopReason.DONE, sample: int = 0, **more: Any) -> Record:
    usage = more.pop("usage", None)
    return record_of(trajectory(item, rewards, stop, **more), sample, ("A/a",), usage)


def attempts(*records: Record) -> dict[Any, list[Record]]:
    by_episode: dict[Any, list[Record]] = {}
    for record in records:
        by_episode.setdefault(record.key, []).append(record)
    return by_episode


WON, LOST, CUT, BROKEN = [0.0, 1.0], [0.0], [0.0] * 8, [0.0, 0.0, 0.0]


def test_outcome_of_an_episode_at_shorter_horizons() -> None:
    won = record(0, [0.25, 0.0, 0.75])
    assert [won.at_horizon(turns) for turns in (1, 2)] == [won.at_horizon(1), won.at_horizon(2)]
    one, three, nine = won.at_horizon(1), won.at_horizon(3), won.at_horizon(9)
    assert one is not None
    assert (one.success, one.reward, one.turns, one.truncated) == (False, 0.25, 1, True)
    assert three == nine
    assert three is not None
    assert (three.success, three.reward, three.turns, three.truncated) == (True, 1.0, 3, False)


def test_a_failed_step_leaves_shorter_horizons_valid() -> None:
    broken = record(0, BROKEN, StopReason.ERROR)
    assert broken.at_horizon(3) is None
    assert broken.at_horizon(8) is None
    two = broken.at_horizon(2)
    assert two is not None
    assert (two.success, two.turns) == (False, 2)


def test_a_failed_reply_leaves_shorter_horizons_valid() -> None:
    """At a horizon of three turns the fourth reply is never requested."""
    failed = record(0, [0.25, 0.0, 0.5], StopReason.ERROR, seen=True)
    assert failed.at_horizon(4) is None
    three = failed.at_horizon(3)
    assert three is not None
    assert (three.success, three.reward, three.turns, three.truncated) == (False, 0.75, 3, True)
    assert record(0, [0.25, 0.0, 0.5], StopReason.ERROR).at_horizon(3) is None


def test_tokens_of_a_local_model_are_counted_as_an_api_bills_them() -> None:
    counted = record(0, [0.0, 0.0, 1.0], tokens=True).tokens
    assert counted is not None
    assert [(t.prompt, t.completion) for t in counted] == [(5, 2), (10, 2), (15, 2)]
    assert record(0, WON).tokens is None


def test_cell_has_rates_errors_and_intervals() -> None:
    plans = [plan("A", "a", range(4))]
    tried = attempts(
        record(0, WON),
        record(1, LOST),
        record(2, BROKEN, StopReason.ERROR),
        record(2, BROKEN, StopReason.ERROR),
        record(3, BROKEN, StopReason.ERROR),
        record(3, WON),
    )
    (result,) = results(plans, tried, 1, None, None)
    cell = result["tasks"]["A/a"]
    assert (cell["items"], cell["episodes"], cell["errors"], cell["unplayed"]) == (4, 3, 1, 0)
    assert cell["success"]["value"] == pytest.approx(2 / 3)
    assert cell["success_errors_as_failures"] == pytest.approx(2 / 4)
    assert cell["success"]["low"] == pytest.approx(0.2077, abs=1e-4)  # Wilson of 2 in 3
    assert cell["turns"] == pytest.approx(5 / 3)
    assert result["overall"] is None  # no mean over a single scenario
    del tried["toy", 0, 0]
    (result,) = results(plans, tried, 1, None, None)
    assert result["tasks"]["A/a"]["unplayed"] == 1


def test_a_scenario_pools_its_items_and_the_mean_is_over_scenarios() -> None:
    plans = [plan("A", "a", range(3)), plan("A", "b", range(3, 4)), plan("B", "b", range(2), env="other")]
    tried = attempts(
        *(record(item, WON) for item in range(3)),
        record(3, CUT, StopReason.MAX_TURNS),
        record(0, LOST, env="other"),
        record(1, LOST, env="other"),
    )
    (result,) = results(plans, tried, 1, None, None)
    assert result["scenarios"]["A"]["success"]["value"] == 0.75
    assert result["scenarios"]["A"]["truncated"] == 0.25
    assert result["overall"]["success"]["value"] == 0.375
    assert result["total"]["episodes"] == 6
    missing = plan("C", "c", range(0), env="absent", missing="not installed")
    (result,) = results([*plans, missing], tried, 1, None, None)
    assert (result["scenarios"]["C"], result["overall"]) == (None, None)


def test_pass_at_k_and_mean_over_several_samples() -> None:
    """Item 0 is solved in 2 of 4 samples, item 1 in 0 of 3 with one error. pass@2 of item 0 is 1 - 1/6."""
    tried = attempts(
        *(record(0, WON if sample < 2 else LOST, sample=sample) for sample in range(4)),
        *(record(1, LOST, sample=sample) for sample in range(3)),
        record(1, BROKEN, StopReason.ERROR, sample=3),
    )
    (result,) = results([plan("A", "a", range(2))], tried, 4, None, None)
    cell = result["tasks"]["A/a"]
    assert cell["success"]["value"] == cell["avg@4"]["value"] == 0.25
    assert cell["pass@2"]["value"] == pytest.approx((5 / 6) / 2)
    assert (cell["pass@4"]["value"], cell["pass@4"]["items"]) == (1.0, 1)  # the other item has fewer than four samples
    assert cell["success_errors_as_failures"] == pytest.approx(0.25)


def test_attempts_of_style_reflect_are_reported_by_horizon() -> None:
    """Three turns: an attempt, a reflection, an attempt. Item 3 is cut off in its first attempt."""

    def played(item: int, *tries: bool, turns: int = 3, stop: StopReason = StopReason.DONE) -> Record:
        episode = trajectory(item, [0.0] * turns, stop)
        for turn, success in zip((0, 2), tries, strict=False):
            episode.infos[turn] |= {"attempt_success": success}
        if tries and stop is StopReason.DONE:
            episode.infos[-1] |= {"success": tries[-1]}
        return record_of(episode, 0, ("A/a",), None)

    tried = attempts(played(0, False, True), played(1, True, turns=1), played(2, True, False))
    tried |= attempts(played(3, stop=StopReason.MAX_TURNS))
    short, whole = results([plan("A", "a", range(4))], tried, 1, [2, 3], None)
    shares = whole["tasks"]["A/a"]["attempts"]
    values = {name: share["value"] for name, share in shares.items()}
    assert values == {"attempt 1": 0.5, "attempt 2": 0.5, "wrong → right": 0.25, "right → wrong": 0.25}
    assert shares["attempt 1"]["low"] == pytest.approx(0.1500, abs=1e-3)  # Wilson of 2 in 4
    assert [share["value"] for share in short["tasks"]["A/a"]["attempts"].values()] == [0.5, 0.0, 0.0]
    (plain,) = results([plan("A", "a", range(1))], attempts(record(0, WON)), 1, None, None)
    assert "attempts" not in plain["tasks"]["A/a"]
    tried = attempts(played(0, False, True), played(1, True, turns=2, stop=StopReason.LENGTH))
    (cut,) = results([plan("A", "a", range(2))], tried, 1, None, None)
    values = {name: share["value"] for name, share in cut["tasks"]["A/a"]["attempts"].items()}
    assert values == {"attempt 1": 0.5, "attempt 2": 0.5, "wrong → right": 0.5, "right → wrong": 0.5}, (
        "an attempt whose reflection was cut has failed"
    )


def test_cost_includes_failed_attempts() -> None:
    usage = [Tokens(1000, 100, 400, reported=True)]
    tried = attempts(
        record(0, [0.0], StopReason.ERROR, usage=usage),
        record(0, [1.0], usage=usage),
        record(1, [1.0], usage=[Tokens(1000, 100, reported=True)]),
    )
    prices = Prices(1.0, 10.0, 0.5)
    (result,) = results([plan("A", "a", range(2))], tried, 1, None, prices)
    cell = result["tasks"]["A/a"]
    assert cell["cost_usd"] == pytest.approx((2 * (600 + 200 + 1000) + 1000 + 1000) / 1e6)
    assert (cell["prompt_tokens"], cell["sampled_tokens"]) == (1000, 100)


def test_horizons_count_only_the_tokens_of_their_turns() -> None:
    tried = attempts(record(0, [0.0, 0.0, 1.0], tokens=True))
    short, long = results([plan("A", "a", range(1))], tried, 1, [1, 3], None)
    assert [r["max_turns"] for r in (short, long)] == [1, 3]
    assert [r["tasks"]["A/a"]["success"]["value"] for r in (short, long)] == [0.0, 1.0]
    assert [r["tasks"]["A/a"]["prompt_tokens"] for r in (short, long)] == [5, 30]


def test_an_item_in_two_columns_is_played_once() -> None:
    plans = [plan("A", "a", range(3)), plan("A", "b", range(2, 5))]
    episodes = episodes_of(plans, 2, 16)
    assert len(episodes) == 10
    assert [e.columns for e in episodes if e.task.item == 2] == [("A/a", "A/b")] * 2
    assert [e.sample for e in episodes] == [0] * 5 + [1] * 5
    assert episodes[0].limits == Limits(8, 16, 100)


def config(plans: list[TaskPlan], name: str = "us", **changes: Any) -> dict[str, Any]:
    agent = {"name": name}
    return {"agent": agent, "turns": None, "samples": 1, "tasks": [p.to_json() for p in plans], **changes}


def episode(item: int, sample: int = 0) -> Episode:
    return Episode(Task("toy", item), sample, Limits(8, 16, 100), "act", ("A/a",))


def evaluated(root: Path, plans: list[TaskPlan], rewards_by_item: dict[int, list[float]], **changes: Any) -> Path:
    """Write the folder of a finished evaluation."""
    with Folder(root, config(plans, root.name, **changes), {}) as folder:
        for item, rewards in rewards_by_item.items():
            folder.write(episode(item), trajectory(item, rewards), 0, None, 0)
        turns = changes.get("turns")
        folder.save(results(plans, folder.records, 1, turns, None), "finished")
    return root


def test_a_resumed_folder_keeps_episodes_and_drops_a_torn_line(tmp_path: Path) -> None:
    plans = [plan("A", "a", range(3))]
    usage = [Tokens(7, 2, 3, reported=True), Tokens()]
    with Folder(tmp_path / "x", config(plans), {"concurrency": 1}) as folder:
        written = [
            folder.write(episode(0), trajectory(0, WON), 0, usage, 4),
            folder.write(episode(1), trajectory(1, BROKEN, StopReason.ERROR), 0, None, 4),
        ]
    path = tmp_path / "x" / "trajectories" / "toy.jsonl"
    whole = path.read_bytes()
    line = json.loads(whole.splitlines()[0])
    assert (line["step"], line["kind"], line["columns"], line["usage"]) == (4, "eval", ["A/a"], [[7, 2, 3], None])
    assert [t.task.item for t in read_trajectories(path)] == [0, 1]  # in the format of a run
    path.write_bytes(whole + whole[:57])
    with Folder(tmp_path / "x", config(plans), {"concurrency": 9}) as folder:
        assert folder.resumed
        assert [r for records in folder.records.values() for r in records] == written
        assert folder.finished(("toy", 0, 0))
        assert not folder.finished(("toy", 1, 0))  # every attempt failed: it is played again
        assert path.read_bytes() == whole
        with pytest.raises(ConfigError, match="another process is writing"):
            Folder(tmp_path / "x", config(plans), {})


def test_the_name_of_an_environment_may_be_an_address(tmp_path: Path) -> None:
    task = Task("openenv:http://127.0.0.1:8000/maze", 0)
    address = replace(episode(0), task=task)
    with Folder(tmp_path / "x", config([plan("A", "a", range(1))]), {}) as folder:
        folder.write(address, replace(trajectory(0, WON), task=task), 0, None, 0)
    with Folder(tmp_path / "x", config([plan("A", "a", range(1))]), {}) as folder:
        assert folder.finished((task.env, 0, 0))


def test_a_folder_rejects_other_settings_and_damaged_files(tmp_path: Path) -> None:
    plans = [plan("A", "a", range(3))]
    root = evaluated(tmp_path / "us", plans, {0: WON})
    with pytest.raises(ConfigError, match=r"tasks\.a\.items \(saved \[0, 1, 2\], given \[0, 1\]\)"):
        Folder(root, config([plan("A", "a", range(2))]), {})
    with pytest.raises(ConfigError, match=r"agent\.name \(saved 'us', given 'them'\), samples \(saved 1, given 2\)"):
        Folder(root, config(plans, "them", samples=2), {})
    path = root / "trajectories" / "toy.jsonl"
    path.write_bytes(b'{"broken": 1}\n' + path.read_bytes())
    with pytest.raises(ConfigError, match="line 1 is not an episode"):
        Folder(root, config(plans), {})
    (root / "eval.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable JSON"):
        read_evaluation(root)


def test_paired_comparison_of_two_evaluations(tmp_path: Path) -> None:
    plans = [plan("A", "a", range(10))]
    first = evaluated(tmp_path / "first", plans, {i: WON if i < 3 else LOST for i in range(10)})
    second = evaluated(tmp_path / "second", plans, {i: WON if i < 9 else LOST for i in range(10)})
    compared = compare(load_side(first), load_side(second))
    numbers = compared["all"]
    assert numbers["mcnemar"] == {"both": 3, "only_first": 0, "only_second": 6, "neither": 1, "p": 2 / 64}
    assert numbers["success"]["difference"] == pytest.approx(0.6)
    assert numbers["success"]["p"] == pytest.approx(2 / 64)
    assert 0 < numbers["reward"]["low"] < 0.6 < numbers["reward"]["high"] <= 1
    assert compared["notes"] == []
    assert verdict(numbers, "first", "second") == "second beats first in success (p = 0.031)"
    same = compare(load_side(first), load_side(first))["all"]
    assert same["mcnemar"]["p"] == same["reward"]["p"] == 1.0
    assert "no significant difference" in verdict(same, "x", "y")


def test_only_shared_items_of_the_same_data_are_compared(tmp_path: Path) -> None:
    first = evaluated(tmp_path / "first", [plan("A", "a", range(4))], dict.fromkeys(range(4), WON))
    more = evaluated(tmp_path / "more", [plan("A", "a", range(2, 8))], dict.fromkeys(range(2, 8), LOST))
    compared = compare(load_side(first), load_side(more))
    assert compared["all"]["items"] == 2
    assert compared["notes"] == ["the items differ (first has 4, more has 6): compared on the 2 that both have"]
    apart = evaluated(tmp_path / "apart", [plan("A", "a", range(8, 9))], {8: WON})
    with pytest.raises(ConfigError, match="no item in common"):
        compare(load_side(first), load_side(apart))
    other = evaluated(tmp_path / "other", [plan("A", "a", range(4), data="ours")], {0: WON})
    with pytest.raises(ConfigError, match="played on different data"):
        compare(load_side(first), load_side(other))
    short = evaluated(tmp_path / "short", [plan("A", "a", range(4))], dict.fromkeys(range(4), WON), turns=[1, 5])
    compared = compare(load_side(first), load_side(short))
    assert compared["notes"] == ["toy: first was allowed 8 turns, short 5"]
    twin = evaluated(tmp_path / "x" / "first", [plan("A", "a", range(5))], {0: WON, 1: LOST})
    assert compare(load_side(first), load_side(twin))["notes"] == [
        "the items differ (first (A) has 4, first (B) has 5): compared on the 2 that both have",
        "first (B): 3 of 5 items failed or were not played",
    ]
    assert compare(load_side(short, 1), load_side(short, 5))["all"]["mcnemar"]["only_second"] == 4
    with pytest.raises(ConfigError, match="with 1, 5 turns, not with 3"):
        load_side(short, 3)


def test_the_table_has_a_row_per_agent_and_a_column_per_task(tmp_path: Path) -> None:
    textcraft = [plan("TextCraft", f"Depth {d}", range(d, d + 1)) for d in (1, 2)]
    own = [plan("Web", "Map", range(5, 6), own_data=True)]
    absent = [plan("Deep search", "NQ", range(0), env="qa", missing="its questions are needed")]
    first = evaluated(tmp_path / "us", textcraft + own + absent, {1: WON, 2: LOST, 5: WON})
    second = evaluated(tmp_path / "them", textcraft, {1: LOST, 2: LOST})
    source, published = published_entries(["TextCraft", "Web"])
    entries = [entry_of(read_evaluation(first)), entry_of(read_evaluation(second)), *published]
    summary, depths, web, *rest = grids(entries)
    assert summary.headings == ["agent", "TextCraft", "Web †", "Deep search", "mean"]
    assert [cell.text for cell in summary.rows[0]] == ["us", "50.0", "100.0", "–", "–"]
    assert [cell.text for cell in summary.rows[1]] == ["them", "0.0", "–", "–", "–"]
    gpt = next(row for row in summary.rows if row[0].text.startswith("GPT-4o"))
    assert [cell.text for cell in gpt] == ["GPT-4o ‡", "83.0", "–", "26.8", "–"]
    assert not any(cell.detail for cell in gpt)
    assert depths.headings == ["agent", "Depth 1", "Depth 2", "overall"]
    assert [[cell.text for cell in row] for row in depths.rows] == [
        ["us", "100.0", "0.0", "50.0"],
        ["them", "0.0", "0.0", "0.0"],
    ]
    assert len(web.rows) == 1
    assert [grid.title for grid in rest] == ["us", "them"]
    text = markdown(entries, source)
    assert "| us | 50.0 (9–91) | 100.0 (21–100) | – | – |" in text
    assert "Deep search (NQ): not played, its questions are needed." in text
    assert "† own data" in text
    assert "TextCraft: toys; 8 turns allowed." in text
    train_split = evaluated(tmp_path / "train", [plan("TextCraft", "x", range(1), split="train")], {0: WON})
    of_one_scenario = notes([entry_of(read_evaluation(train_split))])
    assert "TextCraft: toys; the split 'train'; 8 turns allowed." in of_one_scenario
    assert "MOVER" in text
    assert "MOVER" not in "".join(of_one_scenario), "it has no mean over scenarios"
    assert "‡ published, not measured here" in text
    assert "‡" not in "".join(notes(entries[:2]))


def test_a_mean_is_shown_only_beside_means_over_the_same_scenarios(tmp_path: Path) -> None:
    one, two = plan("A", "a", range(1)), plan("B", "b", range(1, 2))
    third = plan("C", "c", range(2, 3), own_data=True)
    both = evaluated(tmp_path / "both", [one, two], {0: WON, 1: LOST})
    three = evaluated(tmp_path / "three", [one, two, third], {0: WON, 1: LOST, 2: LOST})
    entry, other = entry_of(read_evaluation(both)), entry_of(read_evaluation(three))
    assert grids([entry])[0].rows[0][-1].text == "50.0"
    assert [row[-1].text for row in grids([entry, other])[0].rows] == ["–", "33.3 †"]


def rows_of(entries: list[Entry], title: str) -> list[list[str]]:
    (grid,) = [grid for grid in grids(entries) if grid.title == title]
    return [[cell.text for cell in row] for row in grid.rows]


def suite_plans(scenario: str, subsets: set[str] | None = None, limit: int = 1000) -> list[TaskPlan]:
    """Return the plans of a suite's scenario or of some of its subsets, with at most `limit` items each."""
    tasks = [task for task in AGENTGYM_27 if task.scenario.name == scenario]
    return [
        plan(scenario, task.name, range(100 * k, 100 * k + min(limit, task.num_items)), task.scenario.env,
             subset=task.subset)
        for k, task in enumerate(tasks)
        if subsets is None or task.subset in subsets
    ]  # fmt: skip


def evaluated_suite(root: Path, plans: list[TaskPlan]) -> Entry:
    """Write an evaluation whose agent solved the even items."""
    records = attempts(
        *(
            record_of(replace(trajectory(item, WON if item % 2 == 0 else LOST), task=Task(plan.env, item)), 0, (), None)
            for plan in plans
            for item in plan.items
        )
    )
    with Folder(root, config(plans, root.name), {}) as folder:
        folder.save(results(plans, records, 1, None, None), "finished")
    return entry_of(read_evaluation(root))


def test_a_scenario_played_in_part_is_marked_and_has_no_overall(tmp_path: Path) -> None:
    plans = [plan("Deep search", "HotpotQA", range(1)), plan("Deep search", "NQ", range(0), missing="no questions")]
    entry = entry_of(read_evaluation(evaluated(tmp_path / "us", plans, {0: WON})))
    assert rows_of([entry], "Deep search") == [["us *", "100.0", "–", "– *"]]
    assert PARTIAL_NOTE in notes([entry])


def test_a_single_subset_has_no_overall_next_to_published_results(tmp_path: Path) -> None:
    goto = evaluated_suite(tmp_path / "goto", suite_plans("BabyAI", {"GoTo"}))
    by_number = evaluated_suite(tmp_path / "items", [plan("BabyAI", "items", range(90), "babyai", split="")])
    whole = evaluated_suite(tmp_path / "suite", suite_plans("BabyAI"))
    few = evaluated_suite(tmp_path / "few", suite_plans("BabyAI", limit=5))
    split = evaluated_suite(tmp_path / "split", [plan("BabyAI", "test", range(90), "babyai")])
    source, published = published_entries(["BabyAI"])
    overall = {row[0]: row[-1] for row in rows_of([goto, by_number, whole, few, split, *published], "BabyAI")}
    assert overall["goto *"] == overall["items *"] == "– *"
    assert (overall["suite"], overall["few"], overall["split"]) == ("53.3", "60.0 §", "50.0")
    assert overall["ScalingInter-7B ‡"] == "96.7"
    lines = notes([goto, *published], source)
    assert PARTIAL_NOTE in lines
    assert FEWER_ITEMS_NOTE not in lines
    assert FEWER_ITEMS_NOTE in notes([few])
    # The summary of several scenarios does the same, and has no mean over one that was played in part.
    both = evaluated_suite(tmp_path / "both", suite_plans("BabyAI", {"GoTo"}) + suite_plans("TextCraft"))
    assert rows_of([both, *published], "Success, %")[0] == ["both", "– *", "52.0", "–"]
    assert both.overall is None


def test_a_row_without_all_tasks_of_the_table_has_no_overall(tmp_path: Path) -> None:
    one, two = plan("maze", "small", range(2), subset="small"), plan("maze", "large", range(2, 4), subset="large")
    first = evaluated(tmp_path / "one", [one], {0: WON, 1: WON})
    second = evaluated(tmp_path / "two", [one, two], {0: WON, 1: WON, 2: LOST, 3: LOST})
    entries = [entry_of(read_evaluation(folder)) for folder in (first, second)]
    assert rows_of(entries, "maze") == [["one *", "100.0", "–", "– *"], ["two", "100.0", "0.0", "50.0"]]
    assert rows_of(entries[:1], "maze") == [["one", "100.0"]]


def test_rows_with_different_items_or_turns_are_noted(tmp_path: Path) -> None:
    first = evaluated(tmp_path / "x", [plan("A", "a", range(1)), plan("B", "b", range(1, 2))], {0: WON, 1: WON})
    second = evaluated(tmp_path / "y", [plan("A", "a", range(2), max_turns=3), plan("B", "b", range(1, 2))], {0: WON})
    lines = notes([entry_of(read_evaluation(folder)) for folder in (first, second)])
    differing = [line for line in lines if "differ" in line]
    assert differing == ["A: the rows differ in items and turns; agentgym-rl compare pairs the items they share."]


def test_own_data_are_marked_in_every_table_and_plot(tmp_path: Path) -> None:
    plans = [plan("A", "a", range(1)), plan("Web", "b", range(1, 2), own_data=True)]
    plans.append(plan("Web", "c", range(0), missing="no sites"))
    root = evaluated(tmp_path / "us", plans, {0: WON, 1: WON}, turns=[1, 4])
    entry = entry_of(read_evaluation(root))
    labels = {grid.title: [row[0].text for row in grid.rows] for grid in grids([entry])}
    assert labels["us"] == ["A", "Web † *"]
    assert labels["us: success, %, by turns allowed"] == ["A", "Web † *"]  # no mean, because one was played in part
    whole = entry_of(read_evaluation(evaluated(tmp_path / "all", plans[:2], {0: WON, 1: WON}, turns=[1, 4])))
    assert [row[0] for row in rows_of([whole], "all: success, %, by turns allowed")] == ["A", "Web †", "mean †"]
    labelled: list[str] = []
    turns_plot(whole.by_turns, tmp_path / "turns.png", "a $name_", lambda name: labelled.append(name) or name)
    assert labelled == ["A", "Web", "mean of scenarios"]
    screen = io.StringIO()
    print_comparison(Console(file=screen, width=140), compare(load_side(root), load_side(root)))
    assert "Web †  success" in screen.getvalue()
    assert "us (A): " in screen.getvalue()
    (empty,) = results([plan("A", "a", range(1))], {}, 1, [1], None)
    turns_plot([empty], tmp_path / "turns.png", "nothing played")


def test_names_and_errors_are_escaped_in_a_report(tmp_path: Path) -> None:
    root = evaluated(tmp_path / "us", [plan("A", "a", range(1))], {0: WON})
    row = read_evaluation(root)
    row["config"]["agent"]["name"] = "<b>x</b> [y](z) a_b *c* d|e\n# f\x1b[31m"
    text = markdown([entry_of(row)])
    shown = r"&lt;b&gt;x&lt;/b&gt; \[y\](z) a_b \*c\* d\|e \# f \[31m"
    assert f"## {shown}\n" in text
    assert f"| {shown} | 100.0 (21–100) |" in text
    assert "\x1b" not in text
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"report\.md cannot be written \(Not a directory\)"):
        write_report([root], None, tmp_path / "file" / "report.md")


def test_dollars_have_two_significant_digits_and_no_exponent() -> None:
    amounts = (0, 6e-6, 0.000123, 0.0725, 0.1, 0.999999, 1, 1234.5)
    shown = ["$0", "$0.000006", "$0.00012", "$0.0725", "$0.10", "$1.00", "$1.00", "$1,234.50"]
    assert [format_dollars(amount) for amount in amounts] == shown
    assert [format_dollars(amount, down=True) for amount in (0.000687, 1.999, 0.07, 0.0)] == [
        "$0.00068",
        "$1.99",
        "$0.07",
        "$0",
    ]


def test_a_free_model_costs_0_and_a_model_without_prices_is_unknown(tmp_path: Path) -> None:
    """A given price of 0 is shown as $0. Without prices there is no number, and a note says so."""
    plans, usage = [plan("A", "a", range(1))], [Tokens(1000, 100, reported=True)]
    evaluations = {}
    for name, prices in (("free", Prices()), ("unknown", None)):
        settings = {"prices_usd_per_million_tokens": {"prompt": 0.0} if prices else None}
        agent = {"name": name, "kind": "openai"}
        with Folder(tmp_path / name, {**config(plans), "agent": agent}, settings) as folder:
            folder.write(episode(0), trajectory(0, WON), 0, usage, 0)
            folder.save(results(plans, folder.records, 1, None, prices), "finished")
        evaluations[name] = json.loads((tmp_path / name / "eval.json").read_text())
    costs = [row["results"][0]["total"]["cost_usd"] for row in evaluations.values()]
    assert costs[0] == 0.0
    assert costs[1] is None
    text = markdown([entry_of(row) for row in evaluations.values()])
    free, unknown = text.split("## free")[1].split("## unknown")
    assert "$0 |" in free
    assert "cost" not in unknown.split("## Notes")[0]
    assert "unknown: cost is unknown" in unknown
    assert "free: cost" not in unknown
    (failed,) = results(plans, attempts(record(0, [], StopReason.ERROR, usage=[])), 1, None, Prices(1.0, 1.0))
    assert failed["total"]["cost_usd"] == 0.0  # no answers, so no cost


@pytest.mark.parametrize(("width", "parts"), [(140, 1), (80, 2), (50, 4)])
def test_a_wide_table_is_split_between_columns_in_a_narrow_terminal(width: int, parts: int, tmp_path: Path) -> None:
    plans = [plan(task.scenario.name, task.name, range(i, i + 1)) for i, task in enumerate(AGENTGYM_27)]
    plans += [plan("Search, built-in questions", "x", range(90, 91)), plan("Web, built-in sites", "y", range(91, 92))]
    root = evaluated(tmp_path / "us", plans, dict.fromkeys([*range(27), 90, 91], WON))
    source, published = published_entries(plan.scenario for plan in plans)
    screen = io.StringIO()
    console = Console(file=screen, width=width, highlight=False)
    print_report(console, [entry_of(read_evaluation(root)), *published], source)
    text = screen.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for name in ("Qwen2.5-3B-Instruct ‡", "ScalingInter-7B ‡", "WebArena", "TextCraft"):
        assert name in text
    assert text.count("Gemini-2.5-Pro ‡") == parts


def test_a_comparison_in_80_columns_breaks_no_word(tmp_path: Path) -> None:
    plans = [plan("BabyAI", "a", range(6))]
    first = evaluated(tmp_path / "quickstart@100", plans, dict.fromkeys(range(6), LOST))
    second = evaluated(tmp_path / "quickstart@200", plans, dict.fromkeys(range(6), WON))
    screen = io.StringIO()
    print_comparison(Console(file=screen, width=80), compare(load_side(first), load_side(second)))
    text = screen.getvalue()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    headings = ["items", "quickstart@100", "quickstart@200", "difference", "95%", "interval", "p", "test"]
    drawn = " ".join(line for line, below in pairwise(lines) if set(below.strip()) == {"─"}).split()
    assert drawn == headings
    for words in ("BabyAI  success, %", "BabyAI  reward", "McNemar, exact", "+100.0 to +100.0"):
        assert words in text


def test_published_numbers_match_the_reference() -> None:
    source, entries = published_entries(["SciWorld"])
    assert "2509.08755" in source
    by_name: dict[str, Entry] = {entry.name: entry for entry in entries}
    assert by_name["ScalingInter-7B"].scenarios["SciWorld"]["success"]["value"] == 0.57
    assert by_name["o3"].scenarios["WebArena"]["success"]["value"] == 0.34
    assert len(entries) == 8
    with pytest.raises(ConfigError, match=r"published results cover WebArena, .*, not maze: leave --compare out"):
        published_entries(["maze"])


def test_the_suite_has_27_tasks_of_published_sizes() -> None:
    assert len(AGENTGYM_27) == len({task.key for task in AGENTGYM_27}) == 27
    counts: dict[str, int] = {}
    for task in AGENTGYM_27:
        counts[task.scenario.name] = counts.get(task.scenario.name, 0) + task.num_items
    assert counts == {"WebArena": 50, "Deep search": 400, "TextCraft": 100, "BabyAI": 90, "SciWorld": 200}


def test_items_are_evenly_spaced() -> None:
    assert evenly_spaced(range(10), 4) == [0, 2, 5, 7]
    assert evenly_spaced(range(3), 9) == [0, 1, 2]
    goto = [40 * seed + level for seed in range(100) for level in range(11)]  # BabyAI's items of 11 levels
    levels = [item % 40 for item in evenly_spaced(goto, 55)]
    assert [levels.count(level) for level in range(11)] == [5] * 11


@pytest.mark.parametrize("text", ["", "2,,4", "0,3", "a", "-2", "2.5", "²"])
def test_invalid_turns_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="--turns needs whole numbers"):
        parse_turns(text)


def test_turns_and_prices_are_parsed() -> None:
    assert parse_turns("8, 2,4,2") == (2, 4, 8)
    assert parse_turns(None) == ()
    assert parse_prices(1.0, 2.0, None) == Prices(1.0, 2.0)
    assert parse_prices(None, None, None) is None
    with pytest.raises(ConfigError, match="prices need both"):
        parse_prices(1.0, None, None)


def test_reading_records_does_not_change_the_folder(tmp_path: Path) -> None:
    root = evaluated(tmp_path / "us", [plan("A", "a", range(1))], {0: WON})
    path = root / "trajectories" / "toy.jsonl"
    path.write_bytes(path.read_bytes() + b'{"torn')
    before = path.read_bytes()
    assert list(read_records(root)) == [("toy", 0, 0)]
    assert path.read_bytes() == before
