"""WebArena's evaluators. An episode succeeds if all evaluators of its task accept it."""

from agentgym_rl.environment.envs.webarena.evaluators.run_evaluators import evaluate

__all__ = ["evaluate"]
