"""Nearly right outcomes of every template of the embedded tasks. None of them may succeed."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest

from agentgym_rl.environment.envs.webarena.embedded_stage import EmbeddedStage
from agentgym_rl.environment.envs.webarena.evaluators import evaluate
from agentgym_rl.environment.envs.webarena.sites.server import site_server
from agentgym_rl.environment.envs.webarena.sites.store import fresh_database
from agentgym_rl.environment.envs.webarena.tasks.embedded import TEMPLATES, problems
from agentgym_rl.environment.envs.webarena.tasks.task_config import TaskConfig, read_task

GRADED_BY_CURRENT_PAGE = "Show me the way from {{start}} to {{end}} by {{mode}}."
"""The only template graded by the agent's page alone. Its wrong outcome is tested in tests/e2e."""


def config_of(item: int) -> TaskConfig:
    return read_task(problems()[item].config, EmbeddedStage.addresses)


def items_graded_by(kind: str) -> list[int]:
    return [item for item in range(len(problems())) if kind in config_of(item).evaluation["eval_types"]]


# --- questions -------------------------------------------------------------------------------------------------------


def is_accepted(item: int, answer: str) -> bool:
    return evaluate(config_of(item), answer, "", lambda _: pytest.fail("no page"), lambda _: pytest.fail("no data"))


def wrong_answers(task: TaskConfig) -> Iterator[str]:
    """Yield wrong answers to any question: other numbers, other choices, several choices, nothing."""
    yield from ("", "unknown", "0")
    ((approach, wanted),) = task.evaluation["reference_answers"].items()
    if approach == "one_of":
        right = wanted["right"]
        others = [each for each in wanted["choices"] if each != right and each.lower() not in task.intent.lower()]
        assert len(others) > 1
        yield from (*others, f"{right} or {others[0]}", ", ".join(wanted["choices"]))
        yield from (f"x{right}", f"{right}x", f"{right}.x", f"{right}@{right}", f"{right[:-1]}")
    else:
        assert approach in ("number", "number_only")
        value = wanted["value"] if approach == "number" else wanted
        yield from (f"1{value}", f"{value}1", f"1,{value}", f"-{value}", f"{value[:-1]}9{value[-1]}")
        yield from (f"{value} or 3", f"{value} km", f"€{value}", f"{value} hours", f"2{value} m", f"{value}-9")
        yield f"{value}1.00" if "." in value else f"{value}.5"


def test_wrong_answers_fail() -> None:
    templates = set()
    for item in items_graded_by("string_match"):
        task = config_of(item)
        assert is_accepted(item, problems()[item].script[-1].text), task.intent
        accepted = [answer for answer in wrong_answers(task) if is_accepted(item, answer)]
        assert accepted == [], task.intent
        templates.add(problems()[item].config["intent_template_id"])
    assert len(templates) == 23


@pytest.mark.parametrize(
    ("item", "right"),
    [
        (0, "7.99 | $7.99 | 7.99 dollars | The kettle costs **$7.99**. | US$7.99 | Price:$7.99 | “$7.99”"),
        (0, "$ 7.99 | 7.99$ | The price is: 7.99"),
        (0, "Everly Stovetop Kettle 7.99 | Everly Stovetop Kettle – $7.99 | USD 7.99 | 7.99 US dollars"),
        (2, "String Lights (8 m): $105.99 | The Brightwater String Lights 8 m cost $105.99."),
        (16, "469.95 | $469.95 | Order 4018 came to $469.95 | order #4018: $469.95 | 469.95 shipping included"),
        (151, "450 | 450 m | 450m | It is 450 metres on foot. | 450 m from Maritime Museum to Blue Heron Cafe"),
        (152, "(1350 m) | 1,350 m | 1350.0 | The distance is 1350 m; it takes a while."),
        (233, "18 | 18 min | about 18 minutes | 18 min. | an 18-minute walk | It takes 18 minutes by foot"),
        (7, "1350 | 1350 g | 1350 grams | It weighs 1,350 g."),
        (48, '82 | 82. | "82" | **82**'),
        (5, "cotton | Cotton. | The Cast Iron Skillet is made of cotton"),
        (43, "It is elif.castell@mail.test."),
        (44, "0407 402 1966 | 0407-402-1966 | (0407) 402 1966 | 04074021966 | Phone: 0407 402 1966."),
        (84, "una.ashworth | @una.ashworth | It was @una.ashworth."),
        (89, 'The best rated comment on "Cold brew ratio that is not syrup" is by viktor.doyle'),
        (118, "Reporter | carlay is a reporter"),
        (162, "10:00-16:00 | 10:00 - 16:00 | 10:00 – 16:00 | 10:00–16:00 | 10:00 to 16:00 | Hours: 10:00-16:00."),
        (165, "Quay Street | 5 Quay Street | 5 Quay Street, corner of Gorse Avenue, Port Ellery"),
        (166, "Quay Street | 12 Quay Street"),
        (235, "Chapel Street | 73 Chapel Street"),
        (168, "Nearest to Grand Harbour Hotel is Blue Heron Cafe | Blue Heron Cafe 300 m | Blue Heron Cafe (300 m)"),
    ],
)  # fmt: skip
def test_right_answers_in_sentences_succeed(item: int, right: str) -> None:
    assert [answer for answer in right.split(" | ") if not is_accepted(item, answer)] == []


