"""TextCraft: gather and craft your way to a goal with Minecraft's recipes, on the `minecraft_data` package."""

from agentgym_rl.environment.envs.textcraft.env import TextCraft

__all__ = ["TextCraft"]
