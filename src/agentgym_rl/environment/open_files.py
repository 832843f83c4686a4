"""Every session takes a socket, and systems begin with room for 1,024 open files: ask for what is needed."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger(__name__)

SPARE = 256
"""Files a process has open besides its sessions."""


def allow_open_files(sessions: int, holds: int = 0) -> int:
    """Raise this process's soft limit so that sockets of `sessions` and `holds` fit; returns how many files it may open
    then.

    What the hard limit does not allow is said in a warning: connections past it would be refused by the system.
    """
    if sys.platform == "win32":
        return sessions + holds + SPARE  # no such limit
    import resource

    needed = sessions + holds + SPARE
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
