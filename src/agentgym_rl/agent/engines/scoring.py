"""A client for completion APIs that return the log-probabilities of a prompt: vLLM's, or those with `echo`."""

from __future__ import annotations

import math
from typing import Any, Literal

import httpx

from agentgym_rl.agent.engines.openai import ChatClient, Refused, Unreadable

Api = Literal["prompt_logprobs", "echo"]


class ScoringClient(ChatClient):
    """Asks a server how likely the tokens of a prompt are. Timeouts, retries and the key are those of `ChatClient`."""

    path = "/completions"

    def __init__(self, base_url: str, model: str, api: Api = "prompt_logprobs", **options: Any) -> None:
        super().__init__(base_url, model, **options)
        self._api: Api = api

    async def score(self, token_ids: list[int]) -> tuple[list[float], list[str]]:
        """Return (log-probabilities, texts) of every token but the first."""
        body: dict[str, Any] = {"model": self.model, "prompt": token_ids, "max_tokens": 1, "temperature": 1.0}
        # At least 1: some servers take 0 for false.
        body |= {"prompt_logprobs": 1} if self._api == "prompt_logprobs" else {"echo": True, "logprobs": 1}
        choice = await self._with_retries(body)
        try:
            pairs = (_vllm if self._api == "prompt_logprobs" else _echoed)(choice, token_ids)
            logprobs = [float(logprob) for logprob, _ in pairs]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise Refused(
                f"{self._url} must return the log-probability of each of the {len(token_ids)} ids of a prompt, as with "
                f"api = {self._api!r}, and did not ({type(error).__name__}: {error}): check rl.distill.api, and that "
                "the server allows it"
            ) from error
        if not all(math.isfinite(logprob) for logprob in logprobs):
            raise Refused(f"{self._url} returned a log-probability that is not finite: {min(logprobs)}")
        return logprobs, [str(text) for _, text in pairs]

    def _answer(self, response: httpx.Response) -> Any:
        try:
            return response.json()["choices"][0]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise Unreadable(f"not a completion ({type(error).__name__}): {response.text[:200]!r}") from error


def _vllm(choice: dict[str, Any], token_ids: list[int]) -> list[tuple[float, str]]:
    """Read `prompt_logprobs`: a dict by token id for every token but the first."""
    rows = choice["prompt_logprobs"]
    if len(rows) != len(token_ids):
        raise ValueError(f"got {len(rows)} positions")
    entries = [row[str(token)] for token, row in zip(token_ids[1:], rows[1:], strict=True)]
    return [(entry["logprob"], entry["decoded_token"]) for entry in entries]


def _echoed(choice: dict[str, Any], token_ids: list[int]) -> list[tuple[float, str]]:
    """Read `logprobs` of an echoed prompt, which a sampled token may follow."""
    logprobs, texts = choice["logprobs"]["token_logprobs"], choice["logprobs"]["tokens"]
    if len(logprobs) - len(token_ids) not in (0, 1) or len(texts) != len(logprobs):
        raise ValueError(f"got {len(logprobs)} log-probabilities of {len(texts)} tokens")
    return list(zip(logprobs, texts, strict=True))[1 : len(token_ids)]
