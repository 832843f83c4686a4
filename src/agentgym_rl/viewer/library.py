"""Data of the pages, without HTTP. The server answers requests from it, and the export writes it to a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentgym_rl.errors import AgentGymError
from agentgym_rl.viewer.discovery import RunFolder, discover, require_roots
from agentgym_rl.viewer.index import Index, Indexer
from agentgym_rl.viewer.playground_protocols import Environments
from agentgym_rl.viewer.preference_store import preferences_of, store_preference
from agentgym_rl.viewer.queries import Filter, Queries
from agentgym_rl.viewer.replays import shown_calls
from agentgym_rl.viewer.runs import Runs, damaged_overview
from agentgym_rl.viewer.validation import checked_verdicts

DISCOVERY_INTERVAL_S = 2.0
"""Seconds between searches for new runs."""


def _branching(message: dict[str, Any]) -> dict[str, Any]:
    """Return where a message's tokens are in the tree of segments, without values that a page cannot show."""
    numbers = {name: message.get(name) for name in ("segment", "dropped_turns", "untrained")}
    fields: dict[str, Any] = {name: value if type(value) is int else 0 for name, value in numbers.items()}
    prefix, purpose = message.get("prefix"), message.get("purpose")
    if isinstance(prefix, list) and len(prefix) == 2 and all(type(number) is int for number in prefix):
        fields["prefix"] = prefix
    return fields | ({"purpose": purpose} if isinstance(purpose, str) else {})


class NotFound(AgentGymError):
    """A run or an episode that does not exist."""


