"""AgentGym's numbers of the questions of deep search: test questions first, set by set."""

from __future__ import annotations

from agentgym_rl.environment.envs.searchqa.datasets import Rows
from agentgym_rl.errors import ConfigError

COUNTS = {
    ("test", "nq"): 3610,
    ("test", "triviaqa"): 11313,
    ("test", "popqa"): 14267,
    ("test", "hotpotqa"): 7405,
    ("test", "2wikimultihopqa"): 12576,
    ("test", "musique"): 2417,
    ("test", "bamboogle"): 125,
    ("train", "nq"): 79168,
    ("train", "hotpotqa"): 90447,
}
"""Questions of each set, in the order in which AgentGym numbers them."""


def is_published(rows: Rows) -> bool:
    """Whether files hold AgentGym's questions, going by how many there are of each set."""
    return {group: len(places) for group, places in rows.items()} == COUNTS


def locate(number: int) -> tuple[str, str, int]:
    """Return the split, the question set and the place in it of AgentGym's `searchqa_NUMBER`."""
    start = 0
    for (split, dataset), count in COUNTS.items():
        if start <= number < start + count:
            return split, dataset, number - start
        start += count
    raise ConfigError(f"AgentGym's searchqa has items 0 to {sum(COUNTS.values()) - 1}, got {number}")
