"""The program's side of an episode: the task, steps of the environment and the end. Needs the standard library only.

`python -m agentgym_rl.agent.proxy.client my_module:play` runs a function on the episode that the environment variables
name. host.py does the same for many episodes.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

SESSION_URL = "AGENTGYM_SESSION_URL"
"""Variable with the address of the episode; its key is in OPENAI_API_KEY."""
POLL_S = 0.5
"""Seconds between attempts to reach a proxy that does not listen yet."""


class RunEnded(Exception):
    """The run has ended and has no further episodes."""


class Episode:
    """One episode. Call the model at `base_url` with `api_key`, as any SDK for OpenAI's API does."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.url: str = task["url"]
        self.base_url: str = task["base_url"]
        self.api_key: str = task["api_key"]
        self.model: str = task["model"]
        self.env: str = task["env"]
        self.instruction: str = task["instruction"]
        self.observation: str = task["observation"]
        """The environment's last observation."""
        self.tools: list[dict[str, Any]] = task["tools"]
        """Tools of the environment; empty if it takes text."""
        self.done = False

    @classmethod
    def from_environment(cls) -> Episode:
        """Return the episode that a run started this program for."""
        return cls(_request(os.environ[SESSION_URL], os.environ["OPENAI_API_KEY"]))

    @classmethod
    def claim(cls, proxy_url: str, token: str = "") -> Episode | None:
        """Return an episode that waits for a client of `agentgym-rl proxy`, or None if there is none yet.

        Raise RunEnded after the last one.
        """
        try:
            return cls(_request(f"{proxy_url}/sessions", token, {}))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            if error.code == 410:
                raise RunEnded(f"the run of {proxy_url} has ended") from None
            raise

    @classmethod
    def claim_all(cls, proxy_url: str, token: str = "", start_timeout_s: float = 600.0) -> Iterator[Episode]:
        """Yield episodes until the run ends. Wait at most `start_timeout_s` for its proxy to listen."""
        start, connected = time.monotonic(), False
        while True:
            try:
                episode = cls.claim(proxy_url, token)
            except RunEnded:
                return
            except urllib.error.HTTPError:
                raise
            except (urllib.error.URLError, ConnectionError):
                if connected:  # the run ended between two requests
                    return
                if time.monotonic() - start > start_timeout_s:
                    raise
                time.sleep(POLL_S)
                continue
            connected = True
            if episode is not None:
                yield episode

    def step(self, action: str) -> str:
        """Play a text action and return the observation. `done` says whether the episode has ended."""
        return self._played({"action": action})["observation"]

    def call(self, tool_calls: list[Any]) -> list[str]:
        """Play tool calls of a reply, as the API or its SDK returned them, and return one result each."""
        rows = [call if isinstance(call, dict) else call.model_dump() for call in tool_calls]
        return self._played({"tool_calls": rows}).get("results", [])

    def end(self, reward: float, success: bool | None = None) -> None:
        """End the episode with a reward of the program's own."""
        _request(f"{self.url}/end", self.api_key, {"reward": reward, "success": success})
        self.done = True

    def _played(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = _request(f"{self.url}/step", self.api_key, body)
        self.observation, self.done = answer["observation"], answer["done"]
        return answer


def _request(url: str, key: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a system proxy cannot reach loopback
    with opener.open(request) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


Function = Callable[[Episode], Any]
"""Plays an episode. A number that it returns is the episode's reward. It may be a coroutine function."""


def load_function(path: str) -> Function:
    """Return the function that `my_module:play` names."""
    module, _, name = path.partition(":")
    function: Function = getattr(importlib.import_module(module), name)
    return function


def run_function(function: Function) -> None:
    """Play the episode that the environment variables name."""
    episode = Episode.from_environment()
    result = function(episode)
    reward = asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
    if reward is not None and not episode.done:
        episode.end(float(reward))


async def _awaited(result: Any) -> Any:
    return await result


if __name__ == "__main__":
    run_function(load_function(sys.argv[1]))
