"""Processes forked from one server that has imported everything once: importing takes longer than most tests."""

from __future__ import annotations

import multiprocessing
import sys

PRELOADED = [
    "agentgym_rl.cli",
    "agentgym_rl.train",
    "agentgym_rl.fits",
    "agentgym_rl.scale.ranks",
    "agentgym_rl.scale.shards",
    "agentgym_rl.environment.envs.babyai",
    "minigrid.envs.babyai",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "matplotlib.patheffects",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "hypothesis",
]
"""Installed modules only: the server has no import path but its own, and passes over in silence what it cannot find."""

# Python has one such server, whichever context asked for it, and the last list set before it starts is the one that
# holds: so this is the only place that sets it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)


def exit_code_if_preloaded() -> None:
    """For a process that was only just forked: ends it with the number of modules it would have to import itself."""
    sys.exit(sum(name not in sys.modules for name in PRELOADED))
