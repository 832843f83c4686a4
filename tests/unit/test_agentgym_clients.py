"""AgentGym's seven clients against our servers, each defined here by the requests it sends and the fields it reads.

None of them knows this package's protocol. Only the oracle's action of each turn is requested in addition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from envs_for_tests import Counting
from servers_for_tests import server_in_thread

from agentgym_rl.environment import catalog
from agentgym_rl.environment.envs.sciworld import tasks as sciworld
from agentgym_rl.types import Step

MAX_TURNS = 60


@dataclass(frozen=True)
class Fields:
    """Fields that one of AgentGym's clients sends and reads."""

    create_body: dict[str, Any] | None
    """Body of /create, or None for a request without a body."""
    read_session: Callable[[Any], Any]
    """Returns the session's number in the answer to /create."""
    session_key: str
    item_key: str
    read_first: Callable[[Any], str] | None
    """Returns the first observation in the answer to /reset. None: the client uses GET /observation."""
    read_outcome: Callable[[Any], tuple[Any, Any]] = lambda answer: (answer["reward"], answer["done"])
    """Returns the reward that counts, and whether the episode is over, in the answer to /step."""
    reply: str = "{}"
    """Format of a sent action."""
    reset_fields: tuple[tuple[str, Any], ...] = ()
    """More fields of /reset."""
    asks_vocabulary: bool = False
    closes: bool = True


def observation(answer: Any) -> str:
    return answer["observation"]


def session_id(answer: Any) -> Any:
    return answer["id"]


CRAFT = {"minecraft_dir": "agentenv_textcraft/", "commands": None, "goal": None}
CLIENTS = {
    "textcraft": Fields(CRAFT, session_id, "id", "data_idx", observation),
    "babyai": Fields(None, session_id, "id", "data_idx", observation, lambda answer: (answer["score"], answer["done"])),
    "sciworld": Fields(
        None,
        session_id,
        "id",
        "data_idx",
        lambda answer: answer["task_description"] + "\n" + answer["observation"],
        lambda answer: (answer["score"], answer["done"]),
    ),
    "searchqa": Fields({"id": 0}, lambda answer: answer, "env_idx", "id", None),
    "webarena": Fields(
        None,
        lambda answer: answer["env_idx"],
        "env_idx",
        "idx",
        None,
        lambda answer: (answer["reward"] if answer["terminated"] else 0, answer["terminated"]),
        "I look at the page first. In summary, the next action I will perform is ```{}```",
        (("seed", 0),),
    ),
    "maze": Fields(None, session_id, "id", "game", observation, closes=False),
    "wordle": Fields(None, session_id, "id", "seed", lambda answer: "Guess.", asks_vocabulary=True, closes=False),
}
SHORT_SCIWORLD = 4400
"""AgentGym's number of an item with a short solution."""


class Client:
    def __init__(self, fields: Fields, base: str) -> None:
        self.fields, self.base = fields, base
        self.http = httpx.Client(trust_env=False, timeout=120)
        body = {} if fields.create_body is None else {"json": fields.create_body}
        self.number = fields.read_session(self.answer(self.http.post(f"{base}/create", **body)))
        assert type(self.number) is int
        self.vocabulary = self.get("filtered_vocab") if fields.asks_vocabulary else None

    def answer(self, response: httpx.Response) -> Any:
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.answer(self.http.post(f"{self.base}/{path}", json=body | {self.fields.session_key: self.number}))

    def get(self, path: str) -> Any:
        return self.answer(self.http.get(f"{self.base}/{path}?{self.fields.session_key}={self.number}"))

    def reset(self, item: int) -> str:
        answer = self.post("reset", {self.fields.item_key: item, **dict(self.fields.reset_fields)})
        return self.fields.read_first(answer) if self.fields.read_first else self.get("observation")

    def step(self, action: str) -> tuple[Any, Any]:
        answer = self.post("step", {"action": self.fields.reply.format(action)})
        assert isinstance(answer["observation"], str)
        assert isinstance(answer["reward"], int | float)
        return self.fields.read_outcome(answer)

    def play(self, item: int) -> tuple[str, Any]:
        first = self.reset(item)
        for _ in range(MAX_TURNS):
            reward, done = self.step(self.get("oracle"))
            if done:
                return first, reward
        raise AssertionError(f"item {item} was not over after {MAX_TURNS} turns")

    def close(self) -> None:
        if self.fields.closes:
            assert self.post("close", {})
        self.http.close()


