"""Distillation from a teacher behind an API: it scores the agent's tokens before the learner learns from them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from agentgym_rl.agent.engines.scoring import ScoringClient
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.errors import ConfigError
from agentgym_rl.training.batch import Batch
from agentgym_rl.training.rl import Learner
from agentgym_rl.training.settings import DistillSettings
from agentgym_rl.types import Sample

CHECKED_TOKENS = 1024
"""Ids of one request of the comparison of tokenizers."""


class Taught:
    """A learner whose samples get the teacher's log-probabilities from an API."""

    def __init__(self, learner: Learner, settings: DistillSettings) -> None:
        self._learner, self._settings = learner, settings

    @property
    def kl_coef(self) -> float:
        return self._learner.kl_coef

    def score(self, samples: list[Sample], *, policy_only: bool = False) -> None:
        self._learner.score(samples, policy_only=policy_only)
        pending = [s for s in samples if not policy_only and not s.teacher_logprobs and any(s.loss_mask)]
        if not pending:
            return
        # In a thread: the learner may be called inside the event loop, which cannot wait for another coroutine.
        with ThreadPoolExecutor(1) as pool:
            scored = pool.submit(asyncio.run, score_all(self._settings, [s.token_ids for s in pending])).result()
        for sample, (logprobs, _) in zip(pending, scored, strict=True):
            sample.teacher_logprobs = [p for p, on in zip(logprobs, sample.loss_mask[1:], strict=True) if on]

    def learn(self, batch: Batch, seed: int) -> dict[str, float]:
        return self._learner.learn(batch, seed)


async def score_all(settings: DistillSettings, prompts: Sequence[list[int]]) -> list[tuple[list[float], list[str]]]:
    """Return what the server says about each prompt, `concurrency` at a time."""
    assert settings.url is not None
    client = ScoringClient(
        settings.url,
        settings.teacher,
        settings.api,
        api_key_variable=settings.api_key_variable,
        timeout_s=settings.timeout_s,
        retries=settings.retries,
        setting="rl.distill.url",
    )
    free = asyncio.Semaphore(settings.concurrency)

    async def score(token_ids: list[int]) -> tuple[list[float], list[str]]:
        async with free:
            return await client.score(token_ids)

    requests = [asyncio.ensure_future(score(token_ids)) for token_ids in prompts]
    try:
        return await asyncio.gather(*requests)
    finally:
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await client.close()


async def require_same_tokens(settings: DistillSettings, renderer: Renderer, max_context: int) -> None:
    """Raise ConfigError if an id of the agent's vocabulary is another token at the server.

    The server is asked about all ids. Tokens of a few bytes have no text of their own and are not compared.
    """
    length = min(max_context, CHECKED_TOKENS)
    ids = sorted(renderer.tokenizer.get_vocab().values())
    # The server says nothing about a prompt's first token, so each prompt starts with the last of the one before it.
    bounds = [*range(0, len(ids) - 1, length - 1), len(ids) - 1]
    prompts = [[ids[0], ids[0]], *(ids[start : end + 1] for start, end in pairwise(bounds))]
    scored = await score_all(settings, prompts)
    for prompt, (_, texts) in zip(prompts, scored, strict=True):
        for token, theirs in zip(prompt[1:], texts, strict=True):
            own = renderer.tokenizer.decode([token])
            if "\ufffd" not in own + theirs and _plain(own) != _plain(theirs):
                raise ConfigError(
                    f"rl.distill.teacher = {settings.teacher!r} at {settings.url} scores the ids that the agent "
                    f"samples, so it needs the agent's tokenizer: id {token} is {own!r} here and {theirs!r} there"
                )


def _plain(text: str) -> str:
    """Return the text without the spaces around it, which servers write in several ways."""
    return text.replace("\u2581", " ").strip()
