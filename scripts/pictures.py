"""Draw the pictures of docs/images anew, all or some.

    python scripts/pictures.py [--only studies load environments curve viewer] [--work FOLDER] [--out docs/images]

studies       the figures of docs/results/evidence.md, trees.md and long-context.md, from the records under results/
load          sessions against throughput, from results/benchmarks/load.json
environments  the states that the pages of environments show, in SVG
curve         the learning curve of the quickstart
viewer        screenshots of the viewer, in Chromium

`curve` and `viewer` first train the quickstart with two seeds and evaluate it under --work (build/pictures). That takes
about half an hour on two cores; runs that are finished there are used again. Pictures of runs on a GPU
(results-smollm2-*.png, algorithms.png) are drawn by scripts/results.py and benchmarks/algorithms.py from those runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ORACLE = None
ENVIRONMENTS: dict[str, tuple[int, list[str | None]]] = {
    "agentdojo": (32, [ORACLE] * 3),
    "bfcl": (640, [ORACLE] * 5),
    "alfworld": (3001, [ORACLE] * 4),
    "debate": (1450, [ORACLE] * 3),
    "keydoor": (2, [ORACLE] * 3),
    "keydoor_duo": (2, [ORACLE] * 6),
    "maze": (4, [ORACLE] * 9),
    "nim": (3, [ORACLE] * 2),
    "sqlgym": (4016, [ORACLE]),
    "textcraft": (312, [ORACLE] * 9),
    "webshop": (2003, [ORACLE] * 3),
    "wordle": (204, ["about", "heart", "grade", "crazy"]),
}
"""(item, actions before the picture) of each environment that draws SVG without a browser or Java."""
PATIENCE_MS = 600_000
"""Maximum wait for a page on a busy machine."""
RUNS = {"quickstart": "seed=0", "quickstart-seed-1": "seed=1"}
BABYAI = ["--env", "babyai", "--subset", "GoToRedBall", "--limit", "50", "--turns", "1,2,4,8"]
EVALUATIONS = {
    "quickstart-babyai": ["--agent", "runs/quickstart", *BABYAI],
    "random-babyai": ["--agent", "random", *BABYAI],
    "oracle-textcraft": ["--agent", "oracle", "--env", "textcraft", "--items", "531"],
}


def studies(out: Path, work: Path) -> None:
    call("results/plot.py", "--out", str(out.resolve()))
    sys.path.insert(0, str(ROOT / "results"))
    import long_context
    import trees
    from records import read_records

    trees.draw(read_records(ROOT / "results", "trees"), out / "trees.png")
    long_context.draw(read_records(ROOT / "results", "long-context"), out / "long-context.png")


def load(out: Path, work: Path) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from load import Point, draw

    found = json.loads((ROOT / "results" / "benchmarks" / "load.json").read_text(encoding="utf-8"))
    draw([Point(**point) for point in found["curve"]], out / "load.png")


def environments(out: Path, work: Path) -> None:
    from agentgym_rl.environment import catalog

    for name, (item, actions) in ENVIRONMENTS.items():
        env: Any = catalog.load(name)()
        env.reset(item)
        for action in actions:
            env.step(env.oracle() if action is ORACLE else action)
        (out / f"{name}.svg").write_text(env.render(), encoding="utf-8")
        env.close()


def curve(out: Path, work: Path) -> None:
    train(work)
    shutil.copyfile(work / "runs" / "quickstart" / "curve.png", out / "quickstart.png")


def viewer(out: Path, work: Path) -> None:
    """Photograph every page of the viewer that the guide shows."""
    train(work)
    evaluate(work)
    from playwright.sync_api import sync_playwright

    from agentgym_rl.environment.envs.webarena.browser import find_chromium

    with serve(work) as url, sync_playwright() as playwright:
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        wait_for_index(url)
        browser = playwright.chromium.launch(executable_path=find_chromium(), chromium_sandbox=not root)
        for name, (address, settings) in pages(work / "runs" / "quickstart").items():
            page = browser.new_page(**{"viewport": {"width": 1280, "height": 860}, **settings})
            page.set_default_timeout(PATIENCE_MS)
            page.goto(f"{url}#/{address}")
            page.locator("main:not(.loading) > .page").wait_for()
            if name == "compare":
                page.locator("main").get_by_role("link", name="Compare").click()
                page.locator(".pair.heads").wait_for()
            page.wait_for_selector(".picture.waiting", state="detached")  # a replay on the server draws them
            page.wait_for_timeout(1500)
            page.screenshot(path=out / f"viewer-{name}.png")
            page.close()
        browser.close()


def wait_for_index(url: str) -> None:
    """Wait until the viewer has read all trajectories."""
    end = time.monotonic() + PATIENCE_MS / 1000
    while time.monotonic() < end:
        with urllib.request.urlopen(f"{url}api/changes") as answer:
            if not json.load(answer)["index"]["unread"]:
                return
        time.sleep(1)
    raise TimeoutError(f"the viewer has not read all trajectories after {PATIENCE_MS / 1000:g} s")


def pages(run: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the address of each screenshot, and what differs in its browser."""
    files = sorted((run / "trajectories").glob("eval_*.jsonl"))
    rows = read(files[-1])
    # The longest of the held-out successes.
    shown = max(range(len(rows)), key=lambda number: (rows[number]["stop"] == "done", len(rows[number]["rewards"])))
    turn = min(3, len(rows[shown]["rewards"]) - 1)
    step = max((run / "trajectories").glob("step_*.jsonl")).stem
    replay, dark = f"episode/quickstart/{files[-1].stem}.{shown}?turn={turn}", {"color_scheme": "dark"}
    before = next(number for number, row in enumerate(read(files[0])) if row["item"] == rows[shown]["item"])
    return {
        "runs": ("runs", {}),
        "run": ("run/quickstart", dark),
        "episodes": ("episodes/quickstart", {}),
        "replay": (replay, {}),
        "replay-textcraft": ("episode/oracle-textcraft/textcraft.0?turn=4", {}),
        "phone": (replay, {"viewport": {"width": 390, "height": 780}}),
        "tokens": (f"episode/quickstart/{step}.0?view=tokens&colour=entropy", {}),
        "group": (f"group/quickstart/{step}.0", {}),
        "compare": (f"episode/quickstart/{files[0].stem}.{before}", {}),
        "compare-runs": (f"compare?left={'&right='.join(RUNS)}", {}),
        "play": ("play?env=babyai&item=4149", dark),
        "evals": ("evals", {}),
    }


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train(work: Path) -> None:
    for name, seed in RUNS.items():
        if not (work / "runs" / name / "summary.json").is_file():
            command("train", "quickstart", f"run_dir=runs/{name}", f"name={name}", seed, "--resume", cwd=work)


def evaluate(work: Path) -> None:
    for name, options in EVALUATIONS.items():
        if not (work / "evals" / name / "report.md").is_file():
            command("eval", *options, "--out", f"evals/{name}", cwd=work)


@contextlib.contextmanager
def serve(work: Path) -> Iterator[str]:
    """Run the viewer on a free port and yield its address."""
    started = subprocess.Popen(
        [sys.executable, "-m", "agentgym_rl", "view", "runs", "evals", "--port", "0"],
        cwd=work,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout
    try:
        line = next(line for line in started.stdout if "http://" in line)
        yield "http://" + line.split("http://")[1].split()[0].split("#")[0]
    finally:
        started.terminate()
        started.wait()


def command(*arguments: str, cwd: Path) -> None:
    cwd.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "agentgym_rl", *arguments], cwd=cwd, check=True)


def call(script: str, *arguments: str) -> None:
    subprocess.run([sys.executable, script, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


PARTS = {"studies": studies, "load": load, "environments": environments, "curve": curve, "viewer": viewer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "pictures")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        print(f"drawing {name}", flush=True)
        PARTS[name](options.out, options.work)


if __name__ == "__main__":
    main()
