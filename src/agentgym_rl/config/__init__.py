"""The recipe of a run. `recipe.py` has the whole, `sections.py` its sections, `training/settings.py` the trainers'."""

from agentgym_rl.config.recipe import ALLOWED_VARIABLES, Config, Method, completed, load_config
from agentgym_rl.config.sections import (
    AgentConfig,
    CheckpointConfig,
    EngineConfig,
    EnvironmentConfig,
    EvalConfig,
    ModelConfig,
    ScaleConfig,
    TeamConfig,
    WarmStartConfig,
)

__all__ = [
    "ALLOWED_VARIABLES",
    "AgentConfig",
    "CheckpointConfig",
    "Config",
    "EngineConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "Method",
    "ModelConfig",
    "ScaleConfig",
    "TeamConfig",
    "WarmStartConfig",
    "completed",
    "load_config",
]
