"""Who may import whom, and how long a file may be. Reads the source; imports nothing of it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "agentgym_rl"
SOURCE = Path(__file__).parents[2] / "src" / PACKAGE
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80

LEAVES = frozenset({"types", "errors", "intervals"})
"""Everyone may import these; they import only the standard library."""
ALL = None
"""The places where modules meet."""
MAY_IMPORT: dict[str, frozenset[str] | None] = {
    **dict.fromkeys(LEAVES, frozenset()),
    "__init__": LEAVES,
    "config_errors": LEAVES,
    "config": LEAVES | {"training.settings", "config_errors"},
    "disk": LEAVES,
    "runlog": LEAVES | {"disk", "trackers"},
    "screen": LEAVES,
    "trackers": LEAVES,
    "recipe_files": LEAVES,
    "console": LEAVES | {"screen"},
    "plots": LEAVES,
    "telling": LEAVES,
    "http_guard": LEAVES,
    "cuda_graphs": LEAVES,
    "environment": LEAVES | {"http_guard"},
    "agent": LEAVES | {"cuda_graphs"},
    "training": LEAVES | {"cuda_graphs"},
    "evaluation": LEAVES | {"agent", "screen"},
    "scale": LEAVES | {"agent", "training"},
    "viewer": LEAVES | {"http_guard"},
    "wiring": ALL,
    "workers": ALL,
    "cluster": ALL,
    "serving": ALL,
    "fits": ALL,
    "preflight": ALL,
    "starting": ALL,
    "heldout": ALL,
    "mistakes": LEAVES | {"agent.policy", "environment.wire"},
    "demonstrations": ALL,
    "exploration": ALL,
    "rounds": ALL,
    "endings": ALL,
    "offline": ALL,
    "train": ALL,
    "play": ALL,
    "view": ALL,
    "agents": ALL,
    "evaluate": ALL,
    "exporting": ALL,
    "cli": ALL,
    "__main__": ALL,
}
"""A module is a file or folder directly under the package; inside a folder files import each other freely."""
STANDARD_LIBRARY_ONLY = frozenset(
    {*(f"{leaf}.py" for leaf in LEAVES), "training/settings.py", "scale/memory.py", "scale/plan.py"}
)
"""Settings among them, so that a config can be checked without loading torch."""
HOMES_OF = {
    "torch": (
        *("training", "agent", "evaluation", "scale", "wiring", "cluster", "serving", "fits", "train", "cli"),
        *("exporting", "cuda_graphs"),
    ),
    "ray": ("scale/ray_app.py",),
}
"""Third-party packages that may be imported only in these modules or files, at any depth of the code."""


def violations(source: Path) -> list[str]:
    """One line per forbidden import: `agent/rollout.py:3 imports environment: agent may import errors, types`."""
    found = []
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        module = relative.parts[0].removesuffix(".py")
        if module not in MAY_IMPORT:
            found.append(f"{relative} is in no row of the import table: give `{module}` one")
            continue
        for line, name in imported_names(ast.parse(path.read_text(encoding="utf-8")), relative):
            reason = forbidden(module, relative, name)
            if reason:
                found.append(f"{relative}:{line} imports {name}: {reason}")
    return found


def forbidden(module: str, relative: Path, name: str) -> str | None:
    """Why `module` may not import `name`, or None."""
    top, _, rest = name.partition(".")
    if top == PACKAGE:
        allowed = MAY_IMPORT[module]
        # The package itself holds the version and nothing else worth importing.
        if allowed is ALL or rest == "__version__" or rest.partition(".")[0] == module:
            return None
        if any(rest == name or rest.startswith(f"{name}.") for name in allowed):
            return None
        return f"{module} may import {', '.join(sorted(allowed)) or 'none of our modules'}"
    if relative.as_posix() in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names:
        return f"{relative.as_posix()} may import only the standard library"
    if top in HOMES_OF and not {module, relative.as_posix()} & set(HOMES_OF[top]):
        return f"{top} lives in {', '.join(HOMES_OF[top])}"
    return None


def imported_names(tree: ast.AST, relative: Path) -> Iterator[tuple[int, str]]:
    """Every import at any depth, TYPE_CHECKING blocks included, as an absolute dotted name."""
    package = [PACKAGE, *relative.parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            origin = base if node.level else node.module or ""
            if origin == PACKAGE:  # `from agentgym_rl import agent` names the module on the right.
                yield from ((node.lineno, f"{PACKAGE}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, origin


def too_long(source: Path) -> list[str]:
    found = []
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        relative = path.relative_to(source)
        if (count := len(text.splitlines())) > MAX_FILE_LINES:
            found.append(f"{relative} has {count} lines: at most {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > MAX_FUNCTION_LINES:
                    found.append(
                        f"{relative}:{node.lineno} {node.name} has {count} lines: at most {MAX_FUNCTION_LINES}"
                    )
    return found


def test_modules_import_only_what_they_may() -> None:
    assert len(list(SOURCE.rglob("*.py"))) > 10
    assert violations(SOURCE) == []


def test_files_and_functions_are_short() -> None:
    assert too_long(SOURCE) == []


@pytest.mark.parametrize(
    ("path", "code", "complaint"),
    [
        ("agent/rollout.py", "from agentgym_rl.environment.base import TextEnv", "agentgym_rl.environment.base"),
        ("agent/rollout.py", "import agentgym_rl.training", "agentgym_rl.training"),
        ("agent/rollout.py", "from agentgym_rl import environment", "agentgym_rl.environment"),
        ("agent/engines/native.py", "from ...training import learner", "agentgym_rl.training"),
        ("environment/server.py", "from ..agent.rollout import rollout", "agentgym_rl.agent.rollout"),
        ("training/rl.py", "def f():\n    from agentgym_rl.agent import collect", "agentgym_rl.agent"),
        ("training/rl.py", "if TYPE_CHECKING:\n    from agentgym_rl.runlog import RunLog", "agentgym_rl.runlog"),
        ("runlog.py", "from .console import Console", "agentgym_rl.console"),
        ("types.py", "import numpy", "only the standard library"),
        ("types.py", "from agentgym_rl.errors import EnvError", "none of our modules"),
        ("training/settings.py", "import pydantic", "only the standard library"),
        ("config.py", "from agentgym_rl.training.learner import RLLearner", "agentgym_rl.training.learner"),
        ("config.py", "from agentgym_rl import training", "agentgym_rl.training"),
        ("environment/server.py", "from agentgym_rl import wiring", "agentgym_rl.wiring"),
        ("viewer/server.py", "import torch.nn", "torch lives in"),
        ("scale/weights.py", "import ray", "ray lives in scale/ray_app.py"),
        ("utils.py", "", "no row of the import table"),
    ],
)
def test_the_checker_finds_a_forbidden_import(tmp_path: Path, path: str, code: str, complaint: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'"""Doc."""\n{code}\n')
    (found,) = violations(tmp_path)
    assert found.startswith(path)
    assert complaint in found


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("agent/rollout.py", "from agentgym_rl.types import Task\nfrom .policy import Policy\nimport torch"),
        ("agent/engines/native.py", "from ..renderer import Renderer\nfrom ...types import Task"),
        ("evaluation/evaluate.py", "from agentgym_rl.agent.rollout import rollout"),
        ("scale/ray_app.py", "import ray\nfrom agentgym_rl.training import rl"),
        ("environment/server.py", "from agentgym_rl import __version__\nimport fastapi"),
        ("config.py", "from agentgym_rl.training.settings import RLSettings"),
        ("cli.py", "from agentgym_rl import agent, environment, training, viewer"),
    ],
)
def test_the_checker_accepts_what_the_table_allows(tmp_path: Path, path: str, code: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    assert violations(tmp_path) == []


def test_the_checker_finds_what_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("x = 1\n" * 601)
    (tmp_path / "fine.py").write_text("x = 1\n" * 600)
    (tmp_path / "function.py").write_text(
        "class A:\n    async def long(self):\n"
        + "        x = 1\n" * 80
        + "    def fine(self):\n"
        + "        x = 1\n" * 79
    )
    assert too_long(tmp_path) == [
        "function.py:2 long has 81 lines: at most 80",
        "long.py has 601 lines: at most 600",
    ]
