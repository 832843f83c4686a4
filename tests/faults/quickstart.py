"""The quickstart recipe on a two-node Ray cluster of this machine and in one process: `make quickstart-cluster`.

Two learners, two engines and two environment hosts. Ends with code 1 unless both learned and the 95% intervals of what
they reach overlap. `--alone FOLDER` reads a finished run of one process instead of training one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from cluster_for_tests import CLI, SCALE, leaked, two_nodes

from agentgym_rl.common.intervals import wilson_interval

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


def trained(folder: Path, *overrides: str) -> dict[str, Any]:
    started = time.monotonic()
    subprocess.run([*CLI, "train", str(RECIPE), f"run_dir={folder}", *overrides], check=True)
    print(f"{folder}: {time.monotonic() - started:.0f} s", flush=True)
    return json.loads((folder / "summary.json").read_text())


def interval(side: dict[str, Any]) -> tuple[float, float]:
    return wilson_interval(round(side["success"] * side["episodes"]), side["episodes"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", type=Path, help="a finished run of one process")
    parser.add_argument("overrides", nargs="*", help="of the recipe, such as rl.steps=50, for both")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="quickstart-"))
    with two_nodes() as cluster:
        clustered = trained(folder / "cluster", *SCALE, f"scale.address={cluster.address}", *options.overrides)
        left = leaked()
    if options.alone:
        alone = json.loads((options.alone / "summary.json").read_text())
    else:
        alone = trained(folder / "alone", *options.overrides)
    found = {"one process": alone, "cluster": clustered}
    for name, summary in found.items():
        before, after = summary["before"], summary["after"]
        low, high = interval(after)
        print(f"{name:12} {before['success']:.1%} -> {after['success']:.1%}  [{low:.1%}, {high:.1%}]")
    learned = all(interval(s["after"])[0] > interval(s["before"])[1] for s in found.values())
    (a_low, a_high), (b_low, b_high) = interval(alone["after"]), interval(clustered["after"])
    same = a_low <= b_high and b_low <= a_high
    print(f"both learned: {learned}; within noise of each other: {same}; processes left: {left}")
    return 0 if learned and same and not left else 1


if __name__ == "__main__":
    sys.exit(main())
