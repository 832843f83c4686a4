"""Several steps in one launch, as on a CUDA device: the scheduler over a runner that does them one by one on CPU, and
the parts of the device path that need no device."""

from __future__ import annotations

import asyncio
import copy
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from kernels_for_tests import VOCABULARY, LimitedMemory, play, prompt
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.engines.native.cuda.joint_weights import join, layer_weights, why_not_captured
from agentgym_rl.agent.engines.native.cuda.packing import pack
from agentgym_rl.agent.engines.native.decoder import DecoderRunner
from agentgym_rl.agent.engines.native.engine import LAUNCH_STEPS
from agentgym_rl.agent.engines.native.runner import MAX_STOPS, DecodeRow, Row
from agentgym_rl.agent.engines.native.sampling import sample
from agentgym_rl.agent.engines.native.slots import Session, SessionTable
from agentgym_rl.errors import EngineError
from agentgym_rl.types import Sampling

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_model(kind: str = "llama") -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        if kind == "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()
        return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


@dataclass
class DoneLaunch:
    steps: int
    tokens: list[list[int]]
    logprobs: list[list[float]]
    slots: set[int]
    """Slots to which it writes."""
    is_read: bool = False

    def wait(self) -> None:
        pass

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        self.is_read = True
        return self.tokens, self.logprobs


class StepwiseRunner:
    """A LaunchRunner over DecoderRunner: the same contract, one forward pass a step, on CPU."""

    def __init__(self, model: Any, max_slots: int, max_length: int = 256) -> None:
        self._inner = DecoderRunner(model, max_slots=max_slots, max_length=max_length)
        self._room = 0
        self._rows: list[DecodeRow] = []
        self.launches = 0
        self.longest_launch = 0
        self.most_unread = 0
        self._unread: list[DoneLaunch] = []
        self.refreshes: list[bool] = []
        """Whether weights were updated before each refresh."""
        self.joins = 0
        """Times that rows joined others while a launch was not read."""
        self.besides = 0
        """Prefills that may run beside a launch that was not read."""

    def refresh(self, *, updated: bool) -> None:
        self.refreshes.append(updated)
        self._unread = []  # the next prefill waits for launches that nobody reads

    def fits(self, length: int) -> bool:
        return length <= self._room

    def reserve(self, length: int) -> None:
        self._room = max(self._room, length)

    def prefill(self, rows: list[Row], *, beside: bool) -> int:
        assert all(len(row.token_ids) <= self._room for row in rows)
        running = [launch for launch in self._unread if not launch.is_read]
        if beside and rows and running:
            self.besides += 1
            assert {row.slot for row in rows}.isdisjoint(*(launch.slots for launch in running))
        rows = [Row(r.slot, r.token_ids[:-1], r.start) for r in rows if r.start < len(r.token_ids) - 1]
        return self._inner.forward(rows)[1] if rows else 0

    def arrange(self, kept: list[int], new: list[DecodeRow]) -> None:
        self.joins += bool(kept and new and any(not launch.is_read for launch in self._unread))
        new = [replace(row, stop_token_ids=row.stop_token_ids[:MAX_STOPS]) for row in new]
        self._rows = [*(self._rows[index] for index in kept), *new]

    def launch(self, steps: int) -> DoneLaunch:
        self.launches += 1
        self.longest_launch = max(self.longest_launch, steps)
        tokens: list[list[int]] = [[] for _ in self._rows]
        logprobs: list[list[float]] = [[] for _ in self._rows]
        slots = {row.slot for row in self._rows if row.remaining > 0}
        for _ in range(steps):
            going = [place for place, row in enumerate(self._rows) if row.remaining > 0]
            if not going:
                break
            rows = [self._rows[place] for place in going]
            # The runner looks at the new tokens only; those before them are in the cache.
            logits, _ = self._inner.forward([Row(r.slot, [0] * r.position + [r.token], r.position) for r in rows])
            picked, values = sample(
                logits,
                temperature=torch.tensor([r.temperature for r in rows]),
                top_p=torch.tensor([r.top_p for r in rows]),
                seeds=torch.tensor([r.seed for r in rows]),
                positions=torch.tensor([r.position + 1 for r in rows]),
            )
            for place, row, token, value in zip(going, rows, picked.tolist(), values.tolist(), strict=True):
                tokens[place].append(token)
                logprobs[place].append(value)
                row.token, row.position = token, row.position + 1
                row.remaining = 0 if token in row.stop_token_ids else row.remaining - 1
        launch = DoneLaunch(steps, tokens, logprobs, slots)
        self._unread = [*(other for other in self._unread if not other.is_read), launch]
        self.most_unread = max(self.most_unread, len(self._unread))
        return launch

    def clear(self, slot: int) -> None:
        self._inner.clear(slot)

    def free(self) -> None:
        self._inner.free()

    def resize(self, max_slots: int) -> None:
        self._inner.resize(max_slots)


