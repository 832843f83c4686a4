"""WebArena's tasks: the embedded tasks, their splits, the published list, and errors about missing parts."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentgym_rl.cli import app
from agentgym_rl.environment.envs.webarena import WebArena
from agentgym_rl.environment.envs.webarena.browser import find_chromium
from agentgym_rl.environment.envs.webarena.evaluators.helpers import read_call
from agentgym_rl.environment.envs.webarena.official_stage import OfficialStage
from agentgym_rl.environment.envs.webarena.sites.html import Html, el
from agentgym_rl.environment.envs.webarena.sites.maps import shortest_route
from agentgym_rl.environment.envs.webarena.sites.store import Episodes, pristine
from agentgym_rl.environment.envs.webarena.tasks.embedded import as_json, problems
from agentgym_rl.environment.envs.webarena.tasks.official import OFFICIAL, find_tasks, official_subsets, official_tasks
from agentgym_rl.environment.envs.webarena.tasks.task_config import SITES, read_task
from agentgym_rl.errors import ConfigError

ADDRESSES = {site: f"http://{site.lower()}.example" for site in SITES}


def test_every_subset_has_enough_tasks() -> None:
    assert len(problems()) == 240
    assert sum(problem.changes for problem in problems()) >= len(problems()) / 3
    subsets = Counter(subset for item in range(240) for subset in WebArena.subsets_of(item))
    assert set(subsets) == set(WebArena.subsets) == {"Shopping", "CMS", "Map", "GitLab", "Reddit"}
    assert min(subsets.values()) >= 30
    intents = [problem.config["intent"] for problem in problems()]
    assert len(set(intents)) == len(intents)
    assert not any("{{" in intent for intent in intents)


def test_splits_share_no_task_and_test_has_every_template() -> None:
    train, test = WebArena.splits["train"], WebArena.splits["test"]
    assert (train.start, train.stop, test.stop) == (0, test.start, 240)
    templates = [problem.config["intent_template_id"] for problem in problems()]
    repeated = {number for number, count in Counter(templates).items() if count > 1}
    assert {templates[item] for item in test} == repeated
    assert {templates[item] for item in train} == set(templates)


def test_configs_have_webarenas_format() -> None:
    configs = json.loads(as_json())
    published = {
        "sites", "task_id", "require_login", "storage_state", "start_url", "geolocation", "intent_template",
        "instantiation_dict", "intent", "require_reset", "eval", "intent_template_id",
    }  # fmt: skip
    for number, config in enumerate(configs):
        assert set(config) == published
        assert config["task_id"] == number
        task = read_task(config, ADDRESSES)
        assert "__" not in task.start_urls[0]
        # changed_data is not part of WebArena. Its own evaluators can grade every task too, less strictly.
        graded = set(task.evaluation["eval_types"])
        assert graded <= {"string_match", "url_match", "program_html", "changed_data"}
        assert ("changed_data" in graded) == problems()[number].changes
        assert graded != {"changed_data"}


def test_tasks_and_data_do_not_depend_on_the_process() -> None:
    program = (
        "import hashlib; from agentgym_rl.environment.envs.webarena.tasks.embedded import as_json;"
        "from agentgym_rl.environment.envs.webarena.sites.store import pristine;"
        "print(hashlib.sha256(as_json().encode() + pristine()).hexdigest())"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == hashlib.sha256(as_json().encode() + pristine()).hexdigest()


def test_every_episode_has_its_own_data() -> None:
    episodes = Episodes()
    first_token, second_token = episodes.open(), episodes.open()
    first, second = episodes.get(first_token), episodes.get(second_token)
    assert first is not None
    assert second is not None
    first.db.execute("UPDATE product SET price = 1")
    assert second.db.execute("SELECT count(*) FROM product WHERE price = 1").fetchone()[0] == 0
    episodes.close(first_token)
    assert episodes.get(first_token) is None
    assert len(episodes) == 1
    assert isinstance(second.db, sqlite3.Connection)


def test_html_texts_and_attributes_are_escaped() -> None:
    assert el("p", "<b>&", title='"x"') == '<p title="&quot;x&quot;">&lt;b&gt;&amp;</p>'
    assert el("p", Html("<b>"), None, ["a", 1]) == "<p><b>a1</p>"
    assert el("input", checked=True, disabled=False, value=None) == "<input checked>"


def test_routes_cross_the_river_on_a_bridge() -> None:
    route = shortest_route((0, 4), (0, 5))
    assert route.metres == 5 * 150  # two blocks to the bridge, across, and back
    assert route.steps == [
        "Go east on Chapel Street for 300 m",
        "Go south on Cedar Avenue for 150 m",
        "Go west on Harbour Street for 300 m",
    ]
    assert shortest_route((3, 3), (3, 3)).metres == 0
    assert shortest_route((5, 1), (2, 0)).metres == shortest_route((2, 0), (5, 1)).metres == 600


# --- the published tasks ---------------------------------------------------------------------------------------------


def write_task_list(folder: Path, **changes: Any) -> Path:
    """Write 812 small tasks in the published format."""
    task = {
        "sites": ["shopping"],
        "start_url": "__SHOPPING__",
        "storage_state": "./.auth/shopping_state.json",
        "intent": "Look",
        "eval": {"eval_types": ["url_match"], "reference_url": "__SHOPPING__/x"},
        **changes,
    }
    path = folder / "test.raw.json"
    path.write_text(json.dumps([{"task_id": number, **task} for number in range(812)]))
    return path


def test_task_list_and_storage_state_come_from_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBARENA_TASKS", str(write_task_list(tmp_path)))
    monkeypatch.setenv("SHOPPING", "http://shop.example:7770/")
    monkeypatch.setenv("WEBARENA_AUTH", str(tmp_path))
    assert len(official_tasks()) == 812
    with pytest.raises(ConfigError, match="needs a signed-in browser"):
        OfficialStage().begin(1003)
    (tmp_path / "shopping_state.json").write_text("{}")
    task, options = OfficialStage().begin(1003)
    assert (task.task_id, task.start_urls) == (3, ("http://shop.example:7770",))
    assert options == {"storage_state": str(tmp_path / "shopping_state.json")}


def test_missing_site_address_raises_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBARENA_TASKS", str(write_task_list(tmp_path)))
    for site in SITES:
        monkeypatch.delenv(site, raising=False)
    with pytest.raises(ConfigError, match="set the environment variable SHOPPING"):
        WebArena().reset(OFFICIAL.start)


def test_invalid_task_list_raises_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBARENA_TASKS", str(tmp_path / "nowhere.json"))
    with pytest.raises(ConfigError, match="no such file"):
        find_tasks()
    (tmp_path / "list.json").write_text("[{}]")
    monkeypatch.setenv("WEBARENA_TASKS", str(tmp_path / "list.json"))
    with pytest.raises(ConfigError, match="not a list of WebArena tasks"):
        official_tasks()


def test_subsets_of_the_published_tasks() -> None:
    subsets = Counter(subset for item in OFFICIAL for subset in official_subsets(item))
    assert subsets == {"Shopping": 192, "CMS": 184, "Map": 128, "GitLab": 204, "Reddit": 129}


def test_published_tasks_are_readable() -> None:
    """Check that all 812 tasks can be read and name only known helpers and evaluators."""
    if find_spec("webarena") is None and find_spec("webarena_verified") is None:
        pytest.skip("the published list is not installed: pip install --no-deps libwebarena")
    approaches = set()
    for raw in official_tasks():
        task = read_task(raw, ADDRESSES)
        sites = {"shopping": "Shopping", "shopping_admin": "CMS", "map": "Map", "gitlab": "GitLab", "reddit": "Reddit"}
        expected = tuple(sites[site] for site in raw["sites"] if site in sites)
        assert official_subsets(OFFICIAL.start + task.task_id) == expected
        assert set(task.evaluation["eval_types"]) <= {"string_match", "url_match", "program_html"}
        approaches |= set(task.evaluation["reference_answers"] or ())
        for target in task.evaluation["program_html"]:
            assert set(target["required_contents"]) <= {"exact_match", "must_include"}
            for text in (target["url"], target["locator"]):
                if text.startswith("func:"):
                    read_call(text)
            locator = target["locator"].strip()
            assert not locator or locator.startswith(("document.", "[...document.", "func:"))
    assert approaches == {"exact_match", "must_include", "fuzzy_match"}


def test_missing_browser_error_gives_the_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WEBARENA_CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install chromium"):
        find_chromium()
    monkeypatch.setenv("WEBARENA_CHROMIUM", "no-such-browser")
    with pytest.raises(ConfigError, match="WEBARENA_CHROMIUM"):
        WebArena()


def test_without_a_browser_webarena_is_listed_as_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WEBARENA_CHROMIUM", raising=False)

    def webarena_row() -> dict[str, Any]:
        result = CliRunner().invoke(app, ["envs", "--json"])
        assert result.exit_code == 0, result.output
        return next(row for row in json.loads(result.stdout) if row["name"] == "webarena")

    assert webarena_row()["installed"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not webarena_row()["installed"]
    assert "apt-get install chromium" in webarena_row()["missing"]
