"""Compiles the whole ladder of a model for a TPU slice that nobody has to own, and says what each program costs.

Every figure is the compiler's: nothing here has run on a TPU.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ..ops import OpError
from ..shared.config import EngineConfig, ResolvedConfig, resolve
from ..shared.errors import ConfigError
from ..shared.models import decoder
from ..shared.models.config import ModelConfig
from ..shared.worker import Progress, step_temporaries
from . import compilation, executables
from .kv_buffer import page_bytes
from .ladder import bytes_per_device, describe, jobs, program_model
from .plans import make_plans
from .platforms import Topology, topology
from .sharding import check_all_take_part, make_mesh

COLLECTIVE = re.compile(
    r"= .*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all)(?:-start)?\("
)


@dataclass(slots=True)
class ProgramCost:
    """One program, by the compiler's word: bytes on each device, its static cost, and what it sends between devices.

    `flops` and `bytes_accessed` count the body of a loop once. `collectives_per_layer` stand in the loop over layers,
    `collectives_per_step` outside of it; in an unrolled program all stand outside.
    """

    name: str
    seconds: float
    temporaries: int
    code: int
    arguments: int
    flops: float
    bytes_accessed: float
    collectives_per_layer: dict[str, int]
    collectives_per_step: dict[str, int]


@dataclass(slots=True)
class AotReport:
    """What a model needs on a slice. Bytes are per device."""

    model: str
    topology: str
    devices: int
    hosts: int
    tensor_parallel_size: int
    plan_hash: str
    memory: int
    weights: int
    page_bytes: int
    num_pages: int
    kv_tokens: int
    fits: bool
    seconds: float = 0.0
    programs: list[ProgramCost] = field(default_factory=list)
    too_large: list[dict[str, Any]] = field(default_factory=list)
    written_to: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def build(
    name: str, model: ModelConfig, where: str, options: dict[str, Any], out: str | None, progress: Progress
) -> AotReport:
    """Compile every program of `model` for the slice `where`. Raises ConfigError, BackendUnavailable.

    `options` are those of `EngineConfig`. With `out`, executables and their manifest are written there.
    """
    target = topology(where)
    # A compile-only client can write JAX's cache but not read it.
    jax.config.update("jax_enable_compilation_cache", False)
    config, _ = resolve(EngineConfig(**options, model=name, backend="jax"), model, target.info)
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
        raise ConfigError(f"op_priority, enable_ops: {error}") from error
    report = _fit(name, model, config, target, plans.hash, describe(model, config, tools.segments, 1, mesh))
    if not report.fits:
        report.seconds = time.perf_counter() - start
        return report
    shapes = describe(model, config, tools.segments, report.num_pages, mesh)
    work = jobs(tools, config.table(), shapes, jnp.dtype(config.dtype), mesh)
    segments = len(tools.segments) if config.scan_layers else 0
    writer = None
    if out is not None:
        writer = executables.Writer(out, executables.key(model, config, plans.hash, mesh, report.num_pages))
    _compile(work, mesh, plans.hash, report, segments, writer, progress)
    report.fits = not report.too_large
    report.seconds = time.perf_counter() - start
    if writer is not None and report.fits:
        report.written_to = writer.finish()
    return report


def _fit(
    name: str, model: ModelConfig, config: ResolvedConfig, target: Topology, plan_hash: str, shapes: Any
) -> AotReport:
    shards, itemsize = config.tensor_parallel_size, jnp.dtype(config.dtype).itemsize
    weights, angles = bytes_per_device(shapes.weights), bytes_per_device(shapes.tables)
    page = page_bytes(model, config, jnp.dtype(config.kv_cache_dtype))
    leave = step_temporaries(model, config) // shards
    allowed = int(target.chip.hbm * config.memory_utilization)
    room = max(0, allowed - weights - angles - leave) // page
    pages = min(config.max_num_seqs * config.pages_per_request, room)
    if config.num_pages is not None:
        pages = config.num_pages
    elif config.kv_cache_memory is not None:
        pages = config.kv_cache_memory // page
    fits, wanted = config.pages_per_request <= pages <= room, max(pages, config.pages_per_request)
    pages = min(pages, room)
    report = AotReport(
        name, target.name, len(target.devices), target.hosts, shards, plan_hash, target.chip.hbm, weights, page,
        pages, pages * config.page_size, fits,
    )  # fmt: skip
    if not fits:
        cache = f"KV cache for {wanted * config.page_size} tokens ({wanted} pages)"
        if wanted == config.pages_per_request:
            cache += f": one request of {config.max_model_len}"
        each = {"weights": weights, "rotary tables": angles, "left for the largest step": leave, cache: wanted * page}
        each |= {"all of these": sum(each.values()), f"allowed: {config.memory_utilization:.0%} of its memory": allowed}
        report.too_large = [{"what": f"each device: {what}", "bytes": size} for what, size in each.items()]
        parts = {
            p.name: prod(p.shape) * itemsize * (model.num_layers if p.layered else 1)
            for p in decoder.abstract(model).values()
        }
        largest = sorted(parts.items(), key=lambda part: -part[1])[:5]
        report.too_large += [{"what": f"whole model: {what}", "bytes": size} for what, size in largest]
    return report


def _compile(
    work: dict[Any, Any],
    mesh: Any,
    label: str,
    report: AotReport,
    segments: int,
    writer: executables.Writer | None,
    progress: Progress,
) -> None:
    costs: dict[str, ProgramCost] = {}
    with compilation.deep_stacks(), ThreadPoolExecutor(max_workers=compilation.workers()) as pool:
        futures = {pool.submit(compilation.compile_one, job, mesh, label): job for job in work.values()}
        for done, future in enumerate(as_completed(futures)):
            job = futures[future]
            progress("programs", done + 1, len(futures))
            try:
                program, built = future.result()
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                report.too_large.append({"what": job.name, "why": " ".join(str(error).split())[:300]})
                continue
            costs[job.name] = _cost(job.name, program.compiled, built.seconds, segments)
            if writer is not None:
                writer.add(job.name, program.compiled)
    report.programs = [costs[job.name] for job in work.values() if job.name in costs]


def _cost(name: str, compiled: Any, seconds: float, segments: int) -> ProgramCost:
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    inside, outside = collectives(compiled.as_text() or "")
    if segments:
        inside = Counter({kind: count / segments for kind, count in inside.items()})
    else:  # no loop over layers: what is called from the entry computation is a part of it
        inside, outside = Counter(), inside + outside
    return ProgramCost(
        name,
        round(seconds, 2),
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        memory.argument_size_in_bytes,
        float(cost.get("flops", 0.0)),
        float(cost.get("bytes accessed", 0.0)),
        dict(inside) if name.startswith("backbone") else {},
        dict(outside) if name.startswith("backbone") else dict(inside + outside),
    )


def collectives(text: str) -> tuple[Counter[str], Counter[str]]:
    """Collectives of an optimised HLO module: (inside of loops and what they call, in the entry computation)."""
    inside: Counter[str] = Counter()
    outside: Counter[str] = Counter()
    entry = False
    for line in text.splitlines():
        if not line.startswith(" "):
            entry = line.startswith("ENTRY")
            continue
        found = COLLECTIVE.search(line)
        if found:
            (outside if entry else inside)[found[1]] += 1
    return inside, outside
