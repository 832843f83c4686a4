"""Part step, TRL: GRPOTrainer on the same model, tasks, prompts, limits and number of episodes.

The rollout is TRL's documented hook for environments, `rollout_func`: all episodes in lock-step, one generation per
turn over the unfinished ones, by TRL's own generation (transformers' generate, or vLLM in the same process). Token ids
are kept and environment tokens masked. Environments run in this process without a server. One update per step over all
episodes, no reference model, bf16 weights, no activation checkpointing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pyarrow
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.environment import catalog
from agentgym_rl.types import Message


class Episodes:
    """A `rollout_func` that plays every prompt's task to its end and measures the time."""

    def __init__(self, renderer: Renderer, instruction: str, turns: int, max_context: int) -> None:
        self._renderer, self._instruction, self._turns, self._max_context = renderer, instruction, turns, max_context
        self._make = catalog.load("textcraft")
        self.seconds: list[float] = []
        self.sampled: list[int] = []
        self.successes: list[float] = []
        self.turns_played: list[float] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        started = time.perf_counter()
        games = [self._make() for _ in prompts]
        firsts = [game.reset(int(prompt[0]["content"])) for game, prompt in zip(games, prompts, strict=True)]
        prompt_ids = [
            self._renderer.prompt([Message("system", self._instruction), Message("user", first)]) for first in firsts
        ]
        completions: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        rewards, turns = [0.0] * len(prompts), [0] * len(prompts)
        playing = list(range(len(prompts)))
        for turn in range(self._turns):
            contexts = [prompt_ids[i] + completions[i] for i in playing]
            # The step of TRL's own tool loop, for either backend.
            replies, reply_logprobs = trainer._generate_single_turn(contexts, None, {}, num_generations=1)
            unfinished = []
            for index, (i, reply) in enumerate(zip(playing, replies, strict=True)):
                completions[i] += reply
                masks[i] += [1] * len(reply)
                logprobs[i] += reply_logprobs[index] if reply_logprobs is not None else [0.0] * len(reply)
                turns[i] += 1
                if not reply or reply[-1] != self._renderer.end_of_turn:
                    continue
                answer = games[i].step(self._renderer.decode(reply).strip())
                rewards[i] += answer.reward
                observation_ids = self._renderer.follow_up(answer.observation)
                free_tokens = self._max_context - len(prompt_ids[i]) - len(completions[i]) - len(observation_ids)
                if answer.done or turn + 1 == self._turns or free_tokens < 1:
                    continue
                completions[i] += observation_ids
                masks[i] += [0] * len(observation_ids)
                logprobs[i] += [0.0] * len(observation_ids)
                unfinished.append(i)
            playing = unfinished
            if not playing:
                break
        self.seconds.append(time.perf_counter() - started)
        self.sampled.append(sum(map(sum, masks)))
        self.successes.append(sum(rewards) / len(rewards))
        self.turns_played.append(sum(turns) / len(turns))
        returned_logprobs = logprobs if trainer.use_vllm else None
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": returned_logprobs,
            "env_mask": masks,
            "game_reward": rewards,
        }


def reward(game_reward: list[float], **_: Any) -> list[float]:
    return game_reward


class Clock(TrainerCallback):
    """Start and end times of each step."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.ended: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begun.append(_now())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended.append(_now())


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--taught", type=Path, required=True, help="taught.json of step.py")
    parser.add_argument("--steps", type=int, default=4, help="steps; the first two are not counted")
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM in the same process")
    parser.add_argument("--batch", type=int, default=64, help="episodes per forward pass")
    options = parser.parse_args()
    settings = json.loads(options.taught.read_text())
    on_cuda = options.device == "cuda"
    episodes = settings["groups"] * settings["group_size"]
    batch = min(options.batch, episodes)
    tokenizer = AutoTokenizer.from_pretrained(settings["folder"])
    model = AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.bfloat16 if on_cuda else torch.float32)
    renderer = Renderer(tokenizer)
    play = Episodes(renderer, settings["instruction"], settings["turns"], settings["max_context"])
    game = catalog.class_of(catalog.load("textcraft"))
    items = [item for subset in settings["subsets"] for item in catalog.items(game, "train", subset)]
    rows = [{"prompt": [{"role": "user", "content": str(item)}]} for item in items]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=not on_cuda,
            bf16=on_cuda,
            max_steps=options.steps,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=episodes // batch,
            num_generations=settings["group_size"],
            max_completion_length=settings["max_new_tokens"],
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            beta=0.0,
            temperature=1.0,
            gradient_checkpointing=False,
            optim="adamw_torch_fused" if on_cuda else "adamw_torch",
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            shuffle_dataset=True,
            use_vllm=options.vllm,
            **(_vllm(settings) if options.vllm else {}),
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[reward],
            args=arguments,
            # An explicit fingerprint: computing one pickles modules, which fails in some installations.
            train_dataset=Dataset(pyarrow.Table.from_pylist(rows), fingerprint="textcraft"),
            processing_class=tokenizer,
            rollout_func=play,
            callbacks=[clock],
        )
        trainer.train()
    _write(options, play, clock, episodes)


def _vllm(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_max_model_length": settings["max_context"] + settings["max_new_tokens"],
    }


def _write(options: argparse.Namespace, play: Episodes, clock: Clock, episodes: int) -> None:
    first = min(2, options.steps - 1)
    # From the end of one step to the next, because TRL's work between steps counts too.
    ends = [clock.begun[0], *clock.ended]
    seconds = [after - before for before, after in pairwise(ends)]
    step_s = statistics.median(seconds[first:])
    rollout_s = statistics.median(play.seconds[first:])
    line = {
        "part": "step",
        "case": "textcraft",
        "who": "trl, vllm" if options.vllm else "trl",
        "episodes_per_s": episodes / step_s,
        "step_s": step_s,
        "rollout_s": rollout_s,
        "learn_s": step_s - rollout_s,
        "sampled_tokens": statistics.mean(play.sampled[first:]),
        "turns": statistics.mean(play.turns_played[first:]),
        "success": statistics.mean(play.successes[first:]),
        "all_seconds": seconds,
    }
    with options.lines.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(", ".join(f"{key} {value}" for key, value in line.items()), flush=True)


if __name__ == "__main__":
    main()
