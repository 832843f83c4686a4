from __future__ import annotations

from pathlib import Path

import pytest
from scripts_for_tests import load_script


def test_packages_of_another_machine_are_chosen_by_its_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = load_script("scripts/pack_offline.py", monkeypatch).needed
    names = needed(["searchqa"], ["torch", "Typer"], "3.12", "x86_64")
    assert {"agentgym-rl", "pydantic-core", "tantivy", "transformers"} <= set(names)
    assert not {"torch", "typer", "minigrid", "ray"} & set(names)
    assert "shellingham" not in names, "only typer needs it"
    assert "ray" in needed(["all"], [], "3.12", "x86_64"), "an extra of extras"


def test_a_package_built_for_this_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tag in {"plain-1.0": "py3-none-any", "right-2.0": "cp312-cp312-manylinux_2_28_x86_64"}.items():
        write_tag(tmp_path, name, tag)
    built_here = load_script("scripts/pack_offline.py", monkeypatch).built_here
    assert built_here(tmp_path, "x86_64") == []
    write_tag(tmp_path, "wrong-3.0", "cp312-cp312-linux_aarch64")
    assert built_here(tmp_path, "x86_64") == ["wrong-3.0"]


def write_tag(folder: Path, name: str, tag: str) -> None:
    info = folder / f"{name}.dist-info"
    info.mkdir()
    (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {tag}\n")
