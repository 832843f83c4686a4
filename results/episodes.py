"""Episodes of evaluations, kept small beside the records, and pages of them for the viewer.

    python results/episodes.py page --out episodes.html qwen-textcraft/eval-qwen-base-textcraft ...

A record `<job>.json` of an evaluation has two neighbours. `<job>.actions.jsonl.xz` holds every episode with its
actions, states, validity and rewards. `<job>.episodes.jsonl.xz` holds whole episodes, without token ids, of the first
sample of up to KEPT_ITEMS items.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from behaviour import Row, action_of, read_rows

KEPT_ITEMS = 40
"""Items whose first sample is kept with its texts."""
COMPRESSION = 9 | lzma.PRESET_EXTREME


def without_tokens(row: Row) -> Row:
    """Return the line of an episode without token ids and log-probabilities. `Trajectory.from_json` can read it."""
    messages = [m | {"token_ids": [], "logprobs": None, "version": None} for m in row["messages"]]
    return row | {"messages": messages, "seconds": round(row["seconds"], 2)}


def actions_only(row: Row, states: dict[str, int]) -> dict[str, Any]:
    """Return item, sample, actions, numbered states, refused turns, rewards and ending of an episode."""
    replies = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
    numbers = [states.setdefault(str(info.get("state_key", "")), len(states)) for info in row["infos"]]
    return {
        "item": f"{row['env']}/{row['item']}",
        "sample": row.get("sample", 0),
        "actions": [action_of(reply) for reply in replies],
        "states": numbers,
        "refused": [turn for turn, info in enumerate(row["infos"]) if not info.get("valid", True)],
        "rewards": row["rewards"],
        "stop": row["stop"],
    }


def evenly(rows: Sequence[Row], count: int) -> list[Row]:
    return list(rows) if len(rows) <= count else [rows[i * len(rows) // count] for i in range(count)]


def keep_episodes(folder: Path, record: Path) -> None:
    """Write the two files beside `record` from the folder of an evaluation."""
    rows = [row for path in sorted((folder / "trajectories").glob("*.jsonl")) for row in read_rows(path)]
    rows.sort(key=lambda row: (row["env"], row["item"], row["sample"]))
    states: dict[str, int] = {}
    _write(record.with_suffix(".actions.jsonl.xz"), (actions_only(row, states) for row in rows))
    whole = evenly([row for row in rows if row["sample"] == 0], KEPT_ITEMS)
    _write(record.with_suffix(".episodes.jsonl.xz"), map(without_tokens, whole))


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
    path.write_bytes(lzma.compress(text.encode(), preset=COMPRESSION))


def restore_folder(record: Path, folder: Path, count: int) -> None:
    """Write an evaluation folder for the viewer with up to `count` of the record's whole episodes."""
    kept = json.loads(record.read_text())
    (folder / "trajectories").mkdir(parents=True)
    rows = evenly(list(read_rows(record.with_suffix(".episodes.jsonl.xz"))), count)
    for env in sorted({row["env"] for row in rows}):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows if row["env"] == env]
        (folder / "trajectories" / f"{env}.jsonl").write_text("".join(lines))
    config = kept["config"] | {"agent": kept["config"]["agent"] | {"path": ""}}
    config["tasks"] = [
        task | {"items": sorted({r["item"] for r in rows if f"{task['scenario']}/{task['name']}" in r["columns"]})}
        for task in config["tasks"]
    ]
    evaluation = {"format": 1, "state": "done", "config": config, "settings": {}, "results": kept["results"]}
    evaluation |= {"started": 0.0, "updated": 0.0, "seconds": kept["seconds"], "pid": 0, "host": ""}
    (folder / "eval.json").write_text(json.dumps(evaluation))


def write_page(results: Path, jobs: Sequence[str], out: Path, count: int, pictures: bool) -> None:
    """Export `count` episodes of each evaluation, given as study/job, as one HTML file."""
    with tempfile.TemporaryDirectory() as work:
        folders = []
        for job in jobs:
            folders.append(Path(work) / Path(job).name)
            restore_folder(results / f"{job}.json", folders[-1], count)
        options = ["--export", str(out), "--episodes", str(count), "--pictures" if pictures else "--no-pictures"]
        command = [sys.executable, "-m", "agentgym_rl", "view", *map(str, folders), *options]
        subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["page"])
    parser.add_argument("jobs", nargs="+", metavar="study/job")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--pictures", action="store_true")
    options = parser.parse_args()
    write_page(options.results, options.jobs, options.out, options.episodes, options.pictures)


if __name__ == "__main__":
    main()
