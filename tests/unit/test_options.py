"""One table of options: each entry is a field, a flag and a line of docs/options.md, and refuses
what is wrong.
"""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from twinfer.serving.cli import _parser
from twinfer.serving.flags import NAMED_APART, destination, engine_options
from twinfer.serving.parser import join_values
from twinfer.shared.compilation_config import CompilationConfig, CUDAGraphMode
from twinfer.shared.config import DeviceInfo, EngineConfig, ResolvedConfig, resolve
from twinfer.shared.drafts import SpeculativeConfig
from twinfer.shared.engine import scheduler_config
from twinfer.shared.errors import ConfigError, RequestError
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder
from twinfer.shared.option_kinds import (
    Built,
    Choice,
    Number,
    Priorities,
    Ranges,
    Scales,
    Settings,
    Sizes,
    Switch,
    Text,
    Whole,
    Words,
)
from twinfer.shared.options import METADATA, OWNERS, by_name, nearest_name, options_of
from twinfer.shared.page_groups import PageGroup
from twinfer.shared.sampling_kinds import AtMost, Biases, Sequences, Strings, Temperature, TokenIds
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.structured_outputs import MAX_TEXT, Structure

ROOT = Path(__file__).resolve().parents[2]
TABLES = (EngineConfig, CompilationConfig, SpeculativeConfig, SamplingParams)
IN_JSON = (CompilationConfig, SpeculativeConfig)
"""Those whose options are fields of one flag."""
REQUIRED = {EngineConfig: {"model": "demo"}, SpeculativeConfig: {"num_speculative_tokens": 3}}
ALL = [
    pytest.param(cls, entry, id=f"{cls.__name__}.{entry.name}")
    for cls in TABLES
    for entry in options_of(cls).values()
]
ENGINE = options_of(EngineConfig)
PARSER, COMMANDS = _parser()
DEMO = load_config(model_folder("demo"))
CPU = DeviceInfo("cpu", "cpu", 1 << 34)


def build(cls, **options):
    return cls(**REQUIRED.get(cls, {}) | options)


@pytest.mark.parametrize("cls", TABLES)
def test_every_field_is_an_option_and_says_what_it_is(cls):
    for field in dataclasses.fields(cls):
        assert METADATA in field.metadata, f"{field.name} is no option"
    for entry in options_of(cls).values():
        assert entry.owner in OWNERS
        assert entry.help
        assert len(entry.help.splitlines()) == 1
        assert entry.range or entry.kind == Whole(), entry.name


@pytest.mark.parametrize(("cls", "entry"), ALL)
def test_a_default_is_allowed(cls, entry):
    if entry.default is not None:
        assert entry.check(entry.default) == entry.default
    assert entry.required == (entry.name in REQUIRED.get(cls, {}))
    expected = REQUIRED[cls][entry.name] if entry.required else entry.default
    assert getattr(build(cls), entry.name) == expected


