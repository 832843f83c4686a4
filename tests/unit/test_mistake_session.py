"""Demonstrations with injected mistakes: which are made, the oracle's recovery, and that the loss skips them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs_for_tests import context_of, context_with_items, quiet
from test_rollout import Corridor
from training_for_tests import tiny_model

from agentgym_rl.agent.collect import Collector
from agentgym_rl.agent.policy import OraclePolicy
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.agent.styles import STYLES
from agentgym_rl.commands.train import train
from agentgym_rl.common.seeds import derive_seed
from agentgym_rl.config import Config
from agentgym_rl.config.sections import EnvironmentConfig
from agentgym_rl.environment import catalog
from agentgym_rl.environment.formats import action_format
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.environment.wire import NotSupported
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.run.collectors import make_collector, make_stages
from agentgym_rl.run.demonstrations import load_trajectories, play_demonstrations, to_sample
from agentgym_rl.run.environments_pool import EnvironmentsPool
from agentgym_rl.run.mistakes import CORRECTION, MistakeSession, Solutions, inject_mistakes
from agentgym_rl.run.preflight import require_recovery
from agentgym_rl.run.rounds import Round, read_round, write_round
from agentgym_rl.run.start import prepare, word_tokenizer
from agentgym_rl.training.conversations import convert, read_conversations
from agentgym_rl.training.settings import SFTSettings
from agentgym_rl.training.sft import SFT
from agentgym_rl.types import Limits, Sample, Task, Trajectory

LIMITS = Limits(max_turns=60, max_new_tokens=64, max_context=8000)
torch.set_num_threads(1)


def config_of(env: str, mistakes: float, *, episodes: int = 40, style: str = "act", seed: int = 0) -> Config:
    return Config.model_validate(
        {
            "seed": seed,
            "model": {"scratch": {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2}},
            "environments": [{"name": env}],
            "agent": {"instruction": "", "style": style},
            "warm_start": {"episodes": episodes, "max_turns": 60, "mistakes": mistakes},
        }
    )


async def play_warm_start(config: Config, root: Path) -> list[Trajectory]:
    """Play the warm start of `config` in the run directory `root` and return the trajectories to imitate."""
    warm = config.warm_start
    assert warm is not None
    async with context_with_items(config, root, EnvironmentsPool(config.environments, config.agent)) as context:
        return await play_demonstrations(
            context, "warmstart", "oracle", episodes=warm.episodes, max_turns=warm.max_turns, mistakes=warm.mistakes
        )


def recorded_episodes(root: Path) -> list[dict[str, Any]]:
    """Return the recorded warm-start episodes without their duration."""
    lines = (root / "trajectories" / "warmstart_000000.jsonl").read_text().splitlines()
    return [json.loads(line) | {"seconds": 0} for line in lines]


def replies(trajectory: Trajectory) -> list[tuple[str, bool]]:
    """Return (reply, whether it is a mistake) for each turn."""
    texts = [m.content for m in trajectory.messages if m.role == "assistant"]
    return [(text, info.get("mistake", False)) for text, info in zip(texts, trajectory.infos, strict=True)]


@pytest.mark.parametrize("env", ["textcraft", pytest.param("babyai", marks=pytest.mark.long), "keydoor", "maze"])
async def test_the_oracle_succeeds_after_mistakes_of_both_kinds(env: str) -> None:
    """Check the success of the oracle and the share of turns with a mistake."""
    pool = LocalPool({env: catalog.load(env)})
    items = (await pool.items(env, "train"))[:200]
    solutions: Solutions = {}
    trajectories: list[Trajectory] = []
    for share in (0.0, 0.2):
        wrap = inject_mistakes(share, 0, solutions)
        collect = Collector(pool, lambda session, seed: OraclePolicy(session), 1, 16, wrap=wrap)
        groups = await collect([Task(env, item) for item in items], LIMITS, 0)
        trajectories = [g.trajectories[-1] for g in groups]
        if not share:
            assert not any("mistake" in info for t in trajectories for info in t.infos)
    await pool.close()
    turns = [info for t in trajectories for info in t.infos]
    wrong = [info for info in turns if info.get("mistake")]
    invalid = [info for info in wrong if info["valid"] is False]
    assert 0.15 < len(wrong) / len(turns) < 0.25
    assert 0.15 < len(invalid) / len(wrong) < 0.7
    assert sum(t.success for t in trajectories) >= 0.98 * len(trajectories)


async def test_the_oracle_continues_from_the_state_after_a_mistake(tmp_path: Path) -> None:
    """Compare every correct reply with that of a fresh oracle in the same state."""
    trajectories = await play_warm_start(config_of("textcraft", 0.4, episodes=20), tmp_path)
    env = catalog.load("textcraft")()
    compared = 0
    for trajectory in trajectories:
        env.reset(trajectory.task.item)
        for text, mistake in replies(trajectory):
            assert (text == env.oracle()) is not mistake
            env.step(text)
            compared += mistake
    assert compared > 40


@pytest.mark.parametrize("env", ["textcraft", pytest.param("babyai", marks=pytest.mark.long)])
async def test_mistakes_depend_on_the_seed_only(env: str, tmp_path: Path) -> None:
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        await play_warm_start(config_of(env, 0.3, seed=seed), tmp_path / name)
    assert recorded_episodes(tmp_path / "first") == recorded_episodes(tmp_path / "again")
    assert any(info.get("mistake") for row in recorded_episodes(tmp_path / "first") for info in row["infos"])
    assert recorded_episodes(tmp_path / "first") != recorded_episodes(tmp_path / "other")


async def test_a_share_of_zero_gives_the_episodes_of_the_plain_oracle(tmp_path: Path) -> None:
    config = config_of("textcraft", 0.0)
    trajectories = await play_warm_start(config, tmp_path)
    pool = EnvironmentsPool(config.environments, config.agent)
    slots = make_stages(config.agent, config.environments)
    collect = make_collector(config.agent, pool, lambda session, seed: OraclePolicy(session), 1, "warmstart-", slots)
    groups = await collect([t.task for t in trajectories], LIMITS, derive_seed(0, "warmstart", "textcraft"))
    await pool.close()
    plain = [replace(g.trajectories[0], id="", seconds=0, horizon=0) for g in groups]
    assert [replace(t, id="", seconds=0, horizon=0).to_json() for t in trajectories] == [t.to_json() for t in plain]
    assert "mistake" not in (tmp_path / "trajectories" / "warmstart_000000.jsonl").read_text()
    renderer = Renderer(word_tokenizer([t.messages for t in trajectories]))
    assert all(
        renderer.demonstration(t.messages, t.imitated) == renderer.demonstration(t.messages) for t in trajectories
    )


async def test_the_loss_covers_every_reply_except_the_mistakes(tmp_path: Path) -> None:
    config = config_of("textcraft", 0.3, episodes=30)
    async with context_with_items(config, tmp_path, EnvironmentsPool(config.environments, config.agent)) as context:
        start = await prepare(context)
    episodes = [Trajectory.from_json(json.dumps(row)) for row in recorded_episodes(tmp_path)]
    episodes = [t for t in episodes if t.success and any(t.imitated)]
    renderer = Renderer(start.tokenizer)
    assert sum(mistake for t in episodes for _, mistake in replies(t)) > 10
    for trajectory, sample in zip(episodes, start.samples, strict=True):
        right = [token for text, mistake in replies(trajectory) if not mistake for token in renderer.reply_ids(text)]
        wrong = [token for text, mistake in replies(trajectory) if mistake for token in renderer.reply_ids(text)]
        assert [t for t, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on] == right
        assert [t for start, length in sample.left_out for t in sample.token_ids[start : start + length]] == wrong
        assert to_sample(trajectory, renderer) == replace(sample, trajectory_id=trajectory.id), (
            "the [data] section gives the same sample"
        )


def test_loss_on_everything_skips_mistakes() -> None:
    sample = Sample([1, 2, 3, 4, 5, 6, 7], [False, False, True, False, False, False, True], left_out=[(4, 2)])
    trainer = SFT(tiny_model(), [sample], SFTSettings(loss_on="everything"), 0)
    assert trainer.step()["tokens/trained"] == 4  # without the first token and the two of the mistake
    assert SFT(tiny_model(), [sample], SFTSettings(), 0).step()["tokens/trained"] == 2


def test_a_saved_round_keeps_the_tokens_left_out_of_the_loss(tmp_path: Path) -> None:
    samples = [
        Sample([1, 2, 3, 4], [False, False, False, True], trajectory_id="a", left_out=[(1, 2)]),
        Sample([1, 2], [False, True], trajectory_id="b"),
    ]
    write_round(tmp_path, Round(1, 1, samples={"expert": samples}))
    assert read_round(tmp_path, 1).samples == {"expert": samples}
    lines = (tmp_path / "rounds" / "round_001.jsonl").read_text().splitlines()
    assert ["left_out" in line for line in lines] == [False, True, False]


async def test_marks_of_mistakes_survive_saving_reading_and_converting(tmp_path: Path) -> None:
    config = config_of("babyai", 0.4)
    trajectories = await play_warm_start(config, tmp_path / "run")
    path = tmp_path / "run" / "trajectories" / "warmstart_000000.jsonl"
    raw = config.model_dump(exclude={"rl", "horizon", "rewards", "judge"})
    raw |= {"data": {"files": [str(path)]}, "method": "sft"}
    with context_of(Config.model_validate(raw), tmp_path / "other") as context:
        loaded = load_trajectories(context)
    assert [t.imitated for t in loaded if t.success] == [t.imitated for t in trajectories]
    assert any(mistake for t in loaded for _, mistake in replies(t))
    convert([str(path)], tmp_path / "out.json", keep_all=False)
    assert [c.trained for c in read_conversations(tmp_path / "out.json") if any(c.trained)] == [
        t.imitated for t in trajectories
    ]


class CorridorWithoutActions(Corridor):
    """A corridor without a list of actions, whose oracle always answers "go"."""

    async def actions(self) -> list[str]:
        raise NotSupported("corridor has no actions()")


async def test_an_environment_without_actions_draws_mistakes_from_its_solution() -> None:
    solutions: Solutions = {0: {"go": None, "jump": None}}
    env = MistakeSession(CorridorWithoutActions(), 0.8, 3, solutions)
    trajectory = await rollout(Task("corridor", 0), env, OraclePolicy(env), LIMITS, id="t")
    assert trajectory.success
    assert {text for text, mistake in replies(trajectory) if mistake} == {"jump"}
    assert {text for text, mistake in replies(trajectory) if not mistake} == {"go"}


async def test_an_oracle_without_alternatives_makes_no_mistake() -> None:
    env = MistakeSession(CorridorWithoutActions(), 0.99, 3, {})
    trajectory = await rollout(Task("corridor", 0), env, OraclePolicy(env), LIMITS, id="t")
    assert trajectory.success
    assert replies(trajectory) == [("go", False)] * 3


@pytest.mark.parametrize("style", ["react", "plan"])
async def test_a_mistake_is_a_complete_reply_in_every_style(style: str, tmp_path: Path) -> None:
    """Check that a mistake has the oracle's thought and another action."""
    trajectories = await play_warm_start(config_of("textcraft", 0.3, style=style, episodes=20), tmp_path)
    env, parse = catalog.load("textcraft")(), action_format(STYLES[style].action_format).parse
    wrong = 0
    for trajectory in trajectories:
        env.reset(trajectory.task.item)
        for text, mistake in replies(trajectory):
            assert text.startswith("Thought: Have ")
            assert (parse(text) == env.oracle()) is not mistake
            env.step(parse(text))
            wrong += mistake
    assert wrong > 10


