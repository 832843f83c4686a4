"""Where a model is: a folder, the Hugging Face hub, or the hub's cache on this machine. Answered without torch."""

from __future__ import annotations

import socket
import threading
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from agentgym_rl.errors import ConfigError

HUB_S = 4.0
"""Seconds to wait for a connection to the hub. Its own client would try for a minute and a half."""


def require_folder(path: str) -> Path:
    """The folder that `path` names, which only a hub name (`owner/model`) may lack."""
    looks_local = Path(path).is_absolute() or path.startswith((".", "~")) or path.count("/") != 1
    folder = Path(path).expanduser()
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path = {path!r} holds adapters without the model under them: "
            "merge them into it first, with `agentgym-rl export RUN FOLDER --merge`"
        )
    if looks_local and not (folder / "config.json").is_file():
        raise ConfigError(f"model.path = {path!r}: no Hugging Face model folder there (config.json is missing)")
    return folder


def find_model(path: str) -> str:
    """Return what to load: the folder that `path` names, else the hub name; the cached copy if the hub is out of
    reach."""
    folder = require_folder(path)
    return str(folder) if folder.is_dir() else _on_the_hub(path)


@lru_cache
def _on_the_hub(name: str) -> str:
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError as error:
        raise ConfigError(f"model.path = {name!r} is neither a folder nor a hub name: {error}") from error
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _why_out_of_reach(constants.ENDPOINT)
    if not why:
        return name
    if isinstance(cached, str):
        return str(Path(cached).parent)
    raise ConfigError(
        f"model.path = {name!r} is no folder, is not in the Hugging Face cache, and {constants.ENDPOINT} cannot be "
        f"reached ({why}): connect, download it before, or name a folder"
    )


def _why_out_of_reach(url: str) -> str:
    """Return why there is no connection to `url`, or to the proxy before it; nothing if there is one."""
    parts = urlsplit(url)
    proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
    parts = urlsplit(proxy) if proxy else parts
    place = (parts.hostname or "", parts.port or {"http": 80}.get(parts.scheme, 443))
    reasons = [f"no answer in {HUB_S:g} s"]

    def connect() -> None:
        try:
            socket.create_connection(place, timeout=HUB_S).close()
        except OSError as error:
            reasons.append(str(error))
        else:
            reasons.append("")

    thread = threading.Thread(target=connect, daemon=True)  # a name server may take longer than any time-out
    thread.start()
    thread.join(HUB_S)
    return reasons[-1]
