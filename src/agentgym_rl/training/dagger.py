"""DAgger: imitate an oracle in the states that the agent itself reaches. Ross et al. 2011 (arXiv 1011.0686).

An agent that imitates whole demonstrations never sees the states after its own errors. Here the agent plays and the
oracle says what it would have done in each state. run/rounds.py plays the rounds; this module builds the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from agentgym_rl.types import Message, Sample, Trajectory


def labelled(
    trajectory: Trajectory,
    reply_ids: Callable[[str], list[int]],
    parse: Callable[[str], str],
    correct: Callable[[str, str], tuple[list[int], int] | None] | None = None,
    num_untrained: Callable[[list[int]], int] | None = None,
    repeated: Sequence[int] = (),
) -> list[Sample]:
    """Return samples that imitate the oracle in every state of an episode.

    A reply whose action is the oracle's is imitated as the agent wrote it; one sample per segment has all of those.
    Every other state becomes a sample of its own: the conversation so far and the oracle's reply. `reply_ids` returns
    the ids of a written reply, `parse` its action, empty if it has none. `correct` takes the agent's reply and the
    oracle's and returns ids that start with an error and end in its correction, and how many of them are the error: one
    more sample. `num_untrained` returns how many tokens at the start of a reply the loss skips, such as a thought; by
    default none. `repeated` has, for each segment, how many tokens at its start earlier segments had; by default none.
    """

    def untrained(ids: list[int]) -> int:
        return 0 if num_untrained is None else num_untrained(ids)

    segments: list[Sample] = []
    corrections: list[Sample] = []
    for message in trajectory.messages:
        if message.segment == len(segments):
            parent, count = message.prefix or (0, 0)
            start = segments[parent].token_ids[:count] if count else []
            num_repeated = repeated[len(segments)] if repeated else 0
            left_out = [(0, num_repeated)] if num_repeated else []
            segments.append(Sample(start, [False] * count, trajectory_id=trajectory.id, left_out=left_out))
        agreed = segments[message.segment]
        token_ids = agreed.token_ids
        is_reply = message.role == "assistant"
        same = is_reply and bool(message.advice) and _agrees(message, parse)
        if is_reply and message.advice and not same:
            replies = [(reply_ids(message.advice), 0), correct(message.content, message.advice) if correct else None]
            for ids, wrong in filter(None, replies):
                skipped = max(wrong, untrained(ids))
                before = len(token_ids) + skipped
                if skipped == len(ids):
                    continue
                corrections.append(
                    Sample(
                        [*token_ids, *ids],
                        [False] * before + [True] * (len(ids) - skipped),
                        trajectory_id=f"{trajectory.id}/{len(corrections)}",
                        left_out=[(0, before)],
                    )
                )
        count = len(message.token_ids)
        skipped = untrained(message.token_ids) if same else count
        if is_reply and skipped:
            agreed.left_out.append((len(token_ids), skipped))
        token_ids += message.token_ids
        agreed.loss_mask += [False] * skipped + [True] * (count - skipped)
    return [sample for sample in segments if any(sample.loss_mask)] + corrections


def agreement(replies: Iterable[Message], parse: Callable[[str], str]) -> float:
    """Return the share of the agent's own replies whose action is the oracle's, where the oracle acts."""
    own = [m for m in replies if m.advice and m.logprobs is not None and parse(m.advice)]
    return sum(_agrees(m, parse) for m in own) / len(own) if own else 0.0


def _agrees(message: Message, parse: Callable[[str], str]) -> bool:
    action = parse(message.content)
    return bool(action) and action == parse(message.advice)