async def test_attempts_differ_in_their_mistakes() -> None:
    env = MistakeSession(CorridorWithoutActions(), 0.5, 3, {0: {str(i): None for i in range(50)}})
    drawn = []
    for _ in range(2):
        await env.reset(0)
        drawn.append([await env.oracle() for _ in range(20)])
    assert drawn[0] != drawn[1]


def invalid_configs() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"warm_start": {"policy": "random", "mistakes": 0.2}}, "mistakes = 0.2: random play has no solution"
    for share in (-0.1, 1.0, float("nan")):
        yield {"warm_start": {"mistakes": share}}, r"warm_start\.mistakes\n  Input should be"
        yield {"method": "sft", "data": {"play": "oracle", "mistakes": share}}, r"mistakes must lie in \[0, 1\)"
    yield {"method": "sft", "data": {"play": "random", "mistakes": 0.2}}, "needs the oracle, got play = 'random'"
    yield (
        {"method": "sft", "data": {"files": ["x.jsonl"], "mistakes": 0.2}},
        "needs the oracle, got play = None",
    )


@pytest.mark.parametrize(("changes", "reason"), list(invalid_configs()))
def test_invalid_settings_of_mistakes_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Config.model_validate({"model": {"path": "x"}, "environments": [{"name": "keydoor"}], **changes})


