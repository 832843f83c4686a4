"""Decoder families that the native engine and the packed learner compute exactly."""

from __future__ import annotations

from transformers import LlamaForCausalLM, LlamaModel, Qwen2ForCausalLM, Qwen2Model, Qwen3ForCausalLM, Qwen3Model
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

CAUSAL_MODELS = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
DECODERS = (LlamaModel, Qwen2Model, Qwen3Model)
RMS_NORMS = (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rope types whose angles depend on the position alone. Others (dynamic, longrope) depend on the longest sequence, so
keys cached earlier, or computed in another batch, would differ from those of a full forward pass."""
