"""How the torch worker compiles and captures: levels, CUDA graph modes, sizes. No framework is
imported here.

Every field may be left open (None); `resolve_compilation()` fills it in for a platform, or refuses
with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from .errors import ConfigError
from .option_kinds import (
    Built,
    Choice,
    Ranges,
    Refusal,
    Settings,
    Sizes,
    Switch,
    Whole,
    Words,
    folder,
)
from .options import by_name, check_fields, config_error, option

LEVELS = {
    0: "the ops' functions, one after the other",
    1: "the layer, traced by Dynamo as one graph and run as it was traced",
    2: "the layer, compiled by Inductor",
    3: "replayed as CUDA graphs: the layer's kernels as they are where each op is a kernel, else "
    "level 2 "
    "(on a CPU: level 2)",
}
"""What runs at each level, as help and documents say it."""
ROADS = ("regional", "piecewise")
OPS = ("plain", "wrapped")
ATTENTION_OPS = ("paged_attention", "latent_attention")
"""What pieces of graphs are split at unless somebody says otherwise: a model calls one of them."""
CAPTURE_SIZES = "cudagraph_capture_sizes"
"""The word that stands in `compile_sizes` for all sizes that are captured."""
MAX_SIZE = 1 << 20


class CUDAGraphMode(Enum):
    """Which steps are replayed as CUDA graphs. Two of them are pairs of modes, of decode and of
    mixed steps. Values are numbers, so that they can be sent to another process.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = 3
    FULL_AND_PIECEWISE = 4

    def decode_mode(self) -> CUDAGraphMode:
        """The mode of steps in which every request has one token: NONE, PIECEWISE or FULL."""
        return _PAIRS[self][0] if self in _PAIRS else self

    def mixed_mode(self) -> CUDAGraphMode:
        """The mode of all other steps: NONE, PIECEWISE or FULL."""
        return _PAIRS[self][1] if self in _PAIRS else self

    def step_mode(self, kind: str) -> CUDAGraphMode:
        """The mode of steps of a kind, `decode` or `mixed`."""
        return self.decode_mode() if kind == "decode" else self.mixed_mode()

    def has_mode(self, mode: CUDAGraphMode) -> bool:
        """Whether any step runs in `mode`, which is NONE, PIECEWISE or FULL."""
        return mode in (self.decode_mode(), self.mixed_mode())


_PAIRS = {
    CUDAGraphMode.FULL_DECODE_ONLY: (CUDAGraphMode.FULL, CUDAGraphMode.NONE),
    CUDAGraphMode.FULL_AND_PIECEWISE: (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE),
}

MODES = tuple(CUDAGraphMode.__members__)
MODE_STEPS = {
    "NONE": "no step",
    "PIECEWISE": "all, in pieces between calls of attention, which run eagerly",
    "FULL": "all, each one graph",
    "FULL_DECODE_ONLY": "decode steps, each one graph",
    "FULL_AND_PIECEWISE": "decode steps, each one graph, and mixed ones in pieces",
}
"""Which steps are graphs in each mode, as help says it."""


def parse_mode(value: Any) -> CUDAGraphMode:
    """The mode of that name, in capitals or not. Raises Refusal."""
    if isinstance(value, CUDAGraphMode):
        return value
    if not isinstance(value, str) or value.upper() not in MODES:
        raise Refusal
    return CUDAGraphMode[value.upper()]


