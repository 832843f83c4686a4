"""A judge on loopback that speaks the OpenAI chat protocol and pays for one word: its verdicts depend on texts only."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from zlib import crc32

from chat_for_tests import ChatServer, chat_server

TOKENS_PER_ANSWER = 110


class JudgeServer(ChatServer):
    """Scores a reply 10 if it equals `wanted`, else 0; an episode by the share of such replies."""

    def __init__(self, wanted: str) -> None:
        super().__init__()
        self.wanted = wanted
        self.unreadable = 0
        """Answers without a score that are still to be given."""
        self.silent_share = 0.0
        """Share of questions that never get a score. Which ones depends on their text alone."""
        self.asked: list[dict[str, Any]] = []

    def _reply(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        self.asked.append(body)
        system, question = body["messages"][0]["content"], body["messages"][1]["content"]
        episodes = [self._scores(text) for text in re.findall(r"<episode.*?</episode>", question, flags=re.DOTALL)]
        means = [sum(scores) / len(scores) for scores in episodes]
        if self.unreadable:
            self.unreadable -= 1
            text = "I cannot say."
        elif crc32(question.encode()) < self.silent_share * 2**32:
            text = "I shall never say."
        elif "`Ranking:" in system:
            order = sorted(range(len(means)), key=lambda i: -means[i])
            text = f"Ranking: {', '.join(str(i + 1) for i in order)}"
        elif "`Scores:" in system:
            text = f"Scores: {', '.join(f'{score:g}' for score in episodes[0])}"
        else:
            text = f"The word is {self.wanted}.\n**Score:** {means[0]:.4g}/10"
        reply = super()._reply(body, fault)
        reply["choices"][0]["message"]["content"] = text
        return reply

    def _scores(self, episode: str) -> list[float]:
        replies = re.findall(r"^\[reply \d+\] (.*)$", episode, flags=re.MULTILINE)
        return [10.0 * (reply == self.wanted) for reply in replies]


@contextlib.contextmanager
def judge_server(wanted: str) -> Iterator[JudgeServer]:
    judge = JudgeServer(wanted)
    with chat_server(judge):
        yield judge
