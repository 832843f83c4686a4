"""`agentgym-rl view --export`: the content of the pages in one file, to share with others."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Any

from agentgym_rl.viewer.bundle import page
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.queries import Filter
from agentgym_rl.viewer.redaction import redact, without_paths
from agentgym_rl.viewer.replays import Frame, Picture, Replays, replies_and_observations
from agentgym_rl.viewer.server import static_files

MAX_PICTURES_BYTES = 48 << 20
"""Total size of pictures before compression. A browser decompresses all of them."""
PAGE_SIZE = 500


async def exported_page(
    library: Library,
    *,
    episodes: int,
    pictures: bool,
    on_progress: Callable[[str, int, int], None] = lambda description, done, total: None,
) -> tuple[bytes, str]:
    """Return (the file, a summary of it). It has at most `episodes` of each run, spread over its steps."""
    library.indexer.update()
    folders = library.run_folders()
    data: dict[str, Any] = {"runs": {}, "metrics": {}, "evals": {}, "rows": {}, "episodes": {}, "frames": {}}
    store = _PictureStore()
    num_episodes = 0
    for run, folder in folders.items():
        rows = _select(_all_rows(library, run), episodes)
        data["runs"][run] = library.details(run)
        data["metrics"][run] = library.runs.metrics(folder)
        if folder.kind == "eval":
            data["evals"][run] = library.runs.evaluation(folder)
        data["rows"][run] = [{name: value for name, value in row.items() if name != "file"} for row in rows]
        keys = {row["key"] for row in rows}
        data["episodes"][run] = {row["key"]: _restrict(library.episode(run, row["key"]), keys) for row in rows}
        data["frames"][run] = {}
        num_episodes += len(rows)
        for number, row in enumerate(rows if pictures else []):
            on_progress(f"pictures of {run}", number, len(rows))
            data["frames"][run][row["key"]] = await _frames(library, run, row["key"], store)
    data["pictures"] = store.pictures
    date = time.strftime("%Y-%m-%d %H:%M")
    data["overview"] = library.overview() | {"exported": f"Exported on {date}: {_summary(data, episodes)}"}
    data["overview"]["roots"] = [root.name or str(root) for root in library.roots]
    for row in [*data["overview"]["runs"], *data["runs"].values()]:
        row["path"] = ""
    # Paths and hosts of this computer are removed. The texts of episodes remain unchanged.
    data |= {part: redact(data[part]) for part in ("overview", "runs", "evals")}
    names = list(folders)
    title = f"{names[0]} · AgentGym-RL" if len(names) == 1 else "AgentGym-RL"
    summary = f"{num_episodes} episodes of {len(names)} runs, {len(store.pictures)} pictures"
    return page(static_files(), data, title), summary


class _PictureStore:
    """Pictures of the export. Equal pictures are stored once."""

    def __init__(self) -> None:
        self.pictures: list[dict[str, Any]] = []
        self._numbers: dict[Picture, int] = {}
        self._bytes = 0

    def add(self, frame: Frame) -> int | str:
        if isinstance(frame, str):
            return without_paths(frame)
        if frame not in self._numbers:
            if self._bytes + len(frame.data) > MAX_PICTURES_BYTES:
                return "left out: the export would be too large"
            self._bytes += len(frame.data)
            self._numbers[frame] = len(self.pictures)
            binary = frame.media_type == "image/png"
            text = base64.b64encode(frame.data).decode() if binary else frame.data.decode("utf-8", errors="replace")
            self.pictures.append({"type": frame.media_type, "binary": binary, "data": text})
        return self._numbers[frame]


async def _frames(library: Library, run: str, key: str, store: _PictureStore) -> list[int | str]:
    episode = library.raw_episode(run, key)
    replays = Replays(library.environments)
    folder = library.run_folder(run)
    style = library.runs.style_of(folder, str(episode["env"]))
    turns = len(replies_and_observations(episode)[0]) + 1
    frames = [store.add(await replays.frame(episode, style, turn, folder.path)) for turn in range(turns)]
    await replays.close()
    return frames


def _all_rows(library: Library, run: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while True:
        answer = library.episodes(run, Filter(), "oldest", len(rows), PAGE_SIZE)
        rows += answer["rows"]
        if len(rows) >= answer["total"] or not answer["rows"]:
            return rows


def _select(rows: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Return at most `limit` rows: whole groups, evenly over the run, without the warm start if there is more. If no
    group is small enough, it is the beginning of the first."""
    if len(rows) <= limit:
        return rows
    teams: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in [row for row in rows if row["kind"] != "warmstart"] or rows:
        teams.setdefault((row["file"], row["team"]), []).append(row)
    groups = list(teams.values())
    selected: list[dict[str, Any]] = []
    # In bit-reversed order any number of first groups is spread over the whole run.
    for position in sorted(range(len(groups)), key=lambda n: int(f"{n:032b}"[::-1], 2)):
        if len(selected) + len(groups[position]) <= limit:
            selected += groups[position]
    selected = selected or groups[0][:limit]
    keys = {row["key"] for row in selected}
    return [row for row in rows if row["key"] in keys]


def _restrict(episode: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    """Remove links to episodes that are not in the file, and paths from the error."""
    episode["error"] = without_paths(str(episode["error"])) if episode["error"] else None
    episode["group"] = [member for member in episode["group"] if member["key"] in keys]
    episode["neighbours"] = {n: key if key in keys else None for n, key in episode["neighbours"].items()}
    return episode


def _summary(data: dict[str, Any], limit: int) -> str:
    total = sum(row["episodes"] for row in data["runs"].values())
    shown = sum(len(rows) for rows in data["rows"].values())
    if shown == total:
        return f"all {total} episodes."
    return f"{shown} of {total} episodes (at most {limit} per run), all curves."
