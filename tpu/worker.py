"""The JAX worker: a frozen table of compiled programs, one donated KV buffer, tokens fed back on the device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..bucketing import Descriptor, Table
from ..ops import OpError, Plans
from ..ops.bindings.jax import bind
from ..shared.config import DeviceInfo, ResolvedConfig, host_memory
from ..shared.errors import BackendUnavailable, ConfigError, InternalError, OutsideTable
from ..shared.models import decoder
from ..shared.models.config import ModelConfig
from ..shared.step import (
    SAMPLERS,
    StepInput,
    StepOutput,
    StepShape,
    TopLogprobs,
    batch_layout,
    processor_layout,
    sampling_layout,
)
from ..shared.worker import HOST_MEMORY_FOR_KV, ProgramReport, Progress, kv_page_bytes, step_temporaries
from . import programs
from .plans import make_plans
from .weights import load_weights

PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

_compilations = 0


def _count_compilations(event: str, seconds: float, **_: Any) -> None:
    global _compilations
    if event == COMPILE_EVENT:
        _compilations += 1


jax.monitoring.register_event_duration_secs_listener(_count_compilations)


def find_device(device: str) -> DeviceInfo:
    """The JAX device that `device` (auto, cpu, cuda, tpu) names. Raises BackendUnavailable."""
    found = _device(device)
    platform = "cuda" if found.platform in ("gpu", "cuda") else found.platform
    if platform == "cpu":
        return DeviceInfo(platform, found.device_kind, host_memory())
    return DeviceInfo(platform, found.device_kind, int((found.memory_stats() or {}).get("bytes_limit", 0)))


def _device(device: str) -> jax.Device:
    try:
        return jax.devices(PLATFORMS[device] if device != "auto" else None)[0]
    except RuntimeError as error:
        raise BackendUnavailable(f"device: JAX has no {device} device here ({str(error).splitlines()[0]})") from error


def make_worker(model: ModelConfig, config: ResolvedConfig, device: DeviceInfo, folder: str) -> JaxWorker:
    """A worker on `device` for the model in `folder`."""
    return JaxWorker(model, config, device, folder)


@dataclass(slots=True)
class Handle:
    """A started step. The arrays are futures; copies to the host are under way."""

    step: StepInput
    tokens: jax.Array
    top: tuple[jax.Array, ...] | None
    prompt: list[tuple[jax.Array, ...]] | None

    def result(self) -> StepOutput:
        """Wait for the step."""
        prompt = None
        if self.prompt is not None:
            parts = [[np.asarray(x) for x in part] for part in self.prompt]
            count = self.step.descriptor.tokens
            prompt = TopLogprobs(*(np.concatenate(column)[:count] for column in zip(*parts, strict=True)))
        top = None if self.top is None else TopLogprobs(*(np.asarray(x) for x in self.top))
        return StepOutput(self.step.step_id, np.asarray(self.tokens), top, prompt)


class JaxWorker:
    """Runs steps through XLA executables. See `shared/worker.py` for the contract of each method."""

    def __init__(self, model: ModelConfig, config: ResolvedConfig, device: DeviceInfo, folder: str) -> None:
        self.device = device
        self._folder = folder
        self._config = config
        self._where = _device(device.platform)
        try:
            self._plans = make_plans(model, config)
        except OpError as error:
            raise ConfigError(f"op_priority, enable_ops: {error}") from error
        ops = {kind: bind(plan) for kind, plan in self._plans.by_kind.items()}
        shape = StepShape(config.pages_per_request, config.max_num_seqs, config.max_model_len, model.vocab_size)
        self._model = programs.Model(model, ops, shape, config.scan_layers)
        self._dtype = jnp.dtype(config.dtype)
        self._table = decoder.abstract(model)
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._compiled_at_ready: int | None = None
        self._weights: dict[str, Any] = {}
        self._head: dict[str, Any] = {}

    def load(self, progress: Progress) -> None:
        """Read or make the weights."""
        model, config = self._model, self._config
        self._weights = load_weights(
            self._folder,
            config.load_format,
            self._table,
            model.config.num_layers,
            model.segments,
            self._dtype,
            config.seed,
            self._where,
            progress,
        )
        head = "embed" if model.config.tie_embeddings else "head"
        self._head = {head: self._weights[head]}
        cos, sin = decoder.rotary_tables(model.config, config.max_model_len)
        self._tables = (self._put(cos), self._put(sin))
        self._last_tokens = self._put(np.zeros(config.max_num_seqs + 1, np.int32))

    def _put(self, x: np.ndarray) -> jax.Array:
        return jax.device_put(x, self._where)

    def measure(self) -> int:
        """Bytes for the KV cache."""
        if self.device.platform == "cpu":
            return HOST_MEMORY_FOR_KV
        stats = self._where.memory_stats() or {}
        limit, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
        temporaries = step_temporaries(self._model.config, self._config)
        return int(limit * self._config.memory_utilization) - used - temporaries

    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return kv_page_bytes(self._model.config, self._config, self._dtype.itemsize)

    def allocate_kv(self, num_pages: int) -> None:
        """Allocate the one KV buffer of all layers."""
        c = self._model.config
        shape = (c.num_layers * (num_pages + 1), self._config.page_size, 2 * c.num_kv_heads, c.head_dim)
        with jax.default_device(self._where):
            self._kv = jax.jit(lambda: jnp.zeros(shape, self._dtype))()

    def warm_up(self, table: Table, progress: Progress) -> list[ProgramReport]:
        """Compile every program in a thread pool; XLA leaves Python's lock, so cores are used."""
        jobs = self._jobs(table)
        reports: list[ProgramReport] = []
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            for key, (program, seconds) in zip(jobs, pool.map(self._compile, jobs.values()), strict=True):
                self._programs[key] = program
                reports.append(ProgramReport(program.name, seconds))
                progress("programs", len(reports), len(jobs))
        for descriptor in table:
            self._run_once(descriptor)
        self._compiled_at_ready = _compilations
        return reports

    def _compile(self, job: tuple[str, Callable[..., Any], tuple[int, ...], tuple[Any, ...]]) -> tuple[Any, float]:
        name, function, donate, arguments = job
        start = time.perf_counter()
        lowered = jax.jit(programs.named(name, function), donate_argnums=donate).lower(*arguments)
        # A rounding that an op's contract states must happen: XLA may otherwise keep float32 between two ops.
        compiled = lowered.compile(compiler_options={"xla_allow_excess_precision": False})
        return _Program(name, compiled), time.perf_counter() - start

    def _jobs(self, table: Table) -> dict[Any, Any]:
        """Every program to build: key -> (name, function, donated arguments, shapes of the arguments)."""
        model, shape = self._model, self._model.shape
        where = jax.sharding.SingleDeviceSharding(self._where)

        def like(x: Any) -> Any:
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), x)

        def array(*dims: int, dtype: Any = jnp.int32) -> Any:
            return jax.ShapeDtypeStruct(dims, dtype, sharding=where)

        weights, head, tables = like(self._weights), like(self._head), like(self._tables)
        kv, last = like(self._kv), like(self._last_tokens)
        width = model.config.hidden_size
        jobs: dict[Any, Any] = {}
        for d in table:
            buffer = array(batch_layout(d, shape).size)
            function = partial(programs.backbone, model, d)
            # last_tokens is read here and written by the sampler: only the cache is donated.
            arguments = (weights, tables, kv, last, buffer)
            jobs[d] = (f"backbone_{d.kind}_{d.tokens}", function, (2,), arguments)
            if d.kind == "mixed":
                hidden = array(d.tokens, width, dtype=self._dtype)
                take = partial(programs.take_rows, table.max_requests)
                jobs["take", d.tokens] = (f"take_rows_{d.tokens}", take, (), (hidden, array()))
        for requests in sorted({d.requests for d in table}):
            rows, buffer = array(requests, width, dtype=self._dtype), array(sampling_layout(requests).size)
            for variant in SAMPLERS:
                arguments = (head, last, rows, buffer)
                if variant == "processed":
                    arguments += (array(processor_layout(requests, shape).size),)
                function = partial(programs.sampler, model, variant, requests)
                jobs[variant, requests] = (f"sample_{variant}_{requests}", function, (1,), arguments)
            function = partial(programs.logprobs, model)
            jobs["logprobs", requests] = (f"logprobs_{requests}", function, (), (head, rows, array(requests)))
        return jobs

    def _run_once(self, descriptor: Descriptor) -> None:
        """Run a program on padding alone, so that the first real step pays for nothing."""
        shape = self._model.shape
        batch, sampling = batch_layout(descriptor, shape).allocate(), sampling_layout(descriptor.requests).allocate()
        views = batch_layout(descriptor, shape).views(batch)
        views["slots"][:] = -1
        views["rows"][:] = shape.max_rows
        sampling_layout(descriptor.requests).view(sampling, "sample_rows")[:] = shape.max_rows
        for variant in SAMPLERS[:3]:
            self.execute(StepInput(0, descriptor, shape, variant, batch, sampling, logprobs=True)).result()

    def execute(self, step: StepInput) -> Handle:
        """Start a step."""
        d = step.descriptor
        kv, rows, hidden = self._program(d)(self._weights, self._tables, self._kv, self._last_tokens, step.batch)
        self._kv = kv
        arguments = (self._head, self._last_tokens, rows, step.sampling)
        if step.processors is not None:
            arguments += (step.processors,)
        self._last_tokens, tokens = self._program((step.sampler, d.requests))(*arguments)
        tokens.copy_to_host_async()
        top = None
        if step.logprobs:
            top = self._program(("logprobs", d.requests))(self._head, rows, tokens)
        prompt = None
        if step.prompt_targets is not None:
            prompt = self._prompt_logprobs(step.prompt_targets, hidden)
        return Handle(step, tokens, top, prompt)

    def logits(self, step: StepInput) -> np.ndarray:
        """Run a step and return its logits at every token: [T, vocab] float32. Compiles; for comparisons only."""
        program = self._program(step.descriptor)
        self._kv, _, hidden = program(self._weights, self._tables, self._kv, self._last_tokens, step.batch)
        return np.asarray(jax.jit(partial(decoder.head, self._model.ops["sample"]))(self._head, hidden))

    def _prompt_logprobs(self, targets: np.ndarray, hidden: jax.Array) -> list[tuple[jax.Array, ...]]:
        size = self._model.shape.max_rows
        take, top = self._program(("take", len(targets))), self._program(("logprobs", size))
        padded = np.zeros(-(-len(targets) // size) * size, np.int32)
        padded[: len(targets)] = np.maximum(targets, 0)
        starts = range(0, len(targets), size)
        return [top(self._head, take(hidden, np.int32(s)), padded[s : s + size]) for s in starts]

    def _program(self, key: Any) -> Callable[..., Any]:
        program = self._programs.get(key)
        if program is None:
            raise OutsideTable(f"no program for {key}: the table was frozen at start")
        return program

    def plans(self) -> Plans:
        """The implementation of each op."""
        return self._plans

    def compilations_after_ready(self) -> int:
        """XLA compilations in this process since warm_up returned."""
        if self._compiled_at_ready is None:
            raise InternalError("the worker is not warmed up yet")
        return _compilations - self._compiled_at_ready

    def close(self) -> None:
        """Drop weights, cache and programs."""
        self._programs.clear()
        self._weights = self._head = {}
        self._kv = self._last_tokens = None
        self._tables = None


class _Program:
    """A compiled executable and its name."""

    def __init__(self, name: str, compiled: Any) -> None:
        self.name = name
        self._compiled = compiled

    def __call__(self, *args: Any) -> Any:
        return self._compiled(*args)
