"""The viewer reads evaluations of this version, while they run and after they finished."""

from __future__ import annotations

from pathlib import Path

from runs_for_tests import quiet
from viewer_for_tests import library_of

from agentgym_rl.commands.evaluate import Request, evaluate, make_plans, make_results
from agentgym_rl.commands.load_agent import AgentOptions, find_agent
from agentgym_rl.evaluation.folder import Folder
from agentgym_rl.evaluation.plan import episodes_of
from agentgym_rl.types import StopReason, Trajectory


async def test_running_and_finished_evaluations_are_read(tmp_path: Path) -> None:
    root = tmp_path / "evals"
    request = Request(AgentOptions("random"), env="keydoor", limit=2, turns=(2, 4), samples=2, out=root / "finished")
    written = await evaluate(request, quiet())
    plans = make_plans(request, find_agent(request.agent))
    with Folder(root / "running", written["config"], written["settings"]) as folder:
        for episode in episodes_of(plans, 2, 8)[:3]:
            failed = Trajectory("x", episode.task, [], [], [], StopReason.ERROR, "the server said 500")
            folder.write(episode, failed, 0, None, 0)
        folder.save(make_results(request, plans, folder))
        library = library_of(root, tmp_path)
        rows = {row["id"]: row for row in library.overview()["runs"]}
        evaluations = {name: library.runs.evaluation(library.run_folder(name)) for name in rows}
    assert {name: (row["status"]["state"], row["problems"]) for name, row in rows.items()} == {
        "finished": ("finished", []),
        "running": ("running", []),
    }
    assert [result["max_turns"] for result in evaluations["finished"]["results"]] == [2, 4]
    whole, partly = (evaluations[name]["results"][-1]["total"] for name in ("finished", "running"))
    assert (whole["episodes"], whole["errors"], whole["causes"]) == (4, 0, [])
    assert (partly["episodes"], partly["errors"], partly["unplayed"]) == (0, 3, 1)
    assert partly["causes"] == [["the server said 500", 3]]
    assert rows["finished"]["success"] == written["results"][-1]["scenarios"]["keydoor"]["success"]["value"]
    library.close()
