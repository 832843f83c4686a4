"""Recipes: overrides, one clear line for each mistake, and a saved config that is a valid recipe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w

from agentgym_rl.config import Config, EnvironmentConfig, completed, load_config
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.log import RunLog
from agentgym_rl.training.settings import INVALID, Algorithm, Credit

RECIPE = """
name = "tiny"
[model.scratch]
hidden_size = 32
[[environments]]
name = "babyai"
subsets = ["GoToLocalS8N7"]
[warm_start]
episodes = 10
[rl]
steps = 3
optimizer = { lr = 1e-3 }
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def test_a_recipe_is_completed_with_defaults(recipe: Path) -> None:
    config = load_config(recipe, [])
    assert (config.name, config.rl.steps, config.rl.optimizer.lr) == ("tiny", 3, 1e-3)
    assert (config.rl.group_size, config.agent.temperature, config.horizon.kind) == (8, 1.0, "fixed")
    assert config.model.scratch is not None
    assert config.model.scratch.hidden_size == 32


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("rl.steps=50", lambda c: c.rl.steps, 50),
        ("rl.optimizer.lr=3e-4", lambda c: c.rl.optimizer.lr, 3e-4),
        ("name=other", lambda c: c.name, "other"),
        ('name="other"', lambda c: c.name, "other"),
        ("run_dir=/some/where", lambda c: c.run_dir, "/some/where"),
        ("environments.0.name=textcraft", lambda c: c.environments[0].name, "textcraft"),
        ("environments.0.subsets=[]", lambda c: c.environments[0].subsets, ()),
        ("horizon.turns=[3]", lambda c: c.horizon.turns, (3,)),
        ("agent.instruction=", lambda c: c.agent.instruction, ""),
        ("eval.every = 5", lambda c: c.eval.every, 5),
        ('trackers=["tensorboard"]', lambda c: c.trackers, ("tensorboard",)),
    ],
)
def test_an_override_sets_its_key(recipe: Path, override: str, read: Any, expected: object) -> None:
    assert read(load_config(recipe, [override])) == expected


