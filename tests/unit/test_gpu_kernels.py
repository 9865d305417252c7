"""The Triton kernels: the contracts of their ops, and what those cases are too small for.

On a CPU they run in Triton's interpreter, which has to be chosen before Triton is imported: in a
process of its own. On a GPU (`--device cuda`) this file runs as it is, and `pytest -p
twinfer.gpu.kernels tests/unit/test_ops_contracts.py -k triton --device cuda` judges the contracts.
"""

import json
import math
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from twinfer.ops.cases import load_all
from twinfer.ops.cases.attention import by_head, paged, released
from twinfer.ops.cases.dense import _product
from twinfer.ops.cases.generators import generator, normal
from twinfer.ops.cases.latents import of_latents
from twinfer.ops.cases.moe import _chosen, _mxfp4, _named, _narrow, mixture
from twinfer.ops.cases.quantized import (
    _grouped_mlp_case,
    _mlp_case,
    _with_norm,
    quantized,
)
from twinfer.ops.cases.sampling import FAR, MASKED, ONE, _sample_arguments
from twinfer.ops.testing import (
    DTYPES,
    TESTING,
    Judge,
    bound_function,
    ci_cases,
    oracle,
    run,
)

load_all()
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")
HERE = Path(__file__)


TRITON = "triton and not [sample-torch-triton] and not [penalised_sample-torch-triton]"
"""Many rows of filters take the interpreter minutes: tests here have a few."""
QUICK = " and not ".join(
    [
        TRITON,
        "[paged_attention-torch-triton]",
        "bound_in_float16",
        "filters_of_rows",
        "opcheck",
        "64-32-32]",
        "few_tokens[plain",
        "few_tokens[fp8-2]",
        "few_tokens[int4-1]",
        "few_tokens[fp4-2]",
        "[moe_experts_narrow-torch-triton]",
        "[gated_mlp_grouped-torch-triton]",
        "mixed_steps[heads2",
        "mixed_steps[heads3",
        "experts[bfloat16-5-40",
        "experts[bfloat16-4-33",
        "experts[bfloat16-150",
        "rows_alone[flat",
        "parts[few",
        "2_18_words",
        "int4[2-True]",
        "int4[33",
        "measured[5376",
        "measured[20480",
        "measured[43008",
        "blocks_of_experts[70",
        "blocks_of_experts[150",
        "blocks_of_experts[300",
        "experts_of_fp8[12",
        "experts_of_fp8[4",
        "activation[64",
        "int4[16",
        "int4[9",
        "experts[bfloat16-130",
        "mixed_steps[heads1",
        "parts[many",
        "blocks_of_experts[33",
        "experts_of_fp8[",
        "activation[20",
        "[moe_experts-torch-triton]",
        "mixed_steps[heads4",
        "experts[float32-40",
        "experts[float16-90",
        "norm_rope_write_kv-torch-triton]",
        "measured[2560-10240",
        "experts_of_mxfp4[15",
        "experts_of_mxfp4[9",
        "merges_parts",
        "blocks_ahead[float",
        "experts[bfloat16-1",
        "parts[bfloat16-reach0",
        "parts[bfloat16-reach4",
        "parts[bfloat16-reach5",
        "parts[bfloat16-reach6",
        "parts[float16-reach2",
        "few_tokens[fp4",
        "case[moe_route-torch-triton",
        "measured[16384",
        "measured[6144",
        "int4[2-False",
        "experts_of_mxfp4[1",
        "experts_of_mxfp4[4",
        "mask_leaves[True",
        "few_tokens[int4",
        "measured[5120",
        "measured[28672",
        "measured[8192",
        "measured[64128",
        "fp8[1-96-208",
        "mlp_of_fp8[2",
        "mlp_of_fp8[33",
        "mlp_of_fp8[9-96",
        "behind_a_norm[add_norm_gated_mlp_fp8-1-1000",
        "behind_a_norm[add_norm_gated_mlp_fp8-3-128-float32",
        "case[add_norm_gated_mlp_fp8-torch-triton",
        "case[gated_mlp_fp8-torch-triton",
        "narrow_weights[int4-1-True-70",
        "narrow_weights[int4-12-True-70",
        "narrow_weights[int4-3-False-70",
        "narrow_weights[fp4-12-False-70",
        "measured[1024",
        "measured[2048",
        "measured[2880",
        "measured[4096-4",
        "only[norm_qk_by_means-torch-triton",
        "only[qk_mean_squares-torch-triton",
        "heads_of_512[bfloat16",
        "(blocks_ahead and sinks and -16])",
        "(blocks_ahead and not sinks)",
        "tokens[1-384",
        "(by_page_and_by_slot and not sinks)",
        "twice_gives_the_same_bits",
    ]
)
"""Attention, experts and the MLP of few bits have tests of their own in this file, which are smaller
than all cases of their ops.
"""


FILES = ("test_gpu_kernels.py", "test_ops_contracts.py", "test_gpu_start.py")


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (FILES, QUICK),
        *(pytest.param((name,), TRITON, marks=pytest.mark.slow) for name in FILES),
    ],
    ids=["quick", *FILES],
)
@pytest.mark.timeout(1500)
def test_in_the_interpreter(device, names, chosen):
    if device != "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("only where there is no GPU, and not inside itself")
    files = [str(HERE.with_name(name)) for name in names]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "twinfer.gpu.kernels",
        *files,
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, "-k", chosen], env=environment, capture_output=True, text=True, timeout=1400
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_triton_interpreter_patches_the_language_once(kernels, device, monkeypatch):
    """Launches and functions in them walk through the language at the first launch only."""
    if device != "cpu":
        pytest.skip("only in the interpreter")
    from triton.runtime import interpreter

    x = {"x": normal(generator("patches"), "float32", 2, 32)}
    first = judge("silu_and_mul", x, device)

    def patch(*_):
        raise AssertionError("the language is patched again")

    monkeypatch.setattr(interpreter, "_patch_builtin", patch)
    assert first.tobytes() == judge("silu_and_mul", x, device).tobytes()


def test_triton_interpreter_finds_dtypes_by_name(kernels, device):
    """Pointers are addresses, a block has the dtype of its entries, and bfloat16 has its bits."""
    if device != "cpu":
        pytest.skip("only in the interpreter")
    import triton.language as tl
    from triton.runtime import interpreter

    wanted = [
        (tl.float16, np.float16), (tl.bfloat16, np.uint16), (tl.float8e4nv, np.uint8),
        (tl.int1, np.bool_), (tl.int32, np.int32), (tl.pointer_type(tl.float16), np.uint64),
    ]  # fmt: skip
    for _ in range(2):
        for scalar, dtype in wanted:
            assert interpreter._get_np_dtype(scalar) == dtype
            assert interpreter._get_np_dtype(tl.block_type(scalar, [4, 8])) == dtype


SINKS = np.linspace(-2.0, 4.0, 4).astype(np.float32)
SINKS_OF_6 = np.linspace(-2.0, 4.0, 6).astype(np.float32)
SCALES = {"k_scale": by_head(0.9, 2), "v_scale": by_head(0.6, 2)}


def judge(op, arguments, device):
    """The first output, when all are right: the interpreter takes seconds for one more call."""
    outputs = run(op, "torch", "triton", arguments, device)
    verdict = Judge(op, arguments)(outputs)
    assert verdict.passed, verdict
    return outputs[0]


@pytest.mark.parametrize(
    ("dtype", "reach", "programs", "chunk", "parts"),
    [
        ("bfloat16", {}, 64, 128, 8),
        ("bfloat16", {"window": 300, "sinks": SINKS}, 64, 128, 8),
        ("float16", {"chunk": 500, "sinks": SINKS}, 64, 128, 8),
        ("bfloat16", {}, 64, 32, 32),
        ("bfloat16", SCALES, 64, 128, 8),
        ("bfloat16", {}, 1, 32, 32),
        ("bfloat16", {}, 8, 32, 4),
        ("bfloat16", {"window": 300} | SCALES, 1, 128, 8),
    ],
)
def test_triton_decode_in_parts(kernels, device, dtype, reach, programs, chunk, parts):
    """Long requests beside short ones: parts are added up, by whichever program is the last.

    It adds up 16 parts at a time. With chunks of 32 slots the longest request has more. With one
    program for each processor the slots of all requests are divided among them.
    """
    arguments = paged(
        generator("parts"), dtype, [700, 3, 1100], [1, 1, 1], (4, 2), 64, 16, requests=4, tokens=4
    )
    setting = kernels.config("decode", dtype)
    before = dict(setting)
    try:
        setting.update(programs=programs, chunk=chunk, parts=parts)
        first = judge("paged_attention", arguments | reach, device)
        second = run("paged_attention", "torch", "triton", arguments | reach, device)[0]
        assert first.tobytes() == second.tobytes()
    finally:
        setting.update(before)
    import torch

    from twinfer.gpu.kernels.counters import counters

    assert not counters(torch.zeros(1, device=device).device).any()


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(
    ("dtype", "reach"),
    [
        ("bfloat16", {}),
        ("bfloat16", {"window": 300, "sinks": SINKS}),
        ("float16", {"chunk": 500} | SCALES),
        ("float32", {"soft_cap": 20.0}),
    ],
    ids=str,
)
def test_triton_decode_asks_for_first_blocks_ahead(
    kernels, device, monkeypatch, dtype, reach, page
):
    """Parts of one block and of more, with and without the last slot in it: the bits are those of
    a kernel that asks for nothing before it waits.
    """
    lengths = [1, 33, 32, 700, 64, 1100, 65, 2]
    arguments = paged(
        generator("ahead"), dtype, lengths, [1] * 8, (4, 2), 64, page, requests=12, tokens=12
    )
    setting = kernels.config("decode", dtype)
    blocks = {"programs": 1, "chunk": 32, "block_n": 32, "parts": 128}
    for name, value in blocks.items():
        monkeypatch.setitem(setting, name, value)
    plain = run("paged_attention", "torch", "triton", arguments | reach, device)[0]
    monkeypatch.setitem(kernels.config("decode_ahead"), "rows", 63)
    ahead = judge("paged_attention", arguments | reach, device)
    assert plain.tobytes() == ahead.tobytes()


