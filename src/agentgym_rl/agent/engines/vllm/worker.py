"""Extension of vLLM's worker process: loads weights and completes vLLM's own reload.

vLLM mixes this class into its worker (`worker_extension_cls`); the methods are called through `collective_rpc`.
Import this module nowhere else: it starts the owner's watch, before a worker loads anything.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from agentgym_rl.agent.engines.vllm.probe import parameter_checksums
from agentgym_rl.agent.engines.vllm.process_cleanup import end_with_owner
from agentgym_rl.errors import EngineError
from agentgym_rl.transport.broadcast import BroadcastWeights, WeightsInterrupted, wait_for_copies
from agentgym_rl.transport.device import open_endpoint

end_with_owner()


class WorkerExtension:
    """Methods added to vLLM's worker. They start with `agentgym_`, because vLLM refuses to override its own."""

    reload_weights: Any
    add_lora: Any
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
        self._agentgym_endpoint = open_endpoint()
        return list(self._agentgym_endpoint)

    def agentgym_load_tensors(self, message: bytes, adapter_id: int) -> tuple[str, bool]:
        """Load weights that learners send on the device or broadcast: `message` is a pickled source of the parent
        process. Tensors of an adapter become vLLM's adapter of this id, beside the weights. Returns (why they are
        incomplete if another process is gone, or an empty string; whether they are an adapter's)."""
        source = pickle.loads(message)
        if isinstance(source, BroadcastWeights):
            source = replace(source, member=replace(source.member, rank=source.member.rank + self.rank))
        elif self.rank:  # the source names the endpoint of the first worker; this one was opened with it
            source = replace(source, endpoint=self._agentgym_endpoint)
        try:
            with contextlib.closing(source.tensors()) as named:
                copies = _copies(named)
                first = next(copies)
                is_adapter = ".lora_" in first[0]
                copies = itertools.chain([first], copies)
                del first  # it may be the largest
                if is_adapter:
                    self._agentgym_add_adapter(dict(copies), adapter_id)
                else:
                    self.reload_weights(weights_iterator=copies)
        except WeightsInterrupted as error:
            return str(error), False
        if not is_adapter:
            self._agentgym_pack_heads()
        wait_for_copies()
        return "", is_adapter

    def agentgym_checksums(self, shapes: dict[str, list[int]]) -> dict[str, str]:
        """Return checksums of the model's tensors, to compare with the learner's."""
        split = self.parallel_config.tensor_parallel_size > 1
        return parameter_checksums(self.model_runner.get_model(), shapes, split=split)

    def _agentgym_add_adapter(self, tensors: Mapping[str, Tensor], adapter_id: int) -> None:
        """Add an adapter through a temporary folder of this machine, because vLLM reads adapters only from files."""
        from vllm.lora.request import LoRARequest

        rank = max(tensor.shape[0] for name, tensor in tensors.items() if "A" in name.rpartition(".lora_")[2])
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
        with tempfile.TemporaryDirectory(prefix="agentgym-rl-adapter-") as folder:
            save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, f"{folder}/adapter_model.safetensors")
            Path(folder, "adapter_config.json").write_text(json.dumps(config))
            if not self.add_lora(LoRARequest(str(adapter_id), adapter_id, folder)):
                raise EngineError(f"vLLM did not load adapter {adapter_id}")

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
