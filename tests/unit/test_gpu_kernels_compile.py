"""The Triton kernels compile for NVIDIA chips, on a machine without one. The interpreter, which
shows what they compute, takes programs that the compiler refuses.
"""

import gc
import json
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from twinfer.ops import REGISTRY
from twinfer.ops.cases.attention import paged
from twinfer.ops.cases.generators import generator
from twinfer.ops.cases.latents import _fused_arguments, of_latents
from twinfer.ops.cases.moe import mixture
from twinfer.ops.cases.sampling import _penalised_arguments, _penalty_arguments, _sample_arguments
from twinfer.ops.namespaces.torch_ import from_numpy
from twinfer.shared.models.spec import Narrow

from .test_gpu_refusals import YOUTU

triton = pytest.importorskip("triton")

DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8",
    torch.uint32: "u32",
}  # fmt: skip
STORED = {"int4": torch.uint8, "fp4": torch.uint8, "int8": torch.int8}
SHARED_MEMORY = 227 << 10
"""Of a program on Hopper."""
CONFIGS = json.loads((Path(__file__).parents[2] / "gpu/kernels/configs.json").read_text())
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")


def signature(value):
    """What the compiler calls the type of an argument."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{DTYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
    if isinstance(value, torch.Tensor):
        return "*" + DTYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


class Names(list):
    """Names of kernels, in order, and the chip that they are compiled for."""

    def __init__(self):
        super().__init__()
        self.target = {"capability": 90, "shared": SHARED_MEMORY}


@pytest.fixture
def compiled(hopper, monkeypatch, tmp_path_factory):
    """Kernels are compiled for a chip instead of being launched: their names, in order."""
    # What a run has compiled is no other run's, and nothing for a user's own cache folder.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import JITFunction

    names, done = Names(), set()

    def run(kernel, *args, grid, warmup, **named):
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        bound = dict(zip(kernel.arg_names, args, strict=False)) | named
        constants = {p.name for p in kernel.params if p.is_constexpr}
        # What a start notes of a launch is text, from which the same kernel has to come back.
        for name in constants & {*bound}:
            assert json.loads(json.dumps(bound[name])) == bound[name], name
        source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
            kernel,
            {n: "constexpr" if n in constants else signature(bound[n]) for n in kernel.arg_names},
            {(i,): bound[n] for i, n in enumerate(kernel.arg_names) if n in constants},
        )
        if source.hash() not in done:
            target = GPUTarget("cuda", names.target["capability"], 32)
            made = triton.compile(source, target=target, options=options)
            assert made.metadata.shared <= names.target["shared"]
            done.add(source.hash())
        names.append(kernel.fn.__name__)

    monkeypatch.setattr(JITFunction, "run", run)
    return names


@pytest.fixture
def launched(hopper, monkeypatch):
    """The names of kernels that would be launched, in order. Nothing is compiled."""
    from triton.runtime.jit import JITFunction

    names = []
    monkeypatch.setattr(
        JITFunction, "run", lambda kernel, *_, **__: names.append(kernel.fn.__name__)
    )
    return names


def arguments_of(op, arguments):
    """The arguments of an op, arrays as tensors."""
    given = {
        name: arguments[name] for name in REGISTRY[op].signature.parameters if name in arguments
    }
    return {name: from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}


@pytest.mark.parametrize(
    ("heads", "size", "page", "reach"),
    [
        ((8, 2), 128, 64, {}),
        pytest.param((7, 1), 64, 16, {"chunk": 64}, marks=pytest.mark.slow),
        pytest.param((4, 2), 256, 128, {"window": 64, "soft_cap": 20.0}, marks=pytest.mark.slow),
        pytest.param((8, 1), 80, 16, {"window": 64}, marks=pytest.mark.slow),
    ],
)
def test_attention_compiles(compiled, monkeypatch, heads, size, page, reach):
    """Prompts by the kernel for Hopper where it takes the heads, else by the one for any chip."""
    from twinfer.gpu.kernels import attention

    arguments = paged(
        generator("compile"), "bfloat16", [90, 150], [1, 40], heads, size, page, tokens=64
    )
    monkeypatch.setitem(attention.config("hopper", str(size)), "parts", 8)
    attention.paged_attention(**arguments_of("paged_attention", arguments | reach))
    hopper = size in attention.HOPPER_SIZES
    prompts = ["hopper_kernel", "merge_kernel"] if hopper else ["prefill_kernel"]
    assert compiled == ["decode_kernel", *prompts]


@pytest.mark.parametrize(
    ("dtype", "heads", "sizes", "page"),
    [
        ("bfloat16", 20, (512, 64), 64),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("bfloat16", 16, (512, 64), 64),
                ("bfloat16", 128, (512, 64), 64),
                ("float16", 32, (256, 64), 16),
                ("bfloat16", 96, (512, 64), 16),
                ("float32", 20, (512, 64), 64),
                ("float32", 4, (32, 8), 16),
            )
        ),
    ],
)
def test_latent_attention_compiles(compiled, dtype, heads, sizes, page):
    """Requests that may be split, each by itself or all together, and whole ones of a mixed step,
    with the blocks that an H100 has.
    """
    from twinfer.gpu.kernels import latent

    for requests, slots, tokens, names in (
        (2, 4000, 1, ["latent_merge_kernel"]),
        (40, 9000, 1, ["latent_merge_kernel"]),
        (3, 64, 20, ["latent_prefill_kernel"]),
    ):
        queries = [1] * (requests - 1) + [tokens]
        step = of_latents(generator("compile"), dtype, [50] * requests, queries, heads, sizes, page)
        step["page_table"] = np.zeros((requests, slots // page), np.int32)
        compiled.clear()
        latent.latent_attention(**arguments_of("latent_attention", step))
        assert compiled == ["latent_decode_kernel", *names]


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        ("bfloat16", 20),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("bfloat16", 16), ("bfloat16", 128), ("float32", 20))
        ),
    ],
)
def test_latent_attention_compiles_for_other_chips(compiled, monkeypatch, dtype, heads):
    """Blocks that an A100 and the chips of consumers have: in 99 KiB of shared memory."""
    from twinfer.gpu.kernels import latent

    monkeypatch.setattr(latent, "hopper", lambda: False)
    monkeypatch.setitem(compiled.target, "capability", 80)
    monkeypatch.setitem(compiled.target, "shared", 99 << 10)
    monkeypatch.setattr(latent, "overlap", lambda: {"OVERLAP": 0, "launch_pdl": False})
    step = of_latents(generator("compile"), dtype, [50, 90], [1, 40], heads, (512, 64), 64)
    step["page_table"] = np.zeros((2, 64), np.int32)
    latent.latent_attention(**arguments_of("latent_attention", step))
    assert compiled == ["latent_decode_kernel", "latent_merge_kernel", "latent_prefill_kernel"]


@pytest.mark.parametrize("sizes", [(512, 64), (23, 6)])
def test_writing_latents_compiles(compiled, sizes):
    from twinfer.gpu.kernels import latent

    arguments = _fused_arguments(generator("compile"), "bfloat16", 5, *sizes, (3, 16))
    latent.norm_rope_write_latents(**arguments_of("norm_rope_write_latents", arguments))
    assert compiled == ["norm_rope_write_latents_kernel"]


@pytest.mark.parametrize("size", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_decode_that_asks_for_first_blocks_ahead_compiles(compiled, monkeypatch, size):
    """Of requests whose slots are divided among all programs."""
    from twinfer.gpu.kernels import attention

    arguments = paged(
        generator("compile"), "bfloat16", [4000] * 8, [1] * 8, (8, 2), size, 64, tokens=8
    )
    setting = attention.setting_of("decode", "bfloat16", size)
    for name, value in {"block_n": 64, "chunk": 64, "programs": 1}.items():
        monkeypatch.setitem(setting, name, value)
    monkeypatch.setitem(attention.config("decode_ahead"), "rows", 63)
    attention.paged_attention(**arguments_of("paged_attention", arguments))
    assert compiled == ["decode_kernel"]


@pytest.mark.parametrize(
    ("size", "setting"),
    [
        pytest.param(
            int(name.split("/")[2]),
            setting,
            marks=() if name.endswith("/64") else pytest.mark.slow,
        )
        for name, setting in CONFIGS["chips"]["NVIDIA H200"].items()
        if name.startswith("held_decode/bfloat16/")
    ],
)
@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_decode_of_few_requests_compiles(compiled, monkeypatch, size, setting, group):
    """As it was measured, for as many requests as it takes; one more has the other kernel."""
    from twinfer.gpu.kernels import attention, held_decode_kernel, launch

    assert held_decode_kernel.COLUMNS.value == launch.MOST_HELD_GROUP

    for name, value in setting.items():
        monkeypatch.setitem(launch.config("held_decode", f"bfloat16/{size}"), name, value)
    for tokens in (1, setting["tokens"], setting["tokens"] + 1):
        arguments = paged(
            generator("compile"), "bfloat16", [900] * tokens, [1] * tokens, (2 * group, 2), size, 64
        )
        attention.paged_attention(**arguments_of("paged_attention", arguments))
    assert compiled == ["held_decode_kernel", "held_decode_kernel", "decode_kernel"]


NOT_HELD = [
    ("float32", (2, 2), 64, {}),
    ("bfloat16", (9, 1), 64, {}),
    ("bfloat16", (2, 2), 80, {}),
    ("bfloat16", (2, 2), 512, {}),
    ("bfloat16", (2, 2), 64, {"k_scale": np.ones(2, np.float32)}),
    ("bfloat16", (2, 2), 64, {"kv": "int8"}),
]
"""What registers do not take: more heads of a group, other sizes and dtypes, and caches that are
scaled or narrow.
"""


def decode_two(monkeypatch, dtype, heads, size, more):
    """Attention of two requests where registers take four of what they take: its arguments."""
    from twinfer.gpu.kernels import attention, launch

    setting = {"tokens": 4, "slots": 16, "warps": 4, "programs": 1}
    for name, value in setting.items():
        monkeypatch.setitem(launch.config("held_decode"), name, value)
    arguments = paged(generator("compile"), dtype, [90, 150], [1, 1], heads, size, 64)
    if "kv" in more:
        more = {"kv": np.zeros(arguments["kv"].shape, np.int8), "k_scale": np.ones(2, np.float32)}
    given = arguments_of("paged_attention", arguments | more)
    attention.paged_attention(**given)
    return given


@pytest.mark.parametrize(("dtype", "heads", "size", "more"), NOT_HELD, ids=str)
def test_what_registers_do_not_take(launched, monkeypatch, dtype, heads, size, more):
    from twinfer.gpu.kernels import launch

    given = decode_two(monkeypatch, dtype, heads, size, more)
    assert launched == ["decode_kernel"]
    # Nor does what writes the cache in front of it let it come up early.
    assert not launch.asks_ahead(given["q"], given["kv"], 2, given.get("k_scale") is not None)


@pytest.mark.parametrize(
    ("dtype", "heads", "size", "more"),
    [*(pytest.param(*case, marks=pytest.mark.slow) for case in NOT_HELD[:-1]), NOT_HELD[-1]],
    ids=str,
)
def test_what_registers_do_not_take_compiles(compiled, monkeypatch, dtype, heads, size, more):
    decode_two(monkeypatch, dtype, heads, size, more)
    assert compiled == ["decode_kernel"]


@pytest.mark.parametrize("size", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_prompts_with_scales_have_the_kernel_that_reads_them(compiled, size):
    """Of a cache in the model's dtype too: the op has them as factors of any cache."""
    from twinfer.gpu.kernels import attention

    arguments = paged(generator("compile"), "bfloat16", [90, 150], [1, 40], (8, 2), size, 64)
    scales = {"k_scale": np.ones(2, np.float32), "v_scale": np.ones(2, np.float32)}
    attention.paged_attention(**arguments_of("paged_attention", arguments | scales))
    assert compiled == ["decode_kernel", "prefill_kernel"]


