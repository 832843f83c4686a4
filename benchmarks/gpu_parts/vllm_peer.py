"""Part rollout, vLLM: the same episodes through `LLM.generate`, all episodes a call, one call a turn.

Every reply has the same forced length, so that lock-step costs vLLM nothing and its offline batch is its fastest way.
Prefix caching keeps a turn's keys and values for the next, CUDA graphs and compilation are on, log-probabilities of
sampled tokens are returned, weights are dummies, no tokenizer is loaded. Runs where vLLM can be imported, which need
not be where the rest runs.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from loads import Load, load_of
from vllm import LLM, SamplingParams


def run(engine: Any, load: Load, vocabulary: int, sampling: Any, seed: int) -> float:
    """Seconds. `seed` sets these prompts apart from those of other runs, which are still in the cache."""
    prompts = [[(token + seed) % vocabulary for token in ids] for ids in load.prompts(vocabulary)]
    observations = load.observations(vocabulary)
    started = time.perf_counter()
    for turn in range(load.turns):
        found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        replies = [list(one.outputs[0].token_ids) for one in found]
        if any(len(reply) != load.new or one.outputs[0].logprobs is None for reply, one in zip(replies, found)):  # noqa: B905
            raise RuntimeError(f"replies of {load.new} tokens with log-probabilities were asked for, others came")
        prompts = [ids + reply + news for ids, reply, news in zip(prompts, replies, observations[turn])]  # noqa: B905
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--config", required=True, help="the model's config as JSON")
    parser.add_argument("--episodes", nargs="+", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    loads = [load_of(episodes, tiny=options.model == "tiny") for episodes in options.episodes]
    started = time.perf_counter()
    config = json.loads(options.config)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        engine = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=options.dtype,
            enable_prefix_caching=True,
            max_num_seqs=max(options.episodes),
            max_model_len=max(load.context for load in loads) + 16,
            enforce_eager=options.eager,
            generation_config="vllm",
        )
    ready_s = time.perf_counter() - started
    for load in loads:
        sampling = SamplingParams(
            temperature=1.0, max_tokens=load.new, min_tokens=load.new, ignore_eos=True, logprobs=0, detokenize=False
        )
        run(engine, replace(load, turns=1), config["vocab_size"], sampling, seed=1)  # compiles what it has not yet
        seconds = [run(engine, load, config["vocab_size"], sampling, seed) for seed in (2, 3)]
        line = {
            "part": "rollout",
            "case": f"{options.model} x {load.episodes}",
            "who": "vllm",
            "tokens_per_s": load.new_tokens / min(seconds),
            "seconds": min(seconds),
            "all_seconds": seconds,
            "start_seconds": ready_s,
        }
        with options.lines.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"vLLM, {line['case']}: {line['tokens_per_s']:.0f} tokens/s, started in {ready_s:.0f} s", flush=True)
    os._exit(0)  # all is written, and taking its processes down in order can last minutes


if __name__ == "__main__":
    main()
