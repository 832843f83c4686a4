"""An agent that judges itself: a drafting call, a deciding call, and a reward of its own.

No environment is played. The observation of KeyDoor is only the text of the task.
"""

from __future__ import annotations

from openai import OpenAI

from agentgym_rl.agent.proxy.client import Episode


def play(episode: Episode) -> float:
    """Ask twice, the second time about the first answer, and return the reward: 1 if a key was taken."""
    client = OpenAI()
    draft = client.responses.create(model=episode.model, input=episode.observation).output_text
    question = [{"role": "user", "content": f"{episode.observation}\n{draft}"}]
    answer = client.chat.completions.create(model=episode.model, messages=question).choices[0].message.content
    return float("key" in (answer or ""))
