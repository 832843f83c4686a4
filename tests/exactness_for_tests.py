"""A check that the tokens of an episode are exactly those of the calls of its model."""

from __future__ import annotations

from agentgym_rl.types import Completion, Trajectory


def require_exact(trajectory: Trajectory, calls: list[tuple[list[int], Completion]]) -> None:
    """Check that each call's sampled ids are trained once, in a segment that has exactly its prompt before them.

    `calls` are (prompt, completion) in the order of sampling.
    """
    segments = trajectory.segments
    sampled = [m for m in trajectory.messages if m.logprobs is not None]
    assert len(sampled) == len(calls)
    spans: dict[int, int] = {}
    trained_ids: list[int] = []
    versions: list[int] = []
    for message, (prompt_ids, completion) in zip(sampled, calls, strict=True):
        segment, skipped = segments[message.segment], message.untrained
        start, end = len(prompt_ids), len(prompt_ids) + len(completion.token_ids)
        assert segment.token_ids[:end] == [*prompt_ids, *completion.token_ids]
        trained = [False] * skipped + [True] * (len(completion.token_ids) - skipped)
        assert segment.loss_mask[start:end] == trained
        assert segment.logprobs[start + skipped : end] == completion.logprobs[skipped:]
        spans[message.segment] = spans.get(message.segment, 0) + sum(trained)
        trained_ids += completion.token_ids[skipped:]
        versions += (completion.versions or [completion.version] * len(completion.token_ids))[skipped:]
    assert {i: sum(segment.loss_mask) for i, segment in enumerate(segments) if any(segment.loss_mask)} == spans
    rows: list[tuple[int, int, int]] = []
    for segment in segments:
        ids = [token for token, kept in zip(segment.token_ids, segment.loss_mask, strict=True) if kept]
        rows += zip(segment.order, ids, segment.versions, strict=True)
    assert sorted(rows) == list(zip(range(len(trained_ids)), trained_ids, versions, strict=True))
