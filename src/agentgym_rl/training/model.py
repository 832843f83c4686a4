"""Load a model and compute the log-probabilities of action tokens.

Shapes: B samples of T tokens in all, A action tokens among them, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.device.head import head_logprobs
from agentgym_rl.training.device.packed import packed_action_states, packed_states, padded_states, why_not_packed
from agentgym_rl.training.locate_model import find_model, local_folder
from agentgym_rl.training.meta import fill, load_whole, make_empty
from agentgym_rl.training.microbatch import MicroBatch
from agentgym_rl.training.ranks import SINGLE_PROCESS, Ranks

transformers_logging.disable_progress_bar()  # it would break the console's lines when a checkpoint is saved

ModelContext = Callable[[], AbstractContextManager[Any]]
"""Opens a context that yields a model: a second one, or the same with other adapters."""


def load_model(path: str, *, device: str, dtype: torch.dtype, ranks: Ranks = SINGLE_PROCESS) -> tuple[Any, Any]:
    """Return (model, tokenizer) from a Hugging Face folder or hub name, ready to sample and to train.

    Ranks of several processes place the model before it has any memory.
    """
    tokenizer = load_tokenizer(path)
    with _explain_load_errors(path, "model") as name:
        if ranks.from_meta:
            folder = local_folder(name)
            model = make_empty(folder, dtype)
            model.config._name_or_path = name  # adapters are saved with the name of their base model
            ranks.prepare_model(model)
            fill(model, folder, device, host=ranks.offload)
        else:
            model = load_whole(name, dtype).to(device)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # our kernels are launched on the current device
    return model, tokenizer


def load_tokenizer(path: str) -> Any:
    with _explain_load_errors(path, "tokenizer") as name:
        return AutoTokenizer.from_pretrained(name)


def positions_of(path: str) -> int | None:
    """Return the tokens that a model reads at a time, or None if its config.json does not limit them."""
    with _explain_load_errors(path, "model") as name:
        return getattr(AutoConfig.from_pretrained(name), "max_position_embeddings", None)


@contextmanager
def _explain_load_errors(path: str, what: str) -> Iterator[str]:
    """Yield the folder or hub name to load. Turn any loading error into a ConfigError of one line."""
    name = find_model(path)
    try:
        yield name
    except Exception as error:  # a file that is not a model can cause any error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        named = isinstance(error, OSError | ValueError | SafetensorError)
        reason = " ".join(lines[:2]) if named and lines else f"{type(error).__name__}: {' '.join(lines[:2])}"
        raise ConfigError(f"{path!r}: the {what} cannot be loaded: {reason:.400}") from error


def action_logprobs(model: Any, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (log-probability, entropy) of every action token, fp32, of the distribution at `temperature`.

    The head runs on action positions only.
    """
    if hasattr(model, "gathered"):  # sharded over ranks: parameters are gathered for the call (scale/process_group.py)
        return model.gathered(_read_actions, batch, temperature)
    return _read_actions(model, batch, temperature)


def _read_actions(model: Any, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    decoder = model.get_decoder()
    if why_not_packed(decoder):
        hidden_AH = states_before_actions(padded_states(decoder, batch), batch)
    else:
        hidden_AH = packed_action_states(decoder, batch)
    return head_logprobs(model.get_output_embeddings(), hidden_AH, batch.targets_A, temperature)


def hidden_states(decoder: Any, batch: MicroBatch) -> Tensor:
    """Return the decoder's output for every token, TH. Samples do not see each other."""
    return (padded_states if why_not_packed(decoder) else packed_states)(decoder, batch)


def states_before_actions(hidden_TH: Tensor, batch: MicroBatch) -> Tensor:
    """Return the hidden states that predict the action tokens, AH: one token before each."""
    return hidden_TH.index_select(0, batch.places_A - 1)


def states_at_end(hidden_TH: Tensor, batch: MicroBatch) -> Tensor:
    """Return the hidden states of the last token of each sample, BH."""
    return hidden_TH.index_select(0, batch.bounds_B1[1:] - 1)


@torch.no_grad()
def check_plain_head(model: Any, ranks: Ranks = SINGLE_PROCESS) -> None:
    """Raise ConfigError if logits are not just the head applied to the decoder (soft-capping, scaling)."""
    ids = torch.tensor([[0, 1, 2, 3]], device=ranks.device(model))
    was_training = model.training
    model.eval()
    whole = model(input_ids=ids, use_cache=False).logits
    expected = model.gathered(_plain_logits, ids) if hasattr(model, "gathered") else _plain_logits(model, ids)
    model.train(was_training)
    if not torch.allclose(whole, expected, atol=1e-3, rtol=1e-3):
        raise ConfigError(
            f"{type(model).__name__} transforms its logits after the head, which the learner does not reproduce: "
            "use a model of the Llama or Qwen families"
        )


def _plain_logits(model: Any, ids: Tensor) -> Tensor:
    return model.get_output_embeddings()(model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state)
