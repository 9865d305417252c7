"""Engine options: what a user may say (`EngineConfig`), and what the engine runs with (`ResolvedConfig`).

`resolve()` turns one into the other and lists every value that it changed or filled in, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal

from ..bucketing import Table, decode_ladder, mixed_ladder
from . import kv_config
from .compilation_config import (
    LEVELS,
    NOT_TORCH,
    CompilationConfig,
    ResolvedCompilation,
    check_sizes,
    parse_mode,
    resolve_compilation,
)
from .demand import ANYTHING, Demand
from .errors import ConfigError, UnsupportedModel
from .jax_config import check_backend, check_fields, check_ladders
from .models.config import ModelConfig
from .page_table import default_page_size

Backend = Literal["jax", "torch"]
BACKENDS: tuple[Backend, ...] = ("jax", "torch")
BACKEND_CHOICES = ("auto", *BACKENDS)
BACKEND_ON: Mapping[str, Backend] = {"tpu": "jax", "cuda": "torch", "cpu": "torch"}
"""What `backend="auto"` is on each platform (`shared/backends.py` knows more: what is installed and works)."""
DEVICES = ("auto", "cpu", "cuda", "tpu")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
POLICIES = ("fcfs", "priority")
COMPILE_LEVELS = tuple(LEVELS)
MAX_VOCAB = 1 << 18
MAX_NUM_SEQS = 4096
MAX_DECODE_STEPS = 64
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine, with the names that users of vLLM know. None and auto mean: chosen by `resolve()`.

    `backend`: auto is jax on TPUs, torch on GPUs and CPUs. `page_size` (tokens of a KV page) is vLLM's block size: 16,
    on TPUs 128 or 256. `kv_cache_memory` (bytes) or `num_pages` set the size of the KV cache. `kv_cache_dtype`: auto is
    the model's own; int8 and fp8_e4m3 hold x / scale, `kv_cache_scales` being those of K and V in all layers.

    `compile_level`, `cudagraph_mode`, `enforce_eager` (torch) are fields of `compilation_config` too, which has more
    (`shared/compilation_config.py`). `scan_layers` (JAX): one loop over stacked weights, or layers unrolled.
    `async_scheduling`: two steps in flight. `decode_steps`: tokens that requests may be decoded for while the host does
    not look (docs/adr/0005). `op_priority` maps ops to providers in order of preference; `enable_ops` is `all` or
    `none`, then +op and -op: a disabled op runs natively.

    JAX: `decode_sizes` and `mixed_sizes` replace the ladders of programs; `compilation_cache_dir` keeps what was
    compiled (None: in a private folder of this user; "none": nowhere); `aot_folder` holds programs that `twinfer aot`
    compiled for this machine (docs/tpu.md).

    `capture`: steps to keep as bundles that replay on the other backend, such as `DIR,step=12,nan` (docs/numerics.md).
    """

    model: str
    backend: Backend | Literal["auto"] = "auto"
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int | None = None
    kv_cache_memory: int | None = None
    num_pages: int | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_scales: tuple[float, float] | None = None
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    async_scheduling: bool = True
    decode_steps: int = 1
    compile_level: int | None = None
    cudagraph_mode: str | None = None
    enforce_eager: bool | None = None
    compilation_config: CompilationConfig | Mapping[str, Any] = field(default_factory=CompilationConfig)
    scan_layers: bool | None = None
    op_priority: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    enable_ops: tuple[str, ...] = ("all",)
    tensor_parallel_size: int = 1
    decode_sizes: tuple[int, ...] | None = None
    mixed_sizes: tuple[int, ...] | None = None
    compilation_cache_dir: str | None = None
    aot_folder: str | None = None
    capture: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model: got {self.model!r}, must be a folder or the word demo")
        _choice("backend", self.backend, BACKEND_CHOICES)
        _, number = parse_device(self.device)
        _choice("dtype", self.dtype, DTYPES)
        _choice("load_format", self.load_format, LOAD_FORMATS)
        _choice("scheduling_policy", self.scheduling_policy, POLICIES)
        self.compilation()
        check_fields(self)
        kv_config.check_fields(self)
        if number is not None and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"device: got {self.device}, which is one, and tensor_parallel_size {self.tensor_parallel_size}; "
                "leave the number out"
            )
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory", "num_pages"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}: got {value!r}, must be a positive integer")
        if self.num_pages is not None and self.kv_cache_memory is not None:
            raise ConfigError(
                f"num_pages: got {self.num_pages}, and kv_cache_memory {self.kv_cache_memory}: give one of them"
            )
        if self.page_size is not None and (type(self.page_size) is not int or self.page_size not in PAGE_SIZES):
            raise ConfigError(f"page_size: got {self.page_size!r}, must be a power of two from 1 to 256")
        if type(self.decode_steps) is not int or self.decode_steps not in range(1, MAX_DECODE_STEPS + 1):
            raise ConfigError(f"decode_steps: got {self.decode_steps!r}, allowed is 1 to {MAX_DECODE_STEPS}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError(f"seed: got {self.seed!r}, must be an integer")
        if isinstance(self.memory_utilization, bool) or not isinstance(self.memory_utilization, (int, float)):
            raise ConfigError(f"memory_utilization: got {self.memory_utilization!r}, must be a number")
        if not 0.05 <= self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization: got {self.memory_utilization!r}, allowed is 0.05 to 1")
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling"):
            _choice(name, getattr(self, name), (True, False))
        if self.scan_layers is not None:
            _choice("scan_layers", self.scan_layers, (True, False))
        if self.max_model_len == 1:
            raise ConfigError("max_model_len: got 1, allowed is at least 2: a prompt of one token and one more")
        if self.max_num_seqs is not None and self.max_num_seqs > MAX_NUM_SEQS:
            raise ConfigError(f"max_num_seqs: got {self.max_num_seqs}, allowed is at most {MAX_NUM_SEQS}")
        if not isinstance(self.op_priority, Mapping) or not all(
            isinstance(op, str) and isinstance(order, (tuple, list)) for op, order in self.op_priority.items()
        ):
            raise ConfigError(f"op_priority: got {self.op_priority!r}, must map ops to lists of providers")
        words = self.enable_ops if isinstance(self.enable_ops, (list, tuple)) else (None,)
        if not all(isinstance(word, str) for word in words):
            raise ConfigError(f"enable_ops: got {self.enable_ops!r}, must be a list such as all, -rms_norm")

    def compilation(self) -> CompilationConfig:
        """`compilation_config` with the options that have flags of their own. Raises ConfigError if both are given."""
        if self.compile_level is not None:
            _choice("compile_level", self.compile_level, COMPILE_LEVELS)
        mode = None if self.cudagraph_mode is None else parse_mode(str(self.cudagraph_mode))
        own: dict[str, Any] = {"level": self.compile_level, "cudagraph_mode": mode, "enforce_eager": self.enforce_eager}
        given = {name: value for name, value in own.items() if value is not None}
        config = self.compilation_config
        if isinstance(config, Mapping):
            config = CompilationConfig.from_options(config)
        if not isinstance(config, CompilationConfig):
            raise ConfigError(f"compilation_config: got {config!r}, must be a CompilationConfig or a mapping")
        for name, value in given.items():
            if getattr(config, name) not in (None, value):
                raise ConfigError(f"{name}: got {value} and another value in compilation_config")
        return replace(config, **given)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """A config from a mapping of options. Raises ConfigError for an unknown name, with the nearest known one."""
        import difflib

        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise ConfigError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return cls(**options)


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
        check_backend(config)
        if config.tensor_parallel_size > 1:
            raise ConfigError(f"tensor_parallel_size: got {config.tensor_parallel_size}, the torch backend allows 1")
        if config.scan_layers is not None:
            raise ConfigError(f"scan_layers: got {config.scan_layers}, which is for the jax backend")
        ladder = default_decode_sizes(config.backend, sequences, device.platform)
        compilation, filled = resolve_compilation(config.compilation(), device.platform, ladder, sequences)
        changes += [Change(_FLAGS.get(entry[0], entry[0]), *entry[1:]) for entry in filled]
    else:
        for name in ("compile_level", "cudagraph_mode", "enforce_eager"):
            if getattr(config, name) is not None:
                raise ConfigError(f"{name}: got {getattr(config, name)}, which is for the torch backend")
        if config.compilation() != CompilationConfig():
            raise ConfigError("compilation_config: is for the torch backend")
        if device.platform == "cuda":
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


_FLAGS = {"level": "compile_level"}
"""What a field of `CompilationConfig` is called among the engine's options."""


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


def parse_device(device: Any) -> tuple[str, int | None]:
    """The kind of a device and its number: of cuda:1 cuda and 1, of cuda cuda and None. Raises ConfigError."""
    kind, colon, digits = device.partition(":") if isinstance(device, str) else (None, "", "")
    numbered = kind != "auto" and digits.isascii() and digits.isdigit() and len(digits) <= 4
    if kind not in DEVICES or (colon and not numbered):
        raise ConfigError(
            f"device: got {device!r}, allowed are {', '.join(DEVICES)}, and a number behind a kind, such as cuda:1"
        )
    return kind, int(digits) if colon else None


def _choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed or (isinstance(value, bool) != isinstance(allowed[0], bool)):
        raise ConfigError(f"{name}: got {value!r}, allowed are {', '.join(str(a) for a in allowed)}")
