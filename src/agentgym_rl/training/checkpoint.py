"""Checkpoints: written atomically, the last k kept.

checkpoints/step_000010/
    model/        a Hugging Face folder, ready to use; with LoRA the adapters alone, in peft's format; a folder in it
                  for each role of a team that has adapters of its own
    trainer.pt    optimizer, random states, schedules, data position
    shards/       with several ranks: the optimizer state, which trainer.pt then lacks
    files.json    the size of every file, so that missing or truncated files are noticed before a run resumes
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from agentgym_rl.errors import ConfigError

SHARDS = "shards"
FILES = "files.json"
_NAME = re.compile(r"step_(\d{6,})")


def save_checkpoint(
    root: Path,
    step: int,
    model: Any,
    tokenizer: Any,
    state: dict[str, Any],
    keep: int,
    weights: dict[str, Tensor] | None = None,
    add_files: Callable[[Path], None] | None = None,
) -> Path:
    """Write `root/step_<step>` atomically and return its path. `weights` are written instead of the model's own, and
    `add_files` adds files to the model's folder."""
    with staged(root, step, keep) as folder:
        export(model, tokenizer, folder / "model", weights)
        if add_files is not None:
            add_files(folder / "model")
        save_state(folder, step, state)
    return checkpoint_path(root, step)


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


@contextmanager
def staged(root: Path, step: int, keep: int) -> Iterator[Path]:
    """Yield a temporary folder for a checkpoint. At the end flush it to disk, rename it and remove old checkpoints.

    If writing fails, the folder is removed and earlier checkpoints remain. A checkpoint of the same step is renamed
    first and removed last, so that a kill at any moment leaves one of the two complete.
    """
    temporary = stage(root, step)
    with removed_on_error(temporary):
        yield temporary
        commit(root, step, keep)


def stage(root: Path, step: int) -> Path:
    """Return a new temporary folder for a checkpoint."""
    restore_interrupted(root)
    for leftover in root.glob(".step_*.tmp"):  # from a process that was killed
        shutil.rmtree(leftover)
    temporary = root / f".{checkpoint_path(root, step).name}.tmp"
    temporary.mkdir(parents=True)
    return temporary


@contextmanager
def removed_on_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def commit(root: Path, step: int, keep: int) -> None:
    """Make a complete temporary folder the checkpoint of its step: flush, rename, remove old ones."""
    final = checkpoint_path(root, step)
    temporary, aside = root / f".{final.name}.tmp", root / f".{final.name}.old"
    _list_files(temporary)
    for path in (*temporary.rglob("*"), temporary):
        _sync(path)
    if final.exists():
        final.rename(aside)
    temporary.rename(final)
    _sync(root)
    if aside.exists():
        shutil.rmtree(aside.rename(temporary))
    for old in list_checkpoints(root)[:-keep] if keep else []:
        removed = old.rename(root / f".{old.name}.tmp")  # half removed, it must not look like a checkpoint
        shutil.rmtree(removed)


def restore_interrupted(root: Path) -> None:
    """Restore the name of a checkpoint that `staged` renamed but did not replace because it was killed."""
    for aside in root.glob(".step_*.old"):
        final = root / aside.name.removeprefix(".").removesuffix(".old")
        if final.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(final)


def missing_from(folder: Path) -> str:
    """Return what a checkpoint lacks, or an empty string if it is complete."""
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
    """Return what a checkpoint of an earlier version lacks, which has no files.json."""
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
    """Write trainer.pt, with this process's random states unless `state` has them."""
    torch.save({"random": random_state()} | state | {"step": step}, folder / "trainer.pt")


def on_host(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a nested state in host memory. Tensors that share memory still do."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape) if tensor.numel() else (id(tensor),)
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    return tree_map_only(Tensor, copied, state)


def disk_full_reason(error: BaseException) -> str | None:
    """Return the message of an error caused by a full disk, or None for any other error.

    Torch and safetensors report a full disk in the text of the error only.
    """
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:  # an error from another process may be its own cause
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    disk_full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    phrases = ["No space left", "File too large", "quota exceeded", "file write failed"]
    phrases += ["unexpected pos", "iostream error"]
    for cause in causes:
        lines = str(cause).splitlines() or [""]
        matches = [line.strip() for line in lines if any(phrase in line for phrase in phrases)]
        if matches or getattr(cause, "errno", None) in disk_full:
            return matches[-1] if matches else lines[0]
    return None


def export(model: Any, tokenizer: Any, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write a Hugging Face folder that AutoModelForCausalLM and AutoTokenizer load, of the model or of `weights`."""
    model.save_pretrained(folder, **({} if weights is None else {"state_dict": weights}))
    tokenizer.save_pretrained(folder)


def export_checkpoint(root: Path, step: int | None, folder: Path) -> None:
    """Copy the model of one checkpoint, by default the last, to `folder`."""
    checkpoints = list_checkpoints(root)
    matches = [path for path in checkpoints if step is None or path.name == f"step_{step:06d}"]
    if not matches:
        names = ", ".join(path.name for path in checkpoints) or "none"
        raise ConfigError(f"{root} has no checkpoint{'' if step is None else f' of step {step}'}: there is {names}")
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another folder")
    source = matches[-1] / "model"
    for path in source.rglob("*"):
        if not path.resolve().is_relative_to(root.resolve()) or not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path} points outside the run or is not a file: remove it from the checkpoint")
    shutil.copytree(source, folder)


def list_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints, oldest first."""
    numbered = [(int(m[1]), path) for path in root.glob("step_*") if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def load_state(folder: Path) -> dict[str, Any]:
    """Return the trainer state of a checkpoint and restore the random states."""
    if not (folder / "trainer.pt").is_file():
        raise ConfigError(f"{folder} is not a checkpoint: trainer.pt is missing")
    state = torch.load(folder / "trainer.pt", weights_only=True)
    _restore_random(state["random"])
    return state


def random_state() -> dict[str, Any]:
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
