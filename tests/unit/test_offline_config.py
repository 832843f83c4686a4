"""Recipes of offline methods: the sections of a method, refused settings, and the saved config."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import tomli_w

from agentgym_rl.config import Config, load_config
from agentgym_rl.errors import ConfigError

COMMON = """
[model]
path = "owner/model"
[[environments]]
name = "keydoor"
"""
RECIPES = {
    "rl": COMMON + "[rl]\nsteps = 3\n",
    "sft": 'method = "sft"\n' + COMMON + '[data]\nplay = "oracle"\n',
    "dpo": 'method = "dpo"\n' + COMMON + "[dpo]\nsample_groups = 4\n",
    "reward_model": 'method = "reward_model"\n' + COMMON + "[reward_model]\nsample_groups = 4\n",
    "agentevol": 'method = "agentevol"\n' + COMMON,
}


def load(tmp_path: Path, method: str, *overrides: str) -> Config:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPES[method])
    return load_config(path, list(overrides))


@pytest.mark.parametrize("method", RECIPES)
def test_a_method_has_its_sections_and_no_others(tmp_path: Path, method: str) -> None:
    config = load(tmp_path, method)
    assert config.method == method
    assert load(tmp_path, method, "scale.learners=2").scale is not None
    present = {
        name for name in ("sft", "dpo", "reward_model", "agentevol", "data") if getattr(config, name) is not None
    }
    assert (
        present
        == {
            "rl": set(),
            "reward_model": {"reward_model"},
            "sft": {"sft", "data"},
            "dpo": {"dpo"},
            "agentevol": {"sft", "agentevol"},
        }[method]
    )


@pytest.mark.parametrize("method", RECIPES)
def test_the_saved_config_is_a_recipe_of_the_same_run(tmp_path: Path, method: str) -> None:
    config = load(tmp_path, method)
    saved = {k: v for k, v in config.resolved().items() if v is not None}
    assert ("rl" in saved) == ("horizon" in saved) == (method == "rl")
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(_without_none(saved)))
    assert load_config(path, []) == config
    assert tomllib.loads(path.read_text())["method"] == method


@pytest.mark.parametrize("method", ["dpo", "reward_model"])
def test_pairs_need_groups_of_two_in_each_environment(tmp_path: Path, method: str) -> None:
    own = "environments.0.group_size=1"
    with pytest.raises(ConfigError, match=f"environment keydoor: group_size: {method} builds pairs .* 2, got 1$"):
        load(tmp_path, method, own)
    files = (f"{method}.sample_groups=0", "data.files=['runs/a']")
    assert load(tmp_path, method, own, *files), "nothing is played"
    assert load(tmp_path, "agentevol", own), "episodes are not compared"


def _without_none(value: object) -> object:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("method", "override", "reason"),
    [
        (
            "rl",
            "data.play=oracle",
            r"\[data\] is read by method = 'sft' or 'dpo' or 'agentevol' or 'dagger' or 'reward_model', this is 'rl'",
        ),
        ("rl", "sft.epochs=2", r"\[sft\] is read by method = 'sft' or 'agentevol' or 'dagger', this is 'rl'"),
        ("sft", "rl.steps=3", r"\[rl\] is read by method = 'rl' or 'distill', this is 'sft'"),
        ("sft", "horizon.turns=[3]", r"\[horizon\] is read by method = 'rl' or 'distill'"),
        ("sft", "dpo.beta=0.1", r"\[dpo\] is read by method = 'dpo'"),
        ("dpo", "sft.epochs=2", r"\[sft\] is read by"),
        ("agentevol", "dpo.beta=0.1", r"\[dpo\] is read by method = 'dpo', this is 'agentevol'"),
        ("agentevol", "environments.0.horizon={turns=[3]}", "a horizon is read by method = 'rl'"),
        ("dpo", "data.play=oracle", "dpo compares what a model did"),
        ("dpo", "data={files=['x.jsonl'],keep='success'}", "dpo needs failures"),
        ("dpo", "dpo.sample_groups=0", "needs dpo.sample_groups or data.files"),
        ("reward_model", "reward_model.sample_groups=0", "needs reward_model.sample_groups or data.files"),
        ("reward_model", "data.play=oracle", "reward_model compares what a model did"),
        ("dpo", "dpo.beta=0", "beta and min_gap must be positive"),
        ("dpo", "dpo.label_smoothing=0.5", "label_smoothing"),
        ("dpo", "dpo={rounds=2}", "needs new episodes in every round"),
        ("sft", "data={}", "needs files, or play"),
        (
            "sft",
            "method=grpo",
            "method: must be 'rl', 'sft', 'dpo', 'agentevol', 'dagger', 'distill' or 'reward_model'",
        ),
        ("agentevol", "agentevol.rounds=0", "rounds must be at least 1"),
        ("agentevol", "agentevol.tries=4", "unknown key"),
    ],
)
def test_settings_of_other_methods_are_refused_with_a_reason(
    tmp_path: Path, method: str, override: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path, method, override)


def test_sft_needs_data(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('method = "sft"\n' + COMMON)
    with pytest.raises(ConfigError, match=r"method = 'sft' needs \[data\]"):
        load_config(path, [])


def test_only_sft_can_start_from_scratch_without_a_warm_start(tmp_path: Path) -> None:
    scratch = ("model={scratch={}}",)
    assert load(tmp_path, "sft", *scratch).warm_start is None
    for method in ("dpo", "agentevol"):
        with pytest.raises(ConfigError, match=r"model\.scratch needs warm_start"):
            load(tmp_path, method, *scratch)


def test_dagger_needs_a_style_of_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('method = "dagger"\n' + COMMON)
    assert load_config(path, ["agent.style=function_call"]).method == "dagger"
    with pytest.raises(ConfigError, match="method 'dagger' compares written actions"):
        load_config(path, ["agent.style=tool"])