def test_norms_over_all_heads_compile(compiled):
    """On one device, and on a shard."""
    from twinfer.gpu.kernels import rows

    qkv, weights = (
        torch.zeros(5, 96 + 2 * 32, dtype=torch.bfloat16),
        (torch.ones(96), torch.ones(32)),
    )
    rows.wide_qk_norm(qkv, *weights, 1e-6)
    means = rows.qk_mean_squares(qkv, *weights, 192, 32)
    rows.norm_qk_by_means(qkv, means, *weights, 1e-6)
    assert compiled == ["wide_qk_norm_kernel", "qk_mean_squares_kernel", "wide_qk_norm_kernel"]


# All kernels of filters are among those of penalties, below.
@pytest.mark.parametrize("filtered", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sampling_compiles(compiled, filtered):
    from twinfer.gpu.kernels import sampling

    arguments = _sample_arguments(generator("compile"), 16, 50_000, filtered)
    sampling.sample(**arguments_of("sample", arguments))
    few = ["total_kernel", "few_kernel", *["narrow_kernel"] * 12] if filtered else []
    assert compiled == ["best_kernel", *few, "draw_kernel"]


def test_penalties_compile(compiled):
    from twinfer.gpu.kernels import sampling

    arguments = _penalty_arguments(generator("compile"), 16, 5_000, 300, 7)
    sampling.penalties(**arguments_of("penalties", arguments))
    assert compiled == ["clear_kernel", "count_kernel", "penalty_kernel", "bias_kernel"]


@pytest.mark.parametrize("sampler", ["processed", "masked"])
def test_plumbing_of_processors_compiles(compiled, sampler):
    from twinfer.gpu import step_kernels
    from twinfer.shared.step import StepShape, histories_shape, processor_layout

    shape = StepShape(pages_per_request=4, max_rows=8, max_model_len=64, vocab_size=33_000)
    layout = processor_layout(4, shape, sampler)
    fields = layout.unpack(torch.from_numpy(layout.allocate()), lambda x: x.view(torch.float32))
    fields |= {name: torch.zeros(4, dtype=torch.int32) for name in ("new_column", "new_token")}
    fields["histories"] = torch.zeros(histories_shape(shape, (sampler,)), dtype=torch.int32)
    step_kernels.processors(fields, torch.zeros(9, dtype=torch.int32))
    assert compiled == ["processors_kernel"]


def test_sampling_with_penalties_compiles(compiled):
    from twinfer.gpu.kernels import sampling

    arguments = _penalised_arguments(generator("compile"), 60, 5_000)
    sampling.penalised_sample(**arguments_of("penalised_sample", arguments))
    scores = ["clear_kernel", "count_kernel", "penalty_kernel", "bias_kernel"]
    few = ["total_kernel", "few_kernel", *["narrow_kernel"] * 12]
    assert compiled == ["plain_kernel", *scores, "best_kernel", *few, "draw_kernel"]


@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tokens", "rest"),
    [
        ("bfloat16", 2, ["few_gated_kernel", "few_down_kernel"]),
        ("bfloat16", 20, ["sort_kernel", *["product_kernel"] * 2, "combine_kernel"]),
        *(
            pytest.param(
                *("bfloat16", tokens, ["sort_kernel", *["product_kernel"] * 2, "combine_kernel"]),
                marks=pytest.mark.slow,
            )
            for tokens in (300, 900)
        ),
        ("float32", 20, ["sort_kernel", *["product_kernel"] * 2, "combine_kernel"]),
    ],
)
def test_experts_compile(compiled, dtype, tokens, rest, gemma):
    """With what Gemma 4 has: gelu, and a factor of each expert."""
    from twinfer.gpu.kernels import moe

    arguments = mixture(generator("compile"), dtype, tokens, 16, 2, 256, 384)
    routing = {
        "logits": torch.zeros(tokens, 16),
        "slots": torch.zeros(tokens, dtype=torch.int32),
    }
    factor = {"factor": torch.ones(16)} if gemma else {}
    moe.moe_route(**routing, top_k=2, renormalize=True, **factor)
    moe.moe_experts(**arguments_of("moe_experts", arguments), gelu=gemma)
    assert compiled == ["route_kernel", *rest]


