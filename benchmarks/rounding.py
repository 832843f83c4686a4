"""Measure how far two correct bf16 forward passes differ: the same rounding, with sums that differ in their last bits.

    python benchmarks/rounding.py PATH/TO/SmolLM2-135M-Instruct [--temperature 1.0]

An engine and a learner add the same products in a different order, so float32 sums differ by about 1e-7 before they
are rounded to bf16. The script emulates that on a CPU: a Llama's forward pass in float32, rounded to bf16 after every
module, with each matrix product multiplied by one plus a little noise. It samples replies in float32, scores them with
different noise of the same size, and prints the mean difference per token and the distance of each from float32.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = ("What is the capital of France?", "Write a poem about the sea.", "List ten animals.", "Why is snow white?")
NEW_TOKENS = 128
NOISES = (0.0, 1e-9, 1e-8, 1e-7, 3e-7)
"""Relative noise. Sums of a thousand float32 products in a different order differ by about the last two."""

Rounding = Callable[[Tensor], Tensor]


def as_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


class Llama:
    """Forward pass of a Llama with explicit rounding and noise."""

    def __init__(self, model: Any) -> None:
        self._model, self._config = model, model.config

    def logits(self, ids: Tensor, noise: float, *, float32_stream: bool, generator: torch.Generator) -> Tensor:
        def product(x: Tensor, linear: Any) -> Tensor:
            y = x @ linear.weight.t()
            return y * (1 + noise * torch.randn(y.shape, generator=generator)) if noise else y

        def norm(x: Tensor, module: Any) -> Tensor:
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
            return as_bf16(as_bf16(x * scale) * module.weight)

        def heads(x: Tensor) -> Tensor:
            return as_bf16(x).view(length, -1, width).transpose(0, 1)

        def rotate(x: Tensor) -> Tensor:
            half = width // 2
            return as_bf16(x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin)

        decoder, length = self._model.model, len(ids)
        width = self._config.hidden_size // self._config.num_attention_heads
        stream: Rounding = (lambda x: x) if float32_stream else as_bf16
        hidden = decoder.embed_tokens(ids)
        cos, sin = (as_bf16(x[0]) for x in decoder.rotary_emb(hidden[None], torch.arange(length)[None]))
        for layer in decoder.layers:
            attention, mlp = layer.self_attn, layer.mlp
            x = norm(hidden, layer.input_layernorm)
            projected = (attention.q_proj, attention.k_proj, attention.v_proj)
            query, key, value = (heads(product(x, linear)) for linear in projected)
            attended = scaled_dot_product_attention(
                rotate(query)[None], rotate(key)[None], value[None], is_causal=True, enable_gqa=True
            )[0]
            hidden = stream(hidden + product(as_bf16(attended.transpose(0, 1).reshape(length, -1)), attention.o_proj))
            x = norm(hidden, layer.post_attention_layernorm)
            gate, up = as_bf16(product(x, mlp.gate_proj)), as_bf16(product(x, mlp.up_proj))
            hidden = stream(hidden + product(as_bf16(as_bf16(silu(gate)) * up), mlp.down_proj))
        return norm(hidden, decoder.norm) @ self._model.lm_head.weight.t()


def scores(logits: Tensor, ids: Tensor, first: int, temperature: float) -> list[float]:
    """Return the log-probabilities of the tokens from `first` on."""
    logprobs = torch.log_softmax(logits[first - 1 : -1] / temperature, -1)
    return logprobs.gather(1, ids[first:, None])[:, 0].tolist()


@torch.no_grad()
def main(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16).float().eval()
    llama, temperature = Llama(model), options.temperature
    replies = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompt = torch.tensor([tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)])
        forced = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": tokenizer.eos_token_id}
        sampled = model.generate(prompt, do_sample=True, temperature=temperature, top_k=0, top_p=1.0, **forced)
        replies.append((prompt.shape[1], sampled[0]))

    def score_all(noise: float, seed: int, *, float32_stream: bool) -> list[float]:
        generator = torch.Generator().manual_seed(seed)
        logprobs: list[float] = []
        for first, ids in replies:
            logits = llama.logits(ids, noise, float32_stream=float32_stream, generator=generator)
            logprobs += scores(logits, ids, first, temperature)
        return logprobs

    def distance(first: list[float], second: list[float]) -> float:
        return statistics.fmean(abs(a - b) for a, b in zip(first, second, strict=True))

    exact = [p for first, ids in replies for p in scores(model(ids[None]).logits[0], ids, first, temperature)]
    print(f"{len(exact)} tokens at temperature {temperature:g}, mean log-probability {statistics.fmean(exact):.2f}")
    for noise, float32_stream in [*((noise, False) for noise in NOISES), (NOISES[-1], True)]:
        first_pass, second_pass = (score_all(noise, seed, float32_stream=float32_stream) for seed in (1, 2))
        stream = ", hidden states in float32" if float32_stream else ""
        differences = f"{distance(first_pass, second_pass):.4f} apart, {distance(first_pass, exact):.4f} from float32"
        print(f"relative noise {noise:5.0e}{stream}: {differences}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="Hugging Face folder of a Llama")
    parser.add_argument("--temperature", type=float, default=1.0)
    main(parser.parse_args())
