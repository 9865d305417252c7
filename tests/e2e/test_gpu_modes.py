"""What each compile level, road and CUDA graph mode did: what was traced, compiled and captured, in
how many pieces.

Equal tokens cannot show that a level compiled nothing or that a mode captured nothing. On a CPU,
Inductor is stood in for by the traced graph, and CUDA's graphs by `Recording`; with `--device cuda`
both are the real ones.
"""

from __future__ import annotations

import dataclasses
import types
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twinfer.gpu import graphs, monitor, worker
from twinfer.ops.implement import IMPLEMENTATIONS, implement
from twinfer.serving.llm import LLM
from twinfer.shared import config
from twinfer.shared.compilation_config import MODES
from twinfer.shared.errors import ConfigError
from twinfer.shared.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu
Array = Any
SMALL = dict(
    backend="torch", dtype="float32", max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64,
    num_pages=64
)  # fmt: skip
PROMPTS = [list(range(5, 25)), [7, 8, 9], [11] * 30]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
DECODE = ("decode[1]", "decode[2]", "decode[4]")
MIXED = ("mixed[16x4]", "mixed[32x4]")
LAYERS = 5


# --- CUDA graphs
# --------------------------------------------------------------------------------------------------


class Recording(TorchDispatchMode):
    """A CUDA graph on a CPU: notes the calls of torch that run within a capture, and replays them
    on the same tensors.

    As in a CUDA graph, what Python decided is fixed, results lie where they lay, and nothing may be
    read on the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a graph that is captured reads a number on the host")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def attention_without_lengths(
    q: Array,
    kv: Array,
    page_table: Array,
    query_start: Array,
    kv_lens: Array,
    counts: Array,
    scale: float,
    window: int,
    soft_cap: float,
    max_query_len: int,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    sinks: Array | None = None,
    chunk: int = 0,
) -> Array:
    """paged_attention that reads nothing on the host: every token against all slots of its
    request.
    """
    token = torch.arange(q.shape[0], device=q.device)
    request = torch.searchsorted(query_start[1:].long(), token, right=True).clamp(
        max=len(kv_lens) - 1
    )
    real = token < query_start[-1]
    position = torch.where(real, kv_lens[request] - query_start[request + 1] + token, 0)
    seen = torch.arange(page_table.shape[1] * kv.shape[1], device=q.device) <= position[:, None]
    # What lies behind the last page of a request names no page.
    used = seen[:, :: kv.shape[1]] & real[:, None]
    cache = kv[torch.where(used, page_table[request], 0).long()].flatten(1, 2)
    group = q.shape[1] // (kv.shape[2] // 2)
    keys, values = (cache[:, :, j::2].repeat_interleave(group, 2) for j in (0, 1))
    scores = torch.einsum("thd,tshd->ths", q, keys) * scale
    weights = scores.masked_fill(~seen[:, None], -1e30).softmax(-1)
    out = torch.einsum("ths,tshd->thd", weights, values)
    return torch.where(real[:, None, None], out, 0.0)


@pytest.fixture
def graph_device(device, monkeypatch):
    """Options of an engine with CUDA graphs: on this GPU, or on a CPU whose graphs are
    recordings.
    """
    if device == "cuda":
        yield SMALL | {"device": "cuda", "dtype": "bfloat16"}
        return
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    stream = types.SimpleNamespace(device=torch.device("cpu"), synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    real = config.resolve_compilation
    monkeypatch.setattr(
        config, "resolve_compilation", lambda asked, _, *rest: real(asked, "cuda", *rest)
    )
    implement("paged_attention", provider="no_lengths", framework="torch")(
        attention_without_lengths
    )
    # A recording notes calls of torch, and no others.
    enable = ("none", "+paged_attention")
    priority = {"paged_attention": ("no_lengths",)}
    yield SMALL | {"device": "cpu", "op_priority": priority, "enable_ops": enable}
    del IMPLEMENTATIONS["paged_attention", "torch"]["no_lengths"]


def graph_engine(options, folder, mode, **more):
    """Graphs of eager functions: what is captured does not depend on what was compiled."""
    compilation = {
        "level": 0,
        "enforce_eager": False,
        "cudagraph_mode": mode,
        "cache_dir": str(folder),
    } | more
    if options["device"] == "cuda":
        compilation |= {"level": 3, "enforce_eager": None}
    return LLM("demo", **options, compilation_config=compilation)


def parts_of(replay):
    """(graphs, calls between them) of a captured program."""
    parts = replay.args[0] if isinstance(replay, partial) else (replay,)
    calls = sum(isinstance(part, partial) and part.func is graphs._run_into for part in parts)
    return len(parts) - calls, calls


def captured(llm):
    """(graphs, calls between them) by program, and the samplers that were captured, by number of
    requests.
    """
    programs = llm.engine.worker._programs
    backbones = {str(d): parts_of(replay) for d, replay in programs._backbones.items()}
    samplers = {}
    for (requests, sampler), (replay, _) in programs._samplers.items():
        assert parts_of(replay) == (1, 0)
        samplers.setdefault(requests, set()).add(sampler)
    return backbones, samplers


WHOLE, PIECES = (1, 0), (LAYERS + 1, LAYERS)
CAPTURED = {
    # mode: of decode programs, of mixed ones
    "NONE": (None, None),
    "PIECEWISE": (PIECES, PIECES),
    "FULL": (WHOLE, WHOLE),
    "FULL_DECODE_ONLY": (WHOLE, None),
    "FULL_AND_PIECEWISE": (WHOLE, PIECES),
}
ALL_SAMPLERS = {"greedy", "random", "filtered", "masked", "processed", "top", "head"}


def test_every_mode_has_an_expectation():
    assert set(CAPTURED) == set(MODES)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_captures_what_it_says(graph_device, mode, tmp_path):
    decode, mixed = CAPTURED[mode]
    programs = dict.fromkeys(DECODE, decode) | dict.fromkeys(MIXED, mixed)
    expected = {name: parts for name, parts in programs.items() if parts is not None}
    with graph_engine(graph_device, tmp_path, mode) as llm:
        backbones, samplers = captured(llm)
        assert backbones == expected
        assert samplers == ({} if mode == "NONE" else dict.fromkeys((1, 2, 4), ALL_SAMPLERS))
        assert (llm.engine.worker._recorder is None) == (mode == "NONE")


IN_OTHERS = ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
"""What they replay, `FULL` and `PIECEWISE` do."""


@pytest.fixture(scope="module")
def made():
    """The tokens of each mode: those of eager steps are made once for all of them."""
    return {}


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=pytest.mark.slow if mode in IN_OTHERS else ()) for mode in MODES],
)
def test_replays_give_the_tokens_of_eager_steps(graph_device, mode, tmp_path, made):
    kinds = (
        GREEDY,
        dataclasses.replace(GREEDY, temperature=0.8, seed=3, top_k=9),
        dataclasses.replace(GREEDY, temperature=0.8, seed=3, presence_penalty=0.5),
        dataclasses.replace(GREEDY, logprobs=2),
    )
    for name in {"NONE", mode} - set(made):
        with graph_engine(graph_device, tmp_path, name) as llm:
            outputs = [
                o.outputs[0] for kind in kinds for o in llm.generate(PROMPTS, kind, progress=False)
            ]
            made[name] = [output.token_ids for output in outputs]
    assert made[mode] == made["NONE"]


def test_capture_sizes_and_the_limit_of_mixed_steps_say_what_is_captured(graph_device, tmp_path):
    more = {"cudagraph_capture_sizes": [1, 2], "cudagraph_mixed_limit": 16}
    with graph_engine(graph_device, tmp_path, "FULL_AND_PIECEWISE", **more) as llm:
        assert {str(d) for d in llm.engine.table} >= {*DECODE, *MIXED}
        assert captured(llm)[0] == {"decode[1]": WHOLE, "decode[2]": WHOLE, "mixed[16x4]": PIECES}


# --- compile levels and roads
# ----------------------------------------------------------------------------------------

TWO_LAYERS = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 64, "dtype": "float32", "tie_word_embeddings": True,
}  # fmt: skip


class Seen:
    """What reached the compilers while an engine started. Traced graphs run as they are in place
    of Inductor's code.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor import compile_fx

        from twinfer.gpu import compilation
        from twinfer.gpu.piecewise import compilers

        self.traced: list[tuple[str, bool]] = []
        """Regions that Dynamo traced, and whether their number of tokens was left open."""
        self.generated: list[dict[str, Any]] = []
        """Inductor's options, for each graph that it was given."""
        self.pieces: dict[str, int] = {}
        """How many pieces of a whole model were compiled, by the numbers of tokens that they
        serve.
        """
        self.adaptors: set[str] = set()
        real_backend, real_specialise = compilation.make_backend, compilers._specialise

        def make_backend(options: Any, name: str) -> Any:
            backend = real_backend(options, name)

            def traced(module: Any, inputs: Any) -> Any:
                self.traced.append(
                    (name, sizes_left_open(module) > (0 if name.startswith("start") else 1))
                )
                return backend(module, inputs)

            return traced

        def generate(module: Any, inputs: Any, config_patches: Any = None) -> Any:
            self.generated.append(config_patches)
            return module.forward

        def specialise(piece: Any, served: Any, *rest: Any) -> Any:
            self.pieces[str(served)] = self.pieces.get(str(served), 0) + 1
            return real_specialise(piece, served, *rest)

        def adapt(adaptor: Any, graph: Any, inputs: Any, options: Any) -> Any:
            self.adaptors.add(adaptor.name)
            return graph.forward

        monkeypatch.setattr(compilation, "make_backend", make_backend)
        monkeypatch.setattr(compile_fx, "compile_fx", generate)
        monkeypatch.setattr(compilers, "_specialise", specialise)
        monkeypatch.setattr(compilers.InductorStandaloneAdaptor, "compile", adapt)
        monkeypatch.setattr(compilers.InductorStandaloneAdaptor, "save", lambda *_: False)
        monkeypatch.setattr(compilers.EagerAdaptor, "compile", adapt)


