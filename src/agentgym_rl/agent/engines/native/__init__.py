"""The native engine: batched sampling from a transformers model in this process. See docs/engine.md."""

from agentgym_rl.agent.engines.native.engine import NativeEngine

__all__ = ["NativeEngine"]
