"""The limit of open files: each session needs a socket, and the usual soft limit is 1,024."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger(__name__)

OTHER_FILES = 256
"""Open files of a process besides its sessions."""


def allow_open_files(sessions: int, holds: int = 0) -> int:
    """Raise this process's soft limit to fit the sockets of `sessions` and `holds`, and return the new limit.

    Log a warning if the hard limit is lower than needed, because the system refuses connections above it.
    """
    if sys.platform == "win32":
        return sessions + holds + OTHER_FILES  # no such limit
    import resource

    needed = sessions + holds + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return soft if soft != resource.RLIM_INFINITY else needed
    target = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if target > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    if target < needed:
        logger.warning(
            "%d sessions need %d open files, this process may have %d: raise the hard limit (ulimit -Hn), "
            "or lower max_sessions",
            sessions,
            needed,
            target,
        )
    return target
