"""The numbers of the evidence page agree with the records, by code that shares nothing with the project."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import check  # noqa: E402
import page_numbers  # noqa: E402


def test_the_check_uses_the_standard_library_only() -> None:
    for name in ("check", "page_numbers"):
        tree = ast.parse((ROOT / f"results/{name}.py").read_text())
        imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {module.partition(".")[0] for module in imported} <= sys.stdlib_module_names | {"page_numbers"}


def test_every_checked_number_of_the_page_agrees_with_the_records() -> None:
    page = page_numbers.Page(page_numbers.PAGE.read_text())
    for part in check.CHECKS:
        part(page)
    assert page.failures == []
    assert page.checks > 60
    assert len(page.covered) > 400


def test_a_changed_number_or_sentence_is_found() -> None:
    text = page_numbers.PAGE.read_text()
    changed = page_numbers.Page(text.replace("| nothing | 42.3% |", "| nothing | 42.4% |").replace("**+9.4**", "9.4"))
    check.ablations(changed)
    assert any("the page has 42.4" in failure for failure in changed.failures)
    assert any(failure.startswith("not on the page: | anchor states") for failure in changed.failures)


def test_numbers_agree_as_far_as_they_are_written() -> None:
    assert page_numbers.agrees("12.3", 12.349, 0.0)
    assert not page_numbers.agrees("12.3", 12.36, 0.0)
    assert page_numbers.agrees("6.1e-32", 6.06e-32, 0.0)
    assert not page_numbers.agrees("6.1e-32", 6.2e-32, 0.0)
