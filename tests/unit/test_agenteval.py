"""AgentEval as a suite: its 1,160 items, what is missing without AgentGym's servers, and a run against one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from agentgym_servers_for_tests import AlfWorldServer, running

from agentgym_rl.commands.eval_options import parse_urls
from agentgym_rl.commands.evaluate import Request, evaluate, make_plans
from agentgym_rl.commands.load_agent import AgentOptions, find_agent
from agentgym_rl.environment.agentgym_servers import KNOWN_DIALECTS
from agentgym_rl.errors import ConfigError
from agentgym_rl.evaluation.plan import TaskPlan
from agentgym_rl.evaluation.report import entry_of, published_entries
from agentgym_rl.evaluation.suites import AGENTEVAL, AGENTGYM_27, coverage

URL = "agentgym+http://127.0.0.1:9"


def plans_of(**options) -> list[TaskPlan]:
    request = Request(AgentOptions("random"), suite="agenteval", **options)
    return make_plans(request, find_agent(request.agent))


def test_agenteval_has_1160_items_of_14_environments() -> None:
    counts = Counter()
    for task in AGENTEVAL:
        counts[task.scenario.env] += task.num_items
    assert counts == {
        **{"webshop": 200, "alfworld": 200, "sciworld": 200, "sqlgym": 200, "textcraft": 100, "babyai": 90},
        **{"maze": 25, "wordle": 25, "webarena": 20, "weather": 20, "movie": 20, "academia": 20, "sheet": 20},
        "todo": 20,
    }
    assert sum(counts.values()) == 1160
    assert set(counts) <= set(KNOWN_DIALECTS)


def test_without_servers_our_own_tasks_replace_those_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOPPING", raising=False)
    plans = plans_of()
    missing = {plan.env: plan.missing for plan in plans if plan.missing}
    assert missing["webshop"] == ("AgentGym's server is needed: give --url webshop=agentgym+http://HOST:PORT/webshop")
    played = Counter(plan.scenario for plan in plans if plan.own_data for _ in plan.items)
    assert played.pop("Web, built-in sites") > 35
    assert played == {
        "Shop, built-in catalog": 200,
        "Household, built-in": 200,
        "SQL, built-in databases": 200,
        "Maze, built-in": 25,
        "Wordle, built-in words": 25,
    }
    assert {"weather", "movie", "academia", "sheet", "todo"} <= missing.keys()
    assert sum(len(plan.items) for plan in plans if plan.scenario == "TextCraft") == 100


def test_items_come_from_a_list_or_are_spread_over_the_test_split(tmp_path: Path) -> None:
    (tmp_path / "webshop_test.json").write_text(json.dumps([{"item_id": f"webshop_{n}"} for n in (5238, 6)]))
    (tmp_path / "maze_test.json").write_text(json.dumps([{"item_id": "maze_3"}]))
    urls = {"webshop": URL, "maze": URL, "wordle": URL, "alfworld": URL}
    by_env = {plan.env: plan for plan in plans_of(urls=urls, lists=tmp_path) if plan.env in urls and not plan.own_data}
    assert by_env["webshop"].items == (5238, 6)
    assert by_env["maze"].items == (3,)
    assert by_env["wordle"].missing == "a list of items is needed: give --lists FOLDER with wordle_test.json"
    assert by_env["alfworld"].items == tuple(range(2420, 2620))
    assert coverage([by_env["alfworld"]]) == "whole"
    assert coverage([by_env["webshop"]]) == "fewer items"


async def test_an_agent_is_evaluated_on_a_server_of_agentgym(tmp_path: Path) -> None:
    with running(AlfWorldServer()) as url:
        request = Request(
            AgentOptions("random"), suite="agenteval", env="alfworld", urls={"alfworld": f"{url}/alfworld"}, limit=4,
            out=tmp_path / "out",
        )  # fmt: skip
        row = await evaluate(request)
    (plan,) = entry_of(row).plans
    assert plan.items == (2420, 2470, 2520, 2570)
    assert (plan.scenario, plan.own_data) == ("ALFWorld", False)
    result = row["results"][0]["tasks"]["ALFWorld/ALFWorld"]
    assert (result["episodes"], result["errors"]) == (4, 0)


@pytest.mark.parametrize(
    ("given", "suite", "parsed"),
    [
        (None, None, (None, {})),
        ([URL], None, (URL, {})),
        (URL, None, (URL, {})),
        ([f"webshop={URL}/webshop?a=b"], "agenteval", (None, {"webshop": f"{URL}/webshop?a=b"})),
    ],
)
def test_addresses_of_a_suite_name_their_environment(given, suite, parsed) -> None:
    assert parse_urls(given, suite) == parsed


def test_wrong_addresses_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs NAME=URL"):
        parse_urls([URL], "agenteval")
    with pytest.raises(ConfigError, match="once without --suite"):
        parse_urls([URL, URL], None)
    with pytest.raises(ConfigError, match="plays textcraft in this process"):
        plans_of(urls={"textcraft": URL})


def test_published_rows_are_those_of_the_suites_own_paper() -> None:
    source, entries = published_entries(task.scenario.name for task in AGENTEVAL)
    assert "2406.04151" in source
    rates = {entry.name: entry.scenarios for entry in entries}
    assert rates["AgentEvol-7B"]["ALFWorld"]["success"]["value"] == pytest.approx(0.88)
    assert rates["GPT-4-Turbo"]["BIRD"]["success"]["value"] == pytest.approx(0.16)
    items = {task.scenario.name: task.num_items for task in AGENTEVAL if task.subset is None} | {"TextCraft": 100}
    for row in rates.values():
        for scenario, rate in row.items():  # each is a whole number of items
            solved = rate["success"]["value"] * items[scenario]
            assert solved == pytest.approx(round(solved))
    assert "2509.08755" in published_entries(task.scenario.name for task in AGENTGYM_27)[0]
    assert "2509.08755" in published_entries(["TextCraft"])[0]
