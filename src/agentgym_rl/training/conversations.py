"""Conversations to learn from, and the files they come in.

Two formats are read. Trajectories: JSON lines as a run writes them. Conversations: AgentGym's JSON list,

    [{"item_id": "textcraft_0", "conversations": [{"from": "human", "loss": null, "value": "..."},
                                                  {"from": "gpt", "loss": true, "value": "..."}]}]

where only `gpt` turns with `loss: true` are trained on. There an instruction is a first `human` turn that `gpt`
acknowledges; here it is a system message, which is what the model is given in play.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Message, StopReason, Trajectory

ACKNOWLEDGEMENTS = ("OK. I'll follow your instructions and try my best to solve the task.", "Ok.", "OK.")
"""What AgentGym's data lets the agent answer to an instruction; the first is what is written."""


@dataclass(slots=True)
class Conversation:
    """What was said, and which of it is to be imitated."""

    item_id: str
    """`textcraft_0`."""
    messages: list[Message]
    trained: list[bool]
    """One per message; True only on assistant messages."""


def of_trajectory(trajectory: Trajectory) -> Conversation:
    """Every reply is to be imitated but mistakes made on purpose. Ids and log-probabilities are left behind: they
    belong to one tokenizer."""
    messages = [Message(m.role, m.content) for m in trajectory.messages]
    item_id = f"{trajectory.task.env}_{trajectory.task.item}"
    return Conversation(item_id, messages, trajectory.imitated)


def find_files(patterns: Iterable[str]) -> list[Path]:
    """Files of paths, globs and run directories, each once, in a fixed order."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            # Training episodes only: those of an evaluation are of held-out items.
            some = sorted((path / "trajectories").glob("step_*.jsonl"))
            needed = "a run directory with training episodes (trajectories/step_*.jsonl)"
        else:
            some = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
            needed = "a file, a glob or a run directory"
        if not some:
            raise ConfigError(f"data: {needed} is needed, {pattern!r} is none")
        found |= dict.fromkeys(some)
    return list(found)


def read_trajectory_files(paths: Iterable[Path]) -> Iterator[Trajectory]:
    """Usable episodes of `.jsonl` files; one torn last line, as a killed run leaves it, is skipped."""
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
        raise ConfigError(f"{path}: trajectories (.jsonl) or conversations (.json) are needed")
    return path.suffix == ".jsonl"


def read_conversations(path: Path) -> list[Conversation]:
    """AgentGym's JSON."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise TypeError(f"a list is needed, it holds a {type(rows).__name__}")
        return [_read(row) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a list of AgentGym conversations: {error!r}") from None


def write_conversations(conversations: Iterable[Conversation], path: Path) -> int:
    """Write AgentGym's JSON and return how many; `read_conversations` is its inverse."""
    rows = [_written(conversation) for conversation in conversations]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return len(rows)


def convert(patterns: list[str], out: Path, *, keep_all: bool) -> int:
    """Write episodes, successes unless `keep_all`, as AgentGym's JSON and return how many."""
    if out.suffix != ".json" or not patterns:
        raise ConfigError(f"convert needs sources and then a .json file to write, the last is {str(out)!r}")
    if out.exists():
        raise ConfigError(f"{out} exists already: choose another file")
    paths = find_files(patterns)
    foreign = [path for path in paths if not is_trajectory_file(path)]
    if foreign:
        raise ConfigError(f"{foreign[0]} is no file of trajectories (.jsonl)")
    episodes = (t for t in read_trajectory_files(paths) if keep_all or t.success)
    return write_conversations(map(of_trajectory, episodes), out)


def _read(row: dict[str, Any]) -> Conversation:
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    turns = row["conversations"]
    unknown = {turn["from"] for turn in turns} - set(roles)
    if unknown:
        raise ValueError(f"{row.get('item_id')}: from must be human or gpt, got {', '.join(sorted(map(str, unknown)))}")
    messages = [Message(roles[turn["from"]], str(turn["value"])) for turn in turns]  # type: ignore[arg-type]
    trained = [turn["from"] == "gpt" and turn.get("loss") is True for turn in turns]
    if _opens_with_an_instruction(messages, trained):
        messages = [Message("system", messages[0].content), *messages[2:]]
        trained = [False, *trained[2:]]
    return Conversation(str(row.get("item_id", "")), messages, trained)


def _opens_with_an_instruction(messages: list[Message], trained: list[bool]) -> bool:
    return (
        [m.role for m in messages[:3]] == ["user", "assistant", "user"]
        and not trained[1]
        and messages[1].content.strip() in ACKNOWLEDGEMENTS
    )


def _written(conversation: Conversation) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for message, trained in zip(conversation.messages, conversation.trained, strict=True):
        if message.role == "assistant":
            turns.append({"from": "gpt", "loss": trained, "value": message.content})
            continue
        turns.append({"from": "human", "loss": None, "value": message.content})
        if message.role == "system":
            turns.append({"from": "gpt", "loss": False, "value": ACKNOWLEDGEMENTS[0]})
    # The id as AgentGym's tools read it, and the task: the number is one of this package, not of AgentGym's lists.
    task = "/".join(conversation.item_id.rsplit("_", 1))
    return {"item_id": conversation.item_id, "task": task, "conversations": turns}
