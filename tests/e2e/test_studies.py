"""Runner of docs/results/evidence.md: jobs wait for their needs, resume after a stop and leave a record."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import claims  # noqa: E402
import plot  # noqa: E402
import records  # noqa: E402
import studies  # noqa: E402
import study  # noqa: E402
import tables  # noqa: E402

from agentgym_rl.config import load_config  # noqa: E402

JOBS = [
    studies.Job(
        name="turns",
        arm="trained",
        task="keydoor",
        seed=5,
        kind="eval",
        arguments=("--agent", "{tiny}", "--env", "keydoor", "--turns", "1,6", "--limit", "4"),
    ),
    studies.Job(
        name="tiny", arm="staged", task="keydoor", seed=5, recipe="keydoor/tiny.toml", arguments=("threads=1",)
    ),
]


@pytest.mark.long
def test_a_stopped_study_resumes_and_leaves_small_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_studies() -> list[study.Study]:
        return [study.Study("test", JOBS, tmp_path / "work", tmp_path / "results", "cpu")]

    commits = (f"commit {number}" for number in count())
    monkeypatch.setattr(study, "current_commit", lambda: next(commits))
    assert study.run(make_studies(), jobs=2, limit_s=0.0) == 0
    assert "0 of 2 done, left: turns, tiny" in capsys.readouterr().out
    assert not (tmp_path / "work" / "turns").exists(), "it needs the model of the other job"
    assert study.run(make_studies(), jobs=2, limit_s=300.0) == 0
    assert "2 of 2 done" in capsys.readouterr().out
    trained, evaluated = (
        json.loads((tmp_path / f"results/test/{name}.json").read_text()) for name in ("tiny", "turns")
    )
    assert (trained["seed"], trained["arm"], trained["steps"]) == (5, "staged", 2)
    assert trained["curves"]["tokens/total"][-1] == trained["sampled_tokens"] > 0
    assert (trained["commit"], evaluated["commit"]) == ("commit 0", "commit 1"), "the commit at the job's start"
    assert {"hardware", "command", "config", "seconds", "evaluations", "findings", "behaviour"} <= trained.keys()
    assert evaluated["behaviour"]["episodes"] == 4
    assert {path.name for path in (tmp_path / "results/test").iterdir()} == {
        *("tiny.json", "turns.json", "turns.actions.jsonl.xz", "turns.episodes.jsonl.xz"),
    }
    assert trained["config"]["seed"] == 5
    assert [row["max_turns"] for row in evaluated["results"]] == [1, 6]
    assert evaluated["config"]["tasks"][0]["items"] == 4
    assert [len(items) for items in evaluated["outcomes"].values()] == [4, 4]
    success = [sum(map(int, items.values())) / 4 for items in evaluated["outcomes"].values()]
    assert success == [row["scenarios"]["keydoor"]["success"]["value"] for row in evaluated["results"]]
    assert str(tmp_path) not in json.dumps([trained, evaluated]), "a record holds no path of the machine"
    assert not list((tmp_path / "work").rglob("learned_*.jsonl"))
    other = study.Study("other", JOBS[1:], tmp_path / "work", tmp_path / "results", "cpu")
    assert study.run([*make_studies(), other], jobs=2, limit_s=300.0) == 0
    assert "started" not in capsys.readouterr().out
    assert json.loads((tmp_path / "results/other/tiny.json").read_text()) == trained | {"study": "other"}


def test_a_run_without_steps_gets_a_record(tmp_path: Path) -> None:
    test_study = study.Study("test", [JOBS[1]], tmp_path / "work", tmp_path, "cpu")
    test_study.folder("tiny").mkdir()
    (test_study.folder("tiny") / "summary.json").write_text('{"steps": 0}')
    (test_study.folder("tiny") / "config.toml").write_text("[model]")
    recorded = test_study.record(JOBS[1])
    assert (recorded["steps"], recorded["curves"], recorded["findings"]) == (0, {}, [])


def test_a_lost_starting_model_is_not_trained_again(tmp_path: Path) -> None:
    jobs = [JOBS[1], JOBS[0], replace(JOBS[0], name="later")]
    test_study = study.Study("test", jobs, tmp_path / "work", tmp_path, "cpu")
    (tmp_path / "test/turns.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"later needs the run tiny, .* and turns has started from it"):
        study.run([test_study], jobs=1, limit_s=0.0)
    (tmp_path / "work/tiny").mkdir()
    assert study.run([test_study], jobs=1, limit_s=0.0) == 0


def test_a_failed_job_is_reported_and_its_dependants_do_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [
        JOBS[0],
        studies.Job(name="tiny", arm="", task="", seed=0, recipe="keydoor/tiny.toml", arguments=("x.y=1",)),
    ]
    assert study.run([study.Study("test", broken, tmp_path / "work", tmp_path, "cpu")], jobs=1, limit_s=300.0) == 1
    assert "tiny: failed with 2" in capsys.readouterr().out
    assert "unknown key" in (tmp_path / "work" / "tiny.log").read_text()


@pytest.mark.long
def test_a_record_that_cannot_be_written_does_not_stop_the_other_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [JOBS[1], replace(JOBS[1], name="other"), replace(JOBS[0], name="lost", arguments=("--agent", "{tiny}"))]
    (tmp_path / "test/tiny.json/in the way").mkdir(parents=True)
    test_study = study.Study("test", jobs, tmp_path / "work", tmp_path, "cpu")
    assert study.run([test_study], jobs=1, limit_s=300.0) == 1
    printed = capsys.readouterr().out
    assert "tiny: no record, IsADirectoryError" in printed
    assert "other: done" in printed
    assert "left: tiny, lost" in printed
    recorded = json.loads((tmp_path / "test/other.json").read_text())
    assert recorded["behaviour"]["step"]["step"] == [2], "a block of up to five steps has the number of its last"
    assert recorded["behaviour"]["step"]["episodes"] == [8]
    assert recorded["behaviour"]["eval"]["step"] == [0, 2]


def test_several_pretrained_models_are_given_by_size(tmp_path: Path) -> None:
    models = study.pretrained_models(["a/1.5B", "0.5B=b/0.5B"])
    jobs = studies.qwen_interaction([0])
    test_study = study.Study("test", jobs, tmp_path / "work", tmp_path, "cpu", models)
    by_name = {job.name: job for job in jobs}
    assert "model.path=a/1.5B" in test_study.command(by_name["qwen-staged-textcraft-0"])
    assert "model.path=b/0.5B" in test_study.command(by_name["qwen-staged-textcraft-0.5B-0"])
    assert "b/0.5B" in test_study.command(by_name["turns-qwen-base-babyai-0.5B"])
    with pytest.raises(FileNotFoundError, match="give --model 135M=FOLDER"):
        test_study.command(by_name["turns-qwen-base-babyai-135M"])


arguments_of: dict[str, tuple[str, ...]] = {}


@pytest.mark.parametrize("name", sorted(studies.STUDIES))
def test_the_jobs_of_a_study_are_consistent(name: str) -> None:
    jobs = studies.STUDIES[name]([0, 1])
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    for job in jobs:
        assert set(job.needs) <= set(names)
        assert arguments_of.setdefault(job.name, job.arguments) == job.arguments, "one command per name"
        assert job.kind == "eval" or (ROOT / "recipes" / job.recipe).is_file()
        assert job.kind == "train" or "--turns" in job.arguments, "a record is read by its turn limits"
    assert len({job.seed for job in jobs}) == 2


def test_runs_of_other_settings_get_those_settings() -> None:
    jobs = {job.name: job for job in studies.horizon_settings([0])}
    recipe = ROOT / "recipes/evidence/babyai-rl.toml"
    settings = [
        load_config(recipe, [a for a in jobs[f"{arm}-{name}-far-rooms-1M-0"].arguments if "{" not in a]).rl
        for arm in ("staged", "fixed-long")
        for name in ("lr-x-3", "credit-by-turns")
    ]
    assert [rl.optimizer.lr for rl in settings] == [9e-4, 3e-4, 9e-4, 3e-4]
    assert [rl.credit for rl in settings] == ["outcome", "turns", "outcome", "turns"]


def test_evaluations_use_the_subsets_of_training() -> None:
    evaluated = dict.fromkeys(("babyai-base", "babyai-rl"), studies.MANY_ROOMS[1::2])
    for task, options in studies.HELD_OUT.items():
        subsets = tuple(value for option, value in pairwise(options) if option == "--subset")
        evaluated |= {f"smollm2-{task}-{kind}": subsets for kind in ("sft", "rl")}
    for recipe, subsets in evaluated.items():
        (environment,) = load_config(ROOT / f"recipes/evidence/{recipe}.toml", []).environments
        assert environment.subsets == subsets


def test_the_arms_of_claim_a_share_one_prompt_and_start_from_the_named_model(tmp_path: Path) -> None:
    jobs = {job.name: job for job in studies.rl_over_base(None)}
    for task in studies.HELD_OUT:
        sft, rl = (load_config(ROOT / f"recipes/evidence/smollm2-{task}-{kind}.toml", []) for kind in ("sft", "rl"))
        assert (sft.model, sft.agent.instruction) == (rl.model, rl.agent.instruction)
        assert {c.agent.temperature for c in (sft, rl)} == {c.eval.temperature for c in (sft, rl)} == {0.7}
        assert sft.model.chat_template is not None
        assert (ROOT / sft.model.chat_template).is_file()
        test_study = study.Study("rl-over-base", list(jobs.values()), tmp_path, tmp_path / "results", "cpu", "a/folder")
        (tmp_path / f"smollm2-sft-{task}-0/checkpoints/step_000007/model").mkdir(parents=True)
        assert "model.path=a/folder" in test_study.command(jobs[f"smollm2-rl-{task}-0"])
        start = f"model.path={tmp_path}/smollm2-sft-{task}-0/checkpoints/step_000007/model"
        assert start in test_study.command(jobs[f"smollm2-sft-rl-{task}-0"])
        plain = test_study.command(jobs[f"eval-smollm2-plain-{task}-0"])
        assert plain[plain.index("--agent") + 1] == "a/folder"
    chosen = study.with_needs(list(jobs.values()), ["eval-smollm2-sft-rl-babyai"])
    assert [job.arm for job in chosen] == ["SFT", "SFT + RL", "SFT + RL"], "needs are followed transitively"


def run_record(arm: str, seed: int, success: float, task: str = "babyai") -> dict[str, Any]:
    evaluations = [
        {"step": i, "sampled_tokens": 1000 * i, "success": success * i / 2, "episodes": 10} for i in range(3)
    ]
    curves = {"tokens/total": [500.0, 2000.0], "turns/mean": [3.0, 5.0]}
    curves |= {"groups/zero_variance": [0.75, 0.25], "entropy/mean": [0.4, 0.6]}
    stages = [{"turns": 4.0 * step, "first_step": step, "last_step": step} for step in (1, 2)]
    fields = {"arm": arm, "seed": seed, "task": task, "evaluations": evaluations, "curves": curves, "job": "j"}
    fields |= {"stages": stages, "config": {"rl": {"groups_per_step": 8}}}
    return {**fields, "steps": 2, "seconds": 1.0, "findings": [{"rule": "collapse"}] if seed == 1 else []}


def evaluation(arm: str, outcomes: dict[str, list[str]], task: str = "babyai", seed: int = 0) -> dict[str, Any]:
    """Return the record of an evaluation. `outcomes` has, by turns, a string of zeros and ones for each item."""
    rates = [sum(map(int, text)) / len(text) for text in list(outcomes.values())[-1]]
    success = {"value": sum(rates) / len(rates), "low": 0.1, "high": 0.9}
    cell = {"items": len(rates), "episodes": len(rates), "success": success, "turns": 3.0}
    by_turns = {turns: {f"{task}/{i}": text for i, text in enumerate(texts)} for turns, texts in outcomes.items()}
    fields = {"arm": arm, "task": task, "seed": seed, "job": "j", "outcomes": by_turns}
    cells = {"scenarios": {"X": cell}, "tasks": {f"{task}/kind": cell}}
    return {**fields, "results": [{"max_turns": int(t), **cells} for t in outcomes]}


def test_arms_are_compared_within_a_task_and_seed(tmp_path: Path) -> None:
    assert tables.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    runs = [run_record("staged", s, 0.5 + 0.01 * s) for s in range(6)] + [
        run_record("fixed-long", s, 0.4) for s in range(5)
    ]
    runs.append(run_record("fixed-long", 0, 0.1, "textcraft"))  # has no counterpart
    (row,) = tables.paired_table(runs, [("staged", "fixed-long")], records.final_success)[2:]
    assert row == "| staged | fixed-long | 5 | +12.0 (+10.0 to +14.0) points | 0.062 | 0.062 |"
    assert records.mean_success(runs[0]) == pytest.approx(0.25)
    text = "\n".join(plot.horizons(runs, tmp_path))
    assert "| babyai | staged | 6 | 52.5% (50.0%–55.0%) |" in text
    assert "| babyai | fixed-long | 5 | 1 |" in text, "one of five runs has a finding"
    assert (
        "| babyai | staged | 4 | 25% | 2 | 25% | 400 | 0.40 |\n| babyai | staged | 8 | 75% | 6 | 75% | 400 | 0.60 |"
        in text
    )
    assert (tmp_path / "evidence-horizons.png").stat().st_size > 10_000


def test_panels_of_one_measure_share_limits_and_have_y_labels() -> None:
    runs = [run_record("staged", 0, 0.5), run_record("staged", 0, 0.1, "textcraft")]
    figure = plot.horizons_figure(runs)
    axes = figure.axes
    assert figure.get_figwidth() * figure.dpi <= 1800
    assert len(axes) == 2 * len(plot.PANELS)
    assert all(panel.get_ylabel() for panel in axes)
    for first, second in zip(axes[: len(plot.PANELS)], axes[len(plot.PANELS) :], strict=True):
        assert first.get_ylim() == second.get_ylim()
    assert axes[0].get_title(loc="left") == "BabyAI: held-out success"
    assert axes[len(plot.PANELS)].get_title(loc="left") == "TextCraft: held-out success"


def test_far_rooms_compare_the_last_models_and_the_first_row_decides(tmp_path: Path) -> None:
    arms = {"staged": ["11", "10"], "fixed-long": ["10", "10"], "fixed-short": ["00", "10"]}
    runs = [run_record(arm, s, 0.5, "far rooms") for arm in arms for s in range(6)]
    agents = [evaluation(arm, {"16": outcomes}, "far rooms", s) for arm, outcomes in arms.items() for s in range(6)]
    text = "\n".join(plot.conditions(runs + agents, tmp_path))
    assert "| staged | fixed-long | 6 | +25.0 (+25.0 to +25.0) points | 0.031 | 0.031 |" in text
    assert "| staged | fixed-short | 6 | +50.0 (+50.0 to +50.0) points | 0.031 | 0.031 |" in text
    assert (tmp_path / "evidence-conditions.png").stat().st_size > 10_000
    other = [r | {"task": "far rooms, lr x 3", "seed": r["seed"] + 10} for r in runs + agents if r["arm"] != "staged"]
    extended = "\n".join(plot.conditions(runs + agents + other, tmp_path))
    assert "| staged | fixed-long | 6 | +25.0 (+25.0 to +25.0) points | 0.031 | 0.031 |" in extended
    assert "The last models, far rooms; the first row decides:" in extended
    pretrained = "\n".join(plot.pretrained_horizons(runs + agents, tmp_path))
    assert "| staged | fixed-long | +25.0 (+0.0 to +50.0) points | +25.0, +25.0" in pretrained


def test_a_drop_starts_at_the_best_and_means_after_every_arms_first_evaluation() -> None:
    early, late = run_record("staged", 0, 0.4), run_record("fixed-short", 0, 0.4)
    early["evaluations"] = [
        {"sampled_tokens": t, "success": s} for t, s in ((0, 0.0), (10, 0.4), (50, 0.1), (100, 0.3))
    ]
    late["evaluations"] = [{"sampled_tokens": t, "success": s} for t, s in ((0, 0.0), (50, 0.1), (100, 0.3))]
    assert records.largest_drop(early) == pytest.approx(0.3)
    mean_success = tables.mean_success_since_first_evaluations([early, late])
    assert mean_success(early) == mean_success(late) == pytest.approx(0.2)


def test_agents_are_compared_on_shared_items(tmp_path: Path) -> None:
    base, learned = ["0"] * 8 + ["1", "1"], ["1"] * 8 + ["1", "0"]
    agents = [evaluation("base", {"16": base}), evaluation("RL", {"16": learned})]
    agents += [
        evaluation("SFT", {"16": ["10", "00"]}, "textcraft"),
        evaluation("SFT + RL", {"16": ["11"]}, "textcraft"),
    ]
    text = "\n".join(plot.rl_over_base(agents, tmp_path))
    assert "| 10 | +70.0 (+30.0 to +100.0) points | 8, 1 (McNemar) | 0.039 | 0.078 |" in text
    assert "| SFT + RL | SFT | 0 | 1 | +50.0 (+50.0 to +50.0) points | 1, 0 (sign flips) | 1 | 1 |" in text
    assert "| babyai/kind | 20 |  | 90 |  |" in text
    assert (tmp_path / "evidence-base.png").stat().st_size > 10_000


def test_gains_of_turns_are_compared_with_those_of_parameters_and_tries(tmp_path: Path) -> None:
    small = {"4": ["1000", "0000"], "8": ["1100", "0000"], "16": ["1110", "1000"], "32": ["1111", "1100"]}
    large = {"4": ["1100", "0000"], "8": ["1110", "0000"], "16": ["1111", "1000"], "32": ["1111", "1100"]}
    agents = [evaluation("staged 1M", small), evaluation("staged 25M", large)]
    text = "\n".join(plot.interaction(agents, tmp_path))
    assert "| 0 | +62.5 | +12.5 | +50.0 |" in text
    assert "| staged 1M | 12.5% (12.5%–12.5%) | 25.0% (25.0%–25.0%) | 50.0% (50.0%–50.0%) |" in text, "pass@k"
    assert "cannot be compared yet" in "\n".join(plot.interaction(agents[:1], tmp_path))
    assert (tmp_path / "evidence-interaction.png").stat().st_size > 10_000


def test_the_picture_of_each_claim_is_drawn_from_its_studies(tmp_path: Path) -> None:
    arms = {"staged": 0.5, "fixed-long": 0.4, "fixed-short": 0.3}
    by_study: dict[str, list[dict[str, Any]]] = {name: [] for name in plot.STUDIES}
    by_study["staged-horizon"] = [run_record(arm, s, end) for arm, end in arms.items() for s in range(2)]
    agents = [evaluation(arm, {"16": ["10", "11"]}, "far rooms", s) for arm in arms for s in range(2)]
    agents[0]["outcomes"]["16"] = dict.fromkeys(agents[0]["outcomes"]["16"], "11")
    by_study["horizon-conditions"] = agents
    assert claims.staged_less_fixed_long(by_study["staged-horizon"], "babyai") == pytest.approx([0.1, 0.1])
    assert claims.staged_less_fixed_long(agents, "far rooms") == pytest.approx([0.25, 0.0])
    outcomes = {"4": ["1000", "0000"], "32": ["1111", "0000"]}
    by_study["interaction"] = [evaluation(arm, outcomes) for arm in ("random play", "base 1M", "staged 1M")]
    for name, draw in claims.PICTURES.items():
        assert draw(by_study, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000
        assert not draw({name: [] for name in plot.STUDIES}, tmp_path / name)


def test_missing_results_are_reported_and_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plot.py", "--results", str(tmp_path), "--out", str(tmp_path / "images")])
    plot.main()
    assert "evidence-staged.png: not drawn" in capsys.readouterr().out
    jobs = {"staged-horizon": studies.staged_horizon(None)[:2], "interaction": studies.interaction(None)[:1]}
    for name, recorded_jobs in jobs.items():
        (tmp_path / name).mkdir()
        for job in recorded_jobs:
            text = json.dumps(run_record(job.arm, job.seed, 0.5) | {"job": job.name})
            (tmp_path / name / f"{job.name}.json").write_text(text)
    plot.main()
    printed = capsys.readouterr().out
    assert "rl-over-base: no results yet" in printed
    assert "evidence-staged.png: drawn" in printed
    assert "evidence-turns.png: not drawn" in printed
    assert "Not complete: 2 of 60 jobs have a record." in printed
    assert "No agent has an evaluation so far." in (tmp_path / "tables.md").read_text()
    drawn = sorted(path.name for path in (tmp_path / "images").iterdir())
    assert drawn == ["evidence-horizons.png", "evidence-staged.png"]
    all_but_one = [{"job": job.name} for job in studies.rl_over_base(None) if job.name != "eval-smollm2-rl-babyai-0"]
    assert records.describe_missing("rl-over-base", all_but_one) == "no record of evaluations of babyai, RL (seeds 0)"