def launching(model: Any, max_sessions: int = 64, **options: Any) -> NativeEngine:
    return NativeEngine(model, max_sessions=max_sessions, runner=StepwiseRunner(model, max_sessions), **options)


@pytest.mark.parametrize("schedule", range(3))
async def test_launches_give_the_same_tokens_as_steps(schedule: int) -> None:
    model = make_model()
    rng = random.Random(schedule)
    jobs = []
    for index in range(90):
        sampling = Sampling(
            max_new_tokens=rng.randint(1, 30),
            temperature=rng.choice([0, 0.7, 1.0]),
            top_p=rng.choice([1.0, 0.8]),
            stop_token_ids=tuple(rng.sample(range(VOCABULARY), rng.choice([0, 1, MAX_STOPS, MAX_STOPS + 4]))),
            stop=rng.choice([(), (), ("<7>", "<3><"), ("<11>",)]),
            seed=rng.randint(0, 2**62),
        )
        jobs.append((f"s{index}", rng.randint(1, 3), index, sampling))

    def decode(ids: list[int]) -> str:
        return "".join(f"<{i}>" for i in ids)

    stepping = NativeEngine(model, max_sessions=96, decode=decode)
    expected = await asyncio.gather(*(play(stepping, *job) for job in jobs))
    engine = launching(model, rng.choice([7, 96]), decode=decode)
    assert await asyncio.gather(*(play(engine, *job) for job in jobs)) == expected
    assert engine._runner.besides > 0  # type: ignore[union-attr]
    stats, other = engine.stats(), stepping.stats()
    assert stats["sessions"] == 0
    assert [stats[name] for name in ("requests", "new_tokens")] == [other[name] for name in ("requests", "new_tokens")]


async def test_launches_that_run_out_of_memory_lose_no_reply() -> None:
    model, sampling = make_model(), Sampling(20, seed=5)
    wanted = await asyncio.gather(*(play(NativeEngine(model), f"s{i}", 2, i, sampling) for i in range(16)))
    engine = launching(model, 16)
    cache: Any = engine._runner._inner.cache  # type: ignore[union-attr]
    cache._zeros = LimitedMemory(cache, cache.bytes_of(6, 128))
    with pytest.warns(UserWarning, match="ran out of memory with up to 16 sequences"):
        found = await asyncio.gather(*(play(engine, f"s{i}", 2, i, sampling) for i in range(16)))
    assert found == wanted


async def test_turns_prefill_only_new_tokens_and_count_them() -> None:
    model = make_model()
    engine = launching(model)
    first = prompt(40)
    reply = await engine.generate(first, Sampling(5, seed=1), "a")
    stats = engine.stats()
    assert (stats["prompt_tokens_computed"], stats["prompt_tokens_reused"], stats["new_tokens"]) == (40, 0, 5)
    engine.reset_stats()
    second = first + reply.token_ids + prompt(10, 3)
    again = await engine.generate(second, Sampling(5, seed=2), "a")
    assert (engine.stats()["prompt_tokens_computed"], engine.stats()["prompt_tokens_reused"]) == (11, 44)
    fresh = await NativeEngine(model).generate(second, Sampling(5, seed=2), "b")
    assert again.token_ids == fresh.token_ids
    assert again.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)


async def test_prompts_prefilled_between_portions_are_computed_once() -> None:
    model = make_model()
    engine = launching(model, 200)

    async def episode(index: int) -> None:
        ids = prompt(20, index)
        for turn in range(3):
            completion = await engine.generate(ids, Sampling(4, temperature=0), str(index))
            ids = ids + completion.token_ids + prompt(7, turn)

    await asyncio.gather(*(episode(index) for index in range(150)))
    stats = engine.stats()
    assert stats["prompt_tokens_computed"] + stats["prompt_tokens_shared"] == 150 * (20 + 2 * 8)
    assert stats["prompt_tokens_reused"] == 150 * (23 + 34)