@pytest.mark.parametrize(("slots", "warps", "programs"), [(16, 4, 2), (32, 8, 1), (32, 4, 1)])
@pytest.mark.parametrize("tokens", [3, 12])
@pytest.mark.parametrize(
    ("heads", "size", "page", "dtype", "reach"),
    [
        ((4, 2), 64, 16, "bfloat16", {}),
        ((8, 1), 128, 64, "bfloat16", {}),
        ((4, 2), 128, 16, "float16", {"window": 300, "sinks": SINKS}),
        ((4, 2), 256, 64, "bfloat16", {"window": 300, "sinks": SINKS}),
        ((6, 2), 256, 128, "bfloat16", {"soft_cap": 20.0}),
        ((2, 2), 64, 64, "bfloat16", {"chunk": 500}),
    ],
    ids=str,
)
def test_decode_from_registers(
    kernels, device, monkeypatch, heads, size, page, dtype, reach, tokens, slots, warps, programs
):
    """Requests of one slot, of a block, of parts and of several blocks each, with and without rows
    of padding and the last slot in the first block: right, the same bits each time, and no counter
    is left behind.
    """
    import torch

    from twinfer.gpu.kernels import attention, launch
    from twinfer.gpu.kernels.counters import counters

    if not launch.hopper():
        pytest.skip("only where there is a Hopper GPU")
    setting = {"tokens": tokens, "slots": slots, "warps": warps, "programs": programs}
    held = kernels.config("held_decode", f"{dtype}/{size}/{tokens}", f"{dtype}/{size}")
    for name, value in setting.items():
        monkeypatch.setitem(held, name, value)
    called, decode = [], attention._decode_held
    monkeypatch.setattr(
        attention, "_decode_held", lambda *given: called.append(1) or decode(*given)
    )
    lengths = [5000, 1, 700] if tokens == 3 else [1, 33, 32, 700, 64, 1100, 65, 2]
    of_each = paged(
        generator("held"), dtype, lengths, [1] * len(lengths), heads, size, page,
        requests=tokens, tokens=tokens,
    )  # fmt: skip
    first = judge("paged_attention", of_each | reach, device)
    again = run("paged_attention", "torch", "triton", of_each | reach, device)[0]
    assert first.tobytes() == again.tobytes()
    mixed = paged(generator("held"), dtype, [900, 90], [1, 40], heads, size, page, requests=tokens)
    judge("paged_attention", mixed | reach, device)
    assert len(called) == 3
    assert not counters(torch.zeros(1, device=device).device).any()


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("lengths", [[1], [300], [65, 1, 700], [1100, 64, 33, 2]], ids=str)
def test_decode_reads_what_the_launch_before_writes(kernels, device, lengths, size):
    """K and V of the last slot, NaN until then: what attention asks for while that launch still
    runs, it has not taken from there. The bits are those of attention that comes much later.
    """
    import torch

    from twinfer.gpu.kernels import attention, cache

    if device == "cpu" and size > 64:
        pytest.skip("the interpreter runs one launch after the other")
    rows, page = len(lengths), 16
    given = paged(
        generator("behind"), "bfloat16", lengths, [1] * rows, (4, 2), size, page, requests=rows,
        tokens=rows,
    )  # fmt: skip
    given = {
        name: torch.from_numpy(np.asarray(x).view(np.int16)).view(torch.bfloat16).to(device)
        if name in ("q", "kv")
        else torch.from_numpy(x).to(device)
        if isinstance(x, np.ndarray)
        else x
        for name, x in given.items()
    }
    last = torch.tensor(lengths, device=device) - 1
    pages = given["page_table"][torch.arange(rows, device=device), last // page]
    slots = (pages * page + last % page).to(torch.int32)
    angles = torch.rand(rows, size // 2, device=device)
    numbers = torch.Generator().manual_seed(0)
    for _ in range(1 if device == "cpu" else 100):
        qkv = torch.randn(rows, 8 * size, generator=numbers).bfloat16().to(device)
        given["kv"].view(-1, 4, size)[slots.long()] = float("nan")
        q, kv = cache.norm_rope_write_kv(
            qkv, given["kv"], None, None, angles.cos(), angles.sin(), slots, 1e-6
        )
        given |= {"q": q, "kv": kv}
        behind = attention.paged_attention(**given)
        if device == "cuda":
            torch.cuda.synchronize()
        assert behind.isfinite().all()
        assert torch.equal(behind, attention.paged_attention(**given))


@pytest.mark.parametrize("reach", [{}, {"window": 300, "sinks": SINKS}, {"chunk": 500}], ids=str)
def test_triton_decode_by_page_and_by_slot(kernels, device, reach):
    """Blocks that lie in one page and blocks that lie in several give the same bits."""
    arguments = paged(
        generator("pages"),
        "bfloat16",
        [700, 3, 1100],
        [1, 1, 1],
        (4, 2),
        64,
        64,
        requests=4,
        tokens=4,
    )
    kv, table = arguments["kv"], arguments["page_table"]
    fourth = np.repeat(table * 4, 4, axis=1) + np.tile(
        np.arange(4, dtype=table.dtype), table.shape[1]
    )
    cut = {"kv": kv.reshape(-1, 16, *kv.shape[2:]), "page_table": fourth}
    whole = judge("paged_attention", arguments | reach, device)
    parts = run("paged_attention", "torch", "triton", arguments | reach | cut, device)[0]
    assert whole.tobytes() == parts.tobytes()


def test_triton_decode_writes_rows_of_padding(kernels, device, monkeypatch):
    """Also beside a request that is split: all of them are zeros, as the reference has them."""
    import torch

    setting = kernels.config("decode", "float32")
    # All parts that a GPU has at once, and those that the interpreter's has.
    lengths = [setting["chunk"] * (40 if device == "cuda" else 8)] + [20] * 7
    arguments = paged(
        generator("padding"), "float32", lengths, [1] * 8, (4, 2), 64, 16, requests=24, tokens=24
    )
    empty = torch.empty

    def poisoned(*args, **options):
        made = empty(*args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    out = run("paged_attention", "torch", "triton", arguments, device)[0]
    assert not out[8:].any()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("rows", "act"), [(3, "silu"), (20, "gelu"), (64, "silu")])
def test_products_of_some_rows_apply_the_activation(kernels, device, rows, act, parts):
    """Gate and up in one launch, whole or from parts of k, as from two.

    The product is rounded once, as the op says. cuBLAS may round the parts of a product of
    bfloat16 as well, so it is no judge of 0.3 %.
    """
    import torch

    from twinfer.gpu.kernels import gemv
    from twinfer.gpu.kernels import rows as row_kernels

    numbers = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(shape, generator=numbers).to(device, torch.bfloat16)
        for shape in ((rows, 640), (180, 640), (180,))
    )
    whole = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).to(x.dtype)
    if act == "silu":
        want = row_kernels.silu_and_mul(whole)
    else:
        want = row_kernels.gelu_and_mul(whole, "tanh")
    setting = kernels.config("gated")
    before = dict(setting)
    try:
        setting.update(parts=parts)
        found = gemv._skinny(x, weight, bias, x.dtype, act=act)
    finally:
        setting.clear()
        setting.update(before)
    off = (found.float() - want.float()).norm() / want.float().norm()
    assert off < 3e-3, off


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("block_n", "warps"), [(64, 4), (128, 8)])
@pytest.mark.parametrize(
    ("rows", "act"), [(3, ""), (20, "gelu"), (64, "silu"), (100, ""), (256, "")]
)
def test_products_by_tiles(kernels, device, rows, act, block_n, warps, parts):
    """Weights that no block divides, whole or from parts of k, once and again."""
    import torch

    from twinfer.gpu.kernels import gemv, launch
    from twinfer.gpu.kernels import rows as row_kernels
    from twinfer.gpu.kernels.counters import counters

    if not launch.hopper():
        pytest.skip("only where there is a Hopper GPU")
    numbers = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(shape, generator=numbers).to(device, torch.bfloat16)
        for shape in ((rows, 1096), (400, 1096), (400,))
    )
    want = torch.nn.functional.linear(x, weight, bias)
    if act == "silu":
        want = row_kernels.silu_and_mul(want)
    elif act == "gelu":
        want = row_kernels.gelu_and_mul(want, "tanh")
    blocks = {"block_n": block_n, "parts": parts, "stages": 3, "warps": warps, "registers": 168}
    first, second = (gemv._tiled(x, weight, bias, x.dtype, blocks, act=act) for _ in range(2))
    assert torch.equal(first, second)
    off = (first.float() - want.float()).norm() / want.float().norm()
    assert off < 3e-3, off
    assert not counters(x.device).any()


