"""The torch worker: the same steps as the JAX worker, eager or with compiled layers, tokens fed
back on the device.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread

import numpy as np
import torch

from ..bucketing import Descriptor, Table
from ..ops import OpError, Plans
from ..ops.namespaces.torch_ import from_numpy, to_numpy
from ..shared.cache_folder import write_atomically
from ..shared.compilation_config import CUDAGraphMode
from ..shared.config import DeviceInfo, ResolvedConfig
from ..shared.errors import ConfigError, InternalError
from ..shared.models import decoder
from ..shared.models.caches import layout_of, request_pages, step_shape
from ..shared.models.config import ModelConfig
from ..shared.models.placement import shard_config
from ..shared.models.spec import Place, Shard
from ..shared.models.table import parameter_count
from ..shared.packer import padding
from ..shared.progress import Progress
from ..shared.step import PROCESSING, StepInput
from ..shared.worker import HOST_MEMORY_FOR_KV, ProgramReport, Worker, cache_pages, kv_page_bytes
from . import advice
from .advice import advise
from .backend import check_options, code_kept_in, key_factors, open_cache
from .compilation import check_effect, compiled_kinds
from .compile_pool import CompilePool, make_pool
from .devices import find_device, find_rank_device
from .fit import bind_plans, chooses, fit_mode, without_kernels
from .graphs import GraphRecorder
from .inputs import StepInputs
from .kernel_keys import hash_compiler, settle_own_keys
from .module import Decoder
from .monitor import count_late, watch_triton
from .one_device import on_device
from .plans import PROMPT_ROWS, make_plans
from .precision import pin_precision
from .precompile import call_kernels, compile_together, kernels_noted
from .programs import TOP, Programs
from .ranks import Ranks, join, least, shard_here
from .recording import CACHE_DTYPES, DTYPES
from .reserved import ReservedCache
from .results import Download, Handle
from .start_plan import read_start_plan, start_factors, write_start_plan
from .weights import load_weights

__all__ = [
    "TorchWorker", "find_device", "find_rank_device", "join_ranks", "make_plans", "make_worker",
]  # fmt: skip

SMALL_MODEL = 64_000_000
"""Weights below which a CPU runs on one thread: more gain nothing there, and wait for cores that
others hold (measured: 5 instead of 330 tokens/s with one of two cores busy).
"""
BUILT = "built"
"""A file in the cache's folder that says that a start has left all its code there."""


def join_ranks(place: Place, device: DeviceInfo) -> None:
    """Make this process one of the ranks."""
    if device.platform == "cuda":
        torch.cuda.set_device(device.index)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // place.here.count))
    join(place.shard, place.meeting, device.platform)


def make_worker(
    model: ModelConfig, config: ResolvedConfig, device: DeviceInfo, folder: str
) -> Worker:
    """A worker on `device` for the model in `folder`, or for one shard of it on a rank. Raises
    InternalError if this process is none of the ranks that the model needs.
    """
    shard = shard_here()
    if config.tensor_parallel_size != (1 if shard is None else shard.count):
        raise InternalError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, and this process is "
            f"{'no rank' if shard is None else f'one of {shard.count} ranks'}"
        )
    return on_device(device, lambda: TorchWorker(model, config, device, folder))