MODE = Built(parse_mode, ", ".join(MODES), choices=MODES, reads=str.upper)
_option = partial(option, None, owner="torch", no_flag="a field of `--compilation-config`")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilationConfig:
    """Options of compilation and capture, all of the torch backend; docs/options.md says what each
    does.

    None means: chosen by `resolve_compilation()`.
    """

    level: int | None = _option(
        Choice(tuple(LEVELS)), help="what runs", usual="3 on a GPU, else 0", meanings=LEVELS
    )
    cudagraph_mode: CUDAGraphMode | None = _option(
        MODE, help="which steps are CUDA graphs", usual="FULL at level 3 where kernels allow it",
        meanings=MODE_STEPS,
    )  # fmt: skip
    enforce_eager: bool | None = _option(
        Switch(), help="level 0 without graphs; off allows the graphs of level 0", usual="off"
    )
    road: str | None = _option(
        Choice(ROADS), usual="regional",
        help="regional: one layer compiled and run by every layer; piecewise: the whole model, "
             "traced and split",
    )  # fmt: skip
    ops: str | None = _option(
        Choice(OPS), usual="plain",
        help="wrapped: layers are traced with one node for each op, which passes over the graph "
             "make functional, fuse "
        "and lower to the plan; plain: the compiler looks into the ops at once",
    )  # fmt: skip
    cudagraph_capture_sizes: tuple[int, ...] | None = _option(
        Sizes(MAX_SIZE), help="decode batch sizes that are captured, and the sizes that steps are "
                              "padded to",
        usual="the ladder of decode programs",
    )  # fmt: skip
    cuda_graph_sizes: tuple[int, ...] | None = _option(
        Sizes(MAX_SIZE), help="the same by one number n (1 2 4 8 16 32 48 ... n), or as a list"
    )
    cudagraph_mixed_limit: int | None = _option(
        Whole(0, MAX_SIZE), help="the most tokens of a mixed step that is captured", usual="8192"
    )
    cudagraph_copy_inputs: bool | None = _option(
        Switch(), usual="on",
        help="inputs of a step are copied into the buffer that the graphs read: they come from "
             "the "
             "host, so that there "
        "is no other way, and false is refused",
    )  # fmt: skip
    splitting_ops: tuple[str, ...] | None = _option(
        Words("a list of names of ops"), usual="paged_attention, latent_attention",
        help="ops between the pieces of a piecewise graph; they run eagerly",
    )  # fmt: skip
    compile_sizes: tuple[int | str, ...] | None = _option(
        Sizes(MAX_SIZE, word=CAPTURE_SIZES), usual="1 where layers are compiled",
        help="numbers of tokens compiled with static shapes; the word stands for all sizes that "
             "are captured",
    )  # fmt: skip
    compile_ranges: tuple[tuple[int, int], ...] | None = _option(
        Ranges(MAX_SIZE),
        help="ranges of numbers of tokens, each compiled once with a dynamic shape",
    )
    use_inductor: bool | None = _option(
        Switch(), usual="on from level 2, but for layers of kernels alone",
        help="off: traced graphs run as they are; on: all regions are compiled, also those "
             "made of "
             "kernels alone, "
        "which level 3 runs as they are",
    )  # fmt: skip
    inductor_compile_config: Mapping[str, Any] = _option(
        Settings(), factory=dict, help='options for Inductor, such as {"max_autotune": true}'
    )
    debug_dump_path: str | None = _option(
        folder(), help="folder for traced graphs and generated code"
    )
    cache_dir: str | None = _option(
        folder(),
        help="folder that keeps compiled code between starts",
        usual="~/.cache/twinfer/torch",
    )

    def __post_init__(self) -> None:
        check_fields(self, config_error)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> CompilationConfig:
        """A config from JSON values: modes as text, lists for tuples. Raises ConfigError, also
        for unknown names.
        """
        return cls(**by_name(cls, options, "compilation_config: "))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedCompilation:
    """What the torch worker compiles and captures; the fields are those of `CompilationConfig`,
    nothing is left open.

    `skip_kernels`: a region made of kernels alone is not compiled, as the compiler would find
    nothing to generate. `mode_given`: the user chose the graph mode, so that it is an error if the
    chosen kernels cannot be captured so; the default gives way instead. `splitting_given`: the user
    chose where pieces end, so that he is told if nothing is captured in pieces.
    """

    level: int = 0
    road: str = "regional"
    ops: str = "plain"
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE
    mode_given: bool = False
    cudagraph_capture_sizes: tuple[int, ...] = ()
    cudagraph_mixed_limit: int = 0
    splitting_ops: tuple[str, ...] = ATTENTION_OPS
    splitting_given: bool = False
    compile_sizes: tuple[int, ...] = ()
    compile_ranges: tuple[tuple[int, int], ...] = ()
    use_inductor: bool = False
    skip_kernels: bool = False
    inductor_compile_config: Mapping[str, Any] = field(default_factory=dict)
    debug_dump_path: str | None = None
    cache_dir: str | None = None

    @property
    def wraps(self) -> bool:
        """Whether layers are traced over wrapped ops."""
        return self.ops == "wrapped"

    def factors(self) -> dict[str, Any]:
        """The fields that change what is generated, as JSON values: part of the key of a compile
        cache.
        """
        names = [
            "level",
            "road",
            "splitting_ops",
            "compile_sizes",
            "compile_ranges",
            "use_inductor",
            "skip_kernels",
        ]
        if self.wraps:
            names.append("ops")
        values = {name: getattr(self, name) for name in names}
        return values | {
            "inductor_compile_config": dict(sorted(self.inductor_compile_config.items()))
        }


