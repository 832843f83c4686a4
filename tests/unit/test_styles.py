"""Styles: what the agent is told, how oracles write in them, and several attempts as one episode."""

from __future__ import annotations

from typing import Any

import pytest
from test_rollout import TASK, Corridor

from agentgym_rl.agent.policy import OraclePolicy, RandomPolicy, ScriptedPolicy
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.agent.styles import STYLES, ReflectSession
from agentgym_rl.environment.formats import FORMATS, action_format
from agentgym_rl.environment.tools import ACT
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Limits, Message, Step, StopReason, ToolCall

LIMITS = Limits(max_turns=30, max_new_tokens=32, max_context=4000)


class Parsed(Corridor):
    """The corridor behind an action format, as a pool serves it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.parse = action_format(name).parse

    async def step(self, text: str) -> Step:
        return await super().step(self.parse(text))


@pytest.mark.parametrize("name", sorted(STYLES))
async def test_the_oracle_writes_in_every_style(name: str) -> None:
    style = STYLES[name]
    assert style.action_format in FORMATS
    inner = Parsed(style.action_format)
    env = style.wrap(inner, turns_per_attempt=5)
    assert env.instruction.startswith(inner.instruction)
    assert style.suffix in env.instruction
    trajectory = await rollout(TASK, env, OraclePolicy(env), LIMITS, id="t")
    assert trajectory.success
    assert trajectory.reward == 1.0
    assert inner.heard == ["go"] * 3
    assert trajectory.messages[0].content == env.instruction
    await env.close()
    assert inner.closed
    assert await env.render() == "<p>3</p>"


class Thoughtful(Corridor):
    async def advice(self) -> tuple[str, str]:
        return f"Room {self.room} {{action}} is not the last.", "go"


async def test_the_oracle_writes_a_thought_if_the_style_has_one() -> None:
    for name, inner, written in (
        ("act", Thoughtful(), "go"),
        ("react", Thoughtful(), "Thought: Room 0 {action} is not the last.\nAction: go"),
        ("reflect", Thoughtful(), "Thought: Room 0 {action} is not the last.\nAction: go"),
        ("plan", Corridor(), "Thought: This is the next step.\nAction: go"),
    ):
        env = STYLES[name].wrap(inner, turns_per_attempt=5)
        await env.reset(0)
        assert await env.oracle() == written
        assert await env.advice() == ("", written)


@pytest.mark.parametrize("action", ["look at lamp", "wait", "go_back", 'say "hi" to {Bob}', "click [7]"])
@pytest.mark.parametrize("name", ["act", "react", "plan", "function_call", "code"])
def test_every_style_writes_what_its_format_reads(name: str, action: str) -> None:
    style = STYLES[name]
    assert action_format(style.action_format).parse(style.write(action, "Why not?")) == action


async def test_style_tool_writes_calls_and_keeps_thoughts() -> None:
    inner = Thoughtful(tools=[ACT.schema()])
    env = STYLES["tool"].wrap(inner)
    assert env.tools == inner.tools
    trajectory = await rollout(TASK, env, OraclePolicy(env), LIMITS, id="t")
    assert trajectory.success
    reply = trajectory.messages[2]
    assert reply.content == "Room 0 {action} is not the last."
    assert reply.tool_calls == [ToolCall("act", {"action": "go"}, "call00000")]
    assert trajectory.messages[3] == Message("tool", "You are in room 1 of 3.", tool_call_id="call00000")
    assert trajectory.tools == [ACT.schema()]
    await rollout(TASK, env, RandomPolicy(env, 1), LIMITS, id="t")
    assert set(inner.heard) == {"go", "wait"}


async def test_random_play_writes_in_the_style() -> None:
    inner = Parsed("react")
    env = STYLES["react"].wrap(inner)
    await rollout(TASK, env, RandomPolicy(env, 1), LIMITS, id="t")
    assert set(inner.heard) == {"go", "wait"}


def test_plan_and_reflect_add_their_instructions() -> None:
    assert "plan" in STYLES["plan"].suffix
    assert "reflection" in STYLES["reflect"].suffix
    assert STYLES["act"].suffix == ""
    with pytest.raises(ConfigError, match="turns_per_attempt"):
        STYLES["reflect"].wrap(Corridor())
    with pytest.raises(ConfigError, match="got 0 and 3"):
        ReflectSession(Corridor(), 0, 3)


class Trap(Corridor):
    """`left` ends it in failure after paying a little, `right` twice succeeds; every attempt pays 0.25 a step."""

    resets: int = 0

    async def reset(self, item: int) -> Step:
        self.resets += 1
        self.room = 0
        return Step(f"Item {item}: a fork.", info={"state_key": "fork"})

    async def step(self, text: str) -> Step:
        self.heard.append(text)
        if text == "left":
            return Step("A pit.", 0.25, True, {"success": False, "valid": True, "state_key": "pit"})
        self.room += 1
        won = self.room == 2
        info: dict[str, Any] = {"valid": True, "state_key": str(self.room)}
        return Step(
            "Gold!" if won else "A hall.", 0.75 if won else 0.25, won, info | ({"success": True} if won else {})
        )


async def test_a_failed_attempt_is_reflected_on_and_played_again() -> None:
    inner = Trap()
    env = ReflectSession(inner, attempts=3, turns_per_attempt=4)
    script = ["right", "left", "Left is a pit, go right.", "right", "right"]
    trajectory = await rollout(TASK, env, ScriptedPolicy(script, env.instruction), LIMITS, id="t")
    assert trajectory.stop is StopReason.DONE
    assert trajectory.success
    # The reflection stays in the conversation and never reaches the environment.
    assert inner.heard == ["right", "left", "right", "right"]
    assert inner.resets == 2
    contents = [m.content for m in trajectory.messages]
    assert "A pit." in contents[5]
    assert "Attempt 1 of 3 failed" in contents[5]
    assert contents[6:8] == ["Left is a pit, go right.", "Item 7: a fork."]
    # Paid once, at the end, with the rewards of the last attempt; what the environment gave is still on record.
    assert trajectory.rewards == [0, 0, 0, 0, 1.0]
    assert [info.get("env_reward") for info in trajectory.infos] == [0.25, 0.25, None, 0.25, 0.75]
    assert [info["attempt"] for info in trajectory.infos] == [1, 1, 1, 2, 2]
    assert [info.get("reflection", False) for info in trajectory.infos] == [False, False, True, False, False]
    keys = [info["state_key"] for info in trajectory.infos]
    assert keys == ["fork", "1", "reflection 1: pit", "fork", "1"]


async def test_the_last_attempt_decides() -> None:
    env = ReflectSession(Trap(), attempts=2, turns_per_attempt=4)
    trajectory = await rollout(TASK, env, ScriptedPolicy(["left", "Hm.", "right", "left"]), LIMITS, id="t")
    assert trajectory.stop is StopReason.DONE
    assert not trajectory.success
    assert trajectory.rewards == [0, 0, 0, 0.5]


async def test_an_attempt_may_run_out_of_turns() -> None:
    inner = Corridor()
    env = ReflectSession(inner, attempts=2, turns_per_attempt=2)
    trajectory = await rollout(TASK, env, ScriptedPolicy(["go", "go", "Too slow.", "go", "go"]), LIMITS, id="t")
    assert trajectory.stop is StopReason.DONE
    assert not trajectory.success
    assert inner.heard == ["go"] * 4
    assert inner.room == 2


async def test_success_at_once_needs_no_reflection() -> None:
    env = ReflectSession(Trap(), attempts=3, turns_per_attempt=4)
    trajectory = await rollout(TASK, env, ScriptedPolicy(["right", "right"]), LIMITS, id="t")
    assert trajectory.success
    assert trajectory.rewards == [0, 1.0]


async def test_a_session_can_be_played_again() -> None:
    env = ReflectSession(Trap(), attempts=2, turns_per_attempt=4)
    for _ in range(2):
        trajectory = await rollout(TASK, env, ScriptedPolicy(["left", "Hm.", "left"]), LIMITS, id="t")
        assert [info["attempt"] for info in trajectory.infos] == [1, 1, 2]


async def test_while_reflecting_oracle_and_actions_are_plain_text() -> None:
    env = ReflectSession(Trap(), attempts=2, turns_per_attempt=4)
    await env.reset(0)
    assert await env.oracle() == "go"
    await env.step("left")
    assert await env.actions() == [await env.oracle()]
    assert "again" in await env.oracle()
