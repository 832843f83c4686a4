"""The recipe as processes in other folders and on other machines get it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.agent.templates import TEMPLATES
from agentgym_rl.config import Config
from agentgym_rl.run.backend_ray import config_for_workers, named_variables


def recipe(**sections: Any) -> Config:
    common = {"model": {"path": "anywhere"}, "environments": [{"name": "keydoor"}], "scale": {}}
    return Config.model_validate(common | sections)


def test_what_a_cluster_would_not_read_or_could_not_do_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.device = 'cuda:1': with \[scale\] each process is given a device"):
        recipe(model={"path": "anywhere", "device": "cuda:1"})
    with pytest.raises(ValueError, match=r"engine\.weights = 'files': \[scale\] sends weights on the device"):
        recipe(engine={"kind": "vllm", "weights": "files"})
    assert recipe(model={"path": "anywhere", "device": "cuda:1"}, scale=None).model.device == "cuda:1"
    assert recipe(engine={"kind": "vllm", "weights": "files"}, scale=None).engine.weights == "files"


def test_paths_are_those_of_the_driver_and_its_device_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models", "mine").mkdir(parents=True)
    Path("mine.jinja").write_text("{{ messages }}")
    given = recipe(
        model={"path": "models/mine", "chat_template": "mine.jinja"},
        environments=[{"name": "keydoor", "items": {"train": "tasks.json"}}],
    )
    theirs = config_for_workers(given, "cpu")
    assert theirs.model.path == str(tmp_path / "models" / "mine")
    assert theirs.model.chat_template == "{{ messages }}"
    assert theirs.model.device == "cpu", "decided once, for all of them"
    assert theirs.environments[0].items == {}, "a host plays what it is told to"
    assert given.environments[0].items, "the driver has them still"
    hub = config_for_workers(recipe(model={"path": "owner/model", "chat_template": "chatml"}), "cuda")
    assert (hub.model.path, hub.model.device) == ("owner/model", "cuda")
    assert hub.model.chat_template == TEMPLATES["chatml"]


def test_only_variables_that_the_recipe_names_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYDOOR_TOKEN", "secret")
    monkeypatch.setenv("OTHER_TOKEN", "another")
    assert named_variables(recipe().environments, None) == {}
    server = {"name": "keydoor", "url": "http://127.0.0.1:1", "token_variable": "KEYDOOR_TOKEN"}
    assert named_variables(recipe(environments=[server]).environments, None) == {"KEYDOOR_TOKEN": "secret"}
