"""Gymnasium's environments as text environments (`gymnasium:FrozenLake-v1`), and ours as Gymnasium's.

An item is the seed of `reset`. The time limit that Gymnasium registers with an environment is left out, because the
recipe's horizon takes its place. A limit that the environment has by itself ends the episode without a success.
"""

from __future__ import annotations

import html
import importlib
import io
import os
import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import gymnasium
import numpy

from agentgym_rl.environment.base import TextEnv, check_item
from agentgym_rl.environment.bridges.bridge_settings import import_value
from agentgym_rl.environment.bridges.nethack import command_names, describe_screen, is_nethack, set_seeds
from agentgym_rl.environment.bridges.toy_text import VIEWS
from agentgym_rl.environment.plain_text import plain_action
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import Step

MAX_CHARS = 200
"""Longest action that is read."""
DISCOUNT = 0.99
"""Discount of the oracle's value iteration: short solutions are preferred."""
TOLERANCE = 1e-6
"""Value iteration ends when no value changes by more."""
MAX_TEXT = 1_000_000
"""Longest observation and action of `as_gymnasium`."""

Describe = Callable[[Any, Any], str]


class GymnasiumEnv:
    """A Gymnasium environment with discrete or text actions. Subclasses set everything. Implements TextEnv."""

    name: ClassVar[str]
    instruction: ClassVar[str]
    splits: ClassVar[Mapping[str, range]]
    subsets: ClassVar[tuple[str, ...]] = ()
    cheap: ClassVar[bool]

    make: ClassVar[Callable[[], gymnasium.Env]]
    describe: ClassVar[Describe]
    action_names: ClassVar[tuple[str, ...]]
    """Names of discrete actions in order; empty for text actions."""
    success_reward: ClassVar[float | None]

    def __init__(self) -> None:
        self._env = type(self).make()
        self._observation: Any = None
        self._info: dict[str, Any] = {}
        self._playing = False

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ()

    def reset(self, item: int) -> str:
        check_item(self, item)
        set_seeds(self._env.unwrapped, item)
        self._observation, self._info = self._env.reset(seed=item)
        self._playing = True
        return self._text()

    def step(self, text: str) -> Step:
        if not self._playing:
            raise EnvError(f"{self.name} needs a running episode: call reset first")
        action = self._read(text)
        if action is None:
            names = ", ".join(self.action_names)
            needed = f"The actions are: {names}." if names else f"An action is a text of {self._env.action_space}."
            return Step(f"Could not understand {plain_action(text)}. {needed}\n{self._text()}", info={"valid": False})
        self._observation, reward, terminated, truncated, self._info = self._env.step(action)
        done = bool(terminated or truncated)
        self._playing = not done
        info: dict[str, Any] = {"valid": True}
        if done:
            info["success"] = bool(terminated) and self._is_success(float(reward))
            info["truncated"] = not terminated
        return Step(self._text(), float(reward), done, info)

    def close(self) -> None:
        self._playing = False
        self._env.close()

    def actions(self) -> list[str]:
        """Return the names of the actions, without those that the environment's action mask forbids."""
        if not self._playing:
            return []
        mask = self._info.get("action_mask")
        allowed = [True] * len(self.action_names) if mask is None else [bool(flag) for flag in mask]
        return [name for name, flag in zip(self.action_names, allowed, strict=True) if flag]

    def render(self) -> str | bytes:
        """Return a PNG if the environment draws pixels and has the packages for it, or a page with its text."""
        if self._observation is None:
            raise EnvError(f"{self.name} has nothing to draw yet: call reset first")
        note = ""
        if self._env.render_mode == "rgb_array":
            try:
                return _png(self._env.render())
            except gymnasium.error.DependencyNotInstalled as error:
                note = f"<p>{html.escape(str(error))}</p>"
        head = '<!DOCTYPE html><html><head><meta charset="utf-8"></head>'
        return f"{head}<body><pre>{html.escape(self._text())}</pre>{note}</body></html>"

    def _text(self) -> str:
        return type(self).describe(self._observation, self._env.unwrapped)

    def _is_success(self, reward: float) -> bool:
        return reward > 0 if self.success_reward is None else reward >= self.success_reward

    def _read(self, text: str) -> Any:
        """Return the action of a text, or None."""
        if not self.action_names:
            return text if self._env.action_space.contains(text) else None
        words = " ".join(text.strip().strip("\"'`. ").lower().split()) if len(text) <= MAX_CHARS else ""
        names = [name.lower() for name in self.action_names]
        return int(self._env.action_space.start) + names.index(words) if words in names else None


