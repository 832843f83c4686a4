"""A teacher on loopback that scores prompts of token ids like vLLM and like the completions API, with a real model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from chat_for_tests import ChatServer, chat_server

from agentgym_rl.config import ModelConfig
from agentgym_rl.run.load_model import load_frozen


class TeacherServer(ChatServer):
    """Scores the prompts that it is sent. Faults are those of `ChatServer`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.model, self.tokenizer = load_frozen(str(path), "teacher", ModelConfig(path=str(path), device="cpu"))
        self.asked: list[dict[str, Any]] = []
        self.app.post("/v1/completions")(self.answer)

    @torch.no_grad()
    def _reply(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        self.asked.append(body)
        ids = body["prompt"]
        table = self.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        logprobs = [None, *(table[i, token].item() for i, token in enumerate(ids[1:]))]
        texts = [self.tokenizer.decode([token]) for token in ids]
        choice: dict[str, Any] = {"text": "", "finish_reason": "length"}
        if "prompt_logprobs" in body:
            rows = list(zip(ids, logprobs, texts, strict=True))[1:]
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": logprob, "rank": 1, "decoded_token": text}} for token, logprob, text in rows
            ]
        if body.get("echo"):
            choice["logprobs"] = {"token_logprobs": [*logprobs, -0.5], "tokens": [*texts, "sampled"]}
        return {"choices": [choice]}


@contextlib.contextmanager
def teacher_server(path: Path) -> Iterator[TeacherServer]:
    teacher = TeacherServer(path)
    with chat_server(teacher):
        yield teacher
