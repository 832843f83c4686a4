"""Checkpoints: written whole or not at all, the last k kept.

checkpoints/step_000010/
    model/        a Hugging Face folder, usable as it is; with LoRA the adapters alone, in peft's format
    trainer.pt    optimizer, random states, schedules, data position
    shards/       written by several ranks: the optimizer, in place of what trainer.pt would have of it
    files.json    the size of every file: what is missing or cut short is noticed before a run resumes from it
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

from agentgym_rl.errors import ConfigError

SHARDS = "shards"
FILES = "files.json"
_NAME = re.compile(r"step_(\d{6,})")


def save_checkpoint(root: Path, step: int, model: Any, tokenizer: Any, state: dict[str, Any], keep: int) -> Path:
    """Write `root/step_<step>`, whole or not at all."""
    with staged(root, step, keep) as folder:
        export(model, tokenizer, folder / "model")
        save_state(folder, step, state)
    return checkpoint_path(root, step)


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


@contextmanager
def staged(root: Path, step: int, keep: int) -> Iterator[Path]:
    """A temporary folder to write a checkpoint into; flushed to disk and renamed at the end, then old ones are removed.
    If writing fails nothing of it stays, and the checkpoints before it do. One of the same step is renamed aside and
    removed last, so that a kill at any moment leaves one of the two whole."""
    final = checkpoint_path(root, step)
    temporary, aside = root / f".{final.name}.tmp", root / f".{final.name}.old"
    put_back(root)
    for leftover in root.glob(".step_*.tmp"):  # of a process that was killed
        shutil.rmtree(leftover)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _list_files(temporary)
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if final.exists():
        final.rename(aside)
    temporary.rename(final)
    _sync(root)
    if aside.exists():
        shutil.rmtree(aside.rename(temporary))
    for old in list_checkpoints(root)[:-keep] if keep else []:
        doomed = old.rename(root / f".{old.name}.tmp")  # half removed it must not pass for a checkpoint
        shutil.rmtree(doomed)


def put_back(root: Path) -> None:
    """Finish what a kill interrupted: a checkpoint that was renamed aside and not yet replaced returns to its name."""
    for aside in root.glob(".step_*.old"):
        final = root / aside.name.removeprefix(".").removesuffix(".old")
        if final.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(final)


def missing_from(folder: Path) -> str:
    """Say what a checkpoint lacks; an empty string if it is complete."""
    try:
        sizes = json.loads((folder / FILES).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return _missing_from_unlisted(folder)
    except ValueError:
        return f"{FILES} cannot be read"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes of {size}"
    return ""


def _missing_from_unlisted(folder: Path) -> str:
    """The same for a checkpoint of an earlier version, which has no list of its files."""
    if not (folder / "trainer.pt").is_file():
        return "trainer.pt is missing"
    if not any((folder / "model" / name).is_file() for name in ("config.json", "adapter_config.json")):
        return "model/config.json is missing"
    if not any((folder / "model").glob("*.safetensors")):
        return "model/ has no weights"
    return ""


def _list_files(folder: Path) -> None:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    (folder / FILES).write_text(json.dumps(sizes, indent=1), encoding="utf-8")


def save_state(folder: Path, step: int, state: dict[str, Any]) -> None:
    """trainer.pt, with this process's random states."""
    torch.save(state | {"step": step, "random": _random_state()}, folder / "trainer.pt")


def no_room(error: BaseException) -> str | None:
    """What was said where writing failed because the disk took no more; None for any other failure. Torch and
    safetensors say so in words only."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:  # what came from another process may be its own cause
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    words = (
        "No space left",
        "File too large",
        "quota exceeded",
        "file write failed",
        "unexpected pos",
        "iostream error",
    )
    for known in causes:
        lines = str(known).splitlines() or [""]
        said = [line.strip() for line in lines if any(word in line for word in words)]
        if said or getattr(known, "errno", None) in full:
            return said[-1] if said else lines[0]
    return None


def export(model: Any, tokenizer: Any, folder: Path) -> None:
    """A Hugging Face folder that AutoModelForCausalLM and AutoTokenizer load."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def export_checkpoint(root: Path, step: int | None, folder: Path) -> None:
    """Copy the model of one checkpoint, the last by default, out of a run."""
    found = list_checkpoints(root)
    wanted = [path for path in found if step is None or path.name == f"step_{step:06d}"]
    if not wanted:
        there = ", ".join(path.name for path in found) or "none"
        raise ConfigError(f"{root} has no checkpoint{'' if step is None else f' of step {step}'}: there is {there}")
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another folder")
    source = wanted[-1] / "model"
    for path in source.rglob("*"):
        if not path.resolve().is_relative_to(root.resolve()) or not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path} leads out of the run or is no file: an export copies what is in the checkpoint")
    shutil.copytree(source, folder)


def list_checkpoints(root: Path) -> list[Path]:
    """Checkpoints, oldest first."""
    found = [(int(m[1]), path) for path in root.glob("step_*") if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def load_state(folder: Path) -> dict[str, Any]:
    """Trainer state of a checkpoint; also puts the random states back."""
    if not (folder / "trainer.pt").is_file():
        raise ConfigError(f"{folder} is not a checkpoint: trainer.pt is missing")
    state = torch.load(folder / "trainer.pt", weights_only=True)
    _restore_random(state["random"])
    return state


def _random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(numpy.asarray(keys).astype("int64")), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_random(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
