"""Metrics of a step's episodes, on cases small enough to count by hand."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from training_for_tests import group, trajectory

from agentgym_rl.training.metrics import DEPENDENCE_GROUPS, episode_metrics, input_dependence, surprise
from agentgym_rl.types import Group, Message, StopReason, Task, Trajectory


def episode(env: str, replies: list[str], stop: StopReason, reward: float = 0.0, valid: bool = True) -> Trajectory:
    messages = []
    for reply in replies:
        messages += [Message("user", "o", [1, 2]), Message("assistant", reply, [3] * len(reply), [-1.0] * len(reply))]
    rewards = [0.0] * (len(replies) - 1) + [reward]
    return Trajectory("t", Task(env, 0), messages, rewards, [{"valid": valid} for _ in replies], stop)


EPISODES = [
    episode("a", ["x", "x", "yy"], StopReason.DONE, 1.0),
    episode("a", ["x", "z"], StopReason.MAX_TURNS, valid=False),
    episode("b", ["xxxx"], StopReason.LENGTH),
    episode("b", ["x"], StopReason.MAX_CONTEXT),
    episode("b", ["x"], StopReason.ERROR, 100.0),
]


def test_means_over_usable_episodes() -> None:
    metrics = episode_metrics([Group(Task("a", 0), EPISODES[:2]), Group(Task("b", 0), EPISODES[2:])])
    expected = {
        "episodes/usable": 4,
        "episodes/error": 1,
        "episodes/timeout": 0,
        "reward/mean": 1 / 4,
        "success/mean": 1 / 4,
        "turns/mean": (3 + 2 + 1 + 1) / 4,
        "turns/median": 1.5,
        "turns/max": 3,
        "truncated/rate": 3 / 4,
        "truncated/horizon_rate": 1 / 4,
        "truncated/length_rate": 1 / 4,
        "truncated/context_rate": 1 / 4,
        "actions/invalid_rate": 2 / 7,
        "actions/repeated_rate": 1 / 3,
        "actions/alternating_rate": 0.0,
        "tokens/per_reply": (1 + 1 + 2 + 1 + 1 + 4 + 1) / 7,
        "tokens/per_episode": (10 + 6 + 6 + 3) / 4,
        "tokens/sampled": 11,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["a/success/mean"] == 0.5
    assert metrics["b/success/mean"] == 0.0
    assert metrics["b/truncated/rate"] == 1.0
    surprises = {f"surprise/{name}": 1.0 for name in ("mean", "turn_1", "turn_2", "turn_3")}
    assert {name: metrics[name] for name in surprises} == surprises
    # Rewards 1 and 0 in one group, equal ones in the other. Of three turns with two replies, one has equal ones.
    within_groups = {"reward/spread": 0.25, "replies/diversity": 2 / 3}
    assert {name: metrics[name] for name in within_groups} == pytest.approx(within_groups)
    assert set(metrics) == set(expected) | set(surprises) | set(within_groups) | {
        f"{env}/{name}" for env in "ab" for name in expected if not name.startswith("episodes/")
    }


def test_a_single_environment_has_no_separate_metrics() -> None:
    assert not any(name.startswith("toy/") for name in episode_metrics([group(1, [0.0, 1.0])]))


def test_a_step_of_failures_reports_counts_only() -> None:
    failed = Group(Task("toy", 1), [trajectory(1, stop=StopReason.ERROR)])
    assert episode_metrics([failed]) == {"episodes/usable": 0.0, "episodes/error": 1.0, "episodes/timeout": 0.0}
    failed.trajectories[0].error = "EpisodeTimeout: the episode was not over after 5 s"
    assert episode_metrics([failed])["episodes/timeout"] == 1.0


def test_an_episode_without_a_reply_is_counted_without_division_by_zero() -> None:
    unread = Trajectory("t", Task("a", 0), [Message("user", "long")], stop=StopReason.MAX_CONTEXT)
    metrics = episode_metrics([Group(unread.task, [unread])])
    assert (metrics["episodes/usable"], metrics["truncated/rate"], metrics["tokens/per_reply"]) == (1, 1, 0)


def test_alternating_replies_are_counted() -> None:
    rates = [
        episode_metrics([Group(Task("a", 0), [episode("a", list(replies), StopReason.DONE)])])[
            "actions/alternating_rate"
        ]
        for replies in ("xyxyxy", "xyxyzz", "xxxxxx", "xyx", "xyzxyz")
    ]
    assert rates == [1.0, 1 / 3, 0.0, 0.0, 0.0]


def test_surprise_is_the_samplers_entropy_estimate_of_each_turn() -> None:
    def sampled(turns: list[list[float]]) -> Trajectory:
        messages = [Message("system", "s")]
        for logprobs in turns:
            messages += [Message("user", "o"), Message("assistant", "a", [1] * len(logprobs), logprobs)]
        return Trajectory("t", Task("a", 0), messages, [0.0] * len(turns), [{} for _ in turns], StopReason.DONE)

    metrics = surprise([sampled([[-1.0, -2.0], [-4.0]]), sampled([[-6.0]])])
    assert metrics == {"surprise/mean": 13 / 4, "surprise/turn_1": 3.0, "surprise/turn_2": 4.0}
    long = surprise([sampled([[-float(turn)] for turn in range(1, 11)])])
    assert set(long) == {"surprise/mean", *(f"surprise/turn_{turn}" for turn in range(1, 9)), "surprise/turn_9+"}
    assert long["surprise/turn_9+"] == 9.5


def answered(
    reply: Callable[[int, int, random.Random], str],
    *,
    tasks: int = 16,
    group_size: int = 8,
    turns: int = 3,
    shown: Callable[[int, int], str] = lambda item, turn: f"task {item} turn {turn}",
) -> float | None:
    """Return the dependence in a batch in which task `item` shows `shown` and gets `reply(item, turn, rng)`."""
    rng = random.Random(0)
    played = []
    for item in range(tasks):
        for place in range(group_size):
            messages = [Message("system", "rules")]
            for turn in range(turns):
                messages += [Message("user", shown(item, turn)), Message("assistant", reply(item, turn, rng))]
            played.append(Trajectory(f"{item}-{place}", Task("a", item), messages, [0.0] * turns, [{}] * turns))
    return input_dependence(played)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (lambda item, turn, rng: "always the same", 0.0),
        (lambda item, turn, rng: f"always the same in turn {turn}", 0.0),
        (lambda item, turn, rng: "", 0.0),
        (lambda item, turn, rng: f"take {item}", 1.0),
        (lambda item, turn, rng: ("left", "right")[item % 2], 1.0),
        (lambda item, turn, rng: "left" if item else "right", 1.0),
    ],
    ids=["constant", "constant by turn", "empty", "function", "function into two", "function, nearly constant"],
)
def test_dependence_of_replies_that_are_certain(reply: Callable[..., str], expected: float) -> None:
    assert answered(reply) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(
    "reply",
    [
        lambda item, turn, rng: rng.choice(["left", "right"]),
        lambda item, turn, rng: rng.choices(["left", "right"], [0.97, 0.03])[0],
        lambda item, turn, rng: f"go to the {rng.choice(['red', 'blue', 'grey'])} {rng.choice(['ball', 'key'])}",
        lambda item, turn, rng: " ".join(rng.choice("abcdefghijklmnop") for _ in range(200)),
    ],
    ids=["two actions", "one rare", "phrases", "long"],
)
def test_random_replies_have_no_dependence(reply: Callable[..., str]) -> None:
    assert answered(reply) == pytest.approx(0.0, abs=0.04)


def test_few_different_replies_among_equal_ones_are_no_dependence() -> None:
    def odd(item: int, turn: int, rng: random.Random) -> str:
        return "down" if rng.random() < 0.01 else "up"

    assert answered(odd) == pytest.approx(0.0, abs=0.1)


def test_dependence_falls_with_the_share_of_replies_that_use_the_input() -> None:
    def looks(share: float) -> Callable[[int, int, random.Random], str]:
        return lambda item, turn, rng: f"take {item}" if rng.random() < share else "take 0"

    measured = [answered(looks(share)) for share in (1.0, 0.7, 0.4, 0.1)]
    assert measured == sorted(measured, reverse=True)
    assert measured[0] == pytest.approx(1.0, abs=0.01)
    assert measured[-1] < 0.1


def test_words_of_the_task_count_as_dependence_and_common_words_do_not() -> None:
    def thinks(about: Callable[[int, random.Random], str]) -> Callable[[int, int, random.Random], str]:
        return lambda item, turn, rng: (
            f"I should think step {rng.randrange(100)} by step {rng.randrange(100)} and then take {about(item, rng)}"
        )

    assert answered(thinks(lambda item, rng: str(rng.randrange(1000)))) == pytest.approx(0.0, abs=0.04)
    assert answered(thinks(lambda item, rng: f"the {item} of {item} and {item}")) > 0.25


def test_a_screen_shared_by_all_tasks_is_not_compared() -> None:
    constant = answered(lambda item, turn, rng: "crane", shown=lambda item, turn: "Guess!", turns=1)
    assert constant is None
    after = answered(
        lambda item, turn, rng: "crane" if turn == 0 else f"word {item}",
        shown=lambda item, turn: "Guess!" if turn == 0 else f"feedback {item}",
        turns=2,
    )
    assert after == pytest.approx(1.0, abs=0.05)


def test_dependence_needs_an_input_answered_twice() -> None:
    assert answered(lambda item, turn, rng: "x", group_size=1) is None
    assert answered(lambda item, turn, rng: "x", tasks=1) is None


def test_dependence_is_cheap() -> None:
    words = " ".join(f"w{i}" for i in range(1000))
    started = time.process_time()
    answered(lambda item, turn, rng: f"{words} {item}", tasks=32, group_size=8, turns=4)
    assert time.process_time() - started < 4.0


def test_one_of_several_environments_is_named_even_if_played_alone() -> None:
    metrics = episode_metrics([group(1, [0.0, 1.0])], ("toy", "other"))
    assert metrics["toy/success/mean"] == metrics["success/mean"]
    assert not any(name.startswith("other/") for name in metrics)


def test_sums_do_not_depend_on_hashes() -> None:
    """A run resumed in another process, with other string hashes, must log the same."""
    program = "from agentgym_rl.training.metrics import _words; print(list(_words('go to the red ball by the door')))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1


def test_dependence_compares_groups_of_all_environments_in_turn() -> None:
    def played(env: str, item: int, reply: str) -> Group:
        messages = [Message("user", f"task {item}"), Message("assistant", reply)]
        return Group(
            Task(env, item), [Trajectory(f"{item}-{i}", Task(env, item), messages, [0.0], [{}]) for i in range(4)]
        )

    dependent = [played("a", item, f"take {item}") for item in range(DEPENDENCE_GROUPS)]
    constant = [played("b", item, "always the same") for item in range(DEPENDENCE_GROUPS + 8)]
    metrics = episode_metrics(dependent + constant)
    half = DEPENDENCE_GROUPS // 2
    assert metrics["replies/dependence"] == episode_metrics(constant[:half] + dependent[:half])["replies/dependence"]
    assert metrics["b/replies/dependence"] == pytest.approx(0.0, abs=1e-9)
    assert 0.4 < metrics["replies/dependence"] < metrics["a/replies/dependence"]
