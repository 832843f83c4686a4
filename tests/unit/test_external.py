"""External agents: programs in processes of their own play episodes, fail, hang and judge themselves."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import textwrap
import urllib.error
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from envs_for_tests import Counting
from exactness_for_tests import require_exact
from pydantic import ValidationError
from scripted_engine_for_tests import ScriptedEngine, scripted_logprob
from tokenizers_for_tests import byte_level_bpe, split_segmentation

from agentgym_rl.agent.collect import Collector
from agentgym_rl.agent.proxy import client
from agentgym_rl.agent.proxy.app import Proxy
from agentgym_rl.agent.proxy.client import Episode, RunEnded
from agentgym_rl.agent.proxy.external import ExternalPolicy, ExternalSession, sampled_model
from agentgym_rl.agent.proxy.programs import Program
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.config import AgentConfig, Config
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.run.preflight import require_program
from agentgym_rl.training.batch import gather
from agentgym_rl.training.settings import RLSettings
from agentgym_rl.types import Completion, Group, Limits, Sampling, StopReason, Task, Trajectory
from agentgym_rl.viewer.replays import shown_calls

LIMITS = Limits(max_turns=6, max_new_tokens=40, max_context=400)
ITEM = 2
"""Needs four steps up."""
HEAD = """
import os, sys, time, subprocess, json, urllib.error, urllib.request
from agentgym_rl.agent.proxy.client import Episode

