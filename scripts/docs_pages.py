"""MkDocs hook: fills the generated parts of pages, and adds generated pages, when the site is built.

A page holds a marker such as `<!-- generated: recipe -->`; the text comes from the code or from the JSON of a
measurement, so it cannot drift. `mkdocs.yml` names this file under `hooks`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import tempfile
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "results" / "benchmarks"
MARKER = re.compile(r"<!-- generated: ([\w-]+) -->(?:\n> .*)*")
"""A marker, with the quoted lines below it that a reader of the source sees instead."""


EPISODES = {
    "results/episodes-textcraft.html": (
        "qwen-textcraft/eval-qwen-base-textcraft",
        "qwen-textcraft/eval-qwen-staged-textcraft-1",
    ),
    "results/episodes-babyai.html": ("qwen-babyai/eval-qwen-base-babyai", "qwen-babyai/eval-qwen-staged-babyai-0"),
    "results/episodes-searchqa.html": (
        "qwen-searchqa/eval-qwen-base-searchqa",
        "qwen-searchqa/eval-qwen-staged-searchqa-2",
    ),
    "results/episodes-sciworld.html": (
        "qwen-sciworld/eval-qwen-base-sciworld",
        "qwen-sciworld/eval-qwen-sft-sciworld-0",
    ),
    "results/episodes-webarena.html": ("qwen-webarena/eval-qwen-base-webarena",),
}
"""Evaluations under results/, before and after training, by the page that shows ten episodes of each."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of EPISODES to the site (called by MkDocs)."""
    from mkdocs.structure.files import File

    for page, jobs in EPISODES.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "page.html"
            command = [sys.executable, ROOT / "results" / "episodes.py", "page", "--out", out, *jobs]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            files.append(File.generated(config, page, content=out.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace every marker of a page, and the note below it, by its generated text (called by MkDocs)."""
    return MARKER.sub(lambda match: GENERATORS[match[1]](), markdown)


def field_texts(owner: type) -> dict[str, str]:
    """Return the docstring under each field of a class, read from its source."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            texts[field.target.id] = inspect.cleandoc(str(text.value.value)).replace("\n", " ")
    return texts


def section_of(annotation: Any) -> type | None:
    """Return the settings class that an annotation holds, if it does: `LoraSettings | None`, `tuple[Env, ...]`."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if inspect.isclass(candidate) and (hasattr(candidate, "model_fields") or dataclasses.is_dataclass(candidate)):
            return candidate
    return None


def type_text(annotation: Any) -> str:
    """Return an annotation as a recipe's reader would write it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{value!r}`".replace("'", '"') for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_text(each) for each in arguments if each is not type(None))
    if origin is tuple:
        inner = [each for each in arguments if each is not Ellipsis]
        return "list of " + type_text(inner[0])
    if origin is dict:
        return "table of " + type_text(arguments[1])
    names = {str: "string", int: "integer", float: "number", bool: "boolean"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def default_text(value: Any) -> str:
    if value is dataclasses.MISSING or type(value).__name__ == "PydanticUndefinedType":
        return "required"
    if value is None:
        return "none"
    return f"`{json.dumps(value)}`"


def bounds_text(metadata: list[Any]) -> str:
    """Return the bounds that a field checks: `≥ 1`, `> 0, < 1`."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "at least"}
    found = [
        f"{sign} {getattr(each, name)}" for each in metadata for name, sign in signs.items() if hasattr(each, name)
    ]
    return ", ".join(found)


@dataclasses.dataclass(frozen=True)
class Key:
    name: str
    annotation: Any
    default: Any
    bounds: str
    text: str


def keys_of(owner: type, given: Any = None) -> list[Key]:
    """Return the keys of a settings class; defaults are those of the instance `given`, if there is one."""
    hints = typing.get_type_hints(owner)
    texts = field_texts(owner)
    keys = []
    if hasattr(owner, "model_fields"):
        for name, field in owner.model_fields.items():
            default = field.default if given is None else getattr(given, name)
            keys.append(Key(name, hints[name], default, bounds_text(field.metadata), texts.get(name, "")))
        return keys
    for field in dataclasses.fields(owner):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if given is not None:
            default = getattr(given, field.name)
        keys.append(Key(field.name, hints[field.name], default, "", texts.get(field.name, "")))
    return keys


def instance_of(value: Any, section: type) -> Any:
    return value if isinstance(value, section) else None


def recipe_sections() -> Iterator[tuple[str, type, Any]]:
    """Yield (path, settings class, instance with the defaults or None) of every section, outer ones first."""
    from agentgym_rl.config import Config

    waiting: list[tuple[str, type, Any]] = [("", Config, None)]
    while waiting:
        path, owner, given = waiting.pop(0)
        yield path, owner, given
        inner = [
            (f"{path}.{key.name}".strip("."), section, instance_of(key.default, section))
            for key in keys_of(owner, given)
            if (section := section_of(key.annotation)) is not None
        ]
        waiting = inner + waiting if path else inner


def recipe() -> str:
    """Return every key of a recipe with type, default and meaning."""
    sections = list(recipe_sections())
    documented: dict[type, tuple[str, dict[str, Any]]] = {}
    for path, owner, given in sorted(sections, key=lambda section: section[0].count(".")):
        documented.setdefault(owner, (path, {key.name: key.default for key in keys_of(owner, given)}))
    lines = []
    for path, owner, given in sections:
        title = f"`[{path}]`" if path else "Top level"
        if path in ("environments", "rewards"):
            title = f"`[[{path}]]`"
        lines += [f"## {title}", ""]
        first, defaults = documented[owner]
        if path != first:
            changed = [
                f"`{key.name}` = {default_text(key.default)}"
                for key in keys_of(owner, given)
                if section_of(key.annotation) is None and key.default != defaults[key.name]
            ]
            other = f", with other defaults: {', '.join(changed)}" if changed else ""
            lines += [f"The keys of [`[{first}]`](#{anchor(first)}){other}.", ""]
            continue
        keys = keys_of(owner, given)
        lines += [inspect.cleandoc(owner.__doc__ or "").split("\n\n")[0].replace("\n", " "), ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key in keys:
            section = section_of(key.annotation)
            where = f"{path}.{key.name}".strip(".")
            kind, default = type_text(key.annotation), default_text(key.default) if section is None else ""
            if section is not None:
                kind = f"[section](#{anchor(where)})"
                default = "none" if key.default is None else "see there"
            elif key.bounds:
                kind += f", {key.bounds}"
            lines.append(f"| `{key.name}` | {kind} | {default} | {cell(key.text)} |")
        lines.append("")
    return "\n".join(lines)


def cell(text: str) -> str:
    """Return text that is safe inside a table: no column ends, no HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def anchor(path: str) -> str:
    """Return the anchor that MkDocs gives to the heading of a section."""
    return re.sub(r"[^\w]", "", path.lower())


def commands() -> str:
    """Return every command of the command line with its arguments and options."""
    import typer

    cli = importlib.import_module("agentgym_rl.cli")
    group = typer.main.get_command(cli.app)
    lines = []
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        named = [each for each in command.params if each.param_type_name == "argument"]
        options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
        usage = " ".join(
            [f"agentgym-rl {name}", *(argument_usage(each) for each in named), "[OPTIONS]" * bool(options)]
        )
        lines += [f"## {name}", "", f"```\n{usage.strip()}\n```", "", inspect.cleandoc(command.help or ""), ""]
        if named or options:
            lines += ["| argument or option | default | meaning |", "|---|---|---|"]
        for each in [*named, *options]:
            shown = ", ".join(f"`{flag}`" for flag in [*each.opts, *each.secondary_opts])
            shown = f"`{argument_usage(each)}`" if each in named else shown
            default = each.default
            plain = default is None or default == () or callable(default) or "Sentinel" in type(default).__name__
            shown_default = "" if plain else f"`{default}`"
            text = cell((getattr(each, "help", "") or "").replace("\n", " "))
            lines.append(f"| {shown} | {shown_default} | {text} |")
        lines.append("")
    return "\n".join(lines)


def argument_usage(argument: Any) -> str:
    shown = (argument.metavar or argument.name).upper()
    shown += "..." if argument.nargs == -1 or getattr(argument, "multiple", False) else ""
    return shown if argument.required else f"[{shown}]"


def measured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BENCHMARKS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def rollout() -> str:
    """Return new tokens a second of each engine, beside the bandwidth bound of the same case."""
    rows, bound, ours = [], {}, {}
    for line in measured("gpu_rollout")["measured"]:
        case, speed = line["case"], line.get("tokens_per_s", 0.0)
        if line["part"] == "machine":
            continue
        if line["who"] == "bound":
            bound[case] = speed
            continue
        if line["who"] == "ours":
            ours[case] = speed
        ratio = "" if line["who"] == "ours" else f"{ours[case] / speed:.1f}×"
        who = "native engine" if line["who"] == "ours" else line["who"].replace("vllm", "vLLM 0.22.1")
        rows.append([case, who, f"{speed / 1000:.1f}k", f"{speed / bound[case]:.0%}", ratio])
    return table(["model × episodes", "engine", "new tokens/s", "of the bandwidth bound", "native ÷ this"], rows)


def lora() -> str:
    """Return new tokens a second with adapters, beside the same rollout without them."""
    lines = {line["who"]: line for line in measured("gpu_lora")["measured"] if line["part"] == "rollout"}
    names = {"ours": "all parameters", "lora 16": "LoRA, rank 16"}
    speeds = {who: lines[name]["tokens_per_s"] for name, who in names.items()}
    rows = [[who, f"{speed / 1000:.1f}k", f"{speed / speeds['all parameters']:.1%}"] for who, speed in speeds.items()]
    return table(["Qwen2.5-1.5B shape × 256", "new tokens/s", "of the first row"], rows)


def run(record: str) -> str:
    """Return whole training steps of two recipes, beside those of an older commit on the same machine."""
    rows, now = [], {}
    for line in measured(record)["measured"]:
        if line["who"] == "ours":
            now[line["case"]] = line["tokens_per_s"]
        ratio = "" if line["who"] == "ours" else f"{now[line['case']] / line['tokens_per_s']:.2f}×"
        who = "this version" if line["who"] == "ours" else "older commit"
        seconds = [f"{line[name]:.2f} s" for name in ("step_s", "rollout_s", "learn_s")]
        rows.append([line["case"], who, f"{line['tokens_per_s'] / 1000:.1f}k", ratio, *seconds, f"{line['busy']:.0%}"])
    times = ["a step", "rollout", "learning"]
    return table(["recipe × episodes", "version", "new tokens/s", "this ÷ older", *times, "GPU busy"], rows)


def learner() -> str:
    """Return tokens a second and memory of the learner, beside a plain padded step."""
    rows, plain = [], {}
    for line in measured("gpu_learner")["measured"]:
        if line["who"] == "transformers":
            plain[line["case"]] = line["tokens_per_s"]
        who = {"transformers": "plain: padded, `model(labels=…)`", "ours": "packed"}.get(line["who"], line["who"])
        rows.append(
            [
                line["case"],
                who.replace("ours, ", "packed, "),
                f"{line['tokens_per_s'] / 1000:.1f}k",
                f"{line['tokens_per_s'] / plain[line['case']]:.2f}×",
                f"{line['share_of_ceiling']:.0%}",
                f"{line['allocated_gb']:.1f} GB",
            ]
        )
    return table(["case", "learner", "tokens/s", "÷ plain", "of the matrix ceiling", "allocated"], rows)


def step_peers() -> str:
    """Return a GRPO step beside those of TRL."""
    names = {"ours": "this trainer", "trl": "TRL, transformers", "trl, vllm": "TRL, vLLM in its process"}
    lines = {line["who"]: line for line in measured("gpu_step")["measured"]}
    rows = []
    for who, name in names.items():
        line = lines[who]
        ratio = lines["ours"]["episodes_per_s"] / line["episodes_per_s"]
        seconds = [f"{line[key]:.2f} s" for key in ("rollout_s", "learn_s")]
        sampled = f"{line['sampled_tokens'] / 1000:.1f}k"
        shown = "" if who == "ours" else f"{ratio:.1f}×"
        rows.append([name, f"{line['episodes_per_s']:.0f}", *seconds, sampled, f"{line['turns']:.1f}", shown])
    head = ["", "episodes/s", "rollout", "learning", "tokens sampled a step", "turns an episode", "this ÷ TRL"]
    return table(head, rows)


def step() -> str:
    """Return where the time of a GRPO step goes."""
    line = measured("gpu_step")["measured"][0]
    rows = [
        ["episodes per second", f"{line['episodes_per_s']:.0f}"],
        ["a step, median", f"{line['step_s']:.2f} s"],
        ["– rollout", f"{line['rollout_s']:.2f} s"],
        ["– learning", f"{line['learn_s']:.2f} s"],
        [
            f"GPU busy while playing, profiled ({line['profiled_s']:.2f} s)",
            f"{line['kernels_playing_s']:.2f} s",
        ],
        ["GPU busy while learning, in the same step", f"{line['kernels_learning_s']:.2f} s"],
        ["environments, in the same step", f"{line['environments_s']:.2f} s"],
        ["tokens sampled a step", f"{line['sampled_tokens'] / 1000:.1f}k"],
        ["mean gap between sampler and learner", f"{line['mismatch']:.4f} nats a token"],
    ]
    return table(["", ""], rows)


def large() -> str:
    """Return a GRPO step of models that nearly fill the device, beside ceilings and the doctor's estimate."""
    rows = []
    for line in measured("gpu_large")["measured"]:
        bounds, memory = line["ceilings"], line["memory_gib"]
        rows.append(
            [
                line["case"] + line["who"].removeprefix("ours"),
                f"{line['step_s']:.1f} s",
                f"{line['tokens_per_s']:,.0f} ({line['tokens_per_s'] / bounds['rollout_tokens_per_s']:.0%})",
                f"{line['learner_tokens_per_s']:,.0f} "
                f"({line['learner_tokens_per_s'] / bounds['learner_tokens_per_s']:.0%})",
                f"{memory['allocator']:.1f} GiB",
                f"{memory['doctor']:.1f} GiB",
            ]
        )
    speeds = ["rollout, new tokens/s (of the bandwidth bound)", "learner, tokens/s (of the matrix ceiling)"]
    return table(["model × episodes", "a step", *speeds, "peak memory", "doctor's estimate"], rows)


def vllm_weights() -> str:
    """Return seconds of a weight update to vLLM by each way."""
    found = measured("vllm_weights")
    names = {
        "memory": "CUDA IPC, in one process",
        "ipc": "CUDA IPC from the learner's process, as `[scale]` does if both share a GPU",
        "broadcast": "a broadcast over gloo, through the host; NCCL refuses two processes on one GPU",
        "files": "a folder",
    }
    seconds = found["seconds"]
    step_s = seconds["rollout"] + seconds["learn"]
    rows = [
        [
            text,
            f"{found['each'][way][0]:.2f} s",
            f"{seconds[way]:.2f} s",
            f"{seconds[way] / (step_s + seconds[way]):.0%}",
        ]
        for way, text in names.items()
    ]
    return table(["weights by", "first update", "median of later ones", "of a step with it"], rows)


def vllm_sleep() -> str:
    """Return seconds and device memory of a vLLM that sleeps while the learner works."""
    found = measured("vllm_weights")
    sleep, memory = found["sleep"], found["sleep"]["device_gib"]
    rows = [
        ["start", f"{found['start']['seconds']:.0f} s"],
        ["sleep", f"{sleep['sleep_s']:.1f} s"],
        ["wake", f"{sleep['wake_s']:.1f} s"],
        ["device memory in use, awake", f"{memory['awake']:.1f} GiB"],
        ["device memory in use, asleep", f"{memory['asleep']:.1f} GiB"],
        ["largest change of a log-probability by a sleep", f"{sleep['logprobs_apart']:.1g}"],
    ]
    return table(["", ""], rows)


def loading() -> str:
    """Return what it takes to load a model on four CPU ranks and on one GPU."""
    rows = []
    for name, where in (("loading", "4 ranks on CPUs"), ("loading_gpu", "1 rank on a GPU")):
        found = measured(name)
        host = (found["peak"]["anonymous"] - found["before"]["anonymous"]) / 1e9
        pages = (found["peak"]["pss"] - found["before"]["pss"]) / 1e9
        device = found.get("device_bytes", 0)
        rows.append(
            [
                f"{found['model'].upper()}, {where}",
                f"{found['bf16_bytes'] / 1e9:.2f} GB",
                f"{host:.2f} GB ({found['anonymous_ratio']:.2f} ×)",
                f"{pages:.2f} GB ({found['pss_ratio']:.2f} ×)",
                f"{device / 1e9:.2f} GB" if device else "",
                f"{found['seconds']:.1f} s",
            ]
        )
    header = ["model", "weights", "host memory, anonymous", "host memory with pages of the files", "device memory"]
    return table([*header, "time"], rows)


def driver() -> str:
    """Return the seconds of the driver's thread for a step by part, and those of Ray's threads beside it."""
    record = measured("driver")
    rows = [[part, f"{value:.2f}"] for part, value in record["seconds"].items()]
    total = ["**sum**", f"**{sum(record['seconds'].values()):.2f}**"]
    return table(["part", "seconds"], [*rows, total, ["Ray's threads beside it", f"{record['seconds_beside']:.2f}"]])


def host_turns() -> str:
    """Return the host's processor time of a turn by environment, of an earlier commit and of the measured one."""
    rows = []
    for record in measured("host_turns")["measured"]:
        before, after = record["best_us"][record["against"]], record["best_us"]["this checkout"]
        rows.append([f"`{record['env']}`", f"{before:.0f} µs", f"{after:.0f} µs", f"{before / after:.1f}×"])
    return table(["environment", "the older commit", "now", "ratio"], rows)


def asynchronous(kind: str, study: str) -> str:
    """Return a table of results/asynchronous_tables.py."""
    spec = importlib.util.spec_from_file_location(kind, ROOT / "results" / "asynchronous_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return table(*getattr(module, kind)(study))


def gradient_noise() -> str:
    """Return the table of results/gradient_noise_tables.py, which imports its neighbours."""
    sys.path.insert(0, str(ROOT / "results"))
    return table(*importlib.import_module("gradient_noise_tables").by_horizon())


def load() -> str:
    """Return throughput and latency of one environment server against its number of sessions."""
    rows = [
        [
            f"{point['sessions']:,}",
            f"{point['episodes_per_s']:.0f}",
            f"{point['steps_per_s']:,.0f}",
            f"{point['p50_ms']:.1f} ms",
            f"{point['p99_ms']:.1f} ms",
            f"{point['server_cpu_ms']:.2f} ms",
        ]
        for point in measured("load")["curve"]
    ]
    return table(["sessions", "episodes/s", "steps/s", "p50", "p99", "server CPU an episode"], rows)


def search(*names: str) -> str:
    """Return what each retriever finds, from the reports of `agentgym-rl index --questions`."""
    rows = []
    for name in names:
        report = json.loads((ROOT / "results" / "search" / f"{name}.json").read_text(encoding="utf-8"))
        for row in report["measured"]:
            recalls = [interval(row["question"][top]["recall"]) for top in ("3", "5", "10")]
            complete = [interval(row[way]["3"]["all"]) for way in ("question", "follow", "titles")]
            answer = [interval(row[way]["3"]["answer"]) for way in ("question", "titles")]
            head = [row["set"], row["retriever"], f"{row['questions']:,}"]
            rows.append([*head, *recalls, *complete, *answer, f"{row['ms']:.1f}"])
    ways = ["all@3, asked", "all@3, follow", "all@3, titles", "answer@3, asked", "answer@3, titles"]
    return table(["questions", "retriever", "number", "recall@3", "recall@5", "recall@10", *ways, "ms"], rows)


def interval(value: list[float]) -> str:
    """Return a share and the half width of its 95% interval, in percent."""
    return f"{100 * value[0]:.0f} ±{100 * value[1]:.0f}"


def reading_lengths() -> str:
    """Return how long the files of the reading list are."""
    page = (ROOT / "docs" / "how-it-works" / "read-it.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \d+ \| `([^`]+)`", page, re.MULTILINE)
    lengths = [len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in listed]
    return f"{len(listed)} files, {sum(lengths):,} lines."


GENERATORS: dict[str, Callable[[], str]] = {
    "recipe": recipe,
    "cli": commands,
    "rollout": rollout,
    "lora": lora,
    "run": lambda: run("gpu_run"),
    "run-qwen": lambda: run("gpu_run_qwen"),
    "learner": learner,
    "step": step,
    "step-peers": step_peers,
    "large": large,
    "vllm-weights": vllm_weights,
    "vllm-sleep": vllm_sleep,
    "loading": loading,
    "driver": driver,
    "host-turns": host_turns,
    "asynchronous": lambda: asynchronous("success_by_bound", "asynchronous"),
    "asynchronous-textcraft": lambda: asynchronous("success_by_bound", "asynchronous-textcraft"),
    "qwen-asynchronous": lambda: asynchronous("times", "qwen-asynchronous"),
    "asynchronous-smollm2": lambda: asynchronous("times", "asynchronous-smollm2"),
    "asynchronous-long-first": lambda: asynchronous("race", "asynchronous-long-first"),
    "asynchronous-long-first-times": lambda: asynchronous("times", "asynchronous-long-first"),
    "gradient-noise": gradient_noise,
    "load": load,
    "reading-lengths": reading_lengths,
    "search-whole": lambda: search("bm25"),
    "search-sample": lambda: search("sample"),
}