class Library:
    """The runs below the given folders."""

    def __init__(self, roots: Iterable[Path], environments: Environments, index: Index | None = None) -> None:
        self.roots = require_roots(roots)
        self.environments = environments
        self.index = index or Index()
        self.queries = Queries(self.index)
        self.runs = Runs(self.queries)
        self.indexer = Indexer(
            self.index, environments.subsets_of, lambda: [f.path for f in self.run_folders().values()]
        )
        self._run_folders: dict[str, RunFolder] = {}
        self._discovered_at = -DISCOVERY_INTERVAL_S
        self._guard = threading.Lock()

    def run_folders(self) -> dict[str, RunFolder]:
        with self._guard:
            if time.monotonic() - self._discovered_at >= DISCOVERY_INTERVAL_S:
                self._run_folders = discover(self.roots)
                self._discovered_at = time.monotonic()
            return self._run_folders

    def run_folder(self, run: str) -> RunFolder:
        folder = self.run_folders().get(run)
        if folder is None:
            raise NotFound(f"no run {run!r} found: it has not started yet, or was moved or removed")
        return folder

    def overview(self) -> dict[str, Any]:
        rows = [self.overview_of(folder) for folder in self.run_folders().values()]
        rows.sort(key=lambda row: (row["kind"] != "run", -(row["updated"] or 0), row["id"]))
        return {
            "runs": rows,
            "roots": [str(root) for root in self.roots],
            "index": self.indexer.progress(),
            "note": self.index.note,
            "policies": list(self.environments.policies),
        }

    def overview_of(self, folder: RunFolder) -> dict[str, Any]:
        """Return a row of the list of runs. A damaged run gets a row too and does not affect the others."""
        problem = self.indexer.problems.get(folder.path)
        try:
            row = self.runs.overview(folder)
        except Exception as error:
            row = damaged_overview(folder, error)
        return row | {"problems": [*row["problems"], *([problem] if problem else [])]}

    def details(self, run: str) -> dict[str, Any]:
        folder = self.run_folder(run)
        return self.runs.details(folder, self.overview_of(folder))

    def changes(self) -> dict[str, Any]:
        stamps = {run: self._stamp(folder) for run, folder in self.run_folders().items()}
        return {"stamps": stamps, "index": self.indexer.progress()}

    def _stamp(self, folder: RunFolder) -> list[int | str]:
        try:
            return self.runs.stamp(folder)
        except Exception as error:  # the overview reports it, and the other runs are followed
            return [type(error).__name__]

    def episodes(self, run: str, filters: Filter, order: str, offset: int, limit: int) -> dict[str, Any]:
        return self.queries.episodes(self.run_folder(run).path, filters, order, offset, limit)

    def groups(self, run: str, filters: Filter, mixed: bool, offset: int, limit: int) -> dict[str, Any]:
        return self.queries.groups(self.run_folder(run).path, filters, mixed, offset, limit)

    def facets(self, run: str, filters: Filter) -> dict[str, Any]:
        return self.queries.facets(self.run_folder(run).path, filters)

    def raw_episode(self, run: str, key: str) -> dict[str, Any]:
        folder = self.run_folder(run)
        row = self.queries.find(folder.path, key)
        if row is None:
            reason = " yet: the index is still being built" if self.indexer.unread_bytes else ""
            raise NotFound(f"no episode {key!r} in {run}{reason}")
        try:
            return self.queries.read(folder.path, row)
        except (OSError, ValueError, TypeError) as error:
            raise NotFound(f"the file of episode {key!r} changed while it was read: open it again") from error

    def episode(self, run: str, key: str) -> dict[str, Any]:
        """Return an episode with its token texts, the learner's data and the other episodes of its group."""
        folder = self.run_folder(run)
        row = self.queries.find(folder.path, key)
        episode = self.raw_episode(run, key)
        assert row is not None
        vocabulary = self.runs.vocabulary(self._tokenizer_folder(folder))
        messages = [
            {
                "role": str(m["role"]),
                "content": str(m["content"]),
                "token_ids": m.get("token_ids") or [],
                "logprobs": m.get("logprobs"),
                "version": m.get("version"),
                "calls": calls,
                "call_id": m.get("tool_call_id"),
                "texts": vocabulary.texts(m.get("token_ids") or []) if vocabulary else None,
                **_branching(m),
            }
            for m, calls in zip(episode["messages"], shown_calls(episode), strict=True)
        ]
        learned = self.queries.learned(folder.path, row["trajectory"])
        return {
            **{name: value for name, value in row.items() if name not in ("start", "length", "file", "team")},
            "run": run,
            "run_kind": folder.kind,
            "messages": messages,
            "segments": 1 + max((m["segment"] for m in messages), default=0),
            "rewards": episode["rewards"],
            "infos": episode["infos"],
            "error": episode.get("error"),
            "role": str(episode.get("role") or ""),
            "player": str(episode.get("player") or ""),
            "verdicts": checked_verdicts(episode.get("verdicts")),
            "learned": learned,
            "group": self._members(folder, row),
            "neighbours": self.queries.neighbours(row),
        }

    def _tokenizer_folder(self, folder: RunFolder) -> RunFolder:
        """Return the folder of the tokenizer. An evaluation of a checkpoint names the run that has it."""
        run = self.runs.agent(folder).get("run")
        runs = [other for other in self.run_folders().values() if other.kind == "run" and other.path.name == run]
        return runs[0] if run and runs else folder

    def _members(self, folder: RunFolder, row: dict[str, Any]) -> list[dict[str, Any]]:
        names = ("key", "success", "reward", "turns", "stop", "advantage", "sampled")
        kept = (*names, "trajectory", "parent", "shared")
        return [{name: member[name] for name in kept} for member in self.queries.group_members(folder.path, row)]

    def same_task(self, env: str, item: int) -> list[dict[str, Any]]:
        return self.queries.same_task({run: folder.path for run, folder in self.run_folders().items()}, env, item)

    def record_preference(self, left: tuple[str, str], right: tuple[str, str], better: str, by: str) -> dict[str, Any]:
        """Store which of two episodes, each given as (run, key), is better."""
        sides = [(run, self.raw_episode(run, key)) for run, key in (left, right)]
        return store_preference(self.run_folder(left[0]), sides[0], sides[1], better, by)

    def preferences(self, left: tuple[str, str], right: tuple[str, str]) -> list[dict[str, Any]]:
        """Return what people said about two episodes."""
        first, second = ((self.run_folder(run), str(self.raw_episode(run, key)["id"])) for run, key in (left, right))
        return preferences_of(first, second)

    def shared_tasks(self, left: str, right: str) -> dict[str, Any]:
        return self.queries.shared_tasks(self.run_folder(left).path, self.run_folder(right).path)

    def close(self) -> None:
        self.index.close()
