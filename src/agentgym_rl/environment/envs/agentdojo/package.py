"""The parts of the package `agentdojo` that a task needs, imported without the clients of six model providers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from agentgym_rl.errors import ConfigError

VERSIONS = ("v1", "v1.1", "v1.1.1", "v1.1.2", "v1.2", "v1.2.1", "v1.2.2")
SUITES = ("workspace", "banking", "slack", "travel")
PIPELINE = "agentdojo.agent_pipeline"


@dataclass(frozen=True, eq=False)
class Package:
    """Names of the package."""

    suites: dict[str, Any]
    """Suites of one version of the benchmark, by name."""
    attacks: dict[str, Any]
    """The attack on each suite."""
    runtime: Any
    function_call: Any
    to_text: Any
    """Function from a tool's result to text."""
    text_block: Any
    read_suite_file: Any


@cache
def load_package(version: str) -> Package:
    """Import the package and return the suites of a version of the benchmark."""
    if version not in VERSIONS:
        raise ConfigError(f"environment agentdojo: known versions are {', '.join(VERSIONS)}, got {version!r}")
    shims = _shims()
    sys.modules.update(shims)
    try:
        suites = dict(import_module("agentdojo.task_suite.load_suites").get_suites(version))
        attack = _attack_class()
        runtime = import_module("agentdojo.functions_runtime")
        to_text = import_module(f"{PIPELINE}.tool_execution").tool_result_to_str
        text_block = import_module("agentdojo.types").text_content_block_from_string
        read_file = import_module("agentdojo.task_suite.task_suite").read_suite_file
    except ImportError as error:
        raise ConfigError(
            f"environment agentdojo: a package that agentdojo needs is missing ({error}): "
            "pip install 'agentgym-rl[agentdojo]'"
        ) from error
    finally:
        for name, shim in shims.items():
            if sys.modules.get(name) is shim:
                del sys.modules[name]
    attacks = {name: attack(suite) for name, suite in suites.items()}
    return Package(suites, attacks, runtime.FunctionsRuntime, runtime.FunctionCall, to_text, text_block, read_file)


def _shims() -> dict[str, ModuleType]:
    """Return stand-ins for the modules that import the clients of model providers.

    The package `agent_pipeline` keeps its folder, so that its other modules are found. A process that has imported it
    already needs no stand-in.
    """
    spec = find_spec("agentdojo")
    if PIPELINE in sys.modules or spec is None:
        return {}
    pipeline, llms = ModuleType(PIPELINE), ModuleType(f"{PIPELINE}.llms")
    pipeline.__path__ = [f"{folder}/agent_pipeline" for folder in spec.submodule_search_locations or ()]
    llms.__path__ = []
    google = ModuleType(f"{PIPELINE}.llms.google_llm")
    google.__dict__["EMPTY_FUNCTION_NAME"] = "<empty-function>"
    return {module.__name__: module for module in (pipeline, llms, google)}


def _attack_class() -> Any:
    """Return AgentDojo's attack `important_instructions`, which names the user and no model."""
    base = import_module("agentdojo.attacks.base_attacks").FixedJailbreakAttack
    text = import_module("agentdojo.attacks.important_instructions_attacks").ImportantInstructionsAttack._JB_STRING

    def make(suite: Any) -> Any:
        attack = base(text, suite, None)
        attack.user_name = "Emma Johnson"
        return attack

    return make
