"""Data of the shop and its administration: products, reviews, customers, orders. Generated from a fixed seed."""

from __future__ import annotations

import random
import sqlite3

from agentgym_rl.environment.envs.webarena.sites.people import day, full_name

CUSTOMER = 1
"""Customer id of the agent."""
CUSTOMER_NAME = "Nora Lindqvist"

SCHEMA = """
CREATE TABLE category(id INTEGER PRIMARY KEY, slug TEXT, name TEXT);
CREATE TABLE product(id INTEGER PRIMARY KEY, sku TEXT, name TEXT, category_id INT, price INT, quantity INT, enabled INT,
    description TEXT, material TEXT, colour TEXT, weight INT);
CREATE TABLE review(id INTEGER PRIMARY KEY, product_id INT, author TEXT, rating INT, title TEXT, body TEXT, day TEXT,
    status TEXT);
CREATE TABLE customer(id INTEGER PRIMARY KEY, name TEXT, email TEXT, phone TEXT, street TEXT, city TEXT, since TEXT,
    newsletter INT, kind TEXT);
CREATE TABLE orders(id INTEGER PRIMARY KEY, customer_id INT, day TEXT, status TEXT, shipping INT, address TEXT);
CREATE TABLE order_line(id INTEGER PRIMARY KEY, order_id INT, product_id INT, price INT, quantity INT);
CREATE TABLE order_note(id INTEGER PRIMARY KEY, order_id INT, day TEXT, body TEXT, notified INT);
CREATE TABLE basket(product_id INTEGER PRIMARY KEY, quantity INT);
CREATE TABLE wishlist(product_id INTEGER PRIMARY KEY);
CREATE TABLE search_term(term TEXT PRIMARY KEY, uses INT, results INT);
"""

CATEGORIES: dict[str, tuple[str, ...]] = {
    "Kitchen": (
        "Chef Knife 20 cm",
        "Cast Iron Skillet",
        "Bamboo Cutting Board",
        "Stovetop Kettle",
        "Mortar and Pestle",
        "Salad Spinner",
        "Pepper Mill",
        "Mixing Bowl Set",
        "Measuring Cup",
        "Rolling Pin",
        "Bread Tin",
        "Digital Scale",
    ),
    "Garden": (
        "Pruning Shears",
        "Watering Can 10 l",
        "Seed Tray",
        "Garden Fork",
        "Leather Gloves",
        "Plant Labels",
        "Hose Reel 25 m",
        "Compost Bin",
        "Bird Feeder",
        "Kneeling Mat",
        "Hand Trowel",
        "Trellis Panel",
    ),
    "Lighting": (
        "Desk Lamp",
        "Floor Lamp",
        "String Lights 8 m",
        "Lantern",
        "Reading Light",
        "Pendant Shade",
        "Night Light",
        "Wall Sconce",
        "Candle Holder",
        "Torch 400 lm",
    ),
    "Textiles": (
        "Linen Tablecloth",
        "Wool Blanket",
        "Cotton Bath Towel",
        "Cushion Cover",
        "Tea Towel Pair",
        "Door Mat",
        "Flannel Sheet Set",
        "Oven Glove",
        "Velvet Curtain",
        "Picnic Rug",
    ),
    "Stationery": (
        "Fountain Pen",
        "Dotted Notebook",
        "Desk Calendar",
        "Paper Knife",
        "Wax Seal Kit",
        "Pencil Tin",
        "Index Cards",
        "Letter Tray",
        "Ink Bottle 50 ml",
        "Brass Ruler",
    ),
    "Outdoors": (
        "Enamel Mug",
        "Camp Stove",
        "Dry Bag 20 l",
        "Folding Chair",
        "Hammock",
        "Compass",
        "Thermos 1 l",
        "Head Torch",
        "Rain Poncho",
        "Trekking Poles",
    ),
}
MAKERS = ["Alder", "Brightwater", "Corvus", "Dunmore", "Everly", "Fennick"]
MATERIALS = ("oak", "steel", "stoneware", "linen", "brass", "recycled plastic", "beech", "cotton", "enamel")
COLOURS = ("slate", "cream", "moss green", "navy", "terracotta", "charcoal", "mustard", "white")
CITIES = ("Port Ellery", "Norvale", "Greyhaven", "Stonebridge", "Eastmere", "Calder Bay")
STREETS = ("Mill Street", "Harbour Road", "Chapel Lane", "Orchard Row", "Station Street", "Quay Street")
STATUSES = ("complete", "complete", "complete", "processing", "pending", "cancelled")
PRAISE = (
    ("Exactly what I hoped for", "Solid {material} and well made. It has been in daily use since it came."),
    ("Would buy again", "My sister has borrowed it twice already. The {colour} looks better than in the picture."),
    ("Good value", "Arrived two days early and well packed. For this price there is nothing better."),
    ("A lovely present", "Bought for my father, who never likes anything. He likes this."),
)
MIXED = (
    ("Does the job", "Nothing special, but it works. The {material} feels a little thin."),
    ("Nice, with a caveat", "Handsome in {colour}, though smaller than I expected. Check the size before ordering."),
)
BLAME = (
    ("Broke within a month", "The handle came loose after three weeks and the {material} is already scratched."),
    ("Not as described", "I ordered {colour} and got something greyish. Sent it back."),
    ("Disappointed", "It came with a dent and customer service took nine days to answer."),
)
SEARCHES = (("lamp", 214), ("kettle", 187), ("wool blanket", 165), ("gift", 141), ("notebook", 118), ("hammock", 96))


