"""Recipes found by name, also in an installed package."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import zipfile
from pathlib import Path

import pytest

from agentgym_rl.agent.templates import resolve_template
from agentgym_rl.commands.recipes import RECIPES, copy_recipe, find_recipe, packaged_recipes, summary
from agentgym_rl.config import load_config
from agentgym_rl.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_every_recipe_has_a_name_and_a_description() -> None:
    known = packaged_recipes()
    assert next(iter(known)) == "quickstart"
    assert {"textcraft/grpo", "keydoor/tiny", "smollm2/babyai_scratch"} <= known.keys()
    assert len(known) == len(list((ROOT / "recipes").rglob("*.toml")))
    for name, path in known.items():
        assert 10 < len(summary(path)) <= 110, name
        assert "\n" not in summary(path)


def test_a_recipe_is_found_by_name_or_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe(Path("textcraft/grpo")) == RECIPES / "textcraft" / "grpo.toml"
    (tmp_path / "quickstart").write_text("")
    assert find_recipe(Path("quickstart")) == Path("quickstart"), "a file of the user's own comes first"
    with pytest.raises(ConfigError, match=r"no such file.*did you mean textcraft/grpo"):
        find_recipe(Path("recipes/textcraft/grpo.toml"))


@pytest.mark.parametrize("name", ["smollm2/babyai_scratch", "evidence/smollm2-babyai-rl"])
def test_a_recipe_finds_its_template_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = (RECIPES / "smollm2" / "examples.jinja").read_text()
    monkeypatch.chdir(tmp_path)
    assert resolve_template(load_config(find_recipe(Path(name)), []).model.chat_template) == written
    recipe, template = copy_recipe(name, tmp_path / "mine")
    assert template.read_text() == written
    assert load_config(recipe, []).model.chat_template == os.path.join("mine", "examples.jinja")
    with pytest.raises(ConfigError, match="exists already"):
        copy_recipe(name, tmp_path / "mine")


def test_a_template_on_the_command_line_is_relative_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = find_recipe(Path("smollm2/babyai_scratch"))
    config = load_config(recipe, ["model.chat_template=examples.jinja"])
    assert config.model.chat_template == "examples.jinja"


def test_a_wheel_contains_the_recipes(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="building a wheel needs pip install hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "__pycache__" in name]
        archive.extractall(site)

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "agentgym_rl", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    listed = command("recipes")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(packaged_recipes())
    assert command("recipes", "quickstart").stdout == (ROOT / "recipes" / "quickstart.toml").read_text()
    refused = command("train", "quickstart", "rl.stepz=1")
    assert "rl.stepz" in refused.stderr, "the recipe was found by its name"


def test_the_list_of_recipes_fits_a_terminal_of_80_columns() -> None:
    terminal, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 1000, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    arguments = [sys.executable, "-m", "agentgym_rl", "recipes"]
    with subprocess.Popen(arguments, stdout=screen, env=environment) as process:
        os.close(screen)
        output = b""
        try:
            while part := os.read(terminal, 1 << 16):
                output += part
        except OSError:  # Linux reports the end of a terminal's output as an error
            pass
        assert process.wait(240) == 0
    os.close(terminal)
    lines = output.decode().splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(output.decode().split()) == " ".join(
        word for name, path in packaged_recipes().items() for word in (name, *summary(path).split())
    )
