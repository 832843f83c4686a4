"""Queries to the index: pages of episodes and groups, counts for the filters, single episodes and their groups."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from agentgym_rl.viewer.discovery import open_inside
from agentgym_rl.viewer.encode import read_object
from agentgym_rl.viewer.index import Index

FACETS = ("kind", "step", "env", "subset", "stop", "success", "horizon")
"""Columns by which episodes can be filtered and counted."""
_LINE = re.compile(r"[0-9]{1,15}")
_NEWEST = "step DESC, kind DESC, env, file, line"
ORDERS = {
    "step": _NEWEST,
    "oldest": "step, kind DESC, env, file, line",
    "reward": f"reward DESC, {_NEWEST}",
    "worst": f"reward, {_NEWEST}",
    "turns": f"turns DESC, {_NEWEST}",
    "sampled": f"sampled DESC, {_NEWEST}",
    "seconds": f"seconds DESC, {_NEWEST}",
}
MAX_SHARED_TASKS = 200
"""Tasks in the list of tasks that two runs share."""
_COLUMNS = (
    "episodes.file, line, episodes.step, kind, trajectory, team, env, item, subset, stop, success, reward, turns, "
    "horizon, sampled, seconds, parent, shared"
)


@dataclass(frozen=True, slots=True)
class Filter:
    """Filters of episodes. None means any value."""

    kind: str | None = None
    step: int | None = None
    env: str | None = None
    subset: str | None = None
    stop: str | None = None
    success: int | None = None
    horizon: int | None = None
    item: int | None = None

    def where(self, run: int, without: tuple[str, ...] = ()) -> tuple[str, list[Any]]:
        """Return an SQL condition and its values, without the filters on the columns in `without`."""
        conditions, values = ["run = ?"], [run]
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or field.name in without:
                continue
            if field.name == "subset":  # an item may belong to several subsets
                conditions.append("instr(', ' || subset || ', ', ', ' || ? || ', ') > 0")
            else:
                conditions.append(f"{field.name} = ?")
            values.append(value)
        return " AND ".join(conditions), values


class Queries:
    """Queries that return plain dictionaries."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def episodes(self, run: Path, filters: Filter, order: str, offset: int, limit: int) -> dict[str, Any]:
        """Return one page as {"total", "rows"}."""
        number = self._index.run_number(run)
        where, values = filters.where(number)
        connection = self._index.connection
        rows = connection.execute(
            f"SELECT {_COLUMNS} FROM episodes WHERE {where} ORDER BY {ORDERS[order]} LIMIT ? OFFSET ?",
            (*values, limit, offset),
        ).fetchall()
        stems = self._stems(number)
        page = [self._row(row, stems) for row in rows]
        self._add_advantages(number, page)
        return {"total": self._total(number, filters), "rows": page}

    def groups(self, run: Path, filters: Filter, mixed: bool, offset: int, limit: int) -> dict[str, Any]:
        """Return groups of episodes of one task, newest first. `mixed` selects groups with different rewards."""
        number = self._index.run_number(run)
        where, values = filters.where(number)
        connection = self._index.connection
        having = "HAVING max(reward) - min(reward) > 1e-6" if mixed else ""
        grouped = f"FROM episodes WHERE {where} GROUP BY file, team {having}"
        total = connection.execute(f"SELECT count(*) FROM (SELECT 1 {grouped})", values).fetchone()[0]
        rows = connection.execute(
            "SELECT file, min(line) AS line, step, kind, team, env, item, subset, max(horizon) AS horizon, "
            "count(*) AS size, sum(success) AS successes, avg(reward) AS reward, max(reward) - min(reward) AS spread, "
            f"group_concat(success || ':' || coalesce(reward, 'nan')) AS members {grouped} "
            "ORDER BY step DESC, kind DESC, env, file, min(line) LIMIT ? OFFSET ?",
            (*values, limit, offset),
        ).fetchall()
        stems = self._stems(number)
        return {"total": total, "rows": [self._group_row(row, stems) for row in rows]}

    def facets(self, run: Path, filters: Filter) -> dict[str, list[list[Any]]]:
        """Return [[value, count], ...] per facet under the filters on the others, sorted by value. Omit items."""
        number = self._index.run_number(run)
        facets: dict[str, list[list[Any]]] = {}
        for name in FACETS:
            where, values = filters.where(number, (name, "item"))
            query = f"SELECT {name}, sum(episodes) FROM cells WHERE {where} GROUP BY {name}"
            counts: Counter[Any] = Counter()
            for value, count in self._index.connection.execute(query, values):
                for part in value.split(", ") if name == "subset" else [value]:
                    counts[part] += count
            facets[name] = [[value, counts[value]] for value in sorted(counts) if value != ""]
        return facets

    def find(self, run: Path, key: str) -> dict[str, Any] | None:
        """Return the row of a key such as `step_000012.17`, made of a file's stem and a line number."""
        stem, _, line = key.rpartition(".")
        if not _LINE.fullmatch(line):
            return None
        number = self._index.run_number(run)
        row = self._index.connection.execute(
            f"SELECT {_COLUMNS}, start, length FROM episodes JOIN files ON files.file = episodes.file "
            "WHERE files.run = ? AND stem = ? AND line = ?",
            (number, stem, int(line)),
        ).fetchone()
        if row is None:
            return None
        episode = self._row(row, self._stems(number)) | {"start": row["start"], "length": row["length"]}
        self._add_advantages(number, [episode])
        return episode

    def read(self, run: Path, row: dict[str, Any]) -> dict[str, Any]:
        """Read the whole episode of a row that `find` returned."""
        stem = row["key"].rpartition(".")[0]
        return _read_at(run, stem, row["start"], row["length"])

    def learned(self, run: Path, trajectory: str) -> dict[str, Any] | None:
        """Return the learner's advantages, entropies and logprobs of an episode's sampled tokens."""
        number = self._index.run_number(run)
        row = self._index.connection.execute(
            "SELECT stem, start, length FROM learned JOIN files ON files.file = learned.file "
            "WHERE learned.run = ? AND trajectory = ?",
            (number, trajectory),
        ).fetchone()
        return _read_at(run, row["stem"], row["start"], row["length"]) if row else None

    def group_members(self, run: Path, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the group of an episode, itself included, in file order."""
        number = self._index.run_number(run)
        rows = self._index.connection.execute(
            f"SELECT {_COLUMNS} FROM episodes WHERE file = ? AND team = ? ORDER BY line LIMIT 256",
            (row["file"], row["team"]),
        ).fetchall()
        stems = self._stems(number)
        members = [self._row(member, stems) for member in rows]
        self._add_advantages(number, members)
        return members

    def neighbours(self, row: dict[str, Any]) -> dict[str, str | None]:
        """Return the keys of the episodes before and after in the same file."""
        stem, _, line = row["key"].rpartition(".")
        query = self._index.connection.execute
        before = query("SELECT max(line) FROM episodes WHERE file = ? AND line < ?", (row["file"], line)).fetchone()[0]
        after = query("SELECT min(line) FROM episodes WHERE file = ? AND line > ?", (row["file"], line)).fetchone()[0]
        return {
            "before": None if before is None else f"{stem}.{before}",
            "after": None if after is None else f"{stem}.{after}",
        }

    def same_task(self, runs: dict[str, Path], env: str, item: int, limit: int = 400) -> list[dict[str, Any]]:
        """Return the episodes of one item in every run, newest step first, each with its run's id."""
        episodes: list[dict[str, Any]] = []
        for run_id, path in runs.items():
            number = self._index.run_number(path)
            rows = self._index.connection.execute(
                f"SELECT {_COLUMNS} FROM episodes WHERE env = ? AND item = ? AND run = ? ORDER BY {_NEWEST} LIMIT ?",
                (env, item, number, limit),
            ).fetchall()
            stems = self._stems(number)
            run_episodes = [self._row(row, stems) | {"run": run_id} for row in rows]
            self._add_advantages(number, run_episodes)
            episodes += run_episodes
        return episodes

    def shared_tasks(self, left: Path, right: Path) -> dict[str, Any]:
        """Return tasks that two runs played, with the latest episode of each. For one run, its first and its latest.

        Tasks with different outcomes come first, because they matter most in a comparison.
        """
        same_run = left == right
        left_rows = self._by_task(left, ORDERS["oldest" if same_run else "step"])
        right_rows = self._by_task(right, ORDERS["oldest" if same_run else "step"], last=same_run)
        rows: list[dict[str, Any]] = [
            {"env": env, "item": item, "left": row, "right": right_rows[env, item]}
            for (env, item), row in left_rows.items()
            if (env, item) in right_rows and not (same_run and right_rows[env, item]["key"] == row["key"])
        ]
        rows.sort(key=lambda r: (r["left"]["success"] == r["right"]["success"], r["env"], r["item"]))
        return {"total": len(rows), "rows": rows[:MAX_SHARED_TASKS]}

    def _by_task(self, run: Path, order: str, *, last: bool = False) -> dict[tuple[str, int], dict[str, Any]]:
        """Return the first or the last episode of each task in an order."""
        number = self._index.run_number(run)
        stems = self._stems(number)
        episodes: dict[tuple[str, int], dict[str, Any]] = {}
        names = ("kind", "step", "stop", "reward", "turns")
        query = (
            f"SELECT env, item, success, {', '.join(names)}, file, line FROM episodes WHERE run = ? ORDER BY {order}"
        )
        for row in self._index.connection.execute(query, (number,)):
            if last or (row["env"], row["item"]) not in episodes:
                side = {name: row[name] for name in names} | {"success": bool(row["success"])}
                episodes[row["env"], row["item"]] = side | {"key": f"{stems[row['file']]}.{row['line']}"}
        return episodes

    def evaluations(self, run: Path) -> list[dict[str, Any]]:
        """Return held-out success by step, over episodes without errors."""
        number = self._index.run_number(run)
        rows = self._index.connection.execute(
            "SELECT step, sum(episodes) AS episodes, 1.0 * sum(success * episodes) / sum(episodes) AS success, "
            "sum(reward) / sum(episodes) AS reward, 1.0 * sum(turns) / sum(episodes) AS turns "
            "FROM cells WHERE run = ? AND kind = 'eval' AND stop != 'error' GROUP BY step ORDER BY step",
            (number,),
        ).fetchall()
        return [dict(row) for row in rows]

    def counts(self, run: Path) -> dict[str, int]:
        number = self._index.run_number(run)
        query = self._index.connection.execute
        lines, broken = query(
            "SELECT coalesce(sum(lines), 0), coalesce(sum(broken), 0) FROM files "
            "WHERE run = ? AND stem NOT LIKE 'learned\\_%' ESCAPE '\\'",
            (number,),
        ).fetchone()
        return {"episodes": lines - broken, "broken": broken}

    def _total(self, number: int, filters: Filter) -> int:
        where, values = filters.where(number)
        # `cells` has far fewer rows, but no items.
        counted = "sum(episodes) FROM cells" if filters.item is None else "count(*) FROM episodes"
        return int(self._index.connection.execute(f"SELECT {counted} WHERE {where}", values).fetchone()[0] or 0)

    def _stems(self, number: int) -> dict[int, str]:
        rows = self._index.connection.execute("SELECT file, stem FROM files WHERE run = ?", (number,))
        return {row["file"]: row["stem"] for row in rows}

    @staticmethod
    def _row(row: Any, stems: dict[int, str]) -> dict[str, Any]:
        values = {name: row[name] for name in row.keys() if name not in ("line", "start", "length")}  # noqa: SIM118, a Row
        return values | {"key": f"{stems[row['file']]}.{row['line']}", "success": bool(row["success"])}

    @staticmethod
    def _group_row(row: Any, stems: dict[int, str]) -> dict[str, Any]:
        members = [member.split(":") for member in row["members"].split(",")]
        values = {name: row[name] for name in row.keys() if name not in ("line", "file", "members")}  # noqa: SIM118
        values["members"] = [[success == "1", float(reward)] for success, reward in members]
        return values | {"key": f"{stems[row['file']]}.{row['line']}"}

    def _add_advantages(self, number: int, rows: list[dict[str, Any]]) -> None:
        names = [row["trajectory"] for row in rows]
        known: dict[str, float | None] = {}
        for start in range(0, len(names), 500):  # SQLite limits the number of values
            batch = names[start : start + 500]
            marks = ", ".join("?" * len(batch))
            query = f"SELECT trajectory, advantage FROM learned WHERE run = ? AND trajectory IN ({marks})"
            known |= dict(tuple(row) for row in self._index.connection.execute(query, (number, *batch)))
        for row in rows:
            row["advantage"] = known.get(row["trajectory"])


def _read_at(run: Path, stem: str, start: int, length: int) -> dict[str, Any]:
    with open_inside(run, run / "trajectories" / f"{stem}.jsonl") as file:
        file.seek(start)
        return read_object(file.read(length))
