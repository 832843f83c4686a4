"""A client that knows only AgentGym's protocol plays on our servers: `id`, `data_idx`, plain HTTP.

It works like AgentGym's own clients: one session per client, every answer read by name, a reset with `data_idx`.
"""

import httpx
import pytest
from envs_for_tests import Counting
from servers_for_tests import server_in_thread

from agentgym_rl.environment import catalog


class MiniAgentGymClient:
    def __init__(self, base: str) -> None:
        self.http = httpx.Client(base_url=base, trust_env=False, timeout=30)
        self.id = self.post("create", {})["id"]

    def post(self, path, body):
        response = self.http.post(f"/{path}", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def get(self, path):
        response = self.http.get(f"/{path}", params={"id": self.id})
        assert response.status_code == 200, response.text
        return response.json()

    def reset(self, data_idx):
        answer = self.post("reset", {"id": self.id, "data_idx": data_idx})
        assert answer["id"] == self.id
        return answer

    def step(self, action):
        return self.post("step", {"id": self.id, "action": action})

    def close(self):
        assert self.post("close", {"id": self.id}) is True
        self.http.close()


def play_to_the_end(client, data_idx, max_steps=100):
    """Play the oracle's actions, and check every field that AgentGym's clients read."""
    answer = client.reset(data_idx)
    score = 0.0
    for _ in range(max_steps):
        assert isinstance(answer["observation"], str)
        assert answer["observation"]
        assert isinstance(answer["reward"], float)
        assert type(answer["done"]) is bool
        assert answer["score"] == pytest.approx(score)
        assert client.get("observation") == answer["observation"]
        if answer["done"]:
            return answer
        assert all(isinstance(action, str) for action in client.get("available_actions"))
        answer = client.step(client.get("oracle"))
        score += answer["reward"]
    raise AssertionError(f"item {data_idx} was not over after {max_steps} steps")


def test_the_counting_game_is_won():
    with server_in_thread({"counting": Counting}) as server:
        client = MiniAgentGymClient(server.url)
        assert client.get("") == "ok"
        assert play_to_the_end(client, 3)["score"] == pytest.approx(1.0)
        assert play_to_the_end(client, 4)["score"] == pytest.approx(1.0)  # the same session again
        client.close()
        assert server.sessions.num_open == 0


@pytest.mark.parametrize("name", ["textcraft", "babyai"])
def test_a_real_environment_is_won(name):
    env_class = catalog.load(name)
    items = [env_class.splits["train"][0], env_class.splits["test"][0]]
    with server_in_thread({name: env_class}) as server:
        for base in (server.url, f"{server.url}/{name}"):
            client = MiniAgentGymClient(base)
            for item in items:
                last = play_to_the_end(client, item)
                assert last["reward"] > 0
                assert last["info"]["success"] is True
            client.reset(items[0])
            nonsense = client.step("please win for me")
            assert nonsense["reward"] == 0
            assert nonsense["done"] is False
            client.close()
        assert server.sessions.num_open == 0


def test_create_answers_what_the_textcraft_client_of_agentgym_reads() -> None:
    """Its constructor posts a goal that our server does not need and reads an observation before any reset."""
    with server_in_thread({"textcraft": catalog.load("textcraft")}) as server:
        body = {"minecraft_dir": "agentenv_textcraft/", "commands": None, "goal": None}
        answer = httpx.post(f"{server.url}/create", json=body, timeout=10.0, trust_env=False).json()
    assert isinstance(answer["id"], int)
    assert isinstance(answer["observation"], str)
    assert (answer["reward"], answer["score"], answer["done"]) == (0.0, 0.0, False)