async def test_nothing_is_prefilled_with_outdated_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters may have moved. A runner uses tensors made of the old ones until it is asked to rebuild them."""
    monkeypatch.setattr("agentgym_rl.agent.engines.native.engine.REPLIES_PER_PORTION", 2)
    model = make_model()
    engine = launching(model, 8)
    runner: Any = engine._runner
    prefill, is_old, prefills = runner.prefill, False, []

    def looked_again(*, updated: bool) -> None:
        nonlocal is_old
        is_old = False

    monkeypatch.setattr(runner, "refresh", looked_again)

    def recorded(rows: list[Row], **options: bool) -> int:
        prefills.append(is_old and bool(rows))
        return int(prefill(rows, **options))

    monkeypatch.setattr(runner, "prefill", recorded)

    async def episode(index: int) -> None:
        nonlocal is_old
        completion = await engine.generate(prompt(10, index), Sampling(2, seed=1), str(index))
        if index == 0:
            is_old = True
            await engine.update_weights(None, 1)
        again = prompt(10, index) + completion.token_ids + prompt(5, index)
        completion = await engine.generate(again, Sampling(3, seed=2), str(index))
        assert completion.version == 1

    await engine.generate(prompt(60), Sampling(1, seed=1), "room for the longest")
    await asyncio.gather(*(episode(index) for index in range(5)))
    assert len(prefills) > 2
    assert not any(prefills)


async def test_an_update_during_a_reply_computes_its_keys_again() -> None:
    model = make_model()
    before = copy.deepcopy(model)
    engine = launching(model)
    ids = prompt(20)
    task = asyncio.create_task(engine.generate(ids, Sampling(60, seed=1), "a"))
    while engine.stats()["new_tokens"] < 10:  # noqa: ASYNC110
        await asyncio.sleep(0)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
        model.model.layers[0].self_attn.k_proj.weight.mul_(0.5)
    await engine.update_weights(None, 7)
    completion = await task
    index = torch.tensor(completion.token_ids).unsqueeze(1)
    with torch.no_grad():
        whole = torch.tensor([ids + completion.token_ids])
        old, new = (m(whole).logits[0, 19:-1].log_softmax(-1).gather(1, index)[:, 0] for m in (before, model))
    got = torch.tensor(completion.logprobs)
    change = next(i for i in range(60) if abs(got[i] - old[i]) > 1e-3)
    assert 10 <= change < 60
    assert torch.allclose(got[change:], new[change:], atol=1e-4)
    assert completion.version == 0


async def test_a_runner_is_told_of_every_update_once() -> None:
    engine = launching(make_model())
    for version in (0, 0, 1, 1, 2):
        if version > engine.version:
            await engine.update_weights(None, version)
        await engine.generate(prompt(5), Sampling(2, seed=1), "a")
    runner: Any = engine._runner
    assert runner.refreshes == [False, False, True, False, True]


async def test_cancelled_and_failed_rows_do_not_affect_the_others() -> None:
    model = make_model()
    engine = launching(model, 2)
    doomed = asyncio.create_task(engine.generate(prompt(9), Sampling(200, seed=1), "doomed"))
    other = asyncio.create_task(engine.generate(prompt(11), Sampling(90, temperature=0), "other"))
    waiting = asyncio.create_task(engine.generate(prompt(13), Sampling(3, temperature=0), "waiting"))
    while engine.stats()["new_tokens"] < 10:  # noqa: ASYNC110
        await asyncio.sleep(0)
    doomed.cancel()
    alone = NativeEngine(model)
    for task, ids, count in ((other, prompt(11), 90), (waiting, prompt(13), 3)):
        assert (await task).token_ids == (await alone.generate(ids, Sampling(count, temperature=0), "x")).token_ids
    with pytest.raises(asyncio.CancelledError):
        await doomed
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        await engine.generate(prompt(5), Sampling(3), "a")
    await engine.close()


async def test_launches_grow_with_the_usual_reply() -> None:
    model = make_model()
    engine = launching(model)
    runner: Any = engine._runner
    for index in range(100):
        await engine.generate(prompt(5, index), Sampling(8, seed=index), str(index))
    assert runner.launches > 150, "replies of 8 tokens should take several launches of few steps"
    assert runner.longest_launch == 8, "an eighth of what is expected before any reply is known"
    engine = launching(model)
    runner = engine._runner
    await asyncio.gather(*(engine.generate(prompt(5, i), Sampling(200, seed=i), str(i)) for i in range(40)))
    await engine.generate(prompt(5), Sampling(200, seed=1), "after")
    assert runner.longest_launch == LAUNCH_STEPS[1], "long replies should take the longest launches"


async def test_launches_are_shorter_while_guesses_come_true() -> None:
    class Guessing(StepwiseRunner):
        """Every step gives four tokens."""

        steps: tuple[int, ...] = ()

        def launch(self, steps: int) -> DoneLaunch:
            launch = super().launch(4 * steps)
            launch.steps = steps
            self.steps += (steps,)
            return launch

    model = make_model()
    runner = Guessing(model, 4)
    engine = NativeEngine(model, max_sessions=4, runner=runner)
    expected = await NativeEngine(model).generate(prompt(5), Sampling(64, temperature=0), "a")
    assert (await engine.generate(prompt(5), Sampling(64, temperature=0), "a")).token_ids == expected.token_ids
    assert runner.steps[0] == 8, "before any guess is known, an eighth of the usual 64 tokens"
    await engine.generate(prompt(6), Sampling(64, temperature=0), "b")
    assert set(runner.steps[2:]) == {2}, "an eighth of 64 tokens at four tokens a step"


async def test_a_launch_is_started_before_the_one_before_it_is_read() -> None:
    engine = launching(make_model())
    runner: Any = engine._runner
    await asyncio.gather(*(engine.generate(prompt(5, i), Sampling(60, seed=i), str(i)) for i in range(4)))
    assert runner.most_unread == 2
    assert runner.launches >= 4


async def test_requests_join_while_a_launch_runs() -> None:
    model = make_model()
    engine = launching(model)
    runner: Any = engine._runner
    sampling = Sampling(80, temperature=0)
    first = asyncio.create_task(engine.generate(prompt(9), sampling, "first"))
    replies = []
    for index in range(3):
        while engine.stats()["new_tokens"] < 12 * (index + 1):  # noqa: ASYNC110
            await asyncio.sleep(0)
        replies.append(asyncio.create_task(engine.generate(prompt(7, index), Sampling(5, seed=index), str(index))))
    alone = NativeEngine(model)
    assert (await first).token_ids == (await alone.generate(prompt(9), sampling, "a")).token_ids
    for index, reply in enumerate(replies):
        expected = await alone.generate(prompt(7, index), Sampling(5, seed=index), str(index))
        assert (await reply).token_ids == expected.token_ids
    assert runner.joins >= 1
    assert engine.stats()["prompt_tokens_computed"] == 9 + 3 * 7, "rows that continue are not computed again"


async def test_a_reply_names_the_weights_that_sampled_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is admitted while others are answered, and new weights arrive before it starts."""
    monkeypatch.setattr("agentgym_rl.agent.engines.native.engine.REPLIES_PER_PORTION", 1)
    model = make_model()
    engine = launching(model)

    async def twice() -> tuple[list[int], Any]:
        reply = await engine.generate(prompt(9, 0), Sampling(2, seed=1), "a")
        ids = prompt(9, 0) + reply.token_ids + prompt(4)
        return ids, await engine.generate(ids, Sampling(3, seed=2), "a")

    async def once_and_new_weights() -> None:
        await engine.generate(prompt(9, 1), Sampling(2, seed=1), "b")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.7)
        await engine.update_weights(None, 1)

    (ids, reply), _ = await asyncio.gather(twice(), once_and_new_weights())
    with torch.no_grad():
        logits = model(torch.tensor([ids + reply.token_ids])).logits[0, len(ids) - 1 : -1]
    by_version_1 = logits.log_softmax(-1).gather(1, torch.tensor(reply.token_ids)[:, None])[:, 0].tolist()
    assert reply.logprobs == pytest.approx(by_version_1, abs=1e-4)
    assert reply.version == 1


