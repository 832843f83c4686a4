"""Conversations in and out: AgentGym's JSON with its loss flags, trajectories, globs and run directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers_for_tests import byte_level_bpe
from training_for_tests import counting_conversations

from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.errors import ConfigError
from agentgym_rl.training.conversations import (
    ACKNOWLEDGEMENTS,
    Conversation,
    convert,
    find_files,
    is_trajectory_file,
    read_conversations,
    read_trajectory_files,
    to_conversation,
    write_conversations,
)
from agentgym_rl.types import Message, StopReason, Task, ToolCall, Trajectory

PUBLISHED = [
    {
        "item_id": "textcraft_0",
        "conversations": [
            {"from": "human", "loss": None, "value": "You are given a few crafting commands."},
            {"from": "gpt", "loss": False, "value": ACKNOWLEDGEMENTS[0]},
            {"from": "human", "loss": None, "value": "Goal: craft a torch."},
            {"from": "gpt", "loss": True, "value": "Thought: I need coal.\nAction: get 1 coal"},
            {"from": "human", "loss": None, "value": "Got 1 coal"},
            {"from": "gpt", "loss": False, "value": "Action: a slip that is shown and not learned"},
            {"from": "human", "loss": None, "value": "Could not understand."},
            {"from": "gpt", "loss": True, "value": "Action: craft 1 torch using 1 coal, 1 stick"},
        ],
    }
]
"""The format of AgentGym's published data, with invented texts."""


def write(path: Path, rows: Any) -> Path:
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def episodes(count: int = 3, *, system: bool = True) -> list[Trajectory]:
    trajectories = []
    for number, messages in enumerate(counting_conversations(count)):
        opening = [Message("system", "Count – to the goal.")] if system else []
        turns = sum(m.role == "assistant" for m in messages)
        rewards = [0.0] * (turns - 1) + [float(number % 2)]
        infos: list[dict[str, Any]] = [{} for _ in range(turns - 1)] + [{"success": bool(number % 2)}]
        trajectories.append(
            Trajectory(f"t{number}", Task("counting", number), opening + messages, rewards, infos, StopReason.DONE)
        )
    return trajectories


def write_trajectories(path: Path, trajectories: list[Trajectory]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(t.to_json() + "\n" for t in trajectories), encoding="utf-8")
    return path


def test_the_published_format_is_read_with_its_loss_flags(tmp_path: Path) -> None:
    (conversation,) = read_conversations(write(tmp_path / "train.json", PUBLISHED))
    assert conversation.item_id == "textcraft_0"
    assert [m.role for m in conversation.messages] == [
        *("system", "user", "assistant", "user", "assistant", "user", "assistant"),
    ]
    assert conversation.messages[0].content == "You are given a few crafting commands."
    assert conversation.trained == [False, False, True, False, False, False, True]


def test_only_replies_with_loss_true_are_trained_on(tmp_path: Path) -> None:
    (conversation,) = read_conversations(write(tmp_path / "train.json", PUBLISHED))
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    sample = renderer.demonstration(conversation.messages, conversation.trained)
    trained = [token for token, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
    replies = [m.content for m in conversation.messages if m.role == "assistant"]
    assert trained == [*renderer.reply_ids(replies[0]), *renderer.reply_ids(replies[2])]
    # The untrained mistake is still in the context.
    slip = renderer.reply_ids(replies[1])
    assert any(sample.token_ids[i : i + len(slip)] == slip for i in range(len(sample.token_ids)))


@pytest.mark.parametrize("loss", [None, False, 1, "true"])
def test_anything_but_true_is_not_trained_on(tmp_path: Path, loss: Any) -> None:
    turns = [{"from": "human", "loss": None, "value": "a"}, {"from": "gpt", "loss": loss, "value": "b"}]
    (conversation,) = read_conversations(write(tmp_path / "x.json", [{"item_id": "x_1", "conversations": turns}]))
    assert conversation.trained == [False, False]


@pytest.mark.parametrize("system", [True, False])
def test_written_conversations_are_read_back_equal(tmp_path: Path, system: bool) -> None:
    conversations = [to_conversation(t) for t in episodes(system=system)]
    conversations[0].trained[-2] = False
    path = tmp_path / "new" / "out.json"
    assert write_conversations(conversations, path) == 3
    assert read_conversations(path) == conversations
    row = json.loads(path.read_text())[0]
    assert {turn["from"] for turn in row["conversations"]} == {"human", "gpt"}
    assert all(turn["loss"] is None for turn in row["conversations"] if turn["from"] == "human")


def test_an_untrained_first_reply_is_kept_if_not_an_acknowledgement(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "loss": None, "value": "A wall."},
        {"from": "gpt", "loss": False, "value": "go north"},
        {"from": "human", "loss": None, "value": "A door."},
        {"from": "gpt", "loss": True, "value": "open"},
    ]
    (conversation,) = read_conversations(write(tmp_path / "x.json", [{"item_id": "x_1", "conversations": turns}]))
    assert [m.role for m in conversation.messages] == ["user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(
    "rows",
    [
        {"item_id": "x"},
        [{"item_id": "x"}],
        [{"item_id": "x", "conversations": [{"from": "tool", "value": "a"}]}],
        [{"item_id": "x", "conversations": [{"from": "gpt"}]}],
        [{"item_id": "x", "conversations": [{"from": "gpt", "loss": True, "value": "go"}]}],
        [{"messages": [{"role": "assistant", "content": "go"}]}],
        [3],
    ],
)
def test_a_file_without_conversations_is_refused_by_name(tmp_path: Path, rows: Any) -> None:
    with pytest.raises(ConfigError, match=r"bad\.json is not a list of AgentGym conversations"):
        read_conversations(write(tmp_path / "bad.json", rows))


