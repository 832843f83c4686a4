"""The loop: every ending has a name, and what was sampled is what is recorded, id by id."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from scripted_engine_for_tests import ScriptedEngine, scripted_logprob
from tokenizers_for_tests import byte_level_bpe, split_segmentation, word_level

from agentgym_rl.agent.policy import MAX_OBSERVATION_CHARS, EnginePolicy, Policy, Reply, ScriptedPolicy
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.environment.tools import ACT, call_of, play_calls
from agentgym_rl.errors import EnvError
from agentgym_rl.types import Limits, Message, Observation, Sampling, Step, StopReason, Task, ToolCall, Trajectory

TASK = Task("corridor", 7)
LIMITS = Limits(max_turns=6, max_new_tokens=32, max_context=4000)


@dataclass
class Corridor:
    """Three rooms in a row: `go` moves on, anything else is answered and changes nothing. Real, and small."""

    name: str = "corridor"
    instruction: str = "Say go to walk to the end of the corridor."
    room: int = 0
    heard: list[str] = field(default_factory=list)
    closed: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)

    async def reset(self, item: int) -> Step:
        self.room = 0
        return Step(f"Item {item}. You are in room 0 of 3.", info={"state_key": "0"})

    async def step(self, text: str) -> Step:
        self.heard.append(text)
        valid = text == "go"
        self.room += valid
        done = self.room == 3
        info: dict[str, Any] = {"valid": valid, "state_key": str(self.room)}
        if done:
            info["success"] = True
        return Step(f"You are in room {self.room} of 3.", float(done), done, info)

    async def call(self, calls: list[ToolCall], message: str = "") -> Step:
        return await play_calls([ACT], calls, self.step, {"state_key": str(self.room)})

    def call_of(self, action: str) -> ToolCall | None:
        return call_of([ACT], action, self.name)

    async def actions(self) -> list[str]:
        return ["go", "wait"]

    async def oracle(self) -> str:
        return "go"

    async def advice(self) -> tuple[str, str]:
        return "", await self.oracle()

    async def render(self) -> str:
        return f"<p>{self.room}</p>"

    async def close(self) -> None:
        self.closed = True


async def play(env: Corridor, policy: Policy, limits: Limits = LIMITS, timeout_s: float | None = None) -> Trajectory:
    trajectory = await rollout(TASK, env, policy, limits, id="t", timeout_s=timeout_s)
    replies = [m for m in trajectory.messages if m.role == "assistant"]
    assert len(trajectory.rewards) == len(trajectory.infos) == len(replies)
    assert trajectory.horizon == limits.max_turns
    assert trajectory.seconds > 0
    assert Trajectory.from_json(trajectory.to_json()).to_json() == trajectory.to_json()
    return trajectory


async def test_done() -> None:
    env = Corridor()
    trajectory = await play(env, ScriptedPolicy(["go", "sing", "go", "go"], env.instruction))
    assert trajectory.stop is StopReason.DONE
    assert trajectory.success
    assert trajectory.error is None
    assert trajectory.rewards == [0, 0, 0, 1]
    # Keys are those of the state the reply was given in, not of the state it led to.
    assert [info["state_key"] for info in trajectory.infos] == ["0", "1", "1", "2"]
    assert [info["valid"] for info in trajectory.infos] == [True, False, True, True]
    assert [m.role for m in trajectory.messages] == ["system"] + ["user", "assistant"] * 4 + ["user"]
    assert trajectory.messages[-1] == Message("user", "You are in room 3 of 3.")
    assert not env.closed  # whoever opened it closes it


async def test_max_turns() -> None:
    env = Corridor()
    trajectory = await play(env, ScriptedPolicy(["go"] * 9), Limits(2, 32, 4000))
    assert trajectory.stop is StopReason.MAX_TURNS
    assert trajectory.num_turns == 2
    assert env.heard == ["go", "go"]
    assert not trajectory.success


async def test_an_episode_that_ends_at_reset_has_no_turns() -> None:
    class Over(Corridor):
        async def reset(self, item: int) -> Step:
            return Step("Nothing to do.", done=True)

    trajectory = await play(Over(), ScriptedPolicy([]))
    assert (trajectory.stop, trajectory.num_turns) == (StopReason.DONE, 0)
    assert trajectory.messages == [Message("user", "Nothing to do.")]


def engine_policy(replies: list[Any], renderer: Renderer, **sampling: Any) -> tuple[ScriptedEngine, EnginePolicy]:
    engine = ScriptedEngine(replies, encode=renderer.reply_ids)
    settings = Sampling(max_new_tokens=1, **sampling)
    return engine, EnginePolicy(engine, renderer, settings, "session", instruction=Corridor.instruction)


async def test_length_records_the_reply_and_spares_the_environment() -> None:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    engine, policy = engine_policy(["go", "I think that I should rather go on to the next room"], renderer)
    env = Corridor()
    trajectory = await play(env, policy, Limits(6, 5, 4000))
    assert trajectory.stop is StopReason.LENGTH
    assert env.heard == ["go"]
    assert trajectory.rewards == [0.0, 0.0]
    assert trajectory.infos[-1] == {"state_key": "1"}
    assert len(trajectory.messages[-1].token_ids) == 5
    assert trajectory.messages[-1].logprobs == [scripted_logprob(t) for t in trajectory.messages[-1].token_ids]
    assert engine.sessions == {}


async def test_max_context_before_a_reply_leaves_the_observation_unread() -> None:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    first = len(
        renderer.prompt([Message("system", Corridor.instruction), Message("user", "Item 7. You are in room 0 of 3.")])
    )
    used = first + len(renderer.reply_ids("go")) + len(renderer.follow_up("You are in room 1 of 3."))
    for limit, turns in ((used, 1), (used + len(renderer.reply_ids("go")), 2), (first, 0), (1, 0)):
        engine, policy = engine_policy(["go"] * 3, renderer)
        trajectory = await play(Corridor(), policy, Limits(6, 32, limit))
        assert trajectory.stop is StopReason.MAX_CONTEXT
        assert trajectory.num_turns == turns == len(engine.prompts)
        assert trajectory.messages[-1].role == "user"
        assert trajectory.messages[-1].token_ids == []
        assert len(trajectory.token_ids) <= limit
        assert engine.sessions == {}


async def test_max_context_caps_the_reply_and_names_itself() -> None:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    first = len(
        renderer.prompt([Message("system", Corridor.instruction), Message("user", "Item 7. You are in room 0 of 3.")])
    )
    engine, policy = engine_policy(["I think that I should rather go on"], renderer)
    env = Corridor()
    trajectory = await play(env, policy, Limits(6, 32, first + 3))
    assert trajectory.stop is StopReason.MAX_CONTEXT
    assert engine.samplings[0].max_new_tokens == 3
    assert len(trajectory.token_ids) == first + 3
    assert env.heard == []


@dataclass
class LongCorridor(Corridor):
    """Says so much in room `long_room` that no context holds it."""

    long_room: int = 0
    text: str = "You see a wall. " * 1_000_000

    async def reset(self, item: int) -> Step:
        step = await super().reset(item)
        return replace(step, observation=self.text) if self.long_room == 0 else step

    async def step(self, text: str) -> Step:
        step = await super().step(text)
        return replace(step, observation=self.text) if self.room == self.long_room else step


@pytest.mark.parametrize("long_room", [0, 1])
async def test_a_huge_observation_is_cut_before_it_is_tokenised(long_room: int) -> None:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    _, policy = engine_policy(["go"] * 3, renderer)
    trajectory = await play(LongCorridor(long_room=long_room), policy, Limits(6, 8, 100))
    assert trajectory.stop is StopReason.MAX_CONTEXT
    assert trajectory.num_turns == long_room
    last = Trajectory.from_json(trajectory.to_json()).messages[-1]
    assert last.cut_chars > 15_000_000
    assert last.content.startswith("You see a wall. ")
    assert last.content.endswith(f"\n[{last.cut_chars} characters cut]")
    # What is recorded is what was tokenised: no more than 100 of the longest tokens.
    assert len(last.content) < 100 * renderer.max_token_chars + 40


async def test_a_huge_last_observation_is_recorded_in_part() -> None:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    for policy in (engine_policy(["go"] * 3, renderer)[1], ScriptedPolicy(["go"] * 3)):
        trajectory = await play(LongCorridor(long_room=3), policy)
        assert trajectory.stop is StopReason.DONE
        last = trajectory.messages[-1]
        assert last.cut_chars == 16_000_000 - MAX_OBSERVATION_CHARS
        assert len(last.content) < MAX_OBSERVATION_CHARS + 40


async def test_an_observation_that_could_fit_is_not_cut() -> None:
    """An observation made only of the longest token that fills the context exactly."""
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    longest = max(renderer.tokenizer.get_vocab(), key=lambda t: len(t) * (t.startswith("Ġ"))).replace("Ġ", " ")
    assert len(renderer.encode(longest * 50)) == 50
    _, policy = engine_policy(["stop"], renderer)
    news = [Message("system", Corridor.instruction), Message("user", longest * 50)]
    limit = len(renderer.prompt(news)) + 1
    trajectory = await play(LongCorridor(text=longest * 50), policy, Limits(6, 8, limit))
    assert trajectory.num_turns == 1
    assert trajectory.messages[1].content == longest * 50
    assert trajectory.messages[1].cut_chars == 0


@pytest.mark.parametrize("style", ["chatml", "llama3", "qwen"])
async def test_sampled_tokens_are_recorded_unchanged(style: str) -> None:
    """Token drift: the sampled ids spell `go` and `no way` as no encoder would, and must survive every turn."""
    tokenizer = byte_level_bpe(style)
    renderer = Renderer(tokenizer, style)
    odd = [[*split_segmentation(tokenizer, text), renderer.end_of_turn] for text in ("go", "no way", "go", "go")]
    assert all(renderer.encode(renderer.decode(ids)) != ids[:-1] for ids in odd)
    engine, policy = engine_policy(odd, renderer)
    engine.version = 5
    env = Corridor()
    trajectory = await play(env, policy)
    assert trajectory.stop is StopReason.DONE
    assert env.heard == ["go", "no way", "go", "go"]
    replies = [m for m in trajectory.messages if m.role == "assistant"]
    assert [m.token_ids for m in replies] == odd
    assert [m.logprobs for m in replies] == [[scripted_logprob(t) for t in ids] for ids in odd]
    assert trajectory.versions == [5]
    # Each prompt is exactly the conversation so far: earlier replies as sampled, nothing rewritten.
    ids = trajectory.token_ids
    for prompt, reply in zip(engine.prompts, odd, strict=True):
        assert prompt + reply == ids[: len(prompt) + len(reply)]
    sampled = [t for t, kept in zip(ids, trajectory.loss_mask, strict=True) if kept]
    assert sampled == [t for reply in odd for t in reply]
    assert [not math.isnan(p) for p in trajectory.logprobs] == trajectory.loss_mask
    assert {turn for turn in trajectory.turn_index if turn >= 0} == {0, 1, 2, 3}


async def test_drift_with_a_lossy_tokenizer() -> None:
    renderer = Renderer(word_level(), "chatml")
    odd = [[*renderer.encode("go unheard-of go"), renderer.end_of_turn]]
    _, policy = engine_policy(odd, renderer)
    trajectory = await play(Corridor(), policy, Limits(1, 32, 4000))
    [reply] = [m for m in trajectory.messages if m.role == "assistant"]
    assert reply.content == "go go"
    assert reply.token_ids == odd[0] != [*renderer.encode(reply.content), renderer.end_of_turn]


async def test_the_conversation_is_what_the_chat_template_renders() -> None:
    """With ids as the encoder itself would choose them, play adds up to what the template makes of the whole."""
    renderer = Renderer(byte_level_bpe("qwen"), "qwen")
    engine, policy = engine_policy(["go"] * 3, renderer)
    trajectory = await play(Corridor(), policy)
    assert engine.prompts[-1] == renderer.prompt(trajectory.messages[:-2])


async def test_a_stop_string_leaves_the_end_of_turn_to_the_observation() -> None:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    cut = renderer.encode("go")  # ended by a stop string: no end-of-turn token was sampled
    engine, policy = engine_policy([cut, cut, cut], renderer, stop=("go",))
    trajectory = await play(Corridor(), policy)
    assert trajectory.stop is StopReason.DONE
    assert [m.token_ids for m in trajectory.messages if m.role == "assistant"] == [cut] * 3
    second = trajectory.messages[3]
    assert second.token_ids[0] == renderer.end_of_turn
    assert second.logprobs is None
    assert engine.prompts[1] == renderer.prompt(trajectory.messages[:4])


class Raising(Corridor):
    async def step(self, text: str) -> Step:
        if self.room == 1:
            raise EnvError("the roof came down")
        return await super().step(text)


class RaisingReset(Corridor):
    async def reset(self, item: int) -> Step:
        raise ConnectionResetError("server died")


class Hanging(Corridor):
    async def step(self, text: str) -> Step:
        await asyncio.sleep(3600)
        raise AssertionError("it was to be cancelled")


class Garbage(Corridor):
    answer: Any = None

    async def step(self, text: str) -> Step:
        return self.answer


async def test_an_environment_that_raises() -> None:
    env = Raising()
    trajectory = await play(env, ScriptedPolicy(["go", "go", "go"]))
    assert trajectory.stop is StopReason.ERROR
    assert trajectory.error == "EnvError: the roof came down"
    # What was played until then is kept, the reply that was never answered included.
    assert [m.content for m in trajectory.messages] == [
        "Item 7. You are in room 0 of 3.", "go", "You are in room 1 of 3.", "go",
    ]  # fmt: skip
    assert [info["state_key"] for info in trajectory.infos] == ["0", "1"]
    assert not trajectory.success


async def test_an_environment_that_cannot_start() -> None:
    trajectory = await play(RaisingReset(), ScriptedPolicy(["go"]))
    assert (trajectory.stop, trajectory.error) == (StopReason.ERROR, "ConnectionResetError: server died")
    assert trajectory.messages == []


async def test_an_environment_that_hangs() -> None:
    trajectory = await play(Hanging(), ScriptedPolicy(["go"]), timeout_s=0.05)
    assert trajectory.stop is StopReason.ERROR
    assert trajectory.error == "EpisodeTimeout: the episode did not end within 0.05 s"
    assert trajectory.num_turns == 1
    assert trajectory.seconds < 60


async def test_a_deadline_may_be_a_truncation() -> None:
    policy = ScriptedPolicy(["go"])
    trajectory = await rollout(TASK, Hanging(), policy, LIMITS, id="t", timeout_s=0.05, truncate=True)
    assert (trajectory.stop, trajectory.error, trajectory.timed_out) == (StopReason.TIMEOUT, None, True)
    assert trajectory.stop.truncated
    assert (trajectory.num_turns, trajectory.reward, trajectory.success) == (1, 0.0, False)
    assert Trajectory.from_json(trajectory.to_json()) == replace(trajectory, seconds=round(trajectory.seconds, 4))


async def test_a_timeout_of_the_environment_keeps_its_own_message() -> None:
    class Slow(Corridor):
        async def step(self, text: str) -> Step:
            raise TimeoutError("no answer within 3 s")

    trajectory = await play(Slow(), ScriptedPolicy(["go"]), timeout_s=60)
    assert trajectory.error == "TimeoutError: no answer within 3 s"


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (None, "a Step, got None"),
        ({"observation": "x"}, "a Step"),
        (Step("x", reward=math.nan), ", got nan"),
        (Step("x", reward="1"), ", got '1'"),  # type: ignore[arg-type]
        (Step(b"x"), "text observation"),  # type: ignore[arg-type]
        (Step("x", done=None), "a bool for done"),  # type: ignore[arg-type]
        (Step("x", info=[]), "a dict for info"),  # type: ignore[arg-type]
        (Step("\ud800"), "written as JSON"),
        (Step("x", info={"title": "\ud800"}), "written as JSON"),
        (Step("x", info={"picture": b"png"}), "written as JSON"),
        (Step("x", info={"score": math.inf}), "written as JSON"),
    ],
)
async def test_an_environment_that_answers_garbage(answer: Any, complaint: str) -> None:
    env = Garbage()
    env.answer = answer
    trajectory = await play(env, ScriptedPolicy(["go"]))
    assert trajectory.stop is StopReason.ERROR
    assert complaint in (trajectory.error or "")
    assert "corridor/7" in (trajectory.error or "")


class Watched:
    """A policy that fails in a chosen way and remembers being closed."""

    def __init__(self, fail_reply: bool = False, fail_close: bool = False, hang: bool = False) -> None:
        self.fail_reply, self.fail_close, self.hang = fail_reply, fail_close, hang
        self.closed = 0
        self.waiting = asyncio.Event()

    async def reply(self, messages: list[Message], observation: Observation, limits: Limits) -> Reply:
        if self.fail_reply:
            raise ValueError("no idea")
        if self.hang:
            self.waiting.set()
            await asyncio.sleep(3600)
        return Reply([Message("user", observation)], Message("assistant", "go"))

    def unanswered(self, messages: list[Message], observation: str, limits: Limits) -> list[Message]:
        return [Message("user", observation)]

    async def close(self) -> None:
        self.closed += 1
        if self.fail_close:
            raise OSError("cannot close")


@pytest.mark.parametrize(
    ("policy", "error"),
    [({"fail_reply": True}, "ValueError: no idea"), ({"fail_close": True}, "OSError: cannot close")],
)
async def test_a_policy_that_fails(policy: dict[str, bool], error: str) -> None:
    watched = Watched(**policy)
    trajectory = await play(Corridor(), watched)
    assert (trajectory.stop, trajectory.error) == (StopReason.ERROR, error)
    assert watched.closed == 1
    assert trajectory.messages[0].content == "Item 7. You are in room 0 of 3."


async def test_the_policy_is_closed_whatever_happens() -> None:
    for env in (Corridor(), Raising(), RaisingReset()):
        policy = Watched()
        await play(env, policy)
        assert policy.closed == 1


async def test_cancellation_is_passed_on_and_still_closes_the_policy() -> None:
    policy = Watched(hang=True)
    task = asyncio.create_task(rollout(TASK, Corridor(), policy, LIMITS, id="t"))
    await policy.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert policy.closed == 1
