"""The whole algorithm on one page: multi-turn GRPO with a growing horizon, with torch, transformers and a game.

    python recipes/unrolled_grpo.py --steps 60

It shows what the library does, but is slower (no cache, synchronous turns) and checks no errors.
A trajectory is a list of token ids, a mask of the sampled ones, and the reward of the episode.
"""

import argparse
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from agentgym_rl.environment.catalog import items
from agentgym_rl.environment.envs.babyai import BabyAI
from agentgym_rl.training.scratch import build_model, build_tokenizer
from agentgym_rl.training.settings import ScratchSettings

LEVELS = ("GoToRedBallGrey", "GoToRedBlueBall")
STAGES = (1, 2, 4)
"""Turns per episode in each stage. A stage lasts a third of the steps."""


@dataclass
class Episode:
    env: BabyAI
    observation: str
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False

    def add(self, ids: list[int], sampled: bool) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)


def encode_observation(tokenizer: PreTrainedTokenizerFast, observation: str) -> list[int]:
    """Return the tokens of an observation and of the prompt for the reply."""
    text = f"<|im_start|>user {observation}<|im_end|><|im_start|>assistant "
    return tokenizer.encode(text, add_special_tokens=False)


def random_play(rng: random.Random, level: str) -> list[tuple[str, str]]:
    """Return (observation, action) pairs of up to three random turns. They show the grammar and no skill."""
    env, turns = BabyAI(), []
    observation = env.reset(rng.choice(items(BabyAI, "train", level)))
    for _ in range(3):
        action = rng.choice(env.actions())
        turns.append((observation, action))
        step = env.step(action)
        observation = step.observation
        if step.done:
            break
    return turns


def logprobs(model: LlamaForCausalLM, episodes: list[Episode]) -> tuple[Tensor, Tensor]:
    """Return the log-probability of every sampled token, flat, and the episode of each.

    Padding is on the right and attention is causal, so no mask is needed. Observations are skipped.
    """
    longest = max(len(e.ids) for e in episodes)
    ids = torch.tensor([e.ids + [0] * (longest - len(e.ids)) for e in episodes])
    sampled = torch.tensor([e.sampled + [False] * (longest - len(e.ids)) for e in episodes])
    rows, columns = sampled.nonzero(as_tuple=True)
    hidden = model.model(ids).last_hidden_state[rows, columns - 1]
    return model.lm_head(hidden).log_softmax(-1).gather(-1, ids[rows, columns, None]).squeeze(-1), rows


@torch.no_grad()
def sample_replies(model: LlamaForCausalLM, episodes: list[Episode], end: int, max_tokens: int = 8) -> list[list[int]]:
    """Sample one reply per episode, token by token, for all episodes together."""
    replies: list[list[int]] = [[] for _ in episodes]
    for _ in range(max_tokens):
        unfinished = [i for i, r in enumerate(replies) if not r or r[-1] != end]
        if not unfinished:
            break
        contexts = [episodes[i].ids + replies[i] for i in unfinished]
        longest = max(map(len, contexts))
        hidden = model.model(torch.tensor([c + [0] * (longest - len(c)) for c in contexts])).last_hidden_state
        last = hidden[torch.arange(len(unfinished)), torch.tensor([len(c) - 1 for c in contexts])]
        tokens = torch.multinomial(model.lm_head(last).softmax(-1), 1).squeeze(-1).tolist()
        for i, token in zip(unfinished, tokens, strict=True):
            replies[i].append(token)
    return replies


def play(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, numbers: list[int], max_turns: int
) -> list[Episode]:
    """Play the given items and return the episodes. Sampled ids are kept and never tokenised again."""
    episodes = [Episode(env := BabyAI(), env.reset(item)) for item in numbers]
    for _ in range(max_turns):
        active = [e for e in episodes if not e.done]
        for episode in active:
            episode.add(encode_observation(tokenizer, episode.observation), sampled=False)
        for episode, ids in zip(active, sample_replies(model, active, tokenizer.eos_token_id), strict=True):
            episode.add(ids, sampled=True)
            step = episode.env.step(tokenizer.decode(ids, skip_special_tokens=True))
            episode.reward += step.reward
            episode.observation, episode.done = step.observation, step.done
    return episodes


def warm_start(updates: int, rng: random.Random) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return a small model that imitates random play, and its tokenizer."""
    demonstrations = [random_play(rng, rng.choice(LEVELS)) for _ in range(8 * updates)]
    tokenizer = build_tokenizer(text for turns in demonstrations for turn in turns for text in turn)
    model = build_model(ScratchSettings(num_layers=2), tokenizer, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(updates):
        batch = []
        for turns in rng.choices(demonstrations, k=8):
            episode = Episode(BabyAI(), "")
            for observation, action in turns:
                episode.add(encode_observation(tokenizer, observation), sampled=bool(episode.ids))
                episode.add([*tokenizer.encode(action), tokenizer.eos_token_id], sampled=True)
            batch.append(episode)
        loss = -logprobs(model, batch)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-updates", type=int, default=400)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(0)
    rng = random.Random(0)
    model, tokenizer = warm_start(args.warm_updates, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        max_turns = STAGES[step * len(STAGES) // args.steps]
        tasks = [rng.choice(items(BabyAI, "train", rng.choice(LEVELS))) for _ in range(args.groups)]
        episodes = play(model, tokenizer, [t for t in tasks for _ in range(args.group_size)], max_turns)
        rewards = torch.tensor([e.reward for e in episodes]).view(args.groups, args.group_size)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True, correction=0) + 1e-6)
        log_probs, rows = logprobs(model, episodes)
        # One update per batch: the ratio to the sampling policy is 1, so no clipping is needed.
        loss = -(advantages.flatten()[rows] * log_probs).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step + 1:3d}  horizon {max_turns}  success {rewards.mean():.2f}", flush=True)


if __name__ == "__main__":
    main()
