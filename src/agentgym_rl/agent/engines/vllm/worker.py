"""Extension of vLLM's worker process: loads weights and completes vLLM's own reload.

vLLM mixes this class into its worker (`worker_extension_cls`); the methods are called through `collective_rpc`.
Import this module nowhere else: it starts the owner's watch, before a worker loads anything.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from agentgym_rl.agent.engines.vllm.probe import parameter_checksums
from agentgym_rl.agent.engines.vllm.process_cleanup import end_with_owner
from agentgym_rl.transport.broadcast import BroadcastWeights
from agentgym_rl.transport.buckets import WeightsInterrupted, wait_for_copies
from agentgym_rl.transport.device import open_endpoint

end_with_owner()


class WorkerExtension:
    """Methods added to vLLM's worker. They start with `agentgym_`, because vLLM refuses to override its own."""

    reload_weights: Any
    model_runner: Any
    parallel_config: Any
    rank: int
    """Index of the worker among those of its engine."""

    def agentgym_load_folder(self, folder: str) -> int:
        """Load a Hugging Face folder. Returns how many heads were packed again."""
        self.reload_weights(weights_path=folder)
        return self._agentgym_pack_heads()

    def agentgym_open_endpoint(self) -> list[str]:
        """Listen for weights from a learner on this device. Returns the Endpoint's fields."""
        return list(open_endpoint())

    def agentgym_load_tensors(self, message: bytes) -> str:
        """Load weights that learners send on the device or broadcast: `message` is a pickled source of the parent
        process. Returns why they are incomplete if another process is gone, or an empty string."""
        source = pickle.loads(message)
        if isinstance(source, BroadcastWeights):
            source = replace(source, member=replace(source.member, rank=source.member.rank + self.rank))
        try:
            with contextlib.closing(source.tensors()) as named:
                self.reload_weights(weights_iterator=_copies(named))
        except WeightsInterrupted as error:
            return str(error)
        self._agentgym_pack_heads()
        wait_for_copies()
        return ""

    def agentgym_checksums(self, shapes: dict[str, list[int]]) -> dict[str, str]:
        """Return checksums of the model's tensors, to compare with the learner's."""
        split = self.parallel_config.tensor_parallel_size > 1
        return parameter_checksums(self.model_runner.get_model(), shapes, split=split)

    def _agentgym_pack_heads(self) -> int:
        """Pack output heads again. A head tied to the embedding is not in the weights, so the reload skips it; on a CPU
        it uses a packed copy, which would keep the old values. On other devices this changes nothing."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        heads = [m for m in self.model_runner.get_model().modules() if isinstance(m, ParallelLMHead)]
        for head in heads:
            head.quant_method.process_weights_after_loading(head)
        return len(heads)


def _copies(named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of tensors, because vLLM keeps them until it has a whole layer, and padded ones until the end."""
    for name, tensor in named:
        copy = tensor.clone()
        del tensor  # the learner reuses its memory
        yield name, copy
        del copy
