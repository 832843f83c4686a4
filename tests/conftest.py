"""Order of the test files, one compilation of them for all workers, and a check after each test.

This file also puts its folder on the import path, where the *_for_tests modules are.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

LONGEST_FIRST = (
    "test_webarena.py",
    "test_viewer_pages.py",
    "test_cli.py",
    "test_ranks.py",
    "test_stopping.py",
    "test_offline.py",
    "test_sciworld.py",
    "test_viewer_layout.py",
    "test_collapses.py",
    "test_resume.py",
    "test_recipes.py",
    "test_sciworld_gold.py",
    "test_kernels.py",
    "test_docs.py",
    "test_ray_app.py",
)
"""Files that take ten seconds or more. `make test` gives whole files to its workers in the order of collection, and a
long file at the end would leave the other workers idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Qwen2 model with random weights and a byte-level tokenizer. It ends replies early."""
    import torch
    from tokenizers_for_tests import byte_level_bpe
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=420, num_key_value_heads=1, **shape))
    tokenizer = byte_level_bpe("qwen")
    model.get_input_embeddings().weight.data[:, 0] = 1.0  # all hidden states point this way,
    model.lm_head.weight.data[tokenizer.convert_tokens_to_ids("<|im_end|>"), 0] = 1.4  # so a third of tokens are this
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a new worker whether the test files have been compiled before."""
    node.workerinput["compiled"] = (Path(__file__).parent / "unit" / "__pycache__").exists()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Let the first worker compile the test files. The others wait and read its bytecode."""
    workerinput = getattr(session.config, "workerinput", {"compiled": True})
    if workerinput["compiled"] or sys.dont_write_bytecode:
        return (yield)
    with Path(__file__).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)  # returns when the first worker has collected
            fcntl.flock(file, fcntl.LOCK_UN)
        return (yield)


@pytest.fixture(autouse=True)
def _weights_can_be_tied() -> Iterator[None]:
    """Fail the test that loaded models in two threads without `loading_lock`, not one of the tests after it."""
    yield
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is not None:
        assert modeling.PreTrainedModel.tie_weights.__name__ == "tie_weights"
