"""What runs inside vLLM's worker process: loads weights, and finishes where vLLM's own reload stops short.

vLLM mixes this class into its worker (`worker_extension_cls`); the methods are called through `collective_rpc`.
Nobody else imports this module: its import is the first that a worker does of ours, before it loads anything.
"""

from __future__ import annotations

import contextlib
from typing import Any

from agentgym_rl.agent.engines.vllm.guard import end_with_owner
from agentgym_rl.agent.engines.vllm.probe import held
from agentgym_rl.transport.device import Door, LentWeights, expect
from agentgym_rl.transport.host_memory import copies_done, refused, unpack

end_with_owner()


class WorkerExtension:
    """Names begin with `agentgym_`: vLLM refuses an extension that hides a method of its worker."""

    reload_weights: Any
    model_runner: Any
    parallel_config: Any

    def agentgym_load_folder(self, folder: str) -> int:
        """Weights of a Hugging Face folder. Returns how many heads were packed again."""
        self.reload_weights(weights_path=folder)
        return self._agentgym_pack_heads()

    def agentgym_load_shared(self, message: bytes) -> str:
        """Weights in memory that the learner lends for the length of this call. Returns why it takes longer than it
        should, if so."""
        self.reload_weights(weights_iterator=unpack(message))
        self._agentgym_pack_heads()
        copies_done()
        return refused()

    def agentgym_expect(self) -> list[str]:
        """Be ready for weights that a learner on this device lends; returns the Door."""
        return list(expect())

    def agentgym_load_lent(self, door: list[str], version: int) -> None:
        """As such a learner lends them."""
        # vLLM keeps tensors until it has all of a layer, and padded ones until the end: no lender would wait so long.
        with contextlib.closing(LentWeights(Door(*door), version).copies()) as weights:
            self.reload_weights(weights_iterator=weights)
        self._agentgym_pack_heads()
        copies_done()

    def agentgym_held(self, shapes: dict[str, list[int]]) -> dict[str, str]:
        """Checksums of the model's tensors, for the learner to compare with its own."""
        split = self.parallel_config.tensor_parallel_size > 1
        return held(self.model_runner.get_model(), shapes, split=split)

    def _agentgym_pack_heads(self) -> int:
        """A head tied to the embedding is not in the weights, so the reload passes it over; on the CPU its products use
        a packed copy of its own, which would stay as it was. Elsewhere packing again changes nothing."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        heads = [m for m in self.model_runner.get_model().modules() if isinstance(m, ParallelLMHead)]
        for head in heads:
            head.quant_method.process_weights_after_loading(head)
        return len(heads)