NOT_TORCH = ResolvedCompilation()
"""The jax backend compiles with XLA and has none of this."""


def capture_ladder(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes that `cuda_graph_sizes` names: one number n gives 1 2 4 8 16 32 48 ... n, a list
    gives itself.
    """
    if len(sizes) > 1:
        return tuple(sorted(set(sizes)))
    largest = sizes[0]
    return tuple(
        sorted({*(n for n in (1, 2, 4, 8) if n < largest), *range(16, largest, 16), largest})
    )


Filled = tuple[str, Any, Any, str]
"""A value that was filled in or changed: its field, before, after, and why."""


def _static_sizes(sizes: Sequence[int | str], capture_sizes: Sequence[int]) -> tuple[int, ...]:
    """Token counts with code of their own, with the capture sizes in place of the word for them."""
    static: set[int] = set()
    for size in sizes:
        static.update(capture_sizes if size == CAPTURE_SIZES else [int(size)])
    return tuple(sorted(static))


def resolve_compilation(
    config: CompilationConfig, platform: str, decode_sizes: Sequence[int], max_num_seqs: int
) -> tuple[ResolvedCompilation, list[Filled]]:
    """Fill in what was left open. `decode_sizes` are captured unless the config names others.

    Raises ConfigError where the options contradict each other or the platform.
    """
    filled: list[Filled] = []

    def fill(name: str, value: Any, why: str) -> Any:
        if getattr(config, name) is not None:
            return getattr(config, name)
        filled.append((name, None, value, why))
        return value

    level = _level(config, platform, fill)
    mode = _mode(config, platform, level, fill)
    sizes = _capture_sizes(config, mode, decode_sizes, max_num_seqs, filled)
    road = fill("road", "regional", "starts faster") if level > 0 else config.road or "regional"
    use_inductor = level >= 2 and _or(config.use_inductor, True)
    _check_effect(config, level, road, use_inductor)
    _check_graph_effect(config, mode, road)
    if config.cache_dir and not keeps_code(config, platform):
        raise ConfigError(
            f"cache_dir: got {config.cache_dir!r}, allowed is none: level {level} on {platform} "
            "leaves nothing to keep"
        )
    ops = config.ops or "plain"
    plain = config.use_inductor is None and not (
        config.inductor_compile_config or config.debug_dump_path
    )
    skip_kernels = level == 3 and road == "regional" and plain and ops == "plain"
    if level >= 2 and not skip_kernels:
        compile_sizes = fill("compile_sizes", (1,), "a step of one token has code of its own")
    else:
        compile_sizes = config.compile_sizes or ()
    resolved = ResolvedCompilation(
        level=level,
        road=road,
        ops=ops,
        cudagraph_mode=mode,
        mode_given=config.cudagraph_mode is not None,
        cudagraph_capture_sizes=sizes,
        cudagraph_mixed_limit=_or(config.cudagraph_mixed_limit, 8192),
        splitting_ops=_or(config.splitting_ops, ATTENTION_OPS),
        splitting_given=config.splitting_ops is not None,
        compile_sizes=_static_sizes(compile_sizes, sizes),
        compile_ranges=_or(config.compile_ranges, ()),
        use_inductor=use_inductor,
        skip_kernels=skip_kernels,
        inductor_compile_config=config.inductor_compile_config,
        debug_dump_path=config.debug_dump_path,
        cache_dir=config.cache_dir,
    )
    check_wrapping(resolved)
    return resolved, filled


def _capture_sizes(
    config: CompilationConfig,
    mode: CUDAGraphMode,
    decode_sizes: Sequence[int],
    max_num_seqs: int,
    filled: list[Filled],
) -> tuple[int, ...]:
    """The batch sizes that are captured, none without graphs."""
    if config.cudagraph_capture_sizes and config.cuda_graph_sizes:
        raise ConfigError("cudagraph_capture_sizes and cuda_graph_sizes: got both, one is allowed")
    asked = config.cudagraph_capture_sizes
    if config.cuda_graph_sizes:
        asked = capture_ladder(config.cuda_graph_sizes)
    if mode is CUDAGraphMode.NONE:
        if asked:
            raise ConfigError(
                "cudagraph_capture_sizes: got sizes to capture, but cudagraph_mode is NONE"
            )
        return ()
    sizes = tuple(sorted(set(asked or decode_sizes)))
    kept = tuple(size for size in sizes if size <= max_num_seqs)
    if not kept:
        raise ConfigError(
            f"cudagraph_capture_sizes: got {sizes}, at least one must be within max_num_seqs"
        )
    if asked and kept != sizes:
        filled.append(
            (CAPTURE_SIZES, sizes, kept, f"a step has at most max_num_seqs={max_num_seqs} requests")
        )
    return kept


def _check_effect(config: CompilationConfig, level: int, road: str, use_inductor: bool) -> None:
    """Raise ConfigError for an option of the compiler that would have no effect."""
    if road == "piecewise" and level < 2:
        raise ConfigError(f"road: got 'piecewise', which compiles; level {level} does not")
    if level == 0:
        for name in ("road", "ops", "compile_sizes", "compile_ranges"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name}: got {getattr(config, name)!r}, allowed is none: level 0 compiles "
                    "nothing"
                )
    if config.use_inductor is not None and level < 2:
        raise ConfigError(
            f"use_inductor: got {config.use_inductor}, allowed is none: level {level} "
            "generates no "
            "code"
        )
    if config.inductor_compile_config and not use_inductor:
        raise ConfigError(
            f"inductor_compile_config: Inductor is not used at level {level}, use_inductor=False"
        )
    if config.debug_dump_path and level == 0:
        raise ConfigError(
            f"debug_dump_path: got {config.debug_dump_path!r}, allowed is none: level 0 traces "
            "nothing"
        )
    if config.cudagraph_copy_inputs is False:
        raise ConfigError(
            "cudagraph_copy_inputs: got False, allowed is True: a step's inputs come from the "
            "host, and one copy "
            "brings them to the buffer that the graphs read"
        )


def _check_graph_effect(config: CompilationConfig, mode: CUDAGraphMode, road: str) -> None:
    """Raise ConfigError for an option of graphs that would have no effect, whatever the plan."""
    if config.cudagraph_copy_inputs is not None and mode is CUDAGraphMode.NONE:
        raise ConfigError(
            f"cudagraph_copy_inputs: got {config.cudagraph_copy_inputs}, allowed is none: "
            "cudagraph_mode is NONE, so "
            f"no graph reads inputs"
        )
    if config.cudagraph_mixed_limit is not None and mode.mixed_mode() is CUDAGraphMode.NONE:
        raise ConfigError(
            f"cudagraph_mixed_limit: got {config.cudagraph_mixed_limit}, allowed is none: "
            f"cudagraph_mode {mode.name} "
            f"captures no mixed steps"
        )
    # The default mode may become PIECEWISE, if the plan's attention reads lengths on the host.
    may_split = mode.has_mode(CUDAGraphMode.PIECEWISE) or (
        config.cudagraph_mode is None and mode is not CUDAGraphMode.NONE
    )
    if config.splitting_ops is not None and road == "regional" and not may_split:
        raise ConfigError(
            f"splitting_ops: got {list(config.splitting_ops)}, allowed is none: the road is "
            "regional and "
            f"cudagraph_mode is {mode.name}, so nothing is split"
        )


def check_wrapping(compilation: ResolvedCompilation) -> None:
    """Raise ConfigError where the passes over wrapped ops cannot run."""
    if not compilation.wraps:
        return
    if compilation.road == "piecewise":
        raise ConfigError(
            "ops: got 'wrapped', allowed is plain: the road is piecewise, which splits at ops as "
            "they are"
        )
    if compilation.cudagraph_mode.has_mode(CUDAGraphMode.PIECEWISE):
        raise ConfigError(
            "ops: got 'wrapped', allowed is plain: cudagraph_mode is "
            f"{compilation.cudagraph_mode.name}, "
            f"whose graphs end inside of an op"
        )


def keeps_code(config: CompilationConfig, platform: str) -> bool:
    """Whether `cache_dir` is of use: for code from level 2 on, and on a GPU for the measured
    size of the KV cache.
    """
    level = 0 if config.enforce_eager else _or(config.level, _default_level(platform))
    return level >= 2 or platform == "cuda"


def _default_level(platform: str) -> int:
    return 3 if platform == "cuda" else 0


def check_sizes(config: CompilationConfig, sizes: Collection[int]) -> None:
    """Raise ConfigError for a size or a range that no program has; `sizes` are their numbers of
    tokens.
    """
    allowed = f"allowed are the numbers of tokens of programs: {', '.join(map(str, sorted(sizes)))}"
    for size in config.compile_sizes or ():
        if size != CAPTURE_SIZES and size not in sizes:
            raise ConfigError(f"compile_sizes: got {size}, {allowed}")
    for first, last in config.compile_ranges or ():
        if not any(first <= size <= last for size in sizes):
            raise ConfigError(f"compile_ranges: got {first} to {last}, which holds none; {allowed}")


def _level(config: CompilationConfig, platform: str, fill: Any) -> int:
    if config.enforce_eager:
        if config.level not in (None, 0):
            raise ConfigError(
                f"enforce_eager: got True with level {config.level}, allowed is level 0 or none"
            )
        if config.cudagraph_mode not in (None, CUDAGraphMode.NONE):
            raise ConfigError(
                f"enforce_eager: got True with cudagraph_mode {config.cudagraph_mode.name}, "
                "allowed is NONE"
            )
        return 0
    return int(fill("level", _default_level(platform), f"default on {platform}"))


def _mode(config: CompilationConfig, platform: str, level: int, fill: Any) -> CUDAGraphMode:
    """The graph mode, or the reason why it cannot be had."""
    asked = config.cudagraph_mode
    if asked not in (None, CUDAGraphMode.NONE):
        why = None
        if platform != "cuda":
            why = f"a CUDA graph needs a cuda device, this is {platform}"
        elif level in (1, 2):
            why = f"level {level} runs without graphs; level 3 has them"
        elif level == 0 and config.enforce_eager is not False:
            why = "level 0 runs eagerly; graphs of eager kernels need enforce_eager=False"
        if why:
            raise ConfigError(f"cudagraph_mode: got {asked.name}, allowed is NONE: {why}")
        return asked
    if level == 3 and platform == "cuda":
        default, why = (
            CUDAGraphMode.FULL,
            "default at level 3, PIECEWISE for kernels that read the host",
        )
    else:
        default, why = (
            CUDAGraphMode.NONE,
            f"no graphs on {platform}" if level == 3 else f"no graphs at level {level}",
        )
    mode: CUDAGraphMode = fill("cudagraph_mode", default, why)
    return mode


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
