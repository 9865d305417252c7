"""The options of an engine: the one place where each has its name, type, default, limits, help,
owner and flags.

docs/options.md is written from here (`make docs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from .compilation_config import CompilationConfig, CUDAGraphMode
from .drafts import SpeculativeConfig
from .errors import ConfigError
from .jax_config import MAX_SHARDS
from .kv_config import KV_DTYPES
from .models.quantization import WHEN_LOADED
from .option_kinds import (
    Built,
    Choice,
    Number,
    Priorities,
    Refusal,
    Scales,
    Sizes,
    Switch,
    Text,
    Whole,
    Words,
    folder,
)
from .option_text import json_object
from .options import (
    by_name,
    check_fields,
    config_error,
    option,
    options_of,
    required,
    same_option,
    show,
)

Backend = Literal["jax", "torch", "torch-xla"]
BACKENDS: tuple[Backend, ...] = ("jax", "torch", "torch-xla")
BACKEND_CHOICES = ("auto", *BACKENDS)
DEVICES = ("auto", "cpu", "cuda", "tpu")
DTYPES = ("auto", "float32", "bfloat16", "float16")
EXECUTORS = ("mp", "ray")
LOAD_FORMATS = ("auto", "dummy")
POLICIES = ("fcfs", "priority")
MAX_NUM_SEQS = 4096
MAX_DECODE_STEPS = 64
MAX_SIZE = 1 << 30
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def parse_device(device: Any) -> tuple[str, int | None]:
    """The kind of a device and its number: of cuda:1 cuda and 1, of cuda cuda and None. Raises
    ConfigError.
    """
    kind, colon, digits = device.partition(":") if isinstance(device, str) else (None, "", "")
    numbered = kind != "auto" and digits.isascii() and digits.isdigit() and len(digits) <= 4
    if kind not in DEVICES or (colon and not numbered):
        raise ConfigError(
            f"device: got {show(device)}, allowed are {', '.join(DEVICES)}, and a number behind a "
            "kind, such as cuda:1"
        )
    return kind, int(digits) if colon else None


def _device(value: Any) -> Any:
    parse_device(value)
    return value


def _compilation(value: Any) -> CompilationConfig:
    if isinstance(value, CompilationConfig):
        return value
    if not isinstance(value, Mapping):
        raise Refusal
    return CompilationConfig.from_options(value)


def _speculative(value: Any) -> SpeculativeConfig | None:
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    if not isinstance(value, Mapping):
        raise Refusal
    return SpeculativeConfig.from_options(value)


DEVICE = Built(_device, f"{', '.join(DEVICES)}, and a number behind a kind", "|".join(DEVICES))
COMPILATION = Built(
    _compilation, "a CompilationConfig, or a mapping of its fields", "JSON", reads=json_object
)
SPECULATIVE = Built(
    _speculative, "a SpeculativeConfig, or a mapping of its fields", "JSON", reads=json_object
)

_engine = partial(option, owner="engine")
_scheduler = partial(option, owner="scheduler", shapes=False)
_cache = partial(option, owner="cache", shapes=False)
_ops = partial(option, owner="ops", shapes=False)
_jax = partial(option, owner="jax")
_torch = partial(same_option, CompilationConfig, shapes=False, no_flag=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine, with the names that users of vLLM know; docs/options.md says what each
    does.

    None and auto mean: chosen by `resolve()`. Of `compilation_config`
    (shared/compilation_config.py) three fields are options here too: `compile_level`,
    `cudagraph_mode` and `enforce_eager`.
    """

    model: str = required(
        Text("a folder, the word demo, or the name of a shape"), "engine", "what is run",
        no_flag="every command names it first, or behind `--model`",
    )  # fmt: skip
    backend: Backend | Literal["auto"] = _engine(
        "auto", Choice(BACKEND_CHOICES), help="auto: jax on TPUs, torch elsewhere", shapes=False
    )
    device: str = _engine(
        "auto", DEVICE, help="which device; with a number, which of this machine's"
    )
    dtype: str = _engine(
        "auto", Choice(DTYPES), help="of weights and activations; auto: the checkpoint's"
    )
    quantization: str | None = _engine(
        None,
        Choice(tuple(WHEN_LOADED)),
        help="how weights of projections are held: quantised when they are loaded",
    )
    load_format: str = _engine(
        "auto",
        Choice(LOAD_FORMATS),
        help="dummy: seeded random weights, which a shape needs",
        shapes=False,
    )
    seed: int = _engine(
        0,
        Whole(),
        help="seeds dummy weights and requests without a seed",
        flag="--engine-seed",
        shapes=False,
    )
    tensor_parallel_size: int = _engine(
        1,
        Whole(1, MAX_SHARDS),
        help="devices that share each layer",
        short=("--tp", "-tp"),
    )
    distributed_executor_backend: str = _engine(
        "mp",
        Choice(EXECUTORS),
        help="who places the processes of several devices: mp on this machine, ray in a cluster",
        shapes=False,
    )
    restart_on_failure: bool = _engine(
        False,
        Switch(),
        help="start ranks anew when one is lost; requests go on with the same tokens",
        shapes=False,
    )
    capture: str | None = _engine(
        None, Text("a folder and what to keep there", "DIR,..."),
        limits="DIR,request=ID,step=N,nan,mismatch=T:D",
        help="steps to keep as bundles that replay on the other backend", shapes=False,
    )  # fmt: skip
    max_model_len: int | None = _scheduler(
        None, Whole(2), help="tokens of a request, prompt included", shapes=True,
        usual="what the model allows, on a CPU 2048 at most",
    )  # fmt: skip
    max_num_seqs: int | None = _scheduler(
        None, Whole(1, MAX_NUM_SEQS), help="requests of a step", usual="256, on a CPU 16",
        shapes=True,
        near=("max_running_requests",),
    )  # fmt: skip
    max_num_batched_tokens: int | None = _scheduler(
        None, Whole(1), help="tokens of a step", limits="from max-num-seqs", usual="8192, on a "
                                                                                   "CPU 512",
                                                                                   shapes=True,
        near=("chunked_prefill_size",),
    )  # fmt: skip
    decode_steps: int = _scheduler(
        1, Whole(1, MAX_DECODE_STEPS), shapes=True, near=("num_scheduler_steps",),
        help="tokens to decode while the host does not look (docs/adr/0005)",
    )  # fmt: skip
    scheduling_policy: str = _scheduler(
        "fcfs", Choice(POLICIES), help="fcfs: by arrival; priority: lower numbers of requests first"
    )
    priority_window: int = _scheduler(
        1000,
        Whole(1),
        help="of the policy priority: a level is worth that many arrivals, so that nothing waits "
        "forever",
    )
    watermark: float = _scheduler(
        0.01, Number(0.0, 1.0, below=True),
        help="share of the pages kept free for the next tokens of running requests when another "
             "one starts",
    )  # fmt: skip
    enable_chunked_prefill: bool = _scheduler(
        True, Switch(), help="spread a long prompt over steps"
    )
    async_scheduling: bool | None = _scheduler(
        None, Switch(), help="two steps in flight", usual="on, but with speculative-config off"
    )
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = _scheduler(
        None, SPECULATIVE,
        help="guess tokens and compute them ahead (docs/serving.md); the output is the same",
        usual="no guesses",
    )  # fmt: skip
    page_size: int | None = _cache(
        None, Choice(PAGE_SIZES, "a power of two from 1 to 256"), help="tokens of a page",
        shapes=True,
        usual="16, on a GPU 64, on a TPU 128 or 256", aliases=("block_size",),
    )  # fmt: skip
    memory_utilization: float = _cache(
        0.9, Number(0.05, 1.0, metavar="PART"), help="of the device's memory, what the engine may "
                                                     "take",
        aliases=("gpu_memory_utilization",), near=("mem_fraction_static",),
    )  # fmt: skip
    kv_cache_memory: int | None = _cache(
        None, Whole(1, metavar="BYTES"), help="of the KV cache on each device, in bytes, such "
                                              "as 4G",
        usual="what is left", aliases=("kv_cache_memory_bytes",),
    )  # fmt: skip
    num_pages: int | None = _cache(
        None, Whole(1), help="pages of the KV cache, instead of bytes", usual="by bytes",
        aliases=("num_gpu_blocks_override",),
    )  # fmt: skip
    kv_cache_dtype: str = _cache(
        "auto",
        Choice(KV_DTYPES),
        help="narrow ones hold x / scale in a byte; auto: as the model runs",
        shapes=True,
    )
    kv_cache_scales: tuple[float, float] | None = _cache(
        None,
        Scales(),
        help="what K and V of all layers are divided by in a narrow cache, whatever the checkpoint "
        "says",
        usual="the checkpoint's, else 1,1; int8 needs them",
        shapes=True,
    )
    page_groups: bool = _cache(
        True, Switch(), help="layers with windows keep the tokens that they read, not all",
        near=("disable_hybrid_kv_cache_manager", "swa_full_tokens_ratio"), shapes=True,
    )  # fmt: skip
    enable_prefix_caching: bool = _cache(
        True, Switch(), help="share pages of equal beginnings", near=("disable_radix_cache",)
    )
    op_priority: Mapping[str, tuple[str, ...]] = _ops(
        None,
        Priorities(),
        factory=dict,
        help="implementations to try first, by op",
        near=("attention_backend",),
    )
    enable_ops: tuple[str, ...] = _ops(
        ("all",),
        Words("all or none, then +OP and -OP", "all,-OP,..."),
        help="a disabled op runs natively",
    )
    row_invariant: bool = _ops(
        False,
        Switch(),
        help="choose implementations that give a request the same bits in any company, at a price "
        "(docs/numerics.md)",
        near=("enable_deterministic_inference", "batch_invariant"),
    )
    compile_level: int | None = _torch("level", near=("optimization_level",))
    cudagraph_mode: CUDAGraphMode | str | None = _torch("cudagraph_mode")
    enforce_eager: bool | None = _torch("enforce_eager", near=("disable_cuda_graph",))
    compilation_config: CompilationConfig | Mapping[str, Any] = option(
        None, COMPILATION, "torch", "all options of compilation (docs/compilation.md)",
        factory=CompilationConfig,
        usual="none", shapes=False,
    )  # fmt: skip
    scan_layers: bool | None = _jax(
        None,
        Switch(),
        help="one loop over stacked layers, or unrolled",
        usual="a loop, but on GPUs and TPU7x",
    )
    decode_sizes: tuple[int, ...] | None = _jax(
        None, Sizes(MAX_SIZE, rising=True), help="requests of the decode programs, the last "
                                                 "max-num-seqs",
        limits="a list of rising integers", usual="a ladder",
    )  # fmt: skip
    mixed_sizes: tuple[int, ...] | None = _jax(
        None, Sizes(MAX_SIZE, rising=True, metavar="16,32,..."), limits="a list of rising integers",
        usual="a ladder",
        help="tokens of the mixed programs, the last max-num-batched-tokens",
    )  # fmt: skip
    compilation_cache_dir: str | None = _jax(
        None,
        folder(),
        help="keep compiled programs there; none: nowhere",
        usual="~/.cache/twinfer/jax",
        shapes=False,
    )
    aot_folder: str | None = _jax(
        None, folder(), help="programs that `twinfer aot` compiled", shapes=False
    )

    def __post_init__(self) -> None:
        check_fields(self, config_error)
        self.compilation()
        _, number = parse_device(self.device)
        if number is not None and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"device: got {self.device}, which is one, and tensor_parallel_size "
                f"{self.tensor_parallel_size}; "
                "leave the number out"
            )
        if self.num_pages is not None and self.kv_cache_memory is not None:
            raise ConfigError(
                f"num_pages: got {self.num_pages}, and kv_cache_memory {self.kv_cache_memory}: "
                "give one of them"
            )
        window = options_of(EngineConfig)["priority_window"].default
        if self.scheduling_policy != "priority" and self.priority_window != window:
            raise ConfigError(
                f"priority_window: got {self.priority_window}, which has no effect with "
                "scheduling_policy "
                f"{self.scheduling_policy}"
            )

    def compilation(self) -> CompilationConfig:
        """`compilation_config` with the fields that are options here too. Raises ConfigError if
        both say something.
        """
        config = _compilation(self.compilation_config)
        values: dict[str, Any] = {}
        for name, entry in options_of(EngineConfig).items():
            value = getattr(self, name)
            if entry.copy_of is None or value is None:
                continue
            if getattr(config, entry.copy_of) not in (None, value):
                raise ConfigError(
                    f"{name}: got {show(value)} and another value in compilation_config"
                )
            values[entry.copy_of] = value
        return replace(config, **values)

    def speculative(self) -> SpeculativeConfig | None:
        """`speculative_config` as what it stands for."""
        return _speculative(self.speculative_config)

    def check_owners(self) -> None:
        """Raise ConfigError for an option of another backend than the one that runs."""
        for name, entry in options_of(EngineConfig).items():
            value = getattr(self, name)
            if entry.owner in BACKENDS and entry.owner != self.backend and value != entry.default:
                raise ConfigError(
                    f"{name}: got {show(value)}, which is for the {entry.owner} backend"
                )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """A config from a mapping of options. Raises ConfigError for an unknown name, with the
        nearest known one.
        """
        return cls(**by_name(cls, options))
