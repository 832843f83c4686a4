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
MAX_WHOLE_CONFIGS = 12
"""Functions that may take a whole recipe. Others take the sections they read."""

LEAVES = frozenset({"types", "errors", "common"})
"""Every module may import these, and they import none of our modules."""
ALL = None
"""Modules where the others meet."""
MAY_IMPORT: dict[str, frozenset[str] | None] = {
    **dict.fromkeys(("types", "errors"), frozenset()),
    "common": frozenset({"types", "errors"}),
    "config": LEAVES | {"training.settings", "training.offline_settings", "training.reward_settings"},
    "transport": LEAVES,
    "environment": LEAVES,
    "agent": LEAVES | {"transport"},
    "training": LEAVES,
    "evaluation": LEAVES | {"agent"},
    "rewards": LEAVES | {"agent", "training.reward_settings"},
    "scale": LEAVES | {"agent", "training", "transport"},
    "viewer": LEAVES,
    "run": ALL,
    "run.console": LEAVES,
    "run.disk": LEAVES,
    "run.events": LEAVES,
    "run.log": LEAVES | {"run.disk", "run.trackers"},
    "run.plots": LEAVES,
    "run.trackers": LEAVES,
    "commands": ALL,
    "__init__": ALL,
    "api": ALL,
    "cli": ALL,
    "__main__": ALL,
}
"""Imports allowed to a file or folder of the package; the longest name that matches counts. Files of one folder import
each other freely, unless they have a row of their own."""
STANDARD_LIBRARY_ONLY = (
    *("types.py", "errors.py", "common/intervals.py"),
    *("training/settings.py", "training/offline_settings.py", "training/reward_settings.py"),
    *("scale/memory.py", "scale/resource_plan.py"),
)
"""Settings among them, so that a config can be checked without loading torch."""
ONLY_IN = {
    "torch": ("training", "agent", "evaluation", "scale", "transport", "run", "commands", "common/cuda_graphs.py"),
    "ray": ("scale/ray_app.py",),
}
"""Third-party packages that may be imported only in these modules or files, at any depth of the code."""


def violations(source: Path) -> list[str]:
    """Return a line per forbidden import: `agent/rollout.py:3 imports environment: agent may import errors, types`."""
    found = []
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        row = row_of(relative)
        if row is None:
            found.append(f"{relative} is in no row of the import table: give `{relative.parts[0]}` one")
            continue
        for line, name in imported_names(ast.parse(path.read_text(encoding="utf-8")), relative):
            reason = forbidden(row, relative, name)
            if reason:
                found.append(f"{relative}:{line} imports {name}: {reason}")
    return found


def row_of(relative: Path) -> str | None:
    """Return the most specific row of MAY_IMPORT for a file, or None."""
    parts = relative.with_suffix("").parts
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in MAY_IMPORT), None)


def forbidden(row: str, relative: Path, name: str) -> str | None:
    """Return why a file of `row` may not import `name`, or None."""
    top, _, rest = name.partition(".")
    if top == PACKAGE:
        allowed = MAY_IMPORT[row]
        # The package itself holds the version and nothing else worth importing.
        if allowed is ALL or rest == "__version__" or rest.partition(".")[0] == row:
            return None
        if any(rest == name or rest.startswith(f"{name}.") for name in allowed):
            return None
        return f"{row} may import {', '.join(sorted(allowed)) or 'none of our modules'}"
    if relative.as_posix().startswith(STANDARD_LIBRARY_ONLY) and top not in sys.stdlib_module_names:
        return f"{relative.as_posix()} may import only the standard library"
    if top in ONLY_IN and not {relative.parts[0], relative.as_posix()} & set(ONLY_IN[top]):
        return f"{top} is imported only in {', '.join(ONLY_IN[top])}"
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
            # `from agentgym_rl import agent` and `from agentgym_rl.run import disk` name modules on the right.
            if origin in (PACKAGE, *(f"{PACKAGE}.{row.rpartition('.')[0]}" for row in MAY_IMPORT if "." in row)):
                yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
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
        ("training/rl.py", "if TYPE_CHECKING:\n    from agentgym_rl.run.log import RunLog", "agentgym_rl.run.log"),
        ("run/log.py", "from .console import Console", "agentgym_rl.run.console"),
        ("types.py", "import numpy", "only the standard library"),
        ("types.py", "from agentgym_rl.errors import EnvError", "none of our modules"),
        ("training/settings.py", "import pydantic", "only the standard library"),
        ("config/recipe.py", "from agentgym_rl.training.learner import RLLearner", "agentgym_rl.training.learner"),
        ("config/recipe.py", "from agentgym_rl import training", "agentgym_rl.training"),
        ("environment/server.py", "from agentgym_rl import run", "agentgym_rl.run"),
        ("viewer/server.py", "import torch.nn", "torch is imported only in"),
        ("transport/broadcast.py", "import ray", "ray is imported only in scale/ray_app.py"),
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
        ("evaluation/episodes.py", "from agentgym_rl.agent.rollout import rollout"),
        ("scale/ray_app.py", "import ray\nfrom agentgym_rl.training import rl"),
        ("environment/server.py", "from agentgym_rl import __version__\nimport fastapi"),
        ("config/recipe.py", "from agentgym_rl.training.settings import RLSettings"),
        ("cli.py", "from agentgym_rl import agent, environment, training, viewer"),
    ],
)
def test_the_checker_accepts_what_the_table_allows(tmp_path: Path, path: str, code: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    assert violations(tmp_path) == []


def test_few_functions_take_a_whole_recipe() -> None:
    found = [
        f"{path.relative_to(SOURCE)}: {node.name}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if argument.annotation is not None and ast.unparse(argument.annotation) in ("Config", "Config | None")
    ]
    assert 0 < len(found) <= MAX_WHOLE_CONFIGS, found


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
