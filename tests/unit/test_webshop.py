"""The built-in shop: catalogue, search, pages, score, oracle."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import pytest

from agentgym_rl.environment.envs.webshop import WebShop, catalogue, goals

ALL_ITEMS = [item for split in WebShop.splits.values() for item in split]


def play(env: WebShop, *actions: str) -> list[str]:
    """Play valid actions and return the pages."""
    pages = []
    for action in actions:
        step = env.step(action)
        assert step.info["valid"], (action, step)
        pages.append(step.observation)
    return pages


def test_the_catalogue_and_the_goals_are_the_same_on_every_machine() -> None:
    text = repr([catalogue.products(), [goals.goal(item).text for item in ALL_ITEMS]])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "161d56c1077af222"
    assert len(catalogue.by_code()) == catalogue.NUM_PRODUCTS


def test_goals_of_the_test_split_are_products_that_training_never_asks_for() -> None:
    codes = {split: {goals.goal(item).product.code for item in items} for split, items in WebShop.splits.items()}
    assert not codes["train"] & (codes["test"] | codes["validation"])
    assert len(codes["train"]) == 480
    assert len(codes["test"]) == 120


def test_the_oracle_buys_the_right_product_for_every_item() -> None:
    env = WebShop()
    for item in ALL_ITEMS[::7]:
        env.reset(item)
        for _ in range(20):
            step = env.step(env.oracle())
            if step.done:
                break
        assert (step.reward, step.info["success"]) == (1.0, True), item


def test_the_oracle_recovers_after_random_clicks() -> None:
    env, rng = WebShop(), random.Random(5)
    for item in WebShop.splits["test"][:60]:
        env.reset(item)
        for _ in range(8):
            choices = [action for action in env.actions() if action != "click[buy now]"]
            assert env.step(rng.choice(choices)).info["valid"]
        for _ in range(20):
            step = env.step(env.oracle())
            if step.done:
                break
        assert step.info["success"]


def test_pages_have_webshops_form() -> None:
    env = WebShop()
    goal = goals.goal(2003)
    assert env.reset(2003) == f"WebShop [SEP] Instruction: [SEP] {goal.text} [SEP] Search"
    assert goal.text.startswith("Find me frying pan that is space saving and heat resistant, with color: white")
    results, more, back = play(env, "search[frying pan]", "click[Next >]", "click[< Prev]")
    assert "[SEP] Page 1 (Total results: 22) [SEP] Next > [SEP] B" in results
    assert "[SEP] Page 2 (Total results: 22) [SEP] Next > [SEP] < Prev [SEP] B" in more
    assert back == results
    code = next(code for code in env.actions() if code[6:-1] in catalogue.by_code())
    product, features, again, chosen = play(
        env, code, "click[Features]", "click[< Prev]", f"click[{catalogue.by_code()[code[6:-1]].options['size'][0]}]"
    )
    assert product.endswith("Description [SEP] Features [SEP] Reviews [SEP] Buy Now")
    assert catalogue.by_code()[code[6:-1]].attributes[2] in features
    assert again == product
    assert "You have chosen size: " in chosen


def test_a_purchase_is_scored_by_kind_properties_options_and_price() -> None:
    goal = goals.Goal(catalogue.products()[0], ("quick drying", "slim fit"), {"color": "navy"}, 50.0)
    made = catalogue.products()[0]
    same = replace(made, attributes=("quick drying", "slim fit", "wool blend"), price=20.0)
    assert goals.score(goal, same, {"color": "navy"}) == 1.0
    assert goals.score(goal, same, {"color": "black"}) == 0.75
    assert goals.score(goal, same, {}) == 0.75
    dear = replace(same, price=50.0)
    assert goals.score(goal, dear, {"color": "navy"}) == 0.75
    other_kind = next(p for p in catalogue.products() if p.category == made.category and p.kind != made.kind)
    assert goals.score(goal, replace(same, kind=other_kind.kind), {"color": "navy"}) == 0.5
    other = next(p for p in catalogue.products() if p.category != made.category)
    assert goals.score(goal, other, {"color": "navy"}) == 0.0


@pytest.mark.parametrize(
    "action", ["click[search]", "click[buy now]", "search[]", "buy", "click[", "search[mug", "Search for a mug"]
)
def test_what_the_page_does_not_have_changes_nothing(action: str) -> None:
    env = WebShop()
    first = env.reset(2003)
    before = env.state_key()
    step = env.step(action)
    assert (step.info, step.reward, step.done) == ({"valid": False}, 0.0, False)
    assert step.observation.endswith(first)
    assert env.state_key() == before


def test_search_prefers_products_that_share_rare_words() -> None:
    assert not catalogue.search("zzz")
    best = catalogue.by_code()[catalogue.search("waterproof hiking boots")[0].lower()]
    assert best.kind == "hiking boots"
    assert "waterproof" in best.attributes
    assert catalogue.search("HIKING boot") == catalogue.search("boots hiking")
