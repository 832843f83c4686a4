"""Locate a model: a folder, the Hugging Face hub, or its local cache. Does not import torch."""

from __future__ import annotations

import socket
import threading
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from agentgym_rl.errors import ConfigError

HUB_TIMEOUT_S = 4.0
"""Seconds to wait for a connection to the hub. The hub's own client retries for a minute and a half."""


def require_folder(path: str) -> Path:
    """Return `path` as a folder. Raise ConfigError if it has no model, unless it may be a hub name (`owner/model`)."""
    looks_local = Path(path).is_absolute() or path.startswith((".", "~")) or path.count("/") != 1
    folder = Path(path).expanduser()
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path = {path!r} holds adapters without their base model: "
            "merge them first, with `agentgym-rl export RUN FOLDER --merge`"
        )
    if looks_local and not (folder / "config.json").is_file():
        raise ConfigError(f"model.path = {path!r}: no Hugging Face model folder there (config.json is missing)")
    return folder


def find_model(path: str) -> str:
    """Return the folder or hub name to load. If the hub is unreachable, return the cached copy."""
    folder = require_folder(path)
    return str(folder) if folder.is_dir() else _hub_name_or_cache(path)


@lru_cache
def _hub_name_or_cache(name: str) -> str:
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError as error:
        raise ConfigError(f"model.path = {name!r} is neither a folder nor a hub name: {error}") from error
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _why_unreachable(constants.ENDPOINT)
    if not reason:
        return name
    if isinstance(cached, str):
        return str(Path(cached).parent)
    raise ConfigError(
        f"model.path = {name!r} is not a folder, is not in the Hugging Face cache, and {constants.ENDPOINT} cannot be "
        f"reached ({reason}): connect, download the model first, or name a folder"
    )


def _why_unreachable(url: str) -> str:
    """Return why `url`, or the proxy in front of it, cannot be reached, or an empty string if it can."""
    parts = urlsplit(url)
    proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
    parts = urlsplit(proxy) if proxy else parts
    address = (parts.hostname or "", parts.port or {"http": 80}.get(parts.scheme, 443))
    reasons = [f"no answer in {HUB_TIMEOUT_S:g} s"]

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=HUB_TIMEOUT_S).close()
        except OSError as error:
            reasons.append(str(error))
        else:
            reasons.append("")

    thread = threading.Thread(target=connect, daemon=True)  # the timeout does not cover the name lookup
    thread.start()
    thread.join(HUB_TIMEOUT_S)
    return reasons[-1]