def test_the_last_override_of_a_key_counts(recipe: Path) -> None:
    assert load_config(recipe, ["rl.steps=5", "rl.steps=6"]).rl.steps == 6


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.stepz=5", "rl.stepz: unknown key; did you mean 'steps'"),
        ("rl.optimizer.learning_rate=1", "rl.optimizer.learning_rate: unknown key"),
        ("colour=red", "colour: unknown key$"),
        ("environments.0.subset=GoTo", "environments.0.subset: unknown key; did you mean 'subsets'"),
        ("rl.lr=1", r"rl.lr: unknown key here; did you mean rl.optimizer.lr or rl.critic.optimizer.lr\?$"),
        ("episodes_timeout_s=9", "unknown key"),
        ("rl.algorithm=gpro", "rl.algorithm: must be .*, got 'gpro'; did you mean 'grpo'"),
        ("method=sftt", "method: must be .*got 'sftt'; did you mean 'sft'"),
        ("trackers=tensorboard", r"trackers: must be a list, such as \[\"tensorboard\"\], got 'tensorboard'$"),
        ("rl.normalize_std=maybe", "rl.normalize_std: must be true or false, got 'maybe'"),
        ("rl=true", "rl: must be a section, got true"),
        ("model.device=gpu", "model.device: must be auto, cpu, cuda"),
        ("rl.steps=many", "rl.steps: .*integer.*got 'many'"),
        ("rl.algorithm=ppo2", "rl.algorithm: .*'grpo'.*got 'ppo2'"),
        ("rl.steps=-1", "rl: steps must be at least 0, got -1"),
        ("rl.groups_per_step=0", "rl: groups_per_step must be at least 1, got 0"),
        ("rl.minibatches=0", "rl: minibatches must be at least 1"),
        ("rl.epochs=0", "rl: epochs must be at least 1"),
        ("rl.group_size=1", r"rl\.group_size: grpo .* at least 2, got 1"),
        ("rl.kl_coef=-0.1", "rl: kl_coef must be at least 0"),
        ("rl.importance_cap=0.5", "rl: importance_cap must be at least 1"),
        ("rl.sequence_mask_low=1.1", "rl: sequence_mask_low must be at most 1"),
        ("rl.sequence_mask_high=0.9", "rl: sequence_mask_high must be at least 1"),
        ("rl.optimizer.lr=-1.0", "rl.optimizer: lr must be at least 0"),
        ("rl.optimizer.lr=nan", "rl.optimizer: lr must be at least 0, got nan"),
        ("warm_start.sft.batch_size=0", "warm_start.sft: batch_size must be at least 1"),
        ("model.scratch.num_heads=5", "model.scratch: hidden_size must be a multiple"),
        ("horizon.turns=[8, 4]", "horizon: a fixed horizon needs turns = one number"),
        ("environments.0.horizon={kind='stepwise', turns=[4, 2]}", "environments.0.horizon: .*ascending turns"),
        ("agent.temperature=0", "agent.temperature: .*greater than 0"),
        ("agent.style=tools", "agent.style: .*'tool'"),
        ("agent.style=reflect", "agent.turns_per_attempt: style 'reflect' needs it"),
        ("model.path=somewhere", "set exactly one of model.path and model.scratch"),
        ("environments=[]", "environments: .*at least 1"),
        ("environments=[{name='a'}, {name='a'}]", "each name once, got a, a"),
        ("name=a/b", "name: must consist of letters, digits.*, got 'a/b'"),
        ("rl.steps", "expected key=value"),
        ("=5", "expected key=value"),
        ("environments.1.name=x", "1 is not a place in a list of 1"),
        ("environments.first.name=x", "first is not a place in a list of 1"),
        ("name.first=x", "name is a value, not a section"),
    ],
)
def test_a_mistake_is_reported_in_one_line(recipe: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(recipe, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[enviroments]\nname = 'babyai'", "enviroments: unknown key; did you mean 'environments'? (and 2 more)"),
        (
            "[[environments]]\nname = 'a'\n[modle]\npath = 'b/c'",
            "modle: unknown key; did you mean 'model'? (and 1 more)",
        ),
        ("[environments]\nname = 'a'\n[model]\npath = 'b/c'", "environments: must be a list: write [[environments]] "),
        ("[[environments]]\nname = 'a'\n[[model]]\npath = 'b/c'", "model: must be a section: write [model] instead of"),
        ("[[environments]]\n[model]\npath = 'b/c'", "environments.0.name: is needed, and not given"),
        ("[model]\npath = 'b/c'", "environments: is needed, and not given"),
    ],
)
def test_a_mistyped_section_is_reported_before_missing_keys(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, [])
    assert str(caught.value).startswith(message)


JARGON = re.compile(r"\b(tuple|dictionary|instance|dataclass|Input|valid|Field|None|True|False|datetime|string|bool)\b")


def key_paths(value: Any, prefix: str = "") -> list[str]:
    if isinstance(value, dict) and value:
        return [
            path for key, inner in value.items() for path in (f"{prefix}{key}", *key_paths(inner, f"{prefix}{key}."))
        ]
    return []


@pytest.mark.parametrize("value", ["{ x = 1 }", "[[1]]", "true", "1.5", "text", "2020-01-01", "nan", "-1"])
def test_no_error_text_uses_python_jargon(recipe: Path, value: str) -> None:
    keys = key_paths(load_config(recipe, ["scale.engines=1", "trackers=[]"]).resolved())
    keys += [f"environments.0.{key}" for key in EnvironmentConfig.model_fields]
    errors = []
    for key in keys:
        try:
            load_config(recipe, ["scale.engines=1", f"{key}={value}"])
        except ConfigError as error:
            errors.append(str(error))
    assert len(errors) > 20
    assert [text for text in errors if JARGON.search(text)] == []