def wrong_values(kind):
    """Values that a kind must refuse: of other types, and those beside its limits."""
    match kind:
        case Switch():
            return [0, 1, "true", np.bool_(True)]
        case Choice():
            return ["no such word", 10**6, True, 1.5, []]
        case Temperature():
            return [0.001, -0.5, kind.high + 1, float("nan"), "1", True]
        case Whole():
            sides = [] if kind.low is None else [kind.low - 1]
            sides += [] if kind.high is None else [kind.high + 1]
            return [*sides, 1.5, "1", True, [1]]
        case Number():
            sides = [kind.low] * kind.above + [kind.high] * kind.below
            return [*sides, kind.low - 1, kind.high + 1, float("nan"), "1", True]
        case Text():
            return ["", 3, ["a"]]
        case Words():
            return ["all", [3], 3, [""], {"a"}]
        case Sizes():
            lists = [[]] * (kind.word is None) + [[2, 1], [1, 1]] * kind.rising
            return [*lists, [0], [kind.high + 1], [True], [1.0], ["all"], "8", 8]
        case Ranges():
            return [
                [[8, 2]],
                [[1, 8], [8, 16]],
                [[1]],
                [[0, 1]],
                [[1, kind.high + 1]],
                [1, 8],
                "1",
                3,
            ]
        case Scales():
            return [0.1, [0.1], [0.1, 0], [1, float("inf")], ["1", "2"], [True, 1]]
        case Priorities():
            return ["rms_norm=native", {"rms_norm": "native"}, {1: ["native"]}, {"rms_norm": [1]}]
        case Settings():
            return ["x", [1], {"a": {}}, {1: 2}]
        case TokenIds():
            return [5, "5", {5}, [-1], [2**31], [True], ["1"], [1] * (kind.limit + 1)]
        case Sequences():
            good = [[1, 2]]
            lists = [[[]], [[1]], [[1] * (kind.length + 1)], good * (kind.limit + 1)]
            return [5, "x", [5], [1, 2], ["12"], [[-1, 2]], [[1, 2**31]], [[1, True]], *lists]
        case Strings():
            return [5, [5], [""], ["a"] * (kind.limit + 1), "a" * (kind.length + 1)]
        case Biases():
            return [
                5,
                {"a": 1},
                {-1: 1},
                {1: kind.most + 1},
                {1: "1"},
                dict.fromkeys(range(kind.limit + 1), 0),
            ]
        case Structure():
            return [
                5,
                "x",
                {},
                {"xml": "x"},
                {"json": "{}", "regex": "x"},
                {"regex": 3},
                {"choice": []},
                {"choice": [""]},
                {"json_object": False},
                {"json_object": 1},
                {"json_object": 0},
                {"json_object": ""},
                {"json_object": "true"},
                {"json": "{"},
                {"json": [1]},
                {"regex": "x" * (MAX_TEXT + 1)},
            ]
        case Built():
            return ["no such thing", 3, [1]]
    raise AssertionError(f"{kind} has no wrong values here")


@pytest.mark.parametrize(("cls", "entry"), ALL)
def test_what_is_not_allowed_is_refused_with_name_value_and_what_is(cls, entry):
    values = wrong_values(entry.kind) + (
        [None] if entry.default is not None and not tolerant(entry.kind) else []
    )
    for value in values:
        with pytest.raises((ConfigError, RequestError)) as refused:
            build(cls, **{entry.name: value})
        message = str(refused.value)
        where = "speculative_config." if cls is SpeculativeConfig else ""
        assert message.startswith(f"{where}{entry.name}: "), f"{value!r}: {message}"
        assert "allowed" in message, f"{value!r}: {message}"
        assert any(word in message for word in ("got", "has", "is empty")), f"{value!r}: {message}"


def tolerant(kind):
    """Whether None stands for nothing, as it does in requests."""
    return isinstance(kind, TokenIds | Sequences | Strings | Biases | AtMost)


def test_the_limits_themselves_are_allowed():
    for cls in TABLES:
        for entry in options_of(cls).values():
            if not isinstance(entry.kind, Whole | Number) or entry.name in (
                "min_tokens",
                "priority_window",
            ):
                continue
            low, high = entry.kind.low, entry.kind.high
            skipped = (
                isinstance(entry.kind, Number) and entry.kind.above,
                getattr(entry.kind, "below", False),
            )
            for value, skip in zip((low, high), skipped, strict=True):
                if value is not None and not skip:
                    assert getattr(build(cls, **{entry.name: value}), entry.name) == value


def test_a_value_is_kept_in_one_form():
    config = EngineConfig(
        model="demo", decode_sizes=[8, 16], enable_ops=["none"], max_num_seqs=np.int32(16)
    )
    assert (config.decode_sizes, config.enable_ops) == ((8, 16), ("none",))
    assert type(config.max_num_seqs) is int
    assert EngineConfig(model="demo", cudagraph_mode="full").cudagraph_mode is CUDAGraphMode.FULL
    assert EngineConfig(
        model="demo", compilation_config={"level": 2}
    ).compilation_config == CompilationConfig(level=2)
    assert CompilationConfig(cudagraph_mode="none", compile_ranges=[[1, 2]]) == CompilationConfig(
        cudagraph_mode=CUDAGraphMode.NONE, compile_ranges=((1, 2),)
    )


# Flags


