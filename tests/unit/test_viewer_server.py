"""The viewer's server: access control, isolation, replays, the playground and the export."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import html
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from viewer_for_tests import library_of, played, viewer_in_thread, write_episodes, write_evaluation, write_run

from agentgym_rl.agent.policy import Reply
from agentgym_rl.commands.view import ViewerEnvironments
from agentgym_rl.common.http_guard import is_loopback
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.run.log import RunLog
from agentgym_rl.training.preferences import read_preferences
from agentgym_rl.types import Message
from agentgym_rl.viewer.bundle import join_modules
from agentgym_rl.viewer.discovery import RunFolder
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.page_export import exported_page
from agentgym_rl.viewer.playground import MAX_GAMES, Game, NoSuchGame, Playground
from agentgym_rl.viewer.preference_store import NAME, store_preference
from agentgym_rl.viewer.replays import Picture, Replays, picture_of
from agentgym_rl.viewer.server import create_app, link_to, static_files

ACT = ("act", None)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "small")
    write_evaluation(root / "oracle")
    return library_of(root, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def client(library: Library) -> Iterator[httpx.Client]:
    with viewer_in_thread(library) as url, httpx.Client(base_url=url) as http:
        yield http


def test_every_request_of_the_page_is_answered(client: httpx.Client) -> None:
    for path in ("overview", "changes", "environments", "items?env=maze&split=test"):
        assert client.get(f"api/{path}").status_code == 200, path
    for path in ("run", "metrics", "episodes", "groups", "facets"):
        assert client.get(f"api/{path}?run=small").status_code == 200, path
    assert client.get("api/eval?run=oracle").json()["config"]["agent"]["name"] == "the oracle"
    assert client.get("api/episode?run=small&key=step_000002.1").json()["env"] == "maze"
    assert client.get("api/same_task?env=maze&item=1").status_code == 200
    assert client.get("api/episodes?run=small&limit=100000").status_code == 422
    assert client.get("api/episodes?run=small&order=upwards").status_code == 400
    assert client.get("api/episodes?run=nowhere").status_code == 404


@pytest.mark.parametrize("number", [2**53, 2**63, 10**30, -(10**30)])
def test_a_number_too_large_for_the_index_is_rejected(client: httpx.Client, number: int) -> None:
    paths = [f"{path}?run=small&{name}=" for path in ("episodes", "groups", "facets") for name in ("step", "item")]
    paths += ["episodes?run=small&horizon=", "episodes?run=small&offset=", "same_task?env=maze&item="]
    for path in [*paths, "frame?run=small&key=step_000001.0&turn="]:
        answer = client.get(f"api/{path}{number}")
        assert answer.status_code == 422, path
        assert "should be" in answer.json()["detail"]
    assert client.get(f"api/episode?run=small&key=step_000001.{abs(number)}").status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "static/../server.py",
        "static/..%2fserver.py",
        "static/%2e%2e/%2e%2e/view.py",
        "static//etc/passwd",
        "api/episode?run=small&key=../../config.0",
        "api/episode?run=../&key=step_000001.0",
        "api/episode?run=/etc&key=passwd.0",
        "api/run?run=..",
        "api/frame?run=small&key=..%2F..%2Fx.0&turn=0",
        "api/nothing",
    ],
)
def test_files_outside_the_runs_are_not_reachable(client: httpx.Client, path: str) -> None:
    # Set the raw path, which the client would normalize.
    request = client.build_request("GET", "/")
    request.url = request.url.copy_with(raw_path=f"/{path}".encode())
    answer = client.send(request)
    assert answer.status_code in (404, 422), answer.text
    assert "import" not in answer.text
    assert "root:" not in answer.text


def test_every_response_has_a_strict_policy(client: httpx.Client) -> None:
    for path in ("", "static/page.js", "api/overview", "api/nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "script-src 'self'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
    assert "<script>" not in client.get("").text
    assert not re.search(r"\son\w+=", client.get("").text)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil"])
def test_a_foreign_name_that_resolves_to_loopback_is_rejected(client: httpx.Client, host: str) -> None:
    assert client.get("api/overview", headers={"host": host}).status_code == 421


def test_invalid_addresses_are_rejected_and_head_has_no_body(client: httpx.Client) -> None:
    assert client.get("api/overview", headers={"host": "[::1"}).status_code == 400
    refused = client.post("api/play/open", json={"env": "maze", "item": 0}, headers={"origin": "http://[::1"})
    assert refused.status_code == 400
    for path in ("", "static/app.js", "api/overview"):
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert client.head("api/nothing").status_code == 404


@pytest.mark.parametrize("host", ["localhost", "localhost:1234", "127.0.0.1:99", "[::1]:8", "127.8.9.1", "x.localhost"])
def test_loopback_names_are_accepted(client: httpx.Client, host: str) -> None:
    assert client.get("api/changes", headers={"host": host}).status_code == 200


def test_other_origins_cannot_play(client: httpx.Client) -> None:
    body = {"env": "maze", "item": 0}
    assert client.post("api/play/open", json=body).status_code == 200
    here = str(client.base_url).rstrip("/")
    assert client.post("api/play/open", json=body, headers={"origin": here}).status_code == 200
    assert client.post("api/play/open", json=body, headers={"origin": "https://evil.example"}).status_code == 403
    assert client.post("api/play/open", json=body, headers={"origin": "null"}).status_code == 403
    assert client.post("api/play/open", json=body, headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert client.post("api/play/open", data={"env": "maze"}).status_code == 415
    plain = {"content-type": "text/plain"}
    assert client.post("api/play/open", content=json.dumps(body), headers=plain).status_code == 415
    large = {"content-type": "application/json"}
    assert client.post("api/play/open", content=b"1" * (1 << 21), headers=large).status_code == 413
    assert client.delete("api/overview").status_code == 405


def test_an_address_other_than_loopback_needs_a_token(library: Library, tmp_path: Path) -> None:
    other = library_of(library.roots[0], tmp_path)
    with viewer_in_thread(other, token="secret", loopback=False) as url, httpx.Client(base_url=url) as client:
        for path in ("", "static/app.js", "api/overview"):
            assert client.get(path).status_code == 401
            assert client.get(f"{path}?token=wrong").status_code == 401
        assert client.get("api/overview", headers={"authorization": "Bearer wrong"}).status_code == 401
        assert client.get("api/overview", headers={"authorization": "Bearer secret"}).status_code == 200
        assert client.get("api/overview", headers={"host": "name.of.this.machine"}).status_code == 401
        answer = client.get("?token=secret")
        assert answer.status_code == 303
        assert answer.headers["location"] == "/"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite" in cookie
        assert "secret" not in cookie
        assert client.get("api/overview").status_code == 200  # the client keeps the cookie, as a browser does


async def test_the_link_encodes_any_token(library: Library, tmp_path: Path) -> None:
    other = library_of(library.roots[0], tmp_path)
    for token in ("a+b&c#d/%41", "two words", "ключ"):
        app = httpx.ASGITransport(create_app(other, token=token, loopback=False))
        async with httpx.AsyncClient(transport=app) as client:
            answer = await client.get(link_to("::1", 8000, token))
            assert (answer.status_code, answer.headers["location"]) == (303, "/"), token
    other.close()


def test_loopback_addresses_are_recognized() -> None:
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "::1", "[::1]", "127.3.2.1"]))
    assert not any(map(is_loopback, ["0.0.0.0", "10.0.0.1", "::", "example.org", "127.0.0.1.example.org", ""]))


def test_every_turn_and_the_end_have_a_picture(client: httpx.Client) -> None:
    row = client.get("api/episodes?run=oracle").json()["rows"][0]
    pictures = set()
    for turn in range(row["turns"] + 1):
        answer = client.get(f"api/frame?run=oracle&key={row['key']}&turn={turn}")
        assert answer.headers["content-type"] == "image/svg+xml"
        policy = answer.headers["content-security-policy"]
        assert "sandbox" in policy
        assert "script" not in policy
        pictures.add(answer.text)
    assert len(pictures) == row["turns"] + 1
    answer = client.get(f"api/frame?run=oracle&key={row['key']}&turn={row['turns'] + 1}")
    assert answer.status_code == 404
    assert "and no turn" in answer.json()["detail"]


def test_an_episode_played_again_after_a_kill_is_replayed_again(tmp_path: Path) -> None:
    first, second = (played("maze", [item], "oracle", 30, "same-id")[0] for item in (3, 4))
    write_episodes(tmp_path / "killed", [first])
    library = library_of(tmp_path, tmp_path)
    with viewer_in_thread(library) as url, httpx.Client(base_url=url) as http:
        address = "api/frame?run=killed&key=step_000001.0&turn=0"
        before = http.get(address)
        path = tmp_path / "killed/trajectories/step_000001.jsonl"
        path.unlink()
        path.write_text(second.to_json() + "\n")  # by the resumed run
        library.indexer.update()
        after = http.get(address)
    assert before.status_code == after.status_code == 200
    assert before.text != after.text


async def test_a_failed_replay_says_why() -> None:
    episode = json.loads((await asyncio.to_thread(played, "maze", [3], "oracle", 30, "x"))[0].to_json())
    replays = Replays(ViewerEnvironments())
    assert isinstance(await replays.frame(episode, ACT, 1), Picture)
    changed = json.loads(json.dumps(episode))
    changed["messages"][3]["content"] = "Something else."
    assert isinstance(await replays.frame(changed, ACT, 0), Picture)
    assert "differs from the record after turn 1" in str(await replays.frame(changed, ACT, 1))
    truncated = episode | {"messages": episode["messages"][:-1]}
    last = len(episode["rewards"])
    assert "did not answer it" in str(await replays.frame(truncated, ACT, last))
    assert "unknown environment" in str(await replays.frame(episode | {"env": "atlantis"}, ACT, 0))
    assert "style" in str(await replays.frame(episode, ("mime", None), 0))
    assert "no item" in str(await replays.frame(episode | {"item": 10**9}, ACT, 0))
    await replays.close()


async def test_what_a_program_played_is_replayed_whatever_its_model_said() -> None:
    episode = json.loads((await asyncio.to_thread(played, "maze", [3], "oracle", 30, "x"))[0].to_json())
    replies = [message for message in episode["messages"] if message["role"] == "assistant"]
    for message, info in zip(replies, episode["infos"], strict=True):
        info["played_action"], message["content"] = message["content"], "I ask for help."
    for message in episode["messages"]:
        message["content"] = f"The program's own prompt. {message['content']}"
    replays = Replays(ViewerEnvironments())
    last = await replays.frame(episode, ACT, len(replies))
    assert isinstance(last, Picture), last
    await replays.close()


async def test_replies_with_thoughts_are_replayed_in_their_style() -> None:
    episode = json.loads((await asyncio.to_thread(played, "maze", [3], "oracle", 30, "x"))[0].to_json())
    for message in episode["messages"]:
        if message["role"] == "assistant":
            message["content"] = f"Thought: this way.\nAction: {message['content']}"
    replays = Replays(ViewerEnvironments())
    assert isinstance(await replays.frame(episode, ("react", None), len(episode["rewards"])), Picture)
    assert "differs" in str(await replays.frame(episode, ACT, len(episode["rewards"])))
    await replays.close()


def test_the_media_type_of_a_picture_follows_its_content() -> None:
    assert picture_of(b"\x89PNG...") == Picture("image/png", b"\x89PNG...")
    assert isinstance(picture_of("<svg/>"), Picture)
    assert picture_of("<p>hello</p>") == Picture("text/html", b"<p>hello</p>")
    searches = picture_of('<section class="a">1</section><section class="b">2</section>')
    assert searches == Picture("text/html", b'<section class="a">1</section><section id="now" class="b">2</section>')
    assert "bytes" in str(picture_of("x" * (9 << 20)))


async def test_the_playground_is_played_by_hand_and_by_policies() -> None:
    playground = Playground(ViewerEnvironments())
    game = await playground.open("maze", 5)
    assert game["actions"]
    assert isinstance(await playground.picture(game["session"]), Picture)
    game = await playground.act(game["session"], "fly away")
    assert game["turns"][0]["valid"] is False
    game = await playground.play_turn(game["session"], "random")
    while not game["done"]:
        game = await playground.play_turn(game["session"], "oracle")
    assert game["success"]
    assert {turn["by"] for turn in game["turns"]} == {"you", "random", "oracle"}
    with pytest.raises(EnvError, match="has ended"):
        await playground.act(game["session"], "up")
    with pytest.raises(ConfigError, match="unknown policy"):
        await playground.play_turn(game["session"], "magic")
    games = [await playground.open("maze", item) for item in range(MAX_GAMES)]
    with pytest.raises(NoSuchGame):
        await playground.act(game["session"], "up")  # the oldest game was closed
    await playground.close(games[0]["session"])
    await playground.close_all()


async def test_many_games_opened_at_once_close_those_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing takes a while. Another game that is opened meanwhile closes other ones."""
    close = Game.close

    async def close_slowly(game: Game) -> None:
        await asyncio.sleep(0.01)
        await close(game)

    monkeypatch.setattr(Game, "close", close_slowly)
    playground = Playground(ViewerEnvironments())
    for _ in range(3):
        games = await asyncio.gather(*(playground.open("maze", item) for item in range(MAX_GAMES)))
    for game in games:
        await playground.close(game["session"])
    await playground.close_all()


