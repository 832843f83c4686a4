"""Models: load one, and read the log-probabilities of action tokens off it.

Shapes: B rows, L columns, A action tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.microbatch import MicroBatch

Lent = Callable[[], AbstractContextManager[Any]]
"""Opens a model for a while: a second one, or the same with its adapters switched."""


def load_model(path: str, *, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """(model, tokenizer) from a Hugging Face folder or hub name, ready to sample and to train."""
    folder = require_folder(path)
    name = str(folder) if folder.is_dir() else path
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"model.path = {path!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    return model, tokenizer


def require_folder(path: str) -> Path:
    """The folder that `path` names, which only a hub name (`owner/model`) may lack."""
    looks_local = Path(path).is_absolute() or path.startswith((".", "~")) or path.count("/") != 1
    folder = Path(path).expanduser()
    if looks_local and not (folder / "config.json").is_file():
        raise ConfigError(f"model.path = {path!r}: no Hugging Face model folder there (config.json is missing)")
    return folder


def action_logprobs(model: Any, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) at every action token, fp32, under the distribution at `temperature`.

    The head runs on action positions only: observations never meet the vocabulary.
    """
    if hasattr(model, "gathered"):  # spread over ranks: its parameters are whole within this call (scale/ranks.py)
        return model.gathered(_read_actions, batch, temperature)
    return _read_actions(model, batch, temperature)


def _read_actions(model: Any, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    hidden_AH = states_before_actions(hidden_states(model.get_decoder(), batch), batch)
    logits_AV = model.get_output_embeddings()(hidden_AH).float()
    if temperature != 1.0:
        logits_AV = logits_AV / temperature
    logprobs_AV = logits_AV.log_softmax(-1)
    entropy_A = -(logprobs_AV.exp() * logprobs_AV).sum(-1)
    return logprobs_AV.gather(-1, batch.targets_A[:, None]).squeeze(-1), entropy_A


def hidden_states(decoder: Any, batch: MicroBatch) -> Tensor:
    """BLH: what the decoder makes of every token."""
    return decoder(input_ids=batch.input_ids_BL, use_cache=False).last_hidden_state


def states_before_actions(hidden_BLH: Tensor, batch: MicroBatch) -> Tensor:
    """AH: where each action token is predicted, one token before it."""
    return hidden_BLH[batch.rows_A, batch.columns_A - 1]


def states_at_end(hidden_BLH: Tensor, batch: MicroBatch) -> Tensor:
    """BH: after the last token of each sample."""
    return hidden_BLH[torch.arange(len(batch.lengths_B), device=hidden_BLH.device), batch.lengths_B - 1]


@torch.no_grad()
def check_plain_head(model: Any) -> None:
    """Refuse a model whose logits are more than its head applied to its decoder (soft-capping, scaling)."""
    ids = torch.tensor([[0, 1, 2, 3]], device=model.device)
    was_training = model.training
    model.eval()
    whole = model(input_ids=ids, use_cache=False).logits
    ours = model.get_output_embeddings()(model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state)
    model.train(was_training)
    if not torch.allclose(whole, ours, atol=1e-3, rtol=1e-3):
        raise ConfigError(
            f"{type(model).__name__} transforms its logits after the head, which the learner does not reproduce: "
            "use a model of the Llama or Qwen families"
        )
