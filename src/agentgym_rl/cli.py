"""The command line: parses options and calls the commands."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from agentgym_rl import __version__
from agentgym_rl.common.screen import Screen, printable
from agentgym_rl.errors import AgentGymError, ConfigError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SUBSETS_SHOWN = 5
"""Most subsets of an environment that the list names. The JSON has all."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"agentgym-rl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit")
    ] = False,
) -> None:
    """Train LLM agents by multi-turn reinforcement learning."""


Overrides = Annotated[list[str] | None, typer.Argument(help="Settings as key=value, for example rl.steps=50")]
Kwargs = Annotated[
    list[str] | None,
    typer.Option("--kwarg", help="Argument of the environment's constructor as key=value; may be given several times"),
]


def _kwargs(options: list[str] | None) -> dict[str, Any]:
    """Return the arguments of every --kwarg. Values are TOML literals or bare strings."""
    from agentgym_rl.config.overrides import parse_assignments

    return parse_assignments(options or [])


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="TOML file, or a name that `recipes` lists: quickstart")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Continue the run from its last checkpoint")] = False,
) -> None:
    """Train an agent as a recipe says."""
    _train(recipe, overrides or [], resume=resume)


@app.command()
def proxy(
    recipe: Annotated[Path, typer.Argument(help="TOML file, or a name that `recipes` lists: quickstart")],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to bind; anything but loopback needs a token")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 36100,
    resume: Annotated[bool, typer.Option(help="Continue the run from its last checkpoint")] = False,
) -> None:
    """Train an agent whose episodes are played by your own programs, which connect to an OpenAI-compatible endpoint.

    Programs get episodes by POST /sessions, with the token in AGENTGYM_RL_TOKEN if it is set.
    """
    served = [f"agent.proxy_host={host}", f"agent.proxy_port={port}", "agent.kind=external", "agent.program=[]"]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    _train(recipe, [*(overrides or []), *served], resume=resume, note=f"proxy  {address}  from the first episode on")


