"""Checkpoints: written atomically, the last k kept, random states restored."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers_for_tests import byte_level_bpe
from training_for_tests import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.checkpoint import (
    disk_full_reason,
    export_checkpoint,
    list_checkpoints,
    load_state,
    missing_from,
    restore_interrupted,
    save_checkpoint,
    save_state,
    staged,
)


@pytest.fixture
def model() -> Any:
    return tiny_model(vocabulary=420)


def save(root: Path, step: int, model: Any, keep: int = 2, **state: Any) -> Path:
    return save_checkpoint(root, step, model, byte_level_bpe("chatml"), state, keep)


def test_a_checkpoint_restores_model_and_state(tmp_path: Path, model: Any) -> None:
    state = {"optimizer": {"moments": torch.arange(3.0)}, "evaluations": [{"step": 0, "success": 0.5}], "none": None}
    folder = save(tmp_path, 7, model, **state)
    loaded = load_state(folder)
    assert folder.name == "step_000007"
    assert loaded["step"] == 7
    assert torch.equal(loaded["optimizer"]["moments"], torch.arange(3.0))
    assert (loaded["evaluations"], loaded["none"]) == (state["evaluations"], None)
    again = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    text = "go north, get 1 oak log"
    assert AutoTokenizer.from_pretrained(folder / "model").encode(text) == byte_level_bpe("chatml").encode(text)


def test_random_states_continue_after_a_restore(tmp_path: Path, model: Any) -> None:
    def draw() -> tuple[float, float, float, float]:
        return random.random(), random.gauss(), float(numpy.random.rand()), float(torch.rand(()))

    draw()  # a cached Gaussian is part of the state now
    folder = save(tmp_path, 1, model)
    expected = draw()
    draw()
    load_state(folder)
    assert draw() == expected


def test_only_the_last_k_are_kept_in_numeric_order(tmp_path: Path, model: Any) -> None:
    for step in (2, 999_999, 1_000_000, 1_000_001):
        save(tmp_path, step, model, keep=3)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_999999", "step_1000000", "step_1000001"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_1000000", "step_1000001", "step_999999"]


def test_leftovers_of_a_killed_process_are_not_checkpoints_and_are_removed(tmp_path: Path, model: Any) -> None:
    whole = save(tmp_path, 1, model)
    half = tmp_path / ".step_000002.tmp"
    shutil.copytree(whole, half)
    (half / "trainer.pt").write_bytes(b"torn")
    assert list_checkpoints(tmp_path) == [whole]
    save(tmp_path, 5, model)  # another step: a resumed run may save at other steps
    assert not half.exists()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_000001", "step_000005"]


def test_saving_a_step_again_replaces_it(tmp_path: Path, model: Any) -> None:
    save(tmp_path, 1, model, mark="old")
    assert load_state(save(tmp_path, 1, model, mark="new"))["mark"] == "new"


class Killed(BaseException):
    """Stands for the end of the process."""


def killed_in(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Kill the process at its n-th rename or n-th removal. A removal is half done."""
    calls = 0
    rename = Path.rename

    def counted() -> bool:
        nonlocal calls
        calls += 1
        return calls == call

    def die_before_renaming(path: Path, target: Path) -> Path:
        if counted():
            raise Killed
        return rename(path, target)

    def die_while_removing(folder: Path, ignore_errors: bool = False) -> None:
        if not Path(folder).exists():
            return
        if counted():
            (Path(folder) / "trainer.pt").unlink()
            raise Killed
        for path in sorted(Path(folder).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        Path(folder).rmdir()

    monkeypatch.setattr(Path, "rename", die_before_renaming)
    monkeypatch.setattr(shutil, "rmtree", die_while_removing)


@pytest.mark.parametrize("moment", range(1, 6))
def test_a_kill_while_a_step_is_saved_again_leaves_one_complete(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(mark: str) -> None:
        with staged(tmp_path, 1, 1) as folder:
            save_state(folder, 1, {"mark": mark})

    write("old")
    with monkeypatch.context() as patches:
        killed_in(patches, moment)
        try:
            write("new")
        except Killed:
            assert moment < 5
        else:
            assert moment == 5, "there are four moments"
    restore_interrupted(tmp_path)
    (there,) = list_checkpoints(tmp_path)
    assert not missing_from(there)
    assert load_state(there)["mark"] == ("old" if moment < 3 else "new")
    write("again")
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert load_state(there)["mark"] == "again"


def test_a_missing_or_truncated_file_is_named(tmp_path: Path, model: Any) -> None:
    folder = save(tmp_path, 1, model)
    assert missing_from(folder) == ""
    torn = folder / "model" / "model.safetensors"
    whole = torn.read_bytes()
    torn.write_bytes(whole[:-1])
    assert missing_from(folder) == f"model/model.safetensors has {len(whole) - 1} bytes of {len(whole)}"
    torn.write_bytes(whole)
    tokenizer = (folder / "model" / "tokenizer.json").rename(tmp_path / "elsewhere")
    assert missing_from(folder) == "model/tokenizer.json is missing"
    tokenizer.rename(folder / "model" / "tokenizer.json")
    (folder / "files.json").unlink()  # as an earlier version wrote it
    assert missing_from(folder) == ""
    torn.unlink()
    assert missing_from(folder) == "model/ has no weights"
    (folder / "trainer.pt").unlink()
    assert missing_from(folder) == "trainer.pt is missing"


def test_a_failed_save_leaves_the_earlier_checkpoint_alone(tmp_path: Path, model: Any) -> None:
    whole = save(tmp_path, 1, model, mark="old")
    with pytest.raises(Exception, match="pickle"):
        save(tmp_path, 2, model, mark=lambda: None)
    assert list_checkpoints(tmp_path) == [whole]
    assert load_state(whole)["mark"] == "old"


def test_a_folder_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a checkpoint: trainer\.pt is missing"):
        load_state(tmp_path)


def test_export_copies_the_model_of_a_step(tmp_path: Path, model: Any) -> None:
    root = tmp_path / "checkpoints"
    save(root, 1, model)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    save(root, 2, model)
    export_checkpoint(root, None, tmp_path / "last")
    export_checkpoint(root, 1, tmp_path / "deep" / "first")
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "first")
    assert torch.equal(last.lm_head.weight, model.lm_head.weight)
    torch.testing.assert_close(first.lm_head.weight, model.lm_head.weight - 1.0)
    assert not (tmp_path / "last" / "trainer.pt").exists()


@pytest.mark.parametrize("kind", ["file", "folder", "pipe"])
def test_export_copies_nothing_from_outside_the_run(tmp_path: Path, model: Any, kind: str) -> None:
    root = tmp_path / "checkpoints"
    save(root, 1, model)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    odd = root / "step_000001" / "model" / "extra"
    if kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to(tmp_path / "private" / ("key" if kind == "file" else ""))
    with pytest.raises(ConfigError, match="extra points outside the run or is not a file"):
        export_checkpoint(root, 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_lists_the_checkpoints_if_a_step_is_missing(tmp_path: Path, model: Any) -> None:
    root = tmp_path / "checkpoints"
    with pytest.raises(ConfigError, match="has no checkpoint: there is none"):
        export_checkpoint(root, None, tmp_path / "out")
    save(root, 3, model)
    with pytest.raises(ConfigError, match="of step 4: there is step_000003"):
        export_checkpoint(root, 4, tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        export_checkpoint(root, 3, tmp_path / "out")


def test_a_full_disk_is_distinguished_from_other_errors() -> None:
    assert disk_full_reason(OSError(errno.ENOSPC, "No space left on device"))
    assert disk_full_reason(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"))
    wrapped = ValueError("saving failed")
    wrapped.__cause__ = OSError(errno.EDQUOT, "quota")
    assert disk_full_reason(wrapped)
    assert not disk_full_reason(ValueError("a tensor of the wrong shape"))
    assert not disk_full_reason(PermissionError(errno.EACCES, "not allowed"))
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not disk_full_reason(first)


def test_a_failed_write_leaves_only_the_old_checkpoint(tmp_path: Path) -> None:
    with staged(tmp_path, 1, 2) as folder:
        (folder / "trainer.pt").write_bytes(b"old")

    def fail(folder: Path) -> None:
        (folder / "trainer.pt").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"), staged(tmp_path, 1, 2) as folder:
        fail(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert (tmp_path / "step_000001" / "trainer.pt").read_bytes() == b"old"
