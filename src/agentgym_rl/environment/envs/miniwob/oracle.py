"""Solutions of the tasks: each reads the task's text and the page, and returns the next action."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from agentgym_rl.environment.envs.webarena.observation import TYPABLE, Element, View
from agentgym_rl.errors import EnvError

Click = tuple[str, str, int]
"""Role, name and id of an element that was clicked."""
POSITIONS = ("1st", "2nd", "3rd")
BULLET = "•"


class Page:
    """The visible page, and the clicks so far."""

    def __init__(self, view: View, clicks: Sequence[Click]) -> None:
        self.elements = [element for element in view.elements if element.visible]
        self.clicks = clicks

    def of_role(self, *roles: str) -> list[Element]:
        return [element for element in self.elements if element.role in roles]

    @property
    def fields(self) -> list[Element]:
        return self.of_role(*TYPABLE)

    @property
    def texts(self) -> list[str]:
        """Return the names of all elements in order."""
        return [element.name for element in self.elements]

    def named(self, name: str, roles: Iterable[str] = ()) -> Element | None:
        """Return the first element of a name that was not clicked yet, or else the first."""
        matches = [each for each in self.elements if each.name == name and (not roles or each.role in roles)]
        clicked = {number for _, _, number in self.clicks}
        return next((each for each in matches if each.id not in clicked), matches[0] if matches else None)

    def value(self, field: Element) -> str:
        """Return the text in a field: the texts below it in the tree."""
        start = self.elements.index(field) + 1
        value = ""
        for element in self.elements[start:]:
            if element.depth <= field.depth:
                break
            value += element.name
        return value

    def click(self, name: str, *roles: str) -> str:
        return click(self.named(name, roles), name)

    def fill(self, wanted: Sequence[tuple[Element, str]], button: str) -> str:
        """Return the action that types the next text which is missing, or the click on the button."""
        for field, text in wanted:
            if self.value(field) not in (text, BULLET * len(text)):
                return f"type [{field.id}] [{text}] [0]"
        return self.click(button)


def click(element: Element | None, name: str) -> str:
    if element is None:
        raise EnvError(f"the oracle needs an element {name!r} on the page, got none")
    return f"click [{element.id}]"


def next_action(task: str, text: str, view: View, clicks: Sequence[Click]) -> str:
    """Return the next action of a solution."""
    return SOLVERS[task](text, Page(view, clicks))


def quoted(text: str) -> list[str]:
    return re.findall(r'"([^"]*)"', text)


def click_button(text: str, page: Page) -> str:
    return page.click(quoted(text)[0], "button")


def click_sequence(text: str, page: Page) -> str:
    names = re.findall(r"button (\w+)", text)
    return page.click(names[min(len(page.clicks), len(names) - 1)], "button")


def click_test(text: str, page: Page) -> str:
    return page.click("Click Me!", "button")


def click_text(text: str, page: Page) -> str:
    return page.click(quoted(text)[0], "StaticText")


def close_dialog(text: str, page: Page) -> str:
    name = quoted(text)[0]
    return page.click("Close" if name == "x" else name, "button")


def select(text: str, page: Page) -> str:
    """Tick the boxes that the task names and no others, then submit."""
    names = text.removeprefix("Select ").removesuffix(" and click Submit.").split(", ")
    for box in page.of_role("checkbox", "radio"):
        is_checked = dict(box.properties).get("checked") in (True, "true")
        if is_checked != (box.name in names) and (box.role == "checkbox" or not is_checked):
            return click(box, box.name)
    return page.click("Submit", "button")


def choose_option(text: str, page: Page) -> str:
    name = text.removeprefix("Select ").removesuffix(" from the list and click Submit.")
    (chooser,) = page.of_role("combobox")
    if dict(chooser.properties).get("value") != name:
        return page.click(name, "option")
    return page.click("Submit", "button")


def click_tab(text: str, page: Page) -> str:
    return page.click(text.removeprefix("Click on ").removesuffix("."), "tab")


def find_link(text: str, page: Page) -> str:
    """Click the link if it is in view, or else the next tab or section that was not opened."""
    name = quoted(text)[0]
    clicked = {number for _, _, number in page.clicks}
    links = [each for each in page.of_role("StaticText") if each.name == name and each.id not in clicked]
    if links:
        return click(links[0], name)
    closed = [each for each in page.of_role("tab") if each.id not in clicked and not _is_open(each)]
    return click(closed[0] if closed else None, name)


def _is_open(tab: Element) -> bool:
    properties = dict(tab.properties)
    return any(properties.get(key) in (True, "true") for key in ("expanded", "selected"))


def expand(text: str, page: Page) -> str:
    section = page.of_role("tab")[0]  # the second one wraps the button
    return page.click("Submit", "button") if _is_open(section) else click(section, section.name)


def focus(text: str, page: Page) -> str:
    index = next((index for index, position in enumerate(POSITIONS) if position in text), 0)
    return click(page.fields[index], "field")


def enter_text(text: str, page: Page) -> str:
    wanted = quoted(text)[0]
    if "upper case" in text:
        wanted = wanted.upper()
    elif "lower case" in text:
        wanted = wanted.lower()
    return page.fill([(page.fields[0], wanted)], "Submit")


def enter_password(text: str, page: Page) -> str:
    return page.fill([(field, quoted(text)[0]) for field in page.fields], "Submit")


def log_in(text: str, page: Page) -> str:
    if page.named("Cancel", ("button",)) is not None:  # the popup
        return page.click("Cancel", "button")
    button = "Login" if page.named("Login", ("button",)) is not None else "OK"
    return page.fill(list(zip(page.fields, quoted(text), strict=True)), button)


def read_table(text: str, page: Page) -> str:
    """Fill the only field with the value of the task's key, or each of several with that of the label before it."""
    cells = [each.name for each in page.of_role("StaticText", "cell", "gridcell", "LayoutTableCell") if each.name]
    key = re.search(r"value of (.+) into the text field", text)
    keys = [key[1]] if key else [name.removesuffix(":") for name in cells if name.endswith(":")]
    return page.fill([(field, _after(cells, key)) for field, key in zip(page.fields, keys, strict=True)], "Submit")