@pytest.mark.parametrize("length", [12, 40])
async def test_a_stop_string_that_the_next_token_would_change_ends_the_reply(length: int) -> None:
    def decode(ids: list[int]) -> str:
        """The last token shows as `?` until another follows, as half a character does."""
        return "".join(chr(97 + token % 26) for token in ids[:-1]) + "?"

    model = make_model()
    sampling = Sampling(length, seed=3, stop=("cc", "m?"))
    replies = []
    for engine in (NativeEngine(model, decode=decode), launching(model, decode=decode)):
        replies.append(await asyncio.gather(*(engine.generate(prompt(5, i), sampling, str(i)) for i in range(8))))
        await engine.close()
    stepwise, launched = ([(r.token_ids, r.finish) for r in some] for some in replies)
    assert launched == stepwise
    taken_back = [ids for ids, finish in stepwise if finish == "stop" and decode(ids).endswith("m?")]
    assert any(len(ids) > 2 for ids in taken_back)


def test_packing_covers_every_new_token_once_in_order() -> None:
    rng = random.Random(0)
    rows = []
    for slot in range(40):
        start = rng.choice([0, rng.randint(1, 60)])
        rows.append(Row(slot, prompt(start + rng.randint(1, 90), slot), start))
    passes = pack(rows, 200, 21)
    assert all(each.tokens.shape[1] == 200 for each in passes[:-1])
    found: dict[int, list[tuple[int, int]]] = {row.slot: [] for row in rows}
    for each in passes:
        for token, position, slot in each.tokens.T.tolist():
            found[slot].append((position, token))
        covered = numpy.zeros(each.tokens.shape[1], dtype=int)
        for first, position, count, slot in each.blocks.T.tolist():
            assert 1 <= count <= 21
            covered[first : first + count] += 1
            assert (each.tokens[2, first : first + count] == slot).all()
            assert each.tokens[1, first : first + count].tolist() == list(range(position, position + count))
        assert (covered == 1).all()
    for row in rows:
        assert found[row.slot] == list(enumerate(row.token_ids))[row.start : -1]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_joint_weights_are_the_parameters_themselves(kind: str, tmp_path: Path) -> None:
    model = make_model(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    assert why_not_captured(model) is None
    layers = [layer_weights(layer) for layer in model.model.layers]
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    attention = model.model.layers[1].self_attn
    assert layers[1].qkv.data_ptr() == attention.q_proj.weight.data_ptr()
    again = layer_weights(model.model.layers[1])
    assert again.qkv.data_ptr() == layers[1].qkv.data_ptr(), "joined twice"
    # Optimizer steps, loading and saving still work, and the joint matrix sees the changes.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    assert torch.equal(layers[1].qkv[64:96], attention.k_proj.weight)
    assert not torch.equal(before["model.layers.1.self_attn.k_proj.weight"], attention.k_proj.weight)
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in model.state_dict().items())
    model.load_state_dict(before)
    assert torch.equal(layers[1].gate_up[48:], before["model.layers.1.mlp.up_proj.weight"])
    alone = copy.deepcopy(model)
    assert alone.model.layers[0].self_attn.q_proj.weight.data_ptr() != layers[0].qkv.data_ptr()