@pytest.mark.parametrize(
    ("item", "wrong"),
    [
        (0, "$137.99 | $107.99 | 7.999 | $7.99 - $9.99 | minus 7.99 | - 7.99 | -$7.99 | $-7.99 | −7.99 | 7.99%"),
        (0, ".7.99 | 7.99/kg"),
        (0, "7.99 thousand | 7.99 million dollars | $7.99 million | between 7.99 and ten | not $7.99 | It isn't $7.99"),
        (0, "7.99k | 7.99 euros | 7.99 cents | €7.99 | less than 7.99 | up to $7.99 | 7.99 or so, or ten | #7.99"),
        (0, "I do not know the price, 7.99 | Price: - 7.99 | negative 7.99 | 7.99 £ | x7.99 | over 7.99 | 7.99 m"),
        (2, "105.99 m | 8 m | (105.99 m): $8"),
        (16, "1469.95 | $1,469.95 | 4018 | Order 4019: $469.95"),
        (151, "1450 | 4500 | 0.450 | .450 | 450 km | 450 m or 600 m | 450 ft | 450 yd | 450 kms | 450 blocks"),
        (151, "450 foot | $450 | 450 minutes | 450-foot | 450² | 450 (km) | 450+"),
        (233, "118 | 180 | 18 h | 18:30 | 1 or 18 | 18 weeks | 18-week | 18 seconds | half 18"),
        (7, "350 | 13500 | 1350 kg | $1350 | 1350 ounces | 1350 tonnes | 1350 m | 1350 lbs"),
        (48, "82 or 83 | 82.5 | 8.2 | -82 | $82 | 82 82 | not 82 | 82%"),
        (5, "cottonwood | cotton and oak | iron | not cotton | no cotton | non-cotton"),
        (43, "xelif.castell@mail.test | elif.castell@mail.test.uk | x@elif.castell@mail.test"),
        (44, "0407 402 19660 | 10407 402 1966 | 0407 402 1966 7 | 1 0407 402 1966 | 0407-402-19661 | 1-0407-402-1966"),
        (84, "not una.ashworth | x@una.ashworth | una.ashworth@mail.test | It wasn't una.ashworth"),
        (89, "not viktor.doyle"),
        (118, "Reporter or Guest | Reporters | Developer"),
        (162, "10:00-16:001 | 10:00 - 18:00 | 10:00 | 110:00-16:00 | 10:00-16:00 and 12:00-23:00"),
        (165, "Abbey Street | 5 Quay Street or 7 Mill Street | Quay Streets | Old-Quay Street"),
        (168, "Cafe Meridian | Blue Heron Cafe or Cafe Meridian"),
    ],
)  # fmt: skip
def test_wrong_answers_in_sentences_fail(item: int, wrong: str) -> None:
    assert [answer for answer in wrong.split(" | ") if is_accepted(item, answer)] == []


# --- pages to find ---------------------------------------------------------------------------------------------------


def succeeds_at(item: int, url: str) -> bool:
    return evaluate(config_of(item), "", url, lambda _: pytest.fail("no page"), lambda _: pytest.fail("no data"))


