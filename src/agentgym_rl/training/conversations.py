"""Conversations to learn from, and their file formats.

Three formats are read. Trajectories: JSON lines as a run writes them. OpenAI's messages, as JSON lines or a JSON list,

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "tool_calls": [...]}], "tools": [...]}

where replies with `weight: 0` are not trained on. Conversations: AgentGym's JSON list,

    [{"item_id": "textcraft_0", "conversations": [{"from": "human", "loss": null, "value": "..."},
                                                  {"from": "gpt", "loss": true, "value": "..."}]}]

where only `gpt` turns with `loss: true` are trained on. There an instruction is a first `human` turn that `gpt`
acknowledges. Here it is a system message, as in an episode.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentgym_rl.common.chat_messages import from_openai, to_openai
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Message, StopReason, Trajectory

ACKNOWLEDGEMENTS = ("OK. I'll follow your instructions and try my best to solve the task.", "Ok.", "OK.")
"""Replies to an instruction in AgentGym's data; the first is used for writing."""


@dataclass(slots=True)
class Conversation:
    """Messages, and which of them to imitate."""

    item_id: str
    """Environment and item, such as `textcraft_0`."""
    messages: list[Message]
    trained: list[bool]
    """One per message; True only on assistant messages."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of the tools that the agent was offered."""


def to_conversation(trajectory: Trajectory) -> Conversation:
    """Return a trajectory as a conversation. Every reply is imitated except injected mistakes and wrong thoughts.

    A conversation can leave out whole replies only, so a reply that corrects its thought is left out with it. Token ids
    and log-probabilities are dropped, because they belong to one tokenizer. If the context was cut, the conversation is
    whole all the same, without summaries.
    """
    rows = zip(trajectory.messages, trajectory.imitated, trajectory.unimitated_chars, strict=True)
    kept = [(message, trained and not wrong) for message, trained, wrong in rows if not message.purpose]
    messages = [Message(m.role, m.content, tool_calls=m.tool_calls, tool_call_id=m.tool_call_id) for m, _ in kept]
    item_id = f"{trajectory.task.env}_{trajectory.task.item}"
    return Conversation(item_id, messages, [trained for _, trained in kept], trajectory.tools)


def find_files(patterns: Iterable[str]) -> list[Path]:
    """Return the files that paths, globs and run directories name, each once, in a fixed order."""
    files: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            # Training episodes only: an evaluation plays held-out items.
            matches = sorted((path / "trajectories").glob("step_*.jsonl"))
            needed = "a run directory with training episodes (trajectories/step_*.jsonl)"
        else:
            matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
            needed = "a file, a glob or a run directory"
        if not matches:
            raise ConfigError(f"data: {needed} is needed, {pattern!r} is none")
        files |= dict.fromkeys(matches)
    return list(files)


def read_trajectory_files(paths: Iterable[Path]) -> Iterator[Trajectory]:
    """Yield the usable episodes of `.jsonl` files. An incomplete last line, as a killed run leaves it, is skipped."""
    for path in paths:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("}\n"):
                    if file.readline():
                        raise ConfigError(f"{path} line {number} is not a JSON object: remove that line")
                    break
                try:
                    trajectory = Trajectory.from_json(line)
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(f"{path} line {number} is not a trajectory: {error!r}") from None
                if trajectory.stop is not StopReason.ERROR and trajectory.num_turns:
                    yield trajectory


def is_trajectory_file(path: Path) -> bool:
    if path.suffix not in (".json", ".jsonl"):
        raise ConfigError(f"{path}: trajectories (.jsonl) or conversations (.json) are needed, got {path.suffix!r}")
    if path.suffix == ".json":
        return False
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    try:
        row = json.loads(first)
    except ValueError:
        return True  # the reader of trajectories says what is wrong
    return not (isinstance(row, dict) and "messages" in row and "rewards" not in row)