@pytest.mark.parametrize(("cls", "entry"), ALL)
def test_an_option_has_a_flag_or_says_why_not(cls, entry):
    if entry.flags:
        actions = COMMANDS["generate"]._option_string_actions
        assert [actions[flag].dest for flag in entry.flags] == [destination(entry)] * len(
            entry.flags
        )
    else:
        assert entry.no_flag
        assert cls in IN_JSON or entry.name == "model"


def test_no_flag_stands_for_two_options():
    flags = [flag for cls in TABLES for entry in options_of(cls).values() for flag in entry.flags]
    assert len(flags) == len(set(flags))


TYPED = {
    "device": ("cpu", "cpu"),
    "dtype": ("float32", "float32"),
    "load_format": ("dummy", "dummy"),
    "seed": ("7", 7),
    "tensor_parallel_size": ("2", 2),
    "distributed_executor_backend": ("ray", "ray"),
    "restart_on_failure": (True, True),
    "capture": ("d,nan", "d,nan"),
    "max_model_len": ("4k", 4000),
    "max_num_seqs": ("32", 32),
    "max_num_batched_tokens": ("1K", 1024),
    "decode_steps": ("4", 4),
    "scheduling_policy": ("priority", "priority"),
    "priority_window": ("10", 10),
    "watermark": ("0.5", 0.5),
    "enable_chunked_prefill": (None, False),
    "async_scheduling": (None, False),
    "speculative_config": ('{"num_speculative_tokens": 3}', SpeculativeConfig(3)),
    "page_size": ("32", 32),
    "memory_utilization": ("0.5", 0.5),
    "kv_cache_memory": ("4G", 4 << 30),
    "num_pages": ("9", 9),
    "kv_cache_dtype": ("int8", "int8"),
    "quantization": ("int4", "int4"),
    "kv_cache_scales": ("0.5,0.25", (0.5, 0.25)),
    "enable_prefix_caching": (None, False),
    "page_groups": (None, False),
    "op_priority": ("rms_norm=a,b", {"rms_norm": ("a", "b")}),
    "enable_ops": ("-rms_norm", ("-rms_norm",)),
    "row_invariant": (True, True),
    "compile_level": ("2", 2),
    "cudagraph_mode": ("full", CUDAGraphMode.FULL),
    "enforce_eager": (None, False),
    "compilation_config": ('{"level": 2}', CompilationConfig(level=2)),
    "scan_layers": (None, False),
    "decode_sizes": ("8,16", (8, 16)),
    "mixed_sizes": ("16,32", (16, 32)),
    "compilation_cache_dir": ("c", "c"),
    "aot_folder": ("a", "a"),
}
"""What is typed behind a flag (None and True: the switch is turned off and on), and what the option
becomes.
"""


def test_every_engine_flag_is_tried():
    assert set(TYPED) == set(ENGINE) - set(NAMED_APART)


@pytest.mark.parametrize("name", TYPED)
def test_every_spelling_of_a_flag_reaches_its_option(name):
    text, value = TYPED[name]
    for flag in ENGINE[name].flags:
        words = {None: [f"--no-{flag[2:]}"], True: [flag]}.get(text, [flag, text])
        arguments, unknown = PARSER.parse_known_args(join_values(["generate", "demo", *words]))
        assert not unknown
        others = {"scheduling_policy": "priority"} if name == "priority_window" else {}
        config = EngineConfig(**engine_options(arguments) | others, model="demo")
        assert getattr(config, name) == value != ENGINE[name].default


# Names


def test_an_alias_is_the_option():
    aliases = {alias: entry.name for entry in ENGINE.values() for alias in entry.aliases}
    assert aliases == {
        "block_size": "page_size",
        "gpu_memory_utilization": "memory_utilization",
        "kv_cache_memory_bytes": "kv_cache_memory",
        "num_gpu_blocks_override": "num_pages",
    }
    values = {
        "page_size": 32,
        "memory_utilization": 0.5,
        "kv_cache_memory": 1 << 20,
        "num_pages": 7,
    }
    for alias, name in aliases.items():
        config = EngineConfig.from_options({"model": "demo", alias: values[name]})
        assert getattr(config, name) == values[name]
        with pytest.raises(
            ConfigError, match=f"{name}: got it as {name} and as {alias}, one is allowed"
        ):
            EngineConfig.from_options({"model": "demo", name: values[name], alias: values[name]})


