"""WebArena's actions: parsing, refusals, and hostile texts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym_rl.environment.envs.webarena.actions import FORMS, MAX_CHARS, Action, Refused, key_combination, parse
from agentgym_rl.environment.envs.webarena.addresses import address, on_sites


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("click [12]", Action("click", 12)),
        ("click 12", Action("click", 12)),
        ("  `click [ 12 ]` ", Action("click", 12)),
        ("```click [12]```", Action("click", 12)),
        ("hover [3]", Action("hover", 3)),
        ("click [13] link 'Outdoors'", Action("click", 13)),
        ('hover [7] "Nora\'s shop"', Action("hover", 7)),
        ("click 13 link 'Outdoors'", Action("click", 13)),
        ("type [7] [blue lamp]", Action("type", 7, "blue lamp", True)),
        ("type [7] [blue lamp] [0]", Action("type", 7, "blue lamp", False)),
        ("type [7] [blue lamp] [press_enter_after=1]", Action("type", 7, "blue lamp", True)),
        ("type [7] [a [bracket] inside] [0]", Action("type", 7, "a [bracket] inside", False)),
        ("type [7] [two\nlines] [0]", Action("type", 7, "two\nlines", False)),
        ("type [7] []", Action("type", 7, "", True)),
        ("press [Ctrl+a]", Action("press", text="Control+a")),
        ("press [enter]", Action("press", text="Enter")),
        ("press [+]", Action("press", text="+")),
        ("scroll [down]", Action("scroll", text="down")),
        ("scroll up", Action("scroll", text="up")),
        ("scroll [direction=down]", Action("scroll", text="down")),
        ("new_tab", Action("new_tab")),
        ("tab_focus [1]", Action("tab_focus", 1)),
        ("close_tab", Action("close_tab")),
        ("goto [http://shop.test/a?b=c]", Action("goto", text="http://shop.test/a?b=c")),
        ("go_back", Action("go_back")),
        ("go_forward []", Action("go_forward")),
        ("stop [$12.50]", Action("stop", text="$12.50")),
        ("stop [[1] and [2]]", Action("stop", text="[1] and [2]")),
        ("stop", Action("stop")),
        ("stop []", Action("stop")),
    ],
)
def test_valid_actions_are_parsed(text: str, action: Action) -> None:
    assert parse(text) == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        "click",
        "click [abc]",
        "click [1] and click [2]",
        "click [1]\nclick [2]",
        "click [1], click 2",
        "click [1] and click 2",
        "click [1] then stop",
        "click [1] link 'a' then click 'b'",
        "click [1] link 'a'\nclick 2",
        "click [1]\u2028'a'",
        "clicking [1]",
        "CLICK [1]",
        "click [99999999999]",
        "type [7]",
        "type [7] [\x1b[31m]",
        "type [7] [\ud800]",
        "press [F13+Q]",
        "press [ctrl+alt+entr]",
        "press []",
        "scroll [left]",
        "tab_focus [-1]",
        "goto []",
        "goto [two words]",
        "stop [never closed",
        "I think I should click [5]",
        "__import__('os').system('true')",
        "x" * (MAX_CHARS + 1),
        "stop [" + "x" * MAX_CHARS + "]",
    ],
)
def test_invalid_actions_are_refused_with_a_message(text: str) -> None:
    with pytest.raises(Refused) as refusal:
        parse(text)
    message = str(refusal.value)
    assert 10 < len(message) < 600
    assert message.isprintable()


def test_refusal_shows_the_correct_form() -> None:
    with pytest.raises(Refused, match=r"Write it as: type \[id\] \[content\]"):
        parse("type 5 hello")
    with pytest.raises(Refused, match="Actions: click") as refusal:
        parse("dance")
    assert all(form in str(refusal.value) for form in FORMS)


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(max_size=300), st.from_regex(r"(click|type|press|goto|stop|scroll) ?\[.{0,30}\]?.{0,30}")))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        message = parse(text).kind
    except Refused as refusal:
        message = str(refusal)
    assert message in {form.split()[0] for form in FORMS} or 10 < len(message) < 600


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 999_999), st.text(st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc"]), max_size=80))
def test_typed_text_is_unchanged(number: int, content: str) -> None:
    assert parse(f"type [{number}] [{content}] [0]") == Action("type", number, content, False)


def test_key_combinations() -> None:
    assert key_combination("ctrl+shift+ArrowLeft") == "Control+Shift+ArrowLeft"
    assert key_combination("cmd+c") == "Meta+c"
    with pytest.raises(Refused, match="Modifiers are"):
        key_combination("hyper+a")


# --- addresses -------------------------------------------------------------------------------------------------------

SITES = ("http://shop.test", "https://code.test:8443/", "")


def goto_url(text: str) -> str:
    """Return the address that `goto [text]` opens."""
    return address(parse(f"goto [{text}]").text, lambda url: on_sites(url, SITES))


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("shop.test/a", "http://shop.test/a"),
        ("http://shop.test:80/ü?a=b#c", "http://shop.test:80/ü?a=b#c"),
        ("https://code.test:8443", "https://code.test:8443"),
    ],
)
def test_address_of_a_site_is_accepted(text: str, url: str) -> None:
    assert goto_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        *("http://[::1]", "[shop.test]", "http://shop.test℀/", "http://shop.test/\ud800", "http://[shop.test]:80/"),
        *("http://shop.test:99999", "http://shop.test:x/", "http://shop.test:-1", "http://a@shop.test/", "http://"),
        *("file:///etc/passwd", "javascript://shop.test/%0aalert(1)", "https://code.test", "http://shop.test.evil/"),
        *("//shop.test", "http:///shop.test", "http://shop.test\x00/", "http://shop.test/\u202e", "://", "http://%5b"),
    ],
)
def test_other_addresses_are_refused_with_a_message(text: str) -> None:
    with pytest.raises(Refused, match="outside the sites of this task") as refusal:
        goto_url(text)
    assert str(refusal.value).isprintable()


HOSTILE = st.one_of(
    st.text(st.sampled_from("[]:/@?#%.\\\ud800\u2100\uff0f\x00\u202e htps shop.test0189ü"), min_size=1, max_size=60),
    st.text(st.characters(), min_size=1, max_size=60),
    st.tuples(st.sampled_from(("http://", "https://", "http://shop.test", "http://[", "//")), st.text(max_size=40)).map(
        "".join
    ),
)


@settings(max_examples=600, deadline=None)
@given(HOSTILE)
def test_any_address_is_on_a_site_or_refused(text: str) -> None:
    try:
        url = goto_url(text)
    except Refused:
        return
    assert url.startswith(("http://", "https://"))
    assert on_sites(url, SITES)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([form.split()[0] for form in FORMS]), st.lists(HOSTILE, max_size=3))
def test_hostile_arguments_are_parsed_or_refused(kind: str, arguments: list[str]) -> None:
    try:
        action = parse(" ".join([kind, *(f"[{argument}]" for argument in arguments)]))
    except Refused:
        return
    assert action.kind == kind