class TabularEnv(GymnasiumEnv):
    """A Gymnasium environment with a table of transitions (`P`), whose observation is the number of the state."""

    def state_key(self) -> str:
        return str(int(self._observation))


class DeterministicEnv(TabularEnv):
    """A table without chance: value iteration gives an oracle. With chance, no policy wins every item."""

    def oracle(self) -> str:
        """Return an action of the best policy under the table of transitions."""
        if not self._playing:
            raise EnvError(f"{self.name} needs a running episode: call reset first")
        return self.action_names[best_actions(type(self))[int(self._observation)]]  # type: ignore[arg-type]


def gymnasium_class(
    env_id: str,
    *,
    describe: str | Describe | None = None,
    action_names: Sequence[str] | None = None,
    instruction: str | None = None,
    num_train: int = 10_000,
    num_test: int = 1_000,
    success_reward: float | None = None,
    cheap: bool | None = None,
    **make_kwargs: Any,
) -> type[TextEnv]:
    """Return a text environment of `env_id`. Further keywords go to `gymnasium.make`.

    `describe(observation, env)` returns an observation in words; in a recipe it is an import path. Items of `train`
    are the seeds from 0, those of `test` follow. A success is an episode that terminates with a last reward of at
    least `success_reward`, by default with a reward above 0. `render_mode` is "rgb_array" if the environment offers it.
    """
    options: dict[str, Any] = {"max_episode_steps": -1, "disable_env_checker": True, **make_kwargs}

    def make() -> gymnasium.Env:
        return gymnasium.make(env_id, **options)

    try:
        if ":" in env_id:  # as in Gymnasium: the module registers the environment
            importlib.import_module(env_id.partition(":")[0])
        env = make()
        if "render_mode" not in make_kwargs and "rgb_array" in env.metadata.get("render_modes", ()):
            env.close()
            options["render_mode"] = "rgb_array"
            if not os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}:  # pygame complains on stderr otherwise
                os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
            env = make()
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"environment gymnasium:{env_id}: {' '.join(str(error).split())}") from error
    where = f"environment gymnasium:{env_id}"
    given: Describe | None = import_value(describe, where, "describe") if isinstance(describe, str) else describe
    view = VIEWS.get(re.split(r"[/:]", env_id)[-1].partition("-v")[0])
    try:
        known = view.actions if view is not None else None
        if is_nethack(getattr(env.observation_space, "spaces", None)):
            known = command_names(env.unwrapped.actions)
        names = _action_names(env_id, env.action_space, action_names or known)
        table = getattr(env.unwrapped, "P", None)
    finally:
        env.close()
    rules = instruction or (view.rules if view is not None else f"You act in the environment {env_id}.")
    replies = f"Reply with exactly one of these actions: {', '.join(names)}." if names else "Reply with your action."
    if num_train < 1 or num_test < 1:
        raise ConfigError(f"environment gymnasium:{env_id}: num_train and num_test must be at least 1")
    members = {
        "name": re.sub(r"[^\w.~-]", "-", env_id),
        "instruction": f"{rules}\n\n{replies}",
        "splits": {"train": range(num_train), "test": range(num_train, num_train + num_test)},
        "cheap": view is not None if cheap is None else cheap,
        "make": staticmethod(make),
        "describe": staticmethod(given or (view.describe if view is not None else describe_any)),
        "action_names": names,
        "success_reward": view.success_reward if success_reward is None and view is not None else success_reward,
    }
    base = GymnasiumEnv
    if isinstance(table, dict) and names:
        certain = all(len(outcomes) == 1 for actions in table.values() for outcomes in actions.values())
        base = DeterministicEnv if certain else TabularEnv
    return type("GymnasiumEnv", (base,), members)


def _png(pixels: Any) -> bytes:
    from matplotlib.image import imsave

    picture = io.BytesIO()
    imsave(picture, numpy.asarray(pixels), format="png")
    return picture.getvalue()


