"""Engine options: what a user may say (`EngineConfig`), and what the engine runs with (`ResolvedConfig`).

`resolve()` turns one into the other and lists every value that it changed or filled in, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from ..bucketing import Table, decode_ladder, mixed_ladder
from . import kv_config
from .compilation_config import NOT_TORCH, ResolvedCompilation, check_sizes, resolve_compilation
from .demand import ANYTHING, Demand
from .engine_config import (
    BACKEND_CHOICES,
    BACKENDS,
    DEVICES,
    DTYPES,
    LOAD_FORMATS,
    MAX_NUM_SEQS,
    Backend,
    EngineConfig,
    parse_device,
)
from .errors import ConfigError, UnsupportedModel
from .jax_config import check_ladders
from .models.config import ModelConfig
from .options import options_of
from .page_table import default_page_size

__all__ = [
    "BACKENDS",
    "BACKEND_CHOICES",
    "BACKEND_ON",
    "DEVICES",
    "DTYPES",
    "LOAD_FORMATS",
    "MAX_NUM_SEQS",
    "MAX_VOCAB",
    "Backend",
    "Change",
    "DeviceInfo",
    "EngineConfig",
    "ResolvedConfig",
    "default_decode_sizes",
    "host_memory",
    "parse_device",
    "resolve",
]

BACKEND_ON: Mapping[str, Backend] = {"tpu": "jax", "cuda": "torch", "cpu": "torch"}
"""What `backend="auto"` is on each platform (`shared/backends.py` knows more: what is installed and works)."""
MAX_VOCAB = 1 << 18


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The device that a worker runs on. `platform` is cpu, cuda or tpu; `memory` in bytes.

    `index` is its number among the devices of its kind on this machine, None where the framework chooses.
    """

    platform: str
    name: str
    memory: int
    index: int | None = None


