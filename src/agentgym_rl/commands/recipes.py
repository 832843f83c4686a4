"""The packaged recipes by name: `quickstart`, `textcraft/grpo` and so on."""

from __future__ import annotations

import difflib
import re
import shutil
import textwrap
import tomllib
from pathlib import Path

from agentgym_rl.errors import ConfigError

_PACKAGED = Path(__file__).parents[1] / "recipes"
RECIPES = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[3] / "recipes"
"""Folder of the recipes: in an installed package its own, in an editable install that of the checkout."""


def packaged_recipes() -> dict[str, Path]:
    """Return every recipe by its name: the path below `recipes/` without `.toml`."""
    paths = sorted(RECIPES.rglob("*.toml"), key=lambda path: (path.parent != RECIPES, path))
    return {path.relative_to(RECIPES).with_suffix("").as_posix(): path for path in paths}


def find_recipe(given: Path) -> Path:
    """Return the file `given`, or the packaged recipe of that name."""
    if given.is_file():
        return given
    name, known = given.as_posix(), packaged_recipes()
    if name in known:
        return known[name]
    close = difflib.get_close_matches(re.sub(r"^(\./)?(recipes/)?|\.toml$", "", name), known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ConfigError(
        f"recipe {given}: no such file, and no packaged recipe of that name{hint}: `agentgym-rl recipes` lists them"
    )


def summary(recipe: Path) -> str:
    """Return the purpose of a recipe: its opening comment up to the first full stop, colon or semicolon."""
    comment = re.match(r"(#.*\n)+", recipe.read_text(encoding="utf-8"))
    text = " ".join(line.removeprefix("#").strip() for line in comment[0].splitlines()) if comment else ""
    return re.split(r"[.:;](?:\s|$)", text, maxsplit=1)[0]


def listing(columns: int | None) -> str:
    """Return a line per recipe, or for a terminal as many lines of at most `columns` as it needs."""
    known = packaged_recipes()
    width = max(map(len, known)) + 2
    lines = [f"{name:{width}}{summary(path)}" for name, path in known.items()]
    if columns is not None:
        columns = max(columns, width + 20)
        lines = [textwrap.fill(line, columns, subsequent_indent=" " * width) for line in lines]
    return "\n".join(lines)


def copy_recipe(name: str, folder: Path) -> list[Path]:
    """Copy a packaged recipe and its chat template, if it names one, into `folder`."""
    source = find_recipe(Path(name))
    text = source.read_text(encoding="utf-8")
    template = tomllib.loads(text).get("model", {}).get("chat_template", "")
    copies = {folder / source.name: source}
    if template and (source.parent / template).is_file():
        text = text.replace(f'"{template}"', f'"{Path(template).name}"')
        copies[folder / Path(template).name] = source.parent / template
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: --copy needs a folder")
    for path in copies:
        if path.exists():
            raise ConfigError(f"{path} exists already: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path, original in copies.items():
        shutil.copyfile(original, path)
    (folder / source.name).write_text(text, encoding="utf-8")
    return list(copies)
