"""Write the generated parts of pages from the records. `python results/plot.py` calls it.

A generated part of a page lies between `<!-- records: NAME -->` and `<!-- end -->`. In the README it is the line below
the picture of the 1.5B model and one sentence, because its lines are counted.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import collapse_page
import paper_page
import qwen_page
import real_horizons
import real_sizes
import transfer_page

RESULTS = Path(__file__).resolve().parent
ROOT = RESULTS.parent
PAGES = ("docs/results/evidence.md", "docs/results/evidence-details.md")
README = "README.md"
PART = re.compile(r"(<!-- records: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
README_CAPTION = re.compile(r"(\(docs/images/qwen-textcraft\.png\)\n)\*.*\*\n")
README_PARAGRAPH = re.compile(r"RL lifts Qwen2\.5-Coder-1\.5B from .*?(?=\n\[Evidence\])", re.DOTALL)
README_SENTENCE = re.compile(r"^RL lifts Qwen2\.5-Coder-1\.5B from .*?\)\.", re.DOTALL)


def filled(text: str, parts: dict[str, str]) -> str:
    """Return a page with its generated parts replaced. Blank lines keep Markdown apart from the markers."""
    return PART.sub(lambda match: f"{match[1]}\n{parts[match[2]]}\n\n{match[3]}", text)


def filled_readme(text: str, caption: str, sentence: str) -> str:
    """Return the README with its caption and sentence about the 1.5B model replaced."""
    text = README_CAPTION.sub(lambda match: f"{match[1]}{caption}\n", text)
    return README_PARAGRAPH.sub(lambda match: _rewrapped(README_SENTENCE.sub(sentence, match[0])), text)


def _rewrapped(paragraph: str) -> str:
    return textwrap.fill(" ".join(paragraph.split()), 120, break_long_words=False, break_on_hyphens=False)


def current(results: Path = RESULTS) -> dict[str, str]:
    """Return the text that each page should have, by its path from the project's folder."""
    model = qwen_page.read(results)
    parts = qwen_page.texts(model) | paper_page.texts(results) | real_sizes.texts(real_sizes.read(results))
    parts |= collapse_page.texts(results) | transfer_page.texts(results) | real_horizons.texts(results)
    pages = {name: filled((ROOT / name).read_text(encoding="utf-8"), parts) for name in PAGES}
    readme = (ROOT / README).read_text(encoding="utf-8")
    caption, sentence = qwen_page.readme_caption(model), qwen_page.readme_sentence(model)
    return pages | {README: filled_readme(readme, caption, sentence)}


def write() -> None:
    for name, text in current().items():
        (ROOT / name).write_text(text, encoding="utf-8")
