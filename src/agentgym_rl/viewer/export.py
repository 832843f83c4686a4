"""`agentgym-rl view --export`: what the pages show, written into one file to send to somebody."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Any

from agentgym_rl.viewer.bundle import page
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.queries import Filter
from agentgym_rl.viewer.redaction import for_strangers, without_paths
from agentgym_rl.viewer.replays import Frame, Picture, Replays, replies_and_observations
from agentgym_rl.viewer.server import static_files

MOST_PICTURES_BYTES = 48 << 20
"""Pictures compress well, but a browser unpacks them all."""
PAGE = 500


async def exported_page(
    library: Library,
    *,
    episodes: int,
    pictures: bool,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> tuple[bytes, str]:
    """(the file, what is in it). At most `episodes` of each run, spread over its steps."""
    library.indexer.round()
    places = library.places()
    data: dict[str, Any] = {"runs": {}, "metrics": {}, "evals": {}, "rows": {}, "episodes": {}, "frames": {}}
    store = _PictureStore()
    counted = 0
    for run, place in places.items():
        rows = _chosen(_all_rows(library, run), episodes)
        data["runs"][run] = library.details(run)
        data["metrics"][run] = library.runs.metrics(place)
        if place.kind == "eval":
            data["evals"][run] = library.runs.evaluation(place)
        data["rows"][run] = [{name: value for name, value in row.items() if name != "file"} for row in rows]
        kept = {row["key"] for row in rows}
        data["episodes"][run] = {row["key"]: _only(library.episode(run, row["key"]), kept) for row in rows}
        data["frames"][run] = {}
        counted += len(rows)
        for number, row in enumerate(rows if pictures else []):
            on_progress(f"pictures of {run}", number, len(rows))
            data["frames"][run][row["key"]] = await _frames(library, run, row["key"], store)
    data["pictures"] = store.pictures
    when = time.strftime("%Y-%m-%d %H:%M")
    data["overview"] = library.overview() | {"exported": f"Exported on {when}: {_told(library, data, episodes)}"}
    data["overview"]["roots"] = [root.name or str(root) for root in library.roots]
    for row in [*data["overview"]["runs"], *data["runs"].values()]:
        row["path"] = ""
    # Where things are on this computer is nobody else's business. What was said in episodes stays as it was.
    data |= {part: for_strangers(data[part]) for part in ("overview", "runs", "evals")}
    names = list(places)
    title = f"{names[0]} · AgentGym-RL" if len(names) == 1 else "AgentGym-RL"
    told = f"{counted} episodes of {len(names)} runs, {len(store.pictures)} pictures"
    return page(static_files(), data, title), told


class _PictureStore:
    """Equal pictures are kept once."""

    def __init__(self) -> None:
        self.pictures: list[dict[str, Any]] = []
        self._known: dict[Picture, int] = {}
        self._bytes = 0

    def add(self, frame: Frame) -> int | str:
        if isinstance(frame, str):
            return without_paths(frame)
        if frame not in self._known:
            if self._bytes + len(frame.data) > MOST_PICTURES_BYTES:
                return "left out of the export: it would have become too large"
            self._bytes += len(frame.data)
            self._known[frame] = len(self.pictures)
            binary = frame.media_type == "image/png"
            text = base64.b64encode(frame.data).decode() if binary else frame.data.decode("utf-8", errors="replace")
            self.pictures.append({"type": frame.media_type, "binary": binary, "data": text})
        return self._known[frame]


async def _frames(library: Library, run: str, key: str, store: _PictureStore) -> list[int | str]:
    episode = library.raw_episode(run, key)
    replays = Replays(library.worlds)
    style = library.runs.style_of(library.place(run), str(episode["env"]))
    turns = len(replies_and_observations(episode)[0]) + 1
    found = [store.add(await replays.frame(key, episode, style, turn)) for turn in range(turns)]
    await replays.close()
    return found


def _all_rows(library: Library, run: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while True:
        answer = library.episodes(run, Filter(), "oldest", len(rows), PAGE)
        rows += answer["rows"]
        if len(rows) >= answer["total"] or not answer["rows"]:
            return rows


def _chosen(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Whole groups, evenly over the run, played ones before the warm start's."""
    if len(rows) <= most:
        return rows
    teams: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] != "warmstart":
            teams.setdefault((row["file"], row["team"]), []).append(row)
    groups = list(teams.values())
    kept: list[dict[str, Any]] = []
    # Halving steps through the run: the first groups taken are already spread over all of it.
    order = sorted(range(len(groups)), key=lambda place: _reversed_bits(place))
    for place in order:
        if len(kept) + len(groups[place]) <= most:
            kept += groups[place]
    wanted = {row["key"] for row in kept}
    return [row for row in rows if row["key"] in wanted]


def _reversed_bits(number: int) -> int:
    return int(f"{number:032b}"[::-1], 2)


def _only(episode: dict[str, Any], kept: set[str]) -> dict[str, Any]:
    """The episode without links to others that are not in the file, and without paths in its error."""
    episode["error"] = without_paths(str(episode["error"])) if episode["error"] else None
    episode["group"] = [member for member in episode["group"] if member["key"] in kept]
    episode["neighbours"] = {n: key if key in kept else None for n, key in episode["neighbours"].items()}
    return episode


def _told(library: Library, data: dict[str, Any], most: int) -> str:
    total = sum(row["episodes"] for row in data["runs"].values())
    shown = sum(len(rows) for rows in data["rows"].values())
    if shown == total:
        return f"all {total} episodes."
    return f"{shown} of {total} episodes (at most {most} of a run), all curves."