def ask(episode, text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

"""

renderer_of = cache(lambda: Renderer(byte_level_bpe("chatml"), "chatml"))


class Player:
    """Plays episodes of the counting game by programs, with an engine that always replies `up`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = ScriptedEngine([renderer_of().reply_ids("up")] * 20)
        self.proxy = Proxy()

    def program(self, code: str, **options: Any) -> Program:
        path = self.folder / "program.py"
        path.write_text(HEAD + textwrap.dedent(code))
        return Program((sys.executable, str(path)), **options)

    def function(self, code: str, start: Any, **options: Any) -> Program:
        """Return a function whose body is the code."""
        self.program("def play(episode):\n" + textwrap.indent(textwrap.dedent(code), "    "))
        return Program(("program:play",), start=start, **options)

    async def play(
        self,
        program: Program,
        *,
        timeout_s: float = 120.0,
        retries: int = 0,
        limits: Limits = LIMITS,
        episodes: int = 1,
        action_format: str = "plain",
    ) -> list[Trajectory]:
        """Play episodes of one task and their retries. Check that nothing is left of them."""
        pool = LocalPool({"counting": Counting}, action_format=action_format)

        def make(session: Any, seed: int) -> ExternalPolicy:
            model = sampled_model(self.engine, renderer_of(), Sampling(40))
            return ExternalPolicy(self.proxy, program, model, session)

        collector = Collector(pool, make, episodes, 4, retries, timeout_s, wrap=ExternalSession)
        [group] = await collector([Task("counting", ITEM)], limits, 0)
        assert len(self.proxy.sessions) == len(self.engine.sessions) == pool.num_open == 0
        await pool.close()
        await self.proxy.close()
        await program.close()
        return group.trajectories


@pytest.fixture
def player(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Player:
    monkeypatch.syspath_prepend(tmp_path)
    return Player(tmp_path)


both_starts = pytest.mark.parametrize("start", ["fork", "process"])
PLAY = """
episode = Episode.from_environment()
while not episode.done:
    action = ask(episode, episode.observation)
    episode.step(action)
"""


async def test_a_command_plays_an_episode_that_the_environment_judges(player: Player) -> None:
    [trajectory] = await player.play(player.program(PLAY))
    assert (trajectory.stop, trajectory.error) == (StopReason.DONE, None)
    assert trajectory.success
    assert trajectory.rewards == [0.25] * 4
    replies = [m for m in trajectory.messages if m.is_reply]
    assert len(replies) == trajectory.num_turns
    assert all(m.token_ids == renderer_of().reply_ids("up") and m.logprobs for m in replies)
    assert Trajectory.from_json(trajectory.to_json()).messages == trajectory.messages


async def test_several_calls_of_one_turn_are_all_trained(player: Player) -> None:
    code = """
    episode = Episode.from_environment()
    while not episode.done:
        ask(episode, "Think about: " + episode.observation)
        episode.step(ask(episode, episode.observation))
    """
    [trajectory] = await player.play(player.program(code))
    assert trajectory.success
    sampled = sum(sum(segment.loss_mask) for segment in trajectory.segments)
    assert sampled == 2 * trajectory.num_turns * len(renderer_of().reply_ids("up"))
    turns = [turn for segment in trajectory.segments for turn in segment.turn_index if turn >= 0]
    assert set(turns) == set(range(trajectory.num_turns))
    assert {m.purpose for m in trajectory.messages} == {"", "call"}


async def test_trained_ids_of_a_program_are_the_sampled_ids_of_its_calls(player: Player) -> None:
    """Every call has another reply, which no encoder would spell like that. The last ones overflow the context."""
    renderer = renderer_of()
    texts = ["first idea", "up", "second thought", "up again", "third", "up"]
    replies = [[*split_segmentation(renderer.tokenizer, text), renderer.end_of_turn] for text in texts]
    player.engine = ScriptedEngine(replies)
    player.engine.version = 3
    code = """
    episode = Episode.from_environment()
    messages = []
    def say(text):
        messages.append({"role": "user", "content": text})
        body = json.dumps({"messages": messages}).encode()
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])
    for turn in range(2):
        ask(episode, f"A sub-agent in turn {turn}.")
        say(f"The main agent in turn {turn}.")
        episode.step("up")
    ask(episode, "A sub-agent before the end.")
    say("The main agent before the end.")
    say("word " * 1000)
    """
    [trajectory] = await player.play(player.program(code))
    assert (trajectory.stop, trajectory.num_turns) == (StopReason.MAX_CONTEXT, 3)
    assert len(player.engine.prompts) == len(replies)
    completions = [Completion(ids, [scripted_logprob(token) for token in ids], "stop", 3) for ids in replies]
    require_exact(trajectory, list(zip(player.engine.prompts, completions, strict=True)))
    assert trajectory.num_segments == 4, "the main agent's conversation is one segment, each sub-agent's another"
    sampled_turns = [turn for m, turn in zip(trajectory.messages, trajectory.turns, strict=True) if m.logprobs]
    assert sampled_turns == [0, 0, 1, 1, 2, 2]
    assert [m.purpose for m in trajectory.messages] == ["call", "call", "", ""] * 3


@both_starts
async def test_a_function_ends_the_episode_with_its_own_reward(player: Player, start: str) -> None:
    [trajectory] = await player.play(player.function("return 0.25 + len(ask(episode, 'Hello.'))", start))
    assert (trajectory.stop, trajectory.rewards, trajectory.error) == (StopReason.DONE, [2.25], None)


async def test_a_coroutine_function_plays(player: Player) -> None:
    player.program("async def play(episode):\n    episode.step(ask(episode, 'Hello.'))\n    return 0.5\n")
    [trajectory] = await player.play(Program(("program:play",), start="fork"))
    assert trajectory.rewards == [0.25, 0.5]


async def test_tool_calls_are_played_until_the_environment_ends_the_episode(player: Player) -> None:
    code = """
    call = {"function": {"name": "act", "arguments": json.dumps({"action": "up"})}}
    while not episode.done:
        ask(episode, "Hello.")
        assert len(episode.call([call, call])) == 2
    """
    [trajectory] = await player.play(player.function(code, "fork"), action_format="tool")
    assert (trajectory.error, trajectory.stop, trajectory.success) == (None, StopReason.DONE, True)
    assert trajectory.rewards == [0.5, 0.5]
    (reply,) = [calls for calls in shown_calls(json.loads(trajectory.to_json())) if calls][:1]
    assert [(call["name"], call["arguments"]) for call in reply] == [("act", [["action", "up"]])] * 2


async def test_forks_share_one_import_and_nothing_else(player: Player) -> None:
    code = """
    import random
    global seen
    seen = globals().get("seen", 0) + 1
    print(f"only {random.random()} here")
    variables = sorted(name for name in os.environ if name.startswith(("OPENAI", "AGENTGYM", "HIDDEN")))
    with open("%s", "a") as file:
        file.write(json.dumps([IMPORTED_IN, os.getpid(), seen, random.random(), variables, episode.url]) + "\\n")
    return 0.0
    """ % (player.folder / "rows")
    program = player.function(code, "fork")
    path = player.folder / "program.py"
    path.write_text(path.read_text() + "\nIMPORTED_IN = os.getpid()\n")
    await player.play(program, episodes=8)
    rows = [json.loads(line) for line in (player.folder / "rows").read_text().splitlines()]
    hosts, pids, seen, numbers, variables, urls = zip(*rows, strict=True)
    assert len(rows) == len(set(pids)) == len(set(numbers)) == len(set(urls)) == 8
    assert len(set(hosts)) == 1
    assert set(seen) == {1}, "what an episode changes is not seen by another"
    assert all(names == ["AGENTGYM_SESSION_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL"] for names in variables)
    await until(lambda: not is_running(hosts[0]))


async def test_a_module_that_cannot_be_imported_is_an_error_with_its_traceback(player: Player) -> None:
    program = player.function("return 0.0", "fork")
    (player.folder / "program.py").write_text("import no_such_package_at_all")
    attempts = await player.play(program, retries=1)
    assert [t.stop for t in attempts] == [StopReason.ERROR] * 2
    assert all("No module named 'no_such_package_at_all'" in (t.error or "") for t in attempts)


async def test_a_host_that_is_killed_takes_its_episodes_along_and_is_started_again(player: Player) -> None:
    marker = player.folder / "killed"
    code = f"""
    if os.path.exists({str(marker)!r}):
        return 1.0
    open({str(marker)!r}, "w").write(str(os.getpid()))
    os.kill(os.getppid(), 9)
    time.sleep(600)
    """
    first, second = await player.play(player.function(code, "fork"), retries=1)
    assert "ended with code -9" in (first.error or "")
    assert (second.stop, second.rewards) == (StopReason.DONE, [1.0])
    await until(lambda: not is_running(int(marker.read_text())))


async def test_no_program_outlives_a_killed_run(tmp_path: Path) -> None:
    started = tmp_path / "started"
    run = f"""
    import asyncio
    from agentgym_rl.agent.proxy.programs import Program
    async def main():
        program = Program(("sh", "-c", "echo $$ > {started}; sleep 600"))
        running = await program.start(dict.fromkeys(("base_url", "api_key", "url"), ""))
        await running.exited
    asyncio.run(main())
    """
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(run))
    await until(lambda: started.exists() and started.read_text().endswith("\n"))
    process.kill()
    assert await process.wait() == -9
    await until(lambda: not is_running(int(started.read_text())))


async def test_the_horizon_ends_the_episode_and_the_program_is_told(player: Player) -> None:
    code = PLAY + f"\nopen({str(player.folder / 'seen')!r}, 'w').write(f'{{episode.done}}')"
    limits = Limits(max_turns=1, max_new_tokens=40, max_context=400)
    [trajectory] = await player.play(player.program(code), limits=limits)
    assert (trajectory.stop, trajectory.num_turns) == (StopReason.MAX_TURNS, 1)
    assert (player.folder / "seen").read_text() == "True"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise SystemExit('no luck')", "ProgramError: the program exited with code 1: no luck"),
        ("os.kill(os.getpid(), 9)", "ProgramError: the program exited with code -9"),
        ("ask(None, 'Hello.')", "ProgramError: the program exited without an action and without a reward"),
        ("episode = Episode.from_environment(); episode.step(ask(None, 'x')); 1 / 0", "ZeroDivisionError"),
    ],
)
async def test_a_program_that_fails_ends_the_episode_as_error(player: Player, code: str, error: str) -> None:
    for program in (lambda: player.function(code, "fork"), lambda: player.program(code)):
        attempts = await player.play(program(), retries=1)
        assert [t.stop for t in attempts] == [StopReason.ERROR] * 2, "a failed episode is retried"
        assert all(error in (t.error or "") for t in attempts)


