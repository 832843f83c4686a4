"""A float32 value as a bf16 weight and the rest beside it, and AdamW's arithmetic on such pairs.

optimizer.py says why; optimizer_kernels.py does the same for all parameters in one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-8
_MASK = 0xFFFFFFFF


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """float32 of a bf16 and what rounding to it took off, as a signed number of float32's last places."""
    return ((upper.view(torch.int16).int() << 16) + lower.int()).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """(nearest bf16, what is left): `join` gives the float32 back, bit for bit."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def update_one(row: tuple[Tensor, ...], scale: Tensor, numbers: tuple[float, ...], update: int, place: int) -> None:
    """One (parameter, gradient, lower half, moments) in plain torch."""
    parameter, gradient, low, first, second = row
    beta1, beta2, size, root, kept = numbers
    gradient = gradient.float() * scale
    new_first = first.float() * beta1 + gradient * (1.0 - beta1)
    new_second = second.float() * beta2 + gradient * gradient * (1.0 - beta2)
    master = join(parameter.detach(), low) * kept - size * new_first / (new_second.sqrt() / root + EPSILON)
    upper, lower = split(master)
    parameter.copy_(upper)
    low.copy_(lower)
    chance = noise(parameter.numel(), update, place, parameter.device).view(parameter.shape)
    first.copy_(round_by_chance(new_first, chance & 0xFFFF))
    second.copy_(round_by_chance(new_second, chance >> 16))


def round_by_chance(values: Tensor, chance: Tensor) -> Tensor:
    """bf16 above or below a float32, with a probability that makes the mean right. `chance` is in 0..65535."""
    return ((values.view(torch.int32) + chance.int()) >> 16).to(torch.int16).view(torch.bfloat16)


def noise(count: int, update: int, place: int, device: torch.device) -> Tensor:
    """32 random bits for each element; they depend on the update and the parameter only: a run can be repeated."""
    x = torch.arange(count, device=device, dtype=torch.int64)
    x = (x * 0x9E3779B1 + seed_of(update, place)) & _MASK
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)


def seed_of(update: int, place: int) -> int:
    """Apart for any two updates and parameters."""
    return (update * 0x85EBCA77 + place * 0xC2B2AE3D) & _MASK
