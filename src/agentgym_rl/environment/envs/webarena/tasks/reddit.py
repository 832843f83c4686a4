"""Tasks in the forum."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence

from agentgym_rl.environment.envs.webarena.oracle import Move, choose, click, fill, search, stop
from agentgym_rl.environment.envs.webarena.sites.forum_data import ME
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

FORUM = "__REDDIT__"


def _posts(db: sqlite3.Connection, ids: Sequence[int]) -> list[sqlite3.Row]:
    sql = "SELECT p.*, c.slug FROM post p JOIN community c ON c.id = p.community_id WHERE p.id = ?"
    return [db.execute(sql, (number,)).fetchone() for number in ids]


def _open(post: sqlite3.Row) -> tuple[Move, ...]:
    return search("Search posts", post["title"]), click("link", post["title"])


def _url(post: sqlite3.Row) -> str:
    return f"{FORUM}/f/{post['slug']}/{post['id']}"


def _members(db: sqlite3.Connection) -> list[str]:
    return column(db, "SELECT name FROM member")


def num_comments(db: sqlite3.Connection) -> Iterator[Instance]:
    for post in _posts(db, (2, 11, 17, 26)):
        count = str(db.execute("SELECT count(*) FROM comment WHERE post_id = ?", (post["id"],)).fetchone()[0])
        yield Instance({"title": post["title"]}, exactly(count), (*_open(post), stop(count)))


def top_author(db: sqlite3.Connection) -> Iterator[Instance]:
    for slug in ("gardening", "cycling", "bookclub", "astronomy"):
        author = db.execute(
            "SELECT author FROM post p JOIN community c ON c.id = p.community_id WHERE slug = ? ORDER BY score DESC",
            (slug,),
        ).fetchone()[0]
        script = (click("link", "Communities"), click("link", slug), click("link", "Top"), stop(author))
        yield Instance({"community": slug}, one_of(author, _members(db)), script)


def best_comment(db: sqlite3.Connection) -> Iterator[Instance]:
    for post in _posts(db, (5, 14, 22, 31)):
        author = db.execute(
            "SELECT author FROM comment WHERE post_id = ? ORDER BY score DESC, id", (post["id"],)
        ).fetchone()[0]
        checks = one_of(author, _members(db))
        yield Instance({"title": post["title"]}, checks, (*_open(post), stop(author)))


def oldest(db: sqlite3.Connection) -> Iterator[Instance]:
    for slug in ("trains", "homebrew", "gardening"):
        post = db.execute(
            "SELECT p.*, c.slug FROM post p JOIN community c ON c.id = p.community_id WHERE slug = ?"
            " ORDER BY day, p.id",
            (slug,),
        ).fetchone()
        script = (
            click("link", "Communities"),
            click("link", slug),
            click("link", "Old"),
            click("link", post["title"]),
            stop(),
        )
        yield Instance({"community": slug}, at_url(_url(post)), script)


def comment(db: sqlite3.Connection) -> Iterator[Instance]:
    texts = (
        "Crushed eggshells helped here.",
        "The bakery at the lock is the better one.",
        "I finished it and regret nothing.",
        "Try the seat reservation by post.",
        "Was the dog all right?",
    )
    for post, text in zip(_posts(db, (2, 10, 16, 27, 31)), texts, strict=True):
        yield Instance(
            {"title": post["title"], "text": text},
            with_data(
                page_has((_url(post), text_of("#comments"), [text, ME])),
                added("comment", post_id=post["id"], author=ME, body=text),
            ),
            (*_open(post), fill("Your comment", text), click("button", "Post comment"), stop()),
        )


def vote(db: sqlite3.Connection) -> Iterator[Instance]:
    for index, post in enumerate(_posts(db, (3, 8, 13, 20, 29, 33))):
        direction = ("Upvote", "Downvote")[index % 2]
        value = 1 if direction == "Upvote" else -1
        checks = with_data(
            page_has((_url(post), "document.querySelector('#votes').getAttribute('data-vote')", str(value))),
            changed("post", post["id"], my_vote=value, score=post["score"] + value),
        )
        script = (search("Search posts", post["title"]), click("button", f"{direction}: {post['title']}"), stop())
        yield Instance({"way": direction, "title": post["title"]}, checks, script)


def submit(db: sqlite3.Connection) -> Iterator[Instance]:
    cases = (
        ("gardening", "Moving a rhubarb plant", "It is ten years old and in the way."),
        ("cycling", "Mudguards for wide tyres", "Which ones do not rattle?"),
        ("astronomy", "Comet visible this week", "Low in the west after sunset."),
        ("trains", "Luggage lockers at Eastmere", "Do they still take coins?"),
        ("homebrew", "Scale with a timer", "Mine stopped at 300 grams."),
    )
    (number,) = column(db, "SELECT max(id) + 1 FROM post")
    for slug, title, body in cases:
        url = f"{FORUM}/f/{slug}/{number}"
        (community,) = column(db, "SELECT id FROM community WHERE slug = ?", slug)
        checks = with_data(
            page_has((url, text_of("h1"), title), (url, text_of("#body"), body)),
            added("post", community_id=community, author=ME, title=title, body=body),
        )
        script = (
            click("link", "Submit"),
            fill("Title", title),
            fill("Body", body),
            choose("Community", slug),
            click("button", "Create post"),
            stop(),
        )
        yield Instance({"community": slug, "title": title, "body": body}, checks, script)


def subscribe(db: sqlite3.Connection) -> Iterator[Instance]:
    for slug in ("cycling", "astronomy", "trains", "bookclub"):
        number, subscribed = db.execute("SELECT id, subscribed FROM community WHERE slug = ?", (slug,)).fetchone()
        verb, opposite = ("Unsubscribe", "Subscribe") if subscribed else ("Subscribe", "Unsubscribe")
        url = f"{FORUM}/f/{slug}"
        pages = page_has((url, "document.querySelector('form.inline button').innerText", opposite))
        checks = with_data(pages, changed("community", number, subscribed=1 - subscribed))
        script = (click("link", "Communities"), click("link", slug), click("button", verb), stop())
        yield Instance({"what": "Leave" if subscribed else "Subscribe to", "community": slug}, checks, script)


def biography(db: sqlite3.Connection) -> Iterator[Instance]:
    texts = ("Night trains and strong coffee.", "Gardener by the sea.", "Reads on the ferry.")
    (me,) = column(db, "SELECT rowid FROM member WHERE name = ?", ME)
    for text in texts:
        yield Instance(
            {"text": text},
            with_data(page_has((f"{FORUM}/user/{ME}", text_of("#bio"), text)), changed("member", me, bio=text)),
            (click("link", "My profile"), fill("Biography", text), click("button", "Save biography"), stop()),
        )


TEMPLATES = (
    Template("reddit", 'How many comments does the post "{{title}}" have? Answer with the number only.', num_comments),
    Template("reddit", "Who wrote the post with the highest score in {{community}}?", top_author),
    Template("reddit", 'Who wrote the best rated comment on "{{title}}"?', best_comment),
    Template("reddit", "Open the oldest post in {{community}}.", oldest),
    Template("reddit", 'Comment "{{text}}" on the post "{{title}}".', comment, True),
    Template("reddit", '{{way}} the post "{{title}}".', vote, True),
    Template("reddit", 'Post in {{community}} with the title "{{title}}" and the body "{{body}}".', submit, True),
    Template("reddit", "{{what}} the community {{community}}.", subscribe, True),
    Template("reddit", 'Change my biography to "{{text}}".', biography, True),
)