@pytest.mark.parametrize(("block_n", "warps", "ahead"), [(16, 2, 8), (32, 4, 3), (32, 16, 1)])
@pytest.mark.parametrize(("rows", "act"), [(3, ""), (8, "silu"), (13, "gelu"), (32, "")])
def test_products_from_registers(kernels, device, rows, act, block_n, warps, ahead):
    """Weights that no block divides, all of a warp's slice asked for ahead or some, once and
    again.
    """
    import torch

    from twinfer.gpu.kernels import gemv, launch
    from twinfer.gpu.kernels import rows as row_kernels

    if not launch.hopper():
        pytest.skip("only where there is a Hopper GPU")
    numbers = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(shape, generator=numbers).to(device, torch.bfloat16)
        for shape in ((rows, 1024), (404, 1024), (404,))
    )
    want = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).to(x.dtype)
    if act == "silu":
        want = row_kernels.silu_and_mul(want)
    elif act == "gelu":
        want = row_kernels.gelu_and_mul(want, "tanh")
    blocks = {"block_n": block_n, "warps": warps, "ahead": ahead}
    first, second = (gemv._held(x, weight, bias, x.dtype, blocks, act=act) for _ in range(2))
    assert torch.equal(first, second)
    off = (first.float() - want.float()).norm() / want.float().norm()
    assert off < 3e-3, off


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "kind", "groups", "zero", "dtype"),
    [
        (3, "int4", 1, False, "bfloat16"),
        (20, "int4", 4, True, "float16"),
        (64, "int4", 8, True, "bfloat16"),
        (100, "int4", 8, False, "bfloat16"),
        (5, "int4", 16, True, "bfloat16"),
        (70, "int4", 32, True, "bfloat16"),
        (33, "int4", 32, False, "bfloat16"),
        (9, "fp4", 32, False, "bfloat16"),
        (120, "fp4", 64, False, "bfloat16"),
        (20, "int8", 8, False, "float16"),
        (100, "int8", 1, False, "bfloat16"),
    ],
)
def test_narrow_products_by_tiles(
    kernels, device, rows, kind, zero, dtype, gated, groups, parts, warps
):
    """Weights that no block divides, of all groups, whole or from parts of k, once and again."""
    import torch

    from twinfer.gpu.kernels import launch, narrow
    from twinfer.gpu.kernels import rows as row_kernels
    from twinfer.gpu.kernels.counters import counters

    if not launch.hopper():
        pytest.skip("only where there is a Hopper GPU")
    numbers, n, k = torch.Generator().manual_seed(rows), 200, 1024
    x, bias = (torch.randn(shape, generator=numbers) for shape in ((rows, k), (n,)))
    x, bias = x.to(device, getattr(torch, dtype)), bias.to(device, getattr(torch, dtype))
    scale = 0.01 * (torch.rand(n, groups, generator=numbers) + 0.5)
    zeros = torch.randint(0, 16, (n, groups), dtype=torch.uint8, generator=numbers)
    if kind == "int8":
        weight = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=numbers)
        q = weight.double()
    else:
        weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=numbers)
        q = torch.stack([weight & 15, weight >> 4], 2).reshape(n, k)
    if kind == "fp4":
        sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        q = torch.cat([sizes, -sizes])[q.long()]
    q = q.reshape(n, groups, k // groups).double()
    if kind == "int4":
        q = q - (zeros.double()[:, :, None] if zero else 8.0)
    wide = (q * scale.double()[:, :, None]).reshape(n, k).to(device)
    if k // groups < 128:  # scales of short groups multiply entries, which are rounded once
        wide = wide.to(x.dtype).double()
    want = torch.nn.functional.linear(x.double(), wide, bias.double()).to(x.dtype)
    want = row_kernels.silu_and_mul(want) if gated else want
    weight, zeros, scale = (y.to(device) for y in (weight, zeros, scale))
    setting = kernels.config("narrow_tiles", str(launch.power_of_2(rows, 16)))
    before = dict(setting)
    try:
        setting.update(warps=warps, parts=parts, steps=1, stages=4)
        outs = [torch.empty_like(want) for _ in range(2)]
        for out in outs:
            asked = narrow.prepared(
                x, weight, scale, zeros if zero else None, None, bias, kind, out
            )
            assert narrow.tiles_take(asked)
            narrow.tiles(asked, gated=gated)
    finally:
        setting.clear()
        setting.update(before)
    first, second = outs
    assert torch.equal(first, second)
    off = (first.double() - want.double()).norm() / want.double().norm()
    assert off < 3e-3, off
    assert not counters(x.device).any()


def test_when_requests_are_split_together(kernels):
    """Few have all the parts that pay each, and if there are very few, as many as run at once; many
    share what runs at once; none is split where the longest is one part.
    """
    from twinfer.gpu.kernels.attention import splitting

    setting = {"block_n": 64, "chunk": 64, "parts": 32, "most": 128}
    setting["programs"] = 4 * 132 // kernels.processors()
    resident = setting["programs"] * kernels.processors() // 8
    assert splitting(1, 8, 131_072, 0, setting) == (1, resident, resident)
    assert splitting(1, 1, 131_072, 0, setting) == (1, 128, 128)
    assert splitting(1, 8, 1024, 0, setting) == (1, 16, 16)
    assert splitting(2, 8, 8192, 0, setting) == (1, resident // 2, resident // 2 * 2)
    assert splitting(4, 8, 8192, 0, setting) == (1, 32, 128)
    assert splitting(8, 4, 8192, 0, setting) == (2, 2 * resident, 8 + 2 * resident)
    assert splitting(8, 8, 8192, 0, setting) == (2, resident, 8 + resident)
    assert splitting(8, 8, 8192, 60, setting) == (1, 2, 16)
    assert splitting(8, 8, 64, 0, setting) == (0, 1, 8)
    assert splitting(4096, 8, 8192, 0, setting) == (0, 1, 4096)


@pytest.mark.parametrize(
    ("lengths", "most"),
    [
        ([640] * 6 + [25_600] + [640] * 3, 1.15),
        ([25_600] + [640] * 9, 1.15),
        ([8192] * 7, 1.3),
        ([300, 20_000, 5, 9000, 64] * 2, 1.5),
        ([1] * 8, None),
        ([250, 200] * 6, None),
        ([64_000] + [60] * 9, 1.15),
    ],
    ids=[
        "long among short",
        "long first",
        "alike",
        "mixed",
        "one block each",
        "few slots each",
        "one long",
    ],
)
def test_the_slots_of_all_requests_are_divided_evenly(kernels, device, lengths, most):
    """See `parts_of`. None is much larger than an equal share. There is none if all have 256 slots
    or less.
    """
    parts = parts_of(lengths, device)
    assert any(item[2] > 1 for item in parts) == (max(lengths) > 256)
    share = sum(-(-n // PART_BLOCK) for n in lengths) / PARTS_WANTED
    if most is not None:
        assert max(item[3] for item in parts if item[2] > 1) <= most * share + 1


PART_BLOCK, PARTS_WANTED, PART_ROWS = 64, 16, 12


def parts_of(lengths, device):
    """What the programs of a decode step are told of their parts, of requests of so many slots.

    Every block of a request is in one part. Parts of requests that are split come first, rows of no
    request last, one by one.
    """
    import torch

    from .parts_kernel import parts_kernel

    size, wanted, rows = PART_BLOCK, PARTS_WANTED, PART_ROWS
    lens = torch.tensor(lengths + [7] * (rows - len(lengths)), dtype=torch.int32, device=device)
    out = torch.zeros((rows + wanted, 5), dtype=torch.int32, device=device)
    parts_kernel[(rows + wanted,)](lens, out, len(lengths), rows, wanted, BLOCK_R=16, BLOCK_N=size)
    found = out.tolist()
    real = [item for item in found if item[0] < len(lengths)]
    assert found[: len(real)] == real
    seen = {request: [] for request in range(len(lengths))}
    for number, (request, split, parts, part, begin) in enumerate(real):
        assert number == begin + split < begin + parts
        seen[request] += range(split * part, min(split * part + part, -(-lengths[request] // size)))
    assert seen == {r: [*range(-(-n // size))] for r, n in enumerate(lengths)}
    split_ones = [item[2] > 1 for item in real]
    assert split_ones == sorted(split_ones, reverse=True)
    none = [request for request, *_ in found[len(real) :]]
    assert none[: rows - len(lengths)] == [*range(len(lengths), rows)]
    return real


def test_parts_of_any_lengths_have_their_programs(kernels, device):
    """Requests of like, of uneven and of very uneven lengths, with rows of no request among them:
    all of their parts have a program, however they are rounded up.
    """
    rng = random.Random(7)
    most = 0
    for _ in range(20 if device == "cpu" else 500):
        base, spread = rng.choice([60, 700, 5000]), rng.choice([0.1, 1.0, 2.5])
        live = rng.randint(1, PART_ROWS)
        lengths = [max(1, int(base * math.exp(rng.gauss(0, spread)))) for _ in range(live)]
        parts = parts_of(lengths, device)
        most = max(most, len(parts) - live)
    assert most > PARTS_WANTED * 3 // 4  # seats are used


def test_uneven_lengths_have_more_parts(kernels, device):
    """As long as parts have 512 slots, and with many requests, of which some stay whole."""
    many = [10_000, 9_000, 8_000, 7_000, 5_000, 4_000, 3_000, 2_000, 1_000, 500]
    assert len(parts_of(many, device)) == 23  # 19 if they were divided as others are
    assert len(parts_of([n // 5 for n in many], device)) == 17  # not 21
    assert len(parts_of([10_000, 9_000, 7_000, 5_000, 3_000, 1_000], device)) == 16  # not 20


@pytest.mark.parametrize("rows", [1, 2, 9, 40, 70])
@pytest.mark.parametrize(
    ("kind", "groups", "zeros"),
    [
        ("int8", 1, False), ("fp8", 1, False), ("fp8", 3, False), ("int4", 3, False),
        ("int4", 3, True), ("int4", 12, True), ("int4", 1, True), ("fp4", 12, False),
    ],
)  # fmt: skip
def test_triton_products_of_narrow_weights(kernels, device, rows, kind, groups, zeros):
    """Few rows, more than a block, and so many that the weight is widened; k is no power of 2."""
    n, k = 70, 384
    rng = np.random.default_rng(rows)
    if kind == "fp8":
        weight = (rng.normal(size=(n, k)) * 40).astype(DTYPES["float8_e4m3fn"])
    elif kind == "int8":
        weight = rng.integers(-127, 128, (n, k)).astype(np.int8)
    else:
        weight = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
    arguments = {
        "x": normal(rng, "bfloat16", rows, k),
        "weight": weight,
        "scale": (2.0 ** rng.uniform(-6, -3, (n, groups))).astype(np.float32),
        "zero": rng.integers(0, 17, (n, groups)).astype(np.uint8) if zeros else None,
        "bias": normal(rng, "bfloat16", n) if groups > 1 else None,
        "kind": kind,
    }
    judge("linear_grouped", arguments, device)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 9])
def test_triton_products_of_int4_in_whole_blocks(kernels, device, rows, dtype, zeros):
    """Rows of the weight fill the blocks of a kernel, so that nothing is masked; either half."""
    n, k = 128, 512
    rng = np.random.default_rng(rows)
    arguments = {
        "x": normal(rng, dtype, rows, k),
        "weight": rng.integers(0, 256, (n, k // 2)).astype(np.uint8),
        "scale": (2.0 ** rng.uniform(-6, -3, (n, 4))).astype(np.float32),
        "zero": rng.integers(0, 17, (n, 4)).astype(np.uint8) if zeros else None,
        "bias": None,
        "kind": "int4",
    }
    judge("linear_grouped", arguments, device)


def test_triton_reads_no_widened_weight_before_it_is_written(kernels, device, monkeypatch):
    """Kernels for a few rows read weights while the launch before them may still run, here the one
    that widens: that product is the library's.
    """
    from twinfer.gpu.kernels import gemv

    asked = []
    few = gemv._few
    monkeypatch.setattr(
        gemv, "_few", lambda *args, **more: asked.append(args) or few(*args, **more)
    )
    rng, n, k = np.random.default_rng(4), 64, 128
    arguments = {
        "x": normal(rng, "float16", 100, k),
        "weight": rng.integers(0, 256, (n, k // 2)).astype(np.uint8),
        "scale": (2.0 ** rng.uniform(-6, -3, (n, 8))).astype(np.float32),
        "zero": None,
        "bias": None,
        "kind": "fp4",
    }
    judge("linear_grouped", arguments, device)
    assert not asked


@pytest.mark.parametrize("rows", [1, 2, 9, 40])
@pytest.mark.parametrize(
    ("op", "block"), [("linear_int8", 0), ("linear_fp8", 0), ("linear_fp8", 128)]
)
def test_triton_products_of_quantised_tokens(kernels, device, rows, op, block):
    kind = op.removeprefix("linear_")
    rng, per = np.random.default_rng(rows), "block" if block else "row"
    x, x_scale = quantized(kind, normal(rng, "float32", rows, 384), per, block)
    weight, scale = quantized(kind, normal(rng, "float32", 70, 384), per, block)
    arguments = {"x": x, "weight": weight, "x_scale": x_scale, "weight_scale": scale}
    for dtype in ("float32", "bfloat16"):
        judge(op, arguments | {"bias": normal(rng, dtype, 70), "dtype": dtype}, device)


@pytest.mark.parametrize("k", [480, 384])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_triton_products_that_quantise_tokens(kernels, device, rows, k):
    """A product by ones on the diagonal shows what x became: the bits of the launch that quantises,
    whose scale is of the whole row. Rows of 480 fit a program, rows of 384 are a launch's.
    """
    rng = np.random.default_rng(rows)
    x = normal(rng, "bfloat16", rows, k)
    x[:, -1] = 30.0
    scale = np.ones((k, 1), np.float32)
    ones = np.eye(k).astype(DTYPES["float8_e4m3fn"])
    rest = {"x_scale": None, "weight_scale": scale, "bias": None, "dtype": "float32"}
    (got,) = run("linear_fp8", "torch", "triton", {"x": x, "weight": ones, **rest}, device)
    values, x_scale = run(
        "quantize_fp8_dynamic", "torch", "triton", {"x": x, "per": "row", "block": 0}, device
    )
    np.testing.assert_array_equal(got, values.astype(np.float32) * x_scale)
    weight, scale = quantized("fp8", normal(rng, "float32", 70, k), "row")
    bias, dtype = normal(rng, "bfloat16", 70), "bfloat16"
    rest |= {"weight": weight, "weight_scale": scale, "bias": bias, "dtype": dtype}
    judge("linear_fp8", {"x": x, **rest}, device)
    x[0, 3] = np.nan
    (got,) = run("linear_fp8", "torch", "triton", {"x": x, **rest}, device)
    assert np.isnan(got[0].astype(np.float32)).all()
    assert not np.isnan(got[1:].astype(np.float32)).any()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("k", [24, 130, 480])
def test_triton_quantises_bfloat16_as_float32(kernels, device, k, first):
    """Rows of bfloat16 go through instructions that take two entries: the bits of the same rows in
    float32, which do not. Also where a row begins between two words, and by a largest entry that is
    known.
    """
    import torch

    from twinfer.gpu.kernels.narrow import quantize_fp8_dynamic, quantized_by_largest

    rng = np.random.default_rng(k)
    x = rng.normal(size=(9, k + first)) * 2.0 ** rng.integers(-8, 8, (9, 1))
    x[1], x[2], x[3] = 0.0, 2.0**-120, x[3] * 2.0**-126
    x[4, 5], x[5, 6], x[6, 7:9] = np.inf, np.nan, (-np.inf, np.nan)
    x[7], x[8, k - 1] = np.nan, -3e38
    x = torch.from_numpy(x).to(device, torch.bfloat16)[:, first:]
    values, scale = quantize_fp8_dynamic(x, "row", 0)
    wide = x.to(torch.float32)
    largest = torch.where(wide.isnan(), 0.0, wide.abs().clamp(max=torch.finfo(wide.dtype).max))
    for same, of in (
        quantize_fp8_dynamic(wide, "row", 0),
        quantized_by_largest(x.contiguous(), largest),
        quantized_by_largest(wide.contiguous(), largest),
    ):
        assert torch.equal(scale.view(torch.int32), of.view(torch.int32))
        assert torch.equal(values.view(torch.uint8), same.view(torch.uint8))


@pytest.mark.parametrize(("dim", "inter"), [(96, 45), (96, 208), (120, 45), (128, 208)])
@pytest.mark.parametrize("rows", [1, 2, 9, 33])
def test_triton_mlp_of_fp8(kernels, device, rows, dim, inter):
    """The bits of the finer ops by their kernels. One row of 120 or 128 is quantised and goes
    through the activation within the first product.
    """
    x, arguments = _mlp_case("bfloat16", rows, dim, inter, True), {"dtype": "bfloat16"}
    got = judge("gated_mlp_fp8", x, device)
    first = {"weight": x["gate_up"], "weight_scale": x["gate_up_scale"], "bias": x["gate_up_bias"]}
    second = {"weight": x["down"], "weight_scale": x["down_scale"], "bias": x["down_bias"]}

    def product(x, weight):
        return run("linear_fp8", "torch", "triton", arguments | x | weight, device)[0]

    both = product({"x": x["x"], "x_scale": None}, first)
    (hidden,) = run("silu_and_mul", "torch", "triton", {"x": both}, device)
    values, scale = run(
        "quantize_fp8_dynamic", "torch", "triton", {"x": hidden, "per": "row", "block": 0}, device
    )
    want = product({"x": values, "x_scale": scale}, second)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("weight", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "dim"), [(1, 120), (1, 128), (1, 1000), (1, 96), (3, 128)])
@pytest.mark.parametrize("op", ["add_norm_linear_fp8", "add_norm_gated_mlp_fp8"])
def test_triton_products_of_fp8_behind_a_norm(kernels, device, op, rows, dim, weight):
    """One row of 120, 128 and 1000 is normed within the product; the sum has the bits of one
    rounding everywhere.
    """
    x = _with_norm(_mlp_case("bfloat16", rows, dim, 208, True))
    x["norm"] = x["norm"].astype(DTYPES[weight])
    if op == "add_norm_linear_fp8":
        more = {
            "weight": x["gate_up"],
            "weight_scale": x["gate_up_scale"],
            "bias": x["gate_up_bias"],
        }
        x = {name: x[name] for name in ("x", "residual", "norm")} | more | {"eps": x["eps"]}
    outputs = run(op, "torch", "triton", x, device)
    verdict = Judge(op, x)(outputs)
    assert verdict.passed, verdict
    total = x["x"].astype(np.float32) + x["residual"].astype(np.float32)
    np.testing.assert_array_equal(outputs[1], total.astype(outputs[1].dtype))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 9, 16, 33])
def test_triton_mlp_of_int4(kernels, device, rows, zeros):
    """The bits of the finer ops by their kernels."""
    x = _grouped_mlp_case("bfloat16", "int4", 2, zeros, True, 512, rows)
    got = judge("gated_mlp_grouped", x, device)

    def product(hidden, name):
        pieces = {"weight": x[name]} | {y: x[f"{name}_{y}"] for y in ("scale", "zero", "bias")}
        arguments = {"x": hidden, "kind": "int4", **pieces}
        return run("linear_grouped", "torch", "triton", arguments, device)[0]

    both = product(x["x"], "gate_up")
    (hidden,) = run("silu_and_mul", "torch", "triton", {"x": both}, device)
    np.testing.assert_array_equal(got, product(hidden, "down"))


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "fp8", "int4", "fp4"])
def test_triton_narrow_experts_of_few_tokens(kernels, device, tokens, kind):
    cases = {
        case.name: case.arguments for case in ci_cases(TESTING["moe_experts_narrow"], "bfloat16")
    }
    names = ["1 groups, silu", "1 groups, gelu", "2 groups, in turns, biases"]
    if kind in ("plain", "fp4"):
        names.append("5 of 11, from the fourth on")
    names = [f"{kind}, {name}" for name in names]
    if kind == "fp4":
        names += ["mxfp4, silu", "mxfp4, in turns, biases"]
    for name in names:
        arguments = dict(cases[name])
        arguments |= {x: arguments[x][:tokens] for x in ("x", "weights", "experts")}
        judge("moe_experts_narrow", arguments, device)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_triton_narrow_experts_of_many_tokens(kernels, device, kind):
    """Blocks of 128 rows, the last of which are not full: the weight of fp8 is the left operand."""
    rng, (dim, inter, experts, tokens) = np.random.default_rng(3), (96, 80, 2, 140)
    assert kernels.config("moe_narrow_product", "bfloat16", "fp8/128", "128")["left"] == 1
    arguments = {
        "x": normal(rng, "bfloat16", tokens, dim),
        "kind": kind,
        "alpha": 0.0,
        "limit": 0.0,
    }
    for name, n, k in (("gate_up", 2 * inter, dim), ("down", dim, inter)):
        arguments |= _named(name, _narrow(rng, kind, "bfloat16", 1, experts, n, k), None)
    chosen = _chosen(rng.normal(size=(tokens, experts)), 2, True)
    chosen["experts"][::3, 1] = -1
    judge("moe_experts_narrow", arguments | chosen, device)


@pytest.mark.parametrize(
    ("tokens", "top_k", "alpha"),
    [(1, 4, 1.702), (2, 3, 0.0), (4, 3, 0.0), (9, 4, 1.702), (15, 4, 0.0)],
)
def test_triton_experts_of_mxfp4(kernels, device, tokens, top_k, alpha):
    """Blocks of 8, 16 and 32 rows, k of several steps that ends within one, an expert that nobody
    chooses.
    """
    rng, (dim, inter, experts) = np.random.default_rng(tokens), (1120, 96, 6)
    chosen = _chosen(rng.normal(size=(tokens, experts - 1)), top_k, True)
    chosen["experts"][-1, -1] = -1
    chosen["experts"][0, 0] = experts + 1  # of another shard
    arguments = {"x": normal(rng, "bfloat16", tokens, dim), "kind": "fp4", "alpha": alpha}
    for name, n, k in (("gate_up", 2 * inter, dim), ("down", dim, inter)):
        bias = normal(rng, "bfloat16", experts, n) if alpha else None
        arguments |= _named(name, _mxfp4(rng, experts, n, k), bias)
    judge("moe_experts_narrow", arguments | chosen | {"limit": 0.9 if alpha else 0.0}, device)


@pytest.mark.parametrize("tokens", [17, 28, 60, 140])
def test_triton_experts_of_mxfp4_with_many_rows(kernels, device, tokens):
    """Entries widened a word at a time, in blocks of 32, 64 and 128 rows that are not full, of k
    that ends within a step.
    """
    rng, (dim, inter, experts) = np.random.default_rng(tokens), (224, 96, 2)
    chosen = _chosen(rng.normal(size=(tokens, experts)), 2, True)
    chosen["experts"][::3, 1] = -1
    arguments = {"x": normal(rng, "bfloat16", tokens, dim), "kind": "fp4"}
    for name, n, k in (("gate_up", 2 * inter, dim), ("down", dim, inter)):
        bias = normal(rng, "bfloat16", experts, n)
        arguments |= _named(name, _mxfp4(rng, experts, n, k), bias)
    judge("moe_experts_narrow", arguments | chosen | {"alpha": 1.702, "limit": 0.9}, device)


@pytest.mark.parametrize(("choices", "experts"), [(7, 3), (40, 5), (300, 2)])
def test_triton_sorts_choices_and_orders_rows(kernels, device, choices, experts):
    """One launch does what two did: choices by experts, and rows of x as operands have them."""
    import torch

    from twinfer.gpu.kernels.moe import sorted_by_expert
    from twinfer.gpu.kernels.moe_narrow import _sorted_and_ordered

    rng, dim = np.random.default_rng(choices), 96
    ids = torch.from_numpy(rng.integers(-1, experts + 1, (choices, 1)).astype(np.int32)).to(device)
    x = torch.arange(choices * dim, device=device).reshape(choices, dim).to(torch.float32)
    order, starts, ordered = _sorted_and_ordered(ids, experts, x)
    want, want_starts = sorted_by_expert(ids, experts)
    stop = int(want_starts[-1])
    assert torch.equal(starts, want_starts)
    assert torch.equal(order[:stop], want[:stop])
    # Of eight neighbours i is beside i + 4.
    assert torch.equal(ordered, x.reshape(-1, 2, 4).transpose(1, 2).reshape(choices, dim))


@pytest.mark.parametrize(("group", "gelu"), [(128, False), (0, True)])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 4), (4, 3), (12, 3)])
def test_triton_experts_of_fp8(kernels, device, tokens, top_k, group, gelu):
    """Choices by themselves, and those that programs find in one word and in two; scales of whole
    rows or of 128 entries, and biases.
    """
    rng, (dim, inter, experts) = np.random.default_rng(tokens), (384, 128, 6)
    chosen = _chosen(rng.normal(size=(tokens, experts - 1)), top_k, True)
    chosen["experts"][-1, -1] = -1
    arguments = {"x": normal(rng, "bfloat16", tokens, dim), "kind": "fp8", "gelu": gelu}
    for name, n, k in (("gate_up", 2 * inter, dim), ("down", dim, inter)):
        bias = None if gelu else normal(rng, "bfloat16", experts, n)
        groups = k // group if group else 1
        weight = _narrow(rng, "fp8", "bfloat16", groups, experts, n, k)
        arguments |= _named(name, weight, bias)
    judge("moe_experts_narrow", arguments | chosen | {"alpha": 0.0, "limit": 0.0}, device)


@pytest.mark.parametrize(
    ("heads", "size", "page"),
    [((7, 1), 128, 32), ((8, 2), 80, 16), ((4, 4), 256, 64), ((8, 2), 64, 8), ((4, 1), 128, 16)],
)
def test_triton_mixed_steps(kernels, device, heads, size, page):
    """Groups and head sizes of real models: decodes, chunks with a past, and whole prompts in
    one step.
    """
    lengths, queries = [90, 1, 150, 70, 33], [1, 1, 40, 70, 2]
    arguments = paged(
        generator("mixed"), "bfloat16", lengths, queries, heads, size, page, requests=8, tokens=128
    )
    got = judge("paged_attention", arguments, device)
    # What one request holds does not reach the others, nor what its last page holds behind it.
    kv = arguments["kv"].copy()
    pages = arguments["page_table"][2, : -(-150 // page)]
    kv[pages, :, 1::2] = np.nan  # V
    last = arguments["page_table"][3, 69 // page]
    kv[last, 70 % page :] = np.nan
    want = run("paged_attention", "torch", "triton", arguments | {"kv": kv}, device)[0]
    others = np.r_[0:2, 42:114]
    assert got[others].tobytes() == want[others].tobytes()
    if size != 256 or device != "cpu":  # which takes the interpreter long
        judge("paged_attention", arguments | {"window": 37, "soft_cap": 20.0}, device)


PAGES = [(64, 16), (128, 16), (256, 16), (64, 64), (128, 64), (256, 64), (128, 256), (256, 128)]
"""Sizes of heads, and pages that hold parts of a block of slots, or several blocks."""


@pytest.mark.parametrize(("size", "page"), PAGES)
@pytest.mark.parametrize("reach", [{}, {"window": 700}, {"chunk": 512}], ids=str)
def test_triton_long_prompts(kernels, device, size, page, reach):
    """Prompts of many blocks, whole and in chunks with a past, beside short ones."""
    if device == "cpu":
        pytest.skip("takes the interpreter minutes; shorter prompts are judged there")
    arguments = paged(
        generator("long"), "bfloat16", [900, 2500, 1030, 16], [1, 600, 1030, 16], (6, 2), size, page,
        tokens=1700,
    )  # fmt: skip
    judge("paged_attention", released(arguments | reach | {"sinks": SINKS_OF_6}), device)


@pytest.mark.parametrize("size", [64, 128, 256])
def test_triton_prompts_head_by_head(kernels, device, monkeypatch, size):
    """Long steps go through the blocks of one head after another: it changes no bit."""
    if device == "cpu":
        pytest.skip("no chip but Hopper has this order")
    arguments = paged(
        generator("heads"), "bfloat16", [900, 2500, 16], [1, 600, 16], (6, 2), size, 64, tokens=640
    )
    setting, found = kernels.config("hopper", str(size)), {}
    for waves in (0, 2, 1 << 20):
        monkeypatch.setitem(setting, "waves", waves)
        found[waves] = judge("paged_attention", arguments, device)
    assert len({each.tobytes() for each in found.values()}) == 1


@pytest.mark.parametrize(("size", "page"), PAGES)
@pytest.mark.parametrize("reach", [{}, {"window": 1900}, {"chunk": 2048}], ids=str)
def test_triton_few_tokens_behind_many_slots(kernels, device, monkeypatch, size, page, reach):
    """The slots of a block of tokens are split, of some requests more than of others."""
    if device == "cpu":
        pytest.skip("takes the interpreter minutes; no chip but Hopper splits them")
    arguments = paged(
        generator("few"), "bfloat16", [1500, 2900, 1800, 40], [1, 60, 5, 40], (6, 2), size, page,
        tokens=128, requests=6,
    )  # fmt: skip
    monkeypatch.setitem(kernels.config("hopper", str(size)), "parts", 8)
    judge("paged_attention", released(arguments | reach | {"sinks": SINKS_OF_6}), device)


@pytest.mark.parametrize("reach", [{}, {"window": 9000}], ids=str)
def test_triton_long_contexts(kernels, device, reach):
    """Contexts of 20 000 and 130 000 slots: of decodes, of a turn, and of the end of a prompt."""
    if device == "cpu":
        pytest.skip("takes the interpreter minutes")
    arguments = paged(
        generator("contexts"), "bfloat16", [20_000, 130_000, 20_500], [1, 1, 60], (4, 1), 128, 16,
        tokens=64,
    )  # fmt: skip
    judge("paged_attention", released(arguments | reach | {"sinks": SINKS}), device)


@pytest.mark.parametrize("reach", [{}, {"window": 300}], ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_triton_caches_of_more_than_2_31_entries(kernels, device, size, reach):
    """Pages behind the 2^31st entry are read and written as the first ones are, bit for bit."""
    if device == "cpu":
        pytest.skip("takes 4 GiB, and the interpreter minutes")
    import torch

    from twinfer.ops.namespaces.torch_ import from_numpy

    arguments = paged(
        generator("far"), "bfloat16", [700, 3, 1100, 900], [1, 1, 40, 900], (6, 2), size, 16,
        tokens=960,
    )  # fmt: skip
    near = arguments | reach
    near |= {n: from_numpy(v).to(device) for n, v in near.items() if isinstance(v, np.ndarray)}
    kv = near["kv"]
    before = 2**31 // kv[0].numel()
    far = torch.full((before + len(kv), *kv.shape[1:]), float("nan"), device=device, dtype=kv.dtype)
    far[before:] = kv
    used = torch.arange(near["page_table"].shape[1], device=device) * 16 < near["kv_lens"][:, None]
    table = torch.where(used, near["page_table"] + before, 0).int()

    def equal(x, y):
        return torch.equal(x.view(torch.int16), y.view(torch.int16))

    attend = bound_function("paged_attention", "torch", "triton")
    assert equal(attend(**near), attend(**near | {"kv": far, "page_table": table}))
    tokens = 40
    # But for the last slot of a cache, which is scratch.
    slots = torch.randperm(len(kv) * 16 - 1, device=device)[:tokens].int()
    qkv = torch.randn(tokens, 10 * size, device=device, dtype=kv.dtype)
    weight, angles = torch.ones(size, device=device), torch.rand(tokens, size // 2, device=device)
    write = bound_function("write_kv", "torch", "triton")
    fused = bound_function("norm_rope_write_kv", "torch", "triton")
    k, v = torch.randn(2, tokens, 2, size, device=device, dtype=kv.dtype)
    norm = weight.to(kv.dtype)
    for put in (
        lambda cache, at: write(kv=cache, k=k, v=v, slots=at),
        lambda cache, at: fused(qkv, cache, norm, norm, angles, angles, at, 1e-6),
    ):
        put(kv, slots)
        put(far, slots + before * 16)
        assert equal(far[before:], kv)
        assert far[:before].isnan().all()


@pytest.mark.parametrize("sinks", [False, True])
def test_triton_merges_parts(kernels, device, sinks):
    """Sums of parts of a token's slots, of which a head may have seen none."""
    import torch

    from twinfer.gpu.kernels.hopper_kernel import merge_kernel

    rng = generator("merge")
    tokens, heads, group, size, most = 5, 2, 3, 16, 4
    sums = rng.standard_normal((most, tokens, heads * group, size)).astype(np.float32)
    marks = rng.standard_normal((most, tokens, heads * group, 2)).astype(np.float32) ** 2
    marks[1, :, 0] = -np.inf, 0
    sums[1, :, 0] = 0
    splits = np.array([[2, 2], [1, 4], [3, 0], [4, 4], [2, 3]], np.int32)
    sink = np.linspace(-1, 1, heads * group).astype(np.float32)
    out = np.full((tokens, heads * group, size), 7.0, np.float32)
    want = out.astype(np.float64)
    counts = np.array([1, tokens], np.int32)  # token 0 is a decode's
    for t in range(1, tokens):
        for head in range(heads * group):
            parts = splits[t, head // group]
            if parts > 1:
                top, held = marks[:parts, t, head].astype(np.float64).T
                share = np.exp2(top)
                total = (share * held).sum()
                total += np.exp(float(sink[head])) if sinks else 0.0
                want[t, head] = share @ sums[:parts, t, head].astype(np.float64) / total
    on = [torch.from_numpy(x).to(device) for x in (sums, marks, splits, counts, sink, out)]
    merge_kernel[(tokens, heads)](
        *on, tokens, GROUP=group, HEADS=heads, SIZE=size, SINKS=sinks, BLOCK_G=4, OVERLAP=0,
    )  # fmt: skip
    np.testing.assert_allclose(on[-1].cpu().numpy(), want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    "reach",
    [{"window": 20}, {"window": 150}, {"chunk": 64}, {"chunk": 160, "soft_cap": 20.0}],
    ids=lambda reach: " ".join(f"{name} {value}" for name, value in reach.items()),
)
def test_triton_mixed_steps_with_a_reach(kernels, device, reach):
    """Prompts whose windows and chunks are shorter and longer than blocks of slots, beside sinks.

    What no query of a request sees is NaN, and entry 0 of the page table.
    """
    arguments = paged(
        generator("reach"), "bfloat16", [190, 300, 33], [1, 130, 2], (4, 1), 32, 16, tokens=144
    )
    judge("paged_attention", released(arguments | reach | {"sinks": SINKS}), device)


@pytest.mark.parametrize(("dtype", "heads"), [("bfloat16", (16, 2)), ("float32", (8, 1))])
def test_triton_heads_of_512(kernels, device, dtype, heads):
    """As the full layers of Gemma 4 have: eight query heads to one of keys."""
    from twinfer.gpu.kernels.attention import setting_of

    assert setting_of("prefill", dtype, 512) is not setting_of("prefill", dtype, 128)
    arguments = paged(generator("512"), dtype, [90, 33, 60], [1, 1, 21], heads, 512, 16, tokens=24)
    judge("paged_attention", arguments, device)


def in_last_pages(arguments):
    """A step whose cache lies at the end of one of more than 2^31 entries, beside itself."""
    import torch

    cache, page = arguments["cache"], arguments["cache"].shape[1]
    before = 2**31 // cache[0].numel()
    shape = before + len(cache), *cache.shape[1:]
    far = torch.full(shape, float("nan"), device=cache.device, dtype=cache.dtype)
    far[before:] = cache
    table = arguments["page_table"]
    used = torch.arange(table.shape[1], device=table.device) * page < arguments["kv_lens"][:, None]
    moved = torch.where(used, table + before, 0).int()
    return arguments | {"cache": far, "page_table": moved}


def unseen_is_nan(arguments):
    """The same step, where slots that no request sees are NaN."""
    cache, page = arguments["cache"].copy(), arguments["cache"].shape[1]
    seen = np.zeros(cache.shape[:2], bool)
    for i in range(arguments["counts"][1]):
        slot = np.arange(arguments["kv_lens"][i])
        seen[arguments["page_table"][i, slot // page], slot % page] = True
    cache[~seen] = np.nan
    return arguments | {"cache": cache}


@pytest.mark.parametrize(
    ("dtype", "heads", "programs", "chunk", "parts"),
    [
        ("bfloat16", 4, 64, 64, 8),
        ("bfloat16", 20, 64, 64, 32),
        ("float16", 70, 64, 128, 8),
        ("float32", 5, 64, 32, 32),
        ("bfloat16", 4, 1, 32, 32),
        ("float32", 20, 2, 32, 4),
    ],
)
def test_triton_latents_in_parts(
    kernels, device, monkeypatch, dtype, heads, programs, chunk, parts
):
    """Long requests beside short ones: parts are added up in their order by another launch, 16 or 4
    at a time. With few programs the slots of all requests are divided among them.
    """
    from twinfer.gpu.kernels import latent

    arguments = unseen_is_nan(
        of_latents(
            generator("parts of latents"), dtype, [600, 3, 450, 64, 1], [1] * 5, heads, (32, 8), 16,
            requests=7, tokens=7,
        )
    )  # fmt: skip
    rows = min(latent.most_rows(dtype), kernels.power_of_2(heads, 16))
    setting = latent.setting_of("latent_decode", dtype, rows)
    for name, value in {"programs": programs, "chunk": chunk, "parts": parts}.items():
        monkeypatch.setitem(setting, name, value)
    first = judge("latent_attention", arguments, device)
    monkeypatch.setitem(kernels.config("latent_merge"), "many", 1)
    second = judge("latent_attention", arguments, device)
    again = run("latent_attention", "torch", "triton", arguments, device)[0]
    assert second.tobytes() == again.tobytes()
    # Whole requests are the same however others are added up.
    assert first[[1, 4]].tobytes() == second[[1, 4]].tobytes()


@pytest.mark.parametrize("programs", [1, 64])
def test_triton_latents_of_padding_are_zeros(kernels, device, monkeypatch, programs):
    """Beside requests that are split, and where what the kernels write to held NaN."""
    import torch

    from twinfer.gpu.kernels import latent

    setting = latent.setting_of("latent_decode", "bfloat16", 16)
    monkeypatch.setitem(setting, "programs", programs)
    lengths = [setting["chunk"] * (40 if device == "cuda" else 3), 20, 20]
    arguments = of_latents(
        generator("padding"), "bfloat16", lengths, [1] * 3, 4, (32, 8), 64, requests=12, tokens=12
    )
    empty = torch.empty

    def poisoned(*args, **options):
        made = empty(*args, **options)
        return made.fill_(float("nan") if made.is_floating_point() else 1 << 20)

    monkeypatch.setattr(torch, "empty", poisoned)
    out = judge("latent_attention", arguments, device)
    assert not out[3:].any()


@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 40, 1]], ids=str)
def test_triton_latents_by_page_and_by_slot(kernels, device, queries):
    """Blocks that lie in one page and blocks that lie in several give the same bits."""
    arguments = of_latents(
        generator("pages"), "bfloat16", [3, 310, 170], sorted(queries), 4, (32, 8), 64
    )
    cache, table = arguments["cache"], arguments["page_table"]
    fourth = np.repeat(table * 4, 4, axis=1) + np.tile(
        np.arange(4, dtype=table.dtype), table.shape[1]
    )
    cut = {"cache": cache.reshape(-1, 16, *cache.shape[2:]), "page_table": fourth}
    whole = judge("latent_attention", arguments, device)
    parts = run("latent_attention", "torch", "triton", arguments | cut, device)[0]
    assert whole.tobytes() == parts.tobytes()


@pytest.mark.parametrize(
    ("dtype", "heads", "sizes", "page"),
    [
        ("bfloat16", 20, (256, 64), 64),
        ("bfloat16", 3, (32, 8), 4),
        ("bfloat16", 70, (32, 6), 16),
        ("float32", 5, (24, 8), 16),
    ],
)
def test_triton_latents_of_mixed_steps(kernels, device, dtype, heads, sizes, page):
    """Decodes, chunks with a past and whole prompts in one step, and heads that end in the middle
    of a block.
    """
    arguments = of_latents(
        generator("mixed latents"), dtype, [90, 1, 150, 45, 33], [1, 1, 20, 45, 2], heads, sizes,
        page, requests=8, tokens=80,
    )  # fmt: skip
    arguments = unseen_is_nan(arguments)
    got = judge("latent_attention", arguments, device)
    # What one request holds does not reach the others. (The interpreter has no maximum of NaN.)
    cache = arguments["cache"].copy()
    cache[arguments["page_table"][2, : -(-150 // page)], ::2] = np.nan
    want = run("latent_attention", "torch", "triton", arguments | {"cache": cache}, device)[0]
    others = np.r_[0:2, 22:69]
    assert got[others].tobytes() == want[others].tobytes()
    assert np.isnan(want[2:22].astype(np.float32)).all()
    # Nor do prompts, which are not split, depend on who else is there.
    alone = of_one(arguments, 3)
    found = run("latent_attention", "torch", "triton", alone, device)[0]
    assert found.tobytes() == got[22:67].tobytes()


def of_one(arguments, i):
    """The step of request `i` alone."""
    start, stop = arguments["query_start"][i : i + 2]
    return arguments | {
        "q": arguments["q"][start:stop],
        "rotated": arguments["rotated"][start:stop],
        "page_table": arguments["page_table"][i : i + 1],
        "query_start": np.array([0, stop - start], np.int32),
        "kv_lens": arguments["kv_lens"][i : i + 1],
        "counts": np.array([int(stop - start == 1), 1], np.int32),
    }


@pytest.mark.parametrize("heads", [16, 20, 128])
def test_triton_latents_of_long_contexts(kernels, device, heads):
    """Sizes of DeepSeek-V3: decodes of very different lengths, a turn, and a prompt."""
    if device == "cpu":
        pytest.skip("takes the interpreter minutes")
    rng, sizes = generator("long latents"), (512, 64)
    decodes = of_latents(rng, "bfloat16", [9000, 1, 700, 64], [1] * 4, heads, sizes, 64, requests=6,
                         tokens=6)  # fmt: skip
    judge("latent_attention", unseen_is_nan(decodes), device)
    mixed = of_latents(
        rng, "bfloat16", [3000, 2500, 500], [1, 60, 500], heads, sizes, 64, tokens=576
    )
    judge("latent_attention", unseen_is_nan(mixed), device)


@pytest.mark.parametrize("heads", [20, 128])
@pytest.mark.parametrize("lengths", [[250], [4000, 1, 65, 250, 64, 900, 2, 130]], ids=["1", "8"])
def test_triton_latents_overlap_without_a_trace(kernels, device, monkeypatch, lengths, heads):
    """Layers of latent attention in a graph: the bits of launches in turn. The last slot of each
    request is written by each layer, beside it.
    """
    if not kernels.overlap()["OVERLAP"]:
        pytest.skip("launches do not overlap here")
    import torch

    from twinfer.gpu.kernels import latent

    run_layers = layers_of_latents(device, lengths, heads, 12)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run_layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = run_layers()
    monkeypatch.setattr(latent, "overlap", lambda: {"OVERLAP": 0, "launch_pdl": False})
    want = run_layers()
    assert want[0].isfinite().all()
    assert want[0].abs().max() > 0
    for _ in range(100):
        for x in got:
            x.fill_(float("nan"))
        graph.replay()
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y)


def layers_of_latents(device, lengths, heads, count):
    """A function that runs layers of latent attention: (queries, cache) behind the last."""
    import torch

    from twinfer.gpu.kernels import latent
    from twinfer.ops.namespaces.torch_ import from_numpy

    step = of_latents(
        generator("layers"), "bfloat16", lengths, [1] * len(lengths), heads, (512, 64), 64
    )
    names = "q", "rotated", "cache", "page_table", "query_start", "kv_lens", "counts"
    q, rotated, cache, *batch = (from_numpy(step[name]).to(device) for name in names)
    last = [step["page_table"][i, (n - 1) // 64] * 64 + (n - 1) % 64 for i, n in enumerate(lengths)]
    slots = torch.tensor(last, dtype=torch.int32, device=device)
    up = (torch.randn(heads, 128, 512) * 512**-0.5).bfloat16().to(device)
    ones, angles = torch.ones_like(q[0, 0]), torch.rand(len(lengths), 32, device=device)

    def run_layers():
        queries, latents = q.clone(), cache.clone()
        for _ in range(count):
            fresh = torch.cat([queries[:, 0], rotated[:, 0]], 1)
            given = fresh, latents, ones, angles, angles, slots, 1e-6
            latents = latent.norm_rope_write_latents(*given)
            mean = latent.latent_attention(queries, rotated, latents, *batch, 576**-0.5, 1)
            queries = latent.to_latents(latent.from_latents(mean, up), up)
        return queries, latents

    return run_layers


@pytest.mark.parametrize("lengths", [[130], [64, 1]], ids=["1", "2"])
def test_triton_latents_read_what_the_launch_before_writes(kernels, device, lengths):
    """NaN in a request's last slot is overwritten before it is read."""
    import torch

    first, second = (layers_of_latents(device, lengths, 3, count) for count in (1, 2))
    (one, cache), (two, behind) = first(), second()
    assert one.isfinite().all()
    assert two.isfinite().all()
    changed = (cache.nan_to_num() != behind.nan_to_num()).flatten(2).any(2)
    assert int(changed.sum()) == len(lengths)
    assert torch.equal(first()[0], one)


def test_triton_latents_behind_2_31_entries(kernels, device):
    """Pages there are read and written as the first ones are, bit for bit."""
    if device == "cpu":
        pytest.skip("takes 4 GiB, and the interpreter minutes")
    import torch

    from twinfer.ops.namespaces.torch_ import from_numpy

    arguments = of_latents(
        generator("far"),
        "bfloat16",
        [700, 3, 300, 90],
        [1, 1, 40, 90],
        20,
        (512, 64),
        64,
        tokens=144,
    )
    near = {
        n: from_numpy(v).to(device) if isinstance(v, np.ndarray) else v
        for n, v in arguments.items()
    }
    far = in_last_pages(near)

    def equal(x, y):
        return torch.equal(x.view(torch.int16), y.view(torch.int16))

    attend = bound_function("latent_attention", "torch", "triton")
    assert equal(attend(**near), attend(**far))
    cache, others = near["cache"], len(far["cache"]) - len(near["cache"])
    # But for the last slot of a cache, which is scratch.
    slots = torch.randperm(len(cache) * 64 - 1, device=device)[:40].int()
    latents = torch.randn(40, 576, device=device, dtype=cache.dtype)
    weight, angles = torch.ones(512, device=device).bfloat16(), torch.rand(40, 32, device=device)
    write = bound_function("norm_rope_write_latents", "torch", "triton")
    write(latents, cache, weight, angles, angles, slots, 1e-6)
    write(latents, far["cache"], weight, angles, angles, slots + others * 64, 1e-6)
    assert equal(far["cache"][others:], cache)
    assert far["cache"][:others].isnan().all()


@pytest.mark.parametrize("cache", ["int8", "float8_e4m3fn"])
def test_triton_narrow_caches(kernels, device, cache):
    """What is written is what the reference writes, bit for bit, and what is read is judged like
    any cache.
    """
    scales = {"k_scale": by_head(0.03, 2), "v_scale": by_head(0.02, 2)}
    arguments = paged(generator("narrow"), "bfloat16", [33, 20, 50], [1, 1, 9], (4, 2), 64, 16)
    rng, shape = generator("narrow cache"), arguments["kv"].shape
    kv = np.clip(rng.normal(size=shape) * 30, -120, 120).astype(DTYPES.get(cache, np.int8))
    judge("paged_attention", arguments | {"kv": kv} | scales, device)
    k, v = normal(rng, "bfloat16", 9, 2, 64), normal(rng, "bfloat16", 9, 2, 64)
    k[0, 0, :3] = np.nan, 1e4, -1e4
    slots = np.array([3, 9, -1, 17, 0, 5, 40, 41, 42], np.int32)
    given = {"kv": kv, "k": k, "v": v, "slots": slots} | scales
    (want,), (got,) = oracle("write_kv", given), run("write_kv", "torch", "triton", given, device)
    assert got[:-1].tobytes() == want.astype(kv.dtype)[:-1].tobytes()


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17])
@pytest.mark.parametrize(("k", "n"), [(1024, 96), (1030, 35)])
def test_triton_products_of_few_rows(kernels, device, rows, k, n):
    arguments = _product(generator("few rows"), "bfloat16", rows, k, n)
    judge("linear", arguments, device)
    judge("linear", arguments | {"bias": None}, device)
    judge("logits", {"x": arguments["x"], "weight": arguments["weight"]}, device)


def measured_products():
    """(n, k, blocks) of what `configs.json` has of products of one row, by chip and shape."""
    chips = json.loads((HERE.parents[2] / "gpu/kernels/configs.json").read_text())["chips"]
    for entries in chips.values():
        for name, setting in entries.items():
            if name.startswith("gemv/"):
                yield *map(int, name.removeprefix("gemv/").split("x")), setting


@pytest.mark.parametrize(("n", "k", "setting"), list(measured_products()))
def test_triton_products_by_blocks_that_were_measured(kernels, device, monkeypatch, n, k, setting):
    from twinfer.gpu.kernels import gemv

    real = gemv.config
    sizes = []

    def config(kernel, *variants):
        if kernel != "gemv":
            return real(kernel, *variants)
        sizes.extend(variants)
        return setting if variants else real(kernel)

    monkeypatch.setattr(gemv, "config", config)
    few = 37  # rows that no block divides, and blocks enough for both ends
    arguments = _product(generator("measured"), "bfloat16", 1, k, few) | {"bias": None}
    judge("linear", arguments, device)
    assert sizes == [f"{few}x{k}"]
    two = _product(generator("measured"), "bfloat16", 2, k, few) | {"bias": None}
    judge("linear", two, device)
    assert sizes == [f"{few}x{k}"]


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("op", ["gated_mlp", "gelu_gated_mlp"])
def test_triton_gated_products_of_few_rows(kernels, device, rows, bias, op):
    rng = generator("few gated rows")
    up, down = (_product(rng, "bfloat16", rows, k, n) for k, n in ((1030, 70), (35, 50)))
    arguments = {
        **{"x": up["x"], "gate_up": up["weight"], "gate_up_bias": up["bias"] if bias else None},
        **{"down": down["weight"], "down_bias": down["bias"] if bias else None},
    }
    judge(op, arguments, device)


@pytest.mark.parametrize(
    ("dtype", "tokens", "experts", "k", "dim", "inter"),
    [
        ("bfloat16", 1, 5, 3, 70, 35),
        ("bfloat16", 4, 33, 8, 130, 66),
        ("float32", 3, 5, 2, 70, 35),
        ("bfloat16", 5, 40, 8, 130, 66),  # blocks of 16 rows, most experts without any
        ("float16", 90, 6, 2, 96, 64),  # of 32
        ("bfloat16", 130, 6, 2, 96, 64),  # of 64
        ("bfloat16", 150, 3, 2, 64, 160),  # of 128
        ("float32", 40, 3, 3, 70, 35),
    ],
)
def test_triton_experts(kernels, device, dtype, tokens, experts, k, dim, inter):
    """By choice and by blocks of rows; some choices are of no expert, of which no weight is read."""
    rng = generator("triton experts")
    arguments = mixture(rng, dtype, tokens, experts, k, dim, inter)
    arguments["experts"][-1, -1] = -1
    arguments["experts"][0, 0] = experts
    unused = np.setdiff1d(np.arange(experts), arguments["experts"])
    arguments["gate_up"][unused], arguments["down"][unused] = np.nan, np.nan
    first = judge("moe_experts", arguments, device)
    judge("moe_experts", arguments | {"gelu": True}, device)
    (second,) = run("moe_experts", "torch", "triton", arguments, device)
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("experts", [3, 40])
@pytest.mark.parametrize("choices", [7, 33, 70, 150, 300])
def test_triton_blocks_of_experts(kernels, device, choices, experts, rows):
    """Programs find all choices of each expert in their order, `rows` at a time, and no other."""
    import torch

    from twinfer.gpu.kernels.moe import sorted_by_expert
    from twinfer.gpu.kernels.moe_narrow import blocks_of, words_of

    from .blocks_kernel import blocks_kernel

    rng = np.random.default_rng(choices)
    ids = rng.integers(-1, experts + 1, choices).astype(np.int32)
    chosen, found = torch.from_numpy(ids).to(device), words_of(choices, 128)
    order, starts = (chosen, chosen) if found else sorted_by_expert(chosen, experts)
    number, direct = blocks_of(choices, experts, rows, found)
    assert direct == (150 <= choices <= experts * rows)
    expert_of = torch.full((number,), -7, dtype=torch.int32, device=device)
    choices_of = torch.full((number, rows), -7, dtype=torch.int32, device=device)
    blocks_kernel[(1, number)](
        order, starts, expert_of, choices_of, EXPERTS=experts, BLOCK_M=rows, BLOCK_E=64,
        FOUND=found, DIRECT=direct,
    )  # fmt: skip
    got = [
        (int(e), [c for c in own.tolist() if c >= 0])
        for e, own in zip(expert_of.cpu(), choices_of.cpu(), strict=True)
        if e < experts
    ]
    want = []
    for e in range(experts):
        own = np.flatnonzero(ids == e).tolist()
        want += [(e, own[i : i + rows]) for i in range(0, len(own), rows)]
    assert sorted(got) == want


def test_triton_sorts_many_choices(kernels, device):
    """More than one block of choices, by far the most of one expert."""
    setting = kernels.config("moe_sort")
    before = dict(setting)
    try:
        setting["block"] = 64
        arguments = mixture(generator("many choices"), "bfloat16", 150, 4, 2, 64, 32)
        arguments["experts"][10:140, 0], arguments["experts"][10:140, 1] = 2, -1
        judge("moe_experts", arguments, device)
    finally:
        setting.update(before)


@pytest.mark.parametrize("lengths", [[250], [4000, 1, 65, 250, 64, 900, 2, 130]], ids=["1", "8"])
def test_triton_launches_overlap_without_a_trace(kernels, device, monkeypatch, lengths):
    """Layers of some tokens in a graph, whose kernels start before the last one has ended: the
    bits of those in turn. The last slot of each request is written by each layer, beside it.
    """
    if not kernels.overlap()["OVERLAP"]:
        pytest.skip("launches do not overlap here")
    import torch

    from twinfer.gpu.kernels import attention, cache, gemv, rows
    from twinfer.ops import resolve
    from twinfer.ops.implement import preferred

    ops = resolve("torch", preferred("torch", "cuda")).bind()
    torch.manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, device=device, dtype=torch.bfloat16) * shape[-1] ** -0.5

    shapes = (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)
    layers = [[normal(*shape) for shape in shapes] for _ in range(12)]
    ones, head_ones = (torch.ones(n, device=device, dtype=torch.bfloat16) for n in (1024, 128))
    tokens, most = len(lengths), 64  # pages of a request
    first, kv = normal(tokens, 1024) * 32, normal(12, tokens * most + 4, 64, 16, 128) * 11
    angles = torch.rand(tokens, 64, device=device)
    tables = [[*range(i * most, (i + 1) * most)] for i in range(tokens)]
    last = [i * most * 64 + length - 1 for i, length in enumerate(lengths)]
    pages, start, lens, counts, slots = (
        torch.tensor(x, dtype=torch.int32, device=device)
        for x in (tables, [*range(tokens + 1)], lengths, [tokens] * 2, last)
    )

    def run_layers():
        hidden, residual, cached = first.clone(), torch.zeros_like(first), kv.clone()
        for (qkv, o, gate_up, down), layer in zip(layers, cached, strict=True):
            hidden, residual = ops.fused_add_rms_norm(hidden, residual, ones, 1e-6)
            given = (
                ops.linear(hidden, qkv, None),
                layer,
                head_ones,
                head_ones,
                angles,
                angles,
                slots,
                1e-6,
            )
            q, layer = ops.norm_rope_write_kv(*given)
            mean = ops.paged_attention(q, layer, pages, start, lens, counts, 128**-0.5, 0, 0.0, 1)
            hidden = ops.linear(mean.view(tokens, -1), o, None)
            hidden, residual = ops.fused_add_rms_norm(hidden, residual, ones, 1e-6)
            hidden = ops.gated_mlp(hidden, gate_up, None, down, None)
        return hidden, residual, cached

    # which both runs and captures them: counters between programs are a stream's
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run_layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = run_layers()
    for module in (attention, cache, gemv, rows):
        monkeypatch.setattr(
            module, "overlap", lambda early=False: {"OVERLAP": 0, "launch_pdl": False}
        )
    want = run_layers()
    assert want[0].isfinite().all()
    assert want[0].abs().max() > 0
    for _ in range(100):
        for x in got:
            x.fill_(float("nan"))
        graph.replay()
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y)


def test_a_step_begins_with_launches_that_do_not_overlap(kernels):
    """Kernels read before their wait what steps before have written; see `overlap.py`."""
    from torch._inductor import config

    from twinfer.gpu import step_kernels
    from twinfer.ops.implement import IMPLEMENTATIONS

    for op in ("embedding", "vocab_parallel_embedding"):
        assert "triton" not in IMPLEMENTATIONS.get((op, "torch"), {})
    assert not hasattr(step_kernels, "overlap")
    assert not getattr(config.triton, "enable_pdl", False)


def test_triton_greedy_in_parts(kernels, device):
    """Ties between parts go to the lower id; a row with what is no number, in whatever part,
    gets no token.
    """
    logits = generator("greedy parts").normal(size=(5, 40000)).astype(np.float32)
    logits[0, [39999, 5000, 21000]] = 9.0
    logits[1, 39998] = -np.inf
    logits[2, 39999] = 9.0
    logits[3, 1] = np.inf
    logits[4, 20000] = np.nan
    (got,) = run("greedy_sample", "torch", "triton", {"logits": logits}, device)
    assert got.tolist() == [5000, -1, 39999, -1, -1]


@pytest.mark.parametrize(
    ("filtered", "few"),
    [(False, {}), (True, {}), (True, {"few": 2, "listed": 8}), (True, {"few": 1, "listed": 1})],
    ids=["no filters", "few words", "few words or many", "many words"],
)
def test_triton_sampling_in_parts(kernels, device, filtered, few):
    """Limits and draws from sums over parts, and from lists of few words: bit for bit those of the
    reference.
    """
    setting = kernels.config("sample")
    before = dict(setting)
    try:
        setting.update(few)
        if device == "cpu":
            setting.update(block=64, least=64, narrow=32, groups=32)
        rows, vocab = (16, 150) if device == "cpu" else (300, 20000)
        arguments = _sample_arguments(
            generator(f"sampling in parts {filtered}"), rows, vocab, filtered
        )
        (want,), (got,) = (
            oracle("sample", arguments),
            run("sample", "torch", "triton", arguments, device),
        )
        np.testing.assert_array_equal(got, want)
        assert len(set(want)) > rows // 2
    finally:
        setting.update(before)


@pytest.mark.parametrize("filtered", [False, True])
def test_triton_draws_from_words_that_a_mask_leaves(kernels, device, filtered):
    """Masks that leave all words of one part, one word of the last part, and none, in rows without
    filters: parts without a word to draw are passed over.
    """
    setting = kernels.config("sample")
    before = dict(setting)
    try:
        if device == "cpu":
            setting.update(block=64, least=64, narrow=32, groups=32)
        rows, vocab = 16, 250 if device == "cpu" else 40000
        arguments = _sample_arguments(generator("words of masks"), rows, vocab, filtered)
        scores = arguments["scores"]
        scores[2, :-1] = scores[3] = scores[5, 64:] = MASKED
        scores[6, :70] = scores[6, 80:] = MASKED
        arguments |= {
            "top_k": np.zeros(rows, np.int32),
            "top_p": np.full(rows, ONE, np.int32),
            "min_p": np.full(rows, FAR, np.int32),
        }
        (want,) = oracle("sample", arguments)
        (got,) = run("sample", "torch", "triton", arguments, device)
        np.testing.assert_array_equal(got, want)
        assert (want[2], want[3]) == (vocab - 1, 0)
        assert 70 <= want[6] < 80
    finally:
        setting.update(before)


FILTER_FAULTS = (
    "top-k one larger",
    "top-k one smaller",
    "top-p one token more",
    "top-p one token short",
    "min-p last",
)


@pytest.mark.parametrize("groups", [2048, 32, 8])
def test_triton_filters_of_rows_that_tell(kernels, device, monkeypatch, groups):
    """The op's own case, cut to rows that the interpreter has time for: those whose token a
    wrong filter changes. With a group for each word no more than top-k are listed; with few groups
    all words are.
    """
    testing = TESTING["sample"]
    monkeypatch.setitem(kernels.config("sample"), "groups", groups)
    case = next(case for case in ci_cases(testing, "float32") if case.name == "384 rows, filters")
    (want,) = oracle("sample", case.arguments)
    chosen = []
    for fault in FILTER_FAULTS:
        (wrong,) = oracle("sample", case.arguments, testing.mutants[fault])
        rows = np.flatnonzero(wrong != want)
        assert rows.size, fault
        chosen += rows[:4].tolist()
    arguments = case.arguments | {name: case.arguments[name][chosen] for name in testing.rows}
    judge("sample", arguments, device)


@pytest.mark.parametrize("name", ["60 rows", "flat rows"])
def test_triton_penalised_sampling_reads_logits_of_plain_rows_alone(kernels, device, name):
    """Greedy rows of which one thing or nothing is asked, and two that draw."""
    cases = ci_cases(TESTING["penalised_sample"], "float32")
    (arguments,) = (case.arguments for case in cases if case.name == name)
    chosen = [2, 10, *range(34, 41)]
    rows = TESTING["penalised_sample"].rows
    arguments = arguments | {row: arguments[row][chosen] for row in rows}
    judge("penalised_sample", arguments, device)


def test_triton_samples_from_more_than_2_18_words(kernels, device):
    """The op's own case of 262208 words, whose weights have a bit less."""
    setting, testing = kernels.config("sample"), TESTING["sample"]
    before = dict(setting)
    cases = ci_cases(testing, "float32")
    (arguments,) = (case.arguments for case in cases if case.name.startswith("262208 words"))
    try:
        if device == "cpu":
            setting.update(block=16384, least=65536, narrow=16384)
            arguments = arguments | {name: arguments[name][:1] for name in testing.rows}
        judge("sample", arguments, device)
    finally:
        setting.update(before)


def test_triton_kernels_are_all_that_granite_and_phi_layers_call(kernels):
    """A product with a number that is no kernel would send every layer to the compiler."""
    from twinfer.gpu.compilation import compiled_kinds
    from twinfer.gpu.plans import make_plans
    from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
    from twinfer.shared.models.config_json import parse_config
    from twinfer.shared.models.families import model_of
    from twinfer.shared.models.shapes import SHAPES

    for name in ("granite3.3-8b", "phi4-mini"):
        model = parse_config(SHAPES[name])
        gpu = DeviceInfo("cuda", "any", 1 << 37)
        config, _ = resolve(EngineConfig(model="m", backend="torch", max_num_seqs=8), model, gpu)
        plans = make_plans(model, config)
        assert compiled_kinds(model_of(model), plans, config.compilation) == frozenset(), name
        if name.startswith("granite"):
            assert plans["decode"]["scale"].provider == "triton"


def test_triton_operators_pass_opcheck(kernels, device):
    """As operators of their own, with the mutations that they declare and no others."""
    import torch

    from twinfer.ops import REGISTRY
    from twinfer.ops.bindings.torch import opaque
    from twinfer.ops.implement import IMPLEMENTATIONS, preferred
    from twinfer.ops.namespaces.torch_ import from_numpy

    wanted = [op for op in preferred("torch", "cuda") if "triton" in IMPLEMENTATIONS[op, "torch"]]
    assert {"paged_attention", "linear", "sample", "linear_fp8", "moe_experts"} <= set(wanted)
    for name in wanted:
        implementation = IMPLEMENTATIONS[name, "torch"]["triton"]
        opaque(REGISTRY[name], implementation)
        takes = implementation.supports_args or (lambda **_: True)
        case = min(
            (
                c
                for dtype in ("float32", "bfloat16")
                for c in ci_cases(TESTING[name], dtype)
                if takes(**c.arguments)
            ),
            key=lambda c: sum(np.size(v) for v in c.arguments.values()),
        )
        few = (
            {key: case.arguments[key][:2] for key in TESTING[name].rows} if name == "sample" else {}
        )
        given = REGISTRY[name].signature.bind(**case.arguments | few)
        given.apply_defaults()
        # opcheck takes NaN for a difference.
        arguments = [
            from_numpy(np.nan_to_num(v) if v.dtype.kind == "f" else v).to(device)
            if isinstance(v, np.ndarray)
            else v
            for v in given.arguments.values()
        ]
        operator = getattr(torch.ops.twinfer_impl, f"{name}_triton").default
        narrow = [a for a in arguments if isinstance(a, torch.Tensor) and a.itemsize == 1]
        tests = ("test_schema", "test_faketensor")
        if any(a.is_floating_point() for a in narrow):  # torch compares no arguments of float8
            before = [a.view(torch.uint8).clone() for a in narrow]
            operator(*arguments)
            for old, new in zip(before, narrow, strict=True):
                assert torch.equal(old, new.view(torch.uint8)), name
            tests = tests[1:]
        torch.library.opcheck(operator, tuple(arguments), test_utils=tests)
