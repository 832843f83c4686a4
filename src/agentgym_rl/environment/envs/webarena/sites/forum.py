"""The forum: communities, posts, comments, voting, writing."""

from __future__ import annotations

import sqlite3

from agentgym_rl.environment.envs.webarena.sites.forum_data import ME
from agentgym_rl.environment.envs.webarena.sites.html import (
    Child,
    Html,
    a,
    area,
    button_form,
    choice,
    el,
    field,
    form,
    pager,
    paragraphs,
    table,
)
from agentgym_rl.environment.envs.webarena.sites.store import TODAY
from agentgym_rl.environment.envs.webarena.sites.style import Look
from agentgym_rl.environment.envs.webarena.sites.visit import NotFound, Redirect, Visit, like, pages, route

PER_PAGE = 9
LOOK = Look(
    "Commonboard",
    "#9c3b1b",
    (("Communities", "/communities"), ("Submit", "/submit"), ("My profile", f"/user/{ME}")),
    ("Search posts", "/search"),
    ME,
)
SORTS = {"new": ("New", "p.day DESC, p.id DESC"), "top": ("Top", "p.score DESC"), "old": ("Old", "p.day, p.id")}
_POSTS = (
    "SELECT p.*, c.slug, (SELECT count(*) FROM comment m WHERE m.post_id = p.id) AS num_comments"
    " FROM post p JOIN community c ON c.id = p.community_id"
)
_page = pages(LOOK)


def _votes(kind: str, row: sqlite3.Row, name: str) -> list[Html]:
    """Return the vote buttons. Pressing the same button again takes the vote back."""
    path = f"/vote/{kind}/{row['id']}"
    up, down = row["my_vote"] == 1, row["my_vote"] == -1
    return [
        button_form(path, "▲", f"{'Take back upvote' if up else 'Upvote'}: {name}", vote=0 if up else 1),
        el("span", row["score"], class_="score"),
        Html(" "),
        button_form(path, "▼", f"{'Take back downvote' if down else 'Downvote'}: {name}", vote=0 if down else -1),
    ]


def _entry(post: sqlite3.Row) -> Html:
    address = f"/f/{post['slug']}/{post['id']}"
    return el(
        "article",
        el("div", _votes("post", post, post["title"])),
        el(
            "div",
            el("h3", a(post["title"], address)),
            el(
                "span",
                "by ",
                a(post["author"], f"/user/{post['author']}"),
                f" in {post['slug']} on {post['day']}, {post['num_comments']} comments",
                class_="muted",
            ),
        ),
        class_="card post",
    )


