"""Published item lists: AgentGym's ids are translated to the same items here, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.config import AgentConfig, EnvironmentConfig
from agentgym_rl.environment import catalog
from agentgym_rl.environment.agentgym import read_items
from agentgym_rl.environment.envs.sciworld import tasks as sciworld
from agentgym_rl.environment.envs.searchqa import published
from agentgym_rl.environment.envs.searchqa.env import searchqa_from
from agentgym_rl.environment.envs.searchqa.indexing import build_index
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.environments_pool import EnvironmentsPool
from agentgym_rl.training.conversations import to_conversation, write_conversations
from agentgym_rl.types import Message, Task, Trajectory


def write(path: Path, rows: Any) -> str:
    path.write_text(json.dumps(rows), encoding="utf-8")
    return str(path)


def published_ids(tmp_path: Path, *names: str) -> str:
    return write(tmp_path / "list.json", [{"item_id": name} for name in names])


def test_sciworlds_published_numbers_are_the_subset_rl_task_by_task() -> None:
    published_order = [
        (task, variation)
        for task in sciworld.TASKS
        if task.number not in ("5-1", "5-2", "9-1", "9-2", "9-3", "10-1", "10-2")
        for variation in range(task.num_variations)
    ]
    assert len(published_order) == 4639
    items = [sciworld.published_item(number) for number in range(4639)]
    assert [sciworld.locate(item) for item in items] == published_order
    rl = [item for split in sciworld.SPLITS.values() for item in split if "rl" in sciworld.subsets_of(item)]
    assert sorted(items) == rl
    for number in (-1, 4639):
        with pytest.raises(ConfigError, match="items 0 to 4638"):
            sciworld.published_item(number)


def test_every_item_of_sciworld_is_found_by_its_task_and_variation() -> None:
    items = [item for split in sciworld.SPLITS.values() for item in split]
    assert [sciworld.item_of(*sciworld.locate(item)) for item in items] == items
    with pytest.raises(IndexError, match="boil has variations 0 to 29"):
        sciworld.item_of(sciworld.TASKS[0], 30)


def test_published_ids_are_translated_and_bare_numbers_are_not(tmp_path: Path) -> None:
    assert read_items(published_ids(tmp_path, "webarena_7", "webarena_0"), "webarena") == [1007, 1000]
    assert read_items(published_ids(tmp_path, "babyai_7"), "babyai") == [7]
    assert read_items(published_ids(tmp_path, "sciworld_30"), "sciworld") == [sciworld.published_item(30)]
    assert sciworld.published_item(30) != 30
    assert read_items(write(tmp_path / "list.json", [30, "31"]), "sciworld") == [30, 31]
    assert read_items("30-31", "sciworld") == [30, 31]
    with pytest.raises(ConfigError, match=r"list\.json.*WebArena has tasks 0 to 811, got 812"):
        read_items(published_ids(tmp_path, "webarena_812"), "webarena")


@pytest.mark.parametrize("name", ["textcraft", "maze", "wordle"])
def test_published_ids_of_other_games_are_refused(name: str, tmp_path: Path) -> None:
    ids = published_ids(tmp_path, f"{name}_12")
    with pytest.raises(ConfigError, match=rf"{name}_12 is an item of AgentGym's {name}.*agentgym\+http://"):
        read_items(ids, name)
    with pytest.raises(ConfigError, match="games or numbers differ"):
        read_items(ids, name, "http://127.0.0.1:36001")


@pytest.mark.parametrize("name", ["textcraft", "sciworld", "searchqa", "webarena"])
def test_agentgyms_own_servers_get_published_numbers_as_they_are(name: str, tmp_path: Path) -> None:
    ids = published_ids(tmp_path, f"{name}_12")
    assert read_items(ids, name, f"agentgym+http://127.0.0.1:36001/{name}") == [12]


@pytest.mark.parametrize("other", ["babyai_3", "webshop_3", "search_qa_3"])
def test_ids_of_another_environment_are_refused(other: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"needs items of sciworld, but {other} is an item of "):
        read_items(published_ids(tmp_path, other), "sciworld")


def test_episodes_converted_here_keep_this_packages_numbers(tmp_path: Path) -> None:
    episode = Trajectory("1", Task("textcraft", 12), [Message("user", "Craft."), Message("assistant", "craft")])
    path = tmp_path / "ours.json"
    write_conversations([to_conversation(episode)], path)
    assert read_items(str(path), "textcraft") == [12]


async def test_a_recipe_plays_the_items_that_a_published_list_names(tmp_path: Path) -> None:
    def pool(name: str, item: str) -> EnvironmentsPool:
        env = EnvironmentConfig(name=name, items={"train": published_ids(tmp_path, item)})
        return EnvironmentsPool((env,), AgentConfig())

    assert await pool("sciworld", "sciworld_4638").items("sciworld", "train") == [sciworld.published_item(4638)]
    with pytest.raises(ConfigError, match="textcraft_3 is an item of AgentGym's textcraft"):
        pool("textcraft", "textcraft_3")


# --- searchqa -------------------------------------------------------------------------------------------------------


def test_searchqas_table_equals_agentgyms() -> None:
    assert sum(published.COUNTS.values()) == 221_328
    assert published.locate(0) == ("test", "nq", 0)
    assert published.locate(29190) == ("test", "hotpotqa", 0)
    assert published.locate(51712) == ("test", "bamboogle", 124)
    assert published.locate(51713) == ("train", "nq", 0)
    assert published.locate(221_327) == ("train", "hotpotqa", 90446)
    with pytest.raises(ConfigError, match="items 0 to 221327, got 221328"):
        published.locate(221_328)


def test_searchqas_numbers_count_test_questions_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sets instead of nine; a question that comes twice is one item, and one of both splits is for testing."""
    counts = {("test", "nq"): 3, ("test", "bamboogle"): 1, ("train", "nq"): 4}
    monkeypatch.setattr(published, "COUNTS", counts)
    folder = tmp_path / "data"
    folder.mkdir()

    def questions(name: str, *texts: str) -> None:
        write(folder / name, [{"question": text, "answer": "x"} for text in texts])

    questions("bamboogle_test.json", "Bamboo?")  # before nq by name, after it in AgentGym's order
    questions("nq_test.json", "First?", "Second?", "First?")
    questions("nq_train.json", "Alpha?", "Second?", "Beta?", "Alpha?")
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "A\\nText."}\n', encoding="utf-8")
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index")
    env: Any = searchqa_from(folder, tmp_path / "index")

    def text(number: int) -> str:
        assert env.agentgym_item(number) == env.published_item(number)
        return env.question(env.published_item(number)).text

    assert [text(number) for number in (0, 1, 2, 3)] == ["First?", "Second?", "First?", "Bamboo?"]
    assert [text(number) for number in (4, 6, 7)] == ["Alpha?", "Beta?", "Alpha?"]
    with pytest.raises(ConfigError, match="searchqa_5 is a training question that is also a test question"):
        env.published_item(5)
    counts["test", "nq"] = 4
    with pytest.raises(ConfigError, match="AgentGym's 4 test questions of nq, got 3: set AGENTGYM_SEARCHQA_DATA"):
        env.published_item(0)
    assert env.agentgym_item(1) == 1  # other questions have numbers of their own


def test_searchqas_built_in_questions_are_not_published_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3610 test questions of nq, got 0"):
        read_items(published_ids(tmp_path, "search_qa_8"), "searchqa")
    assert catalog.load("searchqa").agentgym_item(8) == 8  # type: ignore[attr-defined]
