"""vLLM as an engine: in this process (`VllmEngine`) or behind the address of a `vllm serve` (`VllmServer`)."""

from agentgym_rl.agent.engines.vllm.engine import VllmEngine
from agentgym_rl.agent.engines.vllm.probe import Probe, probe_model
from agentgym_rl.agent.engines.vllm.server import VllmServer

__all__ = ["Probe", "VllmEngine", "VllmServer", "probe_model"]
