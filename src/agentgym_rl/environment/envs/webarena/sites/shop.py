"""The shop: search, categories, products with reviews, basket, checkout, orders, wish list, account."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from urllib.parse import urlencode

from agentgym_rl.environment.envs.webarena.sites.html import (
    Child,
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
from agentgym_rl.environment.envs.webarena.sites.shop_data import CUSTOMER, CUSTOMER_NAME
from agentgym_rl.environment.envs.webarena.sites.store import TODAY
from agentgym_rl.environment.envs.webarena.sites.style import Look, page
from agentgym_rl.environment.envs.webarena.sites.visit import NotFound, Redirect, Visit, like, route

PER_PAGE = 12
SHIPPING = {"standard": ("Standard, 4.90", 490), "express": ("Express, 8.90", 890), "pickup": ("Pick-up, free", 0)}
SORTS = {
    "name": ("Name", "p.name"),
    "price": ("Price, lowest first", "p.price"),
    "price-desc": ("Price, highest first", "p.price DESC"),
    "rating": ("Best rated", "rating DESC, p.name"),
}
_LISTED = (
    "SELECT p.*, (SELECT avg(rating) FROM review r WHERE r.product_id = p.id AND r.status = 'approved') AS rating,"
    " (SELECT count(*) FROM review r WHERE r.product_id = p.id AND r.status = 'approved') AS num_reviews"
    " FROM product p WHERE p.enabled = 1"
)


def money(cents: int) -> str:
    return f"${cents / 100:,.2f}"


def _page(visit: Visit, title: str, *body: Child, heading: str = "") -> Html:
    in_basket = visit.value("SELECT coalesce(sum(quantity), 0) FROM basket")
    links = (
        (f"Basket ({in_basket})", "/basket"),
        ("My orders", "/orders"),
        ("Wish list", "/wishlist"),
        ("My account", "/account"),
    )
    look = Look("Harbour & Hearth", "#1f5f5b", links, ("Find", "/search"), CUSTOMER_NAME)
    categories = [
        a(row["name"], f"/category/{row['slug']}") for row in visit.rows("SELECT * FROM category ORDER BY id")
    ]
    return page(look, title, *body, heading=heading, flash=visit.flash(), below=categories)


def initial(name: str) -> str:
    """Return the letter on a product's picture: the initial of the second word, because the first is the maker."""
    words = name.split() or ["?"]
    return words[min(1, len(words) - 1)][0]


def _card(product: sqlite3.Row) -> Html:
    hue = (product["category_id"] * 57 + product["id"] * 13) % 360
    rating = (
        f"{product['rating']:.1f} of 5, {product['num_reviews']} reviews" if product["num_reviews"] else "no reviews"
    )
    return el(
        "div",
        el("div", initial(product["name"]), class_="thumb", style=f"--h:{hue}", aria_hidden="true"),
        a(product["name"], f"/product/{product['id']}"),
        el("div", money(product["price"]), class_="price"),
        el("div", rating, class_="muted"),
        class_="card",
    )


