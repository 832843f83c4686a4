"""Data of the code host: projects, issues, merge requests, members, commits. Generated from a fixed seed."""

from __future__ import annotations

import random
import sqlite3

from agentgym_rl.environment.envs.webarena.sites.people import day, full_name

ME = "nora"
"""User name of the agent."""

SCHEMA = """
CREATE TABLE developer(username TEXT PRIMARY KEY, name TEXT, status TEXT);
CREATE TABLE project(id INTEGER PRIMARY KEY, owner TEXT, name TEXT, description TEXT, language TEXT, visibility TEXT,
    stars INT, starred INT, licence TEXT);
CREATE TABLE issue(id INTEGER PRIMARY KEY, project_id INT, number INT, title TEXT, body TEXT, author TEXT, state TEXT,
    assignee TEXT, labels TEXT, day TEXT);
CREATE TABLE merge_request(id INTEGER PRIMARY KEY, project_id INT, number INT, title TEXT, body TEXT, author TEXT,
    state TEXT, reviewer TEXT, source TEXT, day TEXT);
CREATE TABLE remark(id INTEGER PRIMARY KEY, kind TEXT, parent_id INT, author TEXT, body TEXT, day TEXT);
CREATE TABLE project_member(project_id INT, username TEXT, role TEXT, PRIMARY KEY (project_id, username));
CREATE TABLE revision(id INTEGER PRIMARY KEY, project_id INT, sha TEXT, title TEXT, author TEXT, day TEXT);
"""

ROLES = ("Guest", "Reporter", "Developer", "Maintainer")
LABELS = ("bug", "feature", "documentation", "question", "help wanted")
PROJECTS = (
    (ME, "tidewatch", "Tide tables and harbour warnings on the command line", "Rust", "public", "MIT"),
    (ME, "dotfiles", "Shell, editor and terminal settings", "Shell", "private", "none"),
    (ME, "recipe-box", "A small web app for family recipes", "Python", "public", "Apache-2.0"),
    (ME, "garden-log", "Notes and weather for the vegetable garden", "TypeScript", "internal", "MIT"),
    ("lantern", "lantern-ui", "Accessible interface components without a framework", "TypeScript", "public", "MIT"),
    ("lantern", "lantern-docs", "Documentation of the Lantern components", "Markdown", "public", "CC-BY-4.0"),
    ("openferry", "router", "Shortest paths over ferry and bus timetables", "Go", "public", "Apache-2.0"),
    ("openferry", "feed-parser", "Reads timetable feeds of any vintage", "Python", "public", "Apache-2.0"),
    ("starfield", "plate-solve", "Finds out where a telescope points", "C++", "public", "GPL-3.0"),
    ("starfield", "observing-planner", "What to look at tonight", "Python", "public", "BSD-3-Clause"),
)
TITLES = (
    ("Crash when the input file is empty", "bug"),
    ("Add a dark theme", "feature"),
    ("Explain the configuration file in the README", "documentation"),
    ("Wrong result on 29 February", "bug"),
    ("How can I run this behind a proxy?", "question"),
    ("Support for reading from standard input", "feature"),
    ("Translate messages into Welsh", "help wanted"),
    ("Memory grows while idle", "bug"),
    ("Keyboard shortcuts are not listed anywhere", "documentation"),
    ("Export to CSV", "feature"),
    ("Tests fail on Windows", "bug"),
    ("Which versions are supported?", "question"),
    ("Colours are hard to tell apart", "bug"),
    ("Publish a container image", "help wanted"),
)
CHANGES = (
    "Read configuration from the home folder",
    "Speed up start by loading lazily",
    "Drop the old date parser",
    "Write errors to standard error",
    "Retry when the server is busy",
    "Check types in continuous integration",
    "Sort results by distance",
    "Remove dead code after the rewrite",
    "Show progress on long runs",
    "Escape names in the report",
)


def fill(db: sqlite3.Connection) -> None:
    rng = random.Random(37)
    names = [full_name(number) for number in range(300, 316)]
    users = {name.split()[0].lower() + name.split()[1][0].lower(): name for name in names}
    db.execute("INSERT INTO developer VALUES (?, 'Nora Lindqvist', '')", (ME,))
    db.executemany("INSERT INTO developer VALUES (?, ?, '')", list(users.items()))
    usernames = sorted(users)
    stars = rng.sample(range(4, 900), len(PROJECTS))
    for project_id, (owner, name, description, language, visibility, licence) in enumerate(PROJECTS, 1):
        db.execute(
            "INSERT INTO project VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?)",
            (project_id, owner, name, description, language, visibility, stars[project_id - 1], licence),
        )
        team = rng.sample(usernames, rng.randint(3, 5))
        roles = [(project_id, ME, "Owner")] if owner == ME else [(project_id, ME, "Developer")]
        roles += [(project_id, member, rng.choice(ROLES)) for member in team]
        db.executemany("INSERT INTO project_member VALUES (?, ?, ?)", roles)
        _issues(db, rng, project_id, usernames, team)
        _merge_requests(db, rng, project_id, team)
        _revisions(db, rng, project_id, team)


def _issues(db: sqlite3.Connection, rng: random.Random, project_id: int, users: list[str], team: list[str]) -> None:
    chosen = rng.sample(TITLES, rng.randint(7, 10))
    days = sorted(rng.sample(sorted({day(rng, "2025-04-01", "2026-03-12") for _ in range(40)}), len(chosen)))
    for number, ((title, label), opened) in enumerate(zip(chosen, days, strict=True), 1):
        state = "open" if number in (1, 4) or rng.random() < 0.6 else "closed"
        body = f"{title}. Seen with the version of {opened[:7]}; I can reproduce it every time."
        cursor = db.execute(
            "INSERT INTO issue(project_id, number, title, body, author, state, assignee, labels, day)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                project_id,
                number,
                title,
                body,
                rng.choice(users),
                state,
                rng.choice([*team, "", ""]),
                label,
                opened,
            ),
        )
        if rng.random() < 0.5:
            db.execute(
                "INSERT INTO remark(kind, parent_id, author, body, day) VALUES ('issue', ?, ?, ?, ?)",
                (cursor.lastrowid, rng.choice(team), "Thanks for the report, I will have a look.", opened),
            )


def _merge_requests(db: sqlite3.Connection, rng: random.Random, project_id: int, team: list[str]) -> None:
    for number, title in enumerate(rng.sample(CHANGES, rng.randint(3, 5)), 1):
        state = "open" if number <= 2 else rng.choice(("open", "merged", "closed"))
        source = "-".join(title.lower().split()[:3])
        db.execute(
            "INSERT INTO merge_request(project_id, number, title, body, author, state, reviewer, source, day)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                project_id,
                number,
                title,
                f"{title}. Ready for review.",
                rng.choice(team),
                state,
                rng.choice([*team, ""]),
                source,
                day(rng, "2026-01-05", "2026-03-14"),
            ),
        )


def _revisions(db: sqlite3.Connection, rng: random.Random, project_id: int, team: list[str]) -> None:
    days = sorted(day(rng, "2025-10-01", "2026-03-14") for _ in range(14))
    for date in days:
        db.execute(
            "INSERT INTO revision(project_id, sha, title, author, day) VALUES (?, ?, ?, ?, ?)",
            (project_id, f"{rng.getrandbits(32):08x}", rng.choice(CHANGES), rng.choice([*team, ME]), date),
        )
