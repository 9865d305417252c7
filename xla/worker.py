"""The torch-xla worker: torch's ops in a frozen table of XLA programs, with a donated cache and
tokens fed back on the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch_xla.core.xla_model as xm

from ..bucketing import Table
from ..gpu.recording import CACHE_DTYPES, DTYPES
from ..ops import BoundPlans, OpError, Plans
from ..ops.bindings.torch import bind
from ..ops.namespaces.torch_ import from_numpy, to_numpy
from ..shared.config import Change, DeviceInfo, ResolvedConfig
from ..shared.errors import ConfigError, InternalError, OutsideTable
from ..shared.models import decoder
from ..shared.models.caches import layout_of, step_shape
from ..shared.models.config import ModelConfig
from ..shared.packer import padding
from ..shared.progress import Progress
from ..shared.step import (
    PROCESSING,
    StepInput,
    StepOutput,
    TopLogprobs,
    histories_shape,
    with_masks,
)
from ..shared.step_difference import (
    SamplerBuffers,
    StepBuffers,
    initial_tables,
    sampler_size,
)
from ..shared.worker import (
    HOST_MEMORY_FOR_KV,
    ProgramReport,
    Worker,
    kv_page_bytes,
    step_temporaries,
)
from . import programs
from .device import find_device, place_of, start
from .ladder import Fresh, Kept, jobs
from .plans import make_plans
from .programs import Held, Setting, State
from .traced import Program, compilations, trace
from .weights import load_weights

__all__ = ["XlaWorker", "find_device", "make_plans", "make_worker"]


def make_worker(
    model: ModelConfig, config: ResolvedConfig, device: DeviceInfo, folder: str
) -> Worker:
    """A worker on `device` for the model in `folder`."""
    return XlaWorker(model, config, device, folder)


@dataclass(slots=True)
class Handle:
    """A started step, whose tensors are being computed."""

    step: StepInput
    tokens: torch.Tensor | None
    """[S]. None: the step waits for masks."""
    top: tuple[torch.Tensor, ...] | None = None
    prompt: list[tuple[torch.Tensor, ...]] | None = None
    streams: torch.Tensor | None = None

    def result(self) -> StepOutput:
        """Wait for the step. Raises InternalError if it waits for masks."""
        if self.tokens is None:
            raise InternalError(f"step {self.step.step_id} has no sampler yet")
        d = self.step.descriptor
        # Behind the step's own rows are those that programs were padded with.
        top = prompt = None
        if self.top is not None:
            top = TopLogprobs(*(to_numpy(x)[: d.requests] for x in self.top))
        if self.prompt is not None:
            columns = zip(*self.prompt, strict=True)
            prompt = TopLogprobs(
                *(np.concatenate([to_numpy(x) for x in column])[: d.tokens] for column in columns)
            )
        streams = None if self.streams is None else to_numpy(self.streams)[None]
        tokens = to_numpy(self.tokens)[: d.requests]
        return StepOutput(self.step.step_id, tokens, top, prompt, streams)


class XlaWorker:
    """Runs steps through XLA programs of torch's ops. See `shared/worker.py` for the contract of
    each method.
    """

    multi_step = False

    def __init__(
        self, model: ModelConfig, config: ResolvedConfig, device: DeviceInfo, folder: str
    ) -> None:
        start(device.platform)
        self.device, self.config = device, config
        self.changes: list[Change] = []
        self._folder, self._loaded = folder, model
        self._where = place_of(device.index)
        try:
            self._plans = make_plans(model, config)
        except OpError as error:
            raise ConfigError(f"{error.options}: {error}") from error
        self._setting = Setting(
            decoder.model_of(model),
            BoundPlans(self._plans, lambda kind, plan: bind(plan)),
            step_shape(model, config),
            layout_of(model, config),
            config.demand,
        )
        self._dtype = DTYPES[config.dtype]
        self._cache_dtype = CACHE_DTYPES[config.kv_cache_dtype]
        self._programs: dict[Any, Program] = {}
        self._is_ready = False
        self._unsampled: tuple[Handle, torch.Tensor, Any] | None = None
        self._num_late = 0

    def load(self, progress: Progress) -> None:
        """Read or make the weights."""
        model, config = self._loaded, self.config
        top, layers = load_weights(
            self._folder, config.load_format, model, self._dtype, config.seed, self._where, progress
        )
        cos, sin = map(self._put, decoder.rotary_tables(model, config.max_model_len))
        self._held = Held(top, layers, cos, sin)
        self._last_tokens = self._put(np.zeros(config.max_num_seqs + 1, np.int32))

    def _put(self, x: np.ndarray) -> torch.Tensor:
        # A copy: what the caller has may be of a buffer that it writes to later.
        return torch.from_numpy(np.array(x)).to(self._where)

    def measure(self) -> int:
        """Bytes for the KV cache. On a TPU what a step needs beside it is an estimate."""
        if self.device.platform == "cpu":
            return HOST_MEMORY_FOR_KV
        memory = xm.get_memory_info(str(self._where))
        allowed = int(memory["bytes_limit"] * self.config.memory_utilization)
        needed = step_temporaries(self._loaded, self.config) + self.page_bytes()
        return int(allowed - memory["bytes_used"] - needed)

    def page_bytes(self) -> int:
        """Bytes of one page over all layers of a group."""
        return kv_page_bytes(self._setting.layout, self._cache_dtype.itemsize)

    def allocate_kv(self, num_pages: int) -> None:
        """Allocate the buffers of the cache, which layers of different groups share."""
        layout, shape = self._setting.layout, self._setting.shape
        size = num_pages + 1, layout.page_entries
        # From the host, one by one: lazy tensors of the same zeros would be one buffer.
        self._kv = [
            torch.zeros(size, dtype=self._cache_dtype).to(self._where) for _ in range(layout.stripe)
        ]
        self._state = State(*map(self._put, initial_tables(shape)))
        self._buffers = StepBuffers(shape)
        self._sampler_buffers = SamplerBuffers(shape)
        self._histories = self._put(
            np.zeros(histories_shape(shape, self._setting.demand.samplers), np.int32)
        )

    def warm_up(self, table: Table, progress: Progress) -> list[ProgramReport]:
        """Trace and compile every program, and run each once on padding."""
        reports: list[ProgramReport] = []
        kept = Kept(self._kv, self._state, self._last_tokens, self._histories)
        fresh = Fresh(self._where, self._loaded.hidden_size, self._dtype)
        todo = jobs(self._setting, table, self._held, kept, fresh)
        for done, (key, job) in enumerate(todo.items()):
            begin = time.perf_counter()
            self._programs[key] = job.build()
            seconds = time.perf_counter() - begin
            reports.append(ProgramReport(job.name, seconds))
            progress(f"programs; {job.name} {seconds:.0f} s", done + 1, len(todo))
        nothing = torch.from_numpy(self._buffers.nothing())
        self._state = self._programs["update"](self._state, nothing)
        for d in table:
            step = padding(d, self._setting.shape)
            for variant in self._setting.demand.samplers:
                if variant not in PROCESSING:
                    logprobs = self._setting.demand.logprobs
                    self.execute(replace(step, sampler=variant, logprobs=logprobs)).result()
        self._is_ready, self._num_late = True, 0
        return reports

    def execute(self, step: StepInput) -> Handle:
        """Start a step."""
        with self._counting_late():
            return self._execute(step)

    def sample(self, masks: np.ndarray) -> None:
        """Start the sampler of the step that waits."""
        waiting, self._unsampled = self._unsampled, None
        if waiting is None:
            raise InternalError("no step waits for masks")
        with self._counting_late():
            self._sample(*waiting, with_masks(waiting[0].step, masks))

    @contextmanager
    def _counting_late(self) -> Iterator[None]:
        before = compilations()
        try:
            yield
        finally:
            self._num_late += compilations() - before

    def _execute(self, step: StepInput) -> Handle:
        if self._unsampled is not None:
            raise InternalError(f"step {self._unsampled[0].step.step_id} has no sampler yet")
        if step.loop is not None:
            raise InternalError(f"step {step.step_id} is a loop, which no program here runs")
        rows, hidden, picked, streams = self._backbone(step)
        handle = Handle(step, None, None, None, streams)
        if step.prompt_targets is not None:
            handle.prompt = self._prompt_logprobs(step.prompt_targets, hidden)
        if step.waiting is None:
            self._sample(handle, rows, picked, step.processors)
        else:
            self._unsampled = handle, rows, picked
        return handle

    def _backbone(self, step: StepInput) -> tuple[Any, ...]:
        """(rows to sample, all hidden states, what the sampler has to know of them, streams)."""
        program = self._program(step.descriptor)
        spilled, buffer = self._buffers.pack(step)
        for part in spilled:
            self._state = self._program("update")(self._state, torch.from_numpy(part))
        arguments = self._kv, self._state, self._last_tokens, torch.from_numpy(buffer)
        self._kv, self._state, *rest = program(*arguments)
        return tuple(rest)

    def _sample(
        self, handle: Handle, rows: torch.Tensor, picked: Any, processors: np.ndarray | None
    ) -> None:
        step, d, shape = handle.step, handle.step.descriptor, self._setting.shape
        size = sampler_size(d.requests, shape.max_rows)
        arguments: tuple[Any, ...] = self._last_tokens, self._state.parameters, rows, picked
        if processors is not None:
            wider = self._sampler_buffers.processors(step, processors)
            # Steps may share what nobody may write to, which torch does not take.
            arguments += (torch.from_numpy(wider if wider.flags.writeable else wider.copy()),)
        variant = self._setting.demand.sampler_for(step.sampler) or step.sampler
        program = self._program((variant, size))
        if step.sampler == "processed":
            spans, new_tokens = self._sampler_buffers.histories(step)
            for span in spans:
                remember = self._program("remember")
                self._histories = remember(self._histories, torch.from_numpy(span))
            arguments += self._histories, torch.from_numpy(new_tokens)
            self._last_tokens, tokens, self._histories = program(*arguments)
        else:
            self._last_tokens, tokens = program(*arguments)
        if step.logprobs:
            handle.top = self._program(("logprobs", size))(rows, tokens)
        handle.tokens = tokens

    def _prompt_logprobs(
        self, targets: np.ndarray, hidden: torch.Tensor
    ) -> list[tuple[torch.Tensor, ...]]:
        size = self._setting.shape.max_rows
        take, top = self._program(("take", len(targets))), self._program(("logprobs", size))
        padded = np.zeros(-(-len(targets) // size) * size, np.int32)
        padded[: len(targets)] = np.maximum(targets, 0)
        return [
            top(
                take(hidden, torch.tensor([start], dtype=torch.int32)),
                torch.from_numpy(padded[start : start + size].copy()),
            )
            for start in range(0, len(targets), size)
        ]

    def _program(self, key: Any) -> Program:
        program = self._programs.get(key)
        if program is None:
            raise OutsideTable(f"no program for {key}: the table was frozen at start")
        return program

    def logits(self, step: StepInput) -> np.ndarray:
        """Run a step and return its logits at every token: [T, vocab] float32. Compiles; for
        comparisons only.
        """
        hidden = self._backbone(step)[1]
        key = "logits", step.descriptor.tokens
        if key not in self._programs:
            head = partial(programs.head, self._setting)
            self._programs[key] = trace(f"logits_{key[1]}", head, self._held, (hidden,))
        return to_numpy(self._programs[key](hidden))

    def read_pages(self, layer: int, pages: Sequence[int]) -> np.ndarray:
        """What pages hold of a layer; waits for the steps in flight."""
        layout = self._setting.layout
        held = to_numpy(self._kv[layout.places[layer].index])[np.asarray(pages)]
        return held.reshape(-1, *layout.page_shape(layer))

    def write_pages(self, layer: int, pages: Sequence[int], content: np.ndarray) -> None:
        """Let pages hold `content` of a layer."""
        index = self._setting.layout.places[layer].index
        held = to_numpy(self._kv[index]).copy()
        held[np.asarray(pages)] = content.reshape(len(content), -1)
        self._kv[index] = from_numpy(held).to(self._where)

    def read_weights(self, layer: int) -> Mapping[str, np.ndarray]:
        """The weights of a layer as the programs get them; -1: those outside of layers."""
        held = self._held.top if layer < 0 else self._held.layers[layer]
        return {name: to_numpy(x) for name, x in held.items()}

    def read_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """The rotary tables as the programs get them."""
        return to_numpy(self._held.cos), to_numpy(self._held.sin)

    def read_page_tables(self) -> np.ndarray:
        """The page tables on the device; waits for the steps in flight."""
        return to_numpy(self._state.pages)

    def plans(self) -> Plans:
        """The implementation of each op."""
        return self._plans

    def plan_hash(self) -> str:
        """See `Worker`."""
        return self._plans.hash

    def compilations_after_ready(self) -> int:
        """XLA compilations while steps of this worker started."""
        if not self._is_ready:
            raise InternalError("the worker is not warmed up yet")
        return self._num_late

    def close(self) -> None:
        """Drop weights, cache and programs, once nothing runs."""
        try:
            xm.wait_device_ops()
        finally:
            self._programs.clear()
            self._unsampled = None
            self._held = self._kv = self._state = self._last_tokens = None  # type: ignore[assignment]  # closed for good