def wrong_pages(url: str) -> Iterator[str]:
    split = urlsplit(url)
    bare, query = f"{split.scheme}://{split.netloc}{split.path}", parse_qs(split.query)
    yield from (f"{split.scheme}://{split.netloc}/", "about:blank", f"http://evil.test/{url}")
    yield from (f"{bare}0?{split.query}", f"{bare}/edit?{split.query}", f"{bare[:-1]}?{split.query}")
    yield from (f"{url}{'&' if query else '?'}{more}" for more in ("page=2", "q=a", "state=closed", "status=complete"))
    for key in query:
        others = {name: values[0] for name, values in query.items() if name != key}
        yield from (f"{bare}?{urlencode(others)}", f"{bare}?{urlencode({**others, key: query[key][0] + '0'})}")


def test_wrong_pages_fail() -> None:
    templates = set()
    for item in items_graded_by("url_match"):
        task = config_of(item)
        url = task.evaluation["reference_url"]
        assert succeeds_at(item, url)
        assert succeeds_at(item, f"{url}{'&' if '?' in url else '?'}page=1")
        assert [page for page in wrong_pages(url) if succeeds_at(item, page)] == []
        templates.add(problems()[item].config["intent_template_id"])
    assert len(templates) == 5
    assert succeeds_at(211, "http://forum.test/f/gardening/5")
    assert not succeeds_at(211, "http://forum.test/f/gardening/50")


# --- changes ---------------------------------------------------------------------------------------------------------

Forms = tuple[str, ...]
"""Forms submitted in order: `shop.test/product/6/basket?quantity=3`."""
UNWANTED_CHANGE = "map.test/place/9/save?note=extra"
"""A change that no task wants."""


def form(path: str, **values: object) -> str:
    return f"{path}?{urlencode(values)}"


def row_form(path: str, table: str, number: int, columns: str, **changes: object) -> str:
    """Return a form with a row's values and the given changes, as the browser submits it."""
    db = fresh_database()
    row = db.execute(f"SELECT * FROM {table} WHERE id = ?", (number,)).fetchone()
    values = {column: row[column] for column in columns.split()}
    if table == "product":
        values["price"] = f"{row['price'] / 100:.2f}"
    db.close()
    return form(path, **{**values, **changes})


def product(number: int, **changes: object) -> str:
    path = f"admin.test/products/{number}"
    return row_form(path, "product", number, "name price quantity enabled description", **changes)


def order(number: int, **changes: object) -> str:
    return row_form(f"admin.test/orders/{number}", "orders", number, "status address", **changes)


def customer(number: int, **changes: object) -> str:
    return row_form(f"admin.test/customers/{number}", "customer", number, "kind phone", **changes)


def account(**changes: object) -> str:
    return row_form("shop.test/account", "customer", 1, "email phone street city newsletter", **changes)


HOME = "94 Orchard Row, Port Ellery"


def basket(number: int, quantity: int = 1) -> str:
    return form(f"shop.test/product/{number}/basket", quantity=quantity)


def checkout(shipping: str = "express", address: str = HOME) -> str:
    return form("shop.test/checkout", shipping=shipping, address=address)


def stars(number: int, rating: int = 5, title: str = "Better than the old one") -> str:
    return form(f"shop.test/product/{number}/review", rating=rating, title=title, body="")


def note(number: int, body: str = "Customer asked for gift wrapping") -> str:
    return form(f"admin.test/orders/{number}/note", body=body)


def comment(post: int, body: str = "Crushed eggshells helped here.") -> str:
    return form(f"forum.test/f/gardening/{post}/comment", body=body)


def post(community: str = "gardening", title: str = "Moving a rhubarb plant", body: str = "") -> str:
    body = body or "It is ten years old and in the way."
    return form("forum.test/submit", community=community, title=title, body=body)


def issue(
    project: str = "nora/tidewatch", title: str = "Wrong tide at new moon", label: str = "bug", to: str = ""
) -> str:
    return form(f"code.test/{project}/-/issues/new", title=title, label=label, assignee=to, body="")


def assign(number: int, to: str, label: str = "question") -> str:
    return form(f"code.test/nora/tidewatch/-/issues/{number}/assign", assignee=to, label=label)


