"""Float32 master weights as a bf16 weight plus a remainder, and AdamW's arithmetic on such pairs.

optimizer.py explains why. optimizer_kernels.py does the same for all parameters in one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-8
_MASK = 0xFFFFFFFF


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """Return the float32 of a bf16 and its remainder, a signed number of float32's last places."""
    return ((upper.view(torch.int16).int() << 16) + lower.int()).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return (nearest bf16, remainder). `join` restores the float32 bit for bit."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def update_one(row: tuple[Tensor, ...], scale: Tensor, numbers: tuple[float, ...], update: int, index: int) -> None:
    """Update one (parameter, gradient, remainder, first moment, second moment) in plain torch."""
    parameter, gradient, low, first, second = row
    beta1, beta2, size, root, kept = numbers
    gradient = gradient.float() * scale
    new_first = first.float() * beta1 + gradient * (1.0 - beta1)
    new_second = second.float() * beta2 + gradient * gradient * (1.0 - beta2)
    master = join(parameter.detach(), low) * kept - size * new_first / (new_second.sqrt() / root + EPSILON)
    upper, lower = split(master)
    parameter.copy_(upper)
    low.copy_(lower)
    bits = random_bits(parameter.numel(), update, index, parameter.device).view(parameter.shape)
    first.copy_(round_stochastically(new_first, bits & 0xFFFF))
    second.copy_(round_stochastically(new_second, bits >> 16))


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 up or down to bf16 so that the mean is unbiased. `bits` are random in 0..65535."""
    return ((values.view(torch.int32) + bits.int()) >> 16).to(torch.int16).view(torch.bfloat16)


def random_bits(count: int, update: int, index: int, device: torch.device) -> Tensor:
    """Return 32 random bits per element. They depend only on the update and the parameter, so runs are repeatable."""
    x = torch.arange(count, device=device, dtype=torch.int64)
    x = (x * 0x9E3779B1 + seed_of(update, index)) & _MASK
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)


def seed_of(update: int, index: int) -> int:
    """Return a seed for a parameter's update, different for any two updates and parameters."""
    return (update * 0x85EBCA77 + index * 0xC2B2AE3D) & _MASK