def test_failed_episodes_and_incomplete_last_lines_are_skipped(tmp_path: Path) -> None:
    trajectories = episodes()
    trajectories[1].stop, trajectories[1].error = StopReason.ERROR, "EnvError: broken"
    path = write_trajectories(tmp_path / "a.jsonl", trajectories)
    path.write_text(path.read_text() + '{"id": "to')
    assert [t.id for t in read_trajectory_files([path])] == ["t0", "t2"]


def test_a_damaged_line_is_an_error(tmp_path: Path) -> None:
    path = write_trajectories(tmp_path / "a.jsonl", episodes())
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0][:20], *lines[1:]]) + "\n")
    with pytest.raises(ConfigError, match="line 1 is not a JSON object"):
        list(read_trajectory_files([path]))
    path.write_text('{"id": 3}\n')
    with pytest.raises(ConfigError, match="line 1 is not a trajectory"):
        list(read_trajectory_files([path]))


def test_a_run_directory_gives_training_episodes_but_no_held_out_ones(tmp_path: Path) -> None:
    run = tmp_path / "run" / "trajectories"
    for name in ("eval_000000", "step_000002", "step_000001", "warmstart_000000"):
        write_trajectories(run / f"{name}.jsonl", episodes())
    assert [p.name for p in find_files([str(tmp_path / "run")])] == ["step_000001.jsonl", "step_000002.jsonl"]
    both = find_files([str(run / "step_*.jsonl"), str(run / "step_000001.jsonl")])
    assert [p.name for p in both] == ["step_000001.jsonl", "step_000002.jsonl"]  # each once


@pytest.mark.parametrize("pattern", ["nothing.json", "no/*.jsonl", "."])
def test_missing_files_are_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"data: .* is needed"):
        find_files([str(tmp_path / pattern)])


def test_a_conversation_has_one_flag_per_message() -> None:
    (first, *_) = [to_conversation(t) for t in episodes()]
    assert isinstance(first, Conversation)
    assert first.item_id == "counting_0"
    assert [m.role == "assistant" for m in first.messages] == first.trained


def test_convert_writes_successes_or_everything(tmp_path: Path) -> None:
    path = write_trajectories(tmp_path / "run" / "trajectories" / "step_000001.jsonl", episodes(4))
    assert convert([str(tmp_path / "run")], tmp_path / "won.json", keep_all=False) == 2
    assert [c.item_id for c in read_conversations(tmp_path / "won.json")] == ["counting_1", "counting_3"]
    assert convert([str(path)], tmp_path / "all.json", keep_all=True) == 4
    assert read_conversations(tmp_path / "all.json") == [to_conversation(t) for t in episodes(4)]
    with pytest.raises(ConfigError, match="exists already"):
        convert([str(path)], tmp_path / "all.json", keep_all=True)
    with pytest.raises(ConfigError, match="needs files of trajectories"):
        convert([str(tmp_path / "all.json")], tmp_path / "new.json", keep_all=True)
    with pytest.raises(ConfigError, match=r"a \.json file to write"):
        convert([str(path)], tmp_path / "new.jsonl", keep_all=True)


