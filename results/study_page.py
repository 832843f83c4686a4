"""The command of a script that writes the page and the figure of one study from its records."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from records import Record, read_records


def write_page(
    study: str,
    description: str | None,
    page: Callable[[list[Record]], str],
    draw: Callable[[Sequence[Record], Path], None],
    *others: str,
) -> None:
    """Write the page and the figure, both named after the study, into the folder of the docs. They also show the
    records of `others`."""
    root = Path(__file__).parents[1]
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=root / "results")
    parser.add_argument("--docs", type=Path, default=root / "docs")
    options = parser.parse_args()
    records = [record for each in (study, *others) for record in read_records(options.results, each)]
    (options.docs / "results" / f"{study}.md").write_text(page(records))
    draw(records, options.docs / "images" / f"{study}.png")
