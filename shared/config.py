"""Engine options: what a user may say (`EngineConfig`), and what the engine runs with
(`ResolvedConfig`).

`resolve()` turns one into the other and lists every value that it changed or filled in, with the
reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from ..bucketing import Table, decode_ladder, mixed_ladder
from . import kv_config
from .compilation_config import (
    NOT_TORCH,
    CompilationConfig,
    ResolvedCompilation,
    check_sizes,
    resolve_compilation,
)
from .demand import ANYTHING, Demand
from .drafts import SpeculativeConfig
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
from .models.decoder import parameters_of
from .models.placement import local_config, split_pieces
from .options import options_of
from .page_table import default_page_size
from .xla_config import check_torch_xla

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
"""What `backend="auto"` is on each platform (`shared/backends.py` knows more: what is installed
and works).
"""
MOST_NAMED_SHARDS = 16
"""Up to which numbers of shards an error names those that are allowed."""
MAX_VOCAB = 1 << 19
"""Words whose masses the sampler adds up exactly (`ops/reference/sampling.py`)."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The device that a worker runs on. `platform` is cpu, cuda or tpu; `memory` in bytes.

    `index` is its number among the devices of its kind on this machine, None where the framework
    chooses.
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
        before, after = (
            value.name if isinstance(value, Enum) else value for value in (self.before, self.after)
        )
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
    kv_cache_scales: tuple[float, float] | None
    memory_utilization: float
    page_groups: bool
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    scheduling_policy: str
    async_scheduling: bool
    decode_steps: int
    speculative_config: SpeculativeConfig | None
    priority_window: int
    watermark: float
    compilation: ResolvedCompilation
    scan_layers: bool
    op_priority: Mapping[str, tuple[str, ...]]
    enable_ops: tuple[str, ...]
    row_invariant: bool
    tensor_parallel_size: int
    distributed_executor_backend: str
    restart_on_failure: bool
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
        """All programs of the engine. Sizes that are captured as CUDA graphs are the sizes of
        decode programs.
        """
        sizes = self.decode_sizes or default_decode_sizes(
            self.backend, self.max_num_seqs, self.platform
        )
        captured = self.compilation.cudagraph_capture_sizes
        if captured:
            sizes = (*captured, *(size for size in sizes if size > captured[-1]))
        # On a GPU a program more costs one run at start, and padding costs at every step.
        per_octave = 4 if self.platform == "cuda" and self.backend == "torch" else 1
        mixed = self.mixed_sizes or mixed_ladder(self.max_num_batched_tokens, per_octave=per_octave)
        single = () if self.speculative_config is None else SINGLE_SIZES[self.backend]
        fitting = tuple(size for size in single if size < self.max_num_seqs)
        return Table(tuple(sizes), tuple(mixed), self.max_num_seqs, fitting)


SINGLE_SIZES: dict[Backend, tuple[int, ...]] = {
    "jax": (8, 32),
    "torch": (4, 8, 16, 32, 64),
    "torch-xla": (8, 32),
}
"""Tokens of steps with guesses that have a program of their own, with so many samplers: a mixed one
has samplers for all requests that there may be. XLA compiles each for seconds.
"""


def default_decode_sizes(backend: Backend, max_num_seqs: int, platform: str) -> tuple[int, ...]:
    """The ladder of decode programs. The torch backend gets small sizes too: latency at batch 1.

    JAX on GPUs gets powers of two: with its layers unrolled, a program takes seconds to compile. On
    CPUs, which have no sublanes to fill, a step of one request does not compute eight.
    """
    if backend == "jax" and platform == "cuda":
        return mixed_ladder(max_num_seqs, smallest=1)
    small: tuple[int, ...] = (1,) if platform == "cpu" else ()
    if backend == "torch":
        small = (1, 2, 4)
    return decode_ladder(max_num_seqs, small=small)


def _usual_length(model: ModelConfig) -> tuple[int, str]:
    """The default of `max_model_len` before the device has a say, and why.

    A model with two lists of rotary factors has one for sequences up to some length and one for
    longer ones. An engine runs with one of them, since keys in the cache cannot be rotated again:
    by default with that of short sequences.
    """
    limit, switch = model.max_position_embeddings, model.rope.switches_at
    if switch is None or switch >= limit:
        return limit, "the model's limit"
    return switch, "the longest sequence with the model's short longrope factors"


