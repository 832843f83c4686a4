"""Everything that is raised on purpose.

    AgentGymError
    ├── ConfigError        the user asked for something that cannot be: one line, exit code 2
    ├── EnvError           an environment failed: the episode ends as `error`, is recorded and retried
    │   ├── EnvTimeout     it did not answer before its deadline
    │   └── EnvUnavailable its server cannot be reached or has no room
    ├── EngineError        an engine failed to sample
    ├── DiskFull           there is no room for what the run cannot go on without: free some space and resume it
    └── WorkerLost         a process of the run died that it cannot go on without: resume it

Messages say what was needed, what came, and what to do.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class AgentGymError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(AgentGymError):
    """The user asked for something that cannot be."""


class EnvError(AgentGymError):
    """An environment failed."""


class EnvTimeout(EnvError):
    """An environment did not answer before its deadline."""


class EnvUnavailable(EnvError):
    """An environment server cannot be reached or has no room."""


class EngineError(AgentGymError):
    """An engine failed to sample."""


class DiskFull(AgentGymError):
    """There is no room on the disk for what a run cannot go on without."""


class WorkerLost(AgentGymError):
    """A process of the run died that it cannot go on without."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the known name that is most like the given one; nothing if none is."""
    names = {name.lower(): name for name in known}
    close = get_close_matches(given.lower(), names, n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""
