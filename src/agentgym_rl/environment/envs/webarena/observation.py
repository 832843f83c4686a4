"""The page as text: Chromium's accessibility tree, pruned and numbered as WebArena prints it.

Ids count the elements of the whole page in document order. An element keeps its id until the tab leaves the page, and
elements that appear later get higher ids. Unlike the browser's node ids they do not depend on earlier pages, so an item
looks the same in every episode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_CHARS = 6000
"""Length of one page's text; about 2,000 tokens."""
MAX_NAME = 600
"""Length of one element's name."""

CLICKABLE = frozenset(
    {"link", "button", "checkbox", "radio", "tab", "menuitem", "menuitemcheckbox", "menuitemradio", "option", "switch"}
    | {"combobox", "treeitem"}
)
TYPABLE = frozenset({"textbox", "searchbox", "spinbutton"})
_SKIPPED_ROLES = frozenset({"none", "generic", "InlineTextBox", "LineBreak", "ListMarker", "MenuListPopup"})
"""Roles that never get a line. Their children take their place."""
_NAMED_ONLY_ROLES = frozenset(
    {"img", "list", "listitem", "paragraph", "strong", "emphasis", "banner", "navigation", "main", "contentinfo"}
    | {"complementary", "region", "Section", "LabelText", "Legend", "rowgroup", "row", "form", "article", "group"}
    | {"term", "definition", "DescriptionList", "time", "code", "figure", "Figcaption", "sectionheader"}
    | {"sectionfooter", "blockquote", "superscript", "subscript", "mark", "search", "Abbr", "status"}
)
"""Roles that get a line only if they have a name."""
_PROPERTIES = ("focused", "required", "hasPopup", "expanded", "checked", "selected", "pressed", "disabled")


@dataclass(frozen=True, slots=True)
class Element:
    """One line of the tree."""

    id: int
    depth: int
    role: str
    name: str
    properties: tuple[tuple[str, Any], ...]
    backend_id: int
    """Chromium's id of the DOM node, or 0 if there is none."""
    visible: bool
    """Whether part of it is in the viewport."""

    @property
    def line(self) -> str:
        name = self.name if len(self.name) <= MAX_NAME else self.name[: MAX_NAME - 3] + "..."
        properties = "".join(f" {key}: {value}" for key, value in self.properties)
        return "\t" * self.depth + f"[{self.id}] {self.role} {name!r}{properties}"


@dataclass(frozen=True, slots=True)
class View:
    """A page as the agent sees it."""

    elements: tuple[Element, ...]
    above: bool
    """Whether the page continues above the viewport."""
    below: bool

    def find(self, element_id: int) -> Element | None:
        """Return the element with that id if it is visible."""
        return next((each for each in self.elements if each.id == element_id and each.visible), None)

    @property
    def text(self) -> str:
        """Return the visible lines, cut at MAX_CHARS, with notes if there is more."""
        lines = [element.line for element in self.elements if element.visible]
        kept: list[str] = []
        chars_left = MAX_CHARS
        for line in lines:
            chars_left -= len(line) + 1
            if chars_left < 0:
                break
            kept.append(line)
        if len(kept) < len(lines):
            kept.append(f"(cut here: {len(lines) - len(kept)} more lines in view, scroll [down] shows some of them)")
        if self.above:
            kept.append("(the page goes on above: scroll [up])")
        if self.below:
            kept.append("(the page goes on below: scroll [down])")
        return "\n".join(kept)


Box = tuple[float, float, float, float]
"""x, y, width and height in the document."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of a page's nodes."""

    boxes: Mapping[int, Box]
    """Boxes by the DOM node's backend id."""
    scroll: tuple[float, float]
    height: float
    """Height of the whole page."""
    title: str


def read_layout(snapshot: Mapping[str, Any]) -> Layout:
    """Return the main document's layout from the result of DOMSnapshot.captureSnapshot."""
    document = snapshot["documents"][0]
    backend_ids = document["nodes"]["backendNodeId"]
    layout = document["layout"]
    boxes = {
        backend_ids[node]: tuple(bounds) for node, bounds in zip(layout["nodeIndex"], layout["bounds"], strict=True)
    }
    scroll = (document.get("scrollOffsetX", 0), document.get("scrollOffsetY", 0))
    strings = snapshot["strings"]
    title = strings[document["title"]] if document["title"] >= 0 else ""
    return Layout(boxes, scroll, document.get("contentHeight", 0), title)


