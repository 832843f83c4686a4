"""What is said of a step's episodes, on cases small enough to count by hand."""

from __future__ import annotations

import pytest
from training_for_tests import group, trajectory

from agentgym_rl.training.metrics import episode_metrics
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
        "reward/mean": 1 / 4,
        "success/mean": 1 / 4,
        "turns/mean": (3 + 2 + 1 + 1) / 4,
        "truncated/rate": 3 / 4,
        "truncated/horizon_rate": 1 / 4,
        "truncated/length_rate": 1 / 4,
        "actions/invalid_rate": 2 / 7,
        "actions/repeated_rate": 1 / 3,
        "tokens/per_reply": (1 + 1 + 2 + 1 + 1 + 4 + 1) / 7,
        "tokens/per_episode": (10 + 6 + 6 + 3) / 4,
        "tokens/sampled": 11,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["a/success/mean"] == 0.5
    assert metrics["b/success/mean"] == 0.0
    assert metrics["b/truncated/rate"] == 1.0
    assert set(metrics) == set(expected) | {
        f"{env}/{name}" for env in "ab" for name in expected if not name.startswith("episodes/")
    }


def test_one_environment_has_no_metrics_of_its_own() -> None:
    assert not any(name.startswith("toy/") for name in episode_metrics([group(1, [0.0, 1.0])]))


def test_failures_only() -> None:
    failed = Group(Task("toy", 1), [trajectory(1, stop=StopReason.ERROR)])
    assert episode_metrics([failed]) == {"episodes/usable": 0.0, "episodes/error": 1.0}


def test_an_episode_without_a_reply_is_counted_and_divides_nothing_by_zero() -> None:
    unread = Trajectory("t", Task("a", 0), [Message("user", "long")], stop=StopReason.MAX_CONTEXT)
    metrics = episode_metrics([Group(unread.task, [unread])])
    assert (metrics["episodes/usable"], metrics["truncated/rate"], metrics["tokens/per_reply"]) == (1, 1, 0)