class FailingEngine(ScriptedEngine):
    """Fails once, when it is called for the second time."""

    async def generate(self, *request: Any) -> Completion:
        completion = await super().generate(*request)
        if len(self.prompts) == 2:
            raise EngineError("the device is gone")
        return completion


@pytest.mark.parametrize(
    ("after", "stop", "rewards"),
    [
        ("sys.exit(1)", StopReason.ERROR, [0.25]),
        ("episode.end(0.0)", StopReason.ERROR, [0.25]),
        ("episode.step(ask(episode, 'again'))", StopReason.DONE, [0.25, 0.25, 0.0]),
        ("ask(episode, 'again'); episode.end(0.5)", StopReason.DONE, [0.25, 0.5]),
    ],
)
async def test_a_failure_of_the_engine_is_an_error_unless_a_later_call_succeeds(
    player: Player, after: str, stop: StopReason, rewards: list[float]
) -> None:
    player.engine = FailingEngine([renderer_of().reply_ids("up")] * 20)
    code = f"""
    episode = Episode.from_environment()
    episode.step(ask(episode, episode.observation))
    try:
        ask(episode, "and now?")
    except urllib.error.HTTPError:
        {after}
    """
    [trajectory] = await player.play(player.program(code))
    assert (trajectory.stop, trajectory.rewards) == (stop, rewards)
    assert (trajectory.error == "EngineError: the device is gone") == (stop is StopReason.ERROR)


