"""An agent written with smolagents. Its tools are the environment's. docs/guides/external-agents.md explains it.

An observation of KeyDoor says all that matters, so every step is a new run of the agent, without the steps before it.
In a longer run smolagents would repeat earlier calls as text. Either way every call of the model is a new segment.
"""

from __future__ import annotations

import json
from typing import Any

from openai import DefaultHttpxClient
from smolagents import ActionStep, LogLevel, OpenAIModel, PromptTemplates, Tool, ToolCallingAgent
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

from agentgym_rl.agent.proxy.client import Episode

PROMPTS = PromptTemplates({**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Call a tool."})
"""Short prompts for a small model. Without them the system message has some 2,000 words."""
HTTP = DefaultHttpxClient()
"""Made before episodes fork, as is the import of `openai`: both take longer than an episode."""
MAX_STEPS = 12
"""Steps of the agent. One without a valid call plays nothing."""


def play(episode: Episode) -> float | None:
    """Let the agent call tools until the environment ends the episode. An agent that gives up gets 0."""
    model = OpenAIModel(
        episode.model, api_base=episode.base_url, api_key=episode.api_key, client_kwargs={"http_client": HTTP}
    )
    tools = [EnvironmentTool(episode, tool["function"]) for tool in episode.tools]
    agent = ToolCallingAgent(tools, model, PROMPTS, verbosity_level=LogLevel.OFF)
    for _ in range(MAX_STEPS):
        for event in agent.run(episode.observation, stream=True):
            if isinstance(event, ActionStep):
                break
        if episode.done:
            return None
    return 0.0


class EnvironmentTool(Tool):
    """A tool of the agent that plays one of the environment's."""

    output_type = "string"
    skip_forward_signature_validation = True

    def __init__(self, episode: Episode, function: dict[str, Any]) -> None:
        self.name, self.description = function["name"], function["description"]
        properties = function["parameters"]["properties"]
        self.inputs = {name: {"description": name, **schema} for name, schema in properties.items()}
        self._episode = episode
        super().__init__()

    def forward(self, **arguments: Any) -> str:
        row = {"function": {"name": self.name, "arguments": json.dumps(arguments)}}
        return self._episode.call([row])[0]
