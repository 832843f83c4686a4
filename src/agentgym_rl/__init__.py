"""AgentGym-RL: train LLM agents by multi-turn reinforcement learning.

import agentgym_rl as ag

summary = ag.train("quickstart", {"rl.steps": 20})
"""

import os

# MKL reads it at its first use. Without it, results of some processors depend on the alignment of memory, and a resumed
# run would differ from an uninterrupted one in the last digits.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(
        ("evaluate", "load_model", "load_recipe", "load_trajectories", "make_env", "play", "train"), "agentgym_rl.api"
    ),
    "TextEnv": "agentgym_rl.environment.base",
    **dict.fromkeys(("AgentGymError", "ConfigError", "EngineError", "EnvError"), "agentgym_rl.errors"),
    **dict.fromkeys(("Group", "Limits", "Message", "Step", "StopReason", "Task", "Trajectory"), "agentgym_rl.types"),
}
"""Module of each public name. They are imported when they are first used, so that the package imports at once."""

__all__ = [
    "AgentGymError",
    "ConfigError",
    "EngineError",
    "EnvError",
    "Group",
    "Limits",
    "Message",
    "Step",
    "StopReason",
    "Task",
    "TextEnv",
    "Trajectory",
    "evaluate",
    "load_model",
    "load_recipe",
    "load_trajectories",
    "make_env",
    "play",
    "train",
]

TYPE_CHECKING = False  # type checkers know the name; `typing` would load two dozen modules
if TYPE_CHECKING:
    from agentgym_rl.api import evaluate, load_model, load_recipe, load_trajectories, make_env, play, train
    from agentgym_rl.environment.base import TextEnv
    from agentgym_rl.errors import AgentGymError, ConfigError, EngineError, EnvError
    from agentgym_rl.types import Group, Limits, Message, Step, StopReason, Task, Trajectory
else:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'agentgym_rl' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