async def test_a_program_that_cannot_be_started_is_an_error(player: Player) -> None:
    [trajectory] = await player.play(Program(("/no/such/program",)))
    assert trajectory.stop is StopReason.ERROR
    assert "cannot be started: No such file" in (trajectory.error or "")


@pytest.mark.parametrize("start", ["fork", "command"])
async def test_a_program_that_hangs_is_killed_at_the_deadline(player: Player, start: str) -> None:
    script = f"sleep 600 & echo $PPID $$ $! > {player.folder / 'pids'}; wait"
    program = Program(("sh", "-c", script.replace("$PPID", "")))
    if start != "command":
        program = player.function(f"subprocess.run(['sh', '-c', {script!r}])", start)
    for timeout_s in (2.0, 8.0, 32.0):  # a slow machine may need longer to start it
        [trajectory] = await player.play(program, timeout_s=timeout_s)
        if (player.folder / "pids").exists():
            break
    assert (trajectory.error or "").startswith("EpisodeTimeout")
    pids = [int(pid) for pid in (player.folder / "pids").read_text().split()]
    await until(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid: int) -> bool:
    """Return whether a process runs. One that has ended may still be listed as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_full_context_that_the_program_cannot_handle_is_a_truncation(player: Player) -> None:
    code = """
    episode = Episode.from_environment()
    episode.step(ask(episode, episode.observation))
    ask(episode, "word " * 1000)
    """
    [trajectory] = await player.play(player.program(code))
    assert (trajectory.stop, trajectory.num_turns) == (StopReason.MAX_CONTEXT, 1)


@pytest.mark.parametrize("turns", [0, 1])
async def test_calls_of_a_turn_that_overflows_are_trained_as_a_turn(player: Player, turns: int) -> None:
    code = f"""
    episode = Episode.from_environment()
    for _ in range({turns}):
        episode.step(ask(episode, episode.observation))
    ask(episode, "Think.")
    ask(episode, "Think again.")
    ask(episode, "word " * 1000)
    """
    [trajectory] = await player.play(player.program(code))
    assert (trajectory.stop, trajectory.rewards) == (StopReason.MAX_CONTEXT, [0.25] * turns + [0.0])
    [episode] = gather([Group(trajectory.task, [trajectory])], RLSettings()).episodes
    length = len(renderer_of().reply_ids("up"))
    assert episode.lengths == [length] * turns + [2 * length]


@both_starts
async def test_secrets_of_the_run_are_hidden_from_the_program(player: Player, start: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("AGENT_SETTING", "given")
    code = """
    ask(episode, "Hello.")
    return float(os.environ.get("WANDB_API_KEY") is None and os.environ["AGENT_SETTING"] == "given")
    """
    [trajectory] = await player.play(player.function(code, start, variables=("AGENT_SETTING",)))
    assert trajectory.rewards == [1.0]


async def test_a_client_claims_an_episode_and_ends_it(player: Player) -> None:
    player.proxy = Proxy(token="secret")
    await player.proxy.start()
    playing = asyncio.create_task(player.play(Program(())))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        await asyncio.to_thread(Episode.claim, player.proxy.url, "wrong")
    episode = await asyncio.to_thread(Episode.claim, player.proxy.url, "secret")
    assert episode is not None
    assert episode.observation == "Goal: 4. You are at 0."
    answer = await asyncio.to_thread(episode._played, {"action": "up"})
    assert answer["info"]["valid"] is True
    assert "state_key" not in answer["info"], "it may hold what the agent must not see"
    with pytest.raises(urllib.error.HTTPError, match="400"):
        await asyncio.to_thread(episode.end, float("nan"))
    await asyncio.to_thread(episode.end, 0.5, True)
    [trajectory] = await playing
    assert (trajectory.stop, trajectory.success) == (StopReason.DONE, True)
    assert trajectory.rewards == [0.25, 0.5], "the reward is added to those of the environment"


async def test_clients_that_wait_are_told_that_the_run_has_ended(player: Player) -> None:
    await player.proxy.start()
    waiting = [asyncio.create_task(asyncio.to_thread(Episode.claim, player.proxy.url)) for _ in range(3)]
    playing = asyncio.create_task(player.play(Program(())))
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    [claimed] = [task.result() for task in done]
    assert claimed is not None
    await asyncio.to_thread(claimed.end, 1.0)
    await playing
    for task in set(waiting) - done:
        with pytest.raises(RunEnded, match="has ended"):
            await task


async def test_claim_all_waits_for_the_run_to_start_and_ends_with_it(player: Player, monkeypatch: Any) -> None:
    monkeypatch.setattr(client, "POLL_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    player.proxy = Proxy(port=port)

    def play_all() -> int:
        return sum(episode.end(1.0) is None for episode in Episode.claim_all(f"http://127.0.0.1:{port}"))

    playing = asyncio.create_task(asyncio.to_thread(play_all))
    await asyncio.sleep(0.05)
    trajectories = await player.play(Program(()), episodes=2)
    assert [trajectory.rewards for trajectory in trajectories] == [[1.0], [1.0]]
    assert await playing == 2
    with pytest.raises(urllib.error.URLError, match="refused"):
        next(Episode.claim_all(f"http://127.0.0.1:{port}", start_timeout_s=0))


def test_a_proxy_for_other_machines_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="a token is needed"):
        Proxy("0.0.0.0")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"agent": {"program": "m:f"}}, "set kind"),
        ({"agent": {"kind": "external", "program": "m:f"}, "method": "dagger"}, "learns by method = 'rl'"),
        ({"agent": {"kind": "external", "program": "m:f", "context": "window"}}, "remove agent.context"),
        ({"agent": {"kind": "external", "program": "m:f"}, "scale": {}}, r"remove \[scale\]"),
    ],
)
def test_settings_that_an_external_agent_does_not_read_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Config.model_validate({"model": {"path": "m"}, "environments": [{"name": "keydoor"}], **changes})


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("no_such_module:play", "there is no module 'no_such_module'"),
        ("just_a_word", "name a function as my_module:play"),
        (("no-such-command", "x"), "there is no command 'no-such-command'"),
    ],
)
def test_a_program_that_does_not_exist_is_refused_at_once(program: str | tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        require_program(AgentConfig(kind="external", program=program))
