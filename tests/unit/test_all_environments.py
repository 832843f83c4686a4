"""Requirements for every environment: one table, each row tested in process and over HTTP.

A name of the catalog is tested as soon as it is in the catalog; give it a row in CASES if it differs from the usual.
An environment that is no entry of the catalog, such as a bridge with arguments, gets a row with `source` and `kwargs`.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from servers_for_tests import RunningServer, server_in_thread

from agentgym_rl.config import load_config
from agentgym_rl.environment import catalog, conformance
from agentgym_rl.environment.base import HasActions, HasOracle, HasRender, HasStateKey, TextEnv
from agentgym_rl.environment.conformance import HOSTILE
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.training.horizon import make_horizon
from agentgym_rl.types import Step

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))
Pool = LocalPool | RemotePool
CAPABILITIES = {"actions": HasActions, "oracle": HasOracle, "state_key": HasStateKey, "render": HasRender}


@dataclass(frozen=True)
class Case:
    """One environment of the suite, and how it differs from the usual."""

    source: str = ""
    """Import path, if the name is none of the catalog."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    lacks: frozenset[str] = frozenset()
    """Optional methods that it does not have: actions, oracle, state_key, render."""
    subset: str | None = None
    """Subset with short solutions, if the first items have long ones."""
    reward: float | None = 1.0
    """Sum of rewards of a solved episode; None if it varies."""
    any_text: bool = False
    """Whether every text is a valid action, such as a free answer, so that hostile ones are not marked as invalid."""


CASES: dict[str, Case] = {
    **{name: Case() for name in sorted(catalog.CATALOG)},
    "sciworld": Case(subset="Lifespan"),
    "agentdojo": Case(lacks=frozenset({"actions"}), subset="banking", any_text=True),
    "bfcl": Case(lacks=frozenset({"actions"}), any_text=True),
    "debate": Case(subset="hop1", any_text=True),
    "keydoor_duo": Case(any_text=True),
    "number_guessing": Case("number_guessing:NumberGuessing"),
    "crossroads": Case("crossroads:Crossroads", {"length": 4}),
    "frozen_lake": Case("gymnasium:FrozenLake-v1", lacks=frozenset({"oracle"})),
    "taxi": Case("gymnasium:Taxi-v4", reward=None),
    "blackjack": Case("gymnasium:Blackjack-v1", lacks=frozenset({"oracle", "state_key"})),
    "cliff_walking": Case("gymnasium:CliffWalking-v1", reward=None),
}
NAMES = list(CASES)
CHEAP = [name for name in NAMES if catalog.load(CASES[name].source or name, CASES[name].kwargs).cheap]


def having(capability: str) -> list[str]:
    return [name for name in NAMES if capability not in CASES[name].lacks]


def load(name: str) -> type[TextEnv]:
    return catalog.load(CASES[name].source or name, CASES[name].kwargs)


def is_unicode(text: str) -> bool:
    """Return whether JSON can hold the text: it has no lone surrogates."""
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def first_test_item(name: str) -> int:
    return catalog.items(load(name), "test", CASES[name].subset)[0]


def sample_items(name: str) -> list[int]:
    """Return one test item of a slow environment; for others also the last item of each split."""
    env_class, first = load(name), first_test_item(name)
    return [first] if not env_class.cheap else [first, *(split[-1] for split in env_class.splits.values())]


@pytest.fixture
def env(name: str) -> Iterator[TextEnv]:
    environment = load(name)()
    try:
        yield environment
    finally:
        environment.close()
        environment.close()  # closing twice is not an error


# --- the class -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(catalog.CATALOG))
def test_name_summary_licence_and_instruction_are_declared(name: str) -> None:
    env_class, entry = load(name), catalog.CATALOG[name]
    assert env_class.name == name
    assert 10 < len(entry.summary) <= 80
    assert entry.licence
    assert len(env_class.instruction) > 100


def test_every_listed_environment_is_in_the_table() -> None:
    assert set(catalog.entries()) <= {case.source or name for name, case in CASES.items()}


@pytest.mark.parametrize("name", NAMES)
def test_optional_methods_are_those_of_the_table(name: str) -> None:
    env_class = load(name)
    implemented = {method for method, protocol in CAPABILITIES.items() if issubclass(env_class, protocol)}
    assert implemented == set(CAPABILITIES) - CASES[name].lacks


