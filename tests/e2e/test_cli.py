"""The command line in separate processes: its output, and one clear line with exit code 2 for mistakes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from runs_for_tests import TINY, Process, finish
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentgym_rl import __version__

COMMAND = str(Path(sys.executable).with_name("agentgym-rl"))


def command(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, timeout=280, cwd=cwd, env=env, check=False
    )


def run_forked(tmp_path: Path, *arguments: str) -> tuple[int | None, str]:
    """Run a command that needs torch in a forked process, which saves the import, and return its code and output."""
    process = Process(list(arguments), tmp_path / "output")
    return process.wait(), (tmp_path / "output").read_text()


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    finish(folder, "rl.steps=2", "warm_start.sft.epochs=1", "eval.every=0")
    return folder


def assert_one_clear_line(text: str, *words: str) -> None:
    assert text.count("\n") == 1, text
    assert text.startswith("agentgym-rl: ")
    assert "Traceback" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rl.stepz=3"], ["rl.stepz", "unknown key"]),
        (["rl.steps=many"], ["rl.steps", "'many'"]),
        (["rl.groups_per_step=0"], ["groups_per_step must be at least 1"]),
        (["horizon.turns=[4, 2]"], ["ascending"]),
        (["nonsense"], ["expected key=value"]),
    ],
)
def test_a_bad_config_is_refused(recipe: str, overrides: list[str], words: list[str], tmp_path: Path) -> None:
    completed = command("train", recipe, *overrides, cwd=tmp_path)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert_one_clear_line(completed.stderr, *words)
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """Return environment variables with which importing torch fails and the model hub cannot be reached."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise AssertionError('torch was imported')")
    path = os.pathsep.join(filter(None, (str(tmp_path / "broken"), os.environ.get("PYTHONPATH"))))
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub"), "NO_PROXY": "*"}
    return {**os.environ, **hub, "PYTHONPATH": path}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["environments.0.name=babyia"], ["unknown environment 'babyia'", "did you mean 'babyai'?"]),
        (["environments.0.subsets=['PickupLok']"], ["no subset 'PickupLok'", "did you mean 'PickupLoc'?"]),
        (["environments.0.split=trian"], ["no split 'trian'", "did you mean 'train'?"]),
        (["environments.0.token_variable=NO_SUCH_TOKEN"], ["NO_SUCH_TOKEN"]),
        (["engine.kind=vllm"], ["pip install 'agentgym-rl[vllm]'"]),
        (["model.chat_template=nowhere.jinja"], ["nowhere.jinja", "chatml"]),
        (["model={path='/nowhere/model'}"], ["/nowhere/model", "config.json is missing"]),
        (["model={path='owner/model'}"], ["'owner/model'", "http://127.0.0.1:9 cannot be reached", "name a folder"]),
        (["model.scratch.hidden_size=400000"], ["1,281 billion parameters", "smaller hidden_size"]),
        (["run_dir=taken"], ["taken is not empty", "thesis.tex"]),
    ],
)
def test_mistakes_in_a_recipe_are_found_before_torch_is_imported(
    arguments: list[str], words: list[str], recipe: str, without_torch: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("")
    completed = command("train", recipe, *arguments, cwd=tmp_path, env=without_torch)
    assert (completed.returncode, completed.stdout) == (2, ""), completed.stderr
    assert_one_clear_line(completed.stderr, *words)
    assert not (tmp_path / "runs").exists()


def test_an_evaluation_imports_torch_only_for_models(without_torch: dict[str, str], tmp_path: Path) -> None:
    for arguments, words in (
        (("--agent", "some/model", "--env", "babyia"), ["did you mean 'babyai'?"]),
        (("--agent", "some/model", "--env", "keydoor"), ["'some/model' is neither a run", "cannot be reached"]),
    ):
        completed = command("eval", *arguments, cwd=tmp_path, env=without_torch)
        assert completed.returncode == 2, completed.stderr
        assert_one_clear_line(completed.stderr, *words)
    assert not (tmp_path / "evals").exists()
    completed = command(
        "eval", "--agent", "random", "--env", "keydoor", "--limit", "2", cwd=tmp_path, env=without_torch
    )
    assert completed.returncode == 0, completed.stderr


def test_a_run_whose_model_cannot_be_loaded_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / ".gitkeep").touch()
    (tmp_path / "recipe.toml").write_text(f"model.path = '{tmp_path / 'model'}'\n[[environments]]\nname = 'keydoor'")
    for folder in (tmp_path / "new" / "run", tmp_path / "kept"):
        code, output = run_forked(tmp_path, "train", str(tmp_path / "recipe.toml"), f"run_dir={folder}")
        assert code == 2, output
        assert "cannot be loaded" in output
    assert not (tmp_path / "new").exists()
    assert os.listdir(tmp_path / "kept") == [".gitkeep"]


