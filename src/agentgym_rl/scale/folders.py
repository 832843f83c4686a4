"""Checks that the nodes of a cluster see the folders of a run.

The driver and learner ranks write to one directory. Files on a node's own disk would be lost.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

from agentgym_rl.errors import ConfigError

Ask = Callable[[Callable[[str], str | None], str], Awaitable[dict[str, str | None]]]
"""Calls a function with a path on every other node and returns the answers by the node's name."""


async def require_shared(folder: Path, ask: Ask) -> None:
    """Raise ConfigError unless every node reads what is written into `folder` here. A local folder of the same name is
    not enough, so each node must read a random word."""
    # A new name, because file systems cache failed lookups.
    path, word = folder / f".seen-by-all-{uuid.uuid4().hex}", uuid.uuid4().hex
    path.write_text(word)
    try:
        failed = [node for node, text in (await ask(read_text, str(path))).items() if text != word]
    finally:
        path.unlink(missing_ok=True)
    if failed:
        raise ConfigError(
            f"every node of the cluster must see the run directory {folder}, {', '.join(failed)} "
            f"{'does' if len(failed) == 1 else 'do'} not: set run_dir to a folder on a file system that all share"
        )


async def require_same(folder: Path, ask: Ask) -> None:
    """Raise ConfigError unless every node has the model in `folder`, the same files or a copy."""
    own = list_model_files(str(folder))
    failed = [node for node, files in (await ask(list_model_files, str(folder))).items() if files != own]
    if failed:
        raise ConfigError(
            f"every node of the cluster must see the model in {folder}, {', '.join(failed)} "
            f"{'has' if len(failed) == 1 else 'have'} another or none: copy it there, or use a disk that all share"
        )


def read_text(path: str) -> str | None:
    """Return a file's text on the calling node, or None if there is no such file."""
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return None


def list_model_files(folder: str) -> str | None:
    """Return names and sizes of a model's files, or None if there is no such folder."""
    if not Path(folder).is_dir():
        return None
    files = sorted([*Path(folder).glob("*config.json"), *Path(folder).glob("*.safetensors")])
    return "\n".join(f"{path.name} {path.stat().st_size}" for path in files)
