"""The options of compilation and capture: what is allowed, what is filled in, and what is
refused with a reason.
"""

import pytest

from twinfer.shared.compilation_config import (
    CompilationConfig,
    CUDAGraphMode,
    capture_ladder,
    parse_mode,
    resolve_compilation,
)
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
LADDER = (1, 2, 4, 8)

MODES = {
    # mode: decode, mixed
    "NONE": (NONE, NONE),
    "PIECEWISE": (PIECEWISE, PIECEWISE),
    "FULL": (FULL, FULL),
    "FULL_DECODE_ONLY": (FULL, NONE),
    "FULL_AND_PIECEWISE": (FULL, PIECEWISE),
}


@pytest.mark.parametrize("name", MODES)
def test_modes(name):
    decode, mixed = MODES[name]
    mode = parse_mode(name.lower())
    assert (mode.decode_mode(), mode.mixed_mode()) == (decode, mixed)
    assert (mode.step_mode("decode"), mode.step_mode("mixed")) == (decode, mixed)
    assert [mode.has_mode(part) for part in (NONE, PIECEWISE, FULL)] == [
        p in (decode, mixed) for p in (NONE, PIECEWISE, FULL)
    ]


def test_every_mode_is_tested():
    assert set(MODES) == set(CUDAGraphMode.__members__)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((512,), (1, 2, 4, 8, *range(16, 513, 16))),
        ((1,), (1,)),
        ((20,), (1, 2, 4, 8, 16, 20)),
        ((8, 2, 8), (2, 8)),
    ],
)
def test_capture_ladder(sizes, expected):
    assert capture_ladder(sizes) == expected


