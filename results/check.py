"""Recompute the numbers of the evidence pages and of the README's section from the JSON, by the standard library only.

    python results/check.py [--uncovered]

None of the project's code is used, so that an error in it shows. A check is a piece of a page with `#` for each number,
and the numbers as computed here; every place that reads so is checked. A number must agree as far as it is written;
bootstrap limits may differ by their own noise. Settings, names and published values are accepted by their text.
`--uncovered` lists the numbers that no check covers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from check_a import real_model, smollm2, training_of_smollm2
from check_b import deciding, far_rooms, smollm2_horizons, two_tasks, when_it_helps
from check_c import ablations, claim_c
from check_collapse import collapse, gradients
from check_d import paper_table, real_sizes
from check_horizons import horizons_of_0_5b
from check_transfer import transfer
from check_turns import turns_after_rl
from page_numbers import ROOT, Pages, read_pages

SETTINGS = (
    "| trained model | Qwen2.5-3B and 7B, instruction-tuned | Qwen2.5-Coder-1.5B-Instruct (0.5B",
    "| 350 planned; collapse from about 125 |",
    "| 5 → 8 → 10 to 10 → 20 → 30 |",
    "| KL term | 0.001 |",
    "| runs of an arm | 1 | A, 1.5B: 2 to 3 (SFT: 1); B: 6, mazes 12, SmolLM2 2 to 3; C: 3, real models 1 to 3 |",
    "SmolLM2-135M, evaluated under 16 turns (95% intervals",
    "Three pairs cannot go below 0.25, two not below 0.5.",
    "three seeds a size, 300 items, four samples each",
    "four samples of each of 300 items",
    "95% intervals over items",
    "on the 100 TextCraft items of agentgym-27, four samples an item, temperature 1",
    "| difference (95% interval) |",
)
"""Text of the pages whose numbers are settings, definitions or the paper's own."""


def settings(pages: Pages) -> None:
    pages.accept(*SETTINGS)


CHECKS: tuple[Callable[[Pages], None], ...] = (
    *(settings, real_model, smollm2, training_of_smollm2),
    *(two_tasks, deciding, far_rooms, smollm2_horizons, when_it_helps),
    *(claim_c, ablations, real_sizes, turns_after_rl, paper_table, transfer, collapse, gradients, horizons_of_0_5b),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="folder with the README and docs/")
    parser.add_argument("--uncovered", action="store_true", help="list the numbers that no check covers")
    options = parser.parse_args()
    pages = Pages(read_pages(options.root))
    for check in CHECKS:
        check(pages)
    rest = pages.uncovered()
    print("\n".join(pages.failures + (rest if options.uncovered else [])))
    counts = f"{pages.checks} checks, {len(pages.covered)} numbers, {len(pages.failures)} wrong"
    print(f"{counts}; {len(rest)} lines have others")
    sys.exit(1 if pages.failures else 0)


if __name__ == "__main__":
    main()
