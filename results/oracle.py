"""Play the oracle on the held-out items of the studies and write how many turns it needs.

    python results/oracle.py [--out results/oracle]

docs/results/evidence-details.md uses it to say how much of a task fits a short horizon.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from studies import FAR_ROOMS, MANY_ROOMS

from agentgym_rl.environment import catalog
from agentgym_rl.environment.base import HasOracle

TASKS: dict[str, tuple[str, Sequence[str]]] = {
    "many-rooms": ("babyai", [name for name in MANY_ROOMS if name != "--subset"]),
    "far-rooms": ("babyai", FAR_ROOMS),
    "crafting": ("textcraft", ("depth1", "depth2", "depth3")),
}
"""Environment and subsets by task."""
MAX_TURNS = 64


def turns_of_oracle(env_name: str, subset: str) -> dict[int, int | None]:
    """Return the oracle's turns on each held-out item of a subset; None if it does not succeed."""
    env_class = catalog.load(env_name)
    env = env_class()
    assert isinstance(env, HasOracle)
    turns: dict[int, int | None] = {}
    for item in catalog.items(env_class, "test", subset):
        env.reset(item)
        turns[item] = None
        for turn in range(1, MAX_TURNS + 1):
            step = env.step(env.oracle())
            if step.done:
                turns[item] = turn if step.info.get("success") else None
                break
    env.close()
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "oracle")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for task, (env_name, subsets) in TASKS.items():
        turns = {name: turns_of_oracle(env_name, name) for name in subsets}
        record = {"task": task, "env": env_name, "turns": turns}
        (options.out / f"{task}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
        print(task, {name: statistics.median(filter(None, by_item.values())) for name, by_item in turns.items()})


if __name__ == "__main__":
    main()
