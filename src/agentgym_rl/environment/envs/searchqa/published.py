"""AgentGym's numbering of the deep-search questions: test questions first, set by set."""

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
"""Number of questions of each set, in AgentGym's order."""


def is_published(rows: Rows) -> bool:
    """Return whether the files hold AgentGym's questions, judged by the number of questions per set."""
    return {group: len(indices) for group, indices in rows.items()} == COUNTS


def locate(number: int) -> tuple[str, str, int]:
    """Return the split, the question set and the index in it of AgentGym's `searchqa_NUMBER`."""
    start = 0
    for (split, dataset), count in COUNTS.items():
        if start <= number < start + count:
            return split, dataset, number - start
        start += count
    raise ConfigError(f"AgentGym's searchqa has items 0 to {sum(COUNTS.values()) - 1}, got {number}")
