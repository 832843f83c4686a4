"""The shop as a text game with WebShop's pages and actions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from agentgym_rl.environment.agentgym_tools import WEBSHOP as INSTRUCTION
from agentgym_rl.environment.base import check_item
from agentgym_rl.environment.envs.text_svg import Panel, draw
from agentgym_rl.environment.envs.webshop import goals
from agentgym_rl.environment.envs.webshop.catalogue import RESULTS_PER_PAGE, Product, by_code, search
from agentgym_rl.environment.plain_text import plain
from agentgym_rl.environment.tools import Tool
from agentgym_rl.errors import EnvError
from agentgym_rl.types import Step

TOOLS = (
    Tool(
        "search",
        "Search for products. Only on the search page.",
        "search[{keywords}]",
        {"keywords": {"type": "string"}},
    ),
    Tool(
        "click",
        "Click a button, a product or an option of the page.",
        "click[{target}]",
        {"target": {"type": "string", "description": "The text of what to click, as the page shows it."}},
    ),
)
BACK, NEXT, PREVIOUS, BUY = "Back to Search", "Next >", "< Prev", "Buy Now"
SUBPAGES = ("Description", "Features", "Reviews")
_SEPARATOR = " [SEP] "
_MAX_CHARS = 300
_ACTION = re.compile(r"(search|click)\[(.*)\]", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Page:
    """Where the player is. Its fields are the whole state of an episode but for the item."""

    kind: Literal["search", "results", "product", "subpage", "done"] = "search"
    keywords: str = ""
    number: int = 0
    code: str = ""
    subpage: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


class WebShop:
    """2,300 goals in a catalogue of 600 products. Implements TextEnv."""

    name: ClassVar[str] = "webshop"
    instruction: ClassVar[str] = INSTRUCTION
    splits: ClassVar[Mapping[str, range]] = goals.SPLITS
    subsets: ClassVar[tuple[str, ...]] = goals.SUBSETS
    cheap: ClassVar[bool] = True

    def __init__(self) -> None:
        self._item = -1
        self._page = Page("done")
        self._score: float | None = None

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        return TOOLS

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return (goals.subset_of(check_item(cls, item)),)

    def reset(self, item: int) -> str:
        self._goal = goals.goal(check_item(self, item))
        self._item, self._page, self._score = item, Page(), None
        return self._observation()

    def step(self, text: str) -> Step:
        self._require_playing()
        page = self._next_page(text)
        if page is None:
            shown = plain(text.strip()) or "nothing"
            return Step(f"Nothing to do for {shown}.{_SEPARATOR}{self._observation()}", info={"valid": False})
        self._page = page
        if page.kind != "done":
            return Step(self._observation(), info={"valid": True})
        self._score = goals.score(self._goal, by_code()[page.code.lower()], page.options)
        success = self._score == 1.0
        text = f"Thank you for shopping with us!{_SEPARATOR}Your score (min 0.0, max 1.0): {self._score:.2f}"
        return Step(text, self._score, True, {"valid": True, "success": success})

    def close(self) -> None:
        self._page = Page("done")

    def actions(self) -> list[str]:
        """Return the clicks of the page, or on the search page a search for the goal's kind and for each property."""
        if self._page.kind == "done":
            return []
        if self._page.kind == "search":
            kind = self._goal.product.kind
            return [f"search[{kind}]", *(f"search[{kind} {attribute}]" for attribute in self._goal.attributes)]
        return [f"click[{text.lower()}]" for text in self._clickables()]

    def oracle(self) -> str:
        """Return the next action on the way to the goal's product, found with knowledge of the catalogue."""
        self._require_playing()
        page, code = self._page, self._goal.product.code
        if page.kind == "search":
            words = " ".join([self._goal.product.kind, *self._goal.attributes, *self._goal.options.values()])
            return f"search[{words if code in search(words) else self._goal.product.title}]"
        if page.kind == "results":
            results = search(page.keywords)
            if code not in results:
                return f"click[{BACK.lower()}]"
            there = results.index(code) // RESULTS_PER_PAGE
            target = code if there == page.number else NEXT if there > page.number else PREVIOUS
            return f"click[{target.lower()}]"
        if page.kind == "subpage":
            return f"click[{PREVIOUS.lower()}]"
        if page.code != code:
            return f"click[{BACK.lower()}]"
        missing = [value for name, value in self._goal.options.items() if page.options.get(name) != value]
        return f"click[{(missing[0] if missing else BUY).lower()}]"

    def state_key(self) -> str:
        """Return `12|product|...`: the item and the page with its keywords, number, product and options."""
        page = self._page
        options = ",".join(f"{name}={value}" for name, value in sorted(page.options.items()))
        return "|".join([str(self._item), page.kind, page.keywords, str(page.number), page.code, page.subpage, options])

    def render(self) -> str:
        """Return an SVG of the page."""
        if self._item < 0:
            raise EnvError("webshop has nothing to draw yet: call reset first")
        state = "playing" if self._score is None else "solved" if self._score == 1.0 else "failed"
        status = f"{self._page.kind} page" if self._score is None else f"score {self._score:.2f}"
        panels = [Panel("Instruction", self._goal.text, colour="#eef4fb")]
        if self._page.kind != "done":
            panels.append(Panel("Page", "\n".join(self._lines())))
            panels.append(Panel("Buttons", "   ".join(f"[{text}]" for text in self._clickables())))
        return draw(f"Shop, item {self._item}", self._goal.product.kind, status, state, panels)

    def _next_page(self, text: str) -> Page | None:
        """Return the page that an action leads to, or None if the page does not have it."""
        page, action = self._page, _ACTION.fullmatch(text.strip())
        if action is None or len(text) > _MAX_CHARS:
            return None
        verb, argument = action[1].lower(), " ".join(action[2].lower().split())
        if verb == "search":
            return Page("results", argument) if page.kind == "search" and argument else None
        if argument not in (clickable.lower() for clickable in self._clickables()):
            return None
        if argument == BACK.lower():
            return Page()
        if argument in (NEXT.lower(), PREVIOUS.lower()) and page.kind == "results":
            return replace(page, number=page.number + (1 if argument == NEXT.lower() else -1))
        if argument == PREVIOUS.lower():
            return replace(page, kind="product", subpage="") if page.kind == "subpage" else self._to_results()
        if page.kind == "results":
            return replace(page, kind="product", code=by_code()[argument].code)
        if argument == BUY.lower():
            return replace(page, kind="done")
        if argument in (subpage.lower() for subpage in SUBPAGES):
            return replace(page, kind="subpage", subpage=argument.title())
        name = next(name for name, values in self._product.options.items() if argument in values)
        return replace(page, options={**page.options, name: argument})

    def _to_results(self) -> Page:
        return Page("results", self._page.keywords, self._page.number)

    @property
    def _product(self) -> Product:
        return by_code()[self._page.code.lower()]

    def _clickables(self) -> list[str]:
        page = self._page
        if page.kind == "search":
            return []
        if page.kind == "subpage":
            return [BACK, PREVIOUS]
        if page.kind == "product":
            options = [value for values in self._product.options.values() for value in values]
            return [BACK, PREVIOUS, *options, *SUBPAGES, BUY]
        found = search(page.keywords)
        first = page.number * RESULTS_PER_PAGE
        paging = [NEXT] * (first + RESULTS_PER_PAGE < len(found)) + [PREVIOUS] * (page.number > 0)
        return [BACK, *paging, *found[first : first + RESULTS_PER_PAGE]]

    def _observation(self) -> str:
        heading = ["WebShop"] if self._page.kind == "search" else []
        parts = [*heading, "Instruction:", self._goal.text, *self._content()]
        return _SEPARATOR.join(parts)

    def _content(self) -> list[str]:
        """Return the parts of the page below the instruction, buttons included, in WebShop's order."""
        page = self._page
        if page.kind == "search":
            return ["Search"]
        buttons = self._clickables()
        if page.kind == "results":
            total = len(search(page.keywords))
            paging = [text for text in buttons if text in (NEXT, PREVIOUS)]
            rows = [by_code()[text.lower()] for text in buttons if text.lower() in by_code()]
            listed = [part for row in rows for part in (row.code, row.title, f"${row.price:.2f}")]
            return [BACK, f"Page {page.number + 1} (Total results: {total})", *paging, *listed]
        product = self._product
        if page.kind == "subpage":
            texts = {
                "Description": product.description,
                "Features": "; ".join(product.attributes),
                "Reviews": f"Rated {product.rating:.1f} of 5 by our customers.",
            }
            return [BACK, PREVIOUS, texts[page.subpage]]
        options = [part for name, values in product.options.items() for part in (name, *values)]
        chosen = [f"You have chosen {name}: {value}" for name, value in sorted(page.options.items())]
        price = f"Price: ${product.price:.2f}"
        return [
            BACK,
            PREVIOUS,
            *options,
            *chosen,
            product.title,
            price,
            f"Rating: {product.rating:.1f}",
            *SUBPAGES,
            BUY,
        ]

    def _lines(self) -> list[str]:
        """Return the page for people: one product or one option a line, without buttons."""
        page = self._page
        if page.kind == "search":
            return ["Search"]
        if page.kind == "results":
            rows = [by_code()[text.lower()] for text in self._clickables() if text.lower() in by_code()]
            return [f"{row.code}   {row.title}   ${row.price:.2f}" for row in rows] or ["no results"]
        product = self._product
        if page.kind == "subpage":
            return [product.title, f"{page.subpage}: {self._content()[-1]}"]
        options = [
            f"{name}: {', '.join(f'({value})' if page.options.get(name) == value else value for value in values)}"
            for name, values in product.options.items()
        ]
        return [product.title, f"${product.price:.2f}, rated {product.rating:.1f}", *options]

    def _require_playing(self) -> None:
        if self._page.kind == "done":
            raise EnvError("webshop needs a running episode: call reset first")