TOOLS = [{"type": "function", "function": {"name": "get", "description": "Get.", "parameters": {"type": "object"}}}]
CALLS = [ToolCall("get", {"count": 1, "item": "cöal"}, "call00000"), ToolCall("get", {"item": "stick"}, "call00001")]


def tool_episode() -> Trajectory:
    messages = [
        Message("system", "Craft."),
        Message("user", "Goal: craft a torch."),
        Message("assistant", "Both parts.", tool_calls=CALLS),
        Message("tool", "Got 1 coal", tool_call_id="call00000"),
        Message("tool", "Got 1 stick", tool_call_id="call00001"),
        Message("assistant", "", tool_calls=[ToolCall("craft", {}, "call00002")]),
        Message("tool", "Done.", tool_call_id="call00002"),
    ]
    infos = [{}, {"success": True}]
    return Trajectory("t", Task("textcraft", 3), messages, [0.0, 1.0], infos, StopReason.DONE, tools=TOOLS)


def test_conversations_with_tools_are_written_as_openai_messages(tmp_path: Path) -> None:
    conversations = [to_conversation(tool_episode()), to_conversation(episodes(1)[0])]
    conversations[0].trained[2] = False
    path = tmp_path / "out.json"
    write_conversations(conversations, path)
    assert read_conversations(path) == conversations
    row = json.loads(path.read_text())[0]
    assert row["tools"] == TOOLS
    assert row["messages"][2]["tool_calls"][0] == {
        "id": "call00000",
        "type": "function",
        "function": {"name": "get", "arguments": '{"count": 1, "item": "cöal"}'},
    }
    assert row["messages"][2]["weight"] == 0
    assert row["messages"][3] == {"role": "tool", "content": "Got 1 coal", "tool_call_id": "call00000"}


def test_openai_fine_tuning_files_are_read(tmp_path: Path) -> None:
    """JSON lines with messages and tools; arguments as text or as objects; null content."""
    call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": {"count": 1}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Craft."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "Got 1.", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Done.", "weight": 0},
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"messages": messages, "tools": TOOLS}) + "\n" for _ in range(2)))
    assert not is_trajectory_file(path)
    first, second = read_conversations(path)
    assert first == second
    assert first.messages == [
        Message("user", "Craft."),
        Message("assistant", "", tool_calls=[ToolCall("get", {"count": 1}, "c1")]),
        Message("tool", "Got 1.", tool_call_id="c1"),
        Message("assistant", "Done."),
    ]
    assert first.trained == [False, True, False, False]
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    sample = renderer.demonstration(first.messages, first.trained, first.tools)
    trained = [token for token, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
    assert renderer.tokenizer.decode(trained) == (
        '<tool_call>\n{"name": "get", "arguments": {"count": 1}}\n</tool_call><|im_end|>'
    )
    assert "<tool_response>\nGot 1.\n</tool_response>" in renderer.tokenizer.decode(sample.token_ids)
    write_trajectories(tmp_path / "played.jsonl", [tool_episode()])
    assert is_trajectory_file(tmp_path / "played.jsonl")


def test_two_replies_in_a_row_are_refused_by_number(tmp_path: Path) -> None:
    human, reply = {"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "loss": True}
    good, bad = ([human, *[reply] * count] for count in (1, 2))
    rows = [{"item_id": "maze_0", "conversations": turns} for turns in (good, bad)]
    with pytest.raises(ConfigError, match=r"conversation 2 needs .* its messages 2 and 3 are both replies"):
        read_conversations(write(tmp_path / "rows.json", rows))
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    messages = [{"messages": [user, assistant, assistant]}]
    with pytest.raises(ConfigError, match=r"conversation 1 needs .* its messages 2 and 3 are both replies"):
        read_conversations(write(tmp_path / "messages.json", messages))


def test_lines_of_json_may_have_other_line_separators(tmp_path: Path) -> None:
    path, text = tmp_path / "train.jsonl", "one\u2028two\x85three"
    row = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Done."}]}
    path.write_text(f"{json.dumps(row, ensure_ascii=False)}\n\n{json.dumps(row)}\n", encoding="utf-8")
    assert [conversation.messages[0].content for conversation in read_conversations(path)] == [text, text]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "robot", "content": "a"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [], "tools": "get"},
    ],
)
def test_bad_openai_messages_are_refused(tmp_path: Path, row: Any) -> None:
    with pytest.raises(ConfigError, match="OpenAI messages"):
        read_conversations(write(tmp_path / "bad.json", [row]))
