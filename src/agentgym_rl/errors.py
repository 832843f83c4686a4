"""Errors raised on purpose.

    AgentGymError
    ├── ConfigError        the user asked for something impossible: one line, exit code 2
    ├── EnvError           an environment failed: the episode ends as `error`, is recorded and retried
    │   ├── EnvTimeout     it did not answer before its deadline
    │   └── EnvUnavailable its server cannot be reached or is full
    ├── EngineError        an engine failed to sample
    ├── ProgramError       an external agent's program failed: the episode ends as `error`, is recorded and retried
    ├── DeviceFull         the device has no memory for a pass of the learner: change settings and resume
    ├── DiskFull           the disk has no space for data that the run needs: free some space and resume
    └── WorkerLost         a process died that the run needs: resume

Messages say what was needed, what came, and what to do.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class AgentGymError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(AgentGymError):
    """The user asked for something impossible."""


class EnvError(AgentGymError):
    """An environment failed."""


class EnvTimeout(EnvError):
    """An environment did not answer before its deadline."""


class EnvUnavailable(EnvError):
    """An environment server cannot be reached or is full."""


class EngineError(AgentGymError):
    """An engine failed to sample."""


class ProgramError(AgentGymError):
    """An external agent's program failed."""


class DeviceFull(AgentGymError):
    """The device has no memory for a pass of the learner."""


class DiskFull(AgentGymError):
    """The disk has no space for data that a run needs."""


class WorkerLost(AgentGymError):
    """A process died that the run needs."""


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an exception as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the most similar known name, or an empty string."""
    names = {name.lower(): name for name in known}
    close = get_close_matches(given.lower(), names, n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""
