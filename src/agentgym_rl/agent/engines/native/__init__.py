"""The native engine: batched sampling from a model in this process. See docs/how-it-works/native-engine.md."""

from agentgym_rl.agent.engines.native.engine import NativeEngine

__all__ = ["NativeEngine"]