def read_conversations(path: Path) -> list[Conversation]:
    """Read AgentGym's JSON, or OpenAI's messages."""
    try:
        text = path.read_text(encoding="utf-8")
        # Not splitlines(): a text in JSON may have U+2028 and other line separators.
        lines = [line for line in text.split("\n") if line.strip()]
        rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in lines]
        if not isinstance(rows, list):
            raise TypeError(f"a list is needed, it holds a {type(rows).__name__}")
        conversations = [_from_messages(row) if "messages" in row else _from_row(row) for row in rows]
        for number, conversation in enumerate(conversations, 1):
            if conversation.messages and conversation.messages[0].role not in ("system", "user"):
                first = conversation.messages[0].role
                raise ValueError(f"conversation {number} must begin with a system or user message, got {first!r}")
            roles = [message.role for message in conversation.messages]
            for place, pair in enumerate(pairwise(roles), 1):
                if pair == ("assistant", "assistant"):
                    raise ValueError(
                        f"conversation {number} needs a message of the user between two replies, its messages "
                        f"{place} and {place + 1} are both replies: join them"
                    )
        return conversations
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a list of AgentGym conversations or OpenAI messages: {error!r}") from None


def write_conversations(conversations: Iterable[Conversation], path: Path) -> int:
    """Write AgentGym's JSON and return the number of conversations. The inverse of `read_conversations`.

    A conversation with tools is written as OpenAI's messages, because AgentGym's turns cannot hold calls.
    """
    rows = [_to_messages(c) if c.tools else _to_row(c) for c in conversations]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return len(rows)


def convert(patterns: list[str], out: Path, *, keep_all: bool) -> int:
    """Write successful episodes, or all with `keep_all`, as AgentGym's JSON. Return their number."""
    if out.suffix != ".json" or not patterns:
        raise ConfigError(f"convert needs sources and then a .json file to write, got {str(out)!r} as the last")
    if out.exists():
        raise ConfigError(f"{out} exists already: choose another file")
    paths = find_files(patterns)
    other_files = [path for path in paths if not is_trajectory_file(path)]
    if other_files:
        raise ConfigError(f"convert needs files of trajectories (.jsonl), got {other_files[0]}")
    episodes = (t for t in read_trajectory_files(paths) if keep_all or t.success)
    return write_conversations(map(to_conversation, episodes), out)


def _from_row(row: dict[str, Any]) -> Conversation:
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    turns = row["conversations"]
    unknown = {turn["from"] for turn in turns} - set(roles)
    if unknown:
        raise ValueError(f"{row.get('item_id')}: from must be human or gpt, got {', '.join(sorted(map(str, unknown)))}")
    messages = [Message(roles[turn["from"]], str(turn["value"])) for turn in turns]  # type: ignore[arg-type]
    trained = [turn["from"] == "gpt" and turn.get("loss") is True for turn in turns]
    if _starts_with_instruction(messages, trained):
        messages = [Message("system", messages[0].content), *messages[2:]]
        trained = [False, *trained[2:]]
    return Conversation(str(row.get("item_id", "")), messages, trained)


def _starts_with_instruction(messages: list[Message], trained: list[bool]) -> bool:
    return (
        [m.role for m in messages[:3]] == ["user", "assistant", "user"]
        and not trained[1]
        and messages[1].content.strip() in ACKNOWLEDGEMENTS
    )


def _to_row(conversation: Conversation) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for message, trained in zip(conversation.messages, conversation.trained, strict=True):
        if message.role == "assistant":
            turns.append({"from": "gpt", "loss": trained, "value": message.content})
            continue
        turns.append({"from": "human", "loss": None, "value": message.content})
        if message.role == "system":
            turns.append({"from": "gpt", "loss": False, "value": ACKNOWLEDGEMENTS[0]})
    return {**_names(conversation), "conversations": turns}


def _names(conversation: Conversation) -> dict[str, str]:
    # `item_id` as AgentGym's tools read it. `task` has this package's item number, which AgentGym's lists do not have.
    return {"item_id": conversation.item_id, "task": "/".join(conversation.item_id.rsplit("_", 1))}


def _from_messages(row: dict[str, Any]) -> Conversation:
    messages = [from_openai(message) for message in row["messages"]]
    trained = [m["role"] == "assistant" and m.get("weight", 1) != 0 for m in row["messages"]]
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise TypeError(f"tools must be a list of JSON schemas, got {tools!r:.80}")
    return Conversation(str(row.get("item_id", "")), messages, trained, tools)


def _to_messages(conversation: Conversation) -> dict[str, Any]:
    messages = [to_openai(message) for message in conversation.messages]
    for row, trained in zip(messages, conversation.trained, strict=True):
        if row["role"] == "assistant" and not trained:
            row["weight"] = 0
    return {**_names(conversation), "messages": messages, "tools": conversation.tools}