def _action_names(env_id: str, space: Any, names: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(space, gymnasium.spaces.Text):
        return ()
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ConfigError(
            f"environment gymnasium:{env_id} has the action space {space}: only Discrete and Text are played as text; "
            "wrap the environment so that its actions are one of them"
        )
    if names is None:
        return tuple(str(number) for number in range(int(space.start), int(space.start) + int(space.n)))
    if len(names) != space.n or len({name.lower() for name in names}) != space.n:
        raise ConfigError(
            f"environment gymnasium:{env_id} has {space.n} actions, so action_names must be as many different names, "
            f"got {', '.join(names)}"
        )
    return tuple(names)


def describe_any(observation: Any, env: Any) -> str:
    """Return an observation in words: the environment's own text picture if it draws one, or its numbers by name."""
    if getattr(env, "render_mode", None) == "ansi":
        return str(env.render())
    return describe_screen(observation) if is_nethack(observation) else _describe_value(observation)


def _describe_value(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_describe_value(part)}" for name, part in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(_describe_value, value))
    array = numpy.asarray(value)
    if array.ndim == 0:
        return f"{array.item():g}" if array.dtype.kind == "f" else str(array.item())
    return numpy.array2string(array, precision=3, suppress_small=True, max_line_width=120, threshold=400)


@lru_cache(maxsize=32)
def best_actions(env_class: type[GymnasiumEnv]) -> list[int]:
    """Return the best action of each state under the table of transitions, by value iteration."""
    env = env_class.make()
    table = env.unwrapped.P
    env.close()
    states = sorted(table)
    values = dict.fromkeys(states, 0.0)

    def worth(state: int, action: int) -> float:
        return sum(p * (paid + DISCOUNT * (not over) * values[after]) for p, after, paid, over in table[state][action])

    change = 1.0
    while change > TOLERANCE:
        change = 0.0
        for state in states:
            value = max(worth(state, action) for action in table[state])
            change, values[state] = max(change, abs(value - values[state])), value
    return [max(table[state], key=lambda action: worth(state, action)) for state in states]


class AnyText(gymnasium.spaces.Text):
    """The space of all texts. Samples are printable ASCII."""

    def __init__(self, max_length: int = MAX_TEXT) -> None:
        super().__init__(max_length, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        length = int(self.np_random.integers(1, 20))
        return "".join(self.np_random.choice(list(string.ascii_lowercase + " "), length))


class AsGymnasium(gymnasium.Env[str, str]):
    """A text environment as a Gymnasium environment: texts in and out, `reset` draws an item of the split."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(self, env: TextEnv, split: str, render_mode: str | None) -> None:
        if split not in env.splits:
            raise ConfigError(f"{env.name} has no split {split!r}: known are {', '.join(env.splits)}")
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"as_gymnasium has the render mode 'ansi', got {render_mode!r}")
        self.text_env, self.render_mode = env, render_mode
        self.instruction = env.instruction
        self._items = env.splits[split]
        self._text = ""
        self.observation_space, self.action_space = AnyText(), AnyText()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start the item of `options["item"]`, or one drawn by the seed."""
        super().reset(seed=seed)
        item = (options or {}).get("item")
        item = self._items[int(self.np_random.integers(len(self._items)))] if item is None else int(item)
        self._text = self.text_env.reset(item)
        return self._text, {"item": item, "instruction": self.instruction}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        step = self.text_env.step(action)
        self._text = step.observation
        return self._text, float(step.reward), step.done, False, dict(step.info)

    def render(self) -> str | None:
        return self._text if self.render_mode == "ansi" else None

    def close(self) -> None:
        self.text_env.close()


def as_gymnasium(
    env: str | type[TextEnv] | TextEnv,
    split: str = "train",
    *,
    render_mode: str | None = None,
    max_turns: int | None = None,
    **kwargs: Any,
) -> gymnasium.Env[str, str]:
    """Return an environment by name, class or instance as a Gymnasium environment.

    `max_turns` truncates an episode after so many steps, by Gymnasium's own wrapper. `kwargs` go to the constructor.
    """
    from agentgym_rl.environment import catalog

    env_class = catalog.load(env, kwargs) if isinstance(env, str) else env
    made = AsGymnasium(env_class() if isinstance(env_class, type) else env_class, split, render_mode)
    return made if max_turns is None else gymnasium.wrappers.TimeLimit(made, max_turns)
