"""Warm starts through a program: an oracle answers its calls, and the samples have the ids of the program's play."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from envs_for_tests import Counting
from pydantic import ValidationError
from scripted_engine_for_tests import ScriptedEngine
from tokenizers_for_tests import byte_level_bpe

from agentgym_rl.agent.collect import Collector
from agentgym_rl.agent.proxy.app import Proxy
from agentgym_rl.agent.proxy.external import ExternalPolicy, ExternalSession, sampled_model
from agentgym_rl.agent.proxy.programs import Program
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.styles import STYLES
from agentgym_rl.config import Config
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.run.collectors import ProgramDemonstrations
from agentgym_rl.run.demonstrations import segment_samples
from agentgym_rl.types import Limits, Sampling, StopReason, Task, Trajectory

LIMITS = Limits(max_turns=6, max_new_tokens=200, max_context=4000)
HEAD = """
import json, urllib.request

def ask(episode, messages, tools=()):
    tools = [*tools, {"type": "function", "function": {"name": "final_answer", "parameters": {}}}] if tools else []
    body = json.dumps({"messages": messages, "tools": tools}).encode()
    headers = {"Authorization": "Bearer " + episode.api_key}
    request = urllib.request.Request(episode.base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}

def play(episode):
    system = {"role": "system", "content": "Some prompt of the program."}
"""
LINEAR = """
    messages = [system, user(episode.observation)]
    while not episode.done:
        messages.append(ask(episode, messages, episode.tools))
        results = episode.call(messages[-1]["tool_calls"])
        ids = [call["id"] for call in messages[-1]["tool_calls"]]
        messages += [{"role": "tool", "tool_call_id": i, "content": r} for i, r in zip(ids, results, strict=True)]
"""
"""A conversation that grows."""
FRESH = """
    while not episode.done:
        ask(episode, [system, user("Think about it.")], episode.tools)
        reply = ask(episode, [system, user("New task: " + episode.observation)], episode.tools)
        episode.call(reply["tool_calls"])
"""
"""Every action follows two calls of the model, each a conversation of its own."""
NO_TOOLS = """
    while not episode.done:
        episode.step(ask(episode, [user("Go.")])["content"] or "")
"""


async def play(folder: Path, code: str, make: Any) -> Trajectory:
    """Play one episode, with the policies that `make(proxy and program)` returns."""
    (folder / "player.py").write_text(HEAD + code)
    external = Proxy(), Program(("player:play",), start="fork")
    pool = LocalPool({"counting": Counting}, action_format="tool")
    wrap = lambda session: ExternalSession(STYLES["tool"].wrap(session))  # noqa: E731
    [group] = await Collector(pool, make(external), 1, 1, 0, 120.0, wrap=wrap)([Task("counting", 0)], LIMITS, 0)
    await pool.close()
    for part in external:
        await part.close()
    return group.trajectories[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("code", "num_conversations"), [(LINEAR, 1), (FRESH, 2)], ids=["linear", "fresh"])
async def test_demonstrations_have_the_prompts_of_the_program(folder: Path, code: str, num_conversations: int) -> None:
    """The same replies, once demonstrated and once sampled, give the same ids."""
    made: list[ProgramDemonstrations] = []

    def demonstrate(external: Any) -> ProgramDemonstrations:
        made.append(ProgramDemonstrations(external, "oracle"))
        return made[-1]

    shown = await play(folder, code, demonstrate)
    assert (shown.stop, shown.error, shown.success, shown.num_turns) == (StopReason.DONE, None, True, 2)
    assert [m.content for m in shown.messages if m.is_reply] == ['act({"action": "up"})'] * 2
    conversations = made[0].conversations(shown)
    assert len(conversations) == num_conversations, "calls before which the program did not act are not imitated"
    assert all(c.messages[0].content == "Some prompt of the program." for c in conversations)
    assert [tool["function"]["name"] for tool in conversations[0].tools] == ["act", "final_answer"]

    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    written = [
        (m, t) for c in conversations for m, t in zip(c.messages, c.trained, strict=True) if m.role == "assistant"
    ]
    assert all(trained for _, trained in written)
    replies = [renderer.reply_ids(m.content, m.tool_calls) for m, _ in written]
    engine = ScriptedEngine([ids for ids in replies for _ in range(num_conversations)])

    def sample(external: Any) -> Any:
        model = sampled_model(engine, renderer, Sampling(200))
        return lambda session, seed: ExternalPolicy(*external, model, session)

    played = await play(folder, code, sample)
    assert played.error is None
    samples = [s.token_ids for c in conversations for s in segment_samples(c, renderer)]
    assert all(ids in [segment.token_ids for segment in played.segments] for ids in samples)
    for conversation in conversations:
        [one] = segment_samples(conversation, renderer)
        trained = [t for t, on in zip(one.token_ids, one.loss_mask, strict=True) if on]
        assert trained == [t for ids in replies[: 2 // num_conversations] for t in ids]


async def test_a_program_without_the_tools_of_the_environment_is_named(folder: Path) -> None:
    shown = await play(folder, NO_TOOLS, lambda external: ProgramDemonstrations(external, "oracle"))
    assert shown.stop is StopReason.ERROR
    assert "calls the environment's tool 'act', but the program offers no tools" in (shown.error or "")


@pytest.mark.parametrize(
    ("agent", "warm_start", "reason"),
    [
        ({}, {}, "needs agent.program, got none"),
        ({"kind": "external", "program": "m:f"}, {"mistakes": 0.5}, "remove them or through_program"),
    ],
)
def test_settings_that_do_not_fit_a_program_are_refused(agent: Any, warm_start: Any, reason: str) -> None:
    raw = {"model": {"path": "m"}, "environments": [{"name": "keydoor"}], "agent": agent}
    with pytest.raises(ValidationError, match=reason):
        Config.model_validate({**raw, "warm_start": {"through_program": True, **warm_start}})