def test_a_closed_pipe_does_not_stop_an_evaluation(tmp_path: Path) -> None:
    arguments = ("eval", "--agent", "random", "--env", "keydoor", "--limit", "20", "--out", str(tmp_path / "out"))
    with subprocess.Popen([COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()  # as `head` does after its last line
        assert process.stderr is not None
        assert_one_clear_line(process.stderr.read(), "the output is no longer read")
    assert process.returncode == 0
    assert json.loads((tmp_path / "out" / "eval.json").read_text())["state"] == "finished"


def test_the_package_runs_as_a_module() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "agentgym_rl", "play", "chess"], capture_output=True, text=True, timeout=60, check=False
    )
    assert completed.returncode == 2
    assert_one_clear_line(completed.stderr, "chess")


def test_a_missing_or_invalid_recipe_is_refused(tmp_path: Path) -> None:
    completed = command("train", str(tmp_path / "nowhere.toml"))
    assert completed.returncode == 2
    assert_one_clear_line(completed.stderr, "no such file")
    (tmp_path / "broken.toml").write_text("name = ")
    completed = command("train", str(tmp_path / "broken.toml"))
    assert completed.returncode == 2
    assert_one_clear_line(completed.stderr, "not valid TOML")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["environments.0.name=chess"], ["unknown environment 'chess'", "babyai", "textcraft"]),
        (["environments.0.subsets=['Chess']"], ["no subset 'Chess'", "GoToLocalS8N7"]),
        (["environments.0.eval_split=exam"], ["no split 'exam'"]),
        (["model={path='/nowhere/model'}"], ["/nowhere/model", "config.json is missing"]),
    ],
)
def test_mistakes_found_while_a_run_is_built_leave_no_folder(
    recipe: str, overrides: list[str], words: list[str], tmp_path: Path
) -> None:
    code, output = run_forked(tmp_path, "train", recipe, f"run_dir={tmp_path / 'run'}", *overrides)
    assert code == 2
    assert_one_clear_line(output, *words)
    assert not (tmp_path / "run").exists()


def test_a_run_directory_in_use_is_refused(run: Path, recipe: str, tmp_path: Path) -> None:
    code, output = run_forked(tmp_path, "train", recipe, f"run_dir={run}")
    assert code == 2
    assert_one_clear_line(output, "already holds a run", "--resume")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    code, output = run_forked(tmp_path, "train", recipe, f"run_dir={tmp_path / 'full'}")
    assert code == 2
    assert_one_clear_line(output, "not empty", "thesis.tex")


def test_an_unreachable_server_is_one_line_and_exit_code_1(recipe: str, tmp_path: Path) -> None:
    url = "environments.0.url=http://127.0.0.1:9"
    code, output = run_forked(tmp_path, "train", recipe, f"run_dir={tmp_path / 'run'}", url)
    assert code == 1
    assert_one_clear_line(output, "127.0.0.1:9")


def test_an_unknown_environment_and_an_item_out_of_range_are_refused() -> None:
    completed = command("play", "chess", "--oracle")
    assert completed.returncode == 2
    assert_one_clear_line(completed.stderr, "unknown environment 'chess'", "textcraft")
    completed = command("play", "textcraft", "--oracle", "--item", "99999")
    assert completed.returncode == 2
    assert_one_clear_line(completed.stderr, "no item 99999", "train 0-")
    completed = command("serve", "chess", "--port", "0")
    assert completed.returncode == 2
    assert_one_clear_line(completed.stderr, "unknown environment 'chess'")


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        completed = command("serve", "textcraft", "--port", str(port))
    assert completed.returncode == 2
    assert_one_clear_line(completed.stderr, f"port {port}", "in use")


