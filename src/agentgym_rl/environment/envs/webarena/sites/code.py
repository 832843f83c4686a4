"""The code host: projects, issues, merge requests, members, commits."""

from __future__ import annotations

import re
import sqlite3

from agentgym_rl.environment.envs.webarena.sites.code_data import LABELS, ME, ROLES
from agentgym_rl.environment.envs.webarena.sites.html import (
    Child,
    Html,
    a,
    area,
    button_form,
    choice,
    el,
    facts,
    field,
    form,
    paragraphs,
    table,
)
from agentgym_rl.environment.envs.webarena.sites.store import TODAY
from agentgym_rl.environment.envs.webarena.sites.style import Look
from agentgym_rl.environment.envs.webarena.sites.visit import NotFound, Redirect, Visit, like, pages, route

LOOK = Look(
    "Forgeyard",
    "#2b4a7f",
    (
        ("Your projects", "/"),
        ("Explore", "/explore"),
        ("Your merge requests", "/dashboard/merge_requests"),
        ("Your issues", "/dashboard/issues"),
        ("Profile", "/profile"),
    ),
    ("Find project", "/search"),
    ME,
)
VISIBILITIES = ("private", "internal", "public")
_page = pages(LOOK)


def _path(project: sqlite3.Row) -> str:
    return f"/{project['owner']}/{project['name']}"


def _project(visit: Visit) -> sqlite3.Row:
    return visit.row("SELECT * FROM project WHERE owner = ? AND name = ?", visit.path["owner"], visit.path["name"])


def _project_page(visit: Visit, project: sqlite3.Row, title: str, *body: Child, heading: str) -> Html:
    url = _path(project)
    links = (
        ("Overview", url),
        ("Issues", f"{url}/-/issues"),
        ("Merge requests", f"{url}/-/merge_requests"),
        ("Commits", f"{url}/-/commits"),
        ("Members", f"{url}/-/members"),
    )
    below = [el("strong", f"{project['owner']} / {project['name']}"), [a(text, href) for text, href in links]]
    return _page(visit, f"{title} - {project['name']}", *body, heading=heading, below=below)


def _project_table(rows: list[sqlite3.Row]) -> Html:
    listed = [
        (
            a(f"{row['owner']}/{row['name']}", _path(row)),
            row["description"],
            row["language"],
            row["visibility"],
            row["stars"],
        )
        for row in rows
    ]
    return el("div", table(("Project", "About", "Language", "Visibility", "Stars"), listed), id="projects")


def home(visit: Visit) -> Html:
    mine = visit.rows("SELECT * FROM project WHERE owner = ? ORDER BY name", ME)
    starred = visit.rows("SELECT * FROM project WHERE starred = 1 ORDER BY name")
    return _page(
        visit,
        "Your projects",
        a("New project", "/projects/new"),
        _project_table(mine),
        el("h2", "Starred projects"),
        el("div", _project_table(starred), id="starred") if starred else el("p", "None yet.", id="starred"),
    )


def explore(visit: Visit) -> Html:
    rows = visit.rows("SELECT * FROM project ORDER BY stars DESC")
    return _page(visit, "Explore", _project_table(rows), heading="All projects")


def search(visit: Visit) -> Html:
    text = visit.query.get("q", "").strip()
    pattern = like(text)
    rows = visit.rows("SELECT * FROM project WHERE owner || '/' || name || description LIKE ? ESCAPE '\\'", pattern)
    return _page(visit, "Search", _project_table(rows), heading=f"Projects with '{text}'")


def new_project(visit: Visit) -> Html:
    return _page(
        visit,
        "New project",
        form(
            "/projects/new",
            field("Project name", "name", size="30"),
            field("Description", "description", class_="wide"),
            choice("Visibility", "visibility", [(name, name) for name in VISIBILITIES], "private"),
            button="Create project",
            class_="card",
        ),
    )


def create_project(visit: Visit) -> Redirect:
    name, visibility = visit.form.get("name", "").strip(), visit.form.get("visibility", "")
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", name) or visibility not in VISIBILITIES:
        return Redirect("/projects/new", "A project name has letters, digits, dots, dashes and underscores.")
    if visit.rows("SELECT 1 FROM project WHERE owner = ? AND name = ?", ME, name):
        return Redirect("/projects/new", f"You already have a project {name}.")
    number = visit.change(
        "INSERT INTO project(owner, name, description, language, visibility, stars, starred, licence)"
        " VALUES (?, ?, ?, '-', ?, 0, 0, 'none')",
        *(ME, name, visit.form.get("description", "").strip()[:300], visibility),
    )
    visit.change("INSERT INTO project_member VALUES (?, ?, 'Owner')", number, ME)
    return Redirect(f"/{ME}/{name}", f"The project {name} was created.")


