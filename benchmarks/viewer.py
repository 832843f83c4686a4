"""Measure how fast the viewer opens a run of many episodes in a real browser, without and with a finished index.

    python benchmarks/viewer.py --episodes 100000

Writes synthetic episodes of a realistic size to a temporary folder, starts `agentgym-rl view` and opens the list of
episodes in headless Chromium. Prints the time until the first rows are readable (with and without the start of the
process), the time until the index is complete, and the time between frames while scrolling through the whole list.
Each line has the load average: above the number of cores, the machine was doing other work too.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from agentgym_rl.environment.envs.webarena.browser import find_chromium
from agentgym_rl.types import Message, StopReason, Task, Trajectory

SCROLL = """async () => {
  const list = document.querySelector(".list");
  const gaps = [];
  let before = performance.now();
  const steps = 120;
  for (let i = 0; i <= steps; i++) {
    list.scrollTop = (list.scrollHeight - list.clientHeight) * i / steps;
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    gaps.push(now - before);
    before = now;
  }
  return gaps.sort((a, b) => a - b);
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=40, help="sampled tokens per reply")
    parser.add_argument("--repeat", type=int, default=4, help="number of times to open it with a finished index")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="viewer-bench-") as folder:
        size = write_run(Path(folder) / "runs" / "large", arguments.episodes, arguments.turns, arguments.tokens)
        print(f"{arguments.episodes:,} episodes, {size / 1e6:,.0f} MB, {size / arguments.episodes / 1e3:.1f} kB each")
        print(f"{os.cpu_count()} cores")
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--disable-gpu"])
            for name in ("cold", *["warm"] * arguments.repeat):
                load = os.getloadavg()[0]
                page = browser.new_page()
                for label, value in measure(page, Path(folder) / "runs", arguments.episodes).items():
                    print(f"{name:5} load {load:4.1f}  {label:48} {value}", flush=True)
                page.close()
            browser.close()


def measure(page: Page, runs: Path, episodes: int) -> dict[str, str]:
    command = [sys.executable, "-c", "from agentgym_rl.cli import main; main()", "view", str(runs), "--port", "0"]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        link = process.stdout.readline().strip()
        listening = time.monotonic()
        page.goto(f"{link}#/episodes/large")
        page.wait_for_selector(".row .task", timeout=120_000)
        readable = time.monotonic()
        total = f"{episodes:,} episodes"
        page.wait_for_function("t => document.querySelector('.total')?.textContent === t", arg=total, timeout=600_000)
        complete = time.monotonic()
        gaps: list[float] = page.evaluate(SCROLL)
        median, high = (f"{gaps[min(len(gaps) - 1, int(share * len(gaps)))]:.0f} ms" for share in (0.5, 0.95))
        return {
            "rows readable, from starting the process": f"{readable - started:.2f} s",
            "rows readable, from opening the page": f"{readable - listening:.2f} s",
            "all episodes in the list, from opening the page": f"{complete - listening:.2f} s",
            "scrolling, time between frames, median and 95%": f"{median}, {high}",
            "CPU time of the viewer so far": f"{_cpu_seconds(process.pid):.2f} s",
        }
    finally:
        process.terminate()
        process.wait(20)


def _cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process, from /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_run(root: Path, episodes: int, turns: int, tokens: int) -> int:
    """Write synthetic episodes, 500 per step and file, and return their size in bytes."""
    (root / "trajectories").mkdir(parents=True)
    (root / "config.toml").write_text('name = "large"\n[[environments]]\nname = "maze"\n')
    (root / "metrics.jsonl").write_text("".join(f'{{"step":{s},"time":{s},"success/mean":0.5}}\n' for s in range(1, 9)))
    rng = random.Random(0)
    templates = [_episode(rng, turns, tokens) for _ in range(64)]
    size = written = step = 0
    while written < episodes:
        step += 1
        lines = []
        for index in range(min(500, episodes - written)):
            row = rng.choice(templates)
            row["id"] = f"train-{step}-{index // 8}-{index % 8}-0"
            row["item"] = rng.randrange(5000)
            lines.append(_line(step, row))
        data = "".join(lines).encode()
        (root / "trajectories" / f"step_{step:06d}.jsonl").write_bytes(data)
        size += len(data)
        written += len(lines)
    return size


def _episode(rng: random.Random, turns: int, tokens: int) -> dict[str, Any]:
    played = rng.randrange(1, 2 * turns)
    words = ["You", "see", "a", "red", "door,", "grey", "key", "2", "steps", "to", "your", "left", "and", "wall."]
    messages = []
    for _ in range(played):
        observation = " ".join(rng.choices(words, k=60))
        messages.append(Message("user", observation, rng.choices(range(32_000), k=80)))
        reply = " ".join(rng.choices(words, k=tokens))
        logprobs = [-rng.expovariate(2.0) for _ in range(tokens)]
        messages.append(Message("assistant", reply, rng.choices(range(32_000), k=tokens), logprobs, 1))
    success = rng.random() < 0.5
    infos: list[dict[str, Any]] = [{"valid": True} for _ in range(played)]
    infos[-1]["success"] = success
    stop = StopReason.DONE if success else rng.choice([StopReason.MAX_TURNS, StopReason.DONE])
    rewards = [0.0] * (played - 1) + [float(success)]
    return {"messages": messages, "rewards": rewards, "infos": infos, "stop": stop, "horizon": 2 * turns, "_": {}}


def _line(step: int, row: dict[str, Any]) -> str:
    # Copies of a template differ only in the head, so the tail is serialized once.
    if "tail" not in row["_"]:
        task = Task("maze", 0)
        fields = (row["messages"], row["rewards"], row["infos"], row["stop"])
        trajectory = Trajectory("", task, *fields, horizon=row["horizon"])
        row["_"]["tail"] = trajectory.to_json().partition(', "messages"')[2]
    head = f'{{"step": {step}, "kind": "train", "id": "{row["id"]}", "env": "maze", "item": {row["item"]}, "messages"'
    return f"{head}{row['_']['tail']}\n"


if __name__ == "__main__":
    main()