def fill(db: sqlite3.Connection) -> None:
    rng = random.Random(11)
    _products(db, rng)
    _reviews(db, rng)
    _customers(db, rng)
    _orders(db, rng)
    db.executemany("INSERT INTO search_term VALUES (?, ?, ?)", [(term, uses, uses % 7 + 1) for term, uses in SEARCHES])


def _products(db: sqlite3.Connection, rng: random.Random) -> None:
    number = 0
    prices: set[int] = set()
    for category_id, (category, names) in enumerate(CATEGORIES.items(), 1):
        db.execute("INSERT INTO category VALUES (?, ?, ?)", (category_id, category.lower(), category))
        for index, name in enumerate(names):
            number += 1
            maker = MAKERS[(index * 5 + category_id) % len(MAKERS)]
            price = rng.choice([cents for cents in range(450, 14950, 50) if cents - 1 not in prices]) - 1
            prices.add(price)  # all different, so that "the cheapest" is unique
            material, colour = rng.choice(MATERIALS), rng.choice(COLOURS)
            description = (
                f"The {maker} {name} in {colour}. Made of {material}, designed to last and easy to repair: spare parts "
                f"are kept for {rng.randint(5, 15)} years. Comes with a {rng.randint(1, 5)}-year guarantee."
            )
            db.execute(
                "INSERT INTO product VALUES (?, ?, ?, ?, ?, ?, 1, ?, ?, ?, ?)",
                (
                    number,
                    f"HH-{category[:2].upper()}-{100 + number}",
                    f"{maker} {name}",
                    category_id,
                    price,
                    rng.randint(3, 140),
                    description,
                    material,
                    colour,
                    rng.randint(4, 300) * 10,
                ),
            )


def _reviews(db: sqlite3.Connection, rng: random.Random) -> None:
    for product_id, material, colour in db.execute("SELECT id, material, colour FROM product").fetchall():
        authors = rng.sample(range(1, 60), rng.randint(2, 5))
        days = sorted((day(rng, "2025-01-05", "2026-03-01") for _ in authors), reverse=True)
        for person, date in zip(authors, days, strict=True):
            rating = rng.choice((5, 5, 4, 4, 3, 2, 1))
            title, body = rng.choice(PRAISE if rating >= 4 else MIXED if rating == 3 else BLAME)
            db.execute(
                "INSERT INTO review(product_id, author, rating, title, body, day, status) VALUES (?,?,?,?,?,?,?)",
                (
                    product_id,
                    full_name(person),
                    rating,
                    title,
                    body.format(material=material, colour=colour),
                    date,
                    "approved",
                ),
            )
    # Pending reviews, at most one per product, so that a task can name one by its product.
    for product_id in rng.sample(range(1, 65), 6):
        author = full_name(rng.randint(60, 110))
        good = rng.random() < 0.5
        title, body = rng.choice(PRAISE if good else BLAME)
        db.execute(
            "INSERT INTO review(product_id, author, rating, title, body, day, status) VALUES (?,?,?,?,?,?,'pending')",
            (
                product_id,
                author,
                5 if good else 1,
                title,
                body.format(material="it", colour="this colour"),
                "2026-03-14",
            ),
        )


def _customers(db: sqlite3.Connection, rng: random.Random) -> None:
    for number in range(1, 37):
        name = CUSTOMER_NAME if number == CUSTOMER else full_name(number + 120)
        first, last = name.lower().split()
        db.execute(
            "INSERT INTO customer VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                number,
                name,
                f"{first}.{last}@mail.test",
                f"0{rng.randint(200, 899)} {rng.randint(100, 999)} {rng.randint(1000, 9999)}",
                f"{rng.randint(1, 98)} {rng.choice(STREETS)}",
                rng.choice(CITIES) if number != CUSTOMER else "Port Ellery",
                day(rng, "2022-02-01", "2025-12-20"),
                0 if number == CUSTOMER else rng.randint(0, 1),
                rng.choice(("retail", "retail", "retail", "wholesale")),
            ),
        )


def _orders(db: sqlite3.Connection, rng: random.Random) -> None:
    customers = {row[0]: f"{row[1]}, {row[2]}" for row in db.execute("SELECT id, street, city FROM customer")}
    prices = dict(db.execute("SELECT id, price FROM product").fetchall())
    days = sorted(day(rng, "2025-06-01", "2026-03-10") for _ in range(96))
    owners = [CUSTOMER if index % 12 == 5 else rng.randint(2, 36) for index in range(96)]
    for index, (ordered, owner) in enumerate(zip(days, owners, strict=True)):
        number = 4001 + index
        status = "complete" if ordered < "2026-01-15" and rng.random() < 0.85 else rng.choice(STATUSES)
        db.execute(
            "INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?)",
            (number, owner, ordered, status, rng.choice((0, 490, 890)), customers[owner]),
        )
        # Some products sell more often than others.
        chosen = {min(int(rng.expovariate(0.06)) + 1, 64) for _ in range(rng.randint(1, 3))}
        for product_id in sorted(chosen):
            db.execute(
                "INSERT INTO order_line(order_id, product_id, price, quantity) VALUES (?, ?, ?, ?)",
                (number, product_id, prices[product_id], rng.choice((1, 1, 1, 2, 3))),
            )