def project(visit: Visit) -> Html:
    row = _project(visit)
    url = _path(row)
    counts = {
        name: visit.value(f"SELECT count(*) FROM {name} WHERE project_id = ?", row["id"])
        for name in ("revision", "project_member")
    }
    open_issues = visit.value("SELECT count(*) FROM issue WHERE project_id = ? AND state = 'open'", row["id"])
    return _project_page(
        visit,
        row,
        "Overview",
        el("p", row["description"], id="description"),
        button_form(f"{url}/-/star", "Unstar" if row["starred"] else "Star"),
        el(
            "div",
            facts(
                ("Stars", row["stars"]),
                ("Visibility", el("span", row["visibility"], id="visibility")),
                ("Language", row["language"]),
                ("Licence", row["licence"]),
                ("Commits", counts["revision"]),
                ("Members", counts["project_member"]),
                ("Open issues", open_issues),
                ("Clone with SSH", f"git@code.test:{row['owner']}/{row['name']}.git"),
            ),
            class_="card",
        ),
        _settings(row) if row["owner"] == ME else None,
        heading=row["name"],
    )


def _settings(row: sqlite3.Row) -> Html:
    return el(
        "div",
        el("h2", "Settings"),
        form(
            f"{_path(row)}/-/settings",
            field("Project description", "description", row["description"], class_="wide"),
            choice("Project visibility", "visibility", [(name, name) for name in VISIBILITIES], row["visibility"]),
            button="Save settings",
            class_="card",
        ),
    )


def save_settings(visit: Visit) -> Redirect:
    row = _project(visit)
    visibility = visit.form.get("visibility", "")
    if row["owner"] != ME or visibility not in VISIBILITIES:
        raise NotFound
    description = visit.form.get("description", "").strip()[:300]
    visit.change("UPDATE project SET description = ?, visibility = ? WHERE id = ?", description, visibility, row["id"])
    return Redirect(_path(row), "The settings were saved.")


def star(visit: Visit) -> Redirect:
    row = _project(visit)
    change = -1 if row["starred"] else 1
    visit.change("UPDATE project SET starred = 1 - starred, stars = stars + ? WHERE id = ?", change, row["id"])
    return Redirect(_path(row), "The star was taken away." if row["starred"] else "You starred this project.")


def issues(visit: Visit) -> Html:
    row = _project(visit)
    url = f"{_path(row)}/-/issues"
    state, label = visit.query.get("state", "open"), visit.query.get("label", "")
    where, arguments = "project_id = ?", [row["id"]]
    if state in ("open", "closed"):
        where += " AND state = ?"
        arguments.append(state)
    if label in LABELS:
        where += " AND labels LIKE ?"
        arguments.append(f"%{label}%")
    rows = visit.rows(f"SELECT * FROM issue WHERE {where} ORDER BY number DESC", *arguments)
    listed = [
        (
            f"#{item['number']}",
            a(item["title"], f"{url}/{item['number']}"),
            [el("span", tag, class_="tag") for tag in item["labels"].split(",") if tag],
            item["author"],
            item["assignee"] or "-",
            item["day"],
        )
        for item in rows
    ]
    return _project_page(
        visit,
        row,
        "Issues",
        el(
            "p",
            [(a(text, f"{url}?state={text}"), "  ") for text in ("open", "closed", "all")],
            a("New issue", f"{url}/new"),
        ),
        el("p", "Label: ", [(a(text, f"{url}?state=all&label={text.replace(' ', '+')}"), "  ") for text in LABELS]),
        table(("", "Issue", "Labels", "Author", "Assignee", "Opened"), listed),
        heading=f"Issues ({len(rows)})",
    )


def _members(visit: Visit, project_id: int) -> list[str]:
    rows = visit.rows("SELECT username FROM project_member WHERE project_id = ? ORDER BY username", project_id)
    return [row["username"] for row in rows]