@pytest.mark.parametrize("key", ["learner_cpus", "engine_cpus", "env_host_cpus", "worker_timeout_s"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [("inf", "finite number, got inf"), ("nan", "finite number, got nan"), ("-1", "greater than 0, got -1")],
)
def test_cores_and_seconds_of_a_cluster_must_be_finite_and_positive(
    recipe: Path, key: str, value: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"scale\.{key}: .*{reason}"):
        load_config(recipe, [f"scale.{key}={value}"])


def test_an_impossible_number_of_cores_is_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"scale\.learner_cpus: .*less than or equal to 1024, got 1e\+300"):
        load_config(recipe, ["scale.learner_cpus=1e300"])


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        *(
            ([f"rl.algorithm={a}", f"rl.credit={c}"], f"{c}.* cannot be used with {re.escape(f'{a}: {why}')}")
            for (a, c), why in INVALID.items()
        ),
        (["rl.algorithm=ppo", "rl.loss=gspo"], "gspo.* cannot be used with ppo: it has one ratio per trajectory"),
        (["rl.algorithm=rloo", "rl.group_size=1"], "rloo compares the episodes of a group, .* at least 2, got 1"),
        (["rl.algorithm=ppo", "rl.group_size=1", "rl.resample_rounds=1"], "resample_rounds replaces groups"),
        (["rl.kl_rate=1.0"], "kl_rate must be below 1"),
        (["rl.entropy_coef=nan"], "entropy_coef must be a finite number"),
        (["rl.optimizer.min_lr_ratio=inf"], "min_lr_ratio must be a finite number"),
        (["environments.0.weight=inf"], "finite number"),
        (["rl.kl_coef=0", "rl.kl_target=0.1"], "kl_target adapts kl_coef, which is 0"),
        (["rl.overlap=2"], "overlap must be 0 .* or 1 .*, got 2"),
    ],
)
def test_conflicting_settings_are_refused_with_the_reason(recipe: Path, overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(recipe, overrides)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["rl.group_size=1"], r"rl\.group_size: grpo compares .* at least 2, got 1$"),
        (["environments.0.group_size=1"], r"environment \w+: group_size: grpo compares .* at least 2, got 1$"),
        (
            ["rl.algorithm=ppo", "rl.keep_groups=0.5", "environments.0.group_size=1"],
            r"environment \w+: group_size: rl\.keep_groups compares .* at least 2, got 1$",
        ),
        (["rl.group_size=1", "environments.0.group_size=4"], ""),
        (["rl.group_size=1", "rl.tree={}", "rl.keep_groups=0.5"], ""),
        (["rl.algorithm=ppo", "environments.0.group_size=1"], ""),
    ],
)
def test_groups_that_are_compared_have_two_episodes(recipe: Path, overrides: list[str], reason: str) -> None:
    if not reason:
        assert load_config(recipe, overrides)
        return
    with pytest.raises(ConfigError, match=reason):
        load_config(recipe, overrides)


@pytest.mark.parametrize("credit", get_args(Credit))
@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_every_other_pair_of_algorithm_and_credit_is_valid(recipe: Path, algorithm: str, credit: str) -> None:
    if (algorithm, credit) not in INVALID:
        assert load_config(recipe, [f"rl.algorithm={algorithm}", f"rl.credit={credit}"]).rl.credit == credit


def test_further_mistakes_are_counted(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(and 1 more\)"):
        load_config(recipe, ["rl.stepz=1", "rl.stops=1"])


def test_a_model_from_scratch_needs_a_warm_start(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[model.scratch]\n[[environments]]\nname = "babyai"\n')
    with pytest.raises(ConfigError, match=r"model\.scratch needs warm_start"):
        load_config(path, [])


def test_missing_and_invalid_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "nowhere.toml", [])
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path, [])
    for content in (b"name = ", b"\xff\xfe"):
        (tmp_path / "broken.toml").write_bytes(content)
        with pytest.raises(ConfigError, match="is not valid TOML"):
            load_config(tmp_path / "broken.toml", [])


