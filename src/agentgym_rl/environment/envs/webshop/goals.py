"""What to buy: one goal an item, and how well a purchase fits it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from agentgym_rl.environment.envs.webshop.catalogue import KINDS, NUM_PRODUCTS, Product, products

SPLITS = {"train": range(2000), "test": range(2000, 2200), "validation": range(2200, 2300)}
SUBSETS = tuple(KINDS)
_PRICE_STEP = 10
_HELD_OUT = 5
"""Every fifth product is a goal of the test and validation splits only."""


@dataclass(frozen=True, slots=True)
class Goal:
    product: Product
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    price_below: float

    @property
    def text(self) -> str:
        properties = " and ".join(self.attributes)
        options = ", and ".join(f"{name}: {value}" for name, value in self.options.items())
        return f"Find me {self.product.kind} that is {properties}, with {options}, and price lower than " + (
            f"{self.price_below:.2f} dollars"
        )


@lru_cache(maxsize=4096)
def goal(item: int) -> Goal:
    """Return the goal of an item. Its product always fits it."""
    rng = random.Random(f"webshop {item}")
    product = products()[_product_of(item)]
    attributes = tuple(rng.sample(product.attributes, rng.randint(1, 2)))
    names = rng.sample(sorted(product.options), rng.randint(1, 2))
    options = {name: rng.choice(product.options[name]) for name in sorted(names)}
    below = _PRICE_STEP * (int(product.price // _PRICE_STEP) + rng.randint(1, 3))
    return Goal(product, attributes, options, float(below))


def _product_of(item: int) -> int:
    pool = [n for n in range(NUM_PRODUCTS) if (n % _HELD_OUT == 0) != (item in SPLITS["train"])]
    return pool[item % len(pool)]


def subset_of(item: int) -> str:
    return products()[_product_of(item)].category


def score(goal: Goal, product: Product, options: Mapping[str, str]) -> float:
    """Return the share of properties, options and price that fit, times the fit of the kind: 1, 0.5 or 0.

    The formula is WebShop's. There the kind is compared by the words of titles; here it is known.
    """
    fits = [attribute in product.attributes for attribute in goal.attributes]
    fits += [options.get(name) == value for name, value in goal.options.items()]
    fits.append(product.price < goal.price_below)
    kind = 1.0 if product.kind == goal.product.kind else 0.5 if product.category == goal.product.category else 0.0
    return kind * sum(fits) / len(fits)
