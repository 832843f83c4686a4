"""Tasks in the shop's administration."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence

from agentgym_rl.environment.envs.webarena.oracle import Move, choose, click, fill, search, stop
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

ADMIN = "__SHOPPING_ADMIN__"
SHOP = "__SHOPPING__"


def _products(db: sqlite3.Connection, ids: Sequence[int]) -> list[sqlite3.Row]:
    return [db.execute("SELECT * FROM product WHERE id = ?", (number,)).fetchone() for number in ids]


def _product(p: sqlite3.Row) -> tuple[Move, ...]:
    return click("link", "Products"), search("Name or SKU", p["sku"]), click("link", p["name"])


def _order(number: int) -> tuple[Move, ...]:
    return click("link", "Orders"), search("Customer or number", str(number)), click("link", f"Order {number}")


def bestseller(db: sqlite3.Connection) -> Iterator[Instance]:
    rows = db.execute(
        "SELECT p.name, sum(l.quantity) AS sold FROM order_line l JOIN product p ON p.id = l.product_id"
        " JOIN orders o ON o.id = l.order_id WHERE o.status != 'cancelled' GROUP BY p.id"
        " ORDER BY sold DESC, p.id LIMIT 6"
    ).fetchall()
    amounts = [row["sold"] for row in rows]
    names = column(db, "SELECT name FROM product")
    ranks = ("best", "second best", "third best", "fourth best", "fifth best")
    for rank, row in zip(ranks, rows, strict=False):
        if amounts.count(row["sold"]) == 1:  # a tie would be ambiguous
            yield Instance({"rank": rank}, one_of(row["name"], names), (stop(row["name"]),))


def contact(db: sqlite3.Connection) -> Iterator[Instance]:
    for number, attribute in ((4, "email address"), (9, "phone number"), (15, "email address"), (22, "phone number")):
        row = db.execute("SELECT * FROM customer WHERE id = ?", (number,)).fetchone()
        kind = "email" if attribute == "email address" else "phone"
        value = row[kind]
        checks = one_of(value, column(db, f"SELECT {kind} FROM customer"))
        script = (click("link", "Customers"), search("Name, email or phone", row["name"]), stop(value))
        yield Instance({"customer": row["name"], "what": attribute}, checks, script)


def num_orders(db: sqlite3.Connection) -> Iterator[Instance]:
    for status in ("pending", "processing", "complete", "cancelled"):
        count = str(db.execute("SELECT count(*) FROM orders WHERE status = ?", (status,)).fetchone()[0])
        script = (click("link", "Orders"), click("link", status), stop(count))
        yield Instance({"status": status}, exactly(count), script)


def stock(db: sqlite3.Connection) -> Iterator[Instance]:
    for p in _products(db, (3, 14, 31, 45, 59)):
        yield Instance(
            {"sku": p["sku"]},
            exactly(p["quantity"]),
            (click("link", "Products"), search("Name or SKU", p["sku"]), stop(str(p["quantity"]))),
        )


def customer_orders(db: sqlite3.Connection) -> Iterator[Instance]:
    rows = db.execute(
        "SELECT c.name, count(o.id) AS num_orders FROM customer c JOIN orders o ON o.customer_id = c.id"
        " WHERE c.id > 1 GROUP BY c.id ORDER BY num_orders DESC, c.id LIMIT 4"
    ).fetchall()
    for row in rows:
        yield Instance(
            {"customer": row["name"]},
            exactly(row["num_orders"]),
            (
                click("link", "Customers"),
                search("Name, email or phone", row["name"]),
                click("link", row["name"]),
                stop(str(row["num_orders"])),
            ),
        )


def open_orders(db: sqlite3.Connection) -> Iterator[Instance]:
    for status in ("pending", "cancelled", "processing"):
        yield Instance(
            {"status": status},
            at_url(f"{ADMIN}/orders?status={status}"),
            (click("link", "Orders"), click("link", status), stop()),
        )


def set_price(db: sqlite3.Connection) -> Iterator[Instance]:
    prices = ("24.50", "9.99", "61.00", "118.75", "33.20")
    for p, price in zip(_products(db, (7, 16, 28, 40, 61)), prices, strict=True):
        yield Instance(
            {"product": p["name"], "price": price},
            with_data(
                page_has((f"{ADMIN}/products/{p['id']}", "document.querySelector('[name=price]').value", price)),
                changed("product", p["id"], price=int(price.replace(".", ""))),
            ),
            (
                click("link", "Products"),
                search("Name or SKU", p["name"]),
                click("link", p["name"]),
                fill("Price", price),
                click("button", "Save product"),
                stop(),
            ),
        )


def restock(db: sqlite3.Connection) -> Iterator[Instance]:
    for p, units in zip(_products(db, (10, 23, 37, 53)), (25, 40, 12, 60), strict=True):
        total = p["quantity"] + units
        field = "document.querySelector('[name=quantity]').value"
        script = (*_product(p), fill("Stock", str(total)), click("button", "Save product"), stop())
        pages = page_has((f"{ADMIN}/products/{p['id']}", field, str(total)))
        checks = with_data(pages, changed("product", p["id"], quantity=total))
        yield Instance({"sku": p["sku"], "units": units}, checks, script)


def disable(db: sqlite3.Connection) -> Iterator[Instance]:
    for p in _products(db, (12, 26, 48)):
        yield Instance(
            {"product": p["name"]},
            with_data(
                page_has((f"{ADMIN}/products/{p['id']}", "document.querySelector('[name=enabled]').value", "0")),
                changed("product", p["id"], enabled=0),
            ),
            (*_product(p), choose("State", "disabled"), click("button", "Save product"), stop()),
        )


def set_status(db: sqlite3.Connection) -> Iterator[Instance]:
    rows = db.execute(
        "SELECT id FROM orders WHERE status IN ('pending', 'processing') AND customer_id > 1 ORDER BY id LIMIT 5"
    ).fetchall()
    statuses = ("complete", "cancelled", "complete", "cancelled", "complete")
    for row, status in zip(rows, statuses, strict=False):
        yield Instance(
            {"order": row["id"], "status": status},
            with_data(
                page_has((f"{ADMIN}/orders/{row['id']}", text_of("#status"), status)),
                changed("orders", row["id"], status=status),
            ),
            (*_order(row["id"]), choose("Order status", status), click("button", "Save order"), stop()),
        )


def deliver_to(db: sqlite3.Connection) -> Iterator[Instance]:
    cases = ((4090, "3 Abbey Close, Norvale"), (4083, "51 Quay Street, Calder Bay"), (4077, "12 Mill Street, Eastmere"))
    for order, address in cases:
        yield Instance(
            {"order": order, "address": address},
            with_data(
                page_has((f"{ADMIN}/orders/{order}", text_of("#address"), address)),
                changed("orders", order, address=address),
            ),
            (*_order(order), fill("Address", address), click("button", "Save order"), stop()),
        )


def note(db: sqlite3.Connection) -> Iterator[Instance]:
    cases = (
        (4088, "Customer asked for gift wrapping"),
        (4071, "Parcel was returned by the carrier"),
        (4064, "Refund agreed by telephone"),
    )
    for order, comment in cases:
        yield Instance(
            {"order": order, "comment": comment},
            with_data(
                page_has((f"{ADMIN}/orders/{order}", text_of("#notes"), [comment])),
                added("order_note", order_id=order, body=comment),
            ),
            (*_order(order), fill("Comment", comment), click("button", "Submit comment"), stop()),
        )


def judge_review(db: sqlite3.Connection) -> Iterator[Instance]:
    rows = db.execute(
        "SELECT r.id, p.id AS product_id, p.name, r.author FROM review r JOIN product p ON p.id = r.product_id"
        " WHERE r.status = 'pending' ORDER BY r.id LIMIT 5"
    ).fetchall()
    for index, row in enumerate(rows):
        verb = ("Approve", "Reject")[index % 2]
        listed = "[...document.querySelectorAll('article')].map(each => each.innerText)"
        is_listed = f"{listed}.some(text => text.includes('by {row['author']}')).toString()"
        is_pending = f"{listed}.some(text => text.includes('{row['name']}, ')).toString()"
        checks = with_data(
            page_has(
                (f"{SHOP}/product/{row['product_id']}", is_listed, "true" if verb == "Approve" else "false"),
                (f"{ADMIN}/reviews", is_pending, "false"),
            ),
            changed("review", row["id"], status="approved" if verb == "Approve" else "rejected"),
        )
        script = (click("link", "Reviews"), click("button", f"{verb} review of {row['name']}"), stop())
        yield Instance({"verb": verb, "product": row["name"], "author": row["author"]}, checks, script)


def group(db: sqlite3.Connection) -> Iterator[Instance]:
    for number in (6, 13, 27):
        row = db.execute("SELECT * FROM customer WHERE id = ?", (number,)).fetchone()
        kind = "retail" if row["kind"] == "wholesale" else "wholesale"
        script = (
            click("link", "Customers"),
            search("Name, email or phone", row["name"]),
            click("link", row["name"]),
            choose("Group", kind),
            click("button", "Save customer"),
            stop(),
        )
        pages = page_has((f"{ADMIN}/customers/{number}", "document.querySelector('[name=kind]').value", kind))
        checks = with_data(pages, changed("customer", number, kind=kind))
        yield Instance({"customer": row["name"], "group": kind}, checks, script)


TEMPLATES = (
    Template("shopping_admin", "Which product sells {{rank}}?", bestseller),
    Template("shopping_admin", "What is the {{what}} of the customer {{customer}}?", contact),
    Template("shopping_admin", "How many orders are {{status}}? Answer with the number only.", num_orders),
    Template("shopping_admin", "How many units of SKU {{sku}} are in stock? Answer with the number only.", stock),
    Template(
        "shopping_admin", "How many orders has {{customer}} placed? Answer with the number only.", customer_orders
    ),
    Template("shopping_admin", "Show the list of {{status}} orders.", open_orders),
    Template("shopping_admin", "Set the price of the {{product}} to {{price}}.", set_price, True),
    Template("shopping_admin", "We received {{units}} more units of SKU {{sku}}: update the stock.", restock, True),
    Template("shopping_admin", "Take the {{product}} out of the shop by disabling it.", disable, True),
    Template("shopping_admin", "Change the status of order {{order}} to {{status}}.", set_status, True),
    Template("shopping_admin", 'Change the address of order {{order}} to "{{address}}".', deliver_to, True),
    Template("shopping_admin", 'Add the comment "{{comment}}" to order {{order}}.', note, True),
    Template("shopping_admin", "{{verb}} the waiting review of the {{product}} by {{author}}.", judge_review, True),
    Template("shopping_admin", "Move the customer {{customer}} to the group {{group}}.", group, True),
)
