"""AgentGym-RL: train LLM agents by multi-turn reinforcement learning."""

__version__ = "0.1.0"
