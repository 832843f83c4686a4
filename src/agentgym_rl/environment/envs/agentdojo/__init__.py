"""AgentDojo's tasks for agents with tools, with its own environments, attacks and checks."""

from agentgym_rl.environment.envs.agentdojo.env import load_agentdojo

__all__ = ["load_agentdojo"]
