"""An agent written with the `openai` SDK. docs/guides/external-agents.md explains it.

A run sets OPENAI_BASE_URL and OPENAI_API_KEY, so `OpenAI()` would do as well. A client of `agentgym-rl proxy`, which
plays many episodes in one process, needs the episode's own.
"""

from __future__ import annotations

from openai import OpenAI

from agentgym_rl.agent.proxy.client import Episode


def play(episode: Episode) -> None:
    """Answer every observation with one call of the model, until the environment ends the episode."""
    client = OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    messages = [{"role": "user", "content": episode.observation}]
    while not episode.done:
        reply = client.chat.completions.create(model=episode.model, messages=messages)
        action = reply.choices[0].message.content or ""
        observation = episode.step(action)
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]


if __name__ == "__main__":
    play(Episode.from_environment())
