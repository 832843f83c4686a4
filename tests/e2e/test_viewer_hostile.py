"""Files that try to run scripts in the reader's browser. None runs, neither from the server nor from an export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import pytest
from browser_for_tests import WAIT_MS, chromium, go
from envs_for_tests import Counting
from playwright.sync_api import Browser, Page, expect
from viewer_for_tests import run as run_in_thread
from viewer_for_tests import viewer_in_thread

from agentgym_rl.commands.view import ViewerEnvironments
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.run.log import RunLog
from agentgym_rl.types import EnvSession, Message, StopReason, Task, Trajectory
from agentgym_rl.viewer.index import Index
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.page_export import exported_page

MARK = "window.top.pwned=(window.top.pwned||[]).concat(document.URL)"
PAYLOADS = [
    f"<script>{MARK}</script>",
    f"</script><script>{MARK}</script>",
    f'"><img src=x onerror="{MARK}">',
    f"<svg onload='{MARK}'>",
    f"javascript:{MARK}",
    f"<a href='javascript:{MARK}'>press here</a>",
    f"${{{MARK}}} {{{{constructor.constructor('{MARK}')()}}}}",
    f"<iframe srcdoc='<script>{MARK}</script>'></iframe>",
    "<!--<script>\u2028\u0000\ud7ff\u202e",
    f"Thought: <style>@import 'x'</style><img src=x onerror={MARK}>\nAction: <script>{MARK}</script>",
]
HOSTILE = "\n".join(PAYLOADS)
NAME = '<img src=x onerror="window.top.pwned=1">'
SVG = f"""<svg xmlns="http://www.w3.org/2000/svg" width="60" height="60" onload="{MARK}"><script>{MARK}</script>
<foreignObject width="60" height="60"><iframe xmlns="http://www.w3.org/1999/xhtml" src="javascript:{MARK}"/>
</foreignObject>
<a href="javascript:{MARK}"><rect width="60" height="60" fill="red"/></a><image href="x" onerror="{MARK}"/></svg>"""
HTML = f"""<p>page</p><script>{MARK}</script><img src=x onerror="{MARK}"><form action="/x"></form>
<iframe srcdoc="<script>{MARK}</script>"></iframe><meta http-equiv="refresh" content="0;url=javascript:{MARK}">"""
EXECUTED = "window.pwned ?? null"


class Hostile(Counting):
    """An environment that draws scripts: SVG for even items, HTML for odd ones."""

    name: ClassVar[str] = "hostile"

    def reset(self, item: int) -> str:
        self._hostile_item = item
        super().reset(item)
        return HOSTILE

    def render(self) -> str:
        return HTML if self._hostile_item % 2 else SVG


class HostileEnvironments(ViewerEnvironments):
    """The hostile environment under any name."""

    async def open(self, env: str, *options: Any) -> EnvSession:
        return await LocalPool({"hostile": Hostile}).open("hostile")

    def describe(self) -> list[dict[str, Any]]:
        row = {"name": NAME, "summary": HOSTILE, "installed": True, "missing": ""}
        return [row | {"ranges": {"train": [0, 9]}, "subsets": PAYLOADS}]

    def subsets_of(self, env: str, item: int) -> tuple[str, ...]:
        return (PAYLOADS[item % len(PAYLOADS)],)


def hostile_episode(item: int) -> Trajectory:
    ids, logprobs = [0, 1, 2], [-1.0, -2.0, -3.0]
    messages = [Message("system", HOSTILE), Message("user", HOSTILE), Message("assistant", HOSTILE, ids, logprobs, 1)]
    info = {"valid": False, "success": False, "attempt": PAYLOADS[0], "env_reward": PAYLOADS[2]}
    stop, error = StopReason.ERROR, HOSTILE
    return Trajectory(f"{NAME}-{item}-0-0", Task(NAME, item), messages, [0.0], [info], stop, error, horizon=3)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    path = folder / "evil <img src=x onerror=pwned=1>"
    log = RunLog.create(path, {"name": HOSTILE, "environments": [{"name": NAME}], NAME: {PAYLOADS[2]: PAYLOADS[0]}})
    for item in range(4):
        log.write_trajectory(1, hostile_episode(item))
        log.write_trajectory(1, hostile_episode(item), "eval")
    log.log(1, {"success/mean": 0.5, NAME: 1.0, f"horizon/{NAME}": 2})
    log.set_status("failed", error=HOSTILE)
    summary = {"stages": [{"env": NAME, "turns": 2, "first_step": NAME, "last_step": NAME}]}
    rates = {"subsets": {PAYLOADS[1]: {"success": 1}}, "success": 0.5}
    (path / "summary.json").write_text(json.dumps(summary | {"before": rates, "after": rates}))
    (path / "doctor.jsonl").write_text(json.dumps({"step": NAME, "rule": NAME, "message": HOSTILE}) + "\n")
    model = path / "checkpoints" / "step_000001" / "model"
    model.mkdir(parents=True)
    vocabulary = {text: number for number, text in enumerate(PAYLOADS)}
    (model / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary}}))
    log.close()
    evaluation = folder / "evil eval"
    (evaluation / "trajectories").mkdir(parents=True)
    cell = {
        "success": {"value": 0.5, "low": 0.1, "high": 0.9},
        "items": NAME,
        "episodes": 1,
        "errors": NAME,
        "pass@2": {},
    }
    result = {"max_turns": 2, "tasks": {f"{NAME}/{NAME}": cell}, "scenarios": {NAME: cell}, "total": {"errors": NAME}}
    plan = {"scenario": NAME, "name": NAME, "env": NAME, "subset": PAYLOADS[2], "missing": HOSTILE}
    row = {"state": NAME, "config": {"agent": {"name": HOSTILE}, "tasks": [plan]}}
    results = [result, result | {"max_turns": 4}]
    (evaluation / "eval.json").write_text(json.dumps(row | {"results": results}))
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as instance:
        yield instance


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    context.set_default_timeout(WAIT_MS)
    tab = context.new_page()
    unexpected: list[str] = []
    tab.on("dialog", lambda dialog: unexpected.append(dialog.message))
    tab.on("request", lambda request: unexpected.append(request.url) if not _is_local(request.url) else None)
    yield tab
    assert unexpected == []
    context.close()


def _is_local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1", "blob:", "data:", "file:"))


def library_of(root: Path, cache: Path) -> Library:
    library = Library([root], HostileEnvironments(), Index(cache / "index.sqlite3"))
    library.indexer.update()
    return library


def addresses(library: Library) -> list[str]:
    run = quote(next(folder.id for folder in library.run_folders().values() if folder.kind == "run"), safe="")
    evil = quote("evil eval", safe="")
    pages = ["runs", "evals", f"run/{run}", f"episodes/{run}", f"groups/{run}", f"eval/{evil}"]
    for key in ("step_000001.0", "step_000001.1"):  # an SVG and an HTML picture
        pages += [f"episode/{run}/{key}{query}" for query in ("", "?turn=1", "?view=transcript", "?view=tokens")]
        pages += [f"group/{run}/{key}", f"compare?a={run}|{key}"]
    return [*pages, f"run/{quote(NAME)}", f"{quote(NAME)}", f"episodes/{run}?env={quote(NAME)}&stop={quote(HOSTILE)}"]


def visit_all(page: Page, base: str, pages: list[str]) -> None:
    for address in pages:
        go(page, f"{base}#/{address}")
        page.evaluate("document.querySelectorAll('details').forEach((element) => (element.open = true))")
        page.wait_for_timeout(60)  # for scripts that would run late
        assert page.evaluate(EXECUTED) is None, address
        assert page.locator("main script, main [onerror], main [onload]").count() == 0, address
        foreign = "[...document.querySelectorAll('a[href]')].filter(a => !a.getAttribute('href').startsWith('#'))"
        assert page.evaluate(f"{foreign}.length") == 0, address


LETTER_POSITIONS = """async name => {
  const { h } = await import("/static/dom.js");
  const { taskName } = await import("/static/format.js");
  const line = h("p", { dir: "ltr" }, name, " after ", h("b", {}, taskName({ env: name, item: 12345 })), " end");
  document.body.append(line);
  const left = (node, from, to) => {
    const range = document.createRange();
    range.setStart(node, from);
    range.setEnd(node, to);
    return range.getBoundingClientRect().left;
  };
  const task = line.querySelector("b").firstChild;
  const last = task.length;
  const after = line.childNodes[1];
  const letters = [[after, 1], [after, 5], [task, last - 5], [task, last - 1], [line.lastChild, 1]];
  return letters.map(([node, index]) => left(node, index, index + 1));
}"""


def test_no_script_of_a_hostile_run_is_executed(page: Page, root: Path, tmp_path: Path) -> None:
    library = library_of(root, tmp_path)
    with viewer_in_thread(library) as url:
        pages = addresses(library)
        visit_all(page, url, pages)
        # The payloads are shown as text.
        go(page, f"{url}#/{next(a for a in pages if 'transcript' in a)}")
        expect(page.locator(".block.observation pre").first).to_contain_text(PAYLOADS[0])
        go(page, f"{url}#/{next(a for a in pages if a.startswith('episode/') and a.endswith('.0'))}")
        picture = page.locator(".picture img")
        expect(picture).to_be_visible()
        assert picture.evaluate("e => e.naturalWidth") == 60
        go(page, f"{url}#/{next(a for a in pages if a.startswith('episode/') and a.endswith('.1'))}")
        frame = page.locator(".picture iframe")
        expect(frame).to_have_attribute("sandbox", "")
        expect(page.frame_locator(".picture iframe").locator("p")).to_have_text("page")
        page.wait_for_timeout(300)
        assert page.evaluate(EXECUTED) is None
        # A bidirectional override ends with the text that contains it, even if that text closes isolates first.
        for name in ("\u202eevil", "\u2069\u202eevil", "\u2067evil", "\u2069\u2069\u2067\u202eevil\u2069"):
            positions = page.evaluate(LETTER_POSITIONS, name)
            assert positions == sorted(positions), name
        go(page, f"{url}#/play")
        expect(page.locator(".story .now")).to_contain_text(PAYLOADS[0])
        page.locator(".action-button").first.click()
        expect(page.locator(".past")).to_have_count(1)
        assert page.evaluate(EXECUTED) is None
        # The raw picture runs no script either.
        run = next(folder.id for folder in library.run_folders().values() if folder.kind == "run")
        for key in ("step_000001.0", "step_000001.1"):
            page.goto(f"{url}api/frame?run={quote(run, safe='')}&key={key}&turn=0")
            page.wait_for_timeout(150)
            assert page.evaluate(EXECUTED) is None


@pytest.mark.long
def test_no_script_of_a_hostile_export_is_executed(page: Page, root: Path, tmp_path: Path) -> None:
    library = library_of(root, tmp_path)
    text, _ = run_in_thread(exported_page(library, episodes=100, pictures=True))
    (tmp_path / "out.html").write_bytes(text)
    assert text.count(b"</script>") == 2  # the data and the page's own
    base = (tmp_path / "out.html").as_uri()
    pages = addresses(library)
    visit_all(page, base, pages)
    go(page, f"{base}#/{next(a for a in pages if a.startswith('episode/') and a.endswith('.0'))}")
    expect(page.locator(".picture img")).to_be_visible()
    go(page, f"{base}#/{next(a for a in pages if a.startswith('episode/') and a.endswith('.1'))}")
    expect(page.locator(".picture iframe")).to_be_visible()
    expect(page.frame_locator(".picture iframe").locator("p")).to_have_text("page")
    page.wait_for_timeout(300)
    assert page.evaluate(EXECUTED) is None
    library.close()


def test_the_payloads_run_without_protection(browser: Browser) -> None:
    """Check that the tests above can fail."""
    page = browser.new_page()
    page.set_content(f"<body>{PAYLOADS[0]}{PAYLOADS[2]}{HTML}</body>")
    page.wait_for_function(EXECUTED, timeout=WAIT_MS)
    page.close()