def _train(recipe: Path, overrides: list[str], *, resume: bool, note: str = "") -> None:
    from agentgym_rl.commands.recipes import find_recipe
    from agentgym_rl.config import load_config

    config = load_config(find_recipe(recipe), overrides)
    if note:
        print(note, flush=True)
    config.require_allowed_variables()
    folder = config.folder(resume=resume)
    from agentgym_rl.run.log import require_place
    from agentgym_rl.run.preflight import require_recipe

    # Before torch is imported, which takes seconds.
    require_recipe(config)
    require_place(folder, resume=resume)
    from agentgym_rl.commands.train import train as run
    from agentgym_rl.run.console import Console
    from agentgym_rl.run.memory_demand import too_large
    from agentgym_rl.run.stopping import Stopped

    warning = too_large(config)
    if warning is not None:
        Console().warn(warning)
    if not config.run_dir and folder.name != config.name and not resume:
        earlier = folder.parent / config.name
        Console().note(f"{earlier} exists: this run is in {folder}; --resume continues an earlier one")
    try:
        asyncio.run(run(config, folder, resume=resume))
    except Stopped:  # requested, and shown on the console
        raise typer.Exit(0) from None


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one")] = None,
    copy: Annotated[Path | None, typer.Option(help="Copy it into this folder, with the template that it names")] = None,
) -> None:
    """List the recipes that come with the package, print one or copy one."""
    from agentgym_rl.commands.recipes import copy_recipe, find_recipe, listing

    if name is None and copy is not None:
        raise ConfigError("--copy needs the name of a recipe: agentgym-rl recipes quickstart --copy .")
    if name is None:
        print(listing(shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    elif copy is None:
        print(find_recipe(Path(name)).read_text(encoding="utf-8"), end="")
    else:
        for written in copy_recipe(name, copy):
            print(f"wrote {written}")


@app.command()
def envs(as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False) -> None:
    """List the environments, their items and subsets."""
    from agentgym_rl.environment import catalog
    from agentgym_rl.environment.agentgym_servers import SERVED

    rows = [_describe(name, entry) for name, entry in catalog.entries().items()]
    rows += [_describe_served(name) for name in SERVED if name not in catalog.CATALOG]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    _print_environments(rows)


def _print_environments(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    # Names are typed into other commands, so they are never cut.
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, no_wrap in (("environment", True), ("what it is", False), ("items", True), ("subsets", False)):
        table.add_column(heading, no_wrap=no_wrap, overflow="fold")
    longest = max((len(split) for row in rows for split in row["splits"]), default=0)
    for row in rows:
        lacking = "needs a server" if row.get("server") else "not installed"
        state = ("installed", "green") if row["installed"] else (lacking, "yellow")
        items = "\n".join(f"{split:{longest}} {size:>7,}" for split, size in row["splits"].items())
        subsets = "\n".join(row["subsets"][:SUBSETS_SHOWN])
        more = len(row["subsets"]) - SUBSETS_SHOWN
        what = Text.assemble(row["summary"], "\n", (row["licence"], "dim"))
        if row["missing"]:
            reason, _, command = row["missing"].rpartition(": ")
            what.append(f"\n{command if 'needs the package' in reason else row['missing']}", "yellow")
        table.add_row(
            Text.assemble((row["name"], "bold cyan"), "\n", state),
            what,
            items,
            Text.assemble(subsets, (f"\nand {more} more" if more > 0 else "", "dim")),
        )
        table.add_row()
    screen = Screen(highlight=False)
    screen.print(table)
    if any("†" in row["summary"] for row in rows):
        screen.print("† our own tasks under a published name; with url = agentgym+http://... AgentGym's server plays")


def _describe(name: str, entry: Any) -> dict[str, Any]:
    from agentgym_rl.environment import catalog

    row: dict[str, Any] = {"name": name, "summary": entry.summary, "licence": entry.licence, "extra": entry.extra}
    row["package"] = entry.package
    try:
        env = catalog.load(name)
        entry.check()
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


def _describe_served(name: str) -> dict[str, Any]:
    from agentgym_rl.environment.agentgym_servers import SERVED

    served = SERVED[name]
    return {
        **{"name": name, "summary": served.summary, "licence": f"needs {served.needs}", "extra": "", "package": ""},
        **{"installed": False, "missing": f"AgentGym's server: {served.command}", "server": served.command},
        "splits": {split: len(items) for split, items in served.splits.items()},
        "ranges": {split: [items.start, items.stop] for split, items in served.splits.items()},
        "subsets": [],
    }


@app.command("check-env")
def check_env(
    name: Annotated[str, typer.Argument(help="Environment: my_module:MyEnv, or a name that `envs` lists")],
    kwarg: Kwargs = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Check an environment: determinism, hostile actions, concurrency, speed and more. Exit code 1 on a failure."""
    from agentgym_rl.commands import check_env as command

    findings = command.findings_of(name, _kwargs(kwarg))
    if as_json:
        print(json.dumps(command.as_json(findings), indent=2))
    else:
        command.print_findings(name, findings)
    raise typer.Exit(1 if any(finding.level == "error" for finding in findings) else 0)


@app.command()
def serve(
    names: Annotated[list[str], typer.Argument(help="Environments to serve: textcraft babyai my_module:MyEnv")],
    host: Annotated[str, typer.Option(help="Address to bind; anything but loopback needs a token")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 36001,
    token: Annotated[str | None, typer.Option(envvar="AGENTGYM_RL_TOKEN", help="Bearer token to demand")] = None,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions at once")] = 4096,
    idle_timeout: Annotated[float, typer.Option(min=1, help="Seconds after which an idle session is closed")] = 1800.0,
    step_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds one call of an environment may take")] = 60.0,
    kwarg: Kwargs = None,
    openenv: Annotated[bool, typer.Option("--openenv", help="Speak OpenEnv's protocol, for OpenEnv's clients")] = False,
    mcp: Annotated[bool, typer.Option("--mcp", help="Speak MCP: any MCP client plays by tools")] = False,
    stdio: Annotated[bool, typer.Option("--stdio", help="With --mcp: over stdin and stdout, not HTTP")] = False,
) -> None:
    """Serve environments over HTTP. Prints their addresses, then `ready`."""
    from agentgym_rl.commands.serve import serve as run

    limits = {"max_sessions": max_sessions, "idle_timeout_s": idle_timeout, "step_timeout_s": step_timeout}
    announce = lambda text: print(text, flush=True)  # noqa: E731
    served = {"token": token, "kwargs": _kwargs(kwarg), "announce": announce, **limits}
    run(names, host, port, openenv=openenv, mcp=mcp, stdio=stdio, **served)


@app.command()
def play(
    name: Annotated[str, typer.Argument(help="Environment, for example textcraft or my_module:MyEnv")],
    item: Annotated[int, typer.Option(help="Which item")] = 0,
    max_turns: Annotated[int, typer.Option(min=1)] = 30,
    oracle: Annotated[bool, typer.Option(help="Let the oracle play")] = False,
    url: Annotated[str | None, typer.Option(help="Server of the environment, instead of this process")] = None,
    token_variable: Annotated[str | None, typer.Option(help="Variable that holds that server's token")] = None,
    kwarg: Kwargs = None,
    role: Annotated[str | None, typer.Option(help="Role to play, of several; the first by default")] = None,
    opponent: Annotated[str, typer.Option(help="Who plays the other roles: oracle or random")] = "oracle",
) -> None:
    """Play an item by hand in the terminal."""
    from agentgym_rl.commands.play import play as run

    token = os.environ.get(token_variable, "") if token_variable else None
    if token == "":
        raise ConfigError(f"--token-variable: {token_variable} should hold the server's token, it is not set")
    options: dict[str, Any] = {"url": url, "token": token, "kwargs": _kwargs(kwarg), "role": role, "opponent": opponent}
    asyncio.run(run(name, item, max_turns, oracle=oracle, **options))


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run directory, or one file of its trajectories")],
    step: Annotated[int | None, typer.Option(help="Training step; the last by default")] = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="How many episodes")] = 3,
    success: Annotated[bool | None, typer.Option("--success/--failure", help="Only these")] = None,
    held_out: Annotated[bool, typer.Option("--held-out", help="Episodes of the evaluation, not of training")] = False,
) -> None:
    """Print trajectories of a run."""
    from agentgym_rl.commands.play import show as print_trajectories

    print_trajectories(run, step, number, success, held_out=held_out)


@app.command()
def doctor(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or not, its metrics.jsonl, or a recipe")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    device_gib: Annotated[
        float | None, typer.Option(min=0.1, help="Of a recipe: memory of a device; by default this machine's")
    ] = None,
    host_gib: Annotated[float | None, typer.Option(min=0.1, help="Of a recipe: memory of a node's host")] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Of a recipe with scale.address")] = 8,
) -> None:
    """Diagnose a run: its signals, what went wrong since when, and what to try. Exit code 1 if a rule fired.

    Of a recipe: whether it fits the memory it would run in. Exit code 1 if it does not.
    """
    from agentgym_rl.commands.recipes import find_recipe, packaged_recipes

    if run.suffix == ".toml" or (not run.exists() and run.as_posix() in packaged_recipes()):
        from agentgym_rl.config import load_config
        from agentgym_rl.run.memory_demand import diagnose_recipe

        lines, fits = diagnose_recipe(
            load_config(find_recipe(run), overrides or []), device_gib, host_gib, gpus_per_node
        )
        print(json.dumps({"fits": fits, "lines": lines}, indent=2) if as_json else printable("\n".join(lines)))
        raise typer.Exit(0 if fits else 1)
    from agentgym_rl.run.console import Console
    from agentgym_rl.run.log import read_metrics
    from agentgym_rl.training.doctor import diagnose

    metrics = run / "metrics.jsonl" if run.is_dir() else run
    if metrics.suffix != ".jsonl" or not metrics.is_file():
        raise ConfigError(f"the doctor needs a run directory with a metrics.jsonl in it, {run} is none, nor a recipe")
    rows = read_metrics(metrics)
    if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
        raise ConfigError(f"{metrics} is no file of metrics: a line has no step")
    diagnosis = diagnose(rows)
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
    merge: Annotated[bool, typer.Option("--merge", help="Of a run with LoRA: a whole model, adapters inside")] = False,
    role: Annotated[str | None, typer.Option(help="With --merge: the role whose own adapters are merged")] = None,
    dtype: Annotated[
        str, typer.Option(help="With --merge: float32, or bfloat16 (half the size, rounds)", metavar="TYPE")
    ] = "float32",
) -> None:
    """Copy a checkpoint's model as a Hugging Face folder; of a run with LoRA the adapters alone, unless merged."""
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype is float32 or bfloat16, got {dtype!r}")
    if merge:
        from agentgym_rl.commands.export import export_merged

        print(f"wrote {folder}: {export_merged(run, step, folder, dtype, role)}")
        return
    if dtype != "float32" or role is not None:
        raise ConfigError("--dtype and --role are read by --merge: a checkpoint is copied as it is")
    from agentgym_rl.training.checkpoint import export_checkpoint

    export_checkpoint(run / "checkpoints", step, folder)
    print(f"wrote {folder}")


def _option(panel: str, text: str, **bounds: Any) -> Any:
    """Return an option of `eval` under a heading of the help."""
    return typer.Option(help=text, rich_help_panel=panel, **bounds)


@app.command("eval")
def evaluate(
    agent: Annotated[str, typer.Option(help="oracle, random, a model folder or hub name, RUN, RUN@STEP, openai:MODEL")],
    suite: Annotated[str | None, typer.Option(help="A suite of tasks: agentgym-27 or agenteval")] = None,
    env: Annotated[
        str | None, typer.Option(help="One environment (textcraft, my_module:MyEnv), or one scenario of the suite")
    ] = None,
    kwarg: Kwargs = None,
    subset: Annotated[list[str] | None, typer.Option(help="Subset of --env; may be given several times")] = None,
    items: Annotated[str | None, typer.Option(help="Items of --env: 0-99 or 3,5,8 or the path of a task list")] = None,
    split: Annotated[str, typer.Option(help="Split the items are taken from")] = "test",
    lists: Annotated[
        Path | None, typer.Option(help="Folder of AgentEval's item lists, such as webshop_test.json; for --suite")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many items of each task, evenly spaced")] = None,
    turns: Annotated[
        str | None, typer.Option(help="Turns allowed: 10, or 2,4,8; by default the suite's, the run's or 30")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Episodes of each item, for avg@k and pass@k")] = 1,
    seed: Annotated[int, typer.Option(help="Of sampling and of random play")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; by default one in evals/")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the agent in the tables")] = None,
    compare: Annotated[str | None, typer.Option(help="`published` adds the paper's rows to the table")] = None,
    role: Annotated[str | None, typer.Option(help="Role of the agent, if --env has several; the first")] = None,
    opponent: Annotated[str | None, typer.Option(help="Agent of the other roles, as --agent; the oracle")] = None,
    temperature: Annotated[float | None, _option("Model", "0 for greedy; 1, or the run's own", min=0)] = None,
    max_new_tokens: Annotated[int | None, _option("Model", "Of a reply; 512, or the run's own", min=1)] = None,
    max_context: Annotated[int | None, _option("Model", "Tokens of an episode; the scenario's or run's", min=2)] = None,
    style: Annotated[
        str | None, _option("Model", "act, react, plan, tool, function_call or code; the scenario's or the run's own")
    ] = None,
    context: Annotated[
        str | None, _option("Model", "When the context is full: full, window or summary; full, or the run's own")
    ] = None,
    chat_template: Annotated[str | None, _option("Model", "Instead of the tokenizer's own")] = None,
    device: Annotated[str, _option("Model", "auto, cpu, cuda or cuda:1")] = "auto",
    dtype: Annotated[
        str | None, _option("Model", "float32 or bfloat16; float32, or on a GPU the type a run was trained in")
    ] = None,
    base_url: Annotated[str, _option("API", "Where it is")] = "https://api.openai.com/v1",
    key_variable: Annotated[str, _option("API", "Variable that holds the key; empty for none")] = "OPENAI_API_KEY",
    price_prompt: Annotated[float | None, _option("API", "Dollars a million prompt tokens", min=0)] = None,
    price_completion: Annotated[float | None, _option("API", "Dollars a million sampled tokens", min=0)] = None,
    price_cached: Annotated[float | None, _option("API", "Dollars a million cached prompt tokens", min=0)] = None,
    requests_per_minute: Annotated[float | None, _option("API", "At most so many", min=0.01)] = None,
    request_timeout: Annotated[float, _option("API", "Seconds for one request", min=0.01)] = 120.0,
    request_retries: Annotated[int, _option("API", "Further tries of a request", min=0)] = 5,
    max_tokens_field: Annotated[str, _option("API", "max_tokens or max_completion_tokens")] = "max_tokens",
    concurrency: Annotated[int | None, _option("Pace", "Episodes at once; 32, or 8 of heavy ones", min=1)] = None,
    retries: Annotated[int, _option("Pace", "Further attempts at an episode that failed", min=0)] = 2,
    step_timeout: Annotated[float, _option("Pace", "Seconds a step of an environment may take", min=0.01)] = 60.0,
    episode_timeout: Annotated[float, _option("Pace", "Seconds an episode may take", min=0.01)] = 1800.0,
    url: Annotated[
        list[str] | None, _option("Pace", "Server of --env, not this process; with --suite NAME=URL, several times")
    ] = None,
    token_variable: Annotated[str | None, _option("Pace", "Variable that holds that server's token")] = None,
) -> None:
    """Evaluate an agent: success with intervals, turns, tokens, cost. Run it again to continue after a kill."""
    given = dict(locals())  # options by name; nothing else is local yet
    from agentgym_rl.commands.evaluate import evaluate as run
    from agentgym_rl.commands.evaluate import request_of

    try:
        asyncio.run(run(request_of(given)))
    except KeyboardInterrupt:
        print("agentgym-rl: stopped; finished episodes are kept, the same command continues", file=sys.stderr)
        raise typer.Exit(130) from None


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of evaluations: each becomes a row")],
    compare: Annotated[str | None, typer.Option(help="`published` adds the paper's rows")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the tables as a Markdown file")] = None,
) -> None:
    """Combine evaluations into one table: rows are agents, columns are scenarios and tasks."""
    from agentgym_rl.commands.report import report as run

    run(folders, compare, out)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Folder of an evaluation")],
    second: Annotated[Path, typer.Argument(help="Folder of another on the same items")],
    turns: Annotated[int | None, typer.Option(min=1, help="Which of several horizons; the longest by default")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Tell whether one evaluation beats another: paired by item, with p-values."""
    from agentgym_rl.commands.report import compare as run

    run(first, second, turns, as_json=as_json)


@app.command()
def view(
    folders: Annotated[list[Path] | None, typer.Argument(help="Runs, evaluations, or folders of them")] = None,
    host: Annotated[str, typer.Option(help="Address to bind; anything but loopback needs a token")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 36060,
    token: Annotated[
        str | None, typer.Option(envvar="AGENTGYM_RL_TOKEN", help="Token to demand; made up where one is needed")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Model for the playground: a folder, a hub name or a run")] = None,
    url: Annotated[
        list[str] | None, typer.Option(help="NAME=URL of an environment server, for pictures and the playground")
    ] = None,
    token_variable: Annotated[str | None, typer.Option(help="Variable that holds the token of those servers")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="Class of your own, my_module:MyEnv, or a recipe, run or evaluation whose classes to import"),
    ] = None,
    export: Annotated[Path | None, typer.Option(help="Write one HTML file instead of serving")] = None,
    episodes: Annotated[int, typer.Option(min=0, help="With --export: most episodes of a run")] = 200,
    pictures: Annotated[bool, typer.Option(help="With --export: the environments' pictures")] = True,
) -> None:
    """Look at runs in the browser: curves, episodes, replays, comparisons, a playground."""
    from agentgym_rl.commands import view as viewer

    chosen = folders or [Path("runs")]
    if token_variable is not None and token_variable not in os.environ:
        raise ConfigError(f"--token-variable: the variable {token_variable} should hold a token, it is not set")
    served: dict[str, Any] = {
        "urls": viewer.served_environments(url or []),
        "own": viewer.own_environments(env or []),
        "environment_token": os.environ[token_variable] if token_variable is not None else None,
    }
    if export is not None:
        viewer.export(
            chosen, export, episodes=episodes, pictures=pictures, announce=lambda text: print(printable(text)), **served
        )
    else:
        viewer.view(
            chosen, host, port, token, policy, announce=lambda text: print(printable(text), flush=True), **served
        )


@app.command()
def rescore(
    run: Annotated[Path, typer.Argument(help="A run directory with stored training episodes")],
    overrides: Overrides = None,
    recipe: Annotated[Path | None, typer.Option(help="Recipe with other [[rewards]]; by default the run's own")] = None,
    step: Annotated[int | None, typer.Option(help="Training step; all by default")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many groups")] = None,
    out: Annotated[Path | None, typer.Option(help="File of the new verdicts; by default RUN/rescored.jsonl")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ask again what this command has asked before")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Judge stored episodes again and show how their ranks change. The run's files stay as they are."""
    from agentgym_rl.commands.recipes import find_recipe
    from agentgym_rl.commands.rescore import rescore as score

    found = find_recipe(recipe) if recipe is not None else None
    asyncio.run(
        score(run, overrides or [], recipe=found, step=step, limit=limit, out=out, fresh=fresh, as_json=as_json)
    )


@app.command()
def convert(
    sources: Annotated[list[str], typer.Argument(help="Trajectories (.jsonl), globs, run directories; the file last")],
    everything: Annotated[bool, typer.Option("--all", help="Also episodes that were no success")] = False,
) -> None:
    """Write trajectories as AgentGym's conversations: agentgym-rl convert RUN [MORE ...] OUT.json"""
    from agentgym_rl.training.conversations import convert as run

    *patterns, out = sources
    count = run(patterns, Path(out), keep_all=everything)
    print(f"wrote {count} conversations to {out}")


@app.command()
def preferences(
    sources: Annotated[list[str], typer.Argument(help="Runs, or their preferences.jsonl; the file to write last")],
) -> None:
    """Write what people preferred in the viewer as DPO's pairs: agentgym-rl preferences RUN [MORE ...] OUT.jsonl"""
    from agentgym_rl.training.preferences import export_pairs

    *patterns, out = sources
    if not patterns:
        raise ConfigError("preferences needs a run and a file to write: agentgym-rl preferences RUN OUT.jsonl")
    count, held_out = export_pairs(patterns, Path(out))
    note = f'; {held_out} of them are of held-out items ("held_out": true): do not train on these' if held_out else ""
    print(f"wrote {count} pairs to {out}{note}")


@app.command()
def index(
    corpus: Annotated[Path, typer.Argument(help="Passages: a .jsonl file, or a .json file that is one list; or .gz")],
    out: Annotated[Path | None, typer.Option(help="Folder to make; by default CORPUS.index beside the corpus")] = None,
    dense: Annotated[str | None, typer.Option(help="Encoder (Hugging Face folder or name) for dense retrieval")] = None,
    query_prefix: Annotated[str, typer.Option(help="What the encoder wants before a query")] = "",
    passage_prefix: Annotated[str, typer.Option(help="What the encoder wants before a passage")] = "",
    questions: Annotated[
        list[str] | None,
        typer.Option(help="Question file or pattern, 'qa/*.jsonl'; may be repeated. Reports recall of gold passages"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --questions: most questions of a file")] = None,
    report: Annotated[Path | None, typer.Option(help="With --questions: also write the numbers as JSON")] = None,
) -> None:
    """Build a search index for searchqa. With --questions, measure retrieval; an index that exists is used as it is."""
    from agentgym_rl.environment.envs.searchqa import command

    folder = out or command.default_folder(corpus)
    if not (questions and folder.exists()):
        command.index_corpus(corpus, folder, dense, query_prefix, passage_prefix)
    if questions:
        command.measure_questions(folder, questions, limit, report)


def main() -> None:
    """Run the command line. Errors raised on purpose become one line."""
    try:
        app(standalone_mode=True)
    except AgentGymError as error:
        print(f"agentgym-rl: {printable(str(error))}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        print("agentgym-rl: stopped", file=sys.stderr)
        sys.exit(130)