@pytest.mark.parametrize("name", CLIENTS)
def test_each_client_of_agentgym_wins_a_game_at_both_addresses(name: str) -> None:
    fields = CLIENTS[name]
    item = SHORT_SCIWORLD if name == "sciworld" else 5
    with server_in_thread({name: catalog.load(name)}) as server:
        for base in (server.url, f"{server.url}/{name}"):
            client = Client(fields, base)
            first, reward = client.play(item)
            assert first
            assert reward == (100 if name == "sciworld" else 1.0)
            assert client.reset(item) == first  # the same session again
            client.close()
        assert server.sessions.num_open == (0 if fields.closes else 2)


def test_sciworlds_client_gets_its_item_task_and_points() -> None:
    task, variation = sciworld.locate(sciworld.published_item(SHORT_SCIWORLD))
    with server_in_thread({"sciworld": catalog.load("sciworld")}) as server, httpx.Client(base_url=server.url) as http:
        session = http.post("/create").json()["id"]
        agentgym_reset = http.post("/reset", json={"id": session, "data_idx": SHORT_SCIWORLD}, timeout=120).json()
        steps = []
        while not steps or not steps[-1]["done"]:
            action = http.get("/oracle", params={"id": session}, timeout=600).json()
            steps.append(http.post("/step", json={"id": session, "action": action}, timeout=120).json())
        item = sciworld.item_of(task, variation)
        own_reset = http.post("/reset", json={"id": session, "item": item, "data_idx": item}, timeout=120).json()
        own_step = http.post("/step", json={"id": session, "action": "focus on the sky"}, timeout=120).json()
        beyond = http.post("/reset", json={"id": session, "data_idx": 4639})
    assert "Your task is" in agentgym_reset["task_description"]
    assert agentgym_reset["task_description"] not in agentgym_reset["observation"]
    assert own_reset["observation"] == f"{agentgym_reset['task_description']}\n\n{agentgym_reset['observation']}"
    assert "task_description" not in own_reset
    assert sum(step["reward"] for step in steps) == steps[-1]["score"] == 100
    assert own_step["score"] <= 1.0
    assert (beyond.status_code, beyond.json()["detail"]) == (422, "AgentGym's sciworld has items 0 to 4638, got 4639")


def test_wordles_client_gets_a_vocabulary_that_shrinks_with_the_marks() -> None:
    with server_in_thread({"wordle": catalog.load("wordle")}) as server:
        client = Client(CLIENTS["wordle"], server.url)
        assert client.vocabulary is not None
        assert len(client.vocabulary) > 1000
        client.reset(3)
        client.step("c r a n e")
        left = client.get("filtered_vocab")
        client.close()
        refused = httpx.get(f"{server.url}/filtered_vocab", params={"id": 5}, trust_env=False)
    assert 0 < len(left) < 300
    assert set(left) < set(client.vocabulary)
    assert refused.status_code == 404


def test_webarenas_numbers_are_published_ones_if_its_sites_are_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    webarena: Any = catalog.load("webarena")
    for site in ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "MAP", "WIKIPEDIA", "HOMEPAGE"):
        monkeypatch.delenv(site, raising=False)
    assert webarena.agentgym_item(7) == 7
    monkeypatch.setenv("GITLAB", "http://127.0.0.1:8023")
    assert webarena.agentgym_item(7) == 1007


def test_a_bare_number_is_answered_only_to_a_client_that_expects_one() -> None:
    with server_in_thread({"searchqa": catalog.load("searchqa")}) as server:
        for body in (b"", b"{}", b'{"owner": ""}', b"not json"):
            answer = httpx.post(f"{server.url}/create", content=body, trust_env=False).json()
            assert isinstance(answer["id"], int)
        session = answer["id"]
        for named in ({"item": 3}, {"data_idx": 3}):
            reset = httpx.post(f"{server.url}/reset", json={"id": session, **named}, trust_env=False).json()
            assert reset["observation"].startswith("Question:")
        nothing = httpx.get(f"{server.url}/observation", trust_env=False)
    assert nothing.status_code == 422
    assert "id=NUMBER" in nothing.json()["detail"]


class Tenths(Counting):
    """Gives a reward of 0.1 each turn."""

    def step(self, text: str) -> Step:
        return Step("Go on.", 0.1)


def test_rewards_that_add_up_to_one_score_one() -> None:
    """BabyAI's and SciWorld's clients use the score as the result. A naive sum of ten tenths is less than 1."""
    with server_in_thread({"counting": Tenths}) as server:
        client = Client(CLIENTS["babyai"], server.url)
        client.reset(3)
        scores = [client.step("up")[0] for _ in range(10)]
        client.close()
    assert scores[-1] == 1.0