BAD = {
    "level 4": ({"level": 4}, "level: got 4, allowed are 0, 1, 2, 3"),
    "a boolean level": ({"level": True}, "level: got True, allowed"),
    "an unknown field": ({"cudagraph_mod": "FULL"}, "did you mean 'cudagraph_mode'"),
    "an unknown mode": ({"cudagraph_mode": "SOME"}, "FULL_AND_PIECEWISE"),
    "a mode that is no text": ({"cudagraph_mode": 2}, "cudagraph_mode: got 2, allowed are NONE"),
    "an unknown road": ({"road": "scenic"}, "regional, piecewise"),
    "a size of zero": ({"cudagraph_capture_sizes": [0, 1]}, "cudagraph_capture_sizes"),
    "no sizes": ({"cuda_graph_sizes": []}, "cuda_graph_sizes"),
    "sizes in text": ({"cudagraph_capture_sizes": "12"}, "allowed is a list of integers"),
    "another word": ({"compile_sizes": ["all"]}, "compile_sizes"),
    "a range backwards": ({"compile_ranges": [[8, 2]]}, "compile_ranges"),
    "ranges that overlap": ({"compile_ranges": [[1, 8], [8, 16]]}, "compile_ranges"),
    "half a range": ({"compile_ranges": [[1]]}, "compile_ranges"),
    "a flag that is none": ({"use_inductor": "yes"}, "use_inductor"),
    "a nested option": ({"inductor_compile_config": {"a": {}}}, "inductor_compile_config"),
    "a negative limit": ({"cudagraph_mixed_limit": -1}, "cudagraph_mixed_limit"),
    "no folder": ({"cache_dir": ""}, "cache_dir"),
    "an op that is none": ({"splitting_ops": [3]}, "splitting_ops"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_name_field_and_value(name):
    options, message = BAD[name]
    with pytest.raises(ConfigError, match=message):
        CompilationConfig.from_options(options)


REFUSED = {
    "graphs on a cpu": ("cpu", {"cudagraph_mode": "FULL"}, "needs a cuda device"),
    "graphs at level 2": ("cuda", {"level": 2, "cudagraph_mode": "FULL"}, "level 3 has them"),
    "graphs at level 0": ("cuda", {"level": 0, "cudagraph_mode": "FULL"}, "enforce_eager=False"),
    "eager at level 3": ("cuda", {"level": 3, "enforce_eager": True}, "enforce_eager"),
    "eager with graphs": (
        "cuda",
        {"enforce_eager": True, "cudagraph_mode": "FULL"},
        "allowed is NONE",
    ),
    "sizes without graphs": ("cpu", {"cudagraph_capture_sizes": [1]}, "cudagraph_mode is NONE"),
    "sizes twice": (
        "cuda",
        {"cudagraph_capture_sizes": [1], "cuda_graph_sizes": [4]},
        "one is allowed",
    ),
    "sizes too large": ("cuda", {"cudagraph_capture_sizes": [16]}, "max_num_seqs"),
    "piecewise at level 0": ("cuda", {"level": 0, "road": "piecewise"}, "does not"),
    "no copies": ("cuda", {"cudagraph_copy_inputs": False}, "come from the host"),
    "no copies on the other road": (
        "cuda",
        {"cudagraph_copy_inputs": False, "road": "piecewise"},
        "allowed is True",
    ),
    "copies without graphs": (
        "cpu",
        {"cudagraph_copy_inputs": True},
        "cudagraph_copy_inputs: got True, .* is NONE",
    ),
    "options without inductor": (
        "cpu",
        {"level": 1, "inductor_compile_config": {"max_autotune": True}},
        "not used",
    ),
    "inductor at level 1": (
        "cuda",
        {"level": 1, "use_inductor": True},
        "use_inductor: got True, allowed is none: level 1",
    ),
    "no inductor at level 1": (
        "cuda",
        {"level": 1, "use_inductor": False},
        "got False, allowed is none: level 1",
    ),
    "no inductor at level 0": (
        "cpu",
        {"use_inductor": False},
        "got False, allowed is none: level 0",
    ),
    "sizes at level 0": (
        "cuda",
        {"level": 0, "compile_sizes": [1]},
        "compile_sizes: got .1,., .* compiles nothing",
    ),
    "ranges at level 0": (
        "cpu",
        {"compile_ranges": [[1, 8]]},
        "compile_ranges: got ..1, 8.,., .* compiles nothing",
    ),
    "the usual road at level 0": (
        "cpu",
        {"road": "regional"},
        "road: got 'regional', .* level 0 compiles nothing",
    ),
    "a cache at level 0": (
        "cpu",
        {"cache_dir": "c"},
        "cache_dir: got 'c', .* level 0 on cpu leaves nothing",
    ),
    "a cache at level 1": (
        "cpu",
        {"level": 1, "cache_dir": "c"},
        "cache_dir: got 'c', .* level 1 on cpu",
    ),
    "a limit without graphs": (
        "cpu",
        {"cudagraph_mixed_limit": 16},
        "cudagraph_mixed_limit: got 16, .* NONE captures",
    ),
    "a limit of decode graphs": (
        "cuda",
        {"cudagraph_mixed_limit": 16, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "cudagraph_mixed_limit: got 16, allowed is none: cudagraph_mode FULL_DECODE_ONLY",
    ),
    "splitting at level 0": (
        "cpu",
        {"splitting_ops": []},
        "splitting_ops: got .., allowed is none: .* NONE",
    ),
    "splitting at level 1": (
        "cuda",
        {"level": 1, "splitting_ops": []},
        "splitting_ops: got .., .* nothing is split",
    ),
    "splitting whole graphs": (
        "cuda",
        {"splitting_ops": ["paged_attention"], "cudagraph_mode": "FULL"},
        "is FULL, so",
    ),
    "inductor on a cpu by default": ("cpu", {"use_inductor": True}, "level 0"),
    "a dump of nothing": (
        "cuda",
        {"level": 0, "debug_dump_path": "d"},
        "debug_dump_path: .*level 0 traces nothing",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_are_refused_with_the_reason(name):
    platform, options, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        resolve_compilation(CompilationConfig.from_options(options), platform, LADDER, 8)


def test_defaults_on_a_gpu_and_on_a_cpu():
    made, filled = resolve_compilation(CompilationConfig(), "cuda", LADDER, 8)
    assert (made.level, made.cudagraph_mode, made.mode_given) == (3, CUDAGraphMode.FULL, False)
    assert made.cudagraph_capture_sizes == LADDER
    # Nothing is said of code for one token: whether layers are compiled depends on the plan.
    assert {entry[0] for entry in filled} == {"level", "cudagraph_mode", "road"}
    made, filled = resolve_compilation(CompilationConfig(use_inductor=True), "cuda", LADDER, 8)
    assert ("compile_sizes", None, (1,)) in [entry[:3] for entry in filled]
    made, _ = resolve_compilation(CompilationConfig(), "cpu", LADDER, 8)
    assert (made.level, made.cudagraph_mode, made.use_inductor) == (0, NONE, False)
    made, _ = resolve_compilation(CompilationConfig(level=3), "cpu", LADDER, 8)
    assert (made.level, made.cudagraph_mode, made.use_inductor) == (3, NONE, True)


def test_graphs_of_eager_kernels_are_asked_for():
    asked = CompilationConfig.from_options(
        {"level": 0, "enforce_eager": False, "cudagraph_mode": "FULL"}
    )
    assert resolve_compilation(asked, "cuda", LADDER, 8)[0].cudagraph_mode is FULL


def test_explicit_sizes_are_honoured_and_cut_at_what_a_step_can_have():
    asked = CompilationConfig(
        cudagraph_capture_sizes=(64, 3, 5), compile_sizes=("cudagraph_capture_sizes", 1)
    )
    made, filled = resolve_compilation(asked, "cuda", LADDER, 8)
    assert made.cudagraph_capture_sizes == (3, 5)
    assert made.compile_sizes == (1, 3, 5)
    assert ("cudagraph_capture_sizes", (3, 5, 64), (3, 5)) in [entry[:3] for entry in filled]


def _resolve(**options):
    device = DeviceInfo("cuda", "a gpu", 1 << 34)
    config = EngineConfig(model="demo", backend="torch", **options)
    return resolve(config, load_config(model_folder("demo")), device)


def test_capture_sizes_are_the_sizes_of_decode_programs():
    config, _ = _resolve(
        max_num_seqs=16,
        cudagraph_mode="full",
        compilation_config={"cudagraph_capture_sizes": [1, 6]},
    )
    assert config.table().decode_sizes == (1, 6, 8, 16)
    assert config.compile_level == 3


HAVE_AN_EFFECT = [
    ("cuda", {"level": 0, "cache_dir": "c"}),  # the measured size of the KV cache is kept there
    (
        "cpu",
        {
            "level": 2,
            "cache_dir": "c",
            "use_inductor": False,
            "road": "regional",
            "compile_sizes": [1],
        },
    ),
    ("cpu", {"level": 1, "compile_sizes": [2], "compile_ranges": [[3, 8]]}),
    # the plan decides whether the mode becomes PIECEWISE
    ("cuda", {"splitting_ops": ["paged_attention"]}),
    (
        "cuda",
        {"splitting_ops": [], "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_mixed_limit": 16},
    ),
    ("cpu", {"level": 2, "splitting_ops": ["paged_attention"], "road": "piecewise"}),
]


@pytest.mark.parametrize(("platform", "options"), HAVE_AN_EFFECT)
def test_options_with_an_effect_are_taken(platform, options):
    resolve_compilation(CompilationConfig.from_options(options), platform, LADDER, 8)


def test_sizes_that_no_program_has_are_refused():
    for options in (
        {"compile_sizes": [1, "cudagraph_capture_sizes"]},
        {"compile_ranges": [[9, 16], [1024, 2048]]},
    ):
        _resolve(max_num_seqs=16, compilation_config=options)
    with pytest.raises(
        ConfigError,
        match=r"compile_sizes: got 99999, allowed are the numbers of tokens.* 1, 2, 4, 8",
    ):
        _resolve(compilation_config={"compile_sizes": [1, 99999], "level": 1})
    with pytest.raises(ConfigError, match="compile_ranges: got 9000 to 9999, which holds none"):
        _resolve(compilation_config={"compile_ranges": [[9000, 9999]]})


def test_flags_and_config_must_agree():
    with pytest.raises(ConfigError, match="level: got 2 and another"):
        _resolve(compile_level=2, compilation_config={"level": 3})
    config, _ = _resolve(enforce_eager=True)
    assert config.compilation.level == 0


def test_the_jax_backend_has_none_of_it():
    device = DeviceInfo("cpu", "cpu", 1 << 34)
    model = load_config(model_folder("demo"))
    for options in (
        {"cudagraph_mode": "NONE"},
        {"enforce_eager": True},
        {"compilation_config": {"level": 1}},
    ):
        with pytest.raises(ConfigError, match="torch"):
            resolve(EngineConfig(model="demo", backend="jax", **options), model, device)
