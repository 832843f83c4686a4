"""LoRA adapters of peft in captured steps.

A joint matrix gets further rows: the A matrices of its projections. One product then gives the outputs and the inputs
of the B matrices, and the kernel after it adds their products with B. Nothing is merged: merged weights would be a
second copy, and rounding them would make the sampler's log-probabilities differ from the learner's.

Shapes: N outputs and C inputs of a joint matrix, G projections in it (q, k and v are 3), R rank, padded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from agentgym_rl.errors import EngineError

MIN_RANK, MAX_RANK = 16, 128
"""Matrix units multiply at least 16 columns. Blocks of more than 128 do not fit the shared memory of every device."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ExtendedMatrix:
    """A joint matrix with rows for adapters. Engines of models that share frozen weights share it."""

    matrix: torch.Tensor
    """[N + rows for adapters, C]."""
    written: torch.Tensor | None = None
    """The A matrices whose copy is in its rows."""


class JointAdapter:
    """The adapters of one joint matrix, in buffers that captured steps read."""

    def __init__(self, projections: Sequence[Any], extended: ExtendedMatrix, rank: int) -> None:
        self._projections, self._extended = projections, extended
        num_outputs = sum(len(base_layer(each).weight) for each in projections)
        end = num_outputs + len(projections) * rank
        self.joint = extended.matrix[:end]
        """[N + G R, C]: the weights and, if they were written last, the A matrices of this adapter."""
        self.a = extended.matrix[num_outputs:end]
        """[G R, C]."""
        self.b = self.joint.new_zeros((num_outputs, rank))
        """[N, R], times the scale. The rows of a projection belong to its own R columns of a product with A."""
        self.own_a = torch.zeros_like(self.a)

    @property
    def rank(self) -> int:
        return self.b.shape[1]

    def active(self) -> list[list[str]]:
        """Return the names of each projection's active adapters."""
        return [active_adapters(each) for each in self._projections]

    @torch.no_grad()
    def load(self) -> None:
        """Copy the active adapters of peft's modules. Those of one projection are side by side."""
        self.own_a.zero_()
        self.b.zero_()
        output = 0
        for index, projection in enumerate(self._projections):
            num_outputs, place = len(base_layer(projection).weight), 0
            for name in active_adapters(projection):
                a, b = projection.lora_A[name].weight, projection.lora_B[name].weight
                first = index * self.rank + place
                self.own_a[first : first + len(a)] = a
                self.b[output : output + num_outputs, place : place + len(a)] = b * projection.scaling[name]
                place += len(a)
            output += num_outputs
        self._extended.written = None


def write_adapter_rows(adapters: Sequence[JointAdapter]) -> None:
    """Copy A matrices to their rows, unless they are there. Call it before steps: another engine may use the rows.

    Steps of all engines run in the order of one stream, so those that were started are not affected.
    """
    missing = [each for each in adapters if each._extended.written is not each.own_a]
    if missing:
        torch._foreach_copy_([each.a for each in missing], [each.own_a for each in missing])
    for each in missing:
        each._extended.written = each.own_a


def is_lora(module: Any) -> bool:
    lora = sys.modules.get("peft.tuners.lora.layer")
    return lora is not None and type(module) is lora.Linear


def base_layer(module: Any) -> Any:
    """Return the linear layer inside an adapter, or the module itself."""
    return module.base_layer if is_lora(module) else module


def active_adapters(module: Any) -> list[str]:
    """Return the adapters that the forward pass of a projection adds."""
    if not is_lora(module) or module.disable_adapters:
        return []
    if module.merged:
        raise EngineError("The model's adapters were merged into its weights: unmerge them, or make another engine.")
    return [name for name in module.active_adapters if name in module.lora_A]


def padded_rank(module: Any) -> int:
    """Return the columns that a projection's adapters need: any one of them, or the active ones together."""
    if not is_lora(module):
        return 0
    together = sum(module.r[name] for name in module.active_adapters if name in module.lora_A)
    rank = max([together, *(module.r[name] for name in module.lora_A)])
    return max(MIN_RANK, 1 << (rank - 1).bit_length())


def why_not_adapted(module: nn.Module) -> str | None:
    """Return None if captured steps support the adapters of a projection, or if it has none, else the reason."""
    if not is_lora(module):
        return None
    layer: Any = module
    matrices = [*layer.lora_A.values(), *layer.lora_B.values()]
    if any(part._forward_hooks or part._forward_pre_hooks for part in (layer, *matrices)):
        return "its adapters have hooks"
    if getattr(layer, "lora_variant", {}) or any(layer.use_dora.values()):
        return "its adapters are a variant of LoRA, such as DoRA"
    if any(matrix.bias is not None for matrix in matrices):
        return "its adapters have biases"
    if layer.merged:
        return "its adapters are merged"
    if (rank := padded_rank(layer)) > MAX_RANK:
        return f"its adapters need {rank} columns, more than {MAX_RANK}"
    return None
