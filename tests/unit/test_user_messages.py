"""Environments with a user: replies without a call are messages, and tools depend on the item and the state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
from scripted_engine_for_tests import ScriptedEngine
from servers_for_tests import server_in_thread
from tokenizers_for_tests import byte_level_bpe

from agentgym_rl.agent.policy import EnginePolicy, OraclePolicy
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.agent.session_wrapper import ForkableSession
from agentgym_rl.agent.styles import STYLES
from agentgym_rl.agent.trees import Branching, TreeCollector
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.environment.tools import Tool
from agentgym_rl.run.demonstrations import to_sample
from agentgym_rl.types import (
    Completion,
    EnvSession,
    Limits,
    Sampling,
    Step,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
)

LIMITS = Limits(max_turns=8, max_new_tokens=900, max_context=9000)
PLACE = {"place": {"type": "string"}}


class Desk:
    """A user asks for a ride, by train on even items, then for a hotel, for which a tool comes later."""

    name: ClassVar[str] = "desk"
    instruction: ClassVar[str] = "Book what the user asks for. Write the action, such as train Oslo, or a message."
    tool_instruction: ClassVar[str] = "Book what the user asks for. A reply without a call is a message."
    splits: ClassVar[Mapping[str, range]] = {"train": range(4), "test": range(4, 8)}
    subsets: ClassVar[tuple[str, ...]] = ()
    cheap: ClassVar[bool] = True
    takes_messages: ClassVar[bool] = True

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ()

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        return tuple(Tool(name, f"Book a {name}.", f"{name} {{place}}", PLACE) for name in ("train", "bus", "hotel"))

    def item_tools(self) -> list[str]:
        return [self.ride, *(["hotel"] if self.turn else [])]

    def reset(self, item: int) -> str:
        self.ride, self.turn, self.booked = ("bus", "train")[item % 2 == 0], 0, [""]
        return "A ride to Oslo, please."

    def step(self, text: str) -> Step:
        if text in (f"{self.ride} Oslo", "hotel Oslo"):
            self.booked.append(text)
            return Step(f"Booked {text}.", info={"valid": True})
        if self.turn == 0:
            self.turn = 1
            return Step("And a hotel. You may now call hotel(place).", info={"valid": True})
        success = self.booked[-1] == "hotel Oslo" and text != ""
        return Step("Thanks.", float(success), True, {"valid": True, "success": success})

    def oracle(self) -> str:
        wanted = "hotel Oslo" if self.turn else f"{self.ride} Oslo"
        return "It is booked." if self.booked[-1] == wanted else wanted

    def close(self) -> None:
        pass


@pytest.fixture(params=["in process", "over HTTP"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[LocalPool | RemotePool]:
    if request.param == "in process":
        local = LocalPool({"desk": Desk}, action_format="tool")
        yield local
        await local.close()
        return
    with server_in_thread({"desk": Desk}) as server:
        remote = RemotePool({"desk": f"{server.url}/desk"}, action_format="tool")
        yield remote
        await remote.close()


def names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def test_the_messages_capability_is_listed() -> None:
    from agentgym_rl.environment.server import capabilities

    assert capabilities(Desk) == ["oracle", "tools", "messages"]


async def test_a_branch_of_a_tree_has_the_tools_of_its_item_and_state(pool: LocalPool | RemotePool) -> None:
    """In process it continues from a copy of the environment, over HTTP it replays the shared turns."""
    offered: list[list[str]] = []

    class Noting(OraclePolicy):
        async def reply(self, *arguments: Any) -> Any:
            offered.append(names(self._env.tools))
            return await super().reply(*arguments)

    shape = Branching(roots=1, branches=2, depth=1)
    collect = TreeCollector(shape, pool, lambda session, seed: Noting(session), 1, 4, 0)
    (group,) = await collect([Task("desk", 1)], LIMITS, 1)
    assert [(t.stop, t.success) for t in group.trajectories] == [(StopReason.DONE, True)] * 3
    assert all(t.shared_turns for t in group.trajectories[1:])
    assert [names(t.tools) for t in group.trajectories] == [["bus"]] * 3
    assert {tuple(tools) for tools in offered} == {("bus",), ("bus", "hotel")}


class DeskEngine(ScriptedEngine):
    """Gives the next reply of the script to the conversation in a prompt, whatever the session."""

    renderer: ClassVar[Renderer] = Renderer(byte_level_bpe("chatml"), "chatml", thoughts="drop")

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        replies = self.renderer.tokenizer.decode(prompt_ids).count("<|im_start|>assistant") - 1
        self.sessions[session] = replies
        return await super().generate(prompt_ids, sampling, session)


async def test_every_prompt_of_a_branch_shows_the_tools_of_its_first(pool: LocalPool | RemotePool) -> None:
    """The prompts are rendered whole, and the tool that comes later is told by an observation."""
    renderer = DeskEngine.renderer
    renderer.require_tools()
    train, hotel = ([ToolCall(name, {"place": "Oslo"})] for name in ("train", "hotel"))
    engine = DeskEngine(
        [renderer.reply_ids(*reply) for reply in (("", train), ("Booked.",), ("", hotel), ("Booked, too.",))]
    )

    def policy(session: EnvSession, seed: int) -> EnginePolicy:
        return EnginePolicy(engine, renderer, Sampling(1), instruction=session.instruction, tools=session.tools)

    collect = TreeCollector(Branching(roots=1, branches=1, depth=3), pool, policy, 1, 4)
    (group,) = await collect([Task("desk", 0)], LIMITS, 1)
    assert {t.shared_turns for t in group.trajectories} == {0, 1, 2, 3}
    assert [(t.success, t.num_segments) for t in group.trajectories] == [(True, 1)] * 4
    assert len(set(map(tuple, engine.prompts))) == 4, "equal replies have equal prompts"


async def test_a_resumed_copy_announces_tools_that_come_later() -> None:
    pool = LocalPool({"desk": Desk}, action_format="tool")
    session = await pool.open("desk")
    await session.reset(0)
    assert isinstance(session, ForkableSession)
    copy = await session.fork()
    for _ in range(2):  # by hand, and again from the copy
        assert names(session.tools) == ["train"]
        await session.call([], "Where to?")
        assert names(session.tools) == ["train", "hotel"]
        await session.resume(copy)
    await pool.close()


async def test_tools_are_those_of_the_item_and_the_state(pool: LocalPool | RemotePool) -> None:
    session = await pool.open("desk")
    assert names(session.tools) == ["train", "bus", "hotel"], "before a reset: all"
    assert session.instruction == Desk.tool_instruction
    for item, ride, other in ((0, "train", "bus"), (1, "bus", "train")):
        await session.reset(item)
        assert names(session.tools) == [ride]
        refused = await session.call([ToolCall(other, {"place": "Oslo"}), ToolCall("hotel", {"place": "Oslo"})])
        assert refused.results == [
            f"Invalid call: there is no tool {other!r}, only {ride}.",
            f"Invalid call: there is no tool 'hotel', only {ride}.",
        ]
        assert refused.info["valid"] is False
        step = await session.call([ToolCall(ride, {"place": "Oslo"})], "I book it.")
        assert step.results == [f"Booked {ride} Oslo."]
        step = await session.call([], "<think>What next?</think>\nYour ride is booked.")
        assert (step.observation, step.results, step.info["valid"]) == (
            "And a hotel. You may now call hotel(place).",
            [],
            True,
        )
        assert names(session.tools) == [ride, "hotel"]
    assert session.call_of("hotel Oslo") == ToolCall("hotel", {"place": "Oslo"})
    assert session.call_of("It is booked.") is None


async def test_the_oracle_calls_and_writes_messages(pool: LocalPool | RemotePool) -> None:
    session = STYLES["tool"].wrap(await pool.open("desk"))
    trajectory = await rollout(Task("desk", 2), session, OraclePolicy(session), LIMITS, id="t")
    assert trajectory.success
    assert names(trajectory.tools) == ["train"], "those that the first prompt shows"
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant", "tool", "assistant", "user"]
    assert [m.role for m in trajectory.messages] == roles
    replies = [m for m in trajectory.messages if m.role == "assistant"]
    assert [len(m.tool_calls or ()) for m in replies] == [1, 0, 1, 0]
    assert replies[1].content == replies[3].content == "It is booked."
    assert Trajectory.from_json(trajectory.to_json()).messages == trajectory.messages


@pytest.mark.parametrize("style", ["chatml", "llama3", "mistral", "qwen"])
async def test_messages_between_calls_are_recorded_token_by_token(style: str) -> None:
    """A sampled episode has the ids that its demonstration has, and the prompt of the first turn shows its tools."""
    pool = LocalPool({"desk": Desk}, action_format="tool")
    renderer = Renderer(byte_level_bpe(style), style)
    session = STYLES["tool"].wrap(await pool.open("desk"))
    shown = await rollout(Task("desk", 0), session, OraclePolicy(session), LIMITS, id="t")
    replies = [renderer.reply_ids(m.content, m.tool_calls) for m in shown.messages if m.role == "assistant"]
    engine = ScriptedEngine(replies)
    policy = EnginePolicy(engine, renderer, Sampling(900), instruction=session.instruction, tools=session.tools)
    played = await rollout(Task("desk", 0), session, policy, LIMITS, id="t")
    await pool.close()
    assert played.error is None
    assert played.success
    assert [m.token_ids for m in played.messages if m.role == "assistant"] == replies
    assert to_sample(shown, renderer).token_ids == played.token_ids
    assert engine.prompts[0] == renderer.prompt(played.messages[:2], shown.tools)


async def test_an_empty_reply_is_a_message_that_the_environment_answers() -> None:
    pool = LocalPool({"desk": Desk}, action_format="tool")
    session = await pool.open("desk")
    await session.reset(0)
    await session.call([], "x")
    step = await session.call([], "")
    await pool.close()
    assert (step.done, step.info["success"]) == (True, False)
