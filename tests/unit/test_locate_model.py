"""Lookup of a model: in a folder, on the hub, or in the hub's cache if the hub cannot be reached."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from agentgym_rl.errors import ConfigError
from agentgym_rl.training import locate_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set up an empty cache and a hub that refuses connections."""
    locate_model._hub_name_or_cache.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{bound.getsockname()[1]}")
        yield tmp_path / "cache"
    locate_model._hub_name_or_cache.cache_clear()


def test_a_reachable_hub_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        assert locate_model.find_model("owner/model") == "owner/model"


def test_without_the_hub_a_model_comes_from_the_cache_or_is_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"'owner/model' is not a folder, .* cannot be reached \(.*refused\)"):
        locate_model.find_model("owner/model")
    snapshot = cache / "models--owner--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (cache / "models--owner--model" / "refs").mkdir()
    (cache / "models--owner--model" / "refs" / "main").write_text("abc")
    assert locate_model.find_model("owner/model") == str(snapshot)


def test_an_unresponsive_hub_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate_model, "HUB_TIMEOUT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        port = silent.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]  # fill its queue, so that further connections get no answer
        for connection in waiting:
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=r"cannot be reached \((no answer in 0.2 s|timed out)\)"):
            locate_model.find_model("owner/model")
        for connection in waiting:
            connection.close()


def test_a_name_that_cannot_be_on_the_hub_is_refused() -> None:
    with pytest.raises(ConfigError, match="'own er/model' is neither a folder nor a hub name"):
        locate_model.find_model("own er/model")