def new_issue(visit: Visit) -> Html:
    row = _project(visit)
    people = [("", "nobody"), *((name, name) for name in _members(visit, row["id"]))]
    return _project_page(
        visit,
        row,
        "New issue",
        form(
            f"{_path(row)}/-/issues/new",
            field("Title", "title", class_="wide"),
            area("Description", "body"),
            choice("Assignee", "assignee", people),
            choice("Label", "label", [("", "none"), *((name, name) for name in LABELS)]),
            button="Create issue",
            class_="card",
        ),
        heading="New issue",
    )


def create_issue(visit: Visit) -> Redirect:
    row = _project(visit)
    url = f"{_path(row)}/-/issues"
    title, assignee, label = (visit.form.get(key, "").strip() for key in ("title", "assignee", "label"))
    if not title:
        return Redirect(f"{url}/new", "An issue needs a title.")
    if assignee and assignee not in _members(visit, row["id"]):
        raise NotFound
    number = visit.value("SELECT coalesce(max(number), 0) + 1 FROM issue WHERE project_id = ?", row["id"])
    visit.change(
        "INSERT INTO issue(project_id, number, title, body, author, state, assignee, labels, day)"
        " VALUES (?, ?, ?, ?, ?, 'open', ?, ?, ?)",
        *(row["id"], number, title[:300], visit.form.get("body", "").strip()[:4000], ME, assignee),
        *(label if label in LABELS else "", TODAY),
    )
    return Redirect(f"{url}/{number}", "The issue was created.")


def _item(visit: Visit, kind: str) -> tuple[sqlite3.Row, sqlite3.Row, str]:
    """Return the project, the issue or merge request of the visit, and its address."""
    row = _project(visit)
    item = visit.row(f"SELECT * FROM {kind} WHERE project_id = ? AND number = ?", row["id"], visit.path["number"])
    return row, item, f"{_path(row)}/-/{kind}s/{item['number']}"


def _remarks(visit: Visit, kind: str, parent_id: int, url: str) -> list[Html]:
    rows = visit.rows("SELECT * FROM remark WHERE kind = ? AND parent_id = ? ORDER BY id", kind, parent_id)
    listed = [
        el(
            "div",
            el("p", f"{row['author']} on {row['day']}", class_="muted"),
            paragraphs(row["body"]),
            class_="comment",
        )
        for row in rows
    ]
    return [
        el("div", el("h2", f"Comments ({len(rows)})"), listed, id="comments"),
        form(f"{url}/comment", area("Write a comment", "body", rows=2), button="Comment"),
    ]


def issue(visit: Visit) -> Html:
    row, item, url = _item(visit, "issue")
    people = [("", "nobody"), *((name, name) for name in _members(visit, row["id"]))]
    return _project_page(
        visit,
        row,
        item["title"],
        el(
            "div",
            facts(
                ("State", el("span", item["state"], id="state")),
                ("Author", item["author"]),
                ("Assignee", el("span", item["assignee"] or "nobody", id="assignee")),
                ("Labels", el("span", item["labels"] or "none", id="labels")),
                ("Opened", item["day"]),
            ),
            el("div", paragraphs(item["body"]), id="body"),
            button_form(f"{url}/state", "Close issue" if item["state"] == "open" else "Reopen issue"),
            form(
                f"{url}/assign",
                choice("Assign to", "assignee", people, item["assignee"]),
                choice("Set label", "label", [("", "none"), *((name, name) for name in LABELS)], item["labels"]),
                button="Save issue",
            ),
            class_="card",
        ),
        _remarks(visit, "issue", item["id"], url),
        heading=f"#{item['number']} {item['title']}",
    )


def toggle_issue(visit: Visit) -> Redirect:
    _, item, url = _item(visit, "issue")
    state = "closed" if item["state"] == "open" else "open"
    visit.change("UPDATE issue SET state = ? WHERE id = ?", state, item["id"])
    return Redirect(url, f"The issue is now {state}.")


def assign_issue(visit: Visit) -> Redirect:
    row, item, url = _item(visit, "issue")
    assignee, label = visit.form.get("assignee", ""), visit.form.get("label", "")
    if (assignee and assignee not in _members(visit, row["id"])) or (label and label not in LABELS):
        raise NotFound
    visit.change("UPDATE issue SET assignee = ?, labels = ? WHERE id = ?", assignee, label, item["id"])
    return Redirect(url, "The issue was saved.")


