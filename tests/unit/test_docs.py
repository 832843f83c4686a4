"""The documentation: the site builds, its generated pages are complete, pages keep their limits."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agentgym_rl.config import Config
from agentgym_rl.training.settings import RLSettings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MAX_WIDTH = 120
MAX_WORDS_OF_A_GUIDE = 1200
MAX_LINES_OF_THE_README = 120


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed (extra docs)")
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'not in the "nav"' not in done.stderr
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*.html")} >= pages
    assert "token_budget" in (tmp_path / "reference" / "recipe.html").read_text(encoding="utf-8")
    assert "agentgym_rl.agent.rollout.rollout" in (tmp_path / "reference" / "api.html").read_text(encoding="utf-8")


def test_every_marker_of_a_generated_part_has_a_generator() -> None:
    hook = load_script("docs_pages")
    used = {name for path in DOCS.rglob("*.md") for name in hook.MARKER.findall(path.read_text(encoding="utf-8"))}
    assert used == set(hook.GENERATORS)
    for name in used:
        assert "<!--" not in hook.on_page_markdown(f"<!-- generated: {name} -->")


def test_every_success_of_asynchronous_groups_has_an_interval() -> None:
    script, interval = load_script("docs_pages"), r"(\d+\.\d) \((\d+\.\d)–(\d+\.\d)\)"
    for name in ("asynchronous", "asynchronous-textcraft", "asynchronous-smollm2", "qwen-asynchronous"):
        header, _, *rows = script.GENERATORS[name]().strip().splitlines()
        assert "(95% interval)" in header
        found = [re.search(interval, row) for row in rows]
        assert all(found)
        assert all(float(low) <= float(rate) < float(high) for rate, low, high in (m.groups() for m in found if m))


def test_a_page_of_a_clone_says_how_to_build_its_generated_parts() -> None:
    hook = load_script("docs_pages")
    for path in DOCS.rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        markers = list(hook.MARKER.finditer(text))
        assert [marker[1] for marker in markers if "run `make docs`" not in marker[0]] == [], path.name
        assert not markers or "run `make docs`" not in hook.on_page_markdown(text), path.name


def test_the_recipe_page_has_every_key_with_its_default() -> None:
    page = load_script("docs_pages").recipe()
    for name in Config.model_fields:
        assert f"| `{name}` |" in page
    rl = page[page.index("## `[rl]`") : page.index("## `[rl.optimizer]`")]
    assert [field.name for field in dataclasses.fields(RLSettings) if f"| `{field.name}` |" not in rl] == []
    assert f"| `group_size` | integer | `{RLSettings().group_size}` |" in rl
    anchors = {load_script("docs_pages").anchor(title) for title in re.findall(r"^## (.*)$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= anchors


def test_every_recipe_key_has_a_meaning() -> None:
    script = load_script("docs_pages")
    keys = [(owner, key) for _, owner, given in script.recipe_sections() for key in script.keys_of(owner, given)]
    plain = [(owner, key) for owner, key in keys if script.section_of(key.annotation) is None]
    assert [f"{owner.__name__}.{key.name}" for owner, key in plain if not key.text] == []


def test_the_command_page_has_every_command_and_option() -> None:
    page = load_script("docs_pages").commands()
    assert {"train", "eval", "view", "doctor", "serve", "play"} <= set(re.findall(r"^## (\w+)$", page, re.MULTILINE))
    assert "`--resume`" in page
    assert "`--samples`" in page


def test_guides_are_short_and_narrow() -> None:
    for path in [*(DOCS / "guides").glob("*.md"), *(DOCS / "get-started").glob("*.md"), DOCS / "index.md"]:
        text = path.read_text(encoding="utf-8")
        assert len(text.split()) <= MAX_WORDS_OF_A_GUIDE, path.name
        assert [line for line in text.splitlines() if len(line) > MAX_WIDTH] == [], path.name


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES_OF_THE_README
    assert [line for line in text.splitlines() if len(line) > MAX_WIDTH] == []
    targets = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_files_name_only_pages_that_exist() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    stale = []
    for name in listed:
        if name.startswith(("CHANGELOG", "results/transcripts")) or not name.endswith((".py", ".toml", ".md", ".js")):
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        stale += [f"{name}: {page}" for page in re.findall(r"\bdocs/[\w/-]+\.md", text) if not (ROOT / page).exists()]
    assert stale == []


def test_pictures_of_environments_are_those_that_the_script_draws(tmp_path: Path) -> None:
    script = load_script("pictures")
    script.environments(tmp_path, tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8").strip() for path in tmp_path.glob("*.svg")}
    assert sorted(drawn) == sorted(f"{name}.svg" for name in script.ENVIRONMENTS)
    for name, text in drawn.items():
        assert text == (DOCS / "images" / name).read_text(encoding="utf-8").strip(), name


def test_every_picture_of_a_page_exists_and_every_picture_is_shown() -> None:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    shown = {name for path in pages for name in re.findall(r"images/([\w.-]+)\)", path.read_text(encoding="utf-8"))}
    assert shown == {path.name for path in (DOCS / "images").iterdir()}