def test_join_keeps_values_and_gradients() -> None:
    parameters = [torch.nn.Parameter(torch.randn(n, 3)) for n in (2, 5, 1)]
    values = [p.detach().clone() for p in parameters]
    joint = join(parameters)
    assert torch.equal(joint, torch.cat(values))
    (parameters[1] * 2).sum().backward()
    assert parameters[1].grad is not None
    with torch.no_grad():
        parameters[1].add_(1)
    assert torch.equal(joint[2:7], values[1] + 1)


def test_a_model_that_cannot_be_captured_gives_the_reason() -> None:
    model = make_model()
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj)
    assert "Sequential" in (why_not_captured(model) or "")
    narrow = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_attention_heads": 8}))
    assert "8 wide" in (why_not_captured(narrow) or "")


@pytest.mark.parametrize("make", [NativeEngine, launching])
async def test_a_paused_engine_samples_nothing_and_continues_with_the_new_weights(make: Any) -> None:
    model = make_model()
    before, engine, ids = copy.deepcopy(model), make(model), prompt(20)
    replies = [asyncio.create_task(engine.generate(ids, Sampling(60, seed=seed), str(seed))) for seed in range(4)]
    while engine.stats()["new_tokens"] < 40:  # noqa: ASYNC110
        await asyncio.sleep(0)
    async with engine.paused():
        sampled = engine.stats()["new_tokens"]
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
            model.model.layers[0].self_attn.k_proj.weight.mul_(0.5)
        late = asyncio.create_task(engine.generate(ids, Sampling(5, seed=9), "late"))
        for _ in range(200):
            await asyncio.sleep(0)
        assert engine.stats()["new_tokens"] == sampled
        await engine.update_weights(None, 1)
    for completion in await asyncio.gather(*replies):
        first = completion.versions.count(0)
        assert 0 < first < 60
        for weights, part in ((before, slice(first)), (model, slice(first, None))):
            tokens = torch.tensor([ids + completion.token_ids])
            logprobs = weights(tokens).logits[0, len(ids) - 1 : -1].log_softmax(-1)
            expected = logprobs.gather(1, tokens[0, len(ids) :, None]).squeeze(1)
            assert completion.logprobs[part] == pytest.approx(expected[part].tolist(), abs=1e-4)
    assert (await late).version == 1


