"""Random trajectories of different lengths and tiny models for tests of the training package."""

from __future__ import annotations

import copy
import math
import random
from functools import cache
from typing import Any

import torch
from envs_for_tests import Counting
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.training.batch import Batch, estimate, gather
from agentgym_rl.training.learner import Updater
from agentgym_rl.training.rl_learner import RLLearner
from agentgym_rl.training.scratch import build_model, build_tokenizer
from agentgym_rl.training.settings import OptimizerSettings, RLSettings, ScratchSettings, SFTSettings
from agentgym_rl.training.sft import SFT
from agentgym_rl.types import Group, Message, StopReason, Task, Trajectory

VOCABULARY = 23


def few(count: int) -> settings:
    """Return hypothesis settings with `count` examples and no deadline."""
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def trajectory(
    seed: int, *, turns: int | None = None, reward: float | None = None, stop: StopReason = StopReason.DONE
) -> Trajectory:
    """Return an episode of 1 to 4 turns with texts of random lengths and the reward on the last turn."""
    rng = random.Random(seed)
    turns = rng.randint(1, 4) if turns is None else turns
    messages = [Message("system", "s", [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 3))])]
    for _ in range(turns):
        observation = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))]
        reply = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))]
        messages.append(Message("user", "o", observation))
        messages.append(Message("assistant", "a", reply, [math.log(rng.uniform(0.05, 1.0)) for _ in reply], version=0))
    messages.append(Message("user", "never read"))
    rewards = [0.0] * turns
    rewards[-1] = float(rng.randint(0, 1)) if reward is None else reward
    infos: list[dict[str, Any]] = [{} for _ in range(turns)]
    return Trajectory(f"t{seed}", Task("toy", seed), messages, rewards, infos, stop, horizon=8)


def group(seed: int, rewards: list[float], **options: Any) -> Group:
    members = [trajectory(1000 * seed + i, reward=r, **options) for i, r in enumerate(rewards)]
    return Group(Task("toy", seed), members)


def varied_groups() -> list[Group]:
    """Return groups with rewards on any turn, repeated states, and every kind of ending.

    Their log-probabilities are close to those of tiny_model(1) at temperature 0.7.
    """
    sampler = tiny_model(1)
    played = [group(1, [0.0, 1.0, 0.5], turns=3), group(2, [1.0, 0.0]), group(3, [1.0, 1.0])]
    endings = [StopReason.DONE, StopReason.MAX_TURNS, StopReason.LENGTH, StopReason.MAX_CONTEXT]
    for i, t in enumerate(t for g in played for t in g.trajectories):
        rng = random.Random(i)
        t.stop = endings[i % 4]
        if t.task.item < 3000:  # the last group's rewards stay equal
            t.rewards = [r + round(rng.uniform(-0.5, 0.5), 2) for r in t.rewards]
        t.infos = [{"state_key": rng.choice("xyz")} for _ in t.rewards]
        if t.stop is StopReason.LENGTH:
            t.messages.pop()  # a reply that was cut gets no observation
        if t.stop is StopReason.MAX_TURNS:
            t.messages[-1].token_ids = [rng.randrange(VOCABULARY) for _ in range(4)]
        logprobs = [0.0, *(p.item() for p in slow_logprobs(sampler, t.token_ids, 0.7))]
        shift, place = rng.uniform(-0.5, 0.5), 0
        for message in t.messages:
            places = range(place, place := place + len(message.token_ids))
            if message.logprobs is not None:
                message.logprobs = [logprobs[i] + shift + rng.uniform(-0.4, 0.4) for i in places]
    return played


def batch_of(played: list[Group], rl: RLSettings) -> Batch:
    """Return the learner's batch of these groups, without values or KL penalties."""
    return estimate(gather(played, rl), rl)


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    """Draw 1 to 4 groups of 1 to 4 episodes, some of them failed. At least one group has two different rewards."""
    rewards = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4)
    shapes = [[0.0, 1.0], *draw(st.lists(rewards, max_size=3))]
    first = draw(st.integers(0, 10_000))
    played = [group(first + i, rewards_of_group) for i, rewards_of_group in enumerate(shapes)]
    for g in played[1:]:
        for t in g.trajectories:
            if draw(st.integers(0, 4)) == 0:
                t.stop, t.error = StopReason.ERROR, "EnvError: broken"
    return draw(st.permutations(played))


def tiny_model(seed: int = 0, vocabulary: int = VOCABULARY) -> Any:
    """Return a float32 model of two layers, with weights large enough that logits differ between tokens."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def catch(updater: Updater) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Return a list that receives (weights before, gradients) of every update."""
    caught: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
    step = updater._optimizer.step

    def keep() -> None:
        named = dict(updater.model.named_parameters())
        gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        caught.append(({n: p.detach().clone() for n, p in named.items()}, gradients))
        step()

    updater._optimizer.step = keep  # type: ignore[method-assign,assignment]
    return caught


class Catching(RLLearner):
    """Keeps the gradients of every update of the policy."""

    def learn(self, batch: Any, seed: int) -> dict[str, float]:
        if not hasattr(self, "caught"):
            self.caught = catch(self)
        return super().learn(batch, seed)

    @property
    def gradients(self) -> list[dict[str, torch.Tensor]]:
        return [gradients for _, gradients in self.caught]


def slow_logprobs(model: Any, token_ids: list[int], temperature: float = 1.0) -> list[torch.Tensor]:
    """Return log p(token | all before it) of every token but the first, from one unpadded forward pass."""
    logits = model(input_ids=torch.tensor([token_ids])).logits[0] / temperature
    return [logits[i - 1].log_softmax(-1)[token_ids[i]] for i in range(1, len(token_ids))]


def counting_conversations(count: int) -> list[list[Message]]:
    """Play the counting game at random, without its instruction."""
    rng = random.Random(0)
    played = []
    for _ in range(count):
        env = Counting()
        messages = [Message("user", env.reset(rng.randrange(100)))]
        for _ in range(4):
            action = rng.choice(env.actions())
            step = env.step(action)
            messages += [Message("assistant", action), Message("user", step.observation)]
            if step.done:
                break
        env.close()
        played.append(messages)
    return played


@cache
def _counting_player() -> tuple[Any, Any]:
    conversations = counting_conversations(64)
    tokenizer = build_tokenizer([m.content for messages in conversations for m in messages])
    shape = ScratchSettings(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2)
    model = build_model(shape, tokenizer, 0)
    samples = [Renderer(tokenizer).demonstration(messages) for messages in conversations]
    settings = SFTSettings(epochs=5, batch_size=16, optimizer=OptimizerSettings(lr=1e-2))
    trainer = SFT(model, samples, settings, 0)
    while trainer.updates < trainer.total:
        trainer.step()
    return model.eval(), tokenizer


def counting_player() -> tuple[Any, Any]:
    """Return (model, tokenizer) of a tiny model that mostly replies `up` or `down` and ends its replies."""
    model, tokenizer = _counting_player()
    return copy.deepcopy(model), tokenizer
