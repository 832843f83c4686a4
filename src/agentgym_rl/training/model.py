"""Models: load one, and read the log-probabilities of action tokens off it.

Shapes: B samples of T tokens in all, A action tokens among them, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.device.head import head_logprobs
from agentgym_rl.training.device.packed import packed_states, padded_states, why_not_packed
from agentgym_rl.training.lookup import find_model
from agentgym_rl.training.microbatch import MicroBatch

transformers_logging.disable_progress_bar()  # a checkpoint would draw one through the console's lines

Lent = Callable[[], AbstractContextManager[Any]]
"""Opens a model for a while: a second one, or the same with its adapters switched."""


def load_model(path: str, *, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """(model, tokenizer) from a Hugging Face folder or hub name, ready to sample and to train."""
    tokenizer = load_tokenizer(path)
    with _or_reason(path, "model") as name:
        options = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # read, and refused in our own words
        model, loading = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
        _require_all_weights(loading)
        model = model.to(device)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # kernels of ours are launched on the current device
    return model, tokenizer


def load_tokenizer(path: str) -> Any:
    with _or_reason(path, "tokenizer") as name:
        return AutoTokenizer.from_pretrained(name)


@contextmanager
def _or_reason(path: str, what: str) -> Iterator[str]:
    """What to load: a folder that is there, or a hub name; what is wrong with it is said in a line."""
    name = find_model(path)
    try:
        yield name
    except Exception as error:  # of any kind: what a file may hold that is no model has no bounds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        named = isinstance(error, OSError | ValueError | SafetensorError)
        reason = " ".join(lines[:2]) if named and lines else f"{type(error).__name__}: {' '.join(lines[:2])}"
        raise ConfigError(f"model.path = {path!r}: the {what} cannot be loaded: {reason:.400}") from error


def _require_all_weights(loading: dict[str, Any]) -> None:
    """Refuse weights that do not fit config.json: what is missing or of another shape would be made up at random."""
    if mismatched := sorted(loading["mismatched_keys"], key=str):
        name, *shapes = mismatched[0]
        found, wanted = (tuple(shape) for shape in shapes[:2])
        raise ValueError(f"its weights do not fit its config.json: {name} has the shape {found}, {wanted} is needed")
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"its weights lack {len(missing)} tensors that config.json asks for, such as {missing[0]}")


def action_logprobs(model: Any, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) at every action token, fp32, under the distribution at `temperature`.

    The head runs on action positions only: observations never meet the vocabulary.
    """
    if hasattr(
        model, "gathered"
    ):  # spread over ranks: its parameters are whole within this call (scale/process_group.py)
        return model.gathered(_read_actions, batch, temperature)
    return _read_actions(model, batch, temperature)


def _read_actions(model: Any, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    hidden_AH = states_before_actions(hidden_states(model.get_decoder(), batch), batch)
    return head_logprobs(model.get_output_embeddings(), hidden_AH, batch.targets_A, temperature)


def hidden_states(decoder: Any, batch: MicroBatch) -> Tensor:
    """TH: what the decoder makes of every token, each sample by itself."""
    return (padded_states if why_not_packed(decoder) else packed_states)(decoder, batch)


def states_before_actions(hidden_TH: Tensor, batch: MicroBatch) -> Tensor:
    """AH: where each action token is predicted, one token before it."""
    return hidden_TH.index_select(0, batch.places_A - 1)


def states_at_end(hidden_TH: Tensor, batch: MicroBatch) -> Tensor:
    """BH: after the last token of each sample."""
    return hidden_TH.index_select(0, batch.bounds_B1[1:] - 1)


@torch.no_grad()
def check_plain_head(model: Any) -> None:
    """Refuse a model whose logits are more than its head applied to its decoder (soft-capping, scaling)."""
    if hasattr(model, "gathered"):  # spread over ranks, and looked at before that
        return
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
