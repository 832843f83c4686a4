"""HTML builder functions. They escape every text and attribute that is not Html already."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

VOID = frozenset({"input", "br", "hr", "meta", "link", "img"})


class Html(str):
    """A string of HTML."""

    __slots__ = ()


Child = Any
"""Html, str, a number, None (nothing), or an iterable of these."""


def el(name: str, /, *children: Child, **attributes: Any) -> Html:
    """Return an element: `el("a", "Orders", href="/", aria_label="x")` -> `<a href="/" aria-label="x">Orders</a>`.

    A trailing underscore is dropped (class_, for_). True is an attribute without value; None and False are omitted.
    """
    pieces = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        pieces.append(key if value is True else f'{key}="{escape(str(value))}"')
    opening = f"<{' '.join(pieces)}>"
    return Html(opening if name in VOID else f"{opening}{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """Return the children, concatenated."""
    return Html("".join(_flat(children)))


def _flat(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            yield child
        elif isinstance(child, str | int | float):
            yield escape(str(child))
        else:
            yield from _flat(child)


def a(text: Child, href: str, **attributes: Any) -> Html:
    return el("a", text, href=href, **attributes)


def paragraphs(text: str) -> list[Html]:
    """Return the paragraphs of a plain text, split at blank lines."""
    return [el("p", part) for part in text.split("\n\n") if part.strip()]


def table(headings: Iterable[Child], rows: Iterable[Iterable[Child]], caption: str | None = None) -> Html:
    return el(
        "table",
        el("caption", caption) if caption else None,
        el("thead", el("tr", [el("th", heading, scope="col") for heading in headings])),
        el("tbody", [el("tr", [el("td", cell) for cell in row]) for row in rows]),
    )


def facts(*pairs: tuple[str, Child]) -> Html:
    """Return a list of names and values."""
    return el("dl", [join(el("dt", name), el("dd", value)) for name, value in pairs], class_="facts")


def field(label: str, name: str, value: Child = "", kind: str = "text", **attributes: Any) -> Html:
    return el("label", label, " ", el("input", type=kind, name=name, value=value, **attributes))


def area(label: str, name: str, value: str = "", rows: int = 3) -> Html:
    return el("label", label, el("textarea", value, name=name, rows=rows))


def choice(label: str, name: str, options: Iterable[tuple[str, str]], selected_value: str = "") -> Html:
    """Return a drop-down list of (value, text)."""
    option_elements = [el("option", text, value=value, selected=value == selected_value) for value, text in options]
    return el("label", label, " ", el("select", option_elements, name=name))


def form(action: str, *children: Child, button: str, method: str = "post", **attributes: Any) -> Html:
    return el("form", *children, el("button", button), action=action, method=method, **attributes)


def button_form(action: str, button: str, label: str | None = None, **hidden: Any) -> Html:
    """Return a form with one button. `label` is its accessible name."""
    inputs = [el("input", type="hidden", name=key, value=value) for key, value in hidden.items()]
    return el("form", *inputs, el("button", button, aria_label=label), action=action, method="post", class_="inline")


def pager(path: str, query: str, page: int, num_pages: int) -> Html | None:
    """Return links to the pages of a list. `query` goes before page= and ends in & unless it is empty."""
    if num_pages <= 1:
        return None
    links = [
        el("strong", number) if number == page else a(f"Page {number}", f"{path}?{query}page={number}")
        for number in range(1, num_pages + 1)
    ]
    return el("p", "Pages: ", [(link, " ") for link in links], class_="pager")