@pytest.mark.parametrize("make", [NativeEngine, launching])
async def test_a_paused_engine_can_be_closed(make: Any) -> None:
    engine = make(make_model())
    reply = asyncio.create_task(engine.generate(prompt(5), Sampling(200), "a"))
    while engine.stats()["new_tokens"] < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    async with engine.paused():
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await reply


@pytest.mark.parametrize("make", [NativeEngine, launching])
async def test_a_released_session_can_be_continued_by_its_name(make: Any) -> None:
    model = make_model()
    engine = make(model)
    first = prompt(40)
    parent = await engine.generate(first, Sampling(20, seed=1), "parent")
    branch = first + parent.token_ids[:12] + prompt(3, 2)  # a place in the middle of what the parent holds
    await engine.release("parent")
    assert engine.stats()["sessions"] == 0
    engine.reset_stats()
    answer = await engine.generate(branch, Sampling(8, seed=3), "parent")
    assert engine.stats()["prompt_tokens_computed"] == 3
    fresh = await NativeEngine(model).generate(branch, Sampling(8, seed=3), "a")
    assert answer.token_ids == fresh.token_ids
    assert answer.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)


@pytest.mark.parametrize("keep_cache", [False, True])
async def test_a_released_session_is_forgotten_by_an_update(keep_cache: bool) -> None:
    engine = NativeEngine(make_model(), keep_cache=keep_cache)
    await engine.generate(prompt(40), Sampling(3, seed=1), "a")
    await engine.release("a")
    await engine.update_weights(None, 1)
    engine.reset_stats()
    await engine.generate(prompt(40), Sampling(3, seed=1), "a")
    assert engine.stats()["prompt_tokens_computed"] == 40


def test_released_sessions_give_their_slots_away_before_others_are_evicted() -> None:
    table = SessionTable(4)

    def begin(name: str) -> Session:
        session = table.acquire(name)
        assert session is not None
        session.num_cached = 1
        table.finish(session)
        return session

    slots = {name: begin(name).slot for name in "abc"}
    for name in "ab":
        table.release(name)
    assert begin("d").slot == 3
    assert begin("e").slot == slots["a"], "it was released first"
    assert begin("b").slot == slots["b"], "its contents are still there"
    assert begin("f").slot == slots["c"]
    assert table.evictions == 1
    for _ in range(3):
        table.release("f")
        assert begin("f").slot == slots["c"]
    alone = SessionTable(64)
    for number in range(10):
        session = alone.acquire(str(number))
        assert session is not None
        assert session.slot <= 1, "one episode after the other takes no further slots"
        alone.finish(session)
        alone.release(str(number))


@pytest.mark.parametrize("ending", ["stop string", "stop token that the device does not check"])
async def test_no_prompt_is_computed_beside_a_launch_that_writes_to_its_slot(ending: str) -> None:
    model = make_model()
    free = (await NativeEngine(model).generate(prompt(10), Sampling(24, temperature=0), "free")).token_ids
    last = next(i for i in range(2, 12) if free[i] not in free[:i])
    ignored = tuple(token for token in range(VOCABULARY) if token not in free)[:MAX_STOPS]
    ends = Sampling(24, temperature=0, stop_token_ids=(*ignored, free[last]))
    if ending == "stop string":
        ends = Sampling(24, temperature=0, stop=(f"<{free[last]}>",))
    engine = launching(model, 8, decode=lambda ids: "".join(f"<{i}>" for i in ids))

    async def episode() -> None:
        ids = prompt(10)
        for _ in range(6):
            completion = await engine.generate(ids, ends, "ends")
            ids = [*ids, *completion.token_ids, *prompt(9)]

    await asyncio.gather(episode(), engine.generate(prompt(30), Sampling(150, temperature=0), "goes on"))