def host_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, slots=True)
class Change:
    """One value that `resolve()` filled in or changed."""

    field: str
    before: Any
    after: Any
    why: str

    def __str__(self) -> str:
        before, after = (value.name if isinstance(value, Enum) else value for value in (self.before, self.after))
        return f"{self.field}: {before} -> {after} ({self.why})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What an engine runs with; nothing is left open."""

    backend: Backend
    platform: str
    dtype: str
    load_format: str
    seed: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    kv_cache_memory: int | None
    num_pages: int | None
    kv_cache_dtype: str
    kv_cache_scales: tuple[float, float]
    memory_utilization: float
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    scheduling_policy: str
    async_scheduling: bool
    decode_steps: int
    priority_window: int
    watermark: float
    compilation: ResolvedCompilation
    scan_layers: bool
    op_priority: Mapping[str, tuple[str, ...]]
    enable_ops: tuple[str, ...]
    tensor_parallel_size: int
    decode_sizes: tuple[int, ...] | None
    mixed_sizes: tuple[int, ...] | None
    compilation_cache_dir: str | None
    aot_folder: str | None
    demand: Demand = ANYTHING

    @property
    def compile_level(self) -> int:
        """The compile level of the torch worker; 0 for the jax one."""
        return self.compilation.level

    @property
    def pages_per_request(self) -> int:
        """Pages of a request of max_model_len tokens."""
        return -(-self.max_model_len // self.page_size)

    def table(self) -> Table:
        """All programs of the engine. Sizes that are captured as CUDA graphs are the sizes of decode programs."""
        sizes = self.decode_sizes or default_decode_sizes(self.backend, self.max_num_seqs, self.platform)
        captured = self.compilation.cudagraph_capture_sizes
        if captured:
            sizes = (*captured, *(size for size in sizes if size > captured[-1]))
        # On a GPU a program more costs one run at start, and padding costs at every step.
        per_octave = 4 if self.platform == "cuda" and self.backend == "torch" else 1
        mixed = self.mixed_sizes or mixed_ladder(self.max_num_batched_tokens, per_octave=per_octave)
        return Table(tuple(sizes), tuple(mixed), self.max_num_seqs)


def default_decode_sizes(backend: Backend, max_num_seqs: int, platform: str) -> tuple[int, ...]:
    """The ladder of decode programs. The torch backend gets small sizes too: latency at batch 1.

    JAX on GPUs gets powers of two: with its layers unrolled, a program takes seconds to compile. On CPUs, which have no
    sublanes to fill, a step of one request does not compute eight.
    """
    if backend == "jax" and platform == "cuda":
        return mixed_ladder(max_num_seqs, smallest=1)
    small = (1, 2, 4) if backend == "torch" else (1,) if platform == "cpu" else ()
    return decode_ladder(max_num_seqs, small=small)


def _usual_length(model: ModelConfig) -> tuple[int, str]:
    """The default of `max_model_len` before the device has a say, and why.

    A model with two lists of rotary factors has one for sequences up to some length and one for longer ones. An engine
    runs with one of them, since keys in the cache cannot be rotated again: by default with that of short sequences.
    """
    limit, switch = model.max_position_embeddings, model.rope.switches_at
    if switch is None or switch >= limit:
        return limit, "the model's limit"
    return switch, "the longest sequence with the model's short longrope factors"


def resolve(
    config: EngineConfig, model: ModelConfig, device: DeviceInfo, demand: Demand = ANYTHING
) -> tuple[ResolvedConfig, list[Change]]:
    """The config that the engine runs with, and the list of values filled in or changed. Raises ConfigError.

    `demand` lowers defaults. What is given explicitly stays, and so does what goes with it.
    """
    changes: list[Change] = []
    if config.backend == "auto":
        backend = BACKEND_ON[device.platform]
        changes.append(Change("backend", "auto", backend, f"default on {device.platform}"))
        config = replace(config, backend=backend)
    config.check_owners()

    def fill(name: str, value: Any, why: str) -> Any:
        current = getattr(config, name)
        if current is None or current == "auto":
            changes.append(Change(name, current, value, why))
            return value
        return current

    on_cpu = device.platform == "cpu"
    if model.vocab_size > MAX_VOCAB:
        raise UnsupportedModel(f"vocab_size: got {model.vocab_size}, the sampler's integers allow at most {MAX_VOCAB}")
    limit = model.max_position_embeddings
    usual, why = _usual_length(model)
    length = fill("max_model_len", min(usual, 2048) if on_cpu else usual, f"{why}, at most 2048 on a CPU")
    if length > limit:
        raise ConfigError(f"max_model_len: got {length}, the model allows at most {limit} (max_position_embeddings)")
    if length > usual:
        changes.append(
            Change("longrope factors", "short", "long", f"max_model_len is above {usual}: for every sequence")
        )
    if model.left_out:
        changes.append(Change("prompts", "text and images", "text", f"not read: {', '.join(model.left_out)}"))
    demand = _usable_demand(config, demand)
    most = 16 if on_cpu else 256
    fitting = demand.fitting_requests(most)
    why = f"default on {device.platform}" if fitting == most else f"enough for {demand.requests} requests"
    sequences = fill("max_num_seqs", fitting, why)
    page = config.page_size
    if page is None:
        page, fitting, why = default_page_size(device.platform, length, sequences)
        fill("page_size", page, why)
        if fitting < sequences:
            if config.max_num_seqs is not None:
                raise ConfigError(f"max_num_seqs: got {sequences}, allowed is at most {fitting}: {why}")
            changes.append(Change("max_num_seqs", sequences, fitting, why))
            sequences = fitting
    most = min(512, max(16, length)) if on_cpu else 8192
    enough = demand.fitting_tokens(most)
    why = f"default on {device.platform}" if enough == most else f"enough for {demand.prompt_tokens} tokens of prompts"
    tokens = fill("max_num_batched_tokens", enough, why)
    if tokens < sequences:
        changes.append(
            Change("max_num_batched_tokens", tokens, sequences, "every running request needs one token a step")
        )
        tokens = sequences
    if not config.enable_chunked_prefill and tokens < length:
        changes.append(Change("max_num_batched_tokens", tokens, length, "without chunked prefill a prompt runs whole"))
        tokens = length
    tokens = _bounded_tokens(tokens, sequences, length, model, device, changes)
    dtype = fill("dtype", model.dtype, "the checkpoint's dtype")
    cache, scales = kv_config.resolve_cache(config, dtype)
    if config.capture is not None:
        for name, value, kept in (("decode_steps", config.decode_steps, 1), ("kv_cache_dtype", cache, dtype)):
            if value != kept:
                raise ConfigError(f"capture: keeps steps with {name} {kept}, got {value}")
    compilation, scan = NOT_TORCH, False
    check_ladders(config, sequences, tokens)
    if config.backend == "torch":
        if config.tensor_parallel_size > 1:
            raise ConfigError(f"tensor_parallel_size: got {config.tensor_parallel_size}, the torch backend allows 1")
        ladder = default_decode_sizes(config.backend, sequences, device.platform)
        compilation, filled = resolve_compilation(config.compilation(), device.platform, ladder, sequences)
        ours = {entry.copy_of: name for name, entry in options_of(EngineConfig).items()}
        changes += [Change(ours.get(entry[0], entry[0]), *entry[1:]) for entry in filled]
    elif device.platform == "cuda":
        scan = fill("scan_layers", False, "a scan on a GPU copies each layer's weights")
    elif device.name == "TPU7x":
        scan = fill("scan_layers", False, "its compiler lays the weights of a loop out anew in each step")
    else:
        scan = fill("scan_layers", True, "one loop compiles faster than all layers")
    same = {f.name for f in fields(ResolvedConfig)} - {"platform", "compilation", "demand"}
    values = {name: getattr(config, name) for name in same}
    values |= {
        "platform": device.platform,
        "dtype": dtype,
        "kv_cache_dtype": cache,
        "kv_cache_scales": scales,
        "max_model_len": length,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": tokens,
        "page_size": page,
        "compilation": compilation,
        "scan_layers": scan,
        "demand": demand,
    }
    resolved = ResolvedConfig(**values)
    mixed = demand.fitting_sizes(resolved.table().mixed_sizes, sequences)
    if mixed is not None:
        resolved = replace(resolved, mixed_sizes=mixed)
    if config.backend == "torch":
        check_sizes(config.compilation(), {d.tokens for d in resolved.table()})
    return resolved, changes


def _usable_demand(config: EngineConfig, demand: Demand) -> Demand:
    """`demand` without what would contradict explicit options.

    Stored programs are those of a certain table, and who names sizes of programs names them for the defaults.
    """
    if config.aot_folder is not None:
        return ANYTHING
    named = config.compilation()
    sizes = (
        config.decode_sizes, config.mixed_sizes, named.cudagraph_capture_sizes, named.cuda_graph_sizes,
        named.compile_sizes, named.compile_ranges,
    )  # fmt: skip
    if any(size is not None for size in sizes):
        return replace(demand, requests=None, prompt_tokens=None)
    return demand


def _bounded_tokens(
    tokens: int, sequences: int, length: int, model: ModelConfig, device: DeviceInfo, changes: list[Change]
) -> int:
    """`tokens` as max_num_batched_tokens, no more than can meet in a step. Raises ConfigError if memory ends before."""
    most = sequences * length
    if tokens > most:
        why = f"max_num_seqs * max_model_len is {sequences} * {length}: no step has more tokens"
        changes.append(Change("max_num_batched_tokens", tokens, most, why))
        tokens = most
    width = max(model.intermediate_size, model.hidden_size)
    needed = 4 * tokens * width
    if 0 < device.memory < needed:  # 0: JAX could not say
        raise ConfigError(
            f"max_num_batched_tokens: got {tokens}; a hidden state of {width} numbers of 4 bytes for each of them "
            f"takes {needed} bytes, the device has {device.memory}"
        )
    return tokens