def merge_requests(visit: Visit) -> Html:
    row = _project(visit)
    url = f"{_path(row)}/-/merge_requests"
    rows = visit.rows("SELECT * FROM merge_request WHERE project_id = ? ORDER BY number DESC", row["id"])
    listed = [
        (
            f"!{item['number']}",
            a(item["title"], f"{url}/{item['number']}"),
            item["author"],
            item["reviewer"] or "-",
            el("span", item["state"], class_="tag"),
            item["day"],
        )
        for item in rows
    ]
    return _project_page(
        visit,
        row,
        "Merge requests",
        table(("", "Merge request", "Author", "Reviewer", "State", "Opened"), listed),
        heading=f"Merge requests ({len(rows)})",
    )


def merge_request(visit: Visit) -> Html:
    row, item, url = _item(visit, "merge_request")
    people = [("", "nobody"), *((name, name) for name in _members(visit, row["id"]))]
    buttons = None
    if item["state"] == "open":
        buttons = [
            button_form(f"{url}/state", "Merge", state="merged"),
            button_form(f"{url}/state", "Close merge request", state="closed"),
        ]
    return _project_page(
        visit,
        row,
        item["title"],
        el(
            "div",
            facts(
                ("State", el("span", item["state"], id="state")),
                ("Author", item["author"]),
                ("Reviewer", el("span", item["reviewer"] or "nobody", id="reviewer")),
                ("Branch", f"{item['source']} into main"),
            ),
            el("div", paragraphs(item["body"]), id="body"),
            buttons,
            form(
                f"{url}/review",
                choice("Ask for review by", "reviewer", people, item["reviewer"]),
                button="Save reviewer",
            ),
            class_="card",
        ),
        _remarks(visit, "merge_request", item["id"], url),
        heading=f"!{item['number']} {item['title']}",
    )


def change_merge_request(visit: Visit) -> Redirect:
    _, item, url = _item(visit, "merge_request")
    state = visit.form.get("state", "")
    if item["state"] != "open" or state not in ("merged", "closed"):
        raise NotFound
    visit.change("UPDATE merge_request SET state = ? WHERE id = ?", state, item["id"])
    return Redirect(url, f"The merge request is now {state}.")


def review_merge_request(visit: Visit) -> Redirect:
    row, item, url = _item(visit, "merge_request")
    reviewer = visit.form.get("reviewer", "")
    if reviewer and reviewer not in _members(visit, row["id"]):
        raise NotFound
    visit.change("UPDATE merge_request SET reviewer = ? WHERE id = ?", reviewer, item["id"])
    return Redirect(url, "The reviewer was saved.")


def add_remark(visit: Visit) -> Redirect:
    kind = {"issues": "issue", "merge_requests": "merge_request"}.get(visit.path["kind"], "")
    if not kind:
        raise NotFound
    _, item, url = _item(visit, kind)
    body = visit.form.get("body", "").strip()
    if not body:
        return Redirect(url, "The comment is empty.")
    visit.change(
        "INSERT INTO remark(kind, parent_id, author, body, day) VALUES (?, ?, ?, ?, ?)",
        *(kind, item["id"], ME, body[:4000], TODAY),
    )
    return Redirect(url, "The comment was added.")


def members(visit: Visit) -> Html:
    row = _project(visit)
    rows = visit.rows(
        "SELECT m.username, m.role, d.name FROM project_member m JOIN developer d ON d.username = m.username"
        " WHERE project_id = ? ORDER BY m.username",
        row["id"],
    )
    invite = None
    if row["owner"] == ME:
        others = visit.rows(
            "SELECT username FROM developer WHERE username NOT IN (SELECT username FROM project_member"
            " WHERE project_id = ?) ORDER BY username",
            row["id"],
        )
        invite = form(
            f"{_path(row)}/-/members",
            choice("Invite", "username", [(other["username"], other["username"]) for other in others]),
            choice("Role", "role", [(role, role) for role in ROLES], "Guest"),
            button="Invite member",
            class_="card",
        )
    return _project_page(
        visit, row, "Members", el("div", _member_table(rows), id="members"), invite, heading=f"Members ({len(rows)})"
    )


