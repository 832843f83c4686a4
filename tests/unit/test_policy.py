"""Policies other than through the loop: seeds, checks on engines, random and oracle play, a person."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine_for_tests import ScriptedEngine
from test_rollout import LIMITS, TASK, Corridor
from tokenizers_for_tests import byte_level_bpe

from agentgym_rl.agent.policy import EnginePolicy, HumanPolicy, OraclePolicy, RandomPolicy, ScriptedPolicy
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.common.seeds import stable_seed
from agentgym_rl.errors import EngineError, EnvError
from agentgym_rl.types import Completion, Message, Sampling, StopReason


def test_stable_seed_is_the_same_in_every_process() -> None:
    command = "from agentgym_rl.common.seeds import stable_seed; print(stable_seed(3, 'a', 1))"
    seeds = {
        subprocess.run(
            [sys.executable, "-c", command], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert seeds == {f"{stable_seed(3, 'a', 1)}\n"}
    assert len({stable_seed(a, b) for a in range(20) for b in range(20)}) == 400
    assert stable_seed(1, 11) != stable_seed(11, 1)
    assert all(0 <= stable_seed(i) < 2**63 for i in range(100))


async def test_every_turn_samples_with_a_seed_of_its_own() -> None:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")

    async def seeds(seed: int | None) -> list[int | None]:
        engine = ScriptedEngine(["go"] * 3, encode=renderer.reply_ids)
        sampling = Sampling(max_new_tokens=1, temperature=0.7, top_p=0.9, stop=("\n\n",), seed=seed)
        await rollout(TASK, Corridor(), EnginePolicy(engine, renderer, sampling), LIMITS, id="t")
        for given in engine.samplings:
            assert (given.temperature, given.top_p, given.stop) == (0.7, 0.9, ("\n\n",))
            assert given.stop_token_ids == renderer.stop_token_ids
            assert given.max_new_tokens == LIMITS.max_new_tokens
        return [given.seed for given in engine.samplings]

    assert len(set(await seeds(4))) == 3
    assert await seeds(4) == await seeds(4)
    assert not set(await seeds(4)) & set(await seeds(5))
    assert await seeds(None) == [None] * 3


async def test_policies_do_not_share_an_engine_session() -> None:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    engine = ScriptedEngine(["go"], encode=renderer.reply_ids)
    for _ in range(2):  # without release, and with one session for both, the second would ask for a second reply
        policy = EnginePolicy(engine, renderer, Sampling(max_new_tokens=1))
        reply = await policy.reply([], "x", LIMITS)
        assert reply.action is not None
        assert reply.action.content == "go"
    assert len(engine.sessions) == 2


@pytest.mark.parametrize(
    ("tokens", "logprobs", "complaint"),
    [
        ([], [], "1 to 32 tokens, it returned 0"),
        ([9] * 33, [-1.0] * 33, "it returned 33"),
        ([9, 9], [-1.0], "one finite"),
        ([9], [math.nan], "one finite"),
        ([9], [-math.inf], "one finite"),
    ],
)
async def test_an_engine_that_returns_nonsense_is_an_error(
    tokens: list[int], logprobs: list[float], complaint: str
) -> None:
    class Broken(ScriptedEngine):
        async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
            return Completion(tokens, logprobs, "stop", 0)

    policy = EnginePolicy(Broken([]), Renderer(byte_level_bpe("chatml"), "chatml"), Sampling(max_new_tokens=1))
    with pytest.raises(EngineError, match=complaint):
        await policy.reply([], "x", LIMITS)
    trajectory = await rollout(TASK, Corridor(), policy, LIMITS, id="t")
    assert trajectory.stop is StopReason.ERROR


async def test_a_reply_sampled_by_two_versions_has_the_version_of_each_token() -> None:
    class Updated(ScriptedEngine):
        async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
            return Completion([9, 10, 11], [-1.0, -2.0, -3.0], "length", 4, [4, 4, 5])

    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    policy = EnginePolicy(Updated([]), renderer, Sampling(max_new_tokens=3))
    trajectory = await rollout(TASK, Corridor(), policy, replace(LIMITS, max_turns=1), id="t")
    assert trajectory.segments[0].versions == [4, 4, 5]
    assert trajectory.versions == [4, 5]


async def test_a_prompt_is_that_of_the_given_conversation_even_if_it_is_another() -> None:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    engine = ScriptedEngine([renderer.reply_ids("go")] * 3)
    policy = EnginePolicy(engine, renderer, Sampling(max_new_tokens=3))
    end = renderer.end_of_turn
    played = [Message("user", "a", [5, 6]), Message("assistant", "b", [7, end])]
    other = [Message("user", "c", [15, 16, 17]), Message("assistant", "d", [18, end])]
    for messages in (played, other, []):
        await policy.reply(messages, "room", LIMITS)
    new_ids = renderer.follow_up("room")
    assert engine.prompts[0] == [5, 6, 7, end, *new_ids]
    assert engine.prompts[1] == [15, 16, 17, 18, end, *new_ids]
    assert engine.prompts[2] == renderer.prompt([Message("user", "room")])


async def test_scripted_text_replies_need_an_encoder() -> None:
    with pytest.raises(EngineError, match="encode="):
        ScriptedEngine(["go"])


async def test_oracle() -> None:
    env = Corridor()
    trajectory = await rollout(TASK, env, OraclePolicy(env), LIMITS, id="t")
    assert trajectory.success
    assert trajectory.messages[0].content == env.instruction
    assert trajectory.token_ids == []


async def test_random_play_is_uniform_and_seeded() -> None:
    async def heard(seed: int) -> list[str]:
        env = Corridor()
        await env.reset(0)
        policy = RandomPolicy(env, seed)
        replies = [await policy.reply([], "x", LIMITS) for _ in range(200)]
        return [reply.action.content for reply in replies if reply.action]

    assert await heard(1) == await heard(1) != await heard(2)
    assert min(Counter(await heard(3)).values()) > 70

    class Stuck(Corridor):
        async def actions(self) -> list[str]:
            return []

    with pytest.raises(EnvError, match="at least one action"):
        await RandomPolicy(Stuck(), 0).reply([], "x", LIMITS)


async def test_a_person_is_shown_the_observation() -> None:
    shown: list[str] = []

    def ask(observation: str) -> str:
        shown.append(observation)
        return "go"

    trajectory = await rollout(TASK, Corridor(), HumanPolicy(ask), LIMITS, id="t")
    assert trajectory.success
    assert shown == [m.content for m in trajectory.messages if m.role == "user"][:-1]


async def test_a_script_that_runs_out_is_an_error() -> None:
    trajectory = await rollout(TASK, Corridor(), ScriptedPolicy(["go"]), LIMITS, id="t")
    assert trajectory.stop is StopReason.ERROR
    assert "1 replies" in (trajectory.error or "")
    engine: Any = ScriptedEngine([[5]])
    await engine.generate([1], Sampling(max_new_tokens=4), "a")
    with pytest.raises(EngineError, match="1 replies"):
        await engine.generate([1], Sampling(max_new_tokens=4), "a")
