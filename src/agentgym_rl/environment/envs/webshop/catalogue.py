"""The products of the shop, drawn from a fixed seed, and the search among them."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

MAKERS = (
    "Alder",
    "Brightwater",
    "Corvus",
    "Dunmore",
    "Everly",
    "Fennick",
    "Grovewell",
    "Halden",
    "Ironbark",
    "Juniper",
)
COLOURS = ("black", "white", "navy", "grey", "forest green", "burgundy", "mustard", "sky blue", "cream", "terracotta")
CLOTHES_SIZES = ("small", "medium", "large", "x-large")
SHOE_SIZES = ("38", "40", "42", "44")
BED_SIZES = ("single", "double", "king")
PACKS = ("pack of 1", "pack of 2", "pack of 4")
CLOTHES = (
    "machine washable",
    "organic cotton",
    "quick drying",
    "elastic waist",
    "long sleeve",
    "slim fit",
    "wool blend",
)
SHOES = ("slip resistant", "waterproof", "leather upper", "memory foam", "wide fit", "lightweight")
KITCHEN = ("dishwasher safe", "stainless steel", "non-stick", "bpa free", "heat resistant", "space saving")
BEDDING = ("hypoallergenic", "linen", "easy care", "extra soft", "reversible", "quilted")
ELECTRONICS = ("rechargeable", "noise cancelling", "fast charging", "wireless", "long battery life", "usb-c")
GARDEN = ("rust proof", "ergonomic handle", "weather resistant", "foldable", "bamboo", "heavy duty")

KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[int, int]]] = {
    "clothing": (
        ("hoodie", "shorts", "rain jacket", "cardigan", "polo shirt", "joggers"),
        CLOTHES,
        CLOTHES_SIZES,
        (12, 90),
    ),
    "shoes": (("sandals", "hiking boots", "sneakers", "loafers"), SHOES, SHOE_SIZES, (25, 140)),
    "kitchen": (("frying pan", "kettle", "water bottle", "cutting board", "storage jar"), KITCHEN, PACKS, (8, 70)),
    "bedding": (("duvet cover", "pillow", "blanket", "fitted sheet"), BEDDING, BED_SIZES, (15, 120)),
    "electronics": (("headphones", "phone charger", "desk lamp", "speaker"), ELECTRONICS, PACKS, (10, 160)),
    "garden": (("pruning shears", "garden chair", "plant stand", "hand trowel"), GARDEN, PACKS, (6, 80)),
}
"""Category: kinds of product, properties, sizes, range of prices in dollars."""
NUM_PRODUCTS = 600
RESULTS_PER_PAGE, MAX_RESULTS = 10, 50
_WORD = re.compile(r"[a-z0-9]+")
_CODE_LETTERS = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Product:
    code: str
    category: str
    kind: str
    title: str
    attributes: tuple[str, ...]
    """Properties. The title names the first, the description and the features name the others."""
    options: dict[str, tuple[str, ...]]
    price: float
    description: str
    rating: float


@lru_cache(maxsize=1)
def products() -> tuple[Product, ...]:
    """Return the catalogue. The same on every machine."""
    rng = random.Random("webshop catalogue")
    kinds = [(category, kind) for category, (names, *_) in KINDS.items() for kind in names]
    return tuple(_product(rng, *kinds[number % len(kinds)]) for number in range(NUM_PRODUCTS))


def _product(rng: random.Random, category: str, kind: str) -> Product:
    _, properties, sizes, (low, high) = KINDS[category]
    attributes = tuple(rng.sample(properties, 3))
    colours = tuple(sorted(rng.sample(COLOURS, rng.randint(2, 5)), key=COLOURS.index))
    offered = tuple(sorted(rng.sample(sizes, rng.randint(2, len(sizes))), key=sizes.index))
    maker, code = rng.choice(MAKERS), "B" + "".join(rng.choices(_CODE_LETTERS, k=9))
    price = rng.randint(low * 100, high * 100) / 100
    description = f"A {kind} by {maker}: {attributes[1]}, made to last. For everyday use."
    options = {"color": colours, "size": offered}
    title = f"{maker} {kind.title()}, {attributes[0].title()}"
    return Product(code, category, kind, title, attributes, options, price, description, rng.randint(30, 50) / 10)


@lru_cache(maxsize=1)
def by_code() -> dict[str, Product]:
    return {product.code.lower(): product for product in products()}


def _words(text: str) -> list[str]:
    return [word.removesuffix("s") for word in _WORD.findall(text.lower())]


@lru_cache(maxsize=1)
def _index() -> tuple[tuple[Counter[str], ...], dict[str, float]]:
    """Return the words of each product and the weight of each word: rare words weigh more."""
    texts = [
        f"{product.title} {product.kind} {product.category} {product.description} {' '.join(product.attributes)} "
        f"{' '.join(product.options['color'])}"
        for product in products()
    ]
    counts = tuple(Counter(_words(text)) for text in texts)
    frequency = Counter(word for count in counts for word in count)
    return counts, {word: math.log(1 + NUM_PRODUCTS / number) for word, number in frequency.items()}


@lru_cache(maxsize=2048)
def search(keywords: str) -> tuple[str, ...]:
    """Return the codes of the products that share words with `keywords`, best first."""
    counts, weights = _index()
    words = set(_words(keywords))
    scores = [sum(weights[word] for word in words if word in count) for count in counts]
    best = sorted((number for number, score in enumerate(scores) if score > 0), key=lambda n: (-round(scores[n], 6), n))
    return tuple(products()[number].code for number in best[:MAX_RESULTS])
