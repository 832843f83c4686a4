"""Everything the pages can ask for, without HTTP: the server answers from it, and the export writes it down."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentgym_rl.errors import AgentGymError
from agentgym_rl.viewer.discovery import Place, discover, require_roots
from agentgym_rl.viewer.index import Index, Indexer
from agentgym_rl.viewer.playground_protocols import Worlds
from agentgym_rl.viewer.queries import Filter, Queries
from agentgym_rl.viewer.runs import Runs, damaged_overview

LOOK_AGAIN_S = 2.0
"""New runs are noticed within this time."""


class NotFound(AgentGymError):
    """There is no such run or episode."""


class Library:
    """The runs below some folders."""

    def __init__(self, roots: Iterable[Path], worlds: Worlds, index: Index | None = None) -> None:
        self.roots = require_roots(roots)
        self.worlds = worlds
        self.index = index or Index()
        self.queries = Queries(self.index)
        self.runs = Runs(self.queries)
        self.indexer = Indexer(self.index, worlds.subsets_of, lambda: [p.path for p in self.places().values()])
        self._places: dict[str, Place] = {}
        self._looked_at = -LOOK_AGAIN_S
        self._guard = threading.Lock()

    def places(self) -> dict[str, Place]:
        with self._guard:
            if time.monotonic() - self._looked_at >= LOOK_AGAIN_S:
                self._places = discover(self.roots)
                self._looked_at = time.monotonic()
            return self._places

    def place(self, run: str) -> Place:
        found = self.places().get(run)
        if found is None:
            raise NotFound(f"there is no run {run!r} here: it has not begun yet, or was moved or removed")
        return found

    def overview(self) -> dict[str, Any]:
        rows = [self.overview_of(place) for place in self.places().values()]
        rows.sort(key=lambda row: (row["kind"] != "run", -(row["updated"] or 0), row["id"]))
        return {
            "runs": rows,
            "roots": [str(root) for root in self.roots],
            "index": self.indexer.progress(),
            "note": self.index.note,
            "policies": list(self.worlds.policies),
        }

    def overview_of(self, place: Place) -> dict[str, Any]:
        """A line of the list, whatever is in the run's files: one damaged run must not take the others with it."""
        trouble = self.indexer.problems.get(place.path)
        try:
            row = self.runs.overview(place)
        except Exception as error:
            row = damaged_overview(place, error)
        return row | {"problems": [*row["problems"], *([trouble] if trouble else [])]}

    def details(self, run: str) -> dict[str, Any]:
        place = self.place(run)
        return self.runs.details(place, self.overview_of(place))

    def changes(self) -> dict[str, Any]:
        stamps = {run: self._stamp(place) for run, place in self.places().items()}
        return {"stamps": stamps, "index": self.indexer.progress()}

    def _stamp(self, place: Place) -> list[int | str]:
        try:
            return self.runs.stamp(place)
        except Exception as error:  # the overview tells of it, and the others are followed all the same
            return [type(error).__name__]

    def episodes(self, run: str, wanted: Filter, order: str, offset: int, limit: int) -> dict[str, Any]:
        return self.queries.episodes(self.place(run).path, wanted, order, offset, limit)

    def groups(self, run: str, wanted: Filter, mixed: bool, offset: int, limit: int) -> dict[str, Any]:
        return self.queries.groups(self.place(run).path, wanted, mixed, offset, limit)

    def facets(self, run: str, wanted: Filter) -> dict[str, Any]:
        return self.queries.facets(self.place(run).path, wanted)

    def raw_episode(self, run: str, key: str) -> dict[str, Any]:
        place = self.place(run)
        row = self.queries.find(place.path, key)
        if row is None:
            waiting = " yet: the index is still being made" if self.indexer.unread_bytes else ""
            raise NotFound(f"there is no episode {key!r} in {run}{waiting}")
        try:
            return self.queries.read(place.path, row)
        except (OSError, ValueError, TypeError) as error:
            raise NotFound(f"the file of episode {key!r} changed under our feet: open it again in a moment") from error

    def episode(self, run: str, key: str) -> dict[str, Any]:
        """An episode with the texts of its tokens, what the learner saw of it, and its company."""
        place = self.place(run)
        row = self.queries.find(place.path, key)
        episode = self.raw_episode(run, key)
        assert row is not None
        vocabulary = self.runs.vocabulary(self._sampled_by(place))
        messages = [
            {
                "role": str(m["role"]),
                "content": str(m["content"]),
                "token_ids": m.get("token_ids") or [],
                "logprobs": m.get("logprobs"),
                "version": m.get("version"),
                "texts": vocabulary.texts(m.get("token_ids") or []) if vocabulary else None,
            }
            for m in episode["messages"]
        ]
        learned = self.queries.learned(place.path, row["trajectory"])
        return {
            **{name: value for name, value in row.items() if name not in ("start", "length", "file", "team")},
            "run": run,
            "run_kind": place.kind,
            "messages": messages,
            "rewards": episode["rewards"],
            "infos": episode["infos"],
            "error": episode.get("error"),
            "learned": learned,
            "group": self._members(place, row),
            "neighbours": self.queries.neighbours(row),
        }

    def _sampled_by(self, place: Place) -> Place:
        """Where the tokenizer is: an evaluation of a run's checkpoint names the run it belongs to."""
        run = self.runs.agent(place).get("run")
        runs = [some for some in self.places().values() if some.kind == "run" and some.path.name == run]
        return runs[0] if run and runs else place

    def _members(self, place: Place, row: dict[str, Any]) -> list[dict[str, Any]]:
        kept = ("key", "success", "reward", "turns", "stop", "advantage", "sampled")
        return [{name: member[name] for name in kept} for member in self.queries.company(place.path, row)]

    def same_task(self, env: str, item: int) -> list[dict[str, Any]]:
        return self.queries.same_task({run: place.path for run, place in self.places().items()}, env, item)

    def shared_tasks(self, left: str, right: str) -> dict[str, Any]:
        return self.queries.shared_tasks(self.place(left).path, self.place(right).path)

    def close(self) -> None:
        self.index.close()
