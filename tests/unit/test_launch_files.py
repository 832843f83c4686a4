"""The files of examples/cluster: a SLURM script, a KubeRay manifest and a cluster of `ray up`."""

from __future__ import annotations

import shlex
import subprocess
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
