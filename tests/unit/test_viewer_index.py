"""The viewer's index and queries: compared with the files, while files grow, and on damaged files."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import time
from functools import lru_cache
from pathlib import Path

import pytest
from viewer_for_tests import (
    GROUP_SIZE,
    GROUPS,
    STEPS,
    library_of,
    played,
    wait_for_index,
    with_tokens,
    write_evaluation,
    write_run,
)

from agentgym_rl.commands import view
from agentgym_rl.commands.view import ViewerEnvironments
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.log import RunLog, read_trajectories
from agentgym_rl.viewer import index as index_module
from agentgym_rl.viewer.discovery import discover, read_status
from agentgym_rl.viewer.encode import to_json
from agentgym_rl.viewer.index import Index
from agentgym_rl.viewer.library import Library, NotFound
from agentgym_rl.viewer.queries import ORDERS, Filter
from agentgym_rl.viewer.vocabulary import Vocabulary

TRAINED = STEPS * GROUPS * GROUP_SIZE
HELD_OUT = 4 * (STEPS + 1)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "small")
    write_evaluation(root / "evals" / "oracle")
    return root


@pytest.fixture
def library(written: Path, tmp_path: Path) -> Library:
    return library_of(written, tmp_path)


def all_rows(library: Library, run: str = "small", filters: Filter | None = None, order: str = "step") -> list[dict]:
    return library.episodes(run, filters or Filter(), order, 0, 500)["rows"]


def test_runs_and_evaluations_are_found_with_readable_ids(written: Path, tmp_path: Path) -> None:
    assert {p.id: p.kind for p in discover([written]).values()} == {"small": "run", "evals/oracle": "eval"}
    assert list(discover([written / "small"])) == ["small"]
    # The same name below two roots: both are found, under different ids.
    twin = tmp_path / "twin" / "small"
    twin.mkdir(parents=True)
    (twin / "config.toml").write_text("")
    (twin / "status.json").write_text("{}")
    (twin / "loop").symlink_to(twin)
    assert set(discover([written, tmp_path / "twin"])) == {"small", "evals/oracle", "twin/small"}


def test_indexed_episodes_match_their_files(library: Library, written: Path) -> None:
    rows = all_rows(library)
    assert len(rows) == TRAINED + HELD_OUT == library.overview()["runs"][0]["episodes"]
    for row in rows:
        stem, _, line = row["key"].rpartition(".")
        episode = list(read_trajectories(written / "small" / "trajectories" / f"{stem}.jsonl"))[int(line)]
        assert row["trajectory"] == episode.id
        assert (row["env"], row["item"]) == (episode.task.env, episode.task.item)
        assert (row["reward"], row["turns"], row["success"]) == (episode.reward, episode.num_turns, episode.success)
        assert (row["stop"], row["horizon"], row["sampled"]) == (episode.stop, episode.horizon, sum(episode.loss_mask))
        assert row["subset"]


@pytest.mark.parametrize(
    "filters",
    [
        Filter(kind="train"),
        Filter(kind="eval", step=2),
        Filter(success=1),
        Filter(success=0, kind="train", horizon=5),
        Filter(stop="max_turns"),
        Filter(env="maze", item=10),
        Filter(env="nowhere"),
    ],
)
def test_filters_counts_and_pages_agree(library: Library, filters: Filter) -> None:
    def passes(row: dict) -> bool:
        values = {name: getattr(filters, name) for name in Filter.__dataclass_fields__}
        return all(value is None or row[name] == value for name, value in values.items())

    expected = {row["key"] for row in all_rows(library) if passes(row)}
    answer = library.episodes("small", filters, "step", 0, 500)
    assert {row["key"] for row in answer["rows"]} == expected
    assert answer["total"] == len(expected)
    paged = [library.episodes("small", filters, "step", offset, 3)["rows"] for offset in range(0, len(expected), 3)]
    assert [row["key"] for page in paged for row in page] == [row["key"] for row in answer["rows"]]
    if filters.item is None:
        assert sum(count for _, count in library.facets("small", filters)["env"]) >= len(expected)
        counted = dict(library.facets("small", filters)["stop"])
        for stop, count in counted.items():
            narrowed = {name: getattr(filters, name) for name in Filter.__dataclass_fields__} | {"stop": stop}
            assert library.episodes("small", Filter(**narrowed), "step", 0, 1)["total"] == count


def test_each_order_sorts_by_its_column(library: Library) -> None:
    columns = {"step": ("step", -1), "oldest": ("step", 1), "reward": ("reward", -1), "worst": ("reward", 1)}
    columns |= {"turns": ("turns", -1), "sampled": ("sampled", -1), "seconds": ("seconds", -1)}
    assert set(columns) == set(ORDERS)
    for order, (column, sign) in columns.items():
        values = [sign * row[column] for row in all_rows(library, order=order)]
        assert values == sorted(values), order


class TwoSubsets(ViewerEnvironments):
    def subsets_of(self, env: str, item: int) -> tuple[str, ...]:
        return ("one", "two") if item in (10, 11) else ("three",)


def test_an_item_in_several_subsets_is_found_in_each(written: Path, tmp_path: Path) -> None:
    library = Library([written], TwoSubsets(), Index(tmp_path / "index.sqlite3"))
    library.indexer.update()
    of_one, of_two = (all_rows(library, filters=Filter(subset=name)) for name in ("one", "two"))
    assert len(of_one) == len(of_two) == GROUPS * GROUP_SIZE
    assert not all_rows(library, filters=Filter(subset="on"))
    facet = dict(library.facets("small", Filter())["subset"])
    assert facet == {"one": len(of_one), "two": len(of_two), "three": TRAINED + HELD_OUT - len(of_one)}


def test_groups_contain_the_episodes_of_one_task(library: Library) -> None:
    answer = library.groups("small", Filter(kind="train"), False, 0, 100)
    assert answer["total"] == len(answer["rows"]) == STEPS * GROUPS
    for group in answer["rows"]:
        assert group["size"] == len(group["members"]) == GROUP_SIZE
        assert group["successes"] == sum(success for success, _ in group["members"])
        members = library.episode("small", group["key"])["group"]
        assert [[m["success"], m["reward"]] for m in members] == group["members"]
    mixed = library.groups("small", Filter(kind="train"), True, 0, 100)["rows"]
    assert mixed == [group for group in answer["rows"] if group["spread"] > 0]
    assert mixed


def test_an_episode_has_token_texts_and_the_learners_data(library: Library) -> None:
    row = all_rows(library, filters=Filter(kind="train", step=2))[0]
    episode = library.episode("small", row["key"])
    sampled = [m for m in episode["messages"] if m["logprobs"] is not None]
    assert sum(len(m["token_ids"]) for m in sampled) == len(episode["learned"]["advantages"]) == row["sampled"]
    assert sampled[0]["texts"][0] == "<|start|>"
    assert all(text.startswith(" ") for text in sampled[0]["texts"][1:-1])
    assert row["advantage"] == pytest.approx(row["reward"] - 0.5)
    before = all_rows(library, filters=Filter(kind="train", step=1))[0]
    assert before["advantage"] is None
    assert library.episode("small", before["key"])["learned"] is None
    with pytest.raises(NotFound, match="no episode"):
        library.episode("small", "../../../etc/passwd.0")
    with pytest.raises(NotFound, match="no run"):
        library.episode("../small", row["key"])


def test_the_same_item_is_found_in_every_run(library: Library) -> None:
    rows = library.same_task("maze", 2)
    assert {row["run"] for row in rows} == {"small", "evals/oracle"}
    assert len(rows) == STEPS + 2


def test_a_growing_run_is_read_incrementally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "CHUNK_BYTES", 3000)  # several chunks per file, and lines longer than a chunk
    log = RunLog.create(tmp_path / "runs" / "live", {"name": "live"})
    episodes = [with_tokens(t, random.Random(1)) for t in played("maze", list(range(6)), "random", 12, "train-1")]
    library = library_of(tmp_path / "runs", tmp_path)
    for number, episode in enumerate(episodes, 1):
        log.write_trajectory(1, episode)
        library.indexer.update()
        assert [row["trajectory"] for row in all_rows(library, "live")] == [e.id for e in episodes[:number]]
    path = log.trajectories_path(1)
    stamp = library.indexer.stamp
    library.indexer.update()
    assert library.indexer.stamp == stamp  # nothing new, nothing read
    with path.open("ab") as file:
        file.write(b'{"torn')
    library.indexer.update()
    assert len(all_rows(library, "live")) == 6
    assert library.queries.counts(path.parents[1]) == {"episodes": 6, "broken": 0}
    log.close()
    # A step that is played again replaces its file. The new file may be longer and begin like the old one.
    other = [with_tokens(t, random.Random(2)) for t in played("maze", list(range(8)), "random", 12, "train-1")]
    again = RunLog.create(tmp_path / "runs" / "live", {"name": "live"}, resume=True)
    for episode in other:
        again.write_trajectory(1, episode)
    library.indexer.update()
    rows = all_rows(library, "live", order="oldest")
    assert [library.raw_episode("live", row["key"])["messages"][0]["token_ids"] for row in rows] == [
        e.messages[0].token_ids for e in other
    ]
    again.truncate_after(0)
    again.close()
    library.indexer.update()
    assert all_rows(library, "live") == []


def test_a_file_changed_in_place_is_read_again_from_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x" / "trajectories"
    folder.mkdir(parents=True)
    (folder.parent / "config.toml").write_text("")
    lines = [t.to_json() + "\n" for t in played("maze", [0, 1, 2], "random", 4, "a")]
    path = folder / "step_000001.jsonl"
    path.write_text(lines[0] + lines[1])
    library = library_of(tmp_path / "runs", tmp_path)
    inode = path.stat().st_ino
    with path.open("r+") as file:
        file.write(lines[2] + lines[1] + lines[0])
    assert path.stat().st_ino == inode
    library.indexer.update()
    assert [row["item"] for row in all_rows(library, "x", order="oldest")] == [2, 1, 0]


def test_damaged_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x" / "trajectories"
    folder.mkdir(parents=True)
    (folder.parent / "config.toml").write_text("this is not TOML [")
    (folder.parent / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 1}\nrubbish\n[1]\n{"step": 2, "loss": null}\n{"step": 3, "loss": -1e308}\n{"st'
    )
    good = played("maze", [0], "random", 4, "a")[0].to_json()
    row = json.loads(good)
    bad = [
        "rubbish",
        "[]",
        "{}",
        json.dumps(row | {"stop": "vanished"}),
        json.dumps(row | {"item": 10**30}),
        json.dumps(row | {"item": 2**53}),
        json.dumps(row | {"rewards": "many"}),
        json.dumps(row | {"messages": [1, 2]}),
        json.dumps(row | {"messages": [{"role": "user", "content": 5}]}),
        "[" * 5000,
        '{"id": ' + "[" * 5000 + "]" * 5000 + "}",
    ]
    with_nan = json.dumps(row | {"rewards": [float("nan")], "infos": [{}]})  # Python writes NaN, which is not JSON
    with_surrogates = json.dumps(
        row | {"id": "a\ud800-0-2-0", "kind": "\udfff", "infos": [{"deep": json.loads("[" * 400 + "]" * 400)}]}
    )
    lines = [good, *bad, with_nan, good, with_surrogates]
    (folder / "step_000001.jsonl").write_text("\n".join(lines) + "\n")
    library = library_of(tmp_path / "runs", tmp_path)
    valid = [f"step_000001.{number}" for number, line in enumerate(lines) if line not in bad]
    assert sorted(row["key"] for row in all_rows(library, "x", order="oldest")) == sorted(valid)
    assert library.overview()["runs"][0]["broken"] == len(bad)
    assert library.runs.metrics(library.run_folder("x"))["series"] == {"loss": [1, None, None]}
    assert library.episode("x", valid[2])["item"] == 0
    assert [group["size"] for group in library.groups("x", Filter(kind="train"), False, 0, 9)["rows"]] == [3]
    # Unpaired surrogates are replaced and deep nesting is cut, so that both can be encoded.
    episode = json.loads(to_json(library.episode("x", valid[3])))
    assert (episode["trajectory"], episode["kind"]) == ("a\ufffd-0-2-0", "\ufffd")


def test_an_unreadable_run_is_listed_and_the_others_are_indexed(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write_evaluation(root / "good")
    for name in ("a", "z"):
        write_evaluation(root / name)
        # Reading this file fails, as on a broken disk.
        (root / name / "trajectories" / "bad.jsonl").symlink_to("/proc/self/mem")
    (root / "z\udcff").mkdir()  # a name that is not valid UTF-8
    (root / "z\udcff" / "eval.json").write_text("{}")
    library = Library([root], ViewerEnvironments(), Index(tmp_path / "index.sqlite3"))
    library.indexer.start()
    wait_for_index(library, 4, "z")
    library.indexer.stop()
    rows = {row["id"]: row for row in json.loads(to_json(library.overview()))["runs"]}
    assert set(rows) == {"a", "good", "z", "z\ufffd"}
    assert [rows[name]["episodes"] for name in ("a", "good", "z")] == [4, 4, 4]
    assert rows["good"]["problems"] == []
    assert ["bad.jsonl" in problem for problem in rows["a"]["problems"]] == [True]
    stamp = library.indexer.stamp
    library.indexer.update()
    assert library.indexer.stamp == stamp  # retried without a change


def test_links_to_files_outside_a_run_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"state": "secret", "loss": 1, "step": 1, "results": []}\n')
    elsewhere = write_run(tmp_path / "elsewhere")
    root = tmp_path / "runs"
    for number, name in enumerate(("status.json", "config.toml", "metrics.jsonl", "summary.json", "doctor.jsonl")):
        run = write_run(root / f"run{number}")
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret)
    run = write_run(root / "linked_folder")
    shutil.rmtree(run / "trajectories")
    (run / "trajectories").symlink_to(elsewhere / "trajectories")
    run = write_run(root / "linked_file")
    (run / "trajectories" / "step_000009.jsonl").symlink_to(elsewhere / "trajectories" / "step_000001.jsonl")
    (run / "trajectories" / "inside.jsonl").symlink_to("step_000001.jsonl")
    (root / "whole_run").symlink_to(elsewhere)  # a link by the user, often to a larger disk
    library = Library([root], ViewerEnvironments(), Index(tmp_path / "index.sqlite3"))
    library.indexer.update()
    rows = {row["id"]: row for row in library.overview()["runs"]}
    episodes = rows["whole_run"]["episodes"]
    assert episodes > 0
    assert rows["linked_folder"]["episodes"] == 0
    assert rows["linked_file"]["episodes"] > episodes  # the link to a file of the run counts
    for name in ("linked_folder", "linked_file"):
        assert "outside the run's folder" in rows[name]["problems"][0]
    assert "status.json cannot be read: it is a link to a file outside" in rows["run0"]["problems"][0]
    shown = json.dumps([library.details(run) for run in rows]) + json.dumps(
        [library.runs.metrics(library.run_folder(run)) for run in rows]
    )
    assert "secret" not in shown.replace(str(secret), "")


def test_a_pipe_in_a_run_does_not_block(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    names = ("status.json", "config.toml", "metrics.jsonl", "summary.json", "doctor.jsonl", "trajectories/x.jsonl")
    for number, name in enumerate(names):
        run = write_run(root / f"run{number}")
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    write_evaluation(root / "eval")
    (root / "eval" / "eval.json").unlink()
    os.mkfifo(root / "eval" / "eval.json")
    library = Library([root], ViewerEnvironments(), Index(tmp_path / "index.sqlite3"))
    library.indexer.update()
    rows = {row["id"]: row for row in library.overview()["runs"]}
    assert len(rows) == len(names) + 1
    assert "status.json cannot be read: it is not a regular file" in rows["run0"]["problems"][0]
    assert "eval.json cannot be read: it is not a regular file" in rows["eval"]["problems"][0]
    for run in rows:
        library.details(run)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("config.toml", "environments = 5", "environments must be a list, got 5"),
        ("config.toml", "environments = [[[", "config.toml cannot be read"),
        ("status.json", '{"updated": "yesterday", "state": "running"}', "updated must be a number, got 'yesterday'"),
        ("status.json", '{"step": "1", "steps": "9"}', "step must be a number"),
        ("status.json", "[" * 5000, "status.json cannot be read: its brackets"),
        ("eval.json", '{"results": "x"}', "results must be a list, got 'x'"),
        ("eval.json", '{"results": [{"scenarios": {"A": {"success": 3, "items": "4"}}}]}', "success must be a table"),
        ("eval.json", '{"config": [], "results": [5]}', "config must be a table"),
        ("eval.json", '{"results": [{"overall": []}]}', "overall must be a table, got []"),
        ("eval.json", "\x00", "eval.json cannot be read"),
    ],
)
def test_a_damaged_file_is_reported_and_other_runs_are_listed(
    tmp_path: Path, written: Path, name: str, content: str, problem: str
) -> None:
    folder = tmp_path / "runs" / "damaged"
    folder.mkdir(parents=True)
    for file in ("config.toml", "status.json") if name != "eval.json" else ():
        (folder / file).write_text("" if file.endswith("toml") else "{}")
    (folder / name).write_text(content)
    library = Library([tmp_path / "runs", written], ViewerEnvironments(), Index(tmp_path / "index.sqlite3"))
    rows = {row["id"]: row for row in library.overview()["runs"]}
    assert set(rows) == {"damaged", "small", "evals/oracle"}
    assert problem in "\n".join(rows["damaged"]["problems"])
    assert (rows["damaged"]["status"]["state"] if name != "config.toml" else "damaged") == "damaged"
    assert rows["small"]["problems"] == rows["evals/oracle"]["problems"] == []
    assert to_json(library.details("damaged"))


def test_the_index_is_reused_shared_and_rebuilt_if_damaged(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite3"
    first = library_of(written, tmp_path)
    second = Library([written], first.environments, Index(path))
    second.indexer.update()
    assert second.indexer.stamp == 0  # everything was indexed before
    assert all_rows(second) == all_rows(first)
    first.close()
    second.close()
    path.write_bytes(b"this is no database at all, but it is long enough to be taken for one" * 50)
    assert len(all_rows(library_of(written, tmp_path))) == TRAINED + HELD_OUT


def test_removed_runs_are_deleted_from_the_index(tmp_path: Path) -> None:
    write_evaluation(tmp_path / "runs" / "a")
    library = library_of(tmp_path / "runs", tmp_path)
    (tmp_path / "runs" / "a").rename(tmp_path / "moved")
    library.index.forget_missing()
    for table in ("runs", "files", "episodes", "cells"):
        assert library.index.connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] == 0


def ended_process() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_a_run_without_its_process_is_killed(tmp_path: Path) -> None:
    RunLog.create(tmp_path / "run", {"name": "run"}).close()
    assert read_status(tmp_path / "run")[0]["state"] == "running"
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    (tmp_path / "run" / "status.json").write_text(json.dumps(status | {"pid": ended_process()}))
    assert read_status(tmp_path / "run")[0]["state"] == "killed"


def test_state_of_an_evaluation_without_its_process(tmp_path: Path) -> None:
    path = write_evaluation(tmp_path / "runs" / "x") / "eval.json"
    row = json.loads(path.read_text()) | {"state": "running"}
    library = library_of(tmp_path / "runs", tmp_path)
    host, ended, long_ago = socket.gethostname(), ended_process(), time.time() - 3600
    for process, modified, state in (
        ({"pid": os.getpid(), "host": host}, long_ago, "running"),
        ({"pid": ended, "host": host}, None, "killed"),
        ({"pid": ended, "host": f"not-{host}"}, long_ago, "running"),
        ({"pid": ended}, None, "running"),  # perhaps on another machine
        ({"pid": ended}, long_ago, "stopped"),
        ({"pid": 1 << 70, "host": host}, long_ago, "running"),
        ({"pid": ended, "host": host, "state": "finished"}, None, "finished"),
    ):
        path.write_text(json.dumps(row | process))
        os.utime(path, (modified, modified) if modified else None)
        assert library.overview()["runs"][0]["status"]["state"] == state, process
        assert state in library.changes()["stamps"]["x"]


def test_run_details_have_doctor_warnings_and_evaluations(library: Library) -> None:
    details = library.details("small")
    assert [warning["rule"] for warning in details["doctor"]] == ["entropy_collapse"]
    assert [row["step"] for row in details["evaluations"]] == list(range(STEPS + 1))
    assert details["evaluations"][-1]["success"] == 1.0
    assert details["evaluations"][-1]["low"] < 1.0 == details["evaluations"][-1]["high"]
    overview = {row["id"]: row for row in library.overview()["runs"]}
    assert overview["evals/oracle"]["success"] == 0.75
    assert overview["evals/oracle"]["agent"] == "the oracle"


def test_token_texts_of_all_kinds_of_tokenizers() -> None:
    byte_level = Vocabulary(
        {"model": {"type": "BPE", "vocab": {"Ġhello": 0, "Ã©": 1, "Ċ": 2}}, "decoder": {"type": "ByteLevel"}}
    )
    assert byte_level.texts([0, 1, 2, 9]) == [" hello", "é", "\n", "⟨9⟩"]
    pieces = Vocabulary({"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁hi", -1.0], ["<0x0A>", -2.0]]}})
    assert pieces.texts([1, 2]) == [" hi", "\n"]


def test_a_path_that_is_not_a_folder_is_rejected() -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        Library([Path("/no/such/folder")], None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("env", "subsets"), [("babyai", True), ("no_such_environment", False)])
def test_an_environment_is_looked_up_once_for_all_its_items(
    env: str, subsets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking one up reads the metadata of every installed package, and a run has thousands of items."""
    lookups: list[str] = []
    monkeypatch.setattr(view, "_installed_class", lru_cache(view._installed_class.__wrapped__))
    entries = view.catalog.entries
    monkeypatch.setattr(view.catalog, "entries", lambda: lookups.append(env) or entries())
    found = [ViewerEnvironments().subsets_of(env, item) for item in range(50)]
    assert lookups == [env]
    assert all(found) is subsets
