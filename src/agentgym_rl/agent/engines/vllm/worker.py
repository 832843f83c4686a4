"""Extension of vLLM's worker process: loads weights and completes vLLM's own reload.

vLLM mixes this class into its worker (`worker_extension_cls`); the methods are called through `collective_rpc`.
Import this module nowhere else: it starts the owner's watch, before a worker loads anything.
"""

from __future__ import annotations

import contextlib
from typing import Any

from agentgym_rl.agent.engines.vllm.probe import parameter_checksums
from agentgym_rl.agent.engines.vllm.process_cleanup import end_with_owner
from agentgym_rl.transport.device import DeviceWeights, Endpoint, open_endpoint
from agentgym_rl.transport.host_memory import page_lock_error, unpack, wait_for_copies

end_with_owner()


class WorkerExtension:
    """Methods added to vLLM's worker. They start with `agentgym_`, because vLLM refuses to override its own."""

    reload_weights: Any
    model_runner: Any
    parallel_config: Any

    def agentgym_load_folder(self, folder: str) -> int:
        """Load a Hugging Face folder. Returns how many heads were packed again."""
        self.reload_weights(weights_path=folder)
        return self._agentgym_pack_heads()

    def agentgym_load_shared(self, message: bytes) -> str:
        """Load weights from memory that the learner shares during this call. Returns why it is slow, if so."""
        self.reload_weights(weights_iterator=unpack(message))
        self._agentgym_pack_heads()
        wait_for_copies()
        return page_lock_error()

    def agentgym_open_endpoint(self) -> list[str]:
        """Listen for weights from a learner on this device. Returns the Endpoint's fields."""
        return list(open_endpoint())

    def agentgym_load_device_weights(self, endpoint: list[str], version: int) -> None:
        """Load weights that such a learner sends."""
        # Copies, because vLLM keeps tensors until it has a whole layer, and padded ones until the end.
        with contextlib.closing(DeviceWeights(Endpoint(*endpoint), version).copies()) as weights:
            self.reload_weights(weights_iterator=weights)
        self._agentgym_pack_heads()
        wait_for_copies()

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
