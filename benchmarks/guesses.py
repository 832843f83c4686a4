"""Measure how many tokens a decode step yields with prompt look-up, by replaying recorded episodes.

    python benchmarks/guesses.py results/qwen-babyai/eval-qwen-base-babyai.episodes.jsonl.xz --tokenizer QWEN

A guess is accepted if it is the token that was sampled in its place, so the recorded replies determine the number of
steps exactly, without a model. `matches` are the numbers of last tokens that are compared, longest first.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.types import Message

MATCHES = ((3, 2), (3, 2, 1), (6, 5, 4, 3, 2, 1))
WIDTHS = (2, 4, 8, 16)
"""Tokens of a row in one step: its last one and guesses."""


def read_episodes(path: Path, count: int) -> list[list[Message]]:
    """Return the messages of `count` episodes, chosen at random with a fixed seed."""
    data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    rows = [json.loads(line)["messages"] for line in data.splitlines()]
    chosen = random.Random(0).sample(rows, min(count, len(rows)))
    return [[Message(m["role"], m["content"]) for m in row] for row in chosen]


def tokens_of(messages: Sequence[Message], renderer: Renderer) -> tuple[list[int], list[range]]:
    """Return the tokens of an episode, and where its replies are."""
    first = next(i for i, message in enumerate(messages) if message.role == "assistant")
    ids, replies = renderer.prompt(list(messages[:first])), []
    for message in messages[first:]:
        if message.role == "assistant":
            reply = renderer.reply_ids(message.content)
            replies.append(range(len(ids), len(ids) + len(reply)))
            ids += reply
        else:
            ids += renderer.follow_up(message.content)
    return ids, replies


def step_sizes(ids: Sequence[int], replies: Sequence[range], matches: Sequence[int], width: int) -> Iterator[int]:
    """Yield the number of tokens of each step."""
    latest: dict[tuple[int, ...], int] = {}
    indexed = 0
    for reply in replies:
        known = reply.start
        while known < reply.stop:
            for end in range(indexed + 1, known):  # places before the last token
                for length in matches:
                    latest[tuple(ids[max(0, end - length) : end])] = end
            indexed = max(indexed, known - 1)
            places = (latest.get(tuple(ids[known - length : known])) for length in matches if length < known)
            place = next((place for place in places if place is not None), known)
            guesses = ids[place : min(place + width - 1, known)]
            size = 1
            for guess, token in zip(guesses, ids[known : reply.stop - 1], strict=False):
                if guess != token:
                    break
                size += 1
            yield size
            known += size


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("episodes", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--count", type=int, default=60)
    options = parser.parse_args()
    renderer = Renderer(AutoTokenizer.from_pretrained(options.tokenizer))
    sequences = [tokens_of(messages, renderer) for messages in read_episodes(options.episodes, options.count)]
    print("matches", *(f"{width:>2} tokens" for width in WIDTHS), sep="  ")
    for matches in MATCHES:
        cells = []
        for width in WIDTHS:
            sizes = [size for ids, replies in sequences for size in step_sizes(ids, replies, matches, width)]
            cells.append(f"{sum(sizes) / len(sizes):9.2f}")
        print(f"{matches[0]} to {matches[-1]} ", *cells, sep="  ")


if __name__ == "__main__":
    main()