class Numbering:
    """Ids assigned to a page's elements so far. A new page starts at 1 again."""

    def __init__(self) -> None:
        self._page = 0
        self._ids: dict[int, int] = {}
        self._last_id = 0

    def start(self, page: int) -> None:
        """Forget all ids if `page`, the document's backend id, has changed."""
        if page != self._page:
            self._page = page
            self._ids = {}
            self._last_id = 0

    def id_of(self, backend_id: int) -> int:
        number = self._ids.get(backend_id)
        if number is None:
            self._last_id += 1
            number = self._last_id
            if backend_id:
                self._ids[backend_id] = number
        return number


def build_view(
    nodes: Iterable[Mapping[str, Any]], layout: Layout, viewport: tuple[int, int], numbering: Numbering
) -> View:
    """Return the view of a page from the nodes of Accessibility.getFullAXTree and its layout."""
    by_id = {node["nodeId"]: node for node in nodes}
    collector = _Collector(by_id, layout, viewport, numbering)
    root = next((node for node in by_id.values() if not node.get("parentId")), None)
    if root is not None:
        numbering.start(root.get("backendDOMNodeId", 0))
        collector.add(root, depth=0, parent=None, visible=True)
    top = layout.scroll[1]
    return View(tuple(collector.elements), top > 1, top + viewport[1] < layout.height - 1)


class _Collector:
    """Collector of a page's elements in document order."""

    def __init__(
        self, by_id: Mapping[str, Mapping[str, Any]], layout: Layout, viewport: tuple[int, int], numbering: Numbering
    ) -> None:
        self._numbering = numbering
        self.elements: list[Element] = []
        self._by_id = by_id
        self._layout = layout
        self._viewport = viewport

    def add(self, node: Mapping[str, Any], depth: int, parent: Element | None, visible: bool) -> None:
        """Add a node and its descendants. Uses an explicit stack, because pages nest deeper than Python can recurse."""
        stack = [(node, depth, parent, visible)]
        while stack:
            node, depth, parent, visible = stack.pop()
            visible = self._in_viewport(node, visible)
            element = self._element(node, depth, parent, visible)
            if element is not None:
                self.elements.append(element)
                parent = element
                depth += 1
            children = [self._by_id[child] for child in node.get("childIds", ()) if child in self._by_id]
            stack.extend((child, depth, parent, visible) for child in reversed(children))

    def _element(self, node: Mapping[str, Any], depth: int, parent: Element | None, visible: bool) -> Element | None:
        role = _value(node, "role")
        name = " ".join(_value(node, "name").split())
        if node.get("ignored") or role in _SKIPPED_ROLES or (not name and role in _NAMED_ONLY_ROLES):
            return None
        if role == "StaticText" and (not name or (parent is not None and _covers(parent, name))):
            return None
        if role == "StaticText" and self._labels_control(node, name):
            return None
        values = {entry["name"]: entry["value"].get("value") for entry in node.get("properties", ())}
        properties = [(key, values[key]) for key in _PROPERTIES if key in values]
        if role == "combobox":
            properties.insert(0, ("value", _value(node, "value")))
        backend_id = node.get("backendDOMNodeId", 0)
        return Element(self._numbering.id_of(backend_id), depth, role, name, tuple(properties), backend_id, visible)

    def _labels_control(self, node: Mapping[str, Any], name: str) -> bool:
        """Return whether this text labels a sibling control that has it as its name."""
        label = self._by_id.get(node.get("parentId", ""), {})
        if _value(label, "role") != "LabelText":
            return False
        siblings = (self._by_id.get(child, {}) for child in label.get("childIds", ()))
        return any(_value(sibling, "role") != "StaticText" and name in _value(sibling, "name") for sibling in siblings)

    def _in_viewport(self, node: Mapping[str, Any], inherited: bool) -> bool:
        box = self._layout.boxes.get(node.get("backendDOMNodeId", 0))
        if box is None or not node.get("parentId"):
            return inherited
        x, y = box[0] - self._layout.scroll[0], box[1] - self._layout.scroll[1]
        if box[2] <= 0 or box[3] <= 0:
            return False
        return x < self._viewport[0] and x + box[2] > 0 and y < self._viewport[1] - 2 and y + box[3] > 2


def _covers(parent: Element, text: str) -> bool:
    """Return whether the parent's line covers a text: the name contains it or replaces it (an arrow's label)."""
    return text in parent.name or (parent.role in ("button", "link") and bool(parent.name))


def _value(node: Mapping[str, Any], key: str) -> str:
    return str(node.get(key, {}).get("value") or "")
