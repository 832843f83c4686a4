"""The shop's administration: dashboard, orders, products, customers, pending reviews."""

from __future__ import annotations

import re

from agentgym_rl.environment.envs.webarena.sites.html import (
    Html,
    a,
    area,
    button_form,
    choice,
    el,
    facts,
    field,
    form,
    pager,
    table,
)
from agentgym_rl.environment.envs.webarena.sites.shop import money, order_total, status_tag
from agentgym_rl.environment.envs.webarena.sites.store import TODAY
from agentgym_rl.environment.envs.webarena.sites.style import Look
from agentgym_rl.environment.envs.webarena.sites.visit import Redirect, Visit, like, pages, route

PER_PAGE = 14
STATUSES = ("pending", "processing", "complete", "cancelled")
LOOK = Look(
    "Harbour & Hearth Admin",
    "#4a3f6b",
    (
        ("Dashboard", "/"),
        ("Orders", "/orders"),
        ("Products", "/products"),
        ("Customers", "/customers"),
        ("Reviews", "/reviews"),
    ),
    user="Signed in as admin",
)
_page = pages(LOOK)


def _search_form(path: str, label: str, text: str) -> Html:
    return el(
        "form",
        el("label", label, " ", el("input", type="search", name="q", value=text, size="30"), class_="row"),
        el("button", "Filter"),
        action=path,
        method="get",
    )


def dashboard(visit: Visit) -> Html:
    sold = visit.rows(
        "SELECT p.id, p.name, sum(l.quantity) AS sold FROM order_line l JOIN product p ON p.id = l.product_id"
        " JOIN orders o ON o.id = l.order_id WHERE o.status != 'cancelled' GROUP BY p.id"
        " ORDER BY sold DESC, p.id LIMIT 5"
    )
    latest_orders = visit.rows(
        "SELECT o.*, c.name FROM orders o JOIN customer c ON c.id = o.customer_id ORDER BY o.id DESC LIMIT 5"
    )
    terms = visit.rows("SELECT * FROM search_term ORDER BY uses DESC")
    turnover = sum(order_total(visit, row) for row in visit.rows("SELECT * FROM orders WHERE status = 'complete'"))
    num_pending = visit.value("SELECT count(*) FROM review WHERE status = 'pending'")
    return _page(
        visit,
        "Dashboard",
        facts(
            ("Turnover", f"{money(turnover)} in completed orders"),
            ("Customers", visit.value("SELECT count(*) FROM customer")),
            ("Waiting reviews", num_pending),
        ),
        el(
            "div",
            el(
                "div",
                table(
                    ("Product", "Sold"),
                    [(a(row["name"], f"/products/{row['id']}"), row["sold"]) for row in sold],
                    "Bestsellers",
                ),
                table(
                    ("Order", "Customer", "Status", "Total"),
                    [
                        (
                            a(f"Order {row['id']}", f"/orders/{row['id']}"),
                            row["name"],
                            status_tag(row["status"]),
                            money(order_total(visit, row)),
                        )
                        for row in latest_orders
                    ],
                    "Last orders",
                ),
            ),
            table(("Search term", "Uses"), [(row["term"], row["uses"]) for row in terms], "Top search terms"),
            class_="two",
        ),
    )


