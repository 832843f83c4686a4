"""SQL tasks over small SQLite databases of this project: explore a database, then submit a result."""

from agentgym_rl.environment.envs.sqlgym.env import SqlGym

__all__ = ["SqlGym"]
