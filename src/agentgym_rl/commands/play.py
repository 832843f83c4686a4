"""Episodes in the terminal: play one by hand, or print those of a run."""

from __future__ import annotations

import re
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.panel import Panel
from rich.text import Text

from agentgym_rl.agent.policy import OraclePolicy, Policy, PolicyFactory, TextPolicy
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.agent.team import Player, play_team, roles_of
from agentgym_rl.common.screen import Screen
from agentgym_rl.environment import catalog
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.environment.wire import NotSupported
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.run.collectors import demonstrators
from agentgym_rl.run.log import read_trajectories
from agentgym_rl.types import EnvSession, Limits, StopReason, Task, Trajectory

COMMANDS = "?  list valid actions   !  show the oracle's next action   picture  draw the state   Ctrl-D  give up"


async def play(
    name: str,
    item: int,
    max_turns: int,
    *,
    oracle: bool,
    url: str | None = None,
    token: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    role: str | None = None,
    opponent: str = "oracle",
) -> Trajectory:
    """Play one episode of `name`, in this process or on the server at `url`, by hand or with the oracle.

    In a game of several roles that is the episode of one `role`, by default the first; `opponent` plays the others.
    """
    console = Screen(highlight=False)
    if url is not None and kwargs:
        raise ConfigError("--kwarg is for an environment in this process; with --url the server decides")
    pool: LocalPool | RemotePool = _local_pool(name, item, kwargs) if url is None else RemotePool({name: url}, token)
    try:
        session = await pool.open(name)
        limits = Limits(max_turns=max_turns, max_new_tokens=1, max_context=1)
        roles = list(roles_of(session))
        if role is not None and role not in roles:
            raise ConfigError(f"--role {role!r}: {name} has {', '.join(roles) or 'a single agent'}")

        def make_policy(session: EnvSession, seed: int) -> Policy:
            console.print(Panel(Text(session.instruction), title=f"{name}, item {item}", border_style="cyan"))
            if not oracle:
                console.print(Text(COMMANDS, "dim"))
            return _Spectator(console, session) if oracle else _Player(console, session)

        if roles:
            own, others = role or roles[0], Player(opponent, _opponent(opponent))
            players = dict.fromkeys(roles, others) | {own: Player("you", make_policy)}
            episodes = await play_team(
                Task(name, item), session, players, limits, ids=dict.fromkeys(roles, "play"), seed=item
            )
            trajectory = episodes[roles.index(own)]
        else:
            policy = make_policy(session, item)
            trajectory = await rollout(Task(name, item), session, policy, limits, id="play")
    finally:
        await pool.close()
    if not trajectory.messages:  # without an observation the item could not be reset
        raise EnvError(f"{name}, item {item} cannot be played: {trajectory.error}")
    _print_ending(console, trajectory)
    return trajectory


def _opponent(name: str) -> PolicyFactory:
    if name not in ("oracle", "random"):
        raise ConfigError(f"--opponent {name!r} must be oracle or random")
    return demonstrators(name)


def _local_pool(name: str, item: int, kwargs: Mapping[str, Any] | None) -> LocalPool:
    env_class = catalog.load(name, kwargs)
    if not any(item in items for items in env_class.splits.values()):
        ranges = ", ".join(f"{split} {r.start}-{r.stop - 1}" for split, r in env_class.splits.items())
        raise ConfigError(f"{name} has no item {item}: its items are {ranges}")
    return LocalPool({name: env_class})


class _Player(TextPolicy):
    """A person at the terminal. Some inputs are help commands, not actions."""

    def __init__(self, console: Screen, session: EnvSession) -> None:
        self.instruction = session.instruction
        self._console, self._session = console, session

    async def reply_text(self, observation: str) -> str:
        self._console.print(Text(f"\n{observation}"))
        while True:
            try:
                typed = self._console.input("[bold cyan]> [/]").strip()
            except EOFError:
                raise EnvError("the player gave up") from None
            if typed in ("?", "!", "picture"):
                self._console.print(Text(await self._help(typed), "dim"))
            elif typed:
                return typed

    async def _help(self, typed: str) -> str:
        try:
            if typed == "?":
                return "\n".join(await self._session.actions())
            if typed == "!":
                return await self._session.oracle()
            return f"wrote {await _draw(self._session)}"
        except NotSupported as error:  # show the reason and continue the episode
            return str(error)


