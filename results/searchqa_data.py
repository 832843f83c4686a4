"""Prepare real questions for SearchQA: split them by a hash of the question, write the corpus and index it.

    python results/searchqa_data.py path/to/qa --out runs/searchqa
    export AGENTGYM_SEARCHQA_DATA=runs/searchqa/questions AGENTGYM_SEARCHQA_INDEX=runs/searchqa/index

The source folder holds `<dataset>.jsonl.gz` files with a question a line (`question`, `answers`, `gold`: ids of
supporting paragraphs) and `paragraphs.jsonl.gz` (`id`, `title`, `text`). Retrieval searches all paragraphs.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentgym_rl.environment.envs.searchqa.indexing import build_index
from agentgym_rl.environment.envs.searchqa.protocol import normalise

DATASETS = ("nq_open", "popqa", "hotpotqa", "2wikimultihopqa", "musique")
"""Datasets of the paper that the source may hold. SQuAD's questions depend on their passage and are left out."""
TEST_SHARE = 0.2


def split_of(question: str) -> str:
    """Return `test` for the fifth of all questions whose hash is lowest. Equal questions share a split."""
    digest = hashlib.sha256(normalise(question).encode()).digest()
    return "test" if int.from_bytes(digest[:8]) < TEST_SHARE * 2**64 else "train"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def prepare(source: Path, out: Path, datasets: Sequence[str] = DATASETS) -> dict[str, Counter[str]]:
    """Write questions, corpus and index under `out`. Return the number of questions by dataset and split."""
    out.mkdir(parents=True, exist_ok=True)
    titles: dict[str, str] = {}
    corpus = out / "corpus.jsonl"
    with corpus.open("w", encoding="utf-8") as file:
        for paragraph in read_lines(source / "paragraphs.jsonl.gz"):
            titles[paragraph["id"]] = paragraph["title"]
            file.write(json.dumps(paragraph, ensure_ascii=False) + "\n")
    counts: dict[str, Counter[str]] = {}
    seen: set[str] = set()
    for dataset in datasets:
        rows: dict[str, list[str]] = {"train": [], "test": []}
        for row in read_lines(source / f"{dataset}.jsonl.gz"):
            if (key := normalise(row["question"])) in seen:
                continue
            seen.add(key)
            facts = [[title, 0] for title in dict.fromkeys(titles[name] for name in row["gold"])]
            question = {"question": row["question"], "golden_answers": row["answers"], "supporting_facts": facts}
            rows[split_of(row["question"])].append(json.dumps(question, ensure_ascii=False))
        for split, lines in rows.items():
            path = out / "questions" / dataset / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        counts[dataset] = Counter({split: len(lines) for split, lines in rows.items()})
    if not (out / "index").exists():
        build_index(corpus, out / "index")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder with <dataset>.jsonl.gz and paragraphs.jsonl.gz")
    parser.add_argument("--out", type=Path, default=Path("runs/searchqa"))
    options = parser.parse_args()
    for dataset, splits in prepare(options.source, options.out).items():
        print(f"{dataset}: {splits['train']} training and {splits['test']} test questions")


if __name__ == "__main__":
    main()