def sizes_left_open(module):
    """How many sizes of a traced graph's inputs are symbols. A layer's cache always has one: its
    number of pages.
    """
    values = [node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"]
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    return len({str(size) for shape in shapes for size in shape if isinstance(size, torch.SymInt)})


@pytest.fixture
def start(device, monkeypatch, tmp_path):
    """start(compilation options) -> (what was seen, the piecewise program or None), of an engine
    that gave tokens.
    """
    import json

    (tmp_path / "config.json").write_text(json.dumps(TWO_LAYERS))

    def run(**options):
        seen = Seen(monkeypatch)
        if device == "cuda" or options["level"] >= 2:
            options |= {"cache_dir": str(tmp_path / "code")}
        # In half precision every op of a layer is a kernel on a GPU.
        dtype = "bfloat16" if device == "cuda" else "float32"
        engine = SMALL | {
            "device": device,
            "dtype": dtype,
            "load_format": "dummy",
            "compilation_config": options,
        }
        with LLM(str(tmp_path), **engine) as llm:
            assert len(llm.generate(PROMPTS, GREEDY, progress=False)[0].outputs[0].token_ids) == 6
            assert llm.engine.worker.compilations_after_ready() == 0
            return seen, llm.engine.worker._programs._whole

    return run


def regions(**variants):
    """Names of the functions that the regional road compiles, with whether they are open, by
    version.
    """
    made = {}
    for name, is_open in variants.items():
        parts = ("start", "layer", "last_layer") if name.startswith("mixed") else ("start", "layer")
        made |= {f"{part}_{name}": is_open for part in parts}
    return sorted(made.items())


BY_DEFAULT = regions(decode_1=False, decode_2_to_4=True, mixed_2_to_32=True)
LEVELS = {
    # level: what Dynamo traces, and whether Inductor gets it
    0: ([], False),
    1: (BY_DEFAULT, False),
    2: (BY_DEFAULT, True),
    3: (BY_DEFAULT, True),
}


@pytest.mark.parametrize(
    "level", [0, *(pytest.param(level, marks=pytest.mark.slow) for level in (1, 3)), 2]
)
def test_a_level_traces_and_compiles_what_it_says(device, start, level):
    """On a GPU level 3 compiles only if it is told to: there all ops of a layer are kernels."""
    traced, generates = LEVELS[level]
    before = monitor.compilations()["dynamo"]
    seen, whole = start(level=level, **({"use_inductor": True} if level == 3 else {}))
    assert whole is None
    assert sorted(seen.traced) == traced
    assert len(seen.generated) == (len(traced) if generates else 0)
    assert monitor.compilations()["dynamo"] - before == len(traced)


def test_layers_of_kernels_are_not_compiled_by_default(device, start):
    """Of level 3: on a CPU the ops of a layer are no kernels."""
    seen, _ = start(level=3)
    assert sorted(seen.traced) == ([] if device == "cuda" else BY_DEFAULT)


@pytest.fixture
def layers_of_kernels(device, monkeypatch):
    """Options of an engine on a GPU whose layers are made of kernels alone; a CPU plays one."""
    if device == "cuda":
        return SMALL | {"device": "cuda", "dtype": "bfloat16"}
    real = config.resolve_compilation
    monkeypatch.setattr(
        config, "resolve_compilation", lambda asked, _, *rest: real(asked, "cuda", *rest)
    )
    monkeypatch.setattr(worker, "compiled_kinds", lambda *_: frozenset())
    return SMALL | {"device": "cpu"}


def test_sizes_that_have_no_effect_on_kernels_are_refused(layers_of_kernels, tmp_path):
    asked = {"compile_sizes": [1, 2], "cudagraph_mode": "NONE", "cache_dir": str(tmp_path)}
    with pytest.raises(
        ConfigError, match=r"compile_sizes: got \(1, 2\), allowed is none: every op of a layer is"
    ):
        LLM("demo", **layers_of_kernels, compilation_config=asked)


def test_the_start_claims_no_code_that_is_not_compiled(layers_of_kernels, tmp_path):
    asked = {"cudagraph_mode": "NONE", "cache_dir": str(tmp_path)}
    with LLM("demo", **layers_of_kernels, compilation_config=asked) as llm:
        assert "compile_sizes" not in {change.field for change in llm.engine.report.changes}


def test_inductor_left_out_at_level_2_traces_only(start):
    seen, _ = start(level=2, use_inductor=False)
    assert (sorted(seen.traced), seen.generated) == (BY_DEFAULT, [])


SIZES = {"compile_sizes": [2], "compile_ranges": [[3, 4], [10, 20]]}


@pytest.mark.slow
def test_sizes_and_ranges_have_code_of_their_own(start):
    """Static for a size, open within a range; all others share the general code. Inductor gets
    the options.
    """
    seen, _ = start(level=2, **SIZES, inductor_compile_config={"epilogue_fusion": False})
    versions = {"decode_1": False, "decode_2": False, "decode_3_to_4": True, "mixed_10_to_20": True}
    assert sorted(seen.traced) == regions(**versions, mixed_2_to_32=True)
    assert seen.generated == [{"epilogue_fusion": False}] * len(seen.traced)


PIECEWISE = {
    # of 3 pieces each: before, between and after the attention of 2 layers
    "eager, by default": (False, {}, {"1": 3, "2-4": 3, "2-32": 3}),
    "Inductor, sizes and ranges": (True, SIZES, {"1": 3, "2": 3, "3-4": 3, "10-20": 3, "2-32": 3}),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if use_inductor else ())
        for name, (use_inductor, *_) in PIECEWISE.items()
    ],
)
def test_the_piecewise_road_compiles_the_pieces_between_attention(start, name):
    use_inductor, options, pieces = PIECEWISE[name]
    seen, whole = start(level=3, road="piecewise", use_inductor=use_inductor, **options)
    assert seen.pieces == pieces
    assert seen.traced == []
    assert seen.adaptors == {"inductor_standalone" if use_inductor else "eager"}
    assert [whole.pieces[kind] for kind in ("decode_1", "decode", "mixed")] == [3, 3, 3]
    assert whole.counts["compiled"] == sum(pieces.values())