def test_the_saved_config_is_the_same_recipe(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe, ["horizon.kind=stepwise", "horizon.turns=[1, 2]", "eval.temperature=0"])
    with RunLog.create(tmp_path / "run", config.model_dump(mode="json")):
        pass
    assert load_config(tmp_path / "run" / "config.toml", []) == config


def test_a_run_gets_a_new_folder_unless_it_is_resumed(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(recipe, [])
    assert config.folder(resume=False) == config.folder(resume=True) == Path("runs/tiny")
    Path("runs/tiny").mkdir(parents=True)
    assert config.folder(resume=False) == Path("runs/tiny-2")
    assert config.folder(resume=True) == Path("runs/tiny")
    Path("runs/tiny-2").mkdir()
    assert config.folder(resume=False) == Path("runs/tiny-3")
    assert config.folder(resume=True) == Path("runs/tiny-2")
    assert load_config(recipe, ["run_dir=here"]).folder(resume=False) == Path("here")


def test_a_config_is_checked_without_loading_torch(recipe: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from agentgym_rl.config import load_config;"
        f"load_config(Path({str(recipe)!r}), []); print('torch' in sys.modules)"
    )
    completed_process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert completed_process.stdout.strip() == "False"


def test_configs_cannot_be_changed(recipe: Path) -> None:
    config = load_config(recipe, [])
    with pytest.raises(Exception, match="frozen"):
        config.seed = 4  # type: ignore[misc]
    assert isinstance(Config.model_validate(config.model_dump()), Config)
    assert tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def test_a_config_of_an_earlier_version_is_completed_with_defaults(recipe: Path) -> None:
    complete = load_config(recipe, []).resolved()
    earlier = {**complete, "warm_start": {k: v for k, v in complete["warm_start"].items() if k != "mistakes"}}
    del earlier["engine"]
    assert completed(earlier) == complete
    with pytest.raises(ConfigError, match=r"cannot read the config .*\(of_another_version: unknown key\)"):
        completed({**complete, "of_another_version": 1})


def environment_with_token(token_variable: str) -> str:
    return f'environments=[{{name = "x", url = "http://127.0.0.1:9", token_variable = "{token_variable}"}}]'


VLLM = ["engine.kind=vllm", 'engine.urls=["http://127.0.0.1:9"]']


@pytest.mark.parametrize(
    "overrides",
    [
        [environment_with_token("GITHUB_TOKEN")],
        [environment_with_token("AWS_SECRET_ACCESS_KEY")],
        [environment_with_token("MY_AGENTGYM_TOKEN")],
        [*VLLM, "engine.api_key_variable=OPENAI_API_KEY"],
    ],
)
def test_a_recipe_cannot_send_arbitrary_variables_to_a_server(
    recipe: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(recipe, overrides)
    with pytest.raises(ConfigError, match=r"the recipe would send this variable of yours to an address that it names"):
        config.require_allowed_variables()
    monkeypatch.setenv(
        "AGENTGYM_ALLOWED_VARIABLES", "GITHUB_TOKEN, AWS_SECRET_ACCESS_KEY,MY_AGENTGYM_TOKEN,OPENAI_API_KEY"
    )
    config.require_allowed_variables()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [environment_with_token("AGENTGYM_RL_TOKEN")],
        [environment_with_token("AGENTGYM_TEXTCRAFT_TOKEN")],
        [*VLLM, "engine.api_key_variable=VLLM_API_KEY"],
    ],
)
def test_variables_meant_for_servers_may_be_sent(recipe: Path, overrides: list[str]) -> None:
    load_config(recipe, overrides).require_allowed_variables()


def test_train_refuses_such_a_recipe_before_it_starts(recipe: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentgym_rl", "train", str(recipe), environment_with_token("GITHUB_TOKEN")]
    completed_process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert completed_process.returncode == 2
    assert "GITHUB_TOKEN" in completed_process.stderr
    assert "Traceback" not in completed_process.stderr