class _Spectator(OraclePolicy):
    """The oracle. Its actions are printed as it plays."""

    def __init__(self, console: Screen, session: EnvSession) -> None:
        super().__init__(session)
        self._console = console

    async def reply_text(self, observation: str) -> str:
        action = await super().reply_text(observation)
        self._console.print(Text(f"\n{observation}"))
        self._console.print(Text.assemble(("> ", "bold cyan"), action))
        return action


async def _draw(session: EnvSession) -> Path:
    picture = await session.render()
    data = picture if isinstance(picture, bytes) else picture.encode()
    kind = "png" if data.startswith(b"\x89PNG") else "svg" if b"<svg" in data[:200] else "html"
    name = re.sub(r"[^\w.-]+", "-", session.name)  # an import path has a colon
    path = Path.cwd() / f"agentgym-rl-{name}.{kind}"
    path.write_bytes(data)
    webbrowser.open(path.as_uri())
    return path


def show(run: Path, step: int | None, number: int, success: bool | None, *, held_out: bool = False) -> None:
    """Print up to `number` episodes of a step of a run, by default the last step."""
    console = Screen(highlight=False)
    path = _trajectory_file(run, step, "eval" if held_out else "step")
    shown = 0
    for trajectory in read_trajectories(path):
        if success is not None and trajectory.success is not success:
            continue
        _print_trajectory(console, trajectory)
        shown += 1
        if shown == number:
            break
    console.print(Text(f"{shown} of the episodes in {path}", "dim"))


def _trajectory_file(run: Path, step: int | None, kind: str) -> Path:
    if run.is_file():
        return run
    files = sorted((run / "trajectories").glob(f"{kind}_*.jsonl"))
    if step is not None:
        files = [f for f in files if f.stem == f"{kind}_{step:06d}"]
    if not files:
        episodes = "training episodes" if kind == "step" else "held-out episodes"
        what = f"no {episodes}" if step is None else f"no {episodes} of step {step}"
        raise ConfigError(f"{run} holds {what}: give a run directory or a file of its trajectories")
    return files[-1]


def _print_trajectory(console: Screen, trajectory: Trajectory) -> None:
    lines = Text()
    turn = 0
    for message in trajectory.messages:
        if message.dropped_turns:
            lines.append(f"[context cut: {message.dropped_turns} turns are left out from here on]\n", "yellow")
        if message.is_reply:
            reward = trajectory.rewards[turn]
            turn += 1
            reward_text = f"   reward {reward:g}" if reward else ""
            lines.append(f"> {message.text}", "bold cyan").append(f"{reward_text}\n\n", "green")
        elif message.purpose:
            lines.append(f"{message.content}\n\n", "magenta")
        elif message.role == "system":
            lines.append(f"{message.content}\n\n", "dim")
        else:
            lines.append(f"{message.content}\n")
    title = f"{trajectory.task.key}  {trajectory.id}"
    console.print(Panel(lines, title=title, border_style="green" if trajectory.success else "red"))
    _print_ending(console, trajectory)


def _print_ending(console: Screen, trajectory: Trajectory) -> None:
    ending = {StopReason.ERROR: f"error: {trajectory.error}"}.get(
        trajectory.stop or StopReason.ERROR, str(trajectory.stop)
    )
    outcome = Text("success" if trajectory.success else "no success", "green" if trajectory.success else "red")
    console.print(
        Text.assemble(outcome, f"  {ending}, {trajectory.num_turns} turns, reward {trajectory.reward:g}, horizon ")
        + Text(f"{trajectory.horizon}\n")
    )