# Two rows have the kernel of one.
@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow), 16, 300])
@pytest.mark.parametrize(
    ("kind", "group", "zeros"),
    [
        ("int8", 0, False), ("fp8", 0, False), ("fp8", 128, False), ("int4", 128, False),
        ("int4", 128, True), ("int4", 32, True), ("int4", 0, True), ("fp4", 32, False),
        ("fp4", 16, False),
    ],
)  # fmt: skip
def test_narrow_weights_compile(compiled, rows, kind, group, zeros):
    from twinfer.gpu.kernels import narrow

    k, n = 1024, 512
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind, torch.uint8)
    shape = (n, k // group if group else 1)
    narrow.linear_grouped(
        torch.zeros(rows, k, dtype=torch.bfloat16),
        torch.zeros(n, k if kind in ("int8", "fp8") else k // 2, dtype=dtype),
        torch.zeros(shape),
        torch.zeros(shape, dtype=torch.uint8) if zeros else None,
        None,
        kind,
    )
    few = "fragment_kernel" if kind == "int4" and group % 128 == 0 else "narrow_gemv_kernel"
    some = "narrow_tile_kernel" if kind in STORED else "narrow_kernel"
    by_rows = {1: few, 2: few, 16: some, 300: "widen_kernel"}
    assert compiled == [by_rows[rows]]


@pytest.mark.parametrize("offset", [1, 8, 16])
def test_narrow_weights_that_the_copy_engine_does_not_take(compiled, offset):
    """It reads from multiples of 16 bytes on; others are for a kernel that loads what it reads."""
    from twinfer.gpu.kernels import narrow

    n, k = 64, 256
    weight = torch.zeros(n * k + offset, dtype=torch.int8)[offset:].view(n, k)
    x = torch.zeros(16, k, dtype=torch.bfloat16)
    narrow.linear_grouped(x, weight, torch.zeros(n, 1), None, None, "int8")
    assert compiled == ["narrow_kernel" if offset % 16 else "narrow_tile_kernel"]


# Two rows of fp8 have the product of 16, and 300 that of the next test.
@pytest.mark.parametrize(
    ("kind", "block", "rows"),
    [
        pytest.param(
            *(kind, block, rows),
            marks=pytest.mark.slow if kind == "fp8" and not block and rows in (2, 300) else (),
            id=f"{name}-{rows}",
        )
        for name, kind, block in (
            ("int8", "int8", 0),
            ("fp8", "fp8", 0),
            ("fp8-blocks", "fp8", 128),
        )
        for rows in (1, 2, 16, 300)
    ],
)
def test_quantised_tokens_compile(compiled, rows, kind, block):
    from twinfer.gpu.kernels import narrow

    k, n = 1024, 512
    quantize = narrow.quantize_int8_dynamic if kind == "int8" else narrow.quantize_fp8_dynamic
    x = torch.zeros(rows, k, dtype=torch.bfloat16)
    values, scale = quantize(x, "block" if block else "row", block)
    product = narrow.linear_int8 if kind == "int8" else narrow.linear_fp8
    weight = torch.zeros(n, k, dtype=values.dtype)
    shape = (n, k // block if block else 1)
    product(values, weight, scale, torch.zeros(shape), None, "bfloat16")
    others = "narrow_gemv_kernel" if rows <= 2 else "narrow_kernel"
    if kind == "fp8" and not block and rows == 1:
        others = "fp8_gemv_kernel"
    fragments = kind == "fp8" and 2 <= rows <= 16
    assert compiled == ["quantize_kernel", "fragment_kernel" if fragments else others]


@pytest.mark.parametrize(
    ("rows", "k"),
    [
        *((1, 4096), (1, 14336)),
        # Of more than one row, the length decides no more than loops, and the kernels are those of
        # tokens that are quantised before, and of the MLP.
        *(
            pytest.param(rows, k, marks=pytest.mark.slow)
            for rows in (2, 16, 300)
            for k in (4096, 14336)
        ),
    ],
)
def test_products_that_quantise_tokens_compile(compiled, rows, k):
    """One launch for a row that is not long, else two."""
    from twinfer.gpu.kernels import narrow

    n = 512
    weight = torch.zeros(n, k, dtype=torch.float8_e4m3fn)
    x = torch.zeros(rows, k, dtype=torch.bfloat16)
    narrow.linear_fp8(x, weight, None, torch.zeros(n, 1), None, "bfloat16")
    product = "fp8_gemv_kernel" if rows == 1 else "fragment_kernel"
    two = ["quantize_kernel", product if rows <= 16 else "narrow_kernel"]
    assert compiled == (["quantizing_gemv_kernel"] if rows == 1 and k == 4096 else two)


@pytest.mark.parametrize(
    "rows", [1, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (2, 16)), 300]
)
def test_mlp_of_fp8_compiles(compiled, rows):
    from twinfer.gpu.kernels import narrow_mlp

    dim, inter = 1024, 14336
    up = torch.zeros(2 * inter, dim, dtype=torch.float8_e4m3fn), torch.zeros(2 * inter, 1), None
    down = torch.zeros(dim, inter, dtype=torch.float8_e4m3fn), torch.zeros(dim, 1), None
    narrow_mlp.gated_mlp_fp8(torch.zeros(rows, dim, dtype=torch.bfloat16), *up, *down)
    product = "fragment_kernel" if rows <= 16 else "narrow_kernel"
    if rows == 1:
        launches = ["quantizing_gemv_kernel", "quantize_by_largest_kernel", "fp8_gemv_kernel"]
    else:
        between = "quantize_kernel" if rows <= 16 else "silu_quantize_kernel"
        launches = ["quantize_kernel", product, between, product]
    assert compiled == launches


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
def test_mlp_of_fp8_behind_a_norm_compiles(compiled, weight):
    from twinfer.gpu.kernels import narrow_mlp

    dim, inter = 1024, 14336
    up = torch.zeros(2 * inter, dim, dtype=torch.float8_e4m3fn), torch.zeros(2 * inter, 1), None
    down = torch.zeros(dim, inter, dtype=torch.float8_e4m3fn), torch.zeros(dim, 1), None
    norm = torch.ones(dim, dtype=weight)
    for rows, first in ((1, ["quantizing_gemv_kernel"]), (2, ["add_rms_norm_kernel"])):
        stream = (torch.zeros(rows, dim, dtype=torch.bfloat16) for _ in range(2))
        narrow_mlp.add_norm_gated_mlp_fp8(*stream, norm, *up, *down, 1e-5)
        assert compiled[: len(first)] == first
        compiled.clear()


def test_product_of_fp8_behind_a_norm_compiles(compiled):
    from twinfer.gpu.kernels import narrow

    stream = (torch.zeros(1, 1024, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.zeros(6144, 1024, dtype=torch.float8_e4m3fn), torch.zeros(6144, 1), None
    narrow.add_norm_linear_fp8(*stream, torch.ones(1024, dtype=torch.bfloat16), *weight, 1e-5)
    assert compiled == ["quantizing_gemv_kernel"]


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow), 16, 300])
@pytest.mark.parametrize(
    ("kind", "zeros"),
    [pytest.param("int4", False, marks=pytest.mark.slow), ("int4", True), ("fp8", False)],
)
def test_mlp_of_narrow_weights_compiles(compiled, rows, kind, zeros):
    """For some rows of int4 the activation has no launch of its own."""
    from twinfer.gpu.kernels import narrow_mlp

    dim, inter, dtype = 4096, 1024, torch.uint8 if kind == "int4" else torch.float8_e4m3fn
    pieces = []
    for n, k in ((2 * inter, dim), (dim, inter)):
        groups = k // 128 if kind == "int4" else 1
        weight = torch.zeros(n, k // 2 if kind == "int4" else k, dtype=dtype)
        zero = torch.zeros(n, groups, dtype=torch.uint8) if zeros else None
        pieces += [weight, torch.zeros(n, groups), zero, None]
    narrow_mlp.gated_mlp_grouped(torch.zeros(rows, dim, dtype=torch.bfloat16), *pieces, kind)
    if kind == "int4" and rows <= 16:
        assert compiled == ["fragment_kernel" if rows <= 2 else "narrow_tile_kernel"] * 2
    else:
        product = "narrow_gemv_kernel" if rows <= 2 else "narrow_kernel"
        product = "widen_kernel" if rows == 300 else product
        assert compiled == [product, "act_and_mul_kernel", product]


QUICK_EXPERTS = [
    ("fp4", 32, "clamped", 2), ("fp4", 32, "clamped", 20), ("fp8", 0, "silu", 2), ("fp8", 0, "silu", 300),
    ("int4", 128, "silu", 2), ("int4", 128, "silu", 20),
]  # fmt: skip
"""Each kernel once: many tokens have the same one in all kinds, and so have some in fp8 and int4."""


@pytest.mark.parametrize(
    ("kind", "group", "act", "tokens"),
    [
        *QUICK_EXPERTS,
        *(
            pytest.param(*case, tokens, marks=pytest.mark.slow)
            for case in (
                *(("fp4", 32, "clamped"), ("fp8", 0, "silu"), ("int4", 128, "silu")),
                *(("fp4", 32, "silu"), ("fp4", 32, "gelu"), ("fp8", 0, "gelu")),
                ("int4", 128, "gelu"),
            )
            for tokens in (2, 20, 50, 100, 300, 1200)
            if (*case, tokens) not in QUICK_EXPERTS
        ),
    ],
)
def test_narrow_experts_compile(compiled, tokens, kind, group, act):
    from twinfer.gpu.kernels import moe_narrow

    experts, top_k, dim, inter = 16, 2, 384, 256
    clamped = act == "clamped"
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.uint8
    scales = getattr(torch, Narrow(kind, group).scale_dtype)

    def weight(n, k):
        scale = torch.zeros(experts, n, k // (group or k), dtype=scales)
        bias = torch.zeros(experts, n, dtype=torch.bfloat16) if clamped else None
        values = torch.zeros(experts, n, k if kind == "fp8" else k // 2, dtype=dtype)
        return values, scale, None, bias

    moe_narrow.moe_experts_narrow(
        torch.zeros(tokens, dim, dtype=torch.bfloat16),
        torch.zeros(tokens, top_k),
        torch.zeros(tokens, top_k, dtype=torch.int32),
        *weight(2 * inter, dim),
        *weight(dim, inter),
        kind,
        1.702 if clamped else 0.0,
        7.0 if clamped else 0.0,
        act == "gelu",
    )
    fragments = kind == "fp4" and act != "gelu"
    few = ["narrow_few_gated_kernel", "narrow_few_down_kernel"]
    product = "expert_kernel" if fragments and tokens < 300 else "narrow_product_kernel"
    many = [product, product, "combine_kernel"]
    if product == "expert_kernel":
        many = ["sort_and_order_kernel", *many]
    elif fragments or tokens * top_k > 128:
        many = ["sort_kernel", *many]
    if fragments:
        few = ["expert_kernel", "token_down_kernel"]
    assert compiled == (few if tokens == 2 else many)


@pytest.mark.parametrize(
    "kind",
    [
        *("int4", "int4 tiles", "tokens", "int8 token", "int8 tokens"),
        # In Gluon, with descriptors of tensors, as those of tiles; the compiler takes seconds.
        pytest.param("attention", marks=pytest.mark.slow),
        *("int8 cache", "tokens of a loop"),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("int8 tiles", "int8 cache, k and v", "int8 experts")
        ),
    ],
)
def test_noted_kernels_are_those_that_are_launched(driver, kind, caplog, tmp_path):
    """A start notes launches as text, and compiles from that: later launches find the kernels,
    whose code, and key on disk, is that of launches which nothing was noted of.
    """
    from twinfer.gpu import step_kernels
    from twinfer.gpu.kernels import attention, cache, moe_narrow, narrow
    from twinfer.gpu.precompile import compile_together, kernels_noted

    ones, k, n = torch.ones(1, 1), 1024, 512
    fp8 = torch.zeros(n, k, dtype=torch.float8_e4m3fn)
    int8, scales = torch.zeros(n, k, dtype=torch.int8), torch.ones(n, 1)
    kv, qkv = torch.zeros(4, 16, 4, 64, dtype=torch.int8), torch.zeros(3, 512).bfloat16()
    angles, slots, heads = torch.ones(3, 32), torch.zeros(3, dtype=torch.int32), qkv.view(3, 8, 64)
    experts = torch.zeros(2, n, n, dtype=torch.int8), torch.ones(2, n, 1), None, None
    down = torch.zeros(2, n, n // 2, dtype=torch.int8), torch.ones(2, n, 1), None, None
    chosen = torch.ones(40, 1), torch.zeros(40, 1, dtype=torch.int32)
    int4 = torch.zeros(n, k // 2, dtype=torch.uint8)
    names = "counts", "rows", "token_ids", "positions", "kv_lens", "position", "slots"
    fields = dict.fromkeys(names, torch.zeros(16, dtype=torch.int32))
    paging = paged(generator("noted"), "bfloat16", [90, 150], [1, 40], (8, 2), 128, 16, tokens=64)
    calls = {
        "int4": lambda: narrow.linear_grouped(
            torch.zeros(8, k, dtype=torch.bfloat16), int4, torch.ones(n, 8), None, None, "int4"
        ),
        "int4 tiles": lambda: narrow.linear_grouped(
            torch.zeros(20, k, dtype=torch.bfloat16), int4, torch.ones(n, 8), None, None, "int4"
        ),
        "int8 tiles": lambda: narrow.linear_grouped(
            torch.zeros(20, k, dtype=torch.bfloat16), int8, scales, None, None, "int8"
        ),
        "tokens": lambda: narrow.linear_fp8(fp8[:8], fp8, ones, ones, None, "bfloat16"),
        "int8 token": lambda: narrow.linear_int8(int8[:1], int8, ones, scales, None, "bfloat16"),
        "int8 tokens": lambda: narrow.linear_int8(int8[:20], int8, ones, scales, None, "bfloat16"),
        "int8 cache": lambda: cache.norm_rope_write_kv(
            qkv, kv, None, None, angles, angles, slots, 1e-6, ones[0].expand(2), None
        ),
        "int8 cache, k and v": lambda: cache.write_kv(kv, heads[:, :2], heads[:, 2:4], slots),
        "int8 experts": lambda: moe_narrow.moe_experts_narrow(
            torch.zeros(40, n).bfloat16(), *chosen, *experts, *down, "int8", 0.0, 0.0
        ),
        "attention": lambda: attention.paged_attention(**arguments_of("paged_attention", paging)),
        "tokens of a loop": lambda: step_kernels.advance(
            fields, torch.zeros(34, 8, dtype=torch.int32), (16, 48)
        ),
    }

    def code():
        made = {id(kernel): kernel.device_caches[driver.device][0] for kernel in noted.values()}
        return [
            {str(key): found.asm["ptx"] for key, found in each.items()} for each in made.values()
        ]

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "noted")
        with kernels_noted() as noted:
            calls[kind]()
        assert noted
        assert not driver.launches
        with caplog.at_level("INFO", "twinfer.gpu"):
            compile_together(noted, lambda done: None)
        assert not caplog.messages
        with kernels_noted() as missing:
            calls[kind]()
        assert not missing
        assert not driver.launches
        calls[kind]()
        assert driver.launches == [kernel.fn.__name__ for kernel in noted.values()]
        from_text, driver.device = code(), f"{driver.device}, not noted"
        triton.knobs.cache.dir = str(tmp_path / "launched")
        calls[kind]()
        assert from_text == code()
    kept = [{path.name for path in (tmp_path / name).iterdir()} for name in ("noted", "launched")]
    assert kept[0] == kept[1]


@triton.jit
def text_kernel(out, TEXT: triton.language.constexpr):
    if TEXT == "int8":
        triton.language.store(out, 1)


def on_meta(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def kernels_of(noted):
    return Counter(kernel.fn.__name__ for kernel in noted.values())


def test_samplers_of_all_sizes_share_their_kernels(driver):
    """A cold start compiles each: those that find few words take a second of a core."""
    from twinfer.gpu.kernels import sampling
    from twinfer.gpu.precompile import kernels_noted

    vocab = 151_936
    with kernels_noted() as noted:
        for rows in (1, 2, 3, 7, 8, 56, 64, 100, 256):
            scores = on_meta(rows, vocab)
            logits = on_meta(rows, vocab, dtype=torch.float32)
            draws, filters = [on_meta(rows)] * 3, [on_meta(rows)] * 5
            for filtered in (False, True):
                sampling.sample(logits, scores, *draws, *filters, filtered)
    kernels = kernels_of(noted)
    assert kernels["best_kernel"] <= 2 * 8
    assert kernels == {
        "best_kernel": kernels["best_kernel"], "total_kernel": 1, "few_kernel": 2,
        "narrow_kernel": 2, "draw_kernel": 2,
    }  # fmt: skip


def test_prompts_of_all_sizes_share_their_kernels(driver):
    """One for prompts that are split among programs, and one for others."""
    from twinfer.gpu.kernels import attention
    from twinfer.gpu.precompile import kernels_noted

    kv = on_meta(40, 64, 4, 128, dtype=torch.bfloat16)
    grids = []
    with kernels_noted() as noted:
        for tokens in (64, 200, 300, 512, 1024, 8192):
            q = on_meta(tokens, 8, 128, dtype=torch.bfloat16)
            lengths = on_meta(8, 32), on_meta(9), on_meta(8), on_meta(2)
            attention.paged_attention(q, kv, *lengths, 0.1, 0, 0.0, tokens)
            blocks = -(-tokens // 32)
            grids.append(max(1, min(8, 132 // (blocks * 2))))
    assert len(set(grids)) > 3  # numbers of parts
    assert kernels_of(noted) == {"decode_kernel": 1, "hopper_kernel": 2, "merge_kernel": 1}


def test_few_requests_of_all_sizes_share_their_kernel(driver):
    """Where each request is divided by itself, nothing is looked up among the others."""
    from twinfer.gpu.kernels import attention
    from twinfer.gpu.precompile import kernels_noted

    kv = on_meta(40, 64, 4, 128, dtype=torch.bfloat16)
    with kernels_noted() as noted:
        for requests in (1, 2, 3, 4):
            q = on_meta(requests, 8, 128, dtype=torch.bfloat16)
            lengths = (
                on_meta(requests, 32), on_meta(requests + 1), on_meta(requests), on_meta(2),
            )  # fmt: skip
            attention.paged_attention(q, kv, *lengths, 0.1, 0, 0.0, 1)
    assert kernels_of(noted) == {"decode_kernel": 1}


@pytest.fixture
def h200(driver, monkeypatch, caplog):
    """A cold start on an H200 as far as it asks for kernels: what its programs call, on arrays
    without data, by the implementations that such a GPU has.
    """
    from twinfer.gpu import kernels, plans
    from twinfer.gpu.kernels import counters, launch
    from twinfer.gpu.precompile import call_kernels, kernels_noted
    from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
    from twinfer.shared.models.config_json import parse_config
    from twinfer.shared.models.shapes import SHAPES

    chip = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "NVIDIA H200")
    monkeypatch.setattr(launch, "torch", SimpleNamespace(cuda=chip))
    for name, module in vars(kernels).items():
        answers = {"capability": (9, 0), "processors": 132, "shared_memory": SHARED_MEMORY}
        for what, value in answers.items():
            if hasattr(module, what) and name != "launch":
                monkeypatch.setattr(module, what, lambda value=value: value)
        if hasattr(module, "counters") and module is not counters:
            monkeypatch.setattr(module, "counters", counters.counters)
    launch.config.cache_clear()
    # Which imports sympy: two seconds of a start.
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)

    def start(shape):
        model = parse_config(SHAPES[shape])
        asked = EngineConfig(model=shape, backend="torch", load_format="dummy")
        config, _ = resolve(asked, model, DeviceInfo("cuda", "NVIDIA H200", 150_000_000_000))
        made = plans.make_plans(model, config)
        caplog.set_level("DEBUG", "twinfer.gpu")
        with kernels_noted() as noted:
            call_kernels(model, config, made)
        assert "without data" not in caplog.text
        return kernels_of(noted)

    yield start
    launch.config.cache_clear()


@pytest.mark.parametrize(
    ("shape", "most"), [("qwen3-0.6b", 95), ("llama3-8b", 90), ("gemma3-4b", 105)]
)
def test_a_cold_start_compiles_few_kernels(h200, shape, most):
    """How long it takes is mostly that. It was 123 for the first, unseen until somebody measured a
    start again.
    """
    kernels = h200(shape)
    assert kernels.total() <= most, kernels
    assert kernels["few_kernel"] <= 4
    assert kernels["draw_kernel"] <= 3
    assert kernels["hopper_kernel"] <= (4 if shape == "gemma3-4b" else 2)  # with windows, without
    assert kernels["decode_kernel"] > 5  # they were asked for


def test_a_cold_start_with_latents_compiles_few_kernels(h200, monkeypatch):
    """They are noted before there are weights too, as nothing that launches them needs data."""
    from twinfer.shared.models.shapes import SHAPES

    monkeypatch.setitem(SHAPES, "youtu", YOUTU)
    kernels = h200("youtu")
    assert kernels.total() <= 90, kernels
    assert kernels["latent_prefill_kernel"] <= 3
    assert kernels["norm_rope_write_latents_kernel"] == 1
    assert kernels["latent_decode_kernel"] > 2
    assert kernels["latent_merge_kernel"] >= 1


def test_equal_calls_are_those_of_arrays_that_are_alike(monkeypatch):
    """Arrays of a kind are gone when those of the next are made, which may have their ids."""
    from twinfer.gpu import precompile

    called = []
    made = SimpleNamespace(function=lambda x, n: called.append((*x.shape, n)))
    choice = SimpleNamespace(provider="triton", implementation=made)
    plans = {kind: {"an op": choice} for kind in precompile.KINDS}

    def record(model, config, kind):
        wide = precompile.KINDS.index(kind) + 1
        sizes = [(1, wide), (1, wide), (1, 1)]
        arrays = [torch.empty(size, device="meta") for size in sizes]
        return [SimpleNamespace(op="an op", arguments={"x": x, "n": 3}, parents=()) for x in arrays]

    monkeypatch.setattr(precompile, "record", record)
    precompile.call_kernels(None, None, plans)
    assert called == [(1, wide + 1, 3) for wide in range(len(plans))]


def test_what_takes_longest_is_compiled_first(monkeypatch):
    """By the length of its source: a kernel that came last would be waited for alone."""
    from twinfer.gpu import precompile

    monkeypatch.setattr(precompile, "THREADS", 1)
    asked = []
    noted = {
        (n, str(length)): SimpleNamespace(src="x" * length, preload=asked.append)
        for n, length in enumerate((3, 9, 1, 5))
    }
    precompile.compile_together(noted, lambda done: None)
    assert asked[:4] == ["9", "5", "3", "1"]


def test_a_constant_that_a_dtype_is_called_like_is_not_noted(driver):
    from twinfer.gpu.precompile import kernels_noted

    for text, count in (("int8", 0), ("int8s", 1)):
        with kernels_noted() as noted:
            text_kernel[(1,)](torch.zeros(1), TEXT=text)
        assert len(noted) == count
        assert not driver.launches


def test_other_threads_launch_while_kernels_are_noted(driver):
    """Another engine of the process, whose steps run meanwhile."""
    from twinfer.gpu.precompile import kernels_noted

    with kernels_noted() as noted:
        call = partial(text_kernel[(1,)], torch.zeros(1), TEXT="other")
        with ThreadPoolExecutor(1) as other:
            other.submit(call).result()
        assert driver.launches == ["text_kernel"]
        call()
    assert driver.launches == ["text_kernel"]
    assert not noted


def test_engines_that_start_side_by_side_launch_afterwards(driver):
    """Each in a thread. What both put in place must be gone, whichever ends first."""
    from twinfer.gpu.precompile import kernels_noted

    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first():
        with kernels_noted():
            first_in.set()
            second_in.wait(0.5)
        first_out.set()

    def second():
        first_in.wait()
        with kernels_noted():
            second_in.set()
            first_out.wait()

    with ThreadPoolExecutor(2) as starts:
        for start in [starts.submit(first), starts.submit(second)]:
            start.result()
        for call in [starts.submit(text_kernel[(1,)], torch.zeros(1), TEXT=x) for x in "ab"]:
            call.result()
    assert driver.launches == ["text_kernel"] * 2


def test_threads_parse_at_the_same_time():
    """Python loses count of a tree's depth where the garbage collector lets another thread make one
    too: python/cpython#106905.
    """
    from twinfer.gpu.kernels.attention import decode_kernel

    def give_way(*_):
        return sum(range(50))

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(20, 2, 2)
    gc.callbacks.append(give_way)
    try:
        with ThreadPoolExecutor(4) as threads:
            trees = [threads.submit(decode_kernel.parse) for _ in range(64)]
        assert {type(tree.result()).__name__ for tree in trees} == {"Module"}
    finally:
        gc.callbacks.remove(give_way)
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)


def test_kernels_are_loaded_on_the_gpu_that_is_current(monkeypatch):
    """By threads, each of which begins on the first: as for a rank, or an engine on `cuda:1`."""
    from twinfer.gpu.precompile import compile_together

    of_thread = threading.local()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(of_thread, "device", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(of_thread, "device", index))
    torch.cuda.set_device(1)
    loaded = []

    def preload(data):
        loaded.append(torch.cuda.current_device())
        return SimpleNamespace(run=None)

    noted = {(n, "data"): SimpleNamespace(src="", preload=preload) for n in range(40)}
    compile_together(noted, lambda done: None)
    assert loaded == [1] * 40


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_what_fails_beside_others_is_compiled_once_more(failures, caplog):
    from twinfer.gpu.precompile import compile_together

    asked = []

    def preload(data):
        asked.append(data)
        if len(asked) <= failures:
            raise RuntimeError("beside others") from ValueError("the cause")
        return SimpleNamespace(run=None)

    with caplog.at_level("INFO", "twinfer.gpu"):
        compile_together({(1, "data"): SimpleNamespace(src="", preload=preload)}, lambda done: None)
    assert asked == ["data"] * min(2, failures + 1)
    assert len(caplog.messages) == (failures == 2)
    assert all("ValueError('the cause')" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("rows", "act"),
    [
        *((3, ""), (20, "silu"), (20, "gelu")),
        *(
            pytest.param(rows, act, marks=pytest.mark.slow)
            for rows, act in (
                *((3, "silu"), (3, "gelu"), (20, "")),
                *((64, act) for act in ("", "silu", "gelu")),
            )
        ),
    ],
)
def test_products_of_some_rows_compile(compiled, rows, act):
    from twinfer.gpu.kernels import gemv

    x, weight = (torch.zeros((n, 512), dtype=torch.bfloat16) for n in (rows, 192))
    gemv._skinny(x, weight, torch.zeros(192, dtype=x.dtype), x.dtype, act=act)
    assert compiled == ["skinny_kernel"]


@pytest.mark.parametrize("rows", [3, 64, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("act", "parts"), [("", 1), ("", 3), ("silu", 2)])
def test_products_by_tiles_compile(compiled, rows, act, parts):
    """Weights that no block divides, with a bias, for Hopper's tensor cores and copy engine."""
    from twinfer.gpu.kernels import gemv

    x, weight = (torch.zeros((n, 520), dtype=torch.bfloat16) for n in (rows, 200))
    blocks = {"block_n": 64, "parts": parts, "stages": 3, "warps": 4, "registers": 168}
    gemv._tiled(x, weight, torch.zeros(200, dtype=x.dtype), x.dtype, blocks, act=act)
    assert compiled == ["tile_kernel"]


@pytest.mark.parametrize(
    ("rows", "act", "n"),
    [
        *((3, "", 200), (13, "silu", 200), (13, "gelu", 208)),
        *(
            pytest.param(rows, act, n, marks=pytest.mark.slow)
            for rows, act, n in (
                *((3, "silu", 200), (3, "gelu", 208), (13, "", 200)),
                *((32, "", 200), (32, "silu", 200), (32, "gelu", 208)),
            )
        ),
    ],
)
def test_products_from_registers_compile(compiled, rows, act, n):
    """Weights that no block divides, with a bias; steps that are asked for before the inputs, and
    others behind.
    """
    from twinfer.gpu.kernels import gemv

    x, weight = (torch.zeros((size, 1024), dtype=torch.bfloat16) for size in (rows, n))
    blocks = {"block_n": 32, "warps": 4, "ahead": 3}
    gemv._held(x, weight, torch.zeros(n, dtype=x.dtype), x.dtype, blocks, act=act)
    assert compiled == ["held_kernel"]


TILES = {"block_n": 64, "parts": 1, "stages": 3, "warps": 4, "registers": 128}
HELD = {"block_n": 16, "warps": 2, "ahead": 2}


@pytest.mark.parametrize(
    ("rows", "k", "held", "kernel"),
    [
        (2, 256, HELD, "gemv"),
        (3, 256, {}, "tile"),
        (3, 256, HELD, "held"),
        (17, 256, {}, "tile"),
        (33, 256, HELD, "tile"),
        (3, 250, HELD, "skinny"),
    ],
)
def test_who_multiplies_a_few_rows(launched, monkeypatch, rows, k, held, kernel):
    """Tiles and registers where they were measured, and wide loads can find the rows. That each of
    them compiles is shown above.
    """
    from twinfer.gpu.kernels import gemv

    for what, blocks in (("tiles", TILES), ("held", held)):
        for gated in ("", "gated_"):
            for name, value in blocks.items():
                monkeypatch.setitem(gemv.config(f"{gated}{what}"), name, value)
    x, weight, down = (
        torch.zeros(shape, dtype=torch.bfloat16) for shape in ((rows, k), (64, k), (k, 32))
    )
    gemv.linear(x, weight, None)
    gemv.logits(x, weight)
    gemv.gated_mlp(x, weight, None, down, None)
    assert launched[:2] == [f"{kernel}_kernel"] * 2
    assert f"{kernel}_kernel" in launched[2:]


def measured(kernel):
    """What `configs.json` has of a kernel's products, by shape and rows."""
    for entries in CONFIGS["chips"].values():
        for name, blocks in entries.items():
            if f"{kernel}/" in name:
                yield name, blocks


def test_a_kernel_has_the_shared_memory_that_its_entry_wants(driver, monkeypatch, tmp_path):
    """The driver is told once, and again when the entry is another one."""
    from twinfer.gpu.kernels import gemv, launch
    from twinfer.shared.errors import InternalError

    told, status = [], 0

    def told_driver(function, attribute, percent):
        told.append((function.value, attribute, percent))
        return status

    library = SimpleNamespace(cuFuncSetAttribute=told_driver)
    monkeypatch.setattr(launch.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(driver.utils, "load_binary", lambda name, *_: (name, 7, 32, 0, 1024))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x, weight = (torch.zeros((n, 512), dtype=torch.bfloat16) for n in (4, 64))
    blocks = {"block_n": 16, "warps": 2, "ahead": 2}
    for carved in ({}, {"carveout": 28}, {"carveout": 28}, {"carveout": 57}, {}, {}):
        gemv._held(x, weight, None, x.dtype, blocks | carved)
    assert driver.launches == ["held_kernel"] * 6
    preferred = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    assert told == [(7, preferred, 28), (7, preferred, 57), (7, preferred, -1)]
    status = 1
    with pytest.raises(InternalError, match="driver error 1"):
        gemv._held(x, weight, None, x.dtype, blocks | {"carveout": 28})


def test_entries_with_shared_memory_are_of_kernels_that_ask_for_it():
    chips = CONFIGS["chips"].values()
    found = {name for entries in chips for name in entries if "carveout" in entries[name]}
    kernels = {name.partition("/")[0] for name in found}
    assert kernels == {"held", "gated_held", "decode", "norm_rope_write_kv", "moe_fragments"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "blocks"), list(measured("tiles")))
def test_products_by_tiles_that_were_measured_fit(compiled, name, blocks):
    """With results of twice the size, which logits are."""
    from twinfer.gpu.kernels import gemv

    rows = int(name.rpartition("/")[2])
    x, weight = (torch.zeros((n, 1024), dtype=torch.bfloat16) for n in (rows, 512))
    act = "silu" if name.startswith("gated") else ""
    dtype = x.dtype if act else torch.float32
    gemv._tiled(x, weight, None, dtype, blocks, act=act)
    assert compiled == ["tile_kernel"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "blocks"), list(measured("held")))
def test_products_from_registers_that_were_measured_fit(compiled, name, blocks):
    """Warps have slices of the weight's own k."""
    from twinfer.gpu.kernels import gemv

    what, shape, rows = name.split("/")
    n, k = map(int, shape.split("x"))
    x, weight = torch.zeros((int(rows), k)).bfloat16(), torch.zeros((n, k)).bfloat16()
    gemv._held(x, weight, None, x.dtype, blocks, act="silu" if what.startswith("gated") else "")
    assert compiled == ["held_kernel"]
    assert k % (blocks["warps"] * 64) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sums_over_peers_compile(compiled, dtype, world):
    from twinfer.gpu.kernels import reduce

    words = torch.zeros(world, dtype=torch.int64)
    counts = torch.zeros(8, dtype=torch.int32)
    boxes = reduce.Boxes(512, words, counts, counts)
    peers = reduce.Peers(world - 1, world, 4096, dtype, (), boxes, boxes, boxes)
    weight = torch.zeros(4096, dtype=dtype)
    for rows in (3, 200, 300):
        x = torch.zeros((rows, 4096), dtype=dtype)
        reduce._launch(peers, x, x.clone(), weight, 1e-6)
        reduce._launch(peers, x, None, None, 0.0)
    reduce._best(peers, torch.zeros(3, dtype=torch.int32), torch.zeros(3, 500))
    reduce._scales(peers, torch.zeros((300, 3584), dtype=dtype), 448.0)
    assert compiled == ["reduce_kernel"] * 6 + ["best_kernel", "scales_kernel"]


@pytest.mark.parametrize("chip", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_heads_of_512_have_blocks_of_their_own_on_every_chip(monkeypatch, chip, dtype):
    """What a chip has for smaller heads would leave a program of these without registers."""
    from twinfer.gpu.kernels import launch
    from twinfer.gpu.kernels.attention import setting_of

    launch.config.cache_clear()
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: chip)
    table = launch._table()
    assert setting_of("decode", dtype, 512) == table["default"]["decode/512"]
    assert setting_of("decode", dtype, 256) == table["chips"][chip][f"decode/{dtype}/256"]
    assert setting_of("decode", dtype, 128) == table["chips"][chip][f"decode/{dtype}"]
    launch.config.cache_clear()


@pytest.mark.parametrize(
    ("rows", "warps", "gated"),
    [
        (17, 4, True),
        *(
            pytest.param(rows, warps, gated, marks=pytest.mark.slow)
            for rows, warps, gated in (
                (128, 8, False),
                (17, 8, False),
                (64, 4, False),
                (64, 8, True),
                (128, 4, True),
            )
        ),
    ],
)
@pytest.mark.parametrize(
    ("kind", "group", "zero", "bias", "parts", "dtype"),
    [
        ("int4", 128, False, False, 1, torch.bfloat16),
        ("int4", 1024, True, True, 3, torch.bfloat16),
        ("int4", 128, True, False, 1, torch.float16),
        ("int4", 32, True, False, 1, torch.bfloat16),
        ("int4", 64, False, True, 3, torch.bfloat16),
        ("fp4", 16, False, True, 3, torch.bfloat16),
        ("fp4", 32, False, False, 1, torch.bfloat16),
        ("int8", 1024, False, True, 3, torch.bfloat16),
        ("int8", 128, False, False, 1, torch.float16),
    ],
)
def test_narrow_products_by_tiles_compile(
    compiled, monkeypatch, rows, warps, gated, kind, group, zero, bias, parts, dtype
):
    """Weights that no block divides, for Hopper's tensor cores and copy engine."""
    from twinfer.gpu.kernels import narrow

    n, k = 200, 1024
    setting = narrow.config("narrow_tiles", str(128 if rows > 64 else 64 if rows > 32 else 32))
    for name, value in {"warps": warps, "parts": parts, "steps": 1, "stages": 4}.items():
        monkeypatch.setitem(setting, name, value)
    asked = narrow.prepared(
        torch.zeros((rows, k), dtype=dtype),
        torch.zeros((n, k if kind == "int8" else k // 2)).to(STORED[kind]),
        torch.zeros((n, k // group)),
        torch.zeros((n, k // group), dtype=torch.uint8) if zero else None,
        None,
        torch.zeros(n, dtype=dtype) if bias else None,
        kind,
        torch.zeros((rows, n // 2 if gated else n), dtype=dtype),
    )
    narrow.tiles(asked, gated=gated)
    assert compiled == ["narrow_tile_kernel"]


@pytest.mark.parametrize("n", [512, pytest.param(2 * 8448, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "rows", [9, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (32, 64)), 128]
)
@pytest.mark.parametrize("gated", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "group"), [("int4", 128), ("int8", 256), ("fp4", 16)])
def test_narrow_products_by_tiles_fit(compiled, n, rows, gated, kind, group):
    """As `configs.json` has them, in shared memory; one row goes elsewhere, and more to cuBLAS."""
    from twinfer.gpu.kernels import narrow, narrow_mlp

    def product(rows):
        weight = torch.zeros((n, 256 if kind == "int8" else 128)).to(STORED[kind])
        x = torch.zeros((rows, 256)).bfloat16()
        arguments = (x, weight, torch.zeros((n, 256 // group)), None, None, kind)
        return narrow_mlp._gated(*arguments) if gated else narrow.linear_grouped(*arguments)

    product(rows)
    product(1)
    few = "fragment_kernel" if kind == "int4" else "narrow_gemv_kernel"
    assert compiled[:2] == ["narrow_tile_kernel", few]
    product(129)
    assert "widen_kernel" in compiled[2:]
