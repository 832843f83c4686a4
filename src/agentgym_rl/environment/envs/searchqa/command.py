"""The command `agentgym-rl index`: build an index, and measure what it finds, with a progress bar."""

from __future__ import annotations

import glob
import time
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from agentgym_rl.environment.envs.searchqa.datasets import read_questions
from agentgym_rl.environment.envs.searchqa.dense import EncoderSettings
from agentgym_rl.environment.envs.searchqa.indexing import (
    Kind,
    build_index,
    open_retriever,
    read_manifest,
    titles_by_id,
)
from agentgym_rl.environment.envs.searchqa.recall import TOPS, measure, with_gold
from agentgym_rl.errors import ConfigError

_TITLES = {"words": "indexing words", "vectors": "encoding passages"}


def index_corpus(
    corpus: Path, folder: Path | None, dense: str | None, query_prefix: str = "", passage_prefix: str = ""
) -> None:
    """Index `corpus` into `folder`, by default next to it. `dense` names the encoder of a vector index."""
    folder = folder or default_folder(corpus)
    encoder = EncoderSettings(dense, query_prefix, passage_prefix) if dense else None
    console = Console()
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[count]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        tasks = {}

        def progress(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(_TITLES[phase], total=total, count="")
            count = f"{done:,} of {total:,}" if phase == "vectors" else f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB"
            bar.update(tasks[phase], completed=done, count=count)

        num_passages = build_index(corpus, folder, encoder, progress)
    console.print(f"{num_passages:,} passages in {time.monotonic() - started:.1f} s: {folder}", highlight=False)


def default_folder(corpus: Path) -> Path:
    """Return the folder of the index of wiki.jsonl or wiki.jsonl.gz: wiki.index beside it."""
    name = corpus.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
    return corpus.with_name(f"{name}.index")


def measure_questions(folder: Path, patterns: list[str], limit: int | None, out: Path | None) -> None:
    """Print, for each question file and retriever, recall of the gold passages and milliseconds a query."""
    files = [Path(name) for pattern in patterns for name in sorted(glob.glob(pattern)) or [pattern]]
    if out is not None and not out.parent.is_dir():  # before minutes of measuring
        raise ConfigError(f"--report {out}: there is no folder {out.parent}")
    manifest = read_manifest(folder)
    titles = titles_by_id(folder)
    kinds: tuple[Kind, ...] = ("bm25", "dense", "hybrid") if "encoder" in manifest else ("bm25",)
    rows = []
    console = Console()
    with Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), console=console) as bar:
        for file in files:
            if not file.is_file():
                raise ConfigError(f"questions {file}: no such file")
            every = read_questions(file)
            questions = with_gold(every, titles)[:limit]
            if not questions:
                raise ConfigError(
                    f"questions {file}: none of {len(every)} names passages of this corpus that support its answer "
                    "(gold ids, supporting_facts or is_supporting)"
                )
            for kind in kinds:
                task = bar.add_task(f"{file.name} {kind}", total=1)
                found = measure(
                    open_retriever(str(folder), kind),
                    questions,
                    lambda done, total, task=task: bar.update(task, completed=done, total=total),  # type: ignore[misc]
                )
                bar.update(task, completed=1, total=1)
                about = {"file": file.name, "set": questions[0].subset, "read": len(every)}
                rows.append({**about, "retriever": kind, **found})
    console.print(_table(rows))
    console.print(_LEGEND, highlight=False, style="dim")
    if out is not None:
        result = {"corpus": manifest["corpus"], "passages": manifest["passages"], "measured": rows}
        if "encoder" in manifest:
            result["encoder"] = Path(manifest["encoder"]["model"]).name
        out.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("questions", "by", box=None, pad_edge=False, header_style="bold")
    for column in ("number", *(f"r@{k}" for k in TOPS), "all", "follow", "titles", "ms"):
        table.add_column(column, justify="right")
    for row in rows:
        recalls = [_percent(row["question"][str(k)]["recall"]) for k in TOPS]
        complete = [_percent(row[way]["3"]["all"]) for way in ("question", "follow", "titles")]
        table.add_row(
            row["file"].partition(".")[0],
            row["retriever"],
            f"{row['questions']:,}",
            *recalls,
            *complete,
            f"{row['ms']:.1f}",
        )
    return table


def _percent(value: list[float]) -> str:
    return f"{100 * value[0]:.1f}%"


_LEGEND = (
    "r@k: recall, gold passages among the first k for the question as asked. all: questions with every gold passage "
    "among the first 3. follow: the same with a second query that follows the best passage. titles: the same with a "
    "query for each gold title. ms: median of a query."
)
