"""Decode steps captured as CUDA graphs, several per launch, and packed prefill passes before them.

One graph is one step for a bucket of batch sizes. A launch replays it several times without the host. The rows' state
(`RowState`) and the sampled tokens are on the device until the launch is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch

from agentgym_rl.agent.engines.native.cache import SlotCache
from agentgym_rl.agent.engines.native.cuda.attention_kernels import copy_slots, queries_per_block
from agentgym_rl.agent.engines.native.cuda.forward_passes import NARROW, CapturedModel
from agentgym_rl.agent.engines.native.cuda.joint_weights import addresses, weight_modules, why_not_captured
from agentgym_rl.agent.engines.native.cuda.packing import BLOCK_FIELDS, TOKEN_FIELDS, as_packed, pack
from agentgym_rl.agent.engines.native.cuda.sample_kernels import Picks, RowState
from agentgym_rl.agent.engines.native.decoder import share_prompts, unwrap
from agentgym_rl.agent.engines.native.runner import MAX_STOPS, DecodeRow, Row
from agentgym_rl.common.cuda_graphs import capture
from agentgym_rl.errors import EngineError

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MAX_TOKENS = 64
"""Tokens that a row may sample in one launch."""
DRAFT_TOKENS, MAX_DRAFT_WIDTH = 256, 16
"""A step computes the last token of each row and guesses after it: up to MAX_DRAFT_WIDTH tokens of a row, and up to
DRAFT_TOKENS in all. With few tokens such a step mostly reads weights, so that guesses cost little."""
PREFILL_TOKENS = 16384
"""Tokens of one prefill pass."""
PREFILL_SIZES = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
NARROW_PREFILL_SIZES = (*PREFILL_SIZES, 3072, 4096, 6144, 8192)
"""Sizes of captured prefill passes: launching their kernels one by one takes longer than running them. In narrow models
this holds for longer passes too."""
WHOLE_CACHE_SHARE = 0.15
"""The cache is reserved in full length if it takes at most this share of the device's memory. Otherwise it grows, and
steps are captured again each time."""

TOKEN, POSITION, SLOT, REMAINING, SEED, DONE, TEMPERATURE, TOP_P, STOPS = range(9)
"""Rows of the input array."""
SOURCE = STOPS + MAX_STOPS
"""Row of an uploaded array: from which column of the input array and the uploaded one each column is taken."""


class CapturedLaunch:
    """Replays that run on the device."""

    def __init__(self, host: torch.Tensor, num_rows: int, steps: int, event: Any) -> None:
        self._host, self._num_rows, self.steps, self._event = host, num_rows, steps, event

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        array = self._host.numpy()[:, : self._num_rows]
        counts = array[2 * MAX_TOKENS].tolist()
        longest = max(counts)
        tokens = array[:longest].T.tolist()
        logprobs = array[MAX_TOKENS : MAX_TOKENS + longest].view(numpy.float32).T.tolist()
        for row, count in enumerate(counts):
            if count < longest:
                tokens[row], logprobs[row] = tokens[row][:count], logprobs[row][:count]
        return tokens, logprobs


class CapturedRunner:
    """Runs the models that `why_not_captured` allows."""

    def __init__(self, model: Any, *, max_slots: int, max_length: int) -> None:
        self._wrapped, self._model = model, unwrap(model)
        model = self._model
        parameter = model.model.embed_tokens.weight
        self._device, dtype = parameter.device, parameter.dtype
        self._on_cuda = self._device.type == "cuda"
        config = model.config
        self.cache = SlotCache(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=model.model.layers[0].self_attn.head_dim,
            max_slots=max_slots,
            max_length=max_length,
            dtype=dtype,
            device=self._device,
        )
        self._block_tokens = queries_per_block(config.num_attention_heads // config.num_key_value_heads, dtype)
        self._graphs: dict[Any, Callable[[], None]] = {}
        self._pools: tuple[Any, Any] = (None, None)
        """Memory of captured steps and of captured prefill passes. They may run at once, so they share none."""
        self._stream = torch.cuda.Stream(self._device) if self._on_cuda else None
        """Stream on which steps are captured."""
        self._side = torch.cuda.Stream(self._device) if self._on_cuda else None
        """Stream of prefill passes that run beside a launch. All of them are captured on it, so that they have a
        workspace of their own."""
        self._fork: torch.cuda.Event | None = None
        """Work that a prefill beside the last launch waits for: all before that launch. None if a cache or a weight was
        changed since, or a prefill has waited for the launch."""
        self._addresses: tuple[int, ...] = ()
        self._weight_modules: list[torch.nn.Module] | None = None
        """Modules with those weights. None without adapters: then all modules are looked up, so that new ones count."""
        self._active: list[list[str]] = []
        """Adapters that captured steps add."""
        self._captured: CapturedModel
        self._prefill_sizes = NARROW_PREFILL_SIZES if config.hidden_size <= NARROW else PREFILL_SIZES
        self._max_rows = bucket_for(max_slots)
        self._inputs = torch.zeros((SOURCE, self._max_rows), dtype=torch.int64, device=self._device)
        self._outputs = torch.zeros((2 * MAX_TOKENS + 1, self._max_rows), dtype=torch.int32, device=self._device)
        self._host_outputs = [
            torch.zeros(self._outputs.shape, dtype=torch.int32, pin_memory=self._on_cuda) for _ in "ab"
        ]
        self._history = torch.zeros((max_slots, max_length + 1), dtype=torch.int32, device=self._device)
        """Tokens of each slot, as far as its keys are cached."""
        self._uses_top_p: list[bool] = []
        """Whether each row of the present arrangement samples with top_p."""
        self.captures = 0

    @torch.no_grad()
    def refresh(self, *, updated: bool = False) -> None:
        """Drop captured steps if a weight has moved, because they are valid only for its address. Copy adapters if they
        were updated or others are active."""
        self._fork = None
        if addresses(self._weight_modules or self._model.modules()) != self._addresses:
            self._build()
        active = self._captured.active_adapters()
        if not updated and active == self._active:
            return
        if not self._captured.fits_adapters():
            self._build()
        self._captured.load_adapters()
        self._active = active

    def _build(self) -> None:
        self._drop_graphs()
        reason = why_not_captured(self._wrapped)
        if reason is not None:
            raise EngineError(f"The model has changed and {reason}: make another engine.")
        self._captured = CapturedModel(self._model, self.cache)
        self._active = []
        self._weight_modules = weight_modules(self._model) if self._captured.active_adapters() else None
        self._addresses = addresses(self._weight_modules or self._model.modules())
        if self.cache.spare_position > 0:
            self._captured.refresh_rotary()

    @torch.no_grad()
    def reserve(self, length: int) -> None:
        """Reserve cache for sequences of `length` tokens."""
        if self.fits(length):
            return
        self._fork = None
        self._drop_graphs()
        if self._on_cuda:
            whole = self.cache.bytes_of(self.cache.max_slots, self.cache.max_length)
            if whole <= WHOLE_CACHE_SHARE * torch.cuda.get_device_properties(self._device).total_memory:
                length = self.cache.max_length
        self.cache.reserve(self.cache.max_slots, length)
        self._captured.refresh_rotary()

    def fits(self, length: int) -> bool:
        return length <= self.cache.spare_position < self._captured.num_positions

    @torch.no_grad()
    def prefill(self, rows: list[Row], *, beside: bool = False) -> int:
        """Compute all uncached tokens of the rows except the last ones. Return how many were computed.

        With `beside` the last launch may still run: the device does both at once. Later work waits for both.
        """
        rows = [row for row in rows if row.start < len(row.token_ids) - 1]
        if not rows:
            return 0
        side, fork = self._side, self._fork
        if side is None or fork is None or not beside or self._active:  # adapters are written to shared weights
            self._fork = None  # passes share memory, so that later ones wait for these
            return self._prefill(rows)
        side.wait_event(fork)
        with torch.cuda.stream(side):
            num_computed = self._prefill(rows)
        torch.cuda.current_stream(self._device).wait_stream(side)
        return num_computed

    def _prefill(self, rows: list[Row]) -> int:
        self._captured.write_adapter_rows()
        leaders, leader_of = share_prompts(rows)
        passes = pack(leaders, PREFILL_TOKENS, self._block_tokens)
        arrays = self._upload([part.ravel() for each in passes for part in (each.tokens, each.blocks)])
        offset = 0
        for each in passes:
            views = []
            for part in (each.tokens, each.blocks):
                views.append(arrays[offset : offset + part.size].view(part.shape))
                offset += part.size
            tokens, positions, slots = views[0]
            self._history[slots, positions] = tokens.int()
            self._prefill_pass(*views)
        copies = [
            (leaders[leader].slot, row.slot, len(row.token_ids) - 1)
            for row, leader in zip(rows, leader_of, strict=True)
            if row is not leaders[leader]
        ]
        if copies:
            pairs = self._upload(list(numpy.array(copies, dtype=numpy.int64).T)).view(3, -1)
            longest = max(length for _, _, length in copies)
            self._history[pairs[1]] = self._history[pairs[0]]
            for keys, values in zip(self.cache.keys, self.cache.values, strict=True):
                copy_slots(keys, values, pairs, longest)
        return sum(each.tokens.shape[1] for each in passes)

    def _upload(self, parts: list[numpy.ndarray]) -> torch.Tensor:
        """Copy int64 arrays end to end to the device. Page-locked, because another copy would wait for the launches."""
        host = torch.empty(sum(part.size for part in parts), dtype=torch.int64, pin_memory=self._on_cuda)
        numpy.concatenate(parts, out=host.numpy())
        return host.to(self._device, non_blocking=True)

    @torch.no_grad()
    def arrange(self, kept: list[int], new: list[DecodeRow]) -> None:
        """Set the rows of the next launches without waiting for those that run."""
        first, num_rows = len(kept), len(kept) + len(new)
        bucket = bucket_for(num_rows)
        flags = [*(self._uses_top_p[index] for index in kept), *(row.top_p < 1 for row in new)]
        unchanged = not new and len(kept) == len(self._uses_top_p)
        self._uses_top_p = flags
        self._step(bucket, any(flags))
        if unchanged:
            return
        host = torch.zeros((SOURCE + 1, bucket), dtype=torch.int64, pin_memory=self._on_cuda)
        array = host.numpy()
        array[DONE, num_rows:] = 1
        array[TOKEN, first:num_rows] = [row.token for row in new]
        array[POSITION, first:num_rows] = [row.position for row in new]
        array[SLOT, first:num_rows] = [row.slot for row in new]
        array[REMAINING, first:num_rows] = [row.remaining for row in new]
        array[SEED, first:num_rows] = [row.seed for row in new]
        array[TEMPERATURE].view(numpy.float64)[first:num_rows] = [row.temperature for row in new]
        array[TOP_P].view(numpy.float64)[first:num_rows] = [row.top_p for row in new]
        array[STOPS:SOURCE, first:num_rows] = -1
        for column, row in enumerate(new, first):
            stops = row.stop_token_ids[:MAX_STOPS]
            array[STOPS : STOPS + len(stops), column] = stops
        array[SOURCE] = numpy.arange(self._max_rows, self._max_rows + bucket)
        array[SOURCE, :first] = kept
        copied = host.to(self._device, non_blocking=True)
        both = torch.cat([self._inputs, copied[:SOURCE]], dim=1)
        self._inputs[:, :bucket] = both.index_select(1, copied[SOURCE])
        if new:
            added = copied[:, first:num_rows]
            self._history[added[SLOT], added[POSITION]] = added[TOKEN].int()

    @torch.no_grad()
    def launch(self, steps: int) -> CapturedLaunch:
        """Start at most `steps` steps for the rows of `arrange`. Two launches may run at once."""
        bucket = bucket_for(len(self._uses_top_p))
        steps = min(steps, MAX_TOKENS // draft_width(bucket))
        step = self._step(bucket, any(self._uses_top_p))
        self._captured.write_adapter_rows()
        if self._on_cuda:
            self._fork = torch.cuda.Event()
            self._fork.record()
        self._outputs[2 * MAX_TOKENS].zero_()
        for _ in range(steps):
            step()
        self._host_outputs.reverse()
        host = self._host_outputs[0]
        host.copy_(self._outputs, non_blocking=True)
        event = None
        if self._on_cuda:
            event = torch.cuda.Event(blocking=True)
            event.record()
        return CapturedLaunch(host, len(self._uses_top_p), steps, event)

    def clear(self, slot: int) -> None:
        self._fork = None
        with torch.no_grad():
            self.cache.clear(slot)

    def free(self) -> None:
        self._drop_graphs()
        self.cache.free()

    def resize(self, max_slots: int) -> None:
        if self._on_cuda:
            torch.cuda.synchronize(self._device)  # launches may be running
        self.free()
        self.cache.max_slots = max_slots

    def _drop_graphs(self) -> None:
        """Drop all graphs with their memory pools. Later graphs use new pools."""
        self._graphs.clear()
        if self._on_cuda:
            self._pools = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()

    def _step(self, bucket: int, with_top_p: bool) -> Callable[[], None]:
        key = ("decode", bucket, with_top_p)
        if key not in self._graphs:
            rows = self._inputs.clone()
            # Capturing runs a step. Finished rows still use their slot and position, which an earlier row may have left
            # beyond a smaller cache.
            self._inputs[POSITION].zero_()
            self._inputs[SLOT].zero_()
            self._inputs[DONE].fill_(1)
            state, picks = self._state(bucket), self._picks(bucket)
            history, width = self._history, draft_width(bucket)
            self._graphs[key] = self._capture(
                lambda: self._captured.decode(state, picks, history, with_top_p=with_top_p, width=width),
                self._stream,
                self._pools[0],
            )
            self._inputs.copy_(rows)
        return self._graphs[key]

    def _prefill_pass(self, tokens: torch.Tensor, blocks: torch.Tensor) -> None:
        num_tokens, num_blocks = tokens.shape[1], blocks.shape[1]
        size = next((size for size in self._prefill_sizes if size >= num_tokens), None)
        max_blocks = 0 if size is None else size // self._block_tokens + min(size, 256)
        if size is None or num_blocks > max_blocks or not self._on_cuda:
            self._captured.prefill(as_packed(tokens, blocks))
            return
        key = ("prefill", size)
        if key not in self._graphs:
            static_tokens = torch.zeros((TOKEN_FIELDS, size), dtype=torch.int64, device=self._device)
            static_blocks = torch.zeros((BLOCK_FIELDS, max_blocks), dtype=torch.int64, device=self._device)
            static_tokens[1] = self.cache.spare_position
            packed = as_packed(static_tokens, static_blocks)
            replay = self._capture(lambda: self._captured.prefill(packed), self._side, self._pools[1])

            def run(tokens: torch.Tensor, blocks: torch.Tensor) -> None:
                static_tokens[:, tokens.shape[1] :] = 0
                static_tokens[1, tokens.shape[1] :] = self.cache.spare_position
                static_blocks[2, blocks.shape[1] :] = 0
                static_tokens[:, : tokens.shape[1]] = tokens
                static_blocks[:, : blocks.shape[1]] = blocks
                replay()

            self._graphs[key] = run  # type: ignore[assignment]
        self._graphs[key](tokens, blocks)  # type: ignore[call-arg]

    def _capture(self, run: Callable[[], None], stream: Any, pool: Any) -> Callable[[], None]:
        """Run once to compile the kernels, then record a graph. Without CUDA return `run` itself."""
        if stream is None:
            return run
        stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(stream):
                run()
                torch.cuda.synchronize(self._device)
                graph = capture(run, pool)
        except BaseException:
            self._drop_graphs()
            raise
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self.captures += 1
        return graph.replay

    def _state(self, bucket: int) -> RowState:
        rows = self._inputs[:, :bucket]
        temperature, top_p = rows[TEMPERATURE].view(torch.float64), rows[TOP_P].view(torch.float64)
        return RowState(
            token=rows[TOKEN],
            position=rows[POSITION],
            slot=rows[SLOT],
            remaining=rows[REMAINING],
            seed=rows[SEED],
            done=rows[DONE],
            temperature=temperature,
            top_p=top_p,
            stops=rows[STOPS:],
        )

    def _picks(self, bucket: int) -> Picks:
        rows = self._outputs[:, :bucket]
        return Picks(rows[:MAX_TOKENS], rows[MAX_TOKENS : 2 * MAX_TOKENS].view(torch.float32), rows[2 * MAX_TOKENS])


def bucket_for(num_rows: int) -> int:
    """Return the batch size with which a step for so many rows is captured."""
    return next((bucket for bucket in BUCKETS if bucket >= num_rows), -(-num_rows // 256) * 256)


def draft_width(bucket: int) -> int:
    """Return how many tokens of each row a step for so many rows computes: a power of two, so that few kernels are
    compiled."""
    width = max(1, min(MAX_DRAFT_WIDTH, DRAFT_TOKENS // bucket))
    return 1 << (width.bit_length() - 1)