def merge(number: int, state: str = "merged") -> str:
    return form(f"code.test/nora/tidewatch/-/merge_requests/{number}/state", state=state)


def remark(number: int, body: str = "Looks good to me.") -> str:
    return form(f"code.test/openferry/router/-/merge_requests/{number}/comment", body=body)


def invite(user: str = "priyaz", role: str = "Developer", project: str = "tidewatch") -> str:
    return form(f"code.test/nora/{project}/-/members", username=user, role=role)


def project(name: str = "bird-notes", visibility: str = "public") -> str:
    return form("code.test/projects/new", name=name, visibility=visibility, description="")


def biography(text: str = "Night trains and strong coffee.") -> str:
    return form("forum.test/bio", bio=text)


def status(text: str = "On holiday until Monday") -> str:
    return form("code.test/profile", status=text)


def save(number: int, text: str = "rainy day") -> str:
    return form(f"map.test/place/{number}/save", note=text)


CHANGES: dict[str, tuple[Forms, tuple[Forms, ...]]] = {
    "Put 3 of the Corvus Salad Spinner into my basket.": (
        (basket(6, 3),),
        ((basket(6, 2),), (basket(6, 30),), (basket(7, 3),), (basket(6, 3), basket(7)), (basket(6, 3), basket(6))),
    ),
    "Add the Fennick Measuring Cup to my wish list.": (
        ("shop.test/product/9/wish",),
        (("shop.test/product/10/wish",), ("shop.test/product/9/wish", "shop.test/product/10/wish"), (basket(9),)),
    ),
    "Order one Brightwater Chef Knife 20 cm with express shipping.": (
        (basket(1), checkout()),
        (
            (basket(1, 2), checkout()),
            (basket(1), basket(2), checkout()),
            (basket(2), checkout()),
            (basket(1), checkout("standard")),
            (basket(1), checkout(address="1 Elsewhere, Norvale")),
            (basket(1), checkout(), basket(1), checkout()),
            (basket(1), checkout(), "shop.test/orders/4097/cancel"),
            (basket(1),),
        ),
    ),
    'Review the Dunmore Mortar and Pestle with 5 stars and the title "Better than the old one".': (
        (stars(5),),
        ((stars(5, 4),), (stars(5, title="Better"),), (stars(6),), (stars(5), stars(5)), (stars(5), stars(6))),
    ),
    'Change the phone number in my account to "0441 555 0199".': (
        (account(phone="0441 555 0199"),),
        (
            (account(phone="0441 555 01990"),),
            (account(phone="0441 555 0199", city="Norvale"),),
            (account(phone="0441 555 0199", newsletter=1),),
            (account(street="0441 555 0199"),),
        ),
    ),
    "Subscribe me to the newsletter.": (
        (account(newsletter=1),),
        ((account(),), (account(newsletter=1, phone="1"),), (account(newsletter=1), account())),
    ),
    "Set the price of the Brightwater Pepper Mill to 24.50.": (
        (product(7, price="24.5"),),
        (
            (product(7, price="124.50"),),
            (product(7, price="2450"),),
            (product(7, price="24.50", quantity=6),),
            (product(8, price="24.50"),),
            (product(7, price="24.50"), product(8, price="24.50")),
        ),
    ),
    "We received 25 more units of SKU HH-KI-110: update the stock.": (
        (product(10, quantity=46),),
        ((product(10, quantity=25),), (product(10, quantity=460),), (product(11, quantity=46),)),
    ),
    "Take the Corvus Digital Scale out of the shop by disabling it.": (
        (product(12, enabled=0),),
        ((product(13, enabled=0),), (product(12, quantity=0),), (product(12, enabled=0), product(13, enabled=0))),
    ),
    "Change the status of order 4020 to complete.": (
        (order(4020, status="complete"),),
        (
            (order(4020, status="cancelled"),),
            (order(4089, status="complete"),),
            (order(4020, status="complete", address="x"),),
        ),
    ),
    'Change the address of order 4090 to "3 Abbey Close, Norvale".': (
        (order(4090, address="3 Abbey Close, Norvale"),),
        (
            (order(4090, address="33 Abbey Close, Norvale"),),
            (order(4089, address="3 Abbey Close, Norvale"),),
            (order(4090, address="3 Abbey Close, Norvale", status="complete"),),
        ),
    ),
    'Add the comment "Customer asked for gift wrapping" to order 4088.': (
        (note(4088),),
        ((note(4089),), (note(4088), note(4088)), (note(4088, "Customer asked for gift wrapping twice"),)),
    ),
    "Approve the waiting review of the Everly Letter Tray by Wanda Grover.": (
        ("admin.test/reviews/221?verdict=approved",),
        (
            ("admin.test/reviews/221?verdict=rejected",),
            ("admin.test/reviews/222?verdict=approved",),
            ("admin.test/reviews/221?verdict=approved", "admin.test/reviews/222?verdict=approved"),
        ),
    ),
    "Move the customer Goran Quist to the group retail.": (
        (customer(6, kind="retail"),),
        ((customer(6),), (customer(13, kind="wholesale"),), (customer(6, kind="retail", phone="1"),)),
    ),
    'Comment "Crushed eggshells helped here." on the post "Slugs ate all my lettuce".': (
        (comment(2),),
        ((comment(1),), (comment(2), comment(2)), (comment(2, "Crushed eggshells helped here. Or not."),)),
    ),
    'Upvote the post "My compost heap reached 62 degrees".': (
        ("forum.test/vote/post/3?vote=1",),
        (
            ("forum.test/vote/post/3?vote=-1",),
            ("forum.test/vote/post/4?vote=1",),
            ("forum.test/vote/comment/3?vote=1",),
            ("forum.test/vote/post/3?vote=1", "forum.test/vote/post/3?vote=0"),
        ),
    ),
    'Post in gardening with the title "Moving a rhubarb plant" and the body "It is ten years old and in the way.".': (
        (post(),),
        ((post("cycling"),), (post(title="Moving a plant"),), (post(body="Old."),), (post(), post())),
    ),
    "Subscribe to the community cycling.": (
        ("forum.test/f/cycling/subscribe",),
        (
            ("forum.test/f/astronomy/subscribe",),
            ("forum.test/f/cycling/subscribe", "forum.test/f/cycling/subscribe"),
            ("forum.test/f/cycling/subscribe", "forum.test/f/astronomy/subscribe"),
        ),
    ),
    'Change my biography to "Night trains and strong coffee.".': (
        (biography(),),
        ((biography("Night trains"),), (biography("Night trains and strong coffee. x"),)),
    ),
    'Open an issue "Wrong tide at new moon" in nora/tidewatch with the label "bug".': (
        (issue(),),
        (
            (issue(label="feature"),),
            (issue("nora/dotfiles"),),
            (issue(title="Wrong tide at new moon 2"),),
            (issue(to="larsb"),),
            (issue(), issue()),
        ),
    ),
    'Close the issue "Explain the configuration file in the README" in nora/tidewatch.': (
        ("code.test/nora/tidewatch/-/issues/4/state",),
        (
            ("code.test/nora/tidewatch/-/issues/1/state",),
            ("code.test/nora/dotfiles/-/issues/4/state",),
            ("code.test/nora/tidewatch/-/issues/4/state", "code.test/nora/tidewatch/-/issues/4/state"),
        ),
    ),
    'Assign the issue "Which versions are supported?" in nora/tidewatch to larsb.': (
        (assign(1, "larsb"),),
        ((assign(1, "hannad"),), (assign(1, "larsb", "bug"),), (assign(2, "larsb", "help wanted"),), (assign(1, ""),)),
    ),
    'Merge the merge request "Retry when the server is busy" in nora/tidewatch.': (
        (merge(1),),
        ((merge(1, "closed"),), (merge(2),), (merge(1), merge(2))),
    ),
    'Comment "Looks good to me." on the merge request "Speed up start by loading lazily" in openferry/router.': (
        (remark(2),),
        ((remark(1),), (remark(2, "Looks good to me"),), (remark(2), remark(2))),
    ),
    "Invite priyaz to nora/tidewatch as Developer.": (
        (invite(),),
        ((invite(role="Guest"),), (invite("carlay"),), (invite(project="dotfiles"),), (invite(), invite("carlay"))),
    ),
    "Star the project lantern/lantern-ui.": (
        ("code.test/lantern/lantern-ui/-/star",),
        (
            ("code.test/lantern/lantern-docs/-/star",),
            ("code.test/lantern/lantern-ui/-/star", "code.test/lantern/lantern-ui/-/star"),
        ),
    ),
    'Create a project named "bird-notes" with the visibility public.': (
        (project(),),
        ((project(visibility="private"),), (project("bird-notes2"),), (project(), project("bird-notes2"))),
    ),
    'Set my status to "On holiday until Monday".': (
        (status(),),
        ((status("On holiday"),), (status("On holiday until Monday 2"),)),
    ),
    'Save Maritime Museum with the note "rainy day".': (
        (save(5),),
        ((save(5, "rainy days"),), (save(5, ""),), (save(6),), (save(5), save(6))),
    ),
}  # fmt: skip
"""Intent of a template's first task -> forms that solve it, and several lists of forms that nearly do."""


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{site_server().port}", verify=False) as http_client:
        yield http_client


