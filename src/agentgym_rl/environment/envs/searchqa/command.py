"""The command `agentgym-rl index`: build an index with a progress bar."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from agentgym_rl.environment.envs.searchqa.dense import EncoderSettings
from agentgym_rl.environment.envs.searchqa.indexing import build_index

_TITLES = {"words": "indexing words", "vectors": "encoding passages"}


def index_corpus(
    corpus: Path, folder: Path | None, dense: str | None, query_prefix: str = "", passage_prefix: str = ""
) -> None:
    """Index `corpus` into `folder`, by default next to it. `dense` names the encoder of a vector index."""
    folder = folder or corpus.with_name(f"{corpus.stem}.index")
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
