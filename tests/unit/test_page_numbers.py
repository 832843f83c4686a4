"""The numbers of the evidence pages agree with the records, by code that shares nothing with the project."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import check  # noqa: E402
import check_a  # noqa: E402
import check_c  # noqa: E402
import check_d  # noqa: E402
import check_turns  # noqa: E402
import oracle  # noqa: E402
import page_numbers  # noqa: E402
import pages as generated_pages  # noqa: E402
import qwen_page  # noqa: E402

EVIDENCE, DETAILS = "docs/results/evidence.md", "docs/results/evidence-details.md"


@pytest.fixture(scope="module")
def checked() -> page_numbers.Pages:
    pages = page_numbers.Pages(page_numbers.read_pages())
    for part in check.CHECKS:
        part(pages)
    return pages


def write_seeds(folder: Path, count: int) -> Path:
    """Write records of a study with `count` staged seeds, made from the stored ones, and return the folder."""
    study = folder / "qwen-textcraft"
    study.mkdir(parents=True)
    for name in ("eval-qwen-base-textcraft", "eval-random-textcraft-27"):
        shutil.copy(ROOT / "results/qwen-textcraft" / f"{name}.json", study)
    for source in sorted((ROOT / "results/qwen-textcraft").glob("*staged-textcraft-1.json")):
        record = json.loads(source.read_text())
        for seed in range(count):
            prefix = "eval-" if "outcomes" in record else ""
            changed = json.loads(json.dumps(record)) | {"seed": seed}
            if "outcomes" in record:
                (outcomes,) = changed["outcomes"].values()
                for item in list(outcomes)[: 4 * seed]:
                    outcomes[item] = "0000"
            else:
                changed |= {"steps": 150, "seconds": record["seconds"] + 60 * seed}
                changed["config"]["rl"]["steps"] = 150
            (study / f"{prefix}qwen-staged-textcraft-{seed}.json").write_text(json.dumps(changed))
    return folder


def test_the_check_uses_the_standard_library_only() -> None:
    own = {"check", "check_a", "check_b", "check_c", "check_collapse", "check_d", "check_transfer", "check_turns"}
    own |= {"check_horizons", "page_numbers"}
    for name in own:
        tree = ast.parse((ROOT / f"results/{name}.py").read_text())
        imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {module.partition(".")[0] for module in imported} <= sys.stdlib_module_names | own


def test_every_checked_number_agrees_with_the_records(checked: page_numbers.Pages) -> None:
    assert checked.failures == []
    assert checked.checks > 100
    assert len(checked.covered) > 700


def test_every_number_of_the_pages_is_checked_or_a_named_setting(checked: page_numbers.Pages) -> None:
    assert checked.uncovered() == []


def test_a_changed_number_or_sentence_is_found() -> None:
    texts = page_numbers.read_pages()
    texts[DETAILS] = texts[DETAILS].replace("| nothing | 42.3% |", "| nothing | 42.4% |").replace("**+9.4**", "9.4")
    changed = page_numbers.Pages(texts)
    check_c.ablations(changed)
    assert any("has 42.4" in failure for failure in changed.failures)
    assert any(failure.startswith("not on the pages: | anchor states") for failure in changed.failures)


@pytest.mark.parametrize(
    ("page", "right", "wrong"),
    [
        (EVIDENCE, "| BabyAI: Qwen2.5-Coder-1.5B | 11.1% |", "| BabyAI: Qwen2.5-Coder-1.5B | 11.2% |"),
        (EVIDENCE, "| 8.7e-18 | 43% |", "| 8.7e-18 | 44% |"),
        (EVIDENCE, "base | 2.0% (1–4) | 20.6%", "base | 2.0% (1–4) | 20.7%"),
        (DETAILS, "would be about 17.5%", "would be about 17.6%"),
        (DETAILS, "| MuSiQue | 100 | 0 |", "| MuSiQue | 100 | 1 |"),
    ],
)
def test_a_changed_number_of_untrained_models_is_found(page: str, right: str, wrong: str) -> None:
    texts = page_numbers.read_pages()
    assert right in texts[page]
    pages = page_numbers.Pages(texts | {page: texts[page].replace(right, wrong)})
    check_d.real_sizes(pages)
    check_d.paper_table(pages)
    assert len(pages.failures) == 1


@pytest.mark.parametrize(
    ("page", "right", "wrong"),
    [
        (EVIDENCE, "1.5B after RL | 51.7% |", "1.5B after RL | 51.8% |"),
        (EVIDENCE, "random play gains 38.2 points", "random play gains 38.4 points"),
        (EVIDENCE, "these are 3% (45%)", "these are 3% (46%)"),
        (
            DETAILS,
            "1.5B after RL: 4 turns less 32 before RL | +22.8",
            "1.5B after RL: 4 turns less 32 before RL | +22.7",
        ),
        (DETAILS, "about 69.9% (Kaplan–Meier", "about 69.8% (Kaplan–Meier"),
        (DETAILS, "10, 20, 30 turns, seed 0)", "10, 20, 30 turns, seed 1)"),
    ],
)
def test_a_changed_number_of_trained_models_is_found(page: str, right: str, wrong: str) -> None:
    texts = page_numbers.read_pages()
    assert right in texts[page]
    pages = page_numbers.Pages(texts | {page: texts[page].replace(right, wrong)})
    check_turns.turns_after_rl(pages)
    assert len(pages.failures) == 1


def test_every_place_of_a_number_is_checked_and_a_new_number_is_uncovered() -> None:
    pages = page_numbers.Pages({"a": "it has 5 points. SmolLM2-135M of `x 3`", "b": "it has 6 points of 7"})
    pages.expect("it has # points", 5.0)
    assert pages.failures == ["'it has # points': b has 6, the records give 5"]
    assert pages.uncovered() == ["b:1: 7"]
    pages.accept("points of 7")
    pages.require("it has", False)
    assert pages.uncovered() == []
    assert pages.failures[1:] == ["the records do not support: it has"]


def test_numbers_agree_as_far_as_they_are_written() -> None:
    assert page_numbers.agrees("12.3", 12.349, 0.0)
    assert not page_numbers.agrees("12.3", 12.36, 0.0)
    assert page_numbers.agrees("6.1e-32", 6.06e-32, 0.0)
    assert not page_numbers.agrees("6.1e-32", 6.2e-32, 0.0)


def test_generated_parts_of_pages_are_those_of_the_records() -> None:
    for name, text in generated_pages.current().items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, f"{name}: run `python results/plot.py`"


@pytest.mark.parametrize("count", [1, 3])
def test_the_text_follows_the_number_of_seeds(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = write_seeds(tmp_path, count)
    texts = generated_pages.current(results)
    monkeypatch.setattr(page_numbers, "RESULTS", results)
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    shutil.copy(ROOT / page_numbers.PROTOCOL, tmp_path / page_numbers.PROTOCOL)
    pages = page_numbers.Pages(page_numbers.read_pages(tmp_path))
    check_a.real_model(pages)
    assert pages.failures == []
    assert ("on TextCraft (three seeds," in texts[EVIDENCE]) == (count == 3)
    assert max(map(len, texts["README.md"].splitlines())) <= 120
    assert len(texts["README.md"].splitlines()) == len((ROOT / "README.md").read_text().splitlines())
    assert qwen_page.draw(qwen_page.read(results), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_the_first_run_is_shown_until_there_are_three_seeds(tmp_path: Path) -> None:
    first = ROOT / "results/qwen-first"
    if not first.exists():
        pytest.skip("the first run is no longer stored")
    for count, shown in ((0, ["first run"]), (2, ["seeds", "first run"]), (3, ["seeds"])):
        results = write_seeds(tmp_path / str(count), count)
        (results / "qwen-first").symlink_to(first)
        rows = [line for line in qwen_page.table(qwen_page.read(results)) if "RL, staged" in line]
        assert [re.findall("first run|seeds", row)[0] for row in rows] == shown


def test_the_recorded_turns_of_the_oracle_are_those_that_it_needs() -> None:
    record = json.loads((ROOT / "results/oracle/crafting.json").read_text())
    played = {str(item): turns for item, turns in oracle.turns_of_oracle("textcraft", "depth2").items()}
    assert played == record["turns"]["depth2"]