def test_an_environment_without_an_oracle_is_refused_by_dagger() -> None:
    environment = EnvironmentConfig(name="gymnasium:FrozenLake-v1")
    with pytest.raises(ConfigError, match="method = 'dagger' needs an oracle, and gymnasium:FrozenLake-v1 has none"):
        require_recovery((environment,), "method = 'dagger'")


async def test_mistakes_are_refused_for_an_oracle_that_cannot_recover(tmp_path: Path) -> None:
    config = config_of("textcraft", 0.2)
    env = config.environments[0].model_copy(update={"name": "sciworld"})
    config = config.model_copy(update={"environments": (env,)})
    with pytest.raises(ConfigError, match="the oracle of sciworld knows one solution only"):
        await train(config, tmp_path / "run", console=quiet(), pool=LocalPool({}))
    assert not (tmp_path / "run").exists()


async def test_demonstrations_without_a_success_are_an_error(tmp_path: Path) -> None:
    config = config_of("textcraft", 0.9)
    async with context_with_items(config, tmp_path, EnvironmentsPool(config.environments, config.agent)) as context:
        with pytest.raises(
            EnvError, match=r"^warm start: of 8 .* none in 1 turns: allow more turns, or fewer mistakes$"
        ):
            await play_demonstrations(context, "warmstart", "oracle", episodes=8, max_turns=1, mistakes=0.9)


