"""Tasks in the shop."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence

from agentgym_rl.environment.envs.webarena.oracle import Move, choose, click, fill, search, stop
from agentgym_rl.environment.envs.webarena.sites.shop import money
from agentgym_rl.environment.envs.webarena.sites.shop_data import CUSTOMER, CUSTOMER_NAME
from agentgym_rl.environment.envs.webarena.tasks.template import (
    Instance,
    Template,
    added,
    at_url,
    changed,
    column,
    one_of,
    page_has,
    quantity,
    rows_text,
    text_of,
    with_data,
)

SHOP = "__SHOPPING__"


def _products(db: sqlite3.Connection, ids: Sequence[int]) -> list[sqlite3.Row]:
    return [db.execute("SELECT * FROM product WHERE id = ?", (number,)).fetchone() for number in ids]


def _find(product: sqlite3.Row) -> tuple[Move, ...]:
    return search("Find", product["name"]), click("link", product["name"])


def price(db: sqlite3.Connection) -> Iterator[Instance]:
    for p in _products(db, (4, 13, 27, 38, 49, 60)):
        yield Instance(
            {"product": p["name"]}, quantity(f"{p['price'] / 100:.2f}", "$"), (*_find(p), stop(money(p["price"])))
        )


def detail(db: sqlite3.Connection) -> Iterator[Instance]:
    kinds = ("material", "colour", "weight", "material", "colour")
    for p, name in zip(_products(db, (2, 18, 33, 41, 57)), kinds, strict=True):
        value = str(p[name])
        checks = quantity(value, "g") if name == "weight" else one_of(value, column(db, f"SELECT {name} FROM product"))
        yield Instance({"product": p["name"], "detail": name}, checks, (*_find(p), stop(value)))


def cheapest(db: sqlite3.Connection) -> Iterator[Instance]:
    for slug, name in db.execute("SELECT slug, name FROM category ORDER BY id LIMIT 5").fetchall():
        names = column(
            db,
            "SELECT p.name FROM product p JOIN category c ON c.id = p.category_id WHERE slug = ? ORDER BY price",
            slug,
        )
        script = (click("link", name), click("link", "Price, lowest first"), stop(names[0]))
        yield Instance({"category": name}, one_of(names[0], names), script)


def unhappy(db: sqlite3.Connection) -> Iterator[Instance]:
    rows = db.execute(
        "SELECT p.name, count(*) AS num_bad, group_concat(author) AS author FROM review r JOIN product p"
        " ON p.id = r.product_id WHERE rating <= 2 AND status = 'approved'"
        " GROUP BY p.id HAVING num_bad = 1 ORDER BY p.id"
    ).fetchall()[:4]
    for row in rows:
        yield Instance(
            {"product": row["name"]},
            one_of(row["author"], column(db, "SELECT author FROM review")),
            (search("Find", row["name"]), click("link", row["name"]), stop(row["author"])),
        )


def order_total(db: sqlite3.Connection) -> Iterator[Instance]:
    rows = db.execute(
        "SELECT o.id, o.shipping + sum(l.price * l.quantity) AS total FROM orders o JOIN order_line l"
        " ON l.order_id = o.id WHERE customer_id = ? GROUP BY o.id ORDER BY o.id",
        (CUSTOMER,),
    ).fetchall()[1:5]
    for row in rows:
        yield Instance(
            {"order": row["id"]},
            quantity(f"{row['total'] / 100:.2f}", "$"),
            (click("link", "My orders"), stop(money(row["total"]))),
        )


def sorted_listing(db: sqlite3.Connection) -> Iterator[Instance]:
    cases = (("Garden", "price-desc"), ("Lighting", "rating"), ("Textiles", "price"), ("Outdoors", "price-desc"))
    words = {"price-desc": "Price, highest first", "rating": "Best rated", "price": "Price, lowest first"}
    for category, key in cases:
        yield Instance(
            {"category": category, "order": words[key].lower()},
            at_url(f"{SHOP}/category/{category.lower()}?sort={key}"),
            (click("link", category), click("link", words[key]), stop()),
        )


def into_basket(db: sqlite3.Connection) -> Iterator[Instance]:
    for p, units in zip(_products(db, (6, 15, 29, 44, 52, 64)), (3, 2, 3, 2, 1, 2), strict=True):
        fields = "[...document.querySelectorAll('[name=quantity]:not([type=hidden])')]"
        listed = f"{fields}.map(field => field.value + ' ' + field.ariaLabel).join(', ')"
        checks = with_data(
            page_has((f"{SHOP}/basket", listed, f"{units} Quantity of {p['name']}")),
            added("basket", product_id=p["id"], quantity=units),
        )
        amount = (fill("Quantity", str(units)),) if units > 1 else ()
        script = (*_find(p), *amount, click("button", "Add to basket"), stop())
        yield Instance({"product": p["name"], "quantity": units}, checks, script)


def wish(db: sqlite3.Connection) -> Iterator[Instance]:
    for p in _products(db, (9, 21, 36, 47, 58)):
        yield Instance(
            {"product": p["name"]},
            with_data(
                page_has((f"{SHOP}/wishlist", text_of("#wishlist"), [p["name"]])), added("wishlist", product_id=p["id"])
            ),
            (*_find(p), click("button", "Add to wish list"), stop()),
        )


def buy(db: sqlite3.Connection) -> Iterator[Instance]:
    shipping_options = (("express", "Express, 8.90", 890), ("pickup", "Pick-up, free", 0))
    me = db.execute("SELECT * FROM customer WHERE id = ?", (CUSTOMER,)).fetchone()
    home = f"{me['street']}, {me['city']}"
    for index, p in enumerate(_products(db, (1, 19, 24, 39, 55))):
        shipping, label, cost = shipping_options[index % 2]
        line = f"{p['name']}; {money(p['price'])}; 1"
        checks = with_data(
            page_has(
                (f"{SHOP}/orders/latest", rows_text("#lines"), line),
                (f"{SHOP}/orders/latest", text_of("#shipping"), money(cost)),
            ),
            added("orders", customer_id=CUSTOMER, status="pending", shipping=cost, address=home),
            added("order_line", product_id=p["id"], price=p["price"], quantity=1),
            changed("product", p["id"], quantity=p["quantity"] - 1),
        )
        script = (
            *_find(p),
            click("button", "Add to basket"),
            click("link", "Basket (1)"),
            click("link", "Proceed to checkout"),
            click("radio", label),
            click("button", "Place order"),
            stop(),
        )
        yield Instance({"product": p["name"], "way": shipping}, checks, script)


def review(db: sqlite3.Connection) -> Iterator[Instance]:
    titles = ("Better than the old one", "Not for me", "Sturdy and simple", "Fine for the price")
    for p, title, stars in zip(_products(db, (5, 22, 35, 50)), titles, (5, 2, 4, 3), strict=True):
        url = f"{SHOP}/product/{p['id']}"
        first = text_of("article")
        checks = with_data(
            page_has((url, first, [title, f"{stars} of 5 stars, by {CUSTOMER_NAME}"])),
            added("review", product_id=p["id"], author=CUSTOMER_NAME, rating=stars, title=title, status="approved"),
        )
        script = (
            *_find(p),
            click("link", "Write a review"),
            click("radio", f"{stars} of 5"),
            fill("Title", title),
            click("button", "Submit review"),
            stop(),
        )
        yield Instance({"product": p["name"], "title": title, "stars": stars}, checks, script)


def account(db: sqlite3.Connection) -> Iterator[Instance]:
    cases = (
        ("phone number", "Phone", "phone", "0441 555 0199"),
        ("email address", "Email", "email", "nora@lindqvist.test"),
        ("street and number", "Street and number", "street", "7 Lighthouse Row"),
        ("city", "City", "city", "Greyhaven"),
    )
    for name, label, key, value in cases:
        yield Instance(
            {"what": name, "value": value},
            with_data(
                page_has((f"{SHOP}/account", f"document.querySelector('[name={key}]').value", value)),
                changed("customer", CUSTOMER, **{key: value}),
            ),
            (click("link", "My account"), fill(label, value), click("button", "Save changes"), stop()),
        )


def newsletter(db: sqlite3.Connection) -> list[Instance]:
    field = "document.querySelector('[name=newsletter]').value"
    script = (
        click("link", "My account"),
        choose("Newsletter", "Yes"),
        click("button", "Save changes"),
        stop(),
    )
    checks = with_data(page_has((f"{SHOP}/account", field, "1")), changed("customer", CUSTOMER, newsletter=1))
    return [Instance({}, checks, script)]


TEMPLATES = (
    Template("shopping", "What is the price of the {{product}}?", price),
    Template("shopping", "What is the {{detail}} of the {{product}}?", detail),
    Template("shopping", "Which product in the {{category}} category is the cheapest?", cheapest),
    Template("shopping", "Who wrote the only review of the {{product}} with one or two stars?", unhappy),
    Template("shopping", "What was the total of my order {{order}}, shipping included?", order_total),
    Template("shopping", "Show me the {{category}} category, sorted by {{order}}.", sorted_listing),
    Template("shopping", "Put {{quantity}} of the {{product}} into my basket.", into_basket, True),
    Template("shopping", "Add the {{product}} to my wish list.", wish, True),
    Template("shopping", "Order one {{product}} with {{way}} shipping.", buy, True),
    Template("shopping", 'Review the {{product}} with {{stars}} stars and the title "{{title}}".', review, True),
    Template("shopping", 'Change the {{what}} in my account to "{{value}}".', account, True),
    Template("shopping", "Subscribe me to the newsletter.", newsletter, True),
)