def _check_row_invariance(config: EngineConfig, device: DeviceInfo) -> None:
    """Raise ConfigError where the same bits in any company are not promised: on XLA's GPU compiler
    11 of 64 requests changed theirs, and no TPU has shown that it keeps them.
    """
    if config.row_invariant and config.backend == "jax" and device.platform != "cpu":
        raise ConfigError(
            f"row_invariant: got the jax backend on {device.platform}, allowed are jax on a CPU "
            "and torch: XLA sums in another order for another number of rows"
        )


def _check_shards(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError where a model does not run on several shards."""
    if config.row_invariant and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"row_invariant: got tensor_parallel_size {config.tensor_parallel_size}, allowed is 1: "
            "the order of sums over devices is not promised"
        )
    if config.backend == "torch" and config.tensor_parallel_size > 1:
        _check_ranks(config, model)
    elif config.restart_on_failure and config.distributed_executor_backend == "mp":
        raise ConfigError(
            "restart_on_failure: got True, allowed with a tensor_parallel_size above 1, got "
            f"{config.tensor_parallel_size}, and the torch backend or "
            "--distributed-executor-backend ray: there are no ranks that could be lost"
        )
    _check_experts(config, model)
    if splits := _split(model, config.tensor_parallel_size):
        whole = [
            str(size)
            for size in range(1, MOST_NAMED_SHARDS + 1)
            if (model.num_experts or size) % size == 0 and not _split(model, size)
        ]
        raise ConfigError(
            f"tensor_parallel_size: got {config.tensor_parallel_size}, which splits {splits}; "
            f"allowed up to {MOST_NAMED_SHARDS} are {', '.join(whole)}"
        )


def _split(model: ModelConfig, size: int) -> str:
    """What of narrow weights so many shards would split, or "". Raises UnsupportedModel where the
    whole model has no such weights.
    """
    table = parameters_of(model)
    if splits := split_pieces(table, model, size):
        return splits
    try:
        parameters_of(local_config(model, size))
    except UnsupportedModel as error:
        return f"weights that are held whole (on each device: {error})"
    return ""


def _check_experts(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError unless each shard has as many experts as the others."""
    size = config.tensor_parallel_size
    if model.num_experts % size:
        raise ConfigError(
            f"tensor_parallel_size: got {size}, allowed are sizes that "
            f"divide the {model.num_experts} experts of {model.architecture}"
        )


def _check_ranks(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for what ranks of the torch backend do not do."""
    size = config.tensor_parallel_size
    if config.capture is not None:
        raise ConfigError(
            f"capture: got {config.capture}, and tensor_parallel_size {size}: no rank holds whole "
            "pages to keep"
        )


def resolve(
    config: EngineConfig, model: ModelConfig, device: DeviceInfo, demand: Demand = ANYTHING
) -> tuple[ResolvedConfig, list[Change]]:
    """The config that the engine runs with, and the list of values filled in or changed. Raises
    ConfigError.

    `demand` lowers defaults. What is given explicitly stays, and so does what goes with it.
    """
    changes: list[Change] = []
    _check_shards(config, model)
    _check_row_invariance(config, device)
    if config.backend == "auto":
        backend = BACKEND_ON[device.platform]
        changes.append(Change("backend", "auto", backend, f"default on {device.platform}"))
        config = replace(config, backend=backend)
    config.check_owners()
    if model.vocab_size > MAX_VOCAB:
        raise UnsupportedModel(
            f"vocab_size: got {model.vocab_size}, the sampler's integers allow at most {MAX_VOCAB}"
        )
    defaults = _Defaults(config, model, device, _usable_demand(config, demand), changes)
    length = defaults.max_model_len()
    if model.left_out:
        changes.append(
            Change("prompts", "text and images", "text", f"not read: {', '.join(model.left_out)}")
        )
    sequences, page = defaults.max_num_seqs_and_page_size(length)
    tokens = defaults.max_num_batched_tokens(sequences, length)
    dtype = defaults.fill("dtype", model.dtype, "the checkpoint's dtype")
    cache, scales = kv_config.resolve_cache(config, dtype)
    if config.backend == "torch-xla":
        check_torch_xla(config, cache)
    if config.capture is not None:
        for name, value, kept in (
            ("decode_steps", config.decode_steps, 1),
            ("kv_cache_dtype", cache, dtype),
            ("page_groups", config.page_groups, True),
            ("aot_folder", config.aot_folder, None),  # its programs give no streams
            ("speculative_config", config.speculative_config, None),
        ):
            if value != kept:
                raise ConfigError(f"capture: keeps steps with {name} {kept}, got {value}")
    check_ladders(config, sequences, tokens)
    is_torch = config.backend == "torch"
    compilation = defaults.compilation(sequences) if is_torch else NOT_TORCH
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
        "page_groups": defaults.page_groups(compilation),
        "compilation": compilation,
        "async_scheduling": defaults.async_scheduling(sequences),
        "speculative_config": config.speculative(),
        "scan_layers": defaults.scan_layers() if config.backend == "jax" else False,
        "demand": defaults.demand,
    }
    resolved = ResolvedConfig(**values)
    mixed = defaults.demand.fitting_sizes(resolved.table().mixed_sizes, sequences)
    if mixed is not None and resolved.speculative_config is None:
        # Steps with guesses are small mixed ones.
        resolved = replace(resolved, mixed_sizes=mixed)
    if is_torch:
        check_sizes(config.compilation(), {d.tokens for d in resolved.table()})
    return resolved, changes


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What stands for the options that a config leaves open, where one depends on another.
    Appends to `changes`.
    """

    config: EngineConfig
    model: ModelConfig
    device: DeviceInfo
    demand: Demand
    changes: list[Change]

    def fill(self, name: str, value: Any, why: str) -> Any:
        """The option `name`, or `value` where the config leaves it open."""
        current = getattr(self.config, name)
        if current is None or current == "auto":
            self.changes.append(Change(name, current, value, why))
            return value
        return current

    def max_model_len(self) -> int:
        """Raises ConfigError if the model does not reach so far."""
        limit = self.model.max_position_embeddings
        if limit < 2:
            raise ConfigError(
                f"max_position_embeddings: got {limit}, allowed is an integer from 2: a request "
                "has a token in and one out"
            )
        usual, why = _usual_length(self.model)
        default = min(usual, 2048) if self._on_cpu else usual
        why += ", at most 2048 on a CPU" if self._on_cpu else ""
        length: int = self.fill("max_model_len", default, why)
        if length > limit:
            raise ConfigError(
                f"max_model_len: got {length}, the model allows at most {limit} "
                "(max_position_embeddings)"
            )
        if length > usual:
            why = f"max_model_len is above {usual}: for every sequence"
            self.changes.append(Change("longrope factors", "short", "long", why))
        return length

    def async_scheduling(self, sequences: int) -> bool:
        """Raises ConfigError for guesses that there is no room for, or that nobody waits for."""
        config, drafts = self.config, self.config.speculative()
        if drafts is None:
            return config.async_scheduling is not False
        least = drafts.num_speculative_tokens + 1
        if sequences < least:
            raise ConfigError(
                f"max_num_seqs: got {sequences}, allowed is at least {least} with "
                f"{least - 1} guesses (speculative_config): each takes a request's place in a step"
            )
        for name, value in (
            ("async_scheduling", config.async_scheduling),
            ("decode_steps", config.decode_steps > 1),
        ):
            if value:
                raise ConfigError(
                    f"{name}: got {getattr(config, name)}, and speculative_config: guesses follow "
                    "tokens that the host has read; leave one out"
                )
        self.changes.append(Change("async_scheduling", None, False, "guesses follow what was read"))
        return False

    def max_num_seqs_and_page_size(self, length: int) -> tuple[int, int]:
        """Both at once: fewer requests where the page table of more would not fit."""
        config, platform = self.config, self.device.platform
        most = 16 if self._on_cpu else 256
        # Guesses take the places of requests.
        guesses = self.config.speculative() is not None
        default = most if guesses else self.demand.fitting_requests(most)
        why = (
            f"default on {platform}"
            if default == most
            else f"enough for {self.demand.requests} requests"
        )
        sequences: int = self.fill("max_num_seqs", default, why)
        if config.page_size is not None:
            return sequences, config.page_size
        model = local_config(self.model, config.tensor_parallel_size)
        entries = {h.kv * h.size for h in map(model.heads, model.layer_windows)}
        longest = max(entries) // min(entries)
        page, fitting, why = default_page_size(platform, length, sequences, longest)
        self.fill("page_size", page, why)
        if fitting < sequences:
            if config.max_num_seqs is not None:
                raise ConfigError(
                    f"max_num_seqs: got {sequences}, allowed is at most {fitting}: {why}"
                )
            self.changes.append(Change("max_num_seqs", sequences, fitting, why))
        return fitting, page

    def max_num_batched_tokens(self, sequences: int, length: int) -> int:
        """No less than a step may need, no more than it can have. Raises ConfigError if memory
        ends before.
        """
        most = min(512, max(16, length)) if self._on_cpu else 8192
        enough = self.demand.fitting_tokens(most)
        why = f"enough for {self.demand.prompt_tokens} tokens of prompts"
        if enough == most:
            why = f"default on {self.device.platform}"
        tokens: int = self.fill("max_num_batched_tokens", enough, why)
        if tokens < sequences:
            why = "every running request needs one token a step"
            self.changes.append(Change("max_num_batched_tokens", tokens, sequences, why))
            tokens = sequences
        if not self.config.enable_chunked_prefill and tokens < length:
            why = "without chunked prefill a prompt runs whole"
            self.changes.append(Change("max_num_batched_tokens", tokens, length, why))
            tokens = length
        return _bounded_tokens(tokens, sequences, length, self.model, self.device, self.changes)

    def compilation(self, sequences: int) -> ResolvedCompilation:
        """Of the torch backend."""
        config, platform = self.config, self.device.platform
        ladder = default_decode_sizes("torch", sequences, platform)
        options = config.compilation()
        if config.row_invariant:
            options = self._uncompiled(options)
        compilation, filled = resolve_compilation(options, platform, ladder, sequences)
        # Reported by the names that these options have here.
        names = {entry.copy_of: name for name, entry in options_of(EngineConfig).items()}
        self.changes.extend(Change(names.get(entry[0], entry[0]), *entry[1:]) for entry in filled)
        return compilation

    def _uncompiled(self, options: CompilationConfig) -> CompilationConfig:
        """The options with a level that runs the ops as they are: a compiler's code sums in an
        order that depends on the shape.
        """
        if options.level is None and not options.enforce_eager:
            why = "row_invariant: code is compiled for a number of rows"
            self.changes.append(Change("compile_level", None, 0, why))
            return replace(options, level=0)
        if options.level is not None and options.level > 1:
            raise ConfigError(
                f"row_invariant: got compile_level {options.level}, allowed are 0 and 1: code is "
                "compiled for a number of rows"
            )
        return options

    def page_groups(self, compilation: ResolvedCompilation) -> bool:
        """Whether layers with windows have page tables of their own."""
        is_on = self.config.page_groups
        if compilation.road != "piecewise":
            return is_on
        why = "the road piecewise has one page table"
        if self.model.full_heads is not None:
            raise ConfigError(
                f"page_groups: {why}, and layers of {self.model.architecture} need two: they keep "
                "keys and values of two shapes; allowed are other roads"
            )
        if not is_on or not any(self.model.layer_windows):
            return is_on
        self.changes.append(Change("page_groups", True, False, f"{why}: layers keep all tokens"))
        return False

    def scan_layers(self) -> bool:
        """Of the JAX backend."""
        default, why = True, "one loop compiles faster than all layers"
        if self.device.platform == "cuda":
            default, why = False, "a scan on a GPU copies each layer's weights"
        elif self.device.name == "TPU7x":
            default, why = False, "its compiler lays the weights of a loop out anew in each step"
        return bool(self.fill("scan_layers", default, why))

    @property
    def _on_cpu(self) -> bool:
        return self.device.platform == "cpu"


def _usable_demand(config: EngineConfig, demand: Demand) -> Demand:
    """`demand` without what would contradict explicit options.

    Stored programs are those of a table of certain sizes, of which a start reads what it needs, and
    who names sizes of programs names them for the defaults.
    """
    named = config.compilation()
    sizes = (
        config.decode_sizes, config.mixed_sizes, named.cudagraph_capture_sizes,
        named.cuda_graph_sizes,
        named.compile_sizes, named.compile_ranges,
    )  # fmt: skip
    if config.aot_folder is not None or any(size is not None for size in sizes):
        return replace(demand, requests=None, prompt_tokens=None)
    return demand


def _bounded_tokens(
    tokens: int,
    sequences: int,
    length: int,
    model: ModelConfig,
    device: DeviceInfo,
    changes: list[Change],
) -> int:
    """`tokens` as max_num_batched_tokens, no more than can meet in a step. Raises ConfigError if
    memory ends before.
    """
    most = sequences * length
    if tokens > most:
        why = f"max_num_seqs * max_model_len is {sequences} * {length}: no step has more tokens"
        changes.append(Change("max_num_batched_tokens", tokens, most, why))
        tokens = most
    width = max(model.intermediate_size, model.hidden_size)
    needed = 4 * tokens * width
    if 0 < device.memory < needed:  # 0: JAX could not say
        raise ConfigError(
            f"max_num_batched_tokens: got {tokens}; a hidden state of {width} numbers of 4 bytes "
            "for each of them "
            f"takes {needed} bytes, the device has {device.memory}"
        )
    return tokens
