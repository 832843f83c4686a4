"""Segments: the token sequences of an episode whose prompts do not always extend each other. Pure functions.

A prompt that starts with all tokens of a segment continues that segment. Any other prompt starts a new segment, with
the longest prefix that an earlier segment has. So every sampled token is trained on once, after exactly the tokens it
was sampled after, and a linear episode is one segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from agentgym_rl.types import Message


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded call of a model: the exact prompt and what was sampled."""

    prompt_ids: list[int]
    token_ids: list[int]
    """The sampled ids."""
    logprobs: list[float]
    version: int = 0
    """Version of the weights."""
    prompt: str = ""
    """Text that is new in this prompt, to show."""
    reply: str = ""
    """Text of the sampled ids, to show."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token, if they were updated during the reply; otherwise empty."""


@dataclass(frozen=True, slots=True)
class SegmentMatch:
    """Segment that a prompt continues, or the new one that it starts."""

    segment: int
    """Segment that it continues, or the number of the new one."""
    prefix: tuple[int, int] | None
    """(segment, count) of the earlier tokens that a new segment starts with; None if it continues a segment."""
    added_ids: list[int]
    """Tokens of the prompt that the segment did not have."""


class Stitcher:
    """Puts the recorded calls of an episode into segments, one after the other."""

    def __init__(self) -> None:
        self._tokens_by_segment: dict[int, list[int]] = {}

    def add(self, call: Call) -> list[Message]:
        """Return the messages of the next call, a prompt and a reply."""
        match = match_segment(self._tokens_by_segment, call.prompt_ids, len(self._tokens_by_segment))
        self._tokens_by_segment[match.segment] = [*call.prompt_ids, *call.token_ids]
        return [
            Message("user", call.prompt, match.added_ids, segment=match.segment, prefix=match.prefix),
            Message(
                "assistant",
                call.reply,
                list(call.token_ids),
                list(call.logprobs),
                call.version,
                list(call.versions),
                segment=match.segment,
            ),
        ]


def stitch(calls: Iterable[Call]) -> list[Message]:
    """Return the messages of recorded calls, a prompt and a reply each. `Trajectory.segments` are their sequences."""
    stitcher = Stitcher()
    return [message for call in calls for message in stitcher.add(call)]


def match_segment(
    tokens_by_segment: Mapping[int, Sequence[int]], prompt_ids: Sequence[int], new_segment: int
) -> SegmentMatch:
    """Return how a prompt continues segments, given their tokens by number. The longest match wins.

    >>> match_segment({0: [1, 2, 3]}, [1, 2, 3, 4], 1)
    SegmentMatch(segment=0, prefix=None, added_ids=[4])
    >>> match_segment({0: [1, 2, 3]}, [1, 2, 4], 1)
    SegmentMatch(segment=1, prefix=(0, 2), added_ids=[4])
    """
    shared = {segment: _common_length(tokens, prompt_ids) for segment, tokens in tokens_by_segment.items()}
    continued = [segment for segment, count in shared.items() if count == len(tokens_by_segment[segment])]
    if continued:
        segment = max(continued, key=lambda segment: shared[segment])
        return SegmentMatch(segment, None, list(prompt_ids[shared[segment] :]))
    if not shared:
        return SegmentMatch(new_segment, None, list(prompt_ids))
    parent = max(shared, key=lambda segment: shared[segment])
    return SegmentMatch(new_segment, (parent, shared[parent]), list(prompt_ids[shared[parent] :]))


def segment_tokens(messages: Sequence[Message], segment: int) -> list[int]:
    """Return all tokens of a segment, with those of the segments it branches off."""
    own: dict[int, list[int]] = {}
    prefixes: dict[int, tuple[int, int]] = {}
    for message in messages:
        if message.segment not in own:
            own[message.segment] = []
            prefixes[message.segment] = message.prefix or (0, 0)
        own[message.segment] += message.token_ids
    pieces: list[list[int]] = []
    needed: int | None = None
    while segment in own:
        parent, count = prefixes[segment]
        pieces.append(own[segment] if needed is None else own[segment][: max(0, needed - count)])
        needed = count if needed is None else min(needed, count)
        if not needed:
            break
        segment = parent
    return [token for piece in reversed(pieces) for token in piece]


def num_repeated(prompt_ids: Sequence[int], new_ids: Sequence[int]) -> int:
    """Return how many tokens of a prompt repeat the conversation before its newest observation, `new_ids`.

    A prompt may render the observation in another way. Then only the end that both have is new.

    >>> num_repeated([1, 2, 3, 4], [3, 4])
    2
    """
    pairs = zip(reversed(prompt_ids), reversed(new_ids), strict=False)
    return len(prompt_ids) - sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def assign_segment(messages: Sequence[Message], message: Message, prompt_ids: list[int]) -> Message:
    """Return the message with the tokens that make `prompt_ids` of the last segment, or as the start of a new one."""
    last = messages[-1].segment
    match = match_segment({last: segment_tokens(messages, last)}, prompt_ids, 1 + max(m.segment for m in messages))
    prefix = match.prefix
    starts = {m.segment: m.prefix for m in messages if m.prefix is not None}
    while prefix is not None and prefix[0] in starts and prefix[1] <= starts[prefix[0]][1]:
        # The oldest segment with these tokens, so that chains of branches stay short.
        prefix = (starts[prefix[0]][0], prefix[1])
    return replace(message, token_ids=match.added_ids, segment=match.segment, prefix=prefix)


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low