class TorchWorker:
    """Runs steps through torch. See `shared/worker.py` for the contract of each method."""

    multi_step = True

    @advise(advice.weights)
    def __init__(
        self, model: ModelConfig, config: ResolvedConfig, device: DeviceInfo, folder: str
    ) -> None:
        self.device = device
        self._folder = folder
        self._where = torch.device(device.platform)
        self._table = decoder.parameters_of(model)
        self._whole_model, shard = model, shard_here()
        if shard is not None:
            model = shard_config(model, shard)
        pin_precision()
        if device.platform == "cuda":
            Thread(target=hash_compiler, daemon=True).start()
        if device.platform == "cpu" and parameter_count(self._table) < SMALL_MODEL:
            torch.set_num_threads(1)
        try:
            self._plans = make_plans(model, config)
        except OpError as error:
            raise ConfigError(f"{error.options}: {error}") from error
        self._compilation, self.changes = fit_mode(config.compilation, self._plans)
        self.changes += without_kernels(self._plans)
        check_options(self._compilation)
        self._compiled = compiled_kinds(decoder.model_of(model), self._plans, self._compilation)
        check_effect(self._compilation, self._compiled)
        self.config = config = replace(config, compilation=self._compilation)
        if config.demand.streams and self._compilation.road == "piecewise":
            raise ConfigError(
                "cudagraph_mode, splitting_ops: the road 'piecewise' compiles the model as one, so "
                "there is nothing between its layers; streams are kept on the road 'regional'"
            )
        self._ops = bind_plans(self._plans, self._compilation, self._compiled)
        self._shape = step_shape(self._whole_model, config)
        self._layout = layout_of(self._whole_model, config)
        self._dtype = DTYPES[config.dtype]
        self._cache_dtype = CACHE_DTYPES[config.kv_cache_dtype]
        self._ranks = None if shard is None else Ranks(shard, model.vocab_size)
        held = decoder.parameters_of(model)
        self._module = Decoder(model, held, self._ops, self._dtype, self._where)
        self._kept_in: Path | None = None
        if self._compilation.level > 1:
            factors = key_factors(
                self._plans.hash,
                self._compilation,
                {"dtype": config.dtype, "kv": config.kv_cache_dtype, **asdict(model)},
            )
            self._kept_in = open_cache(self._compilation.cache_dir, factors)
        self._is_ready = False
        self._unsampled: Handle | None = None
        self.num_late = 0
        self._reserved: ReservedCache | None = None
        self._recorder: GraphRecorder | None = None
        self._reports: list[ProgramReport] = []
        watch_triton()
        self._pool: CompilePool | None = None
        if self._kernels_missing():
            self._begin_kernels(model, shard)

    def _begin_kernels(self, model: ModelConfig, shard: Shard | None) -> None:
        """Have most kernels compiled while weights are read."""
        try:
            with code_kept_in(self._kept_in):
                self._pool = make_pool(1 if shard is None else shard.count)
                if self._pool is not None and shard is None:  # shards would exchange data
                    with kernels_noted(self._pool.ask):
                        call_kernels(model, self.config, self._plans)
        except BaseException:
            self.end_pool()  # nobody has the worker yet, to close it
            raise

    @advise(advice.weights)
    def load(self, progress: Progress) -> None:
        """Read or make the weights."""
        config = self.config
        self._progress = progress
        if self._ranks is not None and chooses(self._plans, "peers"):
            from .kernels.reduce import best_of_peers, meet_peers  # Triton, which only GPUs need

            self._ranks.best_of_peers = best_of_peers
            meet_peers(config.max_num_batched_tokens, self._module.config.hidden_size, self._dtype)
        load_weights(
            self._module,
            self._folder,
            config.load_format,
            self._table,
            config.seed,
            progress,
            self._whole_model,
        )
        tables = decoder.rotary_tables(self._module.config, config.max_model_len)
        rotary = tuple(torch.from_numpy(table).to(self._where) for table in tables)
        table = config.table()
        self._inputs = StepInputs(table, self._shape, self._layout.groups, self._where)
        self._programs = Programs(
            self._module,
            self._ops,
            self._plans,
            self._compilation,
            table,
            self._inputs,
            rotary,
            self._where,
            self._dtype,
            self._compiled,
            self._layout.places,
            loops=config.decode_steps > 1,
            streams=config.demand.streams,
            ranks=self._ranks,
        )
        steps = config.decode_steps
        self._loop = torch.empty(steps * config.max_num_seqs, dtype=torch.int32, device=self._where)
        self._download = Download(self._loop.numel(), self.device.platform == "cuda")

    @advise(advice.steps)
    def measure(self) -> int:
        """Bytes for the KV cache: what is left once all programs run, captured on a cache that has
        addresses only.

        A start with the fingerprint of an earlier one takes what that one measured
        (`start_plan.py`).
        """
        if self.device.platform == "cpu":
            return HOST_MEMORY_FOR_KV
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        kept_free = int(total * (1 - self.config.memory_utilization))
        root = self._compilation.cache_dir
        factors = start_factors(
            self._module.config, self.config, self._plans.hash, self.device, free
        )
        known = read_start_plan(root, factors, free - kept_free)
        shortest = least(known or 0)
        if shortest > 0:
            return shortest
        self._reserved = self._reserve(free)
        if self._reserved is None:
            self.allocate_kv(2)
        else:
            self._use_cache(self._reserved.layers)
        self._reports = self._build(self.config.table())
        torch.cuda.synchronize()
        # What torch has reserved by now, graphs hold or eager steps use again
        # (`_take_eager_memory`).
        free = torch.cuda.mem_get_info()[0]
        most = cache_pages(self.config, free, self.page_bytes(), self._request_pages())
        if self._reserved is not None:
            granules = self._layout.stripe * self._reserved.granule
            free, most = free + self._reserved.bytes - granules, self._reserved.max_pages
        size = min(free - kept_free, most * self.page_bytes())
        if size > 0:
            write_start_plan(root, factors, size)
        return size

    def _reserve(self, free: int) -> ReservedCache | None:
        """Addresses of the largest cache that may be asked for; None where the driver has no
        virtual memory.
        """
        most = cache_pages(self.config, free, self.page_bytes(), self._request_pages())
        buffers, page, device = self._layout.stripe, self._page_shape(), torch.cuda.current_device()
        try:
            return ReservedCache(buffers, most, page, self._cache_dtype, device)
        except (InternalError, OSError) as error:
            warnings.warn(
                f"programs are built twice: no addresses could be reserved ({error})", stacklevel=2
            )
            return None

    def page_bytes(self) -> int:
        """Bytes of one page over all layers of a group."""
        return kv_page_bytes(self._layout, self._cache_dtype.itemsize)

    def _request_pages(self) -> int:
        return request_pages(self._whole_model, self.config)

    def _page_shape(self) -> tuple[int, int, int]:
        """One page in one buffer, as layers of the first group see it."""
        spec = self._layout.specs[0]
        return self._layout.groups[0].page_size, spec.rows, spec.head_dim

    @advise(advice.cache)
    def allocate_kv(self, num_pages: int) -> None:
        """Allocate the cache, or put memory behind the addresses that `measure` built programs on.

        Programs that were built on another cache are built again by `warm_up`.
        """
        if self._reserved is not None and num_pages <= self._reserved.max_pages:
            self._reserved.back(num_pages)
            return
        self._reports = []
        self._use_cache(())
        self._release()
        shape = (self._layout.stripe, num_pages + 1, *self._page_shape())
        self._use_cache(torch.zeros(shape, dtype=self._cache_dtype, device=self._where))

    def _use_cache(self, buffers: Sequence[torch.Tensor]) -> None:
        """Run on these buffers: layers of different groups share one."""
        self._kv = tuple(
            buffers[place.index].view(-1, *self._layout.page_shape(layer))
            for layer, place in enumerate(self._layout.places)
            if len(buffers)
        )
        self._programs.use_cache(self._kv)

    @advise(advice.steps)
    @torch.inference_mode()
    def warm_up(self, table: Table, progress: Progress) -> list[ProgramReport]:
        """Run each program on padding, which compiles it, and capture those that are replayed as
        graphs.
        """
        self._progress = progress
        reports = self._reports or self._build(table)
        if self._recorder is not None:
            # torch's sorts, launched outside of graphs, leave the device in a state where graphs
            # begin each kernel late, by 0.3 to 0.6 us (2 to 6 % of a decode step of a small model),
            # until one of ours is launched so.
            self._run_eagerly(min(table, key=lambda d: d.tokens))
        self._programs.freeze()
        self._is_ready = True
        return reports

    @torch.inference_mode()
    def _build(self, table: Table) -> list[ProgramReport]:
        seconds: dict[Descriptor, float] = dict.fromkeys(table, 0.0)
        captured = self._compilation.cudagraph_mode is not CUDAGraphMode.NONE
        recorder = self._recorder = GraphRecorder() if captured else None
        if recorder is not None and self._reserved is not None:
            self._reserved.wait_for(recorder)
        programs = self._programs
        if self._compilation.road == "piecewise":
            programs.run_whole(lambda: self._whole(table))

        def built(
            what: str, order: Sequence[Descriptor], build: Callable[[Descriptor], None]
        ) -> None:
            for done, d in enumerate(order):
                if self._ranks is not None:
                    least(1)  # no rank's kernels wait for what another one still compiles
                start = time.perf_counter()
                build(d)
                seconds[d] += time.perf_counter() - start
                self._progress(f"{what}{self._free_memory()}", done + 1, len(order))

        extent = {
            d: {"layers": layers, "samplers": samplers} for d, layers, samplers in programs.order()
        }

        with code_kept_in(self._kept_in), recorder.recording() if recorder else nullcontext():
            if self._where.type == "cuda":
                settle_own_keys()
            if not least(not self._kernels_missing()):
                self._compile_kernels(table)
            self.end_pool()
            built("programs", list(extent), lambda d: self._run_eagerly(d, **extent[d]))
            if recorder is not None:
                # The largest first: the smaller ones find their memory in the pool.
                order = sorted(table, key=lambda d: -d.tokens)
                built("graphs", order, lambda d: programs.capture(recorder, d))
                self._inputs.capture(recorder)
        self._take_eager_memory(table)
        if self._kept_in is not None:
            write_atomically(self._kept_in / BUILT, "")
        return [ProgramReport(str(d), seconds[d]) for d in table]

    def _compile_kernels(self, table: Table) -> None:
        """Compile all that programs launch, and load it."""
        pool = self._pool
        with kernels_noted(None if pool is None else pool.ask) as noted:
            for d in table:
                self._run_eagerly(d)
        self._programs.forget()
        compile_together(noted, lambda done: self._progress("kernels", done, len(noted)), pool)

    def end_pool(self) -> None:
        """End the processes that compile kernels, if any run."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _run_eagerly(self, d: Descriptor, *, layers: bool = False, samplers: bool = False) -> None:
        self._fill_padding(d)
        self._programs.run_eagerly(d, layers, samplers)

    def _take_eager_memory(self, table: Table) -> None:
        """Run the largest steps as they run where no graph holds them, so that none takes memory
        from the device later.

        torch keeps what is free by stream. What the runs before took on the stream of the captures
        would serve nobody: it goes back, and these run on the stream of the steps.
        Log-probabilities of prompts never come from graphs.
        """
        if self._recorder is not None:
            torch.cuda.empty_cache()
        largest = max(table, key=lambda d: d.tokens)
        self._fill_padding(largest)
        hidden = self._programs.hidden(largest)[:PROMPT_ROWS]
        self._prompt_logprobs(np.zeros(hidden.shape[0], np.int32), hidden)
        del hidden
        for kind in ("decode", "mixed"):
            d = max((d for d in table if d.kind == kind), key=lambda d: d.tokens)
            if self._programs.allocates(d):
                self._fill_padding(d)
                self._programs.backbone(d)

    def _fill_padding(self, d: Descriptor) -> None:
        step = padding(d, self._shape)
        self._inputs.fill(step, self._current_stream(), host=self._programs.host_metadata[d.kind])

    def _free_memory(self) -> str:
        return (
            f"; {torch.cuda.mem_get_info()[0] / 1e9:.1f} GB free"
            if self._where.type == "cuda"
            else ""
        )

    def _kernels_missing(self) -> bool:
        """Whether it pays to look for kernels first: nothing else is compiled, and they are not
        in the cache yet.
        """
        if self._where.type != "cuda" or self._compiled or self._compilation.road == "piecewise":
            return False
        return self._kept_in is None or not (self._kept_in / BUILT).exists()

    def _whole(self, table: Table) -> Callable[..., torch.Tensor]:
        from .piecewise import build  # what only this road needs takes a second to import

        return build(
            self._module, self.config, self._plans, table, self._kv, progress=self._progress
        )

    @count_late
    @torch.inference_mode()
    def execute(self, step: StepInput) -> Handle:
        """Start a step."""
        if self._unsampled is not None:
            raise InternalError(f"step {self._unsampled.step.step_id} has no sampler yet")
        programs, d = self._programs, step.descriptor
        stream = self._current_stream()
        self._inputs.fill(step, stream, host=programs.host_metadata[d.kind])
        prompt = None
        if step.prompt_targets is not None:
            prompt = self._prompt_logprobs(step.prompt_targets, programs.hidden(d))
        programs.backbone(d)
        if step.sampler in PROCESSING:
            programs.head(d.requests)
        kept = programs.kept_streams(d)
        streams = None if kept is None else [kept]
        if step.loop is not None:
            self._download.wait_for_last(stream)
            made = self._decode(step, step.loop.steps, streams)
            return Handle(step, self._download.start(made, stream), None, None, None, streams)
        drops = streams is not None and programs.drops_rows(d)
        handle = Handle(step, None, None, prompt, None, streams, drops)
        if step.waiting is None:
            self._sample(handle, stream)
        else:
            # All but the masks, which are awaited.
            self._inputs.fill_around_masks(step)
            self._unsampled = handle
        return handle

    @count_late
    @torch.inference_mode()
    def sample(self, masks: np.ndarray) -> None:
        """Start the sampler of the step that waits."""
        handle, self._unsampled = self._unsampled, None
        if handle is None:
            raise InternalError("no step waits for masks")
        self._sample(handle, self._current_stream(), masks)

    def new_masks(self, count: int, words: int) -> np.ndarray:
        """Memory for masks [count, words] that `sample` sends without a copy."""
        return self._inputs.new_masks(count, words)

    def _current_stream(self) -> torch.cuda.Stream | None:
        """That of the steps."""
        return torch.cuda.current_stream() if self._where.type == "cuda" else None

    def _sample(
        self,
        handle: Handle,
        stream: torch.cuda.Stream | None,
        masks: np.ndarray | None = None,
    ) -> None:
        """`masks`: what the step has waited for."""
        programs, step = self._programs, handle.step
        requests = step.descriptor.requests
        self._download.wait_for_last(stream)
        if masks is not None:
            self._inputs.fill_masks(step, masks, stream)
        elif step.processors is not None:
            self._inputs.fill_processors(requests, step.sampler, step.processors)
        programs.sample(requests, step.sampler)
        if step.processors is not None:
            self._inputs.processors_were_read(stream)
        tokens = programs.tokens[:requests]
        if step.logprobs:
            handle.top = self._to_host(programs.sample(requests, TOP))
        on_its_way = handle.top is not None or handle.prompt is not None
        if on_its_way and stream is not None:
            handle.ready = torch.cuda.Event()
            handle.ready.record(stream)
        handle.tokens = self._download.start(tokens, stream)

    def _decode(
        self, step: StepInput, steps: int, streams: list[torch.Tensor] | None
    ) -> torch.Tensor:
        """The tokens [steps R] of a loop, whose first backbone has run: all steps, as graphs
        cannot stop. `streams` gets those of each.
        """
        programs, d = self._programs, step.descriptor
        made = self._loop[: steps * d.requests].view(steps, d.requests)
        for index in range(steps):
            if index:
                programs.advance(d)
                programs.backbone(d)
                kept = programs.kept_streams(d)
                if streams is not None and kept is not None:
                    streams.append(kept)
            programs.sample(d.requests, step.sampler)
            made[index].copy_(programs.tokens[: d.requests])
        return made

    @torch.inference_mode()
    def logits(self, step: StepInput) -> np.ndarray:
        """Run a step and return its logits at every token: [T, vocab] float32. For comparisons
        only.
        """
        host = self._programs.host_metadata[step.descriptor.kind]
        self._inputs.fill(step, self._current_stream(), host=host)
        logits: np.ndarray = (
            self._programs.logits(self._programs.hidden(step.descriptor)).cpu().numpy()
        )
        return logits

    def _prompt_logprobs(
        self, targets: np.ndarray, hidden: torch.Tensor
    ) -> list[tuple[torch.Tensor, ...]]:
        chosen = self._upload(np.maximum(targets, 0))
        parts = zip(hidden.split(PROMPT_ROWS), chosen.split(PROMPT_ROWS), strict=True)
        return [
            self._to_host(self._ops["sample"].top_logprobs(self._programs.logits(rows), ids))
            for rows, ids in parts
        ]

    def _upload(self, x: np.ndarray) -> torch.Tensor:
        """A copy on the device that never waits for it: through pinned memory, which torch frees
        when it was read.
        """
        if self._where.type == "cpu":
            return torch.from_numpy(x)
        pinned = torch.empty(x.shape, dtype=torch.int32, pin_memory=True)
        pinned.numpy()[...] = x
        return pinned.to(self._where, non_blocking=True)

    def _to_host(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if self._where.type == "cpu":
            return tensors
        pinned = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
        return tuple(
            host.copy_(x, non_blocking=True) for host, x in zip(pinned, tensors, strict=True)
        )

    @torch.inference_mode()
    def read_pages(self, layer: int, pages: Sequence[int]) -> np.ndarray:
        """What pages hold of a layer; waits for the steps in flight."""
        index = torch.as_tensor(np.asarray(pages), device=self._where)
        return to_numpy(self._kv[layer][index])

    @torch.inference_mode()
    def write_pages(self, layer: int, pages: Sequence[int], content: np.ndarray) -> None:
        """Let pages hold `content` of a layer."""
        index = torch.as_tensor(np.asarray(pages), device=self._where)
        self._kv[layer][index] = from_numpy(content).to(self._where)

    def read_weights(self, layer: int) -> Mapping[str, np.ndarray]:
        """The weights of a layer as the programs get them; -1: those outside of layers."""
        module = self._module
        held = module.top_weights if layer < 0 else module.layer_weights[layer]
        return {name: to_numpy(x.detach()) for name, x in held.items()}

    def read_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """The rotary tables as the programs get them."""
        cos, sin = (to_numpy(x) for x in self._programs.tables)
        return cos, sin

    def read_page_tables(self) -> np.ndarray:
        """The page tables on the device; waits for the steps in flight."""
        found: np.ndarray = to_numpy(self._inputs.pages)
        return found

    def plans(self) -> Plans:
        """The implementation of each op."""
        return self._plans

    def plan_hash(self) -> str:
        """See `Worker`."""
        return self._plans.hash

    def compilations_after_ready(self) -> int:
        """What was compiled while steps of this worker started: graphs, generated code, kernels."""
        if not self._is_ready:
            raise InternalError("the worker is not warmed up yet")
        return self.num_late

    def _release(self) -> None:
        """Give the reserved addresses and what lies behind them back."""
        if self._reserved is not None:
            self._reserved.free()
            self._reserved = None

    def _wait(self) -> None:
        """Wait for all that still runs."""
        if self._where.type == "cuda":
            torch.cuda.default_stream(self._where).synchronize()
            if self._recorder is not None:
                self._recorder.synchronize()

    def close(self) -> None:
        """Drop weights, cache and graphs, once nothing runs: code that is dropped is unloaded, and
        a start that was interrupted has not waited.
        """
        self.end_pool()
        try:
            self._wait()
        finally:
            self._module = self._kv = self._programs = self._inputs = None  # type: ignore[assignment]  # closed for good
            self._recorder = None
            try:
                self._release()
            finally:
                self._leave()

    def _leave(self) -> None:
        """Let go of other ranks, and give the memory that is held for nobody to the device."""
        if self._ranks is not None and chooses(self._plans, "peers"):
            from .kernels.reduce import leave_peers

            leave_peers()
        if self._where.type == "cuda":
            torch.cuda.empty_cache()
