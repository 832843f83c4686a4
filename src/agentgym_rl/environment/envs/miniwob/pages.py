"""The pages of the PyPI package `miniwob`, read from its folder. The package itself is not imported."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from agentgym_rl.errors import ConfigError


def pages_folder() -> Path:
    """Return the folder with one HTML file per task. Raise ConfigError if the package is not installed."""
    spec = find_spec("miniwob")
    folders = [Path(folder) / "html" / "miniwob" for folder in (spec and spec.submodule_search_locations) or ()]
    for folder in folders:
        if (folder / "click-button.html").is_file():
            return folder
    raise ConfigError(
        "miniwob needs the pages of the package 'miniwob' and found none: pip install 'agentgym-rl[miniwob]', or only "
        "the pages with pip install --no-deps miniwob"
    )
