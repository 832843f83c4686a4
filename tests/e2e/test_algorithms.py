"""Every algorithm learns KeyDoor's short layouts on the CPU, from a model trained on random play only."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from agentgym_rl.config import load_config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import algorithms

GROUPED = ("rl.minibatches=4", "rl.group_size=4")
ARMS: dict[str, tuple[int, tuple[str, ...]]] = {
    "PPO": (30, ()),
    "GRPO": (40, GROUPED),
    "RLOO": (50, GROUPED),
    "REINFORCE++": (30, ("rl.minibatches=4", "rl.optimizer.lr=2e-3")),
    "GiGPO": (50, GROUPED),
}
"""Steps of 128 episodes each, and overrides for short tests: more updates and tasks per step need fewer steps.
AgentEvol and DPO are tested with their recipes, from the same start."""
LEARNS = "test_it_reaches_nine_tenths_of_the_optimum"


@pytest.mark.parametrize("arm", algorithms.ARMS)
def test_every_arm_is_a_valid_recipe(arm: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(algorithms.recipe_of(arm, tmp_path, True, 60, 128)))
    config = load_config(recipe, algorithms.overrides_of(arm, 128))
    assert (config.method == "rl") is (arm not in algorithms.OFFLINE)
    if config.method == "rl":
        assert config.rl.groups_per_step * config.rl.group_size == 128


@pytest.mark.parametrize("method", ["dpo", "agentevol"])
def test_the_recipes_start_as_the_arms_do(method: str, tmp_path: Path) -> None:
    """The tests of these recipes therefore cover their arms."""
    start = algorithms.recipe_of(algorithms.START, None, True, 0, 0)
    recipe = tomllib.loads((algorithms.RECIPE.parent / f"{method}.toml").read_text())
    for section in ("model", "environments", "warm_start"):
        assert recipe[section] == start[section]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Run all selected arms from one starting model, in two processes."""
    folder = tmp_path_factory.mktemp("algorithms")
    selected = {item.callspec.params["arm"] for item in request.session.items if LEARNS in item.name}  # type: ignore[attr-defined]
    jobs = [(arm, 0, folder, True, steps, 128, changes) for arm, (steps, changes) in ARMS.items() if arm in selected]
    return {result["arm"]: result for result in algorithms.play_all([0], jobs, processes=2)}


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("arm", ARMS)
def test_it_reaches_nine_tenths_of_the_optimum(results: dict[str, dict[str, Any]], arm: str) -> None:
    before, after = results[arm]["before"], results[arm]["after"]
    assert before["success"] < 0.3
    assert after["episodes"] == before["episodes"] == 40
    assert after["success"] >= 0.9, f"{arm}: {[(e['step'], e['success']) for e in results[arm]['evaluations']]}"
