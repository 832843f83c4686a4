"""Part rollout, vLLM: the same episodes in three ways; the fastest counts.

vllm          `LLM.generate` with all episodes, one call per turn. All replies have the same forced length, so lock-step
              costs little, and an offline batch has the least overhead per request.
vllm, async   `AsyncLLM` with independent episodes, one request after the other, as most trainers use it.
vllm, async, seeded   the same with our training's defaults (engine.seeded): a seed per request and log-probabilities of
              the distribution that was sampled from.

Prefix caching keeps a turn's keys and values for the next, CUDA graphs and compilation are on, log-probabilities of
sampled tokens are returned, weights are dummies, no tokenizer is loaded. Only this process needs vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from loads import Load, load_of
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

Prompts = list[list[int]]


def in_lock_step(engine: Any, load: Load, prompts: Prompts, observations: list[Prompts], sampling: Any) -> None:
    for turn in range(load.turns):
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling(None), use_tqdm=False)
        replies = [_reply(output, load) for output in outputs]
        prompts = [ids + reply + seen for ids, reply, seen in zip(prompts, replies, observations[turn])]  # noqa: B905


async def independently(engine: Any, load: Load, prompts: Prompts, observations: list[Prompts], sampling: Any) -> None:
    async def episode(index: int, ids: list[int]) -> None:
        for turn in range(load.turns):
            output = None
            async for output in engine.generate(  # noqa: B007 - only the final output
                {"prompt_token_ids": ids},
                sampling(index * 100 + turn),
                request_id=f"{ids[0]}-{ids[-1]}-{index}-{turn}",
            ):
                pass
            ids = ids + _reply(output, load) + observations[turn][index]

    await asyncio.gather(*(episode(index, ids) for index, ids in enumerate(prompts)))


def _reply(output: Any, load: Load) -> list[int]:
    reply = output.outputs[0]
    if len(reply.token_ids) != load.new or reply.logprobs is None:
        raise RuntimeError(f"a reply must have {load.new} tokens with log-probabilities, got {len(reply.token_ids)}")
    return list(reply.token_ids)


def seconds_of(play: Callable[[Prompts, list[Prompts]], None], load: Load, vocabulary: int, seed: int) -> float:
    """Return the seconds of a run. `seed` makes its prompts differ from those of other runs in the cache."""
    prompts = [[(token + seed) % vocabulary for token in ids] for ids in load.prompts(vocabulary)]
    observations = load.observations(vocabulary)
    started = time.perf_counter()
    play(prompts, observations)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--config", required=True, help="the model's config as JSON")
    parser.add_argument("--episodes", nargs="+", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--asynchronous", action="store_true", help="play episodes independently")
    parser.add_argument("--seeded", action="store_true", help="with --asynchronous: our training's default")
    options = parser.parse_args()
    loads = [load_of(episodes, tiny=options.model == "tiny") for episodes in options.episodes]
    started = time.perf_counter()
    config = json.loads(options.config)
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        arguments: dict[str, Any] = {
            "model": folder,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": options.dtype,
            "enable_prefix_caching": True,
            "max_num_seqs": max(options.episodes),
            "max_model_len": max(load.context for load in loads) + 16,
            "enforce_eager": options.eager,
            "generation_config": "vllm",
        }
        if options.seeded:
            arguments["logprobs_mode"] = "processed_logprobs"
        if options.asynchronous:

            async def start() -> Any:
                return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, enable_log_requests=False))

            engine = loop.run_until_complete(start())
        else:
            engine = LLM(**arguments)
    ready_s = time.perf_counter() - started
    forced = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    for load in loads:

        def sampling(seed: int | None, load: Load = load) -> Any:
            return SamplingParams(
                **forced,
                max_tokens=load.new,
                min_tokens=load.new,
                output_kind=RequestOutputKind.FINAL_ONLY,
                seed=seed if options.seeded else None,
            )

        def play(prompts: Prompts, observations: list[Prompts], load: Load = load, sampling: Any = sampling) -> None:
            if options.asynchronous:
                loop.run_until_complete(independently(engine, load, prompts, observations, sampling))
            else:
                in_lock_step(engine, load, prompts, observations, sampling)

        once = replace(load, turns=1)  # compile before the measurement
        seconds_of(lambda prompts, observations: play(prompts, observations, once), once, config["vocab_size"], 1)  # noqa: B023
        seconds = [seconds_of(play, load, config["vocab_size"], seed) for seed in (2, 3)]
        line = {
            "part": "rollout",
            "case": f"{options.model} x {load.episodes}",
            "who": "vllm" + ", async" * options.asynchronous + ", seeded" * options.seeded,
            "tokens_per_s": load.new_tokens / min(seconds),
            "seconds": min(seconds),
            "all_seconds": seconds,
            "start_seconds": ready_s,
        }
        with options.lines.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{line['who']}, {line['case']}: {line['tokens_per_s']:.0f} tokens/s, ready in {ready_s:.0f} s", flush=True
        )
    os._exit(0)  # all is written, and an orderly shutdown can take minutes


if __name__ == "__main__":
    main()
