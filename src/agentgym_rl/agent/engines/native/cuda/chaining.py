"""Programmatic dependent launch: a kernel is set up while the previous one ends.

Every kernel of a chain begins with `follow`: it waits for the results of the previous kernel, then allows the setup of
the next one. Pass `**CHAINED` to its launch.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_SUPPORTED = (
    os.environ.get("TRITON_INTERPRET") != "1"
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability() >= (9, 0)
)
"""Hopper and later devices support it."""
CHAINED: dict[str, Any] = {"CHAIN": True, "launch_pdl": True} if _SUPPORTED else {"CHAIN": False}


@triton.jit
def follow(CHAIN: tl.constexpr):
    if CHAIN:
        gdc_wait()
        gdc_launch_dependents()