def outcome(client: httpx.Client, item: int, forms: Forms) -> bool:
    """Return whether the sites' data shows success after submitting only these forms."""
    stage = EmbeddedStage()
    task, options = stage.begin(item)
    cookie = f"episode={options['cookies'][0]['value']}"
    try:
        for each in forms:
            url = urlsplit(f"http://{each}")
            fields = {key: values[0] for key, values in parse_qs(url.query).items()}
            response = client.post(url.path, data=fields, headers={"Host": url.netloc, "Cookie": cookie})
            assert response.status_code == 303, (each, response.text)
        return evaluate(task, "", "", lambda _: True, stage.only_changed)
    finally:
        stage.end()


@pytest.mark.parametrize("intent", CHANGES)
def test_wrong_changes_fail(client: httpx.Client, intent: str) -> None:
    (item,) = [item for item, problem in enumerate(problems()) if problem.config["intent"] == intent]
    right, wrong = CHANGES[intent]
    assert outcome(client, item, right)
    assert [forms for forms in (*wrong, (), (*right, UNWANTED_CHANGE)) if outcome(client, item, forms)] == []


def test_every_template_has_a_wrong_outcome() -> None:
    """Check CHANGES for each template with changes. Other tests cover all questions and pages."""
    kinds = {problem.config["intent"]: problem.config["intent_template_id"] for problem in problems()}
    covered = {kinds[intent] for intent in CHANGES}
    for number, template in enumerate(TEMPLATES):
        graded = {kind for item in items_of(number) for kind in config_of(item).evaluation["eval_types"]}
        if template.changes:
            assert graded == {"changed_data", "program_html"}
            assert number in covered, template.text
        elif template.text != GRADED_BY_CURRENT_PAGE:
            assert graded in ({"string_match"}, {"url_match"})
    assert len(covered) == len(CHANGES)


