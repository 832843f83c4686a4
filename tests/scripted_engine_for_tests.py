"""An engine that replies from a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentgym_rl.errors import EngineError
from agentgym_rl.types import Completion, Sampling


def scripted_logprob(token_id: int) -> float:
    """Return a scripted engine's log-probability of a token. It is exact in binary and differs between most tokens, so
    that a test notices one attached to the wrong token."""
    return -(1 + token_id % 61) / 64


class ScriptedEngine:
    """Gives every session the same replies in order: token ids, or text if `encode` is given."""

    def __init__(self, replies: Sequence[list[int] | str], encode: Callable[[str], list[int]] | None = None) -> None:
        self.version = 0
        self.prompts: list[list[int]] = []
        """Every received prompt, in order."""
        self.samplings: list[Sampling] = []
        self.sessions: dict[str, int] = {}
        """Number of replies to each session that is not released."""
        self._replies = [self._ids(reply, encode) for reply in replies]

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        turn = self.sessions.get(session, 0)
        self.sessions[session] = turn + 1
        if turn >= len(self._replies):
            raise EngineError(f"the script has {len(self._replies)} replies, session {session} asks for one more")
        reply = self._replies[turn]
        token_ids = reply[: sampling.max_new_tokens]
        return Completion(
            token_ids=list(token_ids),
            logprobs=[scripted_logprob(token) for token in token_ids],
            finish="stop" if len(token_ids) == len(reply) else "length",
            version=self.version,
        )

    async def release(self, session: str) -> None:
        self.sessions.pop(session, None)

    async def update_weights(self, source: Any, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        self.sessions.clear()

    @staticmethod
    def _ids(reply: list[int] | str, encode: Callable[[str], list[int]] | None) -> list[int]:
        if not isinstance(reply, str):
            return list(reply)
        if encode is None:
            raise EngineError(f"a scripted reply as text needs encode=renderer.reply_ids, got only {reply!r}")
        return list(encode(reply))
