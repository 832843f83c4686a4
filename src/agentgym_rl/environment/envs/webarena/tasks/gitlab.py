"""Tasks in the code host."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from agentgym_rl.environment.envs.webarena.oracle import Move, choose, click, fill, search, stop
from agentgym_rl.environment.envs.webarena.sites.code_data import ME, ROLES
from agentgym_rl.environment.envs.webarena.tasks.template import (
    Instance,
    Template,
    added,
    at_url,
    changed,
    column,
    exactly,
    one_of,
    page_has,
    text_of,
    with_data,
)

CODE = "__GITLAB__"


def _project(db: sqlite3.Connection, path: str) -> sqlite3.Row:
    owner, name = path.split("/")
    row: sqlite3.Row = db.execute("SELECT * FROM project WHERE owner = ? AND name = ?", (owner, name)).fetchone()
    return row


def _open(path: str) -> tuple[Move, ...]:
    if path.startswith(f"{ME}/"):
        return (click("link", path),)
    return search("Find project", path), click("link", path)


def stars(db: sqlite3.Connection) -> Iterator[Instance]:
    for path in ("lantern/lantern-ui", "openferry/router", "starfield/plate-solve", "nora/recipe-box"):
        count = str(_project(db, path)["stars"])
        yield Instance({"project": path}, exactly(count), (*_open(path), stop(count)))


def clone(db: sqlite3.Connection) -> Iterator[Instance]:
    addresses = column(db, "SELECT 'git@code.test:' || owner || '/' || name || '.git' FROM project")
    for path in ("openferry/feed-parser", "nora/tidewatch", "starfield/observing-planner"):
        address = f"git@code.test:{path}.git"
        yield Instance({"project": path}, one_of(address, addresses), (*_open(path), stop(address)))


def open_issues(db: sqlite3.Connection) -> Iterator[Instance]:
    for path in ("nora/tidewatch", "lantern/lantern-docs", "openferry/feed-parser", "nora/garden-log"):
        sql = "SELECT count(*) FROM issue WHERE project_id = ? AND state = 'open'"
        count = str(db.execute(sql, (_project(db, path)["id"],)).fetchone()[0])
        script = (*_open(path), click("link", "Issues"), stop(count))
        yield Instance({"project": path}, exactly(count), script)


def role(db: sqlite3.Connection) -> Iterator[Instance]:
    for path in ("nora/recipe-box", "lantern/lantern-ui", "openferry/router", "starfield/plate-solve"):
        row = db.execute(
            "SELECT username, role FROM project_member WHERE project_id = ? AND username != ? ORDER BY username",
            (_project(db, path)["id"], ME),
        ).fetchone()
        script = (*_open(path), click("link", "Members"), stop(row["role"]))
        checks = one_of(row["role"], (*ROLES, "Owner"))
        yield Instance({"user": row["username"], "project": path}, checks, script)


def num_commits(db: sqlite3.Connection) -> Iterator[Instance]:
    for path in ("nora/tidewatch", "openferry/router", "lantern/lantern-ui"):
        row = db.execute(
            "SELECT author, count(*) AS num FROM revision WHERE project_id = ? AND author != ? GROUP BY author"
            " ORDER BY num DESC, author",
            (_project(db, path)["id"], ME),
        ).fetchone()
        script = (*_open(path), click("link", "Commits"), stop(str(row["num"])))
        yield Instance({"user": row["author"], "project": path}, exactly(row["num"]), script)


def labelled(db: sqlite3.Connection) -> Iterator[Instance]:
    cases = (
        ("nora/tidewatch", "bug"),
        ("lantern/lantern-ui", "documentation"),
        ("openferry/router", "help wanted"),
        ("nora/recipe-box", "feature"),
    )
    for path, label in cases:
        yield Instance(
            {"project": path, "label": label},
            at_url(f"{CODE}/{path}/-/issues?state=all&label={label.replace(' ', '+')}"),
            (*_open(path), click("link", "Issues"), click("link", label), stop()),
        )


def new_issue(db: sqlite3.Connection) -> Iterator[Instance]:
    cases = (
        ("nora/tidewatch", "Wrong tide at new moon", "bug"),
        ("nora/recipe-box", "Print view for recipes", "feature"),
        ("openferry/router", "Document the cost function", "documentation"),
        ("nora/garden-log", "Which weather service is used?", "question"),
        ("lantern/lantern-docs", "Example of a date field", "documentation"),
    )
    for path, title, label in cases:
        project = _project(db, path)["id"]
        (number,) = column(db, "SELECT max(number) + 1 FROM issue WHERE project_id = ?", project)
        url = f"{CODE}/{path}/-/issues/{number}"
        checks = with_data(
            page_has((url, text_of("h1"), f"#{number} {title}"), (url, text_of("#labels"), label)),
            added("issue", project_id=project, title=title, labels=label, author=ME, state="open", assignee=""),
        )
        script = (
            *_open(path),
            click("link", "Issues"),
            click("link", "New issue"),
            fill("Title", title),
            choose("Label", label),
            click("button", "Create issue"),
            stop(),
        )
        yield Instance({"project": path, "title": title, "label": label}, checks, script)


def _items(db: sqlite3.Connection, table: str, paths: tuple[str, ...], number: int) -> list[tuple[str, sqlite3.Row]]:
    sql = f"SELECT * FROM {table} WHERE project_id = ? AND number = ?"
    return [(path, db.execute(sql, (_project(db, path)["id"], number)).fetchone()) for path in paths]


def close_issue(db: sqlite3.Connection) -> Iterator[Instance]:
    paths = ("nora/tidewatch", "nora/dotfiles", "nora/recipe-box", "nora/garden-log")
    for path, issue in _items(db, "issue", paths, 4):
        yield Instance(
            {"title": issue["title"], "project": path},
            with_data(
                page_has((f"{CODE}/{path}/-/issues/{issue['number']}", text_of("#state"), "closed")),
                changed("issue", issue["id"], state="closed"),
            ),
            (
                *_open(path),
                click("link", "Issues"),
                click("link", issue["title"]),
                click("button", "Close issue"),
                stop(),
            ),
        )


def assign(db: sqlite3.Connection) -> Iterator[Instance]:
    for path, issue in _items(
        db, "issue", ("nora/tidewatch", "nora/dotfiles", "nora/recipe-box", "nora/garden-log"), 1
    ):
        user = db.execute(
            "SELECT username FROM project_member WHERE project_id = ? AND username NOT IN (?, ?)"
            " ORDER BY username DESC",
            (issue["project_id"], issue["assignee"], ME),
        ).fetchone()[0]
        script = (
            *_open(path),
            click("link", "Issues"),
            click("link", issue["title"]),
            choose("Assign to", user),
            click("button", "Save issue"),
            stop(),
        )
        pages = page_has((f"{CODE}/{path}/-/issues/{issue['number']}", text_of("#assignee"), user))
        checks = with_data(pages, changed("issue", issue["id"], assignee=user))
        yield Instance({"title": issue["title"], "project": path, "user": user}, checks, script)


def merge(db: sqlite3.Connection) -> Iterator[Instance]:
    paths = ("nora/tidewatch", "nora/recipe-box", "nora/garden-log", "nora/dotfiles")
    for index, (path, request) in enumerate(_items(db, "merge_request", paths, 1)):
        verb, button, state = (("Merge", "Merge", "merged"), ("Close", "Close merge request", "closed"))[index % 2]
        script = (
            *_open(path),
            click("link", "Merge requests"),
            click("link", request["title"]),
            click("button", button),
            stop(),
        )
        pages = page_has((f"{CODE}/{path}/-/merge_requests/1", text_of("#state"), state))
        checks = with_data(pages, changed("merge_request", request["id"], state=state))
        yield Instance({"verb": verb, "title": request["title"], "project": path}, checks, script)


def remark(db: sqlite3.Connection) -> Iterator[Instance]:
    texts = ("Looks good to me.", "Please add a test.", "Can this wait until April?")
    paths = ("openferry/router", "lantern/lantern-ui", "nora/tidewatch")
    for text, (path, request) in zip(texts, _items(db, "merge_request", paths, 2), strict=True):
        yield Instance(
            {"text": text, "title": request["title"], "project": path},
            with_data(
                page_has((f"{CODE}/{path}/-/merge_requests/2", text_of("#comments"), [text, ME])),
                added("remark", kind="merge_request", parent_id=request["id"], author=ME, body=text),
            ),
            (
                *_open(path),
                click("link", "Merge requests"),
                click("link", request["title"]),
                fill("Write a comment", text),
                click("button", "Comment"),
                stop(),
            ),
        )


def invite(db: sqlite3.Connection) -> Iterator[Instance]:
    roles = ("Developer", "Reporter", "Maintainer", "Guest")
    for path, member_role in zip(
        ("nora/tidewatch", "nora/dotfiles", "nora/recipe-box", "nora/garden-log"), roles, strict=True
    ):
        user = db.execute(
            "SELECT username FROM developer WHERE username NOT IN (SELECT username FROM project_member WHERE"
            " project_id = ?) ORDER BY username DESC",
            (_project(db, path)["id"],),
        ).fetchone()[0]
        locator = f"func:gitlab_get_project_memeber_role(__page__, '{user}')"
        script = (
            *_open(path),
            click("link", "Members"),
            choose("Invite", user),
            choose("Role", member_role),
            click("button", "Invite member"),
            stop(),
        )
        checks = with_data(
            page_has((f"{CODE}/{path}/-/members", locator, member_role)),
            added("project_member", project_id=_project(db, path)["id"], username=user, role=member_role),
        )
        yield Instance({"user": user, "project": path, "role": member_role}, checks, script)


def star(db: sqlite3.Connection) -> list[Instance]:
    return [
        Instance(
            {"project": path},
            with_data(
                page_has((f"{CODE}/", text_of("#starred"), [path])),
                changed("project", row["id"], starred=1, stars=row["stars"] + 1),
            ),
            (*_open(path), click("button", "Star"), stop()),
        )
        for path in ("lantern/lantern-ui", "starfield/observing-planner", "openferry/feed-parser")
        for row in [_project(db, path)]
    ]


def new_project(db: sqlite3.Connection) -> Iterator[Instance]:
    cases = (("bird-notes", "public"), ("kite-plans", "internal"), ("tool-shed", "private"), ("sea-glass", "public"))
    for name, visibility in cases:
        yield Instance(
            {"name": name, "visibility": visibility},
            with_data(
                page_has((f"{CODE}/{ME}/{name}", text_of("#visibility"), visibility)),
                added("project", owner=ME, name=name, visibility=visibility),
                added("project_member", username=ME, role="Owner"),
            ),
            (
                click("link", "New project"),
                fill("Project name", name),
                choose("Visibility", visibility),
                click("button", "Create project"),
                stop(),
            ),
        )


def status(db: sqlite3.Connection) -> Iterator[Instance]:
    (me,) = column(db, "SELECT rowid FROM developer WHERE username = ?", ME)
    for text in ("On holiday until Monday", "Busy", "Reviewing"):
        yield Instance(
            {"text": text},
            with_data(
                page_has((f"{CODE}/profile", text_of("#user-status"), text)), changed("developer", me, status=text)
            ),
            (click("link", "Profile"), fill("Your status", text), click("button", "Set status"), stop()),
        )


TEMPLATES = (
    Template("gitlab", "How many stars does {{project}} have? Answer with the number only.", stars),
    Template("gitlab", "What is the SSH address to clone {{project}}?", clone),
    Template("gitlab", "How many open issues does {{project}} have? Answer with the number only.", open_issues),
    Template("gitlab", "What role does {{user}} have in {{project}}?", role),
    Template("gitlab", "How many commits did {{user}} make to {{project}}? Answer with the number only.", num_commits),
    Template("gitlab", 'Show the issues of {{project}} with the label "{{label}}".', labelled),
    Template("gitlab", 'Open an issue "{{title}}" in {{project}} with the label "{{label}}".', new_issue, True),
    Template("gitlab", 'Close the issue "{{title}}" in {{project}}.', close_issue, True),
    Template("gitlab", 'Assign the issue "{{title}}" in {{project}} to {{user}}.', assign, True),
    Template("gitlab", '{{verb}} the merge request "{{title}}" in {{project}}.', merge, True),
    Template("gitlab", 'Comment "{{text}}" on the merge request "{{title}}" in {{project}}.', remark, True),
    Template("gitlab", "Invite {{user}} to {{project}} as {{role}}.", invite, True),
    Template("gitlab", "Star the project {{project}}.", star, True),
    Template("gitlab", 'Create a project named "{{name}}" with the visibility {{visibility}}.', new_project, True),
    Template("gitlab", 'Set my status to "{{text}}".', status, True),
)
