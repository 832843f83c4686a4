"""An agent written with Pydantic AI. Its tools are the environment's. docs/guides/external-agents.md explains it."""

from __future__ import annotations

import json
from typing import Any

from pydantic_ai import Agent, Tool, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from agentgym_rl.agent.proxy.client import Episode


async def play(episode: Episode) -> float | None:
    """Let the agent call tools until the environment ends the episode. An agent that gives up gets 0."""
    provider = OpenAIProvider(base_url=episode.base_url, api_key=episode.api_key)
    tools = [environment_tool(episode, tool["function"]) for tool in episode.tools]
    agent = Agent(OpenAIChatModel(episode.model, provider=provider), tools=tools)
    try:
        async with agent.iter(episode.observation) as run:
            async for _ in run:
                if episode.done:
                    return None
    except UnexpectedModelBehavior:  # a reply that the library refuses, such as a call of an unknown tool
        pass
    return 0.0


def environment_tool(episode: Episode, function: dict[str, Any]) -> Tool:
    """Return a tool of the agent that plays one of the environment's."""

    def call(**arguments: Any) -> str:
        row = {"function": {"name": function["name"], "arguments": json.dumps(arguments)}}
        return episode.call([row])[0]

    # One call at a time, because each of them changes the environment.
    return Tool.from_schema(call, function["name"], function["description"], function["parameters"], sequential=True)
