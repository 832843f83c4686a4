"""WebArena in a real browser: tasks solved by the oracle, isolation, crashes, hostile actions, other sites."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from servers_for_tests import server_in_thread, wait_until

from agentgym_rl.environment.envs.webarena import WebArena
from agentgym_rl.environment.envs.webarena import browser as browser_module
from agentgym_rl.environment.envs.webarena import env as env_module
from agentgym_rl.environment.envs.webarena.browser import shared_chromium
from agentgym_rl.environment.envs.webarena.sites.server import site_server
from agentgym_rl.environment.envs.webarena.tasks.embedded import problems
from agentgym_rl.environment.pool import RemotePool
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import Step

PLAY_ALL = "WEBARENA_TEST_EVERYTHING"
"""Set it to play all tasks instead of one of every third template. The unit tests grade every template."""


def chosen_items() -> list[int]:
    if os.environ.get(PLAY_ALL):
        return list(range(len(problems())))
    first = {problem.config["intent_template_id"]: item for item, problem in reversed(list(enumerate(problems())))}
    return [first[template] for template in sorted(first)[1::3]]


def item_of(intent: str) -> int:
    return next(item for item, problem in enumerate(problems()) if intent in problem.config["intent"])


def solve(env: WebArena, item: int) -> tuple[Step, int]:
    env.reset(item)
    for turn in range(1, 16):
        step = env.step(env.oracle())
        if step.done:
            return step, turn
        assert step.info["valid"], (item, step.observation)
    raise AssertionError(f"item {item} was not solved in 15 turns")


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise all timeouts for busy machines. Tests of a deadline set their own."""
    monkeypatch.setattr(env_module, "PAGE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(env_module, "CALL_TIMEOUT_S", 120.0)
    for module in (env_module, browser_module):
        monkeypatch.setattr(module, "LAUNCH_TIMEOUT_S", 100.0)


@pytest.fixture
def env() -> Iterator[WebArena]:
    webarena = WebArena()
    yield webarena
    webarena.close()


def valid(env: WebArena, action: str) -> str:
    step = env.step(action)
    assert step.info == {"valid": True}, step.observation
    return step.observation


def refused(env: WebArena, action: str) -> str:
    step = env.step(action)
    assert step.info == {"valid": False}, step.observation
    assert (step.reward, step.done) == (0.0, False)
    return step.observation


def id_of(observation: str, element: str) -> str:
    """Return the id of the line that contains `element`."""
    (line,) = [line for line in observation.splitlines() if element in line]
    return line.strip().split("]")[0] + "]"


def num_contexts() -> int:
    return shared_chromium(*site_server().resolver_flags).num_contexts + shared_chromium().num_contexts


# --- tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(3600 if os.environ.get(PLAY_ALL) else 600)
def test_oracle_solves_the_tasks_in_four_sessions() -> None:
    items = chosen_items()

    def play(worker: int) -> list[int]:
        env = WebArena()
        try:
            return [item for item in items[worker::4] if not solve(env, item)[0].info["success"]]
        finally:
            env.close()

    with ThreadPoolExecutor(4) as pool:
        failed = [item for worker in pool.map(play, range(4)) for item in worker]
    assert failed == []
    wait_until(lambda: num_contexts() == 0)
    assert len(site_server().episodes) == 0


def test_doing_nothing_fails(env: WebArena) -> None:
    for intent in ("into my basket", "Which cafe is nearest"):
        env.reset(item_of(intent))
        step = env.step("stop []")
        assert (step.done, step.reward, step.info["success"]) == (True, 0.0, False)
        with pytest.raises(EnvError, match="call reset"):
            env.step("go_back")


def test_nearly_right_outcome_fails(env: WebArena) -> None:
    env.reset(item_of("Show me the way from The Copper Kettle to Playhouse Theatre by bicycle"))
    address = "http://map.test/directions?from=The+Copper+Kettle&to=Playhouse+Theatre&mode"
    assert "by car" in valid(env, f"goto [{address}=car]")
    assert not env.step("stop []").info["success"]
    env.reset(item_of("Put 3 of the Corvus Salad Spinner"))
    page = valid(env, "goto [http://shop.test/product/6]")
    valid(env, f"type {id_of(page, 'Quantity')} [2] [1]")
    assert not env.step("stop []").info["success"]


def test_oracle_recovers_after_a_detour(env: WebArena) -> None:
    env.reset(item_of("to my wish list"))
    valid(env, env.oracle())
    valid(env, "goto [http://shop.test/orders]")
    assert env.oracle() == "goto [http://shop.test/]"
    for _ in range(8):
        step = env.step(env.oracle())
        if step.done:
            break
    assert step.info["success"]


async def test_a_rollout_over_http() -> None:
    with server_in_thread({"webarena": WebArena}) as server:
        pool = RemotePool({"webarena": f"{server.url}/webarena"}, timeout_s=120)
        session = await pool.open("webarena")
        step = await session.reset(item_of("Change my biography"))
        assert step.observation.startswith("Objective: Change my biography")
        assert "click [2]" in await session.actions()
        while not step.done:
            step = await session.step(await session.oracle())
        assert (step.reward, step.info["success"]) == (1.0, True)
        assert (await session.render())[:4] == b"\x89PNG"
        await session.close()
        await pool.close()
        wait_until(lambda: server.sessions.num_open == 0)
    wait_until(lambda: num_contexts() == 0)


# --- observations ----------------------------------------------------------------------------------------------------

GOLDEN = """\
Tab 0 (current): Directions - Atlas of Port Ellery
URL: http://map.test/directions

[1] RootWebArea 'Directions - Atlas of Port Ellery' focused: True
	[2] link 'Atlas of Port Ellery'
	[3] link 'Directions'
	[4] link 'Categories'
	[5] link 'Saved places'
	[6] searchbox 'Find a place'
	[7] button 'Search'
	[8] heading 'Directions'
	[9] textbox 'From' required: False
	[10] textbox 'To' required: False
	[11] combobox 'By' value: foot hasPopup: menu expanded: False
		[12] option 'foot' selected: True
		[13] option 'bicycle' selected: False
		[14] option 'car' selected: False
	[15] button 'Go'"""


def test_observation_has_webarenas_format(env: WebArena) -> None:
    first = env.reset(item_of("How far is it from"))
    objective = "How far is it from Maritime Museum to Blue Heron Cafe on foot, in metres?"
    assert first.startswith(f"Objective: {objective}\n\nTab 0 (current): Map - Atlas of Port Ellery")
    assert valid(env, "click [3]") == GOLDEN


def test_same_item_has_same_observation_and_state_key(env: WebArena) -> None:
    item = item_of("into my basket")
    first, key = env.reset(item), env.state_key()
    second_env = WebArena()
    assert (second_env.reset(item), second_env.state_key()) == (first, key)
    second_env.close()
    valid(env, "goto [http://shop.test/product/1]")
    before = env.state_key()
    observation = valid(env, f"click {id_of(valid(env, 'scroll [down]'), 'Write a review')}")
    valid(env, "go_back")
    assert "Your review of" in observation
    assert env.state_key() != key
    valid(env, f"click {id_of(valid(env, 'goto [http://shop.test/product/1]'), 'Add to basket')}")
    assert env.state_key() != before
    assert env.reset(item) == first
    assert env.state_key() == key  # the basket is empty again


def test_episodes_are_isolated(env: WebArena) -> None:
    item = item_of("into my basket")
    second_env = WebArena()
    env.reset(item)
    second_env.reset(item)
    page = valid(env, "goto [http://shop.test/product/1]")
    valid(env, f"click {id_of(page, 'Add to basket')}")
    assert "Brightwater Chef Knife 20 cm" in valid(env, "goto [http://shop.test/basket]")
    assert "Your basket is empty." in valid(second_env, "goto [http://shop.test/basket]")
    second_env.close()
    assert "Brightwater Chef Knife 20 cm" in valid(env, "goto [http://shop.test/basket]")


def test_scrolling_keeps_ids_and_hides_elements_out_of_view(env: WebArena) -> None:
    env.reset(item_of("Open the oldest post"))
    top = valid(env, "goto [http://forum.test/]")
    assert top.endswith("(the page goes on below: scroll [down])")
    bottom = valid(env, "scroll [down]")
    assert "(the page goes on above: scroll [up])" in bottom
    assert "heading 'All posts'" in top
    assert "heading 'All posts'" not in bottom
    overlap = set(top.splitlines()[3:]) & set(bottom.splitlines()[3:])
    assert any("link" in line for line in overlap)  # with the same ids
    assert "There is no element [11] in view" in refused(env, "click [11]")
    assert "does not go on below" in refused(env, "scroll [down]")


# --- actions ---------------------------------------------------------------------------------------------------------


def test_tabs_and_history(env: WebArena) -> None:
    env.reset(item_of("to my wish list"))
    assert "only tab" in refused(env, "close_tab")
    assert "no earlier page" in refused(env, "go_back")
    assert "go_back" not in env.actions()
    opened = valid(env, "new_tab")
    assert opened.startswith("Tab 0: Home goods - Harbour & Hearth | Tab 1 (current): \nURL: about:blank")
    assert "Tab 1 (current): All posts - Commonboard" in valid(env, "goto [forum.test]")
    assert "URL: http://forum.test/communities" in valid(env, "goto [http://forum.test/communities]")
    assert "go_back" in env.actions()
    assert "URL: http://forum.test/\n" in valid(env, "go_back")
    assert "URL: http://forum.test/communities" in valid(env, "go_forward")
    assert "no later page" in refused(env, "go_forward")
    assert valid(env, "tab_focus [0]").startswith("Tab 0 (current): Home goods")
    assert "There is no tab 5" in refused(env, "tab_focus [5]")
    assert "Tab 1" not in valid(env, "close_tab")
    for _ in range(7):
        valid(env, "new_tab")
    assert "close one first" in refused(env, "new_tab")


def test_type_select_press_and_hover(env: WebArena) -> None:
    env.reset(item_of("Show me the way from"))
    page = valid(env, "goto [http://map.test/directions]")
    start, end = id_of(page, "textbox 'From'"), id_of(page, "textbox 'To'")
    valid(env, f"type {start} [wrong] [0]")
    valid(env, f"type {start} [Tide Cinema] [0]")  # replaces
    assert "focused: True" in valid(env, f"hover {end}")
    assert "Tide Cinemax" in valid(env, "press [x]")
    assert "Tide Cinema'" in valid(env, "press [Backspace]")
    valid(env, f"click {id_of(page, chr(39) + 'car')}")
    assert "Tide Cinema to Northern Bank by car" in valid(env, f"type {end} [Northern Bank]")
    page = valid(env, "goto [http://map.test/]")
    assert "nothing can be typed" in refused(env, f"type {id_of(page, 'Saved places')} [x]")


def test_default_port_may_be_given(env: WebArena) -> None:
    env.reset(item_of("to my wish list"))
    assert "URL: http://shop.test/account" in valid(env, "goto [http://shop.test:80/account]")
    assert "URL: http://forum.test/" in valid(env, "goto [FORUM.test:80]")
    assert "outside the sites" in refused(env, "goto [http://shop.test:81/account]")


def test_other_addresses_are_not_opened(env: WebArena) -> None:
    env.reset(item_of("to my wish list"))
    for url in (
        *("http://example.com/", "https://shop.test/", "javascript:alert(1)", "file:///etc/passwd", "data:text/html,x"),
        *("chrome://settings", "http://shop.test@evil.example/", "http://127.0.0.1/", "view-source:http://shop.test/"),
    ):
        message = refused(env, f"goto [{url}]")
        assert "outside the sites" in message, url
        assert "URL:" not in message, url


def test_submitted_markup_is_shown_as_text(env: WebArena) -> None:
    env.reset(item_of("Post in gardening"))
    page = valid(env, "goto [http://forum.test/submit]")
    attack = "<script>document.title='owned'</script>'); DROP TABLE post;--"
    page = valid(env, f"type {id_of(page, 'Title')} [{attack}] [1]")
    assert "Tab 0 (current): <script>" in page  # as text of the title
    assert "owned" not in page.splitlines()[0].replace(attack, "")
    assert "All posts" in valid(env, "goto [http://forum.test/]")
    assert "Page not found" in valid(env, "goto [http://shop.test/product/999999999999999999999999]")


def test_suggested_actions_are_valid(env: WebArena) -> None:
    env.reset(item_of("Set my status to"))
    assert "type [8] [On holiday until Monday] [1]" in env.actions()
    for action in env.actions()[:3]:
        valid(env, action)


# --- failures --------------------------------------------------------------------------------------------------------


def chromium_pid() -> int:
    """Return the process id of the browser for the embedded sites. Its flags contain the server's port."""
    server_address = f"127.0.0.1:{site_server().port}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if server_address in command and b"--type=" not in command and b"chrom" in command:
            return int(folder.name)
    raise AssertionError("the browser is not running")


def test_crashed_browser_raises_an_error_and_is_replaced(env: WebArena) -> None:
    env.reset(0)
    os.kill(chromium_pid(), signal.SIGKILL)
    wait_until(lambda: num_contexts() == 0)
    with pytest.raises(EnvError, match="browser"):
        env.step("click [2]")
    env.close()
    assert solve(env, 0)[0].info["success"]
    env.close()
    wait_until(lambda: num_contexts() == 0)


def test_closed_episode_leaves_no_context_and_no_data(env: WebArena) -> None:
    for _ in range(3):
        env.reset(0)
    wait_until(lambda: num_contexts() == 1)
    assert len(site_server().episodes) == 1
    env.close()
    env.close()
    wait_until(lambda: num_contexts() == 0)
    assert len(site_server().episodes) == 0


# --- published tasks on another site ---------------------------------------------------------------------------------

PAGES = {
    "/": '<title>Front</title><h1>Front</h1><a href="/two" target="_blank">New window</a> <a href="/slow">Slow</a> '
    '<a href="http://127.0.0.1:1/x">Away</a> <button onclick="alert(1);document.title=7">Ask</button>'
    '<p id="colour">Deep Blue</p>',
    "/two": '<title>Two</title><h1>Second page</h1><table><tr><td data-label="Account">Ko <span>@koush</span></td>'
    '<td class="col-max-role">Developer</td></tr></table>',
}


visited: list[str] = []
release_slow_page = threading.Event()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        visited.append(self.path)
        if self.path == "/slow":
            release_slow_page.wait(120)
        time.sleep(0.5 if self.path == "/unhurried" else 0.0)
        content = PAGES.get(self.path, "<title>None</title>").encode()
        with contextlib.suppress(ConnectionError):  # the client of the slow page has disconnected
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve a test site as SHOPPING, with a task list in the published format."""
    release_slow_page.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    colour = "document.querySelector('#colour').outerText"
    programs = [
        [{"url": "last", "locator": colour, "required_contents": {"exact_match": "deep blue"}}],
        [{"url": "__SHOPPING__/two", "locator": "", "required_contents": {"must_include": ["first |OR| second page"]}}],
        [{"url": "__SHOPPING__/two", "locator": colour, "required_contents": {"must_include": ["blue"]}}],
        [{
            "url": "__SHOPPING__/two",
            "locator": "func:gitlab_get_project_memeber_role(__page__, 'koush')",
            "required_contents": {"must_include": ["Developer"]},
        }],
        [{
            "url": "last",
            "prep_actions": ["document.querySelector('#colour').innerText = 'red'"],
            "locator": colour,
            "required_contents": {"exact_match": "red"},
        }],
        [],
        [{"url": "__SHOPPING__/unhurried", "locator": "", "required_contents": {"must_include": ["None"]}}] * 16,
        [
            {"url": "__SHOPPING__/two", "locator": "", "required_contents": {"must_include": ["none such"]}},
            {"url": "__SHOPPING__/later", "locator": "", "required_contents": {"must_include": ["None"]}},
        ],
    ]  # fmt: skip
    judged = {"eval_types": ["string_match"], "reference_answers": {"fuzzy_match": ["x"]}, "program_html": []}
    tasks = [
        {
            "task_id": number,
            "sites": ["shopping"],
            "intent": "Look",
            "start_url": "__SHOPPING__/ |AND| __SHOPPING__/two",
            "storage_state": None,
            "eval": judged
            if number == 5
            else {"eval_types": ["program_html"], "program_html": programs[min(number, 7)], "reference_answers": None},
        }
        for number in range(812)
    ]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    monkeypatch.setenv("WEBARENA_TASKS", str(tmp_path / "tasks.json"))
    monkeypatch.setenv("SHOPPING", url)
    yield url
    release_slow_page.set()
    server.shutdown()
    server.server_close()


@pytest.mark.long
def test_program_html_on_a_published_site(env: WebArena, site: str) -> None:
    for number, success in enumerate((True, True, False, True, True)):
        first = env.reset(1000 + number)
        assert "Tab 0 (current): Front | Tab 1: Two" in first
        step = env.step("stop [done]")
        assert step.info["success"] is success, number


@pytest.mark.long
def test_each_checked_page_has_its_own_deadline(env: WebArena, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env.reset(1006)
    with monkeypatch.context() as patch:
        patch.setattr(env_module, "CALL_TIMEOUT_S", 7.0)  # less than 16 pages of half a second take together
        started = time.monotonic()
        assert env.step("stop [done]").info["success"]
        assert time.monotonic() - started > 7.0
    env.reset(1007)
    visited.clear()
    assert not env.step("stop [done]").info["success"]
    assert "/two" in visited
    assert "/later" not in visited  # pages after the first failure are not checked


def test_task_with_a_judge_does_not_start_without_one(
    env: WebArena, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEBARENA_JUDGE_URL", raising=False)
    with pytest.raises(ConfigError, match="WEBARENA_JUDGE_URL"):
        env.reset(1005)
    wait_until(lambda: num_contexts() == 0)


def test_windows_dialogs_other_sites_and_slow_pages(env: WebArena, site: str) -> None:
    page = env.reset(1000)
    with pytest.raises(EnvError, match="without solutions"):
        env.oracle()
    opened = valid(env, f"click {id_of(page, 'New window')}")
    assert "Tab 2 (current): Two" in opened
    page = valid(env, "tab_focus [0]")
    assert 'The page asked "1"; this was accepted.' in valid(env, f"click {id_of(page, 'Ask')}")
    page = valid(env, f"click {id_of(page, 'Away')}")
    assert "outside the sites of this task; you were taken back" in page
    assert f"URL: {site}/" in page
    env._require_open()._load_timeout_s = 3.0  # for the slow page, not for those before it
    started = time.monotonic()
    page = valid(env, f"click {id_of(page, 'Slow')}")
    assert "still loading after 3 s and was stopped" in page
    assert "could not be opened" in refused(env, f"goto [{site}/slow]")
    assert time.monotonic() - started < 60  # the page itself takes 120 s
    env.close()
    wait_until(lambda: num_contexts() == 0)
