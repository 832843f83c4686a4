"""WebArena: tasks in a real browser, on embedded sites or on the published benchmark's own."""

from agentgym_rl.environment.envs.webarena.embedded import WebArena
from agentgym_rl.environment.envs.webarena.official import WebArenaOfficial

__all__ = ["WebArena", "WebArenaOfficial"]