def _after(names: Sequence[str], key: str) -> str:
    """Return the name after `key`."""
    return names[names.index(key) + 1]


def search(text: str, page: Page) -> str:
    """Search, go to the page of results (three each), and click the result."""
    rank = int(re.findall(r"the (\d+)\w\w search result", text)[0])
    page_number, index = str((rank - 1) // 3 + 1), (rank - 1) % 3
    field, name = page.fields[0], quoted(text)[0]
    clicked = [clicked_name for _, clicked_name, _ in page.clicks]
    if "Search" not in clicked:
        return page.fill([(field, name)], "Search")
    shown = next((each for each in reversed(clicked) if each.isdigit()), "1")
    if shown != page_number:
        return page.click(page_number, "link")
    return click(page.of_role("link")[index], "result")


def arithmetic(text: str, page: Page) -> str:
    first, sign, second = re.findall(r"(\d+) ([-+x]) (\d+) =", " ".join(page.texts))[0]
    answer = {"+": int(first) + int(second), "-": int(first) - int(second), "x": int(first) * int(second)}[sign]
    return page.fill([(page.fields[0], str(answer))], "Submit")


def algebra(text: str, page: Page) -> str:
    first, sign, second, total = re.findall(r"(\w+) ([-+]) (\w+) = (-?\d+)", " ".join(page.texts))[0]
    number = int(second if first == "x" else first)
    answer = int(total) - number if sign == "+" else int(total) + number if first == "x" else number - int(total)
    return page.fill([(page.fields[0], str(answer))], "Submit")


def find_word(text: str, page: Page) -> str:
    index = int(re.findall(r"the (\d+)\w\w word", text)[0]) - 1
    words = max(page.texts[1:], key=len).split()  # the root has the page's title
    return page.fill([(page.fields[0], re.sub(r"[^a-zA-Z]+", "", words[index]))], "Submit")


def form_sequence(text: str, page: Page) -> str:
    radio, field = (POSITIONS.index(position) for position in re.findall(r"the (\d\w\w) ", text))
    if dict(page.of_role("radio")[radio].properties).get("checked") not in (True, "true"):
        return click(page.of_role("radio")[radio], "radio")
    wanted = [(each, quoted(text)[0] if index == field else "") for index, each in enumerate(page.fields)]
    return page.fill(wanted, "Submit")


def guess_number(text: str, page: Page) -> str:
    shown = " ".join(page.texts)
    hint = re.search(r"is (higher|lower) than\s+(\d+)", shown)
    guess = 5 if hint is None else int(hint[2]) + (1 if hint[1] == "higher" else -1)
    return page.fill([(page.fields[0], str(guess))], "Submit")


def search_movies(text: str, page: Page) -> str:
    genre, director, year = re.findall(r"Search for (.+) movies directed by (.+) from year (\d+)", text)[0]
    values = {"Genre": genre, "Director": director, "Year": year}
    labels = dict.fromkeys(name for name in page.texts if name in values)
    return page.fill([(field, values[label]) for field, label in zip(page.fields, labels, strict=True)], "Submit")


def odd_or_even(text: str, page: Page) -> str:
    numbers = [int(each.name) for each in page.of_role("StaticText") if re.fullmatch(r"-?\d+", each.name)]
    clicked = {number for _, _, number in page.clicks}
    for row, number in enumerate(numbers):
        button = [each for each in page.of_role("button") if each.name == ("Odd" if number % 2 else "Even")][row]
        if button.id not in clicked:
            return click(button, button.name)
    return page.click("Submit", "button")


Solver = Callable[[str, Page], str]
SOLVERS: dict[str, Solver] = {
    "click-button": click_button,
    "click-button-sequence": click_sequence,
    "click-test": click_test,
    "click-test-2": click_sequence,
    "click-test-transfer": click_sequence,
    "unicode-test": click_button,
    "click-link": click_text,
    "click-dialog": close_dialog,
    "click-dialog-2": close_dialog,
    **dict.fromkeys(
        ("click-option", "click-checkboxes", "click-checkboxes-large", "click-checkboxes-transfer"), select
    ),
    "choose-list": choose_option,
    "click-tab": click_tab,
    **dict.fromkeys(("click-tab-2", "click-tab-2-easy", "click-tab-2-medium", "click-tab-2-hard"), find_link),
    "click-collapsible": expand,
    "click-collapsible-2": find_link,
    "focus-text": focus,
    "focus-text-2": focus,
    **dict.fromkeys(("enter-text", "enter-text-2", "enter-text-dynamic"), enter_text),
    "enter-password": enter_password,
    "login-user": log_in,
    "login-user-popup": log_in,
    "read-table": read_table,
    "read-table-2": read_table,
    "search-engine": search,
    "simple-arithmetic": arithmetic,
    "simple-algebra": algebra,
    "find-word": find_word,
    "form-sequence-2": form_sequence,
    "guess-number": guess_number,
    "multi-orderings": search_movies,
    "odd-or-even": odd_or_even,
}
