"""The JAX worker: a frozen table of compiled programs, one donated KV buffer, tokens fed back on
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from ..bucketing import Descriptor, Table
from ..ops import OpError, Plans
from ..shared.config import Change, DeviceInfo, ResolvedConfig
from ..shared.errors import ConfigError, InternalError, OutsideTable
from ..shared.models import decoder
from ..shared.models.caches import request_pages
from ..shared.models.config import ModelConfig
from ..shared.models.spec import Place
from ..shared.packer import padding
from ..shared.progress import Progress
from ..shared.step import (
    PROCESSING,
    STOP_SLOTS,
    DecodeLoop,
    Sampler,
    StepInput,
    StepOutput,
    TopLogprobs,
    with_masks,
)
from ..shared.step_difference import (
    SamplerBuffers,
    StepBuffers,
    sampler_size,
)
from ..shared.worker import HOST_MEMORY_FOR_KV, ProgramReport, Worker, step_temporaries
from . import compilation, executables, footprint, hosts
from .compilation_cache import use_cache
from .kv_buffer import as_buffer, as_heads, page_bytes
from .ladder import describe, jobs, program_model
from .plans import make_plans
from .platforms import compiler_memory, devices_of, find_device, memory_of
from .programs import loop_sampler, loop_samplers
from .sharding import lying_in_rows, make_mesh, on
from .state import State, initial_state
from .weights import load_weights

__all__ = [
    "JaxWorker", "find_device", "find_rank_device", "join_ranks", "make_plans", "make_worker",
]  # fmt: skip


def make_worker(
    model: ModelConfig, config: ResolvedConfig, device: DeviceInfo, folder: str
) -> Worker:
    """A worker on `device` for the model in `folder`, on all hosts if there are several."""
    return hosts.on_all_hosts(JaxWorker(model, config, device, folder), model, config, folder)


def empty_buffer(kv: jax.ShapeDtypeStruct) -> Any:
    """The function, jitted, that makes the KV buffer `kv` where it lies."""
    return jax.jit(lambda: jnp.zeros(kv.shape, kv.dtype), out_shardings=kv.format)


def find_rank_device(device: str, place: Place) -> DeviceInfo:
    """The JAX device of one of several ranks, each with all devices of its machine that it sees: as
    JAX looks for devices once, they are joined here. Raises BackendUnavailable.
    """
    hosts.join_ranks(place.meeting.removeprefix("tcp://"), place.shard)
    return find_device(device)


def join_ranks(place: Place, device: DeviceInfo) -> None:
    """Nothing: it was joined when its device was found."""


@dataclass(slots=True)
class Handle:
    """A started step. The arrays are futures; copies to the host are under way."""

    step: StepInput
    tokens: jax.Array | None
    """[S], or of a loop [N + 1, R], the last row saying how many of the others there are. None: the
    step waits for masks.
    """
    top: tuple[jax.Array, ...] | None
    prompt: list[tuple[jax.Array, ...]] | None
    streams: jax.Array | None = None

    def result(self) -> StepOutput:
        """Wait for the step. Raises InternalError if it waits for masks."""
        if self.tokens is None:
            raise InternalError(f"step {self.step.step_id} has no sampler yet")
        prompt = None
        if self.prompt is not None:
            parts = [[np.asarray(x) for x in part] for part in self.prompt]
            count = self.step.descriptor.tokens
            prompt = TopLogprobs(
                *(np.concatenate(column)[:count] for column in zip(*parts, strict=True))
            )
        # Behind the step's own rows are those that the sampler was padded with.
        requests = self.step.descriptor.requests
        top = (
            None if self.top is None else TopLogprobs(*(np.asarray(x)[:requests] for x in self.top))
        )
        tokens = np.asarray(self.tokens)
        streams = None if self.streams is None else np.asarray(self.streams)
        if self.step.loop is None:
            tokens, streams = tokens[:requests], None if streams is None else streams[None]
        else:
            tokens = tokens[: tokens[-1, 0]]
            streams = None if streams is None else streams[: len(tokens)]
        return StepOutput(self.step.step_id, tokens, top, prompt, streams)


def _begin_copies(arrays: Iterable[jax.Array]) -> None:
    """Have arrays copied to the host as soon as they are there, so that nobody waits for a copy
    that has not begun.
    """
    for array in arrays:
        array.copy_to_host_async()


class JaxWorker:
    """Runs steps through XLA executables. See `shared/worker.py` for the contract of each
    method.
    """

    multi_step = True

    def __init__(
        self, model: ModelConfig, config: ResolvedConfig, device: DeviceInfo, folder: str
    ) -> None:
        self.device = device
        self._folder = folder
        self.config = config
        self.changes: list[Change] = []
        self._loaded = model
        self._mesh = make_mesh(devices_of(device), config.tensor_parallel_size)
        try:
            self._plans = make_plans(model, config)
            self._model = program_model(model, config, self._plans, self._mesh)
        except OpError as error:
            raise ConfigError(f"{error.options}: {error}") from error
        self._stored: executables.Reader | None = None
        """The programs of `aot_folder`, which must be for exactly this engine and machine."""
        if config.aot_folder is not None:
            # Before weights are read: all but the pages that there is memory for.
            self._stored = executables.Reader(config.aot_folder)
            self._stored.check(self._key(self._stored.num_pages), ())
        self.changes.append(use_cache(config.compilation_cache_dir, list(self._mesh.devices.flat)))
        self._dtype = jnp.dtype(config.dtype)
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._built: footprint.Built = {}
        self._is_ready = False
        self._unsampled: tuple[Handle, jax.Array, Any] | None = None
        self._shared: tuple[np.ndarray | None, Any] = None, None
        self._num_late = 0
        self._weights: dict[str, Any] = {}
        self._head: dict[str, Any] = {}
        self._logits = jax.jit(
            partial(decoder.head, self._model.ops["sample"], decoder.model_of(model))
        )

    def load(self, progress: Progress) -> None:
        """Read or make the weights."""
        self._progress = progress
        model, config = self._loaded, self.config
        self._weights = load_weights(
            self._folder,
            config.load_format,
            model,
            decoder.parameters_of(model),
            self._model.blocks,
            self._dtype,
            config.seed,
            self._mesh,
            progress,
        )
        head = "embed" if model.tie_embeddings else "head"
        self._head = {head: self._weights[head]}
        angles = np.concatenate(decoder.rotary_tables(model, config.max_model_len), axis=1)
        self._angles = self._put_in_rows(angles)
        self._last_tokens = self._put(np.zeros(config.max_num_seqs + 1, np.int32))

    def _put(self, x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, on(self._mesh), lambda index: x[index])

    def _put_in_rows(self, x: np.ndarray) -> jax.Array:
        """x on all devices. Programs take rows of it, so that it lies in rows."""
        places = map(SingleDeviceSharding, self._mesh.local_devices)
        parts = [jax.device_put(x, lying_in_rows(place, *x.shape)) for place in places]
        return jax.make_array_from_single_device_arrays(x.shape, on(self._mesh), parts)

    def measure(self) -> int:
        """Bytes for the KV cache on each device.

        On a TPU the largest programs are compiled for it. Those that have no cache among their
        arguments are kept; the others, one of each kind, are compiled again once the size of the
        cache is known.
        """
        page, config = self.page_bytes(), self.config
        stored = None if self._stored is None else self._stored.num_pages * page
        if self.device.platform == "cpu":
            return HOST_MEMORY_FOR_KV if stored is None else stored
        memory = [memory_of(device) for device in self._mesh.local_devices]
        limit, used = min(limit for limit, _ in memory), max(used for _, used in memory)
        if stored is not None:
            # What fits was found when they were compiled, by the compiler's word on the memory, of
            # which a runtime offers some megabytes less.
            counted = max(limit, compiler_memory(self.device.name))
            return min(stored, int(counted * config.memory_utilization) - used - page)
        allowed = int(limit * config.memory_utilization)
        if self.device.platform != "tpu":
            return allowed - used - step_temporaries(self._loaded, config) - page
        least = request_pages(self._loaded, config)
        shapes = describe(self._loaded, config, self._model.blocks, least, self._mesh)
        work = jobs(self._model, config.table(), shapes, self._dtype, self._mesh)
        cache = (least + 1) * page
        needed, self._built = footprint.measure(
            work, shapes, cache, self._mesh, self._plans.hash, self._progress
        )
        return needed.room(allowed, page, used)

    def page_bytes(self) -> int:
        """Bytes of one page over all layers, on each device."""
        return page_bytes(self._loaded, self.config, jnp.dtype(self.config.kv_cache_dtype))

    def allocate_kv(self, num_pages: int) -> None:
        """Allocate the one KV buffer of all layers."""
        self._shapes = describe(
            self._loaded, self.config, self._model.blocks, num_pages, self._mesh
        )
        self._num_pages = num_pages
        self._buffers = StepBuffers(self._model.shape)
        self._state = State(*map(self._put, initial_state(self._model.shape)))
        self._sampler_buffers = SamplerBuffers(self._model.shape)
        histories = self._shapes.histories
        self._histories = self._put(np.zeros(histories.shape, histories.dtype))
        self._halted = self._put(np.zeros((), np.bool_))
        self._kv = empty_buffer(self._shapes.kv)()

    def warm_up(self, table: Table, progress: Progress) -> list[ProgramReport]:
        """Compile every program in a thread pool."""
        work = jobs(self._model, table, self._shapes, self._dtype, self._mesh)
        reports: list[ProgramReport] = []
        stored = self._stored
        if stored is not None:
            stored.check(self._key(self._num_pages), [job.name for job in work.values()])
        known = footprint.reusable(self._built, work)
        self._built = {}
        built = compilation.compile_all(work, self._mesh, self._plans.hash, progress, stored, known)
        for key, program, report in built:
            self._programs[key] = program
            reports.append(report)
        self._state = self._program("update")(self._state, self._buffers.nothing())
        for descriptor in table:
            self._run_once(descriptor)
        self._is_ready, self._num_late = True, 0
        return reports

    def _key(self, num_pages: int) -> dict[str, Any]:
        """What stored programs must have been compiled for."""
        return executables.key(self._loaded, self.config, self._plans.hash, self._mesh, num_pages)

    def _run_once(self, descriptor: Descriptor) -> None:
        """Run a program on padding alone, so that the first real step pays for nothing."""
        step, demand = padding(descriptor, self._model.shape), self._model.demand
        for variant in demand.samplers:
            if variant not in PROCESSING:
                self.execute(replace(step, sampler=variant, logprobs=demand.logprobs)).result()
        if self._model.decode_steps > 1 and descriptor.kind == "decode":
            loop = DecodeLoop(1, False, np.full((descriptor.requests, STOP_SLOTS), -1, np.int32))
            for variant in loop_samplers(demand):
                self.execute(replace(step, sampler=variant, loop=loop)).result()

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
        before = compilation.compilations_here()
        try:
            yield
        finally:
            self._num_late += compilation.compilations_here() - before

    def _execute(self, step: StepInput) -> Handle:
        if self._unsampled is not None:
            raise InternalError(f"step {self._unsampled[0].step.step_id} has no sampler yet")
        if step.loop is not None:
            return self._execute_loop(step)
        rows, hidden, picked, streams = self._backbone(step)
        handle = Handle(step, None, None, None, streams)
        if step.prompt_targets is not None:
            handle.prompt = self._prompt_logprobs(step.prompt_targets, hidden)
        if step.waiting is None:
            self._sample(handle, rows, picked, step.processors)
        else:
            self._unsampled = handle, rows, picked
        return handle

    def _sample(
        self, handle: Handle, rows: jax.Array, picked: Any, processors: np.ndarray | None
    ) -> None:
        step, d = handle.step, handle.step.descriptor
        arguments: tuple[Any, ...] = (
            self._head,
            self._last_tokens,
            self._state.parameters,
            rows,
            picked,
        )
        size = sampler_size(d.requests, self._model.shape.max_rows)
        if processors is not None:
            arguments += (self._of_sampler(step, processors),)
        program = self._program((self._sampler(step), size))
        if step.sampler == "processed":
            spans, new_tokens = self._sampler_buffers.histories(step)
            for span in spans:
                self._histories = self._program("remember")(self._histories, span)
            arguments += (self._histories, new_tokens)
            self._last_tokens, tokens, self._histories = program(*arguments)
        else:
            self._last_tokens, tokens = program(*arguments)
        tokens.copy_to_host_async()
        if step.logprobs:
            handle.top = self._program(("logprobs", size))(self._head, rows, tokens)
            _begin_copies(handle.top)
        handle.tokens = tokens

    def _of_sampler(self, step: StepInput, processors: np.ndarray) -> Any:
        """The processors that the sampler gets. What steps share stays on the devices."""
        wider = self._sampler_buffers.processors(step, processors)
        if processors.flags.writeable:
            return wider
        if wider is not self._shared[0]:
            self._shared = wider, self._put(wider)
        return self._shared[1]

    def _sampler(self, step: StepInput) -> Sampler:
        """What the step is sampled with: what it asks for, or what stands in for it."""
        return self._model.demand.sampler_for(step.sampler) or step.sampler

    def _backbone(self, step: StepInput) -> tuple[Any, ...]:
        """(rows to sample, all hidden states, what the sampler has to know of them, streams)."""
        buffer = self._difference(step)
        arguments = (self._weights, self._angles, self._kv, self._state, self._last_tokens, buffer)
        self._kv, self._state, *rest = self._program(step.descriptor)(*arguments)
        return tuple(rest)

    def _difference(self, step: StepInput) -> np.ndarray:
        """What the step sends; what is too much for one buffer is sent before."""
        spilled, buffer = self._buffers.pack(step)
        for part in spilled:
            self._state = self._program("update")(self._state, part)
        return buffer

    def _execute_loop(self, step: StepInput) -> Handle:
        program = self._program(
            ("loop", loop_sampler(self._sampler(step)), step.descriptor.requests)
        )
        buffer = self._difference(step)
        arguments = (
            self._weights,
            self._angles,
            self._kv,
            self._state,
            self._last_tokens,
            self._halted,
            buffer,
        )
        self._kv, self._state, self._last_tokens, self._halted, tokens, streams = program(
            *arguments
        )
        tokens.copy_to_host_async()
        return Handle(step, tokens, None, None, streams)

    def logits(self, step: StepInput) -> np.ndarray:
        """Run a step and return its logits at every token: [T, vocab] float32. Compiles; for
        comparisons only.
        """
        hidden = self._backbone(step)[1]
        return np.asarray(self._logits(self._head, hidden))

    def read_pages(self, layer: int, pages: Sequence[int]) -> np.ndarray:
        """What pages hold of a layer; waits for the steps in flight, and compiles. One shard."""
        return np.asarray(self._heads(layer)[self._pages_of(layer, pages)])

    def write_pages(self, layer: int, pages: Sequence[int], content: np.ndarray) -> None:
        """Let pages hold `content` of a layer; compiles. One shard only."""
        heads = self._heads(layer).at[self._pages_of(layer, pages)].set(content)
        self._kv = jax.device_put(as_buffer(heads, self._kv, 1), self._shapes.kv.format)

    def _heads(self, layer: int) -> jax.Array:
        """The cache of all layers, in pages as those of a layer see them."""
        shape = self._model.layout.page_shape(layer)
        return as_heads(self._kv, shape, 1, jnp.dtype(self.config.kv_cache_dtype))

    def _pages_of(self, layer: int, pages: Sequence[int]) -> np.ndarray:
        """Where pages of a layer stand in the cache of all layers."""
        return self._model.layout.places[layer].index * (self._num_pages + 1) + np.asarray(pages)

    def read_weights(self, layer: int) -> Mapping[str, np.ndarray]:
        """The weights of a layer as the programs get them; -1: those outside of layers."""
        if layer < 0:
            held = {name: x for name, x in self._weights.items() if name != "blocks"}
            return {name: np.asarray(x) for name, x in (held | self._head).items()}
        blocks = zip(self._model.blocks, self._weights["blocks"], strict=True)
        block, of_block = next(pair for pair in blocks if layer < pair[0].stop)
        repeat, position = divmod(layer - block.first, block.period)
        return {name: np.asarray(x[repeat]) for name, x in of_block[position].items()}

    def read_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """The rotary tables as the programs get them."""
        cos, sin = np.split(np.asarray(self._angles), 2, axis=1)
        return cos, sin

    def read_page_tables(self) -> np.ndarray:
        """The page tables on the device; waits for the steps in flight."""
        return np.asarray(self._state.pages)

    def _prompt_logprobs(
        self, targets: np.ndarray, hidden: jax.Array
    ) -> list[tuple[jax.Array, ...]]:
        size = self._model.shape.max_rows
        take, top = self._program(("take", len(targets))), self._program(("logprobs", size))
        padded = np.zeros(-(-len(targets) // size) * size, np.int32)
        padded[: len(targets)] = np.maximum(targets, 0)
        starts = range(0, len(targets), size)
        parts = [top(self._head, take(hidden, np.int32(s)), padded[s : s + size]) for s in starts]
        for part in parts:
            _begin_copies(part)
        return parts

    def _program(self, key: Any) -> Callable[..., Any]:
        program = self._programs.get(key)
        if program is None:
            raise OutsideTable(f"no program for {key}: the table was frozen at start")
        return program

    def plans(self) -> Plans:
        """The implementation of each op."""
        return self._plans

    def plan_hash(self) -> str:
        """See `Worker`."""
        return self._plans.hash

    def compilations_after_ready(self) -> int:
        """XLA compilations while steps of this worker started; another engine's start is not its
        fault.
        """
        if not self._is_ready:
            raise InternalError("the worker is not warmed up yet")
        return self._num_late

    def close(self) -> None:
        """Drop weights, cache and programs."""
        self._programs.clear()
        self._built = {}
        self._weights = self._head = {}
        self._kv = self._state = self._last_tokens = self._halted = None  # type: ignore[assignment]  # closed for good
        self._angles = self._histories = None
        self._shared = None, None
