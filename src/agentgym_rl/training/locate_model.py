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


def require_folder(path: str, setting: str = "model.path") -> Path:
    """Return `path` as a folder. Raise ConfigError if it has no model, unless it may be a hub name (`owner/model`).

    `setting` is the key of the recipe that names the path.
    """
    looks_local = Path(path).is_absolute() or path.startswith((".", "~")) or path.count("/") != 1
    folder = Path(path).expanduser()
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{setting} = {path!r} holds adapters without their base model: "
            "merge them first, with `agentgym-rl export RUN FOLDER --merge`"
        )
    if looks_local and not (folder / "config.json").is_file():
        raise ConfigError(f"{setting} = {path!r}: no Hugging Face model folder there (config.json is missing)")
    return folder


REWARD_HEAD = "reward_head.safetensors"
"""File of a model's folder that makes it a reward model."""


def folder_of(path: str, setting: str) -> Path:
    """Return the folder that `path` names: a model's, or that of the last checkpoint of a run. A hub name stays."""
    folder = Path(path).expanduser()
    if not (folder / "checkpoints").is_dir():
        return folder
    checkpoints = sorted((folder / "checkpoints").glob("step_*"), key=lambda step: (len(step.name), step.name))
    if not checkpoints:
        raise ConfigError(f"{setting} = {path!r}: the run has no checkpoint yet")
    return checkpoints[-1] / "model"


def find_reward_model(path: str) -> Path:
    """Return the folder of a reward model. Raise ConfigError if there is none."""
    folder = folder_of(path, "rewards.path")
    if not (folder / REWARD_HEAD).is_file():
        raise ConfigError(
            f"rewards.path = {path!r}: {folder} is no reward model ({REWARD_HEAD} is missing): train one with method = "
            "'reward_model', and name its run or the folder `model` of a checkpoint"
        )
    return folder


def find_model(path: str, setting: str = "model.path") -> str:
    """Return the folder or hub name to load. If the hub is unreachable, return the cached copy.

    Errors name `setting`, the key of the recipe that has the path.
    """
    folder = require_folder(path, setting)
    return str(folder) if folder.is_dir() else _hub_name_or_cache(path, setting)


def local_folder(name: str) -> str:
    """Return the folder of a model, downloaded if `name` is a hub name."""
    if Path(name).is_dir():
        return name
    from huggingface_hub import snapshot_download

    return snapshot_download(name, allow_patterns=["*.json", "*.safetensors"])


@lru_cache
def _hub_name_or_cache(name: str, setting: str) -> str:
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError as error:
        raise ConfigError(f"{setting} = {name!r} is neither a folder nor a hub name: {error}") from error
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _why_unreachable(constants.ENDPOINT)
    if not reason:
        return name
    if isinstance(cached, str):
        return str(Path(cached).parent)
    raise ConfigError(
        f"{setting} = {name!r} is not a folder, is not in the Hugging Face cache, and {constants.ENDPOINT} cannot be "
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
