"""The command line: parse, wire, call."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from agentgym_rl.errors import AgentGymError, ConfigError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train LLM agents by multi-turn reinforcement learning.",
)

SUBSETS_SHOWN = 5
"""Subsets of an environment that the list names; the JSON has all."""
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings as key=value, for example rl.steps=50")]


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="TOML file, for example recipes/quickstart.toml")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run where its last checkpoint is")] = False,
) -> None:
    """Train an agent as a recipe says."""
    from agentgym_rl.config import load_config

    config = load_config(recipe, overrides or [])
    folder = config.folder(resume=resume)
    from agentgym_rl.train import train as run

    asyncio.run(run(config, folder, resume=resume))


@app.command()
def envs(as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False) -> None:
    """List the environments, their items and subsets."""
    from agentgym_rl.environment import catalog

    rows = [_describe(name, entry) for name, entry in catalog.CATALOG.items()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    _print_environments(rows)


def _print_environments(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("environment", "what it is", "items", "subsets", box=None, pad_edge=False, header_style="bold")
    longest = max((len(split) for row in rows for split in row["splits"]), default=0)
    for row in rows:
        state = ("installed", "green") if row["installed"] else ("not installed", "yellow")
        items = "\n".join(f"{split:{longest}} {size:>7,}" for split, size in row["splits"].items())
        subsets = "\n".join(row["subsets"][:SUBSETS_SHOWN])
        more = len(row["subsets"]) - SUBSETS_SHOWN
        what = Text.assemble(row["summary"], "\n", (row["licence"], "dim"))
        if row["missing"]:
            what.append(f"\n{row['missing'].rpartition(': ')[2]}", "yellow")
        table.add_row(
            Text.assemble((row["name"], "bold cyan"), "\n", state),
            what,
            items,
            Text.assemble(subsets, (f"\nand {more} more" if more > 0 else "", "dim")),
        )
        table.add_row()
    Console(highlight=False).print(table)


def _describe(name: str, entry: Any) -> dict[str, Any]:
    from agentgym_rl.environment import catalog

    row: dict[str, Any] = {"name": name, "summary": entry.summary, "licence": entry.licence, "extra": entry.extra}
    row["package"] = entry.package
    try:
        env = catalog.load(name)
    except ConfigError as error:
        return row | {"installed": False, "missing": str(error), "splits": {}, "ranges": {}, "subsets": []}
    splits = {split: len(items) for split, items in env.splits.items()}
    ranges = {split: [items.start, items.stop] for split, items in env.splits.items()}
    return row | {
        "installed": True,
        "missing": "",
        "splits": splits,
        "ranges": ranges,
        "subsets": list(env.subsets),
        "cheap": env.cheap,
    }


@app.command()
def serve(
    names: Annotated[list[str], typer.Argument(help="Environments to serve, for example textcraft babyai")],
    host: Annotated[str, typer.Option(help="Address to bind; anything but loopback needs a token")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 36001,
    token: Annotated[str | None, typer.Option(envvar="AGENTGYM_RL_TOKEN", help="Bearer token to demand")] = None,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions at once")] = 4096,
    idle_timeout: Annotated[float, typer.Option(min=1, help="Seconds after which an idle session is closed")] = 1800.0,
) -> None:
    """Serve environments over HTTP."""
    from agentgym_rl.environment.server import serve as run

    run(names, host, port, token=token, max_sessions=max_sessions, idle_timeout_s=idle_timeout)


@app.command()
def play(
    name: Annotated[str, typer.Argument(help="Environment, for example textcraft")],
    item: Annotated[int, typer.Option(help="Which item")] = 0,
    max_turns: Annotated[int, typer.Option(min=1)] = 30,
    oracle: Annotated[bool, typer.Option(help="Let the oracle play")] = False,
) -> None:
    """Play an item by hand in the terminal."""
    from agentgym_rl.play import play as run

    asyncio.run(run(name, item, max_turns, oracle=oracle))


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run directory, or one file of its trajectories")],
    step: Annotated[int | None, typer.Option(help="Training step; the last by default")] = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="How many episodes")] = 3,
    success: Annotated[bool | None, typer.Option("--success/--failure", help="Only these")] = None,
) -> None:
    """Print trajectories of a run."""
    from agentgym_rl.play import show as print_trajectories

    print_trajectories(run, step, number, success)


@app.command()
def doctor(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or not, or its metrics.jsonl")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Diagnose a run: its signals, what went wrong since when, and what to try. Exit code 1 if a rule fired."""
    from agentgym_rl.console import Console
    from agentgym_rl.runlog import read_metrics
    from agentgym_rl.training.doctor import diagnose

    metrics = run / "metrics.jsonl" if run.is_dir() else run
    if metrics.suffix != ".jsonl" or not metrics.is_file():
        raise ConfigError(f"the doctor needs a run directory with a metrics.jsonl in it, {run} is none")
    diagnosis = diagnose(read_metrics(metrics))
    if as_json:
        print(json.dumps(diagnosis, indent=2))
    else:
        Console().diagnosis(diagnosis)
    raise typer.Exit(0 if diagnosis["healthy"] else 1)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory")],
    folder: Annotated[Path, typer.Argument(help="Where to write the Hugging Face folder")],
    step: Annotated[int | None, typer.Option(help="Which checkpoint; the last by default")] = None,
) -> None:
    """Copy a checkpoint's model as a Hugging Face folder."""
    from agentgym_rl.training.checkpoint import export_checkpoint

    export_checkpoint(run / "checkpoints", step, folder)
    print(f"wrote {folder}")


@app.command()
def index(
    corpus: Annotated[Path, typer.Argument(help="Passages: a .jsonl file, or a .json file that is one list")],
    out: Annotated[Path | None, typer.Option(help="Folder to make; by default CORPUS.index beside the corpus")] = None,
    dense: Annotated[str | None, typer.Option(help="Encoder (Hugging Face folder or name) for dense retrieval")] = None,
    query_prefix: Annotated[str, typer.Option(help="What the encoder wants before a query")] = "",
    passage_prefix: Annotated[str, typer.Option(help="What the encoder wants before a passage")] = "",
) -> None:
    """Build a search index for searchqa."""
    from agentgym_rl.environment.envs.searchqa.command import index_corpus

    index_corpus(corpus, out, dense, query_prefix, passage_prefix)


def main() -> None:
    """Entry point: errors raised on purpose become one line."""
    try:
        app(standalone_mode=True)
    except AgentGymError as error:
        print(f"agentgym-rl: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        print("agentgym-rl: stopped", file=sys.stderr)
        sys.exit(130)
