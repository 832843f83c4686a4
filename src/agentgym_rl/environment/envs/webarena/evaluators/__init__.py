"""Whether a task was done: WebArena's evaluators. All that a task names must be content."""

from agentgym_rl.environment.envs.webarena.evaluators.evaluate import evaluate

__all__ = ["evaluate"]
