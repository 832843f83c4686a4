"""Damaged model folders: one line names the damage before an episode is played."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tokenizers_for_tests import byte_level_bpe
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from agentgym_rl.commands.load_agent import fingerprint
from agentgym_rl.config import ModelConfig
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.memory_demand import shape_of
from agentgym_rl.training.model import load_model


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "intact"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=420, **sizes)).save_pretrained(folder)
    byte_level_bpe("chatml").save_pretrained(folder)
    return folder


def write_file(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def with_setting(**settings: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()


def folder_instead_of(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (write_file("config.json", ""), "is not a valid JSON file"),
        (write_file("config.json", "[]"), "cannot be loaded: TypeError"),
        (write_file("config.json", "{}"), "Should have a `model_type`"),
        (with_setting(intermediate_size=32), r"mlp.\w+.weight needs the shape \(\d+, \d+\), got \(16, 16\)"),
        (with_setting(num_hidden_layers=2), "its weights lack 9 tensors that config.json asks for"),
        (with_setting(num_attention_heads=3), r"hidden size \(16\) is not a multiple"),
        (with_setting(hidden_size="x"), "'hidden_size' expected int, got str"),
        (truncate_weights, "the model cannot be loaded: .* file not fully covered"),
        (write_file("model.safetensors", ""), "the model cannot be loaded: .* header too small"),
        (write_file("tokenizer.json", ""), "the tokenizer cannot be loaded: Expecting value"),
        (write_file("tokenizer.json", "{}"), "the tokenizer cannot be loaded: KeyError"),
        (without_tokenizer, "the tokenizer cannot be loaded: "),
        (folder_instead_of("model.safetensors"), "the model cannot be loaded: .*no file named model.safetensors"),
        (folder_instead_of("tokenizer.json"), "the tokenizer cannot be loaded: "),
        (folder_instead_of("config.json"), "config.json is missing"),
    ],
)
def test_a_damaged_model_is_refused_in_one_line(
    intact: Path, tmp_path: Path, change: Callable[[Path], object], reason: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(intact, folder)
    change(folder)
    fingerprint(folder)  # computed before the model is loaded; it must not fail
    with pytest.raises(ConfigError, match=reason) as refused:
        load_model(str(folder), device="cpu", dtype=torch.float32)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (write_file("config.json", ""), "its config.json cannot be read: Expecting value"),
        (write_file("config.json", "[]"), "its config.json should hold an object, got list"),
        (write_file("config.json", "{}"), "its config.json does not say 'hidden_size'"),
        (with_setting(hidden_size="x"), "hidden_size of its config.json should be a size, got 'x'"),
        (with_setting(num_attention_heads=0), "num_attention_heads of its config.json should be a size, got 0"),
    ],
)
def test_the_memory_of_a_damaged_model_is_not_computed(
    intact: Path, tmp_path: Path, change: Callable[[Path], object], reason: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(intact, folder)
    change(folder)
    with pytest.raises(ConfigError, match=reason):
        shape_of(ModelConfig(path=str(folder)))


def test_an_intact_model_is_loaded(intact: Path) -> None:
    model, _ = load_model(str(intact), device="cpu", dtype=torch.float32)
    assert model.config.hidden_size == 16
    assert shape_of(ModelConfig(path=str(intact))).hidden == 16


def test_models_loaded_in_several_threads_leave_transformers_unchanged(intact: Path) -> None:
    """Without a lock `tie_weights` stays replaced, and every later model has untied weights."""
    tie_weights = PreTrainedModel.tie_weights
    try:
        with ThreadPoolExecutor(8) as threads:
            loaded = list(
                threads.map(lambda _: load_model(str(intact), device="cpu", dtype=torch.float32)[0], range(32))
            )
        assert len(loaded) == 32
        assert PreTrainedModel.tie_weights is tie_weights
    finally:
        PreTrainedModel.tie_weights = tie_weights  # type: ignore[method-assign]


@pytest.mark.long
def test_the_command_line_ends_in_one_line_for_a_damaged_model(intact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(intact, folder)
    with_setting(intermediate_size=32)(folder)
    command = [sys.executable, "-m", "agentgym_rl", "eval", "--env", "keydoor", "--agent", str(folder), "--items", "1"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert re.search("^agentgym-rl: .*its weights do not fit its config.json", ended.stderr, re.MULTILINE)