@pytest.mark.parametrize("name", NAMES)
def test_splits_are_disjoint(name: str) -> None:
    splits = load(name).splits
    assert {"train", "test"} <= set(splits)
    assert all(len(split) > 0 for split in splits.values())
    for split, other in itertools.combinations(splits.values(), 2):
        assert split.step == other.step == 1
        assert max(split.start, other.start) >= min(split.stop, other.stop)


@pytest.mark.parametrize("name", NAMES)
def test_subsets_and_items_agree(name: str) -> None:
    env_class = load(name)
    listed = {
        split: {item: env_class.subsets_of(item) for item in items[:: max(1, len(items) // 3000)]}
        for split, items in env_class.splits.items()
    }
    for subsets in (subsets for items in listed.values() for subsets in items.values()):
        assert len(subsets) == len(set(subsets))
        assert set(subsets) <= set(env_class.subsets)
    assert conformance.subset_problems(env_class) == []
    met = {subset for items in listed.values() for subsets in items.values() for subset in subsets}
    assert len(met) >= min(2, len(env_class.subsets))
    for subset in (*env_class.subsets[:2], *env_class.subsets[-1:]):
        subset_items = catalog.items(env_class, "test", subset)
        assert [item for item in subset_items if item in listed["test"]] == [
            item for item, subsets in listed["test"].items() if subset in subsets
        ]


@pytest.mark.parametrize("name", sorted(catalog.CATALOG))
def test_it_has_a_docs_page_a_picture_and_recipes(name: str) -> None:
    page = (ROOT / "docs" / "reference" / "environments" / f"{name}.md").read_text()
    assert "](../../images/" in page
    assert catalog.CATALOG[name].licence.split()[0] in page  # whose data it is
    assert f"reference/environments/{name}.md" in (ROOT / "docs" / "guides" / "environments.md").read_text()
    configs = {
        kind: load_config(ROOT / "recipes" / name / f"{kind}.toml", []) for kind in ("grpo", "scalinginter", "tiny")
    }
    for kind, config in configs.items():
        (environment,) = config.environments
        assert environment.name == name
        assert set(environment.subsets) <= set(load(name).subsets)
        assert {environment.split, environment.eval_split} <= set(load(name).splits)
        make_horizon(config.horizon)
        assert (config.model.path is None) == (kind == "tiny")
    assert configs["grpo"].horizon.kind == "fixed"
    assert configs["scalinginter"].horizon.kind == "stepwise"
    assert configs["tiny"].rl.steps == 2


# --- playing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_items_outside_every_split_raise(name: str, env: TextEnv) -> None:
    for item in (-1, max(split.stop for split in env.splits.values())):
        with pytest.raises(IndexError, match=str(item)):
            env.reset(item)


@pytest.mark.parametrize("name", NAMES)
def test_hostile_actions_are_answered_by_the_game(name: str, env: TextEnv) -> None:
    item = sample_items(name)[0]
    env.reset(item)
    for kind, action in HOSTILE.items():
        step = env.step(action)
        assert isinstance(step, Step), kind
        assert step.observation, kind
        assert len(step.observation) < 20_000, kind
        step.observation.encode()  # an observation must be encodable to be recorded
        assert CASES[name].any_text or step.info.get("valid") is False, (kind, step)
        assert step.reward <= 0, kind
        assert not step.info.get("success"), kind
        if step.done:
            env.reset(item)
    if isinstance(env, HasStateKey):
        assert env.state_key()  # the game continues


@pytest.mark.parametrize("name", [name for name in CHEAP if name in having("actions")])
def test_words_of_the_game_in_random_order_are_answered(name: str, env: TextEnv) -> None:
    assert isinstance(env, HasActions)
    item, rng = first_test_item(name), random.Random(name)
    env.reset(item)
    odd = ["", "0", "-1", "9" * 30, "٣", "³", "\ud800", "\x00", "\n", "%s", "{}", "[", "]", "(", ",", "<", "</think>"]
    for _ in range(300):
        words = [*rng.choice(env.actions() or ["x"]).replace("<", " <").split(), *rng.choices(odd, k=3)]
        rng.shuffle(words)
        step = env.step(rng.choice((" ", "")).join(words))
        step.observation.encode()
        if step.done:
            env.reset(item)


@pytest.mark.parametrize("name", having("actions"))
def test_actions_are_listed(name: str, env: TextEnv) -> None:
    assert isinstance(env, HasActions)
    for item in sample_items(name):
        env.reset(item)
        offered = env.actions()
        assert offered
        assert len(offered) == len(set(offered))
        assert all(isinstance(action, str) and action for action in offered)


@pytest.mark.parametrize("name", having("oracle"))
def test_the_first_action_of_the_oracle_is_valid(name: str, env: TextEnv) -> None:
    assert isinstance(env, HasOracle)
    for item in sample_items(name):
        env.reset(item)
        step = env.step(env.oracle())
        assert step.info["valid"] is True
        assert CASES[name].reward is None or step.reward >= 0  # None: every move costs something


@pytest.mark.parametrize("name", having("render"))
def test_render_returns_a_valid_picture(name: str, env: TextEnv) -> None:
    assert isinstance(env, HasRender)
    env.reset(sample_items(name)[0])
    env.step(HOSTILE["svg"])
    picture = env.render()
    assert conformance.picture_problem(picture) == ""
    assert isinstance(picture, bytes) or HOSTILE["svg"] not in picture


# --- through sessions, in process and over HTTP ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Serve all environments in one process, like `agentgym-rl serve`."""
    with server_in_thread({name: load(name) for name in NAMES}) as running:
        yield running
        assert running.sessions.num_open == 0


@pytest.fixture(params=["in process", "over HTTP"])
async def pool(request: pytest.FixtureRequest, name: str, server: RunningServer) -> AsyncIterator[Pool]:
    """Yield a pool of each kind. A slow environment is played over HTTP only; tests above play it in process."""
    pool: Pool = RemotePool({name: f"{server.url}/{name}"}, timeout_s=120)
    if request.param == "in process":
        if name not in CHEAP:
            pytest.skip("slow")
        pool = LocalPool({name: load(name)})
    yield pool
    await pool.close()
    assert pool.num_open == 0


@pytest.mark.parametrize("name", NAMES)
async def test_the_same_item_is_the_same_game(name: str, pool: Pool) -> None:
    turns = 6 if name in CHEAP else 1
    assert await conformance.determinism_problems(pool, name, sample_items(name), turns) == []


@pytest.mark.parametrize("name", CHEAP)
async def test_sessions_at_the_same_time_do_not_change_each_other(name: str, pool: Pool) -> None:
    assert await conformance.concurrency_problems(pool, name, sample_items(name)) == []


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CHEAP])
async def test_a_slow_environment_plays_two_items_at_once(name: str) -> None:
    pool = LocalPool({name: load(name)}, timeout_s=120)
    try:
        items = catalog.items(load(name), "test", CASES[name].subset)[:2]
        assert await conformance.concurrency_problems(pool, name, items, sessions=2, turns=1) == []
    finally:
        await pool.close()


@pytest.mark.parametrize("name", NAMES)
async def test_hostile_actions_do_not_end_a_session(name: str, pool: Pool) -> None:
    sent = (
        HOSTILE if isinstance(pool, LocalPool) else {k: a for k, a in HOSTILE.items() if a.isprintable() or k == "null"}
    )
    problems, unmarked = await conformance.hostile_problems(pool, name, sample_items(name)[0], sent)
    assert problems == []
    assert CASES[name].any_text or unmarked == []


@pytest.mark.parametrize("name", CHEAP)
async def test_random_play_says_whether_it_succeeded(name: str, pool: Pool) -> None:
    problems, _ = await conformance.random_problems(pool, name, sample_items(name), turns=60)
    assert problems == []


@pytest.mark.parametrize("name", having("oracle"))
async def test_the_oracle_wins(name: str, pool: Pool) -> None:
    env_class, item = load(name), first_test_item(name)
    session = await pool.open(name)
    assert session.instruction == env_class.instruction
    assert item in await pool.items(name, "test")
    played = await conformance.transcript(session, item, "oracle", conformance.ORACLE_TURNS)
    rewards, (*_, done, info) = sum(row[2] for row in played), played[-1]
    assert done
    assert info["success"] is True
    assert CASES[name].reward is None or rewards == pytest.approx(CASES[name].reward)
    if "state_key" not in CASES[name].lacks:
        assert all(row[4]["state_key"] for row in played)
    if "render" not in CASES[name].lacks:
        assert conformance.picture_problem(await session.render()) == ""
    await session.close()


async def test_another_process_plays_the_same_games() -> None:
    assert await conformance.process_problems("textcraft", {}, conformance.sample_items(load("textcraft"))) == []