def _listing(visit: Visit, title: str, path: str, where: str, *arguments: Child, head: Child = None) -> Html:
    sort = visit.query.get("sort", "new")
    sort = sort if sort in SORTS else "new"
    number = visit.page_number()
    posts = visit.rows(f"{_POSTS} WHERE {where} ORDER BY {SORTS[sort][1]}", *arguments)
    sorting = [
        (el("strong", text) if key == sort else a(text, f"{path}?sort={key}"), "  ") for key, (text, _) in SORTS.items()
    ]
    return _page(
        visit,
        title,
        head,
        el("p", "Sort: ", sorting),
        [_entry(post) for post in posts[(number - 1) * PER_PAGE : number * PER_PAGE]],
        pager(path, f"sort={sort}&", number, -(-len(posts) // PER_PAGE)),
    )


def home(visit: Visit) -> Html:
    return _listing(visit, "All posts", "/", "1")


def communities(visit: Visit) -> Html:
    rows = visit.rows(
        "SELECT c.*, (SELECT count(*) FROM post p WHERE p.community_id = c.id) AS num_posts"
        " FROM community c ORDER BY slug"
    )
    listed = [
        (
            a(row["slug"], f"/f/{row['slug']}"),
            row["description"],
            row["num_posts"],
            "yes" if row["subscribed"] else "no",
        )
        for row in rows
    ]
    return _page(visit, "Communities", table(("Name", "About", "Posts", "Subscribed"), listed))


def community(visit: Visit) -> Html:
    row = visit.row("SELECT * FROM community WHERE slug = ?", visit.path["slug"])
    path = f"/f/{row['slug']}"
    head = el(
        "div",
        el("p", row["description"], id="about"),
        button_form(f"{path}/subscribe", "Unsubscribe" if row["subscribed"] else "Subscribe"),
        a("New post here", f"/submit?community={row['slug']}"),
    )
    return _listing(visit, row["title"], path, "p.community_id = ?", row["id"], head=head)


def subscribe(visit: Visit) -> Redirect:
    row = visit.row("SELECT * FROM community WHERE slug = ?", visit.path["slug"])
    visit.change("UPDATE community SET subscribed = 1 - subscribed WHERE id = ?", row["id"])
    flash = f"You left {row['slug']}." if row["subscribed"] else f"You subscribed to {row['slug']}."
    return Redirect(f"/f/{row['slug']}", flash)


def search(visit: Visit) -> Html:
    text = visit.query.get("q", "").strip()
    pattern = like(text)
    posts = visit.rows(
        f"{_POSTS} WHERE (p.title || ' ' || p.body) LIKE ? ESCAPE '\\' ORDER BY p.day DESC LIMIT 20", pattern
    )
    return _page(
        visit, "Search", [_entry(row) for row in posts] or el("p", "Nothing was found."), heading=f"Posts with '{text}'"
    )


def post(visit: Visit) -> Html:
    row = visit.row(f"{_POSTS} WHERE p.id = ? AND c.slug = ?", visit.path["id"], visit.path["slug"])
    comments = visit.rows("SELECT * FROM comment WHERE post_id = ? ORDER BY score DESC, id", row["id"])
    path = f"/f/{row['slug']}/{row['id']}"
    edit = None
    if row["author"] == ME:
        edit = el("p", a("Edit", f"{path}/edit"), " ", button_form(f"{path}/delete", "Delete post"))
    listed = [
        el(
            "div",
            el("p", a(item["author"], f"/user/{item['author']}"), f" on {item['day']}", class_="muted"),
            paragraphs(item["body"]),
            _votes("comment", item, f"comment by {item['author']}"),
            class_="comment",
        )
        for item in comments
    ]
    return _page(
        visit,
        row["title"],
        el(
            "div",
            el(
                "p",
                "by ",
                a(row["author"], f"/user/{row['author']}"),
                f" in {row['slug']} on {row['day']}",
                class_="muted",
            ),
            el("div", paragraphs(row["body"]), id="body"),
            el("div", _votes("post", row, row["title"]), id="votes", data_vote=row["my_vote"]),
            edit,
            class_="card",
        ),
        form(f"{path}/comment", area("Your comment", "body", rows=2), button="Post comment"),
        el("h2", f"Comments ({len(comments)})"),
        el("div", listed, id="comments"),
    )


def vote(visit: Visit) -> Redirect:
    kind = visit.path["kind"]
    if kind not in ("post", "comment"):
        raise NotFound
    row = visit.row(f"SELECT * FROM {kind} WHERE id = ?", visit.path["id"])  # kind is one of two table names
    value = {"1": 1, "-1": -1}.get(visit.form.get("vote", "0"), 0)
    visit.change(f"UPDATE {kind} SET score = score + ? - my_vote, my_vote = ? WHERE id = ?", value, value, row["id"])
    post_id = row["id"] if kind == "post" else row["post_id"]
    slug = visit.value("SELECT c.slug FROM post p JOIN community c ON c.id = p.community_id WHERE p.id = ?", post_id)
    return Redirect(f"/f/{slug}/{post_id}", "Your vote was counted." if value else "Your vote was taken back.")


def add_comment(visit: Visit) -> Redirect:
    row = visit.row(f"{_POSTS} WHERE p.id = ? AND c.slug = ?", visit.path["id"], visit.path["slug"])
    path = f"/f/{row['slug']}/{row['id']}"
    body = visit.form.get("body", "").strip()
    if not body:
        return Redirect(path, "The comment is empty.")
    visit.change(
        "INSERT INTO comment(post_id, author, body, day, score, my_vote) VALUES (?, ?, ?, ?, 1, 1)",
        *(row["id"], ME, body[:4000], TODAY),
    )
    return Redirect(path, "Your comment was posted.")


def submit_form(visit: Visit) -> Html:
    slugs = [row["slug"] for row in visit.rows("SELECT slug FROM community ORDER BY slug")]
    return _page(
        visit,
        "Submit",
        form(
            "/submit",
            field("Title", "title", class_="wide"),
            area("Body", "body"),
            choice("Community", "community", [(slug, slug) for slug in slugs], visit.query.get("community", "")),
            button="Create post",
            class_="card",
        ),
        heading="New post",
    )


def submit(visit: Visit) -> Redirect:
    title, body = visit.form.get("title", "").strip(), visit.form.get("body", "").strip()
    if not title:
        return Redirect("/submit", "A post needs a title.")
    row = visit.row("SELECT * FROM community WHERE slug = ?", visit.form.get("community", ""))
    number = visit.change(
        "INSERT INTO post(community_id, author, title, body, day, score, my_vote) VALUES (?, ?, ?, ?, ?, 1, 1)",
        *(row["id"], ME, title[:300], body[:8000], TODAY),
    )
    return Redirect(f"/f/{row['slug']}/{number}", "Your post was created.")


def _own_post(visit: Visit) -> sqlite3.Row:
    return visit.row(
        f"{_POSTS} WHERE p.id = ? AND c.slug = ? AND p.author = ?", visit.path["id"], visit.path["slug"], ME
    )


def edit_form(visit: Visit) -> Html:
    row = _own_post(visit)
    path = f"/f/{row['slug']}/{row['id']}"
    return _page(
        visit,
        f"Edit {row['title']}",
        form(f"{path}/edit", area("Body", "body", row["body"], rows=5), button="Save post", class_="card"),
    )


def edit(visit: Visit) -> Redirect:
    row = _own_post(visit)
    visit.change("UPDATE post SET body = ? WHERE id = ?", visit.form.get("body", "").strip()[:8000], row["id"])
    return Redirect(f"/f/{row['slug']}/{row['id']}", "Your post was saved.")


def delete(visit: Visit) -> Redirect:
    row = _own_post(visit)
    visit.change("DELETE FROM post WHERE id = ?", row["id"])
    visit.change("DELETE FROM comment WHERE post_id = ?", row["id"])
    return Redirect(f"/f/{row['slug']}", "Your post was deleted.")


def member(visit: Visit) -> Html:
    row = visit.row("SELECT * FROM member WHERE name = ?", visit.path["name"])
    posts = visit.rows(f"{_POSTS} WHERE p.author = ? ORDER BY p.day DESC, p.id DESC", row["name"])
    num_comments = visit.value("SELECT count(*) FROM comment WHERE author = ?", row["name"])
    bio = el("p", row["bio"], id="bio")
    if row["name"] == ME:
        bio = el("div", bio, form("/bio", area("Biography", "bio", row["bio"], rows=2), button="Save biography"))
    return _page(
        visit,
        row["name"],
        bio,
        el("p", f"Member since {row['since']}. {len(posts)} posts, {num_comments} comments.", class_="muted"),
        [_entry(post) for post in posts],
    )


def save_bio(visit: Visit) -> Redirect:
    visit.change("UPDATE member SET bio = ? WHERE name = ?", visit.form.get("bio", "").strip()[:1000], ME)
    return Redirect(f"/user/{ME}", "Your biography was saved.")


ROUTES = [
    route("/", home),
    route("/communities", communities),
    route("/search", search),
    route("/submit", submit_form),
    route("/submit", submit, "POST"),
    route("/bio", save_bio, "POST"),
    route("/user/{name}", member),
    route("/vote/{kind}/{id:int}", vote, "POST"),
    route("/f/{slug}", community),
    route("/f/{slug}/subscribe", subscribe, "POST"),
    route("/f/{slug}/{id:int}", post),
    route("/f/{slug}/{id:int}/comment", add_comment, "POST"),
    route("/f/{slug}/{id:int}/edit", edit_form),
    route("/f/{slug}/{id:int}/edit", edit, "POST"),
    route("/f/{slug}/{id:int}/delete", delete, "POST"),
]
