"""Tasks for an MCP server: the server, the tasks and the reward in one file. Run it to see the oracle play.

python examples/mcp_notes.py                                play three tasks
python examples/mcp_notes.py serve                          the MCP server alone, over stdin and stdout
agentgym-rl check-env mcp:notes --kwarg ...                 the kwargs are those of the recipe in docs/guides/bridges.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

if TYPE_CHECKING:
    from agentgym_rl.environment.bridges.mcp import Episode

# The server. Any MCP server will do: it need not know of tasks, rewards or this package.
server = MCPServer("notes", log_level="ERROR")
notes: dict[str, str] = {}


@server.tool()
def write_note(title: str, text: str) -> str:
    """Write a note, replacing one of the same title."""
    notes[title] = text
    return f"Wrote {title}."


@server.tool()
def read_note(title: str) -> str:
    """Return the text of a note."""
    if title not in notes:
        raise ToolError(f"there is no note {title!r}: there are {', '.join(notes) or 'none'}")
    return notes[title]


@server.tool()
def clear_notes() -> str:
    """Delete all notes."""
    notes.clear()
    return "Cleared."


# The tasks: a prompt, calls that set the stage, the calls of a solution, and anything that the reward needs.
def task(number: int) -> dict[str, object]:
    city = ("Paris", "Quito", "Oslo", "Cairo", "Lima")[number % 5]
    return {
        "prompt": f"Copy the note 'trip {number}' to a note titled 'plan'.",
        "split": "test" if number % 4 == 0 else "train",
        "setup": [{"name": "write_note", "arguments": {"title": f"trip {number}", "text": f"Go to {city}."}}],
        "solution": [
            {"name": "read_note", "arguments": {"title": f"trip {number}"}},
            {"name": "write_note", "arguments": {"title": "plan", "text": f"Go to {city}."}},
        ],
        "expected": f"Go to {city}.",
    }


TASKS = [task(number) for number in range(20)]


def reward(episode: Episode) -> float:
    """Return 1 if the server has the note that the task asks for."""
    return float(episode.call("read_note", {"title": "plan"}) == episode.task["expected"])


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        server.run()
        return
    from agentgym_rl.environment.bridges.mcp import mcp_class

    command = [sys.executable, str(Path(__file__).resolve()), "serve"]
    env = mcp_class("notes", command=command, tasks=TASKS, reward=reward, reset_tool="clear_notes")()
    for item in (0, 1, 15):
        print(f"item {item}: {env.reset(item)}")
        done = False
        while not done:
            action = env.oracle()  # type: ignore[attr-defined]
            step = env.step(action)
            done = step.done
            print(f"  > {json.loads(action)['name']:10} {step.observation}")
        print(f"  reward {step.reward:g}")
    env.close()


if __name__ == "__main__":
    main()