def test_serve_takes_a_step_timeout() -> None:
    completed = command("serve", "textcraft", "--port", "0", "--step-timeout", "0")
    assert completed.returncode == 2
    assert "step-timeout" in completed.stderr
    with served("keydoor", "--step-timeout", "300") as (url,):
        assert httpx.get(f"{url}/health", timeout=60).json()["step_timeout_s"] == 300


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[list[str]]:
    """Start `serve` on a free port and yield the addresses it prints once it is ready."""
    command_line = [COMMAND, "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = list(itertools.takewhile(lambda line: line != "ready\n", server.stdout))
        try:
            assert server.poll() is None, "the server ended before it was ready"
            yield [line.split()[-1] for line in lines]
        finally:
            server.terminate()


def test_serve_prints_its_addresses_and_when_it_is_ready() -> None:
    with served("keydoor", "textcraft") as urls:
        assert [url.rpartition("/")[2] for url in urls] == ["keydoor", "textcraft"]
        for url in urls:
            assert httpx.get(f"{url}/info", timeout=60).json()["name"] in url


def test_a_public_address_needs_a_token() -> None:
    completed = command("serve", "textcraft", "--host", "0.0.0.0", "--port", "0")
    assert completed.returncode == 2
    assert_one_clear_line(completed.stderr, "token")


def test_version_is_printed() -> None:
    assert command("--version").stdout == f"agentgym-rl {__version__}\n"


def test_recipes_are_listed_printed_and_copied(tmp_path: Path) -> None:
    lines = command("recipes", cwd=tmp_path).stdout.splitlines()
    assert lines[0].split(maxsplit=1) == ["quickstart", "An agent learns from scratch on two CPU cores"]
    assert 'name = "textcraft-grpo"' in command("recipes", "textcraft/grpo", cwd=tmp_path).stdout
    completed = command("recipes", "textcraft/grpo", "--copy", "mine", cwd=tmp_path)
    assert completed.stdout == f"wrote {Path('mine') / 'grpo.toml'}\n"
    for arguments, words in (
        (["textcraft/grpo", "--copy", "mine"], ["exists already"]),
        (["textcraft/gpro"], ["did you mean textcraft/grpo?"]),
        (["--copy", "mine"], ["needs the name of a recipe"]),
        (["textcraft/grpo", "--copy", "mine/grpo.toml"], ["is a file: --copy needs a folder"]),
    ):
        completed = command("recipes", *arguments, cwd=tmp_path)
        assert completed.returncode == 2
        assert_one_clear_line(completed.stderr, *words)


def test_a_recipe_is_trained_and_diagnosed_by_name(tmp_path: Path) -> None:
    code, output = run_forked(tmp_path, "doctor", "keydoor/tiny-sft")
    assert code == 0, output
    code, output = run_forked(tmp_path, "train", "keydoor/tiny-sft", "threads=1", f"run_dir={tmp_path / 'run'}")
    assert code == 0, output
    assert (tmp_path / "run" / "summary.json").is_file()


def test_envs_cuts_no_name_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = command("envs").stdout
    assert "gymnasium:CliffWalking-v1 " in printed
    assert "…" not in printed


def test_envs_lists_the_environments() -> None:
    rows = {row["name"]: row for row in json.loads(command("envs", "--json").stdout)}
    assert rows["textcraft"]["subsets"] == ["depth1", "depth2", "depth3", "depth4"]
    assert rows["textcraft"]["splits"]["train"] == 374
    assert rows["babyai"]["installed"] is True
    assert {"GoTo", "Pickup", "ActionObjDoor", "FindObjS7", "OneRoomS20", "SynthLoc"} <= set(rows["babyai"]["subsets"])


def test_play_with_the_oracle() -> None:
    completed = command("play", "textcraft", "--oracle", "--item", "3")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert "Goal: craft" in completed.stdout
    assert "success  done" in completed.stdout


def test_play_with_typed_actions() -> None:
    completed = subprocess.run(
        [COMMAND, "play", "textcraft", "--item", "3", "--max-turns", "2"],
        input="?\n!\ninventory\ninventory\n",
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    assert completed.stdout.count("Inventory") == 1  # the episode ends before the second answer is shown
    assert "max_turns, 2 turns" in completed.stdout


@pytest.mark.long
def test_play_on_our_server() -> None:
    with served("textcraft", "babyai") as (url, _):
        completed = command("play", "textcraft", "--oracle", "--item", "3", "--url", url)
        assert (completed.returncode, completed.stderr) == (0, "")
        assert "Goal: craft" in completed.stdout
        assert "success  done" in completed.stdout
        completed = command("play", "textcraft", "--item", "99999", "--url", url)
    assert completed.returncode == 1
    assert_one_clear_line(completed.stderr, "textcraft, item 99999 cannot be played", "99999")
    completed = command("play", "textcraft", "--url", url, "--token-variable", "NO_SUCH_VARIABLE")
    assert completed.returncode == 2
    assert_one_clear_line(completed.stderr, "NO_SUCH_VARIABLE")


def test_play_continues_if_the_server_has_no_oracle() -> None:
    """Play over AgentGym's own protocol, which has no oracle."""
    with served("textcraft") as (url,):
        completed = subprocess.run(
            [COMMAND, "play", "textcraft", "--item", "3", "--max-turns", "1", "--url", f"agentgym+{url}"],
            input="!\ninventory\n",
            capture_output=True,
            text=True,
            timeout=280,
            check=True,
        )
    assert "AgentGym servers have no oracle" in completed.stdout
    assert "max_turns, 1 turns" in completed.stdout


def test_show_prints_episodes(run: Path, tmp_path: Path) -> None:
    completed = command("show", str(run), "--step", "1", "-n", "2")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout.count("babyai/") == 2
    assert "2 of the episodes in" in completed.stdout
    completed = command("show", str(run), "--held-out", "-n", "1")
    assert completed.returncode == 0
    assert "trajectories/eval_" in completed.stdout.replace("\n", "")
    completed = command("show", str(run), "--step", "77")
    assert completed.returncode == 2
    assert_one_clear_line(completed.stderr, "no training episodes of step 77")
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n')
    completed = command("show", str(tmp_path / "rows.jsonl"))
    assert completed.returncode == 2
    assert_one_clear_line(completed.stderr, "rows.jsonl line 1 is not a trajectory")
    completed = command("doctor", str(tmp_path / "rows.jsonl"))
    assert completed.returncode == 2
    assert_one_clear_line(completed.stderr, "rows.jsonl is no file of metrics")
    completed = command("show", str(tmp_path))
    assert completed.returncode == 2
    assert_one_clear_line(completed.stderr, "no training episodes")


def test_export_writes_a_folder_that_transformers_loads(run: Path, tmp_path: Path) -> None:
    code, output = run_forked(tmp_path, "export", str(run), str(tmp_path / "model"))
    assert (code, output) == (0, f"wrote {tmp_path / 'model'}\n")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.hidden_size == 32
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer.encode("turn left")) == "turn left"
    for arguments, words in (
        ([str(run), str(tmp_path / "model")], ["exists already"]),
        ([str(run), str(tmp_path / "other"), "--step", "9"], ["no checkpoint of step 9", "step_000002"]),
        ([str(tmp_path), str(tmp_path / "other")], ["no checkpoint", "there is none"]),
    ):
        code, output = run_forked(tmp_path, "export", *arguments)
        assert code == 2
        assert_one_clear_line(output, *words)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_loads_no_heavy_package(arguments: list[str]) -> None:
    """Check the loaded modules: torch alone takes two seconds."""
    program = (
        "import sys; from agentgym_rl.cli import app\n"
        f"try: app({arguments!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'fastapi', 'numpy', 'minigrid'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "recipe" in completed.stdout.lower()
    assert completed.stdout.rstrip().endswith("LOADED []")


def test_the_command_alone_shows_the_help() -> None:
    completed = command()
    for name in ("train", "recipes", "envs", "serve", "play", "show", "export"):
        assert name in completed.stdout + completed.stderr
