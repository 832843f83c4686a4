"""An engine that says what it is told to, token by token: exact, instant, for tests and examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentgym_rl.errors import EngineError
from agentgym_rl.types import Completion, Sampling


def scripted_logprob(token_id: int) -> float:
    """The log-probability a scripted engine gives a token: exact in binary and different for most tokens, so that
    one attached to the wrong token is noticed."""
    return -(1 + token_id % 61) / 64


class ScriptedEngine:
    """Every session hears the same replies from the start: token ids, or text if `encode` is given."""

    def __init__(self, replies: Sequence[list[int] | str], encode: Callable[[str], list[int]] | None = None) -> None:
        self.version = 0
        self.prompts: list[list[int]] = []
        """Every prompt it was given, in order of arrival."""
        self.samplings: list[Sampling] = []
        self.sessions: dict[str, int] = {}
        """Replies heard by each session not yet released."""
        self._replies = [self._ids(reply, encode) for reply in replies]

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        turn = self.sessions.get(session, 0)
        self.sessions[session] = turn + 1
        if turn >= len(self._replies):
            raise EngineError(f"the script has {len(self._replies)} replies, session {session} asks for one more")
        whole = self._replies[turn]
        said = whole[: sampling.max_new_tokens]
        return Completion(
            token_ids=list(said),
            logprobs=[scripted_logprob(token) for token in said],
            finish="stop" if len(said) == len(whole) else "length",
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
            raise EngineError(f"a scripted reply in words needs encode=renderer.reply_ids, got only {reply!r}")
        return list(encode(reply))