def _member_table(rows: list[sqlite3.Row]) -> Html:
    """Return the table of members, with GitLab's markup, so that the same helper reads roles on both sites."""
    listed = [
        el(
            "tr",
            el("td", f"{row['name']} @{row['username']}", data_label="Account"),
            el("td", row["role"], class_="col-max-role"),
        )
        for row in rows
    ]
    head = el("thead", el("tr", el("th", "Account", scope="col"), el("th", "Role", scope="col")))
    return el("table", head, el("tbody", listed))


def invite_member(visit: Visit) -> Redirect:
    row = _project(visit)
    role = visit.form.get("role", "")
    user = visit.row("SELECT * FROM developer WHERE username = ?", visit.form.get("username", ""))
    if row["owner"] != ME or role not in ROLES:
        raise NotFound
    visit.change("REPLACE INTO project_member VALUES (?, ?, ?)", row["id"], user["username"], role)
    return Redirect(f"{_path(row)}/-/members", f"{user['username']} is now a {role} of this project.")


def commits(visit: Visit) -> Html:
    row = _project(visit)
    rows = visit.rows("SELECT * FROM revision WHERE project_id = ? ORDER BY day DESC, id DESC", row["id"])
    listed = [(item["sha"], item["title"], item["author"], item["day"]) for item in rows]
    return _project_page(
        visit, row, "Commits", table(("Commit", "Title", "Author", "Date"), listed), heading=f"Commits ({len(rows)})"
    )


def _open_items(visit: Visit, kind: str, title: str) -> Html:
    rows = visit.rows(
        f"SELECT i.*, p.owner, p.name FROM {kind} i JOIN project p ON p.id = i.project_id"
        " WHERE p.owner = ? AND i.state = 'open' ORDER BY i.day DESC",
        ME,
    )
    listed = [
        (a(item["title"], f"/{item['owner']}/{item['name']}/-/{kind}s/{item['number']}"), item["name"], item["state"])
        for item in rows
    ]
    return _page(visit, title, table(("Title", "Project", "State"), listed))


def my_merge_requests(visit: Visit) -> Html:
    return _open_items(visit, "merge_request", "Open merge requests in your projects")


def my_issues(visit: Visit) -> Html:
    return _open_items(visit, "issue", "Open issues in your projects")


def profile(visit: Visit) -> Html:
    me = visit.row("SELECT * FROM developer WHERE username = ?", ME)
    return _page(
        visit,
        "Profile",
        el("p", f"@{ME}", class_="muted"),
        el("p", "Status: ", el("span", me["status"] or "none", id="user-status")),
        form("/profile", field("Your status", "status", me["status"], size="40"), button="Set status", class_="card"),
        heading=me["name"],
    )


def save_profile(visit: Visit) -> Redirect:
    visit.change("UPDATE developer SET status = ? WHERE username = ?", visit.form.get("status", "").strip()[:120], ME)
    return Redirect("/profile", "Your status was set.")


ROUTES = [
    route("/", home),
    route("/explore", explore),
    route("/search", search),
    route("/profile", profile),
    route("/profile", save_profile, "POST"),
    route("/dashboard/merge_requests", my_merge_requests),
    route("/dashboard/issues", my_issues),
    route("/projects/new", new_project),
    route("/projects/new", create_project, "POST"),
    route("/{owner}/{name}", project),
    route("/{owner}/{name}/-/settings", save_settings, "POST"),
    route("/{owner}/{name}/-/star", star, "POST"),
    route("/{owner}/{name}/-/issues", issues),
    route("/{owner}/{name}/-/issues/new", new_issue),
    route("/{owner}/{name}/-/issues/new", create_issue, "POST"),
    route("/{owner}/{name}/-/issues/{number:int}", issue),
    route("/{owner}/{name}/-/issues/{number:int}/state", toggle_issue, "POST"),
    route("/{owner}/{name}/-/issues/{number:int}/assign", assign_issue, "POST"),
    route("/{owner}/{name}/-/merge_requests", merge_requests),
    route("/{owner}/{name}/-/merge_requests/{number:int}", merge_request),
    route("/{owner}/{name}/-/merge_requests/{number:int}/state", change_merge_request, "POST"),
    route("/{owner}/{name}/-/merge_requests/{number:int}/review", review_merge_request, "POST"),
    route("/{owner}/{name}/-/{kind}/{number:int}/comment", add_remark, "POST"),
    route("/{owner}/{name}/-/members", members),
    route("/{owner}/{name}/-/members", invite_member, "POST"),
    route("/{owner}/{name}/-/commits", commits),
]