def orders(visit: Visit) -> Html:
    text, status = visit.query.get("q", ""), visit.query.get("status", "")
    status = status if status in STATUSES else ""
    where = "(c.name LIKE ? ESCAPE '\\' OR o.id LIKE ? ESCAPE '\\')"
    arguments = [like(text), like(text)]
    if status:
        where += " AND o.status = ?"
        arguments.append(status)
    joined = f"FROM orders o JOIN customer c ON c.id = o.customer_id WHERE {where}"
    count = visit.value(f"SELECT count(*) {joined}", *arguments)
    number = visit.page_number()
    rows = visit.rows(
        f"SELECT o.*, c.name {joined} ORDER BY o.id DESC LIMIT ? OFFSET ?",
        *arguments,
        PER_PAGE,
        (number - 1) * PER_PAGE,
    )
    listed = [
        (
            a(f"Order {row['id']}", f"/orders/{row['id']}"),
            row["day"],
            row["name"],
            status_tag(row["status"]),
            money(order_total(visit, row)),
        )
        for row in rows
    ]
    filters = [(a(name, f"/orders?status={name}"), "  ") for name in STATUSES]
    return _page(
        visit,
        "Orders",
        _search_form("/orders", "Customer or number", text),
        el("p", "Status: ", filters, a("all", "/orders")),
        table(("Order", "Date", "Customer", "Status", "Total"), listed),
        pager("/orders", f"status={status}&" if status else "", number, -(-count // PER_PAGE)) if not text else None,
        heading=f"Orders ({count})",
    )


def order(visit: Visit) -> Html:
    row = visit.row(
        "SELECT o.*, c.name, c.email FROM orders o JOIN customer c ON c.id = o.customer_id WHERE o.id = ?",
        visit.path["id"],
    )
    lines = visit.rows(
        "SELECT l.*, p.name, p.sku FROM order_line l JOIN product p ON p.id = l.product_id WHERE order_id = ?",
        row["id"],
    )
    notes = visit.rows("SELECT * FROM order_note WHERE order_id = ? ORDER BY id DESC", row["id"])
    listed = [(line["sku"], line["name"], money(line["price"]), line["quantity"]) for line in lines]
    return _page(
        visit,
        f"Order {row['id']}",
        facts(
            ("Customer", a(row["name"], f"/customers/{row['customer_id']}")),
            ("Date", row["day"]),
            ("Status", el("span", row["status"], id="status")),
            ("Deliver to", el("span", row["address"], id="address")),
            ("Total", money(order_total(visit, row))),
        ),
        table(("SKU", "Product", "Price", "Quantity"), listed),
        form(
            f"/orders/{row['id']}",
            choice("Order status", "status", [(name, name) for name in STATUSES], row["status"]),
            field("Address", "address", row["address"], size="50"),
            button="Save order",
            class_="card",
        ),
        form(f"/orders/{row['id']}/note", area("Comment", "body", rows=2), button="Submit comment", class_="card"),
        el("ul", [el("li", f"{note['day']}: {note['body']}") for note in notes], id="notes"),
    )


def save_order(visit: Visit) -> Redirect:
    row = visit.row("SELECT * FROM orders WHERE id = ?", visit.path["id"])
    status, address = visit.form.get("status", ""), visit.form.get("address", "").strip()
    if status not in STATUSES or not address:
        return Redirect(f"/orders/{row['id']}", "An order needs a status and an address.")
    visit.change("UPDATE orders SET status = ?, address = ? WHERE id = ?", status, address[:200], row["id"])
    return Redirect(f"/orders/{row['id']}", "The order was saved.")


def add_note(visit: Visit) -> Redirect:
    row = visit.row("SELECT * FROM orders WHERE id = ?", visit.path["id"])
    body = visit.form.get("body", "").strip()
    if not body:
        return Redirect(f"/orders/{row['id']}", "The comment is empty.")
    visit.change(
        "INSERT INTO order_note(order_id, day, body, notified) VALUES (?, ?, ?, 0)", row["id"], TODAY, body[:1000]
    )
    return Redirect(f"/orders/{row['id']}", "The comment was added.")


def products(visit: Visit) -> Html:
    text = visit.query.get("q", "")
    number = visit.page_number()
    where = "FROM product WHERE name LIKE ? ESCAPE '\\' OR sku LIKE ? ESCAPE '\\'"
    count = visit.value(f"SELECT count(*) {where}", like(text), like(text))
    rows = visit.rows(
        f"SELECT * {where} ORDER BY id LIMIT ? OFFSET ?",
        *(like(text), like(text), PER_PAGE, (number - 1) * PER_PAGE),
    )
    listed = [
        (
            row["sku"],
            a(row["name"], f"/products/{row['id']}"),
            money(row["price"]),
            row["quantity"],
            "enabled" if row["enabled"] else "disabled",
        )
        for row in rows
    ]
    return _page(
        visit,
        "Products",
        _search_form("/products", "Name or SKU", text),
        table(("SKU", "Product", "Price", "Stock", "State"), listed),
        pager("/products", "", number, -(-count // PER_PAGE)) if not text else None,
        heading=f"Products ({count})",
    )


def product(visit: Visit) -> Html:
    row = visit.row("SELECT * FROM product WHERE id = ?", visit.path["id"])
    return _page(
        visit,
        row["name"],
        el("p", row["sku"], class_="muted"),
        form(
            f"/products/{row['id']}",
            field("Product name", "name", row["name"], class_="wide"),
            field("Price", "price", f"{row['price'] / 100:.2f}", size="10"),
            field("Stock", "quantity", row["quantity"], size="6"),
            choice("State", "enabled", (("1", "enabled"), ("0", "disabled")), str(row["enabled"])),
            area("Description", "description", row["description"], rows=4),
            button="Save product",
            class_="card",
        ),
    )


def save_product(visit: Visit) -> Redirect:
    row = visit.row("SELECT * FROM product WHERE id = ?", visit.path["id"])
    name, price, quantity = (visit.form.get(key, "").strip() for key in ("name", "price", "quantity"))
    path = f"/products/{row['id']}"
    amount = re.fullmatch(r"\$?([0-9]{1,6})(?:\.([0-9]{1,2}))?", price)
    if not name or amount is None:
        return Redirect(path, "A product needs a name and a price such as 12.50.")
    if not re.fullmatch(r"[0-9]{1,5}", quantity):
        return Redirect(path, "The stock must be a number from 0 to 99999.")
    cents = int(amount[1]) * 100 + int((amount[2] or "0").ljust(2, "0"))
    visit.change(
        "UPDATE product SET name = ?, price = ?, quantity = ?, enabled = ?, description = ? WHERE id = ?",
        *(name[:120], cents, int(quantity), int(visit.form.get("enabled") == "1")),
        *(visit.form.get("description", "").strip()[:2000], row["id"]),
    )
    return Redirect(path, "The product was saved.")


def customers(visit: Visit) -> Html:
    text = visit.query.get("q", "")
    number = visit.page_number()
    where = "FROM customer WHERE name LIKE ? ESCAPE '\\' OR email LIKE ? ESCAPE '\\' OR phone LIKE ? ESCAPE '\\'"
    patterns = [like(text)] * 3
    count = visit.value(f"SELECT count(*) {where}", *patterns)
    rows = visit.rows(f"SELECT * {where} ORDER BY name LIMIT ? OFFSET ?", *patterns, PER_PAGE, (number - 1) * PER_PAGE)
    listed = [
        (a(row["name"], f"/customers/{row['id']}"), row["email"], row["phone"], row["city"], row["kind"])
        for row in rows
    ]
    return _page(
        visit,
        "Customers",
        _search_form("/customers", "Name, email or phone", text),
        table(("Name", "Email", "Phone", "City", "Group"), listed),
        pager("/customers", "", number, -(-count // PER_PAGE)) if not text else None,
        heading=f"Customers ({count})",
    )


def customer(visit: Visit) -> Html:
    row = visit.row("SELECT * FROM customer WHERE id = ?", visit.path["id"])
    customer_orders = visit.rows("SELECT * FROM orders WHERE customer_id = ? ORDER BY id DESC", row["id"])
    listed = [
        (a(f"Order {o['id']}", f"/orders/{o['id']}"), o["day"], status_tag(o["status"]), money(order_total(visit, o)))
        for o in customer_orders
    ]
    return _page(
        visit,
        row["name"],
        facts(
            ("Email", row["email"]),
            ("Address", f"{row['street']}, {row['city']}"),
            ("Customer since", row["since"]),
            ("Newsletter", "yes" if row["newsletter"] else "no"),
            ("Orders", len(customer_orders)),
        ),
        form(
            f"/customers/{row['id']}",
            field("Phone", "phone", row["phone"], size="24"),
            choice("Group", "kind", (("retail", "retail"), ("wholesale", "wholesale")), row["kind"]),
            button="Save customer",
            class_="card",
        ),
        table(("Order", "Date", "Status", "Total"), listed),
    )


def save_customer(visit: Visit) -> Redirect:
    row = visit.row("SELECT * FROM customer WHERE id = ?", visit.path["id"])
    kind, phone = visit.form.get("kind", ""), visit.form.get("phone", "").strip()
    if kind not in ("retail", "wholesale") or not phone:
        return Redirect(f"/customers/{row['id']}", "A customer needs a phone number and a group.")
    visit.change("UPDATE customer SET phone = ?, kind = ? WHERE id = ?", phone[:40], kind, row["id"])
    return Redirect(f"/customers/{row['id']}", "The customer was saved.")


def reviews(visit: Visit) -> Html:
    rows = visit.rows(
        "SELECT r.*, p.name AS product FROM review r JOIN product p ON p.id = r.product_id WHERE r.status = 'pending'"
        " ORDER BY r.id"
    )
    listed = [
        el(
            "article",
            el("h3", review["title"]),
            el("p", f"{review['product']}, {review['rating']} of 5 stars, by {review['author']}", class_="muted"),
            el("p", review["body"]),
            button_form(
                f"/reviews/{review['id']}", "Approve", f"Approve review of {review['product']}", verdict="approved"
            ),
            button_form(
                f"/reviews/{review['id']}", "Reject", f"Reject review of {review['product']}", verdict="rejected"
            ),
            class_="card",
        )
        for review in rows
    ]
    return _page(visit, "Reviews", listed, heading=f"Reviews that wait ({len(rows)})")


def judge_review(visit: Visit) -> Redirect:
    row = visit.row("SELECT * FROM review WHERE id = ? AND status = 'pending'", visit.path["id"])
    verdict = "approved" if visit.form.get("verdict") == "approved" else "rejected"
    visit.change("UPDATE review SET status = ? WHERE id = ?", verdict, row["id"])
    return Redirect("/reviews", f"The review by {row['author']} was {verdict}.")


ROUTES = [
    route("/", dashboard),
    route("/orders", orders),
    route("/orders/{id:int}", order),
    route("/orders/{id:int}", save_order, "POST"),
    route("/orders/{id:int}/note", add_note, "POST"),
    route("/products", products),
    route("/products/{id:int}", product),
    route("/products/{id:int}", save_product, "POST"),
    route("/customers", customers),
    route("/customers/{id:int}", customer),
    route("/customers/{id:int}", save_customer, "POST"),
    route("/reviews", reviews),
    route("/reviews/{id:int}", judge_review, "POST"),
]