def _listing(
    visit: Visit, title: str, path: str, where: str, arguments: Sequence[object], parameters: dict[str, str]
) -> Html:
    sort = visit.query.get("sort", "name")
    sort = sort if sort in SORTS else "name"
    products = visit.rows(f"{_LISTED} AND {where} ORDER BY {SORTS[sort][1]}", *arguments)
    number = visit.page_number()
    num_pages = max(1, -(-len(products) // PER_PAGE))
    page_products = products[(number - 1) * PER_PAGE : number * PER_PAGE]
    sorting = [
        (el("strong", text) if key == sort else a(text, f"{path}?{urlencode({**parameters, 'sort': key})}"), "  ")
        for key, (text, _) in SORTS.items()
    ]
    query = urlencode({**parameters, "sort": sort}) + "&"
    return _page(
        visit,
        title,
        el("p", f"{len(products)} products. Sort by: ", sorting),
        el("div", [_card(product) for product in page_products], class_="grid")
        if page_products
        else el("p", "Nothing was found."),
        pager(path, query, number, num_pages),
    )


def home(visit: Visit) -> Html:
    popular = visit.rows(
        f"{_LISTED} ORDER BY (SELECT coalesce(sum(quantity), 0) FROM order_line l WHERE l.product_id = p.id) DESC, p.id"
        " LIMIT 8"
    )
    return _page(
        visit,
        "Home goods",
        el("h2", "Popular now"),
        el("div", [_card(product) for product in popular], class_="grid"),
        heading="Good things for the house and the garden",
    )


def category(visit: Visit) -> Html:
    row = visit.row("SELECT * FROM category WHERE slug = ?", visit.path["slug"])
    return _listing(visit, row["name"], f"/category/{row['slug']}", "p.category_id = ?", (row["id"],), {})


def search(visit: Visit) -> Html:
    words = visit.query.get("q", "").split()[:8]
    where = " AND ".join(["(p.name || ' ' || p.description || ' ' || p.sku) LIKE ? ESCAPE '\\'"] * len(words)) or "0"
    likes = [like(word) for word in words]
    text = " ".join(words)
    return _listing(visit, f"Search results for '{text}'", "/search", where, likes, {"q": text})


def product(visit: Visit) -> Html:
    row = visit.row(f"{_LISTED} AND p.id = ?", visit.path["id"])
    reviews = visit.rows(
        "SELECT * FROM review WHERE product_id = ? AND status = 'approved' ORDER BY day DESC, id DESC", row["id"]
    )
    wished = visit.value("SELECT count(*) FROM wishlist WHERE product_id = ?", row["id"])
    hue = (row["category_id"] * 57 + row["id"] * 13) % 360
    about = el(
        "div",
        el("div", initial(row["name"]), class_="thumb big", style=f"--h:{hue}", aria_hidden="true"),
        el("p", row["description"]),
        facts(
            ("SKU", row["sku"]),
            ("Material", row["material"]),
            ("Colour", row["colour"]),
            ("Weight", f"{row['weight']} g"),
            ("In stock", str(row["quantity"]) if row["quantity"] else "sold out"),
        ),
        class_="card",
    )
    buying = el(
        "div",
        el("p", money(row["price"]), class_="price", style="font-size:22px"),
        form(
            f"/product/{row['id']}/basket",
            field("Quantity", "quantity", 1, size="4", inputmode="numeric"),
            button="Add to basket",
        ),
        el("p", "This is on your wish list.", class_="muted")
        if wished
        else button_form(f"/product/{row['id']}/wish", "Add to wish list"),
        el("p", a("Write a review", f"/product/{row['id']}/review")),
        class_="card",
    )
    listed = [
        el(
            "article",
            el("h3", review["title"]),
            el("p", f"{review['rating']} of 5 stars, by {review['author']} on {review['day']}", class_="muted"),
            el("p", review["body"]),
            class_="card",
        )
        for review in reviews
    ]
    average = f"{row['rating']:.1f} of 5 stars on average" if reviews else "none yet"
    return _page(
        visit,
        row["name"],
        el("div", about, buying, class_="two"),
        el("h2", f"Reviews ({len(reviews)}): {average}"),
        listed,
    )


def _quantity(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 3 else None


def add_to_basket(visit: Visit) -> Redirect:
    row = visit.row("SELECT * FROM product WHERE id = ? AND enabled = 1", visit.path["id"])
    quantity = _quantity(visit.form.get("quantity", "1"))
    path = f"/product/{row['id']}"
    if not quantity:
        return Redirect(path, "The quantity must be a number from 1 to 999.")
    basket_quantity = visit.value("SELECT coalesce(sum(quantity), 0) FROM basket WHERE product_id = ?", row["id"])
    if basket_quantity + quantity > row["quantity"]:
        return Redirect(path, f"Only {row['quantity']} of this product are in stock.")
    visit.change("REPLACE INTO basket VALUES (?, ?)", row["id"], basket_quantity + quantity)
    return Redirect(path, f"You added {quantity} x {row['name']} to your basket.")


def add_wish(visit: Visit) -> Redirect:
    row = visit.row("SELECT * FROM product WHERE id = ? AND enabled = 1", visit.path["id"])
    visit.change("REPLACE INTO wishlist VALUES (?)", row["id"])
    return Redirect(f"/product/{row['id']}", f"{row['name']} is now on your wish list.")


def wishlist(visit: Visit) -> Html:
    rows = visit.rows(f"{_LISTED} AND p.id IN (SELECT product_id FROM wishlist) ORDER BY p.name")
    body = el("div", [_card(row) for row in rows], class_="grid", id="wishlist") if rows else el("p", "It is empty.")
    return _page(visit, "Wish list", body)


def review_form(visit: Visit) -> Html:
    row = visit.row("SELECT * FROM product WHERE id = ? AND enabled = 1", visit.path["id"])
    stars = [
        el("label", el("input", type="radio", name="rating", value=n), f" {n} of 5", class_="row") for n in range(1, 6)
    ]
    return _page(
        visit,
        f"Review {row['name']}",
        form(
            f"/product/{row['id']}/review",
            el("fieldset", el("legend", "Rating"), stars),
            field("Title", "title", class_="wide"),
            area("Review", "body"),
            button="Submit review",
            class_="card",
        ),
        heading=f"Your review of {row['name']}",
    )


def add_review(visit: Visit) -> Redirect:
    row = visit.row("SELECT * FROM product WHERE id = ? AND enabled = 1", visit.path["id"])
    rating, title = visit.form.get("rating", ""), visit.form.get("title", "").strip()
    if rating not in "12345" or not rating or not title:
        return Redirect(f"/product/{row['id']}/review", "A review needs a rating and a title.")
    visit.change(
        "INSERT INTO review(product_id, author, rating, title, body, day, status) VALUES (?,?,?,?,?,?,'approved')",
        *(row["id"], CUSTOMER_NAME, int(rating), title[:200], visit.form.get("body", "").strip()[:2000], TODAY),
    )
    return Redirect(f"/product/{row['id']}", "Thank you for your review.")


def _basket_lines(visit: Visit) -> list[sqlite3.Row]:
    return visit.rows(
        "SELECT p.id, p.name, p.price, b.quantity FROM basket b JOIN product p ON p.id = b.product_id ORDER BY p.id"
    )


def basket(visit: Visit) -> Html:
    lines = _basket_lines(visit)
    if not lines:
        return _page(visit, "Basket", el("p", "Your basket is empty."))
    rows = [
        (
            a(line["name"], f"/product/{line['id']}"),
            money(line["price"]),
            form(
                f"/basket/{line['id']}",
                el(
                    "input", name="quantity", value=line["quantity"], size="3", aria_label=f"Quantity of {line['name']}"
                ),
                " ",
                button="Update",
                class_="inline",
            ),
            money(line["price"] * line["quantity"]),
            button_form(f"/basket/{line['id']}", "Remove", f"Remove {line['name']}", quantity=0),
        )
        for line in lines
    ]
    total = sum(line["price"] * line["quantity"] for line in lines)
    return _page(
        visit,
        "Basket",
        table(("Product", "Price", "Quantity", "Sum", ""), rows),
        el("p", f"Total: {money(total)}", class_="price"),
        a("Proceed to checkout", "/checkout"),
    )


def change_basket(visit: Visit) -> Redirect:
    row = visit.row("SELECT p.* FROM product p JOIN basket b ON b.product_id = p.id WHERE p.id = ?", visit.path["id"])
    quantity = _quantity(visit.form.get("quantity", ""))
    if quantity is None or quantity > row["quantity"]:
        return Redirect("/basket", f"The quantity must be a number from 0 to {row['quantity']}.")
    if quantity:
        visit.change("UPDATE basket SET quantity = ? WHERE product_id = ?", quantity, row["id"])
        return Redirect("/basket", "Your basket was updated.")
    visit.change("DELETE FROM basket WHERE product_id = ?", row["id"])
    return Redirect("/basket", f"{row['name']} was removed.")


def checkout(visit: Visit) -> Html | Redirect:
    lines = _basket_lines(visit)
    if not lines:
        return Redirect("/basket")
    me = visit.row("SELECT * FROM customer WHERE id = ?", CUSTOMER)
    options = [
        el(
            "label",
            el("input", type="radio", name="shipping", value=key, checked=key == "standard"),
            f" {text}",
            class_="row",
        )
        for key, (text, _) in SHIPPING.items()
    ]
    total = sum(line["price"] * line["quantity"] for line in lines)
    return _page(
        visit,
        "Checkout",
        table(
            ("Product", "Quantity", "Sum"),
            [(r["name"], r["quantity"], money(r["price"] * r["quantity"])) for r in lines],
        ),
        el("p", f"Total before shipping: {money(total)}", class_="price"),
        form(
            "/checkout",
            field("Deliver to", "address", f"{me['street']}, {me['city']}", size="50"),
            el("fieldset", el("legend", "Shipping"), options),
            button="Place order",
            class_="card",
        ),
    )


def place_order(visit: Visit) -> Redirect:
    lines = _basket_lines(visit)
    shipping, address = visit.form.get("shipping", ""), visit.form.get("address", "").strip()
    if not lines or shipping not in SHIPPING or not address:
        return Redirect("/checkout", "An order needs an address and a way of shipping.")
    number = visit.value("SELECT max(id) + 1 FROM orders")
    visit.change(
        "INSERT INTO orders VALUES (?, ?, ?, 'pending', ?, ?)",
        *(number, CUSTOMER, TODAY, SHIPPING[shipping][1], address[:200]),
    )
    for line in lines:
        visit.change(
            "INSERT INTO order_line(order_id, product_id, price, quantity) VALUES (?, ?, ?, ?)",
            *(number, line["id"], line["price"], line["quantity"]),
        )
        visit.change("UPDATE product SET quantity = quantity - ? WHERE id = ?", line["quantity"], line["id"])
    visit.change("DELETE FROM basket")
    return Redirect(f"/orders/{number}", f"Thank you. Your order {number} has been placed.")


def order_total(visit: Visit, order: sqlite3.Row) -> int:
    lines = visit.value("SELECT coalesce(sum(price * quantity), 0) FROM order_line WHERE order_id = ?", order["id"])
    return int(lines + order["shipping"])


def status_tag(status: str) -> Html:
    kinds = {"complete": "good", "cancelled": "bad", "pending": "wait", "processing": "wait"}
    return el("span", status, class_=f"tag {kinds.get(status, '')}")


def orders(visit: Visit) -> Html:
    rows = visit.rows("SELECT * FROM orders WHERE customer_id = ? ORDER BY id DESC", CUSTOMER)
    listed = [
        (
            a(f"Order {row['id']}", f"/orders/{row['id']}"),
            row["day"],
            status_tag(row["status"]),
            money(order_total(visit, row)),
        )
        for row in rows
    ]
    return _page(visit, "My orders", table(("Order", "Date", "Status", "Total"), listed))


def latest_order(visit: Visit) -> Redirect:
    return Redirect(f"/orders/{visit.value('SELECT max(id) FROM orders WHERE customer_id = ?', CUSTOMER)}")


def order(visit: Visit) -> Html:
    row = visit.row("SELECT * FROM orders WHERE id = ? AND customer_id = ?", visit.path["id"], CUSTOMER)
    lines = visit.rows(
        "SELECT l.*, p.name FROM order_line l JOIN product p ON p.id = l.product_id WHERE order_id = ?", row["id"]
    )
    listed = [
        (a(line["name"], f"/product/{line['product_id']}"), money(line["price"]), line["quantity"]) for line in lines
    ]
    cancel = button_form(f"/orders/{row['id']}/cancel", "Cancel order") if row["status"] == "pending" else None
    return _page(
        visit,
        f"Order {row['id']}",
        facts(
            ("Date", row["day"]),
            ("Status", el("span", row["status"], id="status")),
            ("Delivered to", el("span", row["address"], id="address")),
            ("Shipping", el("span", money(row["shipping"]), id="shipping")),
            ("Total", money(order_total(visit, row))),
        ),
        el("div", table(("Product", "Price", "Quantity"), listed), id="lines"),
        cancel,
    )


def cancel_order(visit: Visit) -> Redirect:
    row = visit.row("SELECT * FROM orders WHERE id = ? AND customer_id = ?", visit.path["id"], CUSTOMER)
    if row["status"] != "pending":
        raise NotFound
    visit.change("UPDATE orders SET status = 'cancelled' WHERE id = ?", row["id"])
    return Redirect(f"/orders/{row['id']}", "The order was cancelled.")


def account(visit: Visit) -> Html:
    me = visit.row("SELECT * FROM customer WHERE id = ?", CUSTOMER)
    return _page(
        visit,
        "My account",
        el("p", f"{me['name']}, customer since {me['since']}", class_="muted"),
        form(
            "/account",
            field("Email", "email", me["email"], size="36"),
            field("Phone", "phone", me["phone"], size="24"),
            field("Street and number", "street", me["street"], size="36"),
            field("City", "city", me["city"], size="24"),
            choice("Newsletter", "newsletter", (("0", "No"), ("1", "Yes")), str(me["newsletter"])),
            button="Save changes",
            class_="card",
        ),
    )


def save_account(visit: Visit) -> Redirect:
    values = {key: visit.form.get(key, "").strip()[:120] for key in ("email", "phone", "street", "city")}
    if not all(values.values()) or "@" not in values["email"]:
        return Redirect("/account", "Email, phone, street and city are all needed.")
    visit.change(
        "UPDATE customer SET email = ?, phone = ?, street = ?, city = ?, newsletter = ? WHERE id = ?",
        *values.values(),
        int(visit.form.get("newsletter") == "1"),
        CUSTOMER,
    )
    return Redirect("/account", "Your account was saved.")


ROUTES = [
    route("/", home),
    route("/category/{slug}", category),
    route("/search", search),
    route("/product/{id:int}", product),
    route("/product/{id:int}/basket", add_to_basket, "POST"),
    route("/product/{id:int}/wish", add_wish, "POST"),
    route("/product/{id:int}/review", review_form),
    route("/product/{id:int}/review", add_review, "POST"),
    route("/basket", basket),
    route("/basket/{id:int}", change_basket, "POST"),
    route("/checkout", checkout),
    route("/checkout", place_order, "POST"),
    route("/orders", orders),
    route("/orders/latest", latest_order),
    route("/orders/{id:int}", order),
    route("/orders/{id:int}/cancel", cancel_order, "POST"),
    route("/wishlist", wishlist),
    route("/account", account),
    route("/account", save_account, "POST"),
]
