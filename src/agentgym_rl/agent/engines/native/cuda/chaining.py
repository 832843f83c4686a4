"""Programmatic dependent launch: a kernel is set up while the one before it ends, instead of after it.

Every kernel of a chain begins with `follow`: it waits for all the results of the kernel before it, then lets the next
one be set up. Pass `**CHAINED` to its launch.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_POSSIBLE = (
    os.environ.get("TRITON_INTERPRET") != "1"
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability() >= (9, 0)
)
"""From Hopper on."""
CHAINED: dict[str, Any] = {"CHAIN": True, "launch_pdl": True} if _POSSIBLE else {"CHAIN": False}


@triton.jit
def follow(CHAIN: tl.constexpr):
    if CHAIN:
        gdc_wait()
        gdc_launch_dependents()