def items_of(template: int) -> list[int]:
    return [item for item, problem in enumerate(problems()) if problem.config["intent_template_id"] == template]


# --- sites that fail -------------------------------------------------------------------------------------------------


def test_failing_site_shows_an_error_and_changes_nothing(client: httpx.Client) -> None:
    stage = EmbeddedStage()
    _, options = stage.begin(0)
    token = options["cookies"][0]["value"]
    store = site_server().episodes.get(token)
    assert store is not None
    headers = {"Host": "shop.test", "Cookie": f"episode={token}"}

    def post(path: str, **fields: object) -> httpx.Response:
        return client.post(path, data=fields, headers=headers)

    def get(path: str) -> httpx.Response:
        return client.get(path, headers=headers)

    assert post("/product/1/basket", quantity=1).status_code == 303
    store.db.execute("DROP TABLE order_line")  # placing an order fails halfway
    before = store.db.serialize()
    failed = post("/checkout", shipping="express", address=HOME)
    assert failed.status_code == 500
    assert "<h1>Something went wrong on our side</h1><p>Nothing was changed.</p>" in failed.text
    assert store.db.serialize() == before
    assert get("/account").status_code == 200  # the other pages still work
    for missing in (get("/nowhere"), get("/product/999"), post("/account/x")):
        assert (missing.status_code, "<h1>Page not found</h1>" in missing.text) == (404, True)
    assert post("/").status_code == 405
    stage.end()
