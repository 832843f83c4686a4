"""What can be wrong with a run, found before torch is imported and before anything is written."""

from __future__ import annotations

from importlib.util import find_spec

from agentgym_rl import wiring
from agentgym_rl.agent.templates import resolve_template
from agentgym_rl.config import Config
from agentgym_rl.errors import ConfigError
from agentgym_rl.fits import require_memory
from agentgym_rl.trackers import require_trackers
from agentgym_rl.training.conversations import find_files, is_trajectory_file


def require_recipe(config: Config, *, environments: bool = True) -> None:
    """Raise ConfigError for names, files and packages that are not there. `environments` are left out if the caller has
    its own."""
    require_packages(config)
    if environments:
        wiring.require_environments(config.environments)
    wiring.require_recovery(config)
    require_files(config)
    resolve_template(config.model.chat_template)
    require_memory(config)
    wiring.require_model(config.model)


def require_packages(config: Config) -> None:
    require_trackers(config.trackers)
    scale, engine = config.scale, config.engine
    # With an address they are in the environments of the cluster's nodes.
    vllm_here = engine.kind == "vllm" and not engine.urls and (scale is None or scale.address is None)
    for package, extra, wanted, by in (
        ("peft", "lora", config.model.lora is not None, "model.lora"),
        ("ray", "scale", scale is not None, "[scale]"),
        ("vllm", "vllm", vllm_here, "engine.kind = 'vllm'"),
    ):
        if wanted and find_spec(package) is None:
            raise ConfigError(
                f"{by} needs the package {package}, which is not installed: pip install 'agentgym-rl[{extra}]'"
            )


def require_files(config: Config) -> None:
    """Raise ConfigError if a file of `[data]` is missing or of the wrong kind."""
    for path in find_files(config.data.files if config.data else ()):
        if not is_trajectory_file(path) and config.method == "dpo":
            raise ConfigError(f"data.files: {path} has no rewards to build pairs from, dpo needs trajectories (.jsonl)")