# --- wrong thoughts ---------------------------------------------------------------------------------------------------


def thinking(share: float, **changes: Any) -> Config:
    raw = config_of("textcraft", 0.0, episodes=10, style="react").model_dump(exclude_none=True)
    raw["warm_start"] |= {"wrong_thoughts": share} | changes
    return Config.model_validate(raw)


async def start_of(config: Config, root: Path) -> tuple[Any, list[Trajectory]]:
    async with context_with_items(config, root, EnvironmentsPool(config.environments, config.agent)) as context:
        start = await prepare(context)
    episodes = [Trajectory.from_json(json.dumps(row)) for row in recorded_episodes(root)]
    return start, [t for t in episodes if t.success and any(t.imitated)]


async def test_the_loss_skips_a_wrong_thought_and_keeps_its_correction(tmp_path: Path) -> None:
    start, episodes = await start_of(thinking(0.4), tmp_path)
    renderer = Renderer(start.tokenizer)
    count = turns = 0
    for trajectory, sample in zip(episodes, start.samples, strict=True):
        trained = renderer.decode([t for t, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on])
        skipped = [renderer.decode(sample.token_ids[s : s + length]) for s, length in sample.left_out]
        wrong = [info["wrong_thought"] for info in trajectory.infos if "wrong_thought" in info]
        texts = [text for text, _ in replies(trajectory)]
        expected = [
            text[text.index(CORRECTION) :] if "wrong_thought" in info else text
            for text, info in zip(texts, trajectory.infos, strict=True)
        ]
        assert "".join(trained.split()) == "".join("".join(expected).split())
        assert ["".join(s.split()) for s in skipped] == ["".join(f"Thought: {w}".split()) for w in wrong]
        assert all(f"{w} {CORRECTION} " in "".join(texts) for w in wrong)
        count, turns = count + len(wrong), turns + len(texts)
    assert 0.1 < count / turns < 0.5
    path = tmp_path / "trajectories" / "warmstart_000000.jsonl"
    convert([str(path)], tmp_path / "out.json", keep_all=True)  # whole replies only can be left out there
    rows = read_conversations(tmp_path / "out.json")
    imitated = [m.content for row in rows for m, on in zip(row.messages, row.trained, strict=True) if on]
    assert imitated
    assert not any(CORRECTION in text for text in imitated)


async def test_actions_and_mistakes_do_not_depend_on_wrong_thoughts(tmp_path: Path) -> None:
    parse = action_format("react").parse
    acted = []
    for share in (0.0, 0.4):
        _, episodes = await start_of(thinking(share, mistakes=0.2), tmp_path / f"{share}")
        acted.append([[(parse(text), mistake) for text, mistake in replies(t)] for t in episodes])
    assert acted[0] == acted[1]


async def test_wrong_thoughts_need_thoughts(tmp_path: Path) -> None:
    raw = thinking(0.4).model_dump(exclude_none=True)
    with pytest.raises(ConfigError, match=r"needs replies with thoughts, agent\.style = 'act' has none"):
        await train(Config.model_validate(raw | {"agent": {"style": "act"}}), tmp_path / "act", console=quiet())
    keydoor = Config.model_validate(raw | {"environments": [{"name": "keydoor"}]})
    with pytest.raises(ConfigError, match="needs an oracle that gives different thoughts"):
        await train(keydoor, tmp_path / "keydoor", console=quiet())
    with pytest.raises(ValueError, match=r"wrong_thoughts = 0\.4: random play has no solution"):
        thinking(0.4, policy="random")
