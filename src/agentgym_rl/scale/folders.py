"""Whether the nodes of a cluster see the folders of a run, whose paths are absolute.

The driver and learner ranks write to one directory; what a node writes to a disk of its own nobody finds again.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from agentgym_rl.errors import ConfigError

Ask = Callable[[Callable[[str], str | None], str], Awaitable[dict[str, str | None]]]
"""Calls a function with a path on every other node; what each answered, by the node's name."""


async def require_shared(folder: Path, ask: Ask) -> None:
    """That every node reads what is written into `folder` here. A folder of that name on a disk of its own is not
    enough, so each must read a word that nobody can know."""
    with _marked(folder) as (path, word):
        blind = [node for node, found in (await ask(text_of, str(path))).items() if found != word]
    if blind:
        raise ConfigError(
            f"every node of the cluster must see the run directory {folder}, {', '.join(blind)} "
            f"{'does' if len(blind) == 1 else 'do'} not: set run_dir to a folder on a file system that all share"
        )


async def require_same(folder: Path, ask: Ask) -> None:
    """That every node has the model in `folder`, the same file or a copy."""
    own = weights_of(str(folder))
    other = [node for node, found in (await ask(weights_of, str(folder))).items() if found != own]
    if other:
        raise ConfigError(
            f"every node of the cluster must see the model in {folder}, {', '.join(other)} "
            f"{'has' if len(other) == 1 else 'have'} another or none: copy it there, or use a disk that all share"
        )


def text_of(path: str) -> str | None:
    """Of a file, on the node where this is called; None where it is not there."""
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return None


def weights_of(folder: str) -> str | None:
    """Names and sizes of a model's files; None where there is no such folder."""
    if not Path(folder).is_dir():
        return None
    files = sorted([*Path(folder).glob("*config.json"), *Path(folder).glob("*.safetensors")])
    return "\n".join(f"{path.name} {path.stat().st_size}" for path in files)


@contextlib.contextmanager
def _marked(folder: Path) -> Iterator[tuple[Path, str]]:
    """A file with a random word, under a name that no node has looked for before: file systems remember misses."""
    path, word = folder / f".seen-by-all-{uuid.uuid4().hex}", uuid.uuid4().hex
    path.write_text(word)
    try:
        yield path, word
    finally:
        path.unlink(missing_ok=True)
