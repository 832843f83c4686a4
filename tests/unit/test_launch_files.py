"""The files of examples/cluster: a SLURM script, a KubeRay manifest and a cluster of `ray up`."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.config import load_config

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
RECIPE = ROOT / "recipes" / "keydoor" / "grpo.toml"


def scale_of(command: str) -> Any:
    """Return `[scale]` of a recipe with the settings of a `agentgym-rl train RECIPE` command line."""
    program, verb, _, *arguments = shlex.split(command)
    assert (program, verb) == ("agentgym-rl", "train")
    return load_config(RECIPE, [argument for argument in arguments if not argument.startswith("-")]).scale


def read_yaml(name: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((CLUSTER / name).read_text(encoding="utf-8"))


def test_the_slurm_script_is_valid_bash_and_waits_for_all_its_nodes() -> None:
    script = CLUSTER / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    (command,) = [line for line in script.read_text(encoding="utf-8").splitlines() if line.startswith("agentgym-rl")]
    scale = scale_of(command.replace('"$@"', "recipe.toml").replace('"$SLURM_NNODES"', "2").removesuffix(" &"))
    assert (scale.address, scale.nodes) == ("auto", 2)


STUBS = {
    "scontrol": "echo first; seq 100000",
    "srun": 'while [[ "$1" == --* ]]; do shift; done; echo "srun: $*" >> log; "$@"',
    "ray": 'if [ "$1" = start ]; then touch "started $3"; exec tail -f /dev/null --pid=$TEST_PID; fi',
    "agentgym-rl": "touch training; trap 'echo checkpoint; exit 7' TERM; while true; do sleep 0.1; done",
}
"""Programs that stand in for a SLURM cluster's."""


def test_the_slurm_script_names_the_first_of_many_nodes_and_ends_as_its_run_does(tmp_path: Path) -> None:
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"NNODES": "3", "JOB_NODELIST": "n[0-9]", "CPUS_PER_TASK": "4", "GPUS_ON_NODE": "8"}
    variables = {f"SLURM_{name}": value for name, value in slurm.items()} | {"HOME": str(tmp_path)}
    holder = subprocess.Popen(["tail", "-f", "/dev/null"])  # the stubs of `ray start` end with it
    variables |= {"TEST_PID": str(holder.pid), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(CLUSTER / "slurm.sh"), "recipe.toml"]
    job = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: job.poll() is not None or len([*tmp_path.glob("started *"), *tmp_path.glob("training")]) == 3)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 7
    finally:
        job.kill()
        holder.kill()
        holder.wait()
    assert job.stdout is not None
    assert job.stdout.read() == "checkpoint\n"
    workers = "ray start --address=first:6379 --num-cpus=4 --num-gpus=8 --block"
    assert f"srun: {workers}" in (tmp_path / "log").read_text().splitlines()


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_kuberay_manifest_has_the_required_fields_and_enough_gpus() -> None:
    manifest = read_yaml("kuberay.yaml")
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    assert manifest["metadata"]["name"]
    spec = manifest["spec"]["rayClusterSpec"]
    groups = [(1, spec["headGroupSpec"]), *((g["replicas"], g) for g in spec["workerGroupSpecs"])]
    gpus = 0
    for replicas, group in groups:
        assert isinstance(group["rayStartParams"], dict), "KubeRay requires it, if only as {}"
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["name"]
            assert container["image"]
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert container["resources"]["limits"] == container["resources"]["requests"]
            gpus += replicas * int(container["resources"]["limits"]["nvidia.com/gpu"])
    for group in spec["workerGroupSpecs"]:
        assert group["groupName"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    scale = scale_of(manifest["spec"]["entrypoint"])
    assert (scale.address, scale.nodes) == ("auto", sum(replicas for replicas, _ in groups))
    assert scale.learners + scale.engines == gpus


def test_the_ray_up_file_passes_the_validator_of_ray() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = util.prepare_config(read_yaml("ray_up.yaml"))
    util.validate_config(config)
    (node_type,) = config["available_node_types"].values()
    assert node_type["min_workers"] == 1, "it does not wait for a run to ask for the second machine"