@pytest.mark.parametrize(
    ("unknown", "known"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("mem_fraction_static", "memory_utilization"),
        ("disable_cuda_graph", "enforce_eager"),
        ("xyzzy", None),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(unknown, known):
    assert nearest_name(unknown, ENGINE.values()) == known
    hint = f"did you mean '{known}'" if known else "docs/options.md"
    with pytest.raises(ConfigError, match=rf"unknown option '{unknown}', got 5; {hint}"):
        by_name(EngineConfig, {unknown: 5})


# What options do


SET = {
    "torch": {
        "compile_level": 0,
        "cudagraph_mode": "NONE",
        "enforce_eager": False,
        "compilation_config": {"level": 1},
    },
    "jax": {
        "scan_layers": False,
        "decode_sizes": (16,),
        "mixed_sizes": (512,),
        "compilation_cache_dir": "c",
        "aot_folder": "a",
    },
}
"""A value for each option of a backend."""


@pytest.mark.parametrize(("owner", "other"), [("torch", "jax"), ("jax", "torch")])
def test_an_option_of_a_backend_is_refused_on_the_other(owner, other):
    assert set(SET[owner]) == {entry.name for entry in ENGINE.values() if entry.owner == owner}
    for name, value in SET[owner].items():
        with pytest.raises(
            ConfigError, match=rf"^{name}: got .*, which is for the {owner} backend"
        ):
            resolve(EngineConfig(model="demo", backend=other, **{name: value}), DEMO, CPU)
        EngineConfig(model="demo", backend=owner, **{name: value}).check_owners()


ELSEWHERE = {
    "quantization": "the model says how its weights are held",
    "model": "the worker is given its folder",
    "device": "DeviceInfo says which it is",
    "capture": "the engine attaches the camera",
    "compile_level": "in `compilation`",
    "cudagraph_mode": "in `compilation`",
    "enforce_eager": "in `compilation`",
    "compilation_config": "is `compilation`",
}
"""Options that are no field of `ResolvedConfig`, and why."""


def test_every_option_is_resolved():
    resolved = {field.name for field in dataclasses.fields(ResolvedConfig)}
    assert set(ENGINE) - resolved == set(ELSEWHERE)
    assert resolved - set(ENGINE) == {"platform", "compilation", "demand"}


def test_options_of_the_scheduler_reach_it():
    asked = {
        "scheduling_policy": "priority",
        "priority_window": 3,
        "watermark": 0.25,
        "decode_steps": 4,
    }
    asked |= {
        "async_scheduling": False,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
    }
    resolved, _ = resolve(EngineConfig(model="demo", backend="torch", **asked), DEMO, CPU)
    groups = (PageGroup(16), PageGroup(32, 8))
    config = scheduler_config(resolved, 9, groups)
    assert config.page_groups == groups
    assert (config.policy, config.priority_window, config.watermark) == ("priority", 3, 0.25)
    assert (config.pipeline_depth, config.decode_steps, config.num_pages) == (1, 4, 9)
    assert not config.enable_chunked_prefill
    assert not config.enable_prefix_caching


def test_a_window_without_priorities_is_refused():
    with pytest.raises(
        ConfigError, match="priority_window: got 3, which has no effect with scheduling_policy fcfs"
    ):
        EngineConfig(model="demo", priority_window=3)


# Documents


def test_the_document_is_what_the_tables_say():
    path = ROOT / "scripts" / "write_options.py"
    spec = importlib.util.spec_from_file_location("write_options", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.document()
    assert (ROOT / "docs" / "options.md").read_text() == text, "run `make docs`"
    for cls in TABLES:
        for entry in options_of(cls).values():
            (line,) = [line for line in text.splitlines() if line == line_of(script, cls, entry)]
            assert entry.help in line
    # A change that nobody has written down is seen.
    assert script.table([dataclasses.replace(ENGINE["watermark"], help="another")]) not in text


def line_of(script, cls, entry):
    option, flags, *others = script.cells(entry)
    cells = [option, *others] if cls in IN_JSON else [option, flags, *others]
    return f"| {' | '.join(cells)} |"


def test_the_tables_load_no_framework():
    code = (
        "import sys, twinfer.serving.flags; print(*({'flax', 'jax', 'torch', 'triton'} & "
        "set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