async def test_a_policy_gets_the_turns_played_by_hand() -> None:
    received: list[list[Message]] = []

    class Recorder:
        async def reply(self, messages: list[Message], observation: str, limits: object) -> object:
            received.append(list(messages))
            return Reply([Message("user", observation)], Message("assistant", "up"))

        async def close(self) -> None:
            return None

    environments = ViewerEnvironments()
    environments.policies["recorder"] = lambda session, seed: Recorder()
    playground = Playground(environments)
    game = await playground.open("maze", 5)
    await playground.act(game["session"], "down")
    await playground.play_turn(game["session"], "recorder")
    assert [message.role for message in received[0]] == ["system", "user", "assistant"]
    assert received[0][-1].content == "down"
    await playground.close_all()


async def test_the_export_has_every_episode_and_no_local_paths(library: Library, tmp_path: Path) -> None:
    text, summary = await exported_page(library_of(library.roots[0], tmp_path), episodes=1000, pictures=True)
    page = text.decode()
    assert str(library.roots[0]) not in page
    assert page.count("<script") == 2
    assert "src=" not in page.partition("</style>")[2]
    script = re.search(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert script
    assert policy
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in html.unescape(policy[1])
    data = _data_in(text)
    assert str(library.roots[0]) not in json.dumps(data)
    total = sum(row["episodes"] for row in data["overview"]["runs"])
    assert sum(len(rows) for rows in data["rows"].values()) == total
    assert summary.startswith(f"{total} episodes of 2 runs")
    assert all(set(data["frames"][run]) == {row["key"] for row in rows} for run, rows in data["rows"].items())


async def test_an_export_has_no_paths_hosts_or_addresses(tmp_path: Path) -> None:
    root = tmp_path / "my runs"
    write_evaluation(root / "oracle")
    row = json.loads((root / "oracle" / "eval.json").read_text())
    row["config"]["agent"] |= {"path": f"{tmp_path}/my models/tiny"}
    row["config"]["tasks"][0] |= {"data": f"question sets in {tmp_path}/my sets", "missing": f"{tmp_path}/x is needed"}
    row["results"][1]["total"] |= {"errors": 1, "causes": {f"no such file: '{tmp_path}/a/b.json'": 1}}
    row |= {"host": "machine-of-mine", "pid": 4194000, "settings": {"base_url": "http://machine-of-mine:1/v1"}}
    (root / "oracle" / "eval.json").write_text(json.dumps(row))
    model = {"path": f"{tmp_path}/models/tiny", "chat_template": "~/secret/chat.jinja"}
    servers = [{"name": "maze", "url": "http://machine-of-mine:2"}]
    log = RunLog.create(root / "run", {"run_dir": str(root / "run"), "model": model, "environments": servers})
    failed = played("maze", [0], "oracle", 30, "x")[0]
    failed.error = f"OSError: {tmp_path}/models/tiny is gone"
    log.write_trajectory(1, failed)
    log.set_status("failed", error=f"disk full at {tmp_path}/models/tiny")
    log.close()
    status = json.loads((root / "run" / "status.json").read_text())
    (root / "run" / "status.json").write_text(json.dumps(status | {"host": "machine-of-mine", "pid": 4194000}))
    library = library_of(root, tmp_path)
    data = _data_in((await exported_page(library, episodes=9, pictures=False))[0])
    for secret in (str(tmp_path), "my models/", "~/", "machine-of-mine", "4194000"):
        assert secret not in json.dumps(data), secret
    assert data["evals"]["oracle"]["config"]["agent"]["path"] == "tiny"
    plan = data["evals"]["oracle"]["config"]["tasks"][0]
    assert (plan["data"], plan["missing"]) == ("question sets in my sets", "x is needed")
    assert data["evals"]["oracle"]["results"][1]["total"]["causes"] == [["no such file: 'b.json'", 1]]
    assert data["runs"]["run"]["config"]["model"] == {"path": "tiny", "chat_template": "chat.jinja"}
    assert data["runs"]["run"]["status"]["error"] == "disk full at tiny"
    assert data["episodes"]["run"]["step_000001.0"]["error"] == "OSError: tiny is gone"
    library.close()


def _data_in(page: bytes) -> Any:
    packed = re.search(rb'id="embedded">([^<]*)<', page)
    assert packed
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


async def test_an_export_replaces_values_that_json_cannot_represent(tmp_path: Path) -> None:
    write_evaluation(tmp_path / "runs" / "odd")
    path = tmp_path / "runs" / "odd" / "trajectories" / "maze.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    row["messages"][0]["content"] = "half \ud800 a character"
    row["infos"][0] = {"deep": json.loads("[" * 400 + "]" * 400), "large": 10**30}
    path.write_text(json.dumps(row) + "\n")
    library = library_of(tmp_path / "runs", tmp_path)
    text, summary = await exported_page(library, episodes=10, pictures=False)
    assert summary.startswith("1 episodes of 1 runs")
    data = _data_in(text)
    assert data["episodes"]["odd"]["maze.0"]["messages"][0]["content"] == "half \ufffd a character"
    library.close()


async def test_a_small_export_has_whole_groups_spread_over_the_run(library: Library, tmp_path: Path) -> None:
    text, _ = await exported_page(library_of(library.roots[0], tmp_path), episodes=12, pictures=False)
    data = _data_in(text)
    rows = data["rows"]["small"]
    assert 8 < len(rows) <= 12
    assert len({row["step"] for row in rows}) > 1
    for row in rows:
        if row["kind"] == "train":
            assert len(data["episodes"]["small"][row["key"]]["group"]) == 4


async def test_an_export_smaller_than_a_group_has_the_beginning_of_one(library: Library, tmp_path: Path) -> None:
    text, summary = await exported_page(library_of(library.roots[0], tmp_path), episodes=1, pictures=False)
    assert len(_data_in(text)["rows"]["small"]) == 1
    assert summary.startswith("2 episodes of 2 runs")


def prefer_left(folder: Path, by: str) -> None:
    first, second = (json.loads(trajectory.to_json()) for trajectory in played("maze", [1, 1], "random", 2, "train"))
    store_preference(RunFolder("small", folder, "run"), ("small", first), ("small", second), "left", by)


@pytest.mark.parametrize("whole", [0, 1])
def test_a_preference_after_a_torn_line_is_stored_whole(tmp_path: Path, whole: int) -> None:
    path = tmp_path / NAME
    for _ in range(whole):
        prefer_left(tmp_path, "Ada")
    with path.open("ab") as file:
        file.write(b'{"time": 1.5, "by": "Bo')  # a kill, or a full disk
    prefer_left(tmp_path, "Eve")
    assert [pair.by for pair in read_preferences([path])] == ["Ada"] * whole + ["Eve"]


def test_a_preference_after_a_line_without_its_end_keeps_it(tmp_path: Path) -> None:
    prefer_left(tmp_path, "Ada")
    prefer_left(tmp_path, "Bob")
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes().rstrip(b"\n"))  # as an editor leaves it
    prefer_left(tmp_path, "Eve")
    assert [pair.by for pair in read_preferences([path])] == ["Ada", "Bob", "Eve"]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_preference_that_cannot_be_written_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / NAME)
    with pytest.raises(ConfigError, match="of small cannot be written"):
        prefer_left(tmp_path, "Ada")


def test_unsupported_module_syntax_is_rejected() -> None:
    modules = {name: text.decode() for name, text in static_files().items() if name.endswith(".js")}
    assert "export " not in join_modules(modules, "app.js").replace("AgentGym", "")
    with pytest.raises(ValueError, match="not supported"):
        join_modules({"a.js": "export default 3;\n"}, "a.js")
    with pytest.raises(ValueError, match="in a cycle"):
        join_modules({"a.js": 'import { b } from "./b.js";\n', "b.js": 'import { a } from "./a.js";\n'}, "a.js")


def test_the_page_never_parses_markup_from_strings() -> None:
    for name, text in static_files().items():
        if name.endswith(".js"):
            assert not re.findall(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc", text), name
            assert not re.findall(rb"\beval\(|new Function|setAttribute\(.on", text), name
        assert b"://" not in text.replace(b"http://www.w3.org/", b""), name
