"""Compiles programs of a model for a TPU slice that nobody has to own, and says what each needs and
what fits.

Every figure is the compiler's: nothing here has run on a TPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ..bucketing import Descriptor
from ..ops import OpError
from ..shared.checkpoint import has_weights
from ..shared.config import EngineConfig, ResolvedConfig, resolve
from ..shared.errors import ConfigError
from ..shared.kv_scales import with_scales
from ..shared.models import decoder
from ..shared.models.caches import cached_tokens, layout_of, request_pages, step_shape
from ..shared.models.config import ModelConfig
from ..shared.packer import padding
from ..shared.progress import Progress
from ..shared.quantized import with_quantization
from ..shared.step_cost import Devices, Estimate, estimate, ici
from ..shared.worker import cache_pages
from . import compilation, executables, footprint
from .aot_report import AotReport, ProgramCost, program_cost
from .kv_buffer import page_bytes
from .ladder import Job, Shapes, bytes_per_device, describe, is_step, jobs, largest, program_model
from .plans import make_plans
from .platforms import Topology, topology
from .sharding import check_all_take_part, make_mesh

PROGRAMS = ("largest", "steps", "all")
"""Which programs `build` compiles."""
USUAL_LENGTH = 1024
"""Tokens of the requests whose times are estimated, if the cache holds so many."""


def build(
    name: str,
    folder: str,
    model: ModelConfig,
    where: str,
    options: dict[str, Any],
    out: str | None,
    progress: Progress,
    which: str = "largest",
) -> AotReport:
    """Compile programs of `model`, whose files are in `folder`, for the slice `where`. Raises
    ConfigError, CheckpointError, BackendUnavailable.

    `options` are those of `EngineConfig`. Of `which` programs: the `largest` of each kind, of these
    the `steps` alone (what samplers take is not counted then), or `all`. With `out` all of them
    are, and they and their manifest are written there.
    """
    if which not in PROGRAMS:
        raise ConfigError(f"programs: got {which!r}, allowed are {', '.join(PROGRAMS)}")
    if (stored := options.get("aot_folder")) is not None:
        raise ConfigError(
            f"aot_folder: got {stored}, which a start reads; this writes, to the folder of --out"
        )
    target = topology(where)
    # A compile-only client can write JAX's cache but not read it.
    jax.config.update("jax_enable_compilation_cache", False)
    asked = EngineConfig(**options, model=name, backend="jax")
    model, quantized = with_quantization(model, asked.quantization)
    config, changes = resolve(asked, model, target.info)
    read = config.load_format != "dummy" and has_weights(folder)
    model, scales = with_scales(model, config, folder if read else None)
    changes += [*quantized, *scales]
    start = time.perf_counter()
    mesh = make_mesh(target.devices, config.tensor_parallel_size)
    if target.hosts > 1:
        whose = f"the {target.hosts} hosts of {where}"
        check_all_take_part(config.tensor_parallel_size, whose, len(target.devices))
    try:
        # Kernels ask the abstract mesh which TPU they are chosen for.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            plans = make_plans(model, config)
        tools = program_model(model, config, plans, mesh)
    except OpError as error:
        raise ConfigError(f"{error.options}: {error}") from error
    if out is not None:
        executables.make_folder(out)  # a wrong one shows before minutes of work
        which = "all"
    slice_ = Slice(model, config, target, tools, plans.hash, mesh, progress, which)
    report = AotReport(
        name,
        target.name,
        len(target.devices),
        target.hosts,
        config.tensor_parallel_size,
        plans.hash,
        target.chip.hbm,
        bytes_per_device(slice_.shapes(1).weights),
        config.page_size,
        slice_.page,
        [str(change) for change in changes],
    )
    known = slice_.fit(report)
    if report.fits:
        writer = None
        if out is not None:
            writer = executables.Writer(
                out, executables.key(model, config, plans.hash, mesh, report.num_pages)
            )
        slice_.compile(report, known, writer)
        report.estimates = slice_.estimates(report.kv_tokens)
        report.step_message = slice_.step_message()
        report.fits = not report.too_large
        if writer is not None and report.fits:
            report.written_to = writer.finish()
    report.seconds = time.perf_counter() - start
    return report


@dataclass(frozen=True, slots=True)
class Slice:
    """A model on the devices of a slice: what fits there, and its programs."""

    model: ModelConfig
    config: ResolvedConfig
    target: Topology
    tools: Any
    plan_hash: str
    mesh: Any
    progress: Progress
    which: str

    @property
    def page(self) -> int:
        """Bytes of a page on each device."""
        return page_bytes(self.model, self.config, jnp.dtype(self.config.kv_cache_dtype))

    @property
    def allowed(self) -> int:
        """Bytes of each device that may be used."""
        return int(self.target.chip.hbm * self.config.memory_utilization)

    def shapes(self, pages: int) -> Shapes:
        """What lives on the devices, with a cache of `pages` pages."""
        return describe(self.model, self.config, self.tools.blocks, pages, self.mesh)

    def ladder(self, pages: int) -> dict[Any, Job]:
        """All programs that a worker builds, with a cache of `pages` pages."""
        return jobs(
            self.tools,
            self.config.table(),
            self.shapes(pages),
            jnp.dtype(self.config.dtype),
            self.mesh,
        )

    def jobs(self, pages: int) -> dict[Any, Job]:
        """Those of them that count here."""
        return {
            key: job
            for key, job in self.ladder(pages).items()
            if self.which != "steps" or is_step(key)
        }

    def fit(self, report: AotReport) -> footprint.Built:
        """Find out how large the cache is, or say what is too large. Returns what was compiled
        for it.
        """
        config, page = self.config, self.page
        angles = bytes_per_device(self.shapes(1).angles)
        least = {"weights": report.weights, "rotary tables": angles}
        room = self.allowed - sum(least.values()) - page
        wanted = self._wanted(room)
        if wanted * page > room:
            self._refuse(report, least, wanted, room)
            return {}
        pages = request_pages(self.model, config)
        cache = (pages + 1) * page
        try:
            needed, built = footprint.measure(
                self.jobs(pages),
                self.shapes(pages),
                cache,
                self.mesh,
                self.plan_hash,
                self.progress,
            )
        except footprint.DoesNotFit as error:
            report.too_large.append({"what": "a program", "why": str(error)})
            return {}
        report.besides = needed.parts()
        room = needed.room(self.allowed, page)
        wanted = self._wanted(room)
        if wanted * page > room:
            self._refuse(report, needed.parts(), wanted, room)
            return {}
        report.set_pages(wanted, self._tokens(wanted))
        report.fits = True
        return built

    def _tokens(self, pages: int) -> int:
        """Tokens that so many pages hold."""
        layout = layout_of(self.model, self.config)
        return cached_tokens(layout, pages, self.config.max_model_len)

    def _wanted(self, room: int) -> int:
        """Pages that the options ask for, or what a worker takes of `room` bytes, at least those
        of one request.
        """
        config, page = self.config, self.page
        if config.num_pages is not None:
            return config.num_pages
        if config.kv_cache_memory is not None:
            return max(1, config.kv_cache_memory // page)
        needed = request_pages(self.model, config)
        return max(cache_pages(config, room, page, needed), needed)

    def _refuse(self, report: AotReport, besides: dict[str, int], wanted: int, room: int) -> None:
        config, page = self.config, self.page
        pages = max(0, room // page)
        report.set_pages(pages, self._tokens(pages))
        cache = f"KV cache for {self._tokens(wanted)} tokens ({wanted} pages)"
        if wanted == request_pages(self.model, config):
            cache += f": one request of {config.max_model_len}"
        each = {**besides, "scratch page": page, cache: wanted * page}
        each["all of these"] = sum(each.values())
        each[f"allowed: {config.memory_utilization:.0%} of its memory (memory_utilization)"] = (
            self.allowed
        )
        report.too_large = [
            {"what": f"each device: {what}", "bytes": size} for what, size in each.items()
        ]
        parts: dict[str, int] = {}
        for p, _ in decoder.parameters_of(self.model).placed():
            size = prod(p.shape) * jnp.dtype(p.dtype_in(config.dtype)).itemsize
            parts[p.name] = parts.get(p.name, 0) + size
        most = sorted(parts.items(), key=lambda part: -part[1])[:5]
        report.too_large += [{"what": f"whole model: {what}", "bytes": size} for what, size in most]

    def estimates(self, kv_tokens: int) -> list[Estimate]:
        """What steps should take: decodes of one request and of all, and prompts."""
        config, chip = self.config, self.target.chip
        itemsizes = (
            jnp.dtype(config.dtype).itemsize,
            jnp.dtype(config.kv_cache_dtype).itemsize,
        )
        count = config.tensor_parallel_size
        devices = Devices(count, chip.read, chip.flops, ici(chip.ici))
        most, tokens = config.max_num_seqs, config.max_num_batched_tokens
        length = min(USUAL_LENGTH, config.max_model_len, max(1, kv_tokens // most))
        prompt = min(USUAL_LENGTH, config.max_model_len, tokens)
        asked = [("decode", 1, length), ("decode", most, length)]
        asked.append(("prefill", tokens // prompt, prompt))
        return [
            estimate(what, self.model, [each] * requests, itemsizes, devices)
            for what, requests, each in asked
        ]

    def step_message(self) -> int:
        """Bytes of a decode step of all requests, as hosts send it."""
        size = max(self.config.table().decode_sizes)
        shape = step_shape(self.model, self.config)
        step = padding(Descriptor("decode", size, size, 1), shape)
        return step.batch.nbytes + step.sampling.nbytes

    def compile(
        self, report: AotReport, built: footprint.Built, writer: executables.Writer | None
    ) -> None:
        """Compile the programs with the cache that fits, and list what each needs."""
        work = self.jobs(report.num_pages)
        report.ladder = len(self.ladder(report.num_pages))
        known = footprint.reusable(built, work)
        chosen = work if self.which == "all" else largest(work)
        costs: dict[str, ProgramCost] = {}
        bodies = sum(block.period for block in self.tools.blocks if block.repeats > 1)
        for done, (job, program, seconds) in enumerate(self._compiled(chosen, known, report)):
            self.progress(f"programs; {job.name} {seconds:.0f} s", done + 1, len(chosen))
            if program is not None:
                costs[job.name] = program_cost(job.name, program.compiled, seconds, bodies)
            if program is not None and writer is not None:
                writer.add(job.name, program.compiled)
        report.programs = [costs[job.name] for job in chosen.values() if job.name in costs]

    def _compiled(
        self, chosen: Mapping[Any, Job], known: Mapping[Any, Any], report: AotReport
    ) -> Iterator[tuple[Job, compilation.Program | None, float]]:
        """Each job as it is done, with its program; None for one that takes more memory than
        there is.
        """
        for key in known:
            if key in chosen:
                yield chosen[key], known[key][0], known[key][1].seconds
        missing = [job for key, job in chosen.items() if key not in known]
        with (
            compilation.deep_stacks(),
            ThreadPoolExecutor(max_workers=compilation.workers()) as pool,
        ):
            futures = {
                pool.submit(compilation.compile_one, job, self.mesh, self.plan_hash): job
                for job in missing
            }
            for future in as_completed(futures):
                job = futures[future]
                try:
                    with footprint.memory_errors():
                        program, built = future.result()
                except footprint.DoesNotFit as error:
                    report.too_large.append({"what": job.name, "why": str(error)})
                    yield job, None, 0.0
                    continue
                yield job, program, built.seconds
