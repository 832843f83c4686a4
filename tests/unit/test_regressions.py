"""Faults that were found by trying to refute the project's claims, one test each."""

import tomllib
from pathlib import Path

import pytest
import tomli_w
from packaging.requirements import Requirement
from scripts_for_tests import ROOT

from agentgym_rl.config import AgentConfig, load_config
from agentgym_rl.environment.envs.webarena.evaluators.strings import must_include
from agentgym_rl.environment.envs.webarena.sites.shop import initial
from agentgym_rl.run.collectors import limits_of
from agentgym_rl.training.scratch import build_tokenizer

RECIPE = ["model.path=x/y", "environments=[{name='babyai'}]", "name=mine"]


def test_resume_takes_the_newest_run_of_the_same_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, seed in (("mine", 0), ("mine-2", 1)):
        (tmp_path / "runs" / folder).mkdir(parents=True)
        (tmp_path / "runs" / folder / "config.toml").write_text(tomli_w.dumps({"seed": seed}))
    assert load_config(None, [*RECIPE, "seed=0"]).folder(resume=True) == Path("runs/mine")
    assert load_config(None, [*RECIPE, "seed=1"]).folder(resume=True) == Path("runs/mine-2")
    assert load_config(None, [*RECIPE, "seed=0"]).folder(resume=False) == Path("runs/mine-3")


def test_a_torch_without_products_in_float32_is_not_installed() -> None:
    """`torch.mm(out_dtype=)`, which head and engine call on CUDA, is in 2.8 and not in 2.7."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = [found for found in map(Requirement, listed) if found.name == "torch"]
    assert not torch.specifier.contains("2.7.1")
    assert torch.specifier.contains("2.8.0")


def test_an_episode_may_not_outgrow_the_engine() -> None:
    assert limits_of(AgentConfig(max_context=8192), 3, engine_context=2048).max_context == 2048
    assert limits_of(AgentConfig(max_context=512), 3, engine_context=2048).max_context == 512


def test_marks_that_replies_use_can_be_said() -> None:
    tokenizer = build_tokenizer(["craft 1 bed using 3 wool, 3 planks."], ["craft 1 bed using 3 wool, 3 planks"])
    said = tokenizer.encode("craft 1 bed using 3 wool, 3 planks.", add_special_tokens=False)
    assert tokenizer.decode(said) == "craft 1 bed using 3 wool , 3 planks"


@pytest.mark.parametrize(("reference", "answer"), [("0", "$120.0"), ("1", "1,205"), ("5", "1.5")])
def test_a_digit_is_not_found_inside_a_number(reference: str, answer: str) -> None:
    assert not must_include(reference, answer, whole_word=True)
    assert must_include(reference, f"it is {reference}", whole_word=True)


def test_a_product_may_have_any_name() -> None:
    assert [initial(name) for name in ("Everly Kettle", "Lamp", "")] == ["K", "L", "?"]
