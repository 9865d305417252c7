"""paged_attention by Triton kernels: nothing is read on the host, and one or two launches
whatever the lengths.
"""

from __future__ import annotations

import torch
import triton

from ...ops.declare import Array, OpError, dtype_name
from ...ops.implement import Refusal
from ...ops.reference.paged import check_reach
from .counters import COUNTERS, counters
from .decode_kernel import ALL, EACH, WHOLE, decode_kernel
from .launch import (
    FLOATS,
    asks_ahead,
    carve_out,
    config,
    head_scales,
    held_setting,
    hopper,
    overlap,
    power_of_2,
    processors,
    refused_cache,
    shared_memory,
    triton_kernel,
)
from .prefill_kernel import prefill_kernel

MAX_HEAD_SIZE = 512
MAX_GROUP = 32
CACHES = ("int8", "float8_e4m3fn")
HOPPER_SIZES = (64, 128, 256)
"""Sizes of heads that `hopper_kernel` has registers for."""
SWIZZLE = 8
"""Slots after which the layout of shared memory begins anew: pages are multiples of it there."""


def least_shared(size: int, prompts: bool) -> int:
    """Shared memory in bytes that a chip must have for heads of a size, by what the kernels take as
    they are compiled for it.

    Prompts with heads of 256 take 100 to 144 KiB on chips with 99 KiB; those with heads of 512 take
    192 KiB on an H100. One token's heads of 512 take 81 to 130 KiB.
    """
    if size > 256:
        return (200 if prompts else 130) << 10
    return 160 << 10 if size > 128 and prompts else 0


def _takes(
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
) -> bool | Refusal:
    heads, kv_heads = q.shape[1], kv.shape[2] // 2
    if q.shape[2] > MAX_HEAD_SIZE or heads % kv_heads or heads // kv_heads > MAX_GROUP:
        return False
    if dtype_name(q) not in FLOATS or dtype_name(kv) not in (dtype_name(q), *CACHES):
        return False
    prompts, has = max_query_len > 1, shared_memory()
    needs = least_shared(q.shape[2], prompts)
    if has < needs:
        what = "prompts" if prompts else "requests"
        return Refusal(
            f"{what} with heads of {q.shape[2]} need {needs >> 10} KiB of shared memory, this GPU "
            f"has {has >> 10}"
        )
    refusal = refused_cache(kv)
    return True if refusal is None else refusal


@triton_kernel("paged_attention", supports_args=_takes)
def paged_attention(
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
    """See the op. Scores and softmax in float32, weights not normalised and rounded to q's
    dtype, one rounding.
    """
    check_reach(window, chunk)
    if not kv.is_contiguous():
        raise OpError(f"paged_attention: kv of shape {tuple(kv.shape)} must be contiguous")
    if q.stride(2) != 1:
        q = q.contiguous()
    numbers = float(scale), float(soft_cap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tensors = q, kv, page_table, query_start, kv_lens, counts, out
    mixed = max_query_len > 1
    scales = head_scales(k_scale, v_scale)
    _decode(*tensors, *numbers, scales, window, chunk, sinks, mixed)
    if mixed:
        _prefill(*tensors, *numbers, scales, window, chunk, sinks)
    return out


def _shape(q: torch.Tensor, kv: torch.Tensor) -> dict[str, int]:
    heads = kv.shape[2] // 2
    size = kv.shape[3]
    return {
        "GROUP": q.shape[1] // heads,
        "HEADS": heads,
        "SIZE": size,
        "PAGE": kv.shape[1],
        "BLOCK_D": power_of_2(size, 16),
    }


def setting_of(kernel: str, dtype: str, size: int) -> dict[str, int]:
    """The launch configuration for a dtype and a size of heads: of both, of the size, which decides
    how many registers a program has left, or of the dtype.
    """
    return config(kernel, f"{dtype}/{size}", str(size), dtype)


def splitting(
    requests: int, heads: int, slots: int, reach: int, setting: dict[str, int]
) -> tuple[int, int, int]:
    """How requests are split, how many parts are wanted, and how many there are at most, from
    shapes alone; `reach`: of a window or a chunk.

    Few requests have all the parts that pay, each by itself: one of many might be much longer than
    the others. If they leave parts of the GPU idle then, they have as many as run at once. From
    eight on more parts than run at once cost more than they gain.
    """
    longest = min(slots, reach + setting["block_n"]) if reach > 0 else slots
    if longest <= setting["chunk"] or requests * heads > COUNTERS:
        return WHOLE.value, 1, requests
    resident = max(1, setting["programs"] * processors() // heads)
    pay = -(-longest // setting["chunk"])
    if requests * min(pay, setting["parts"]) <= (2 if requests < 8 else 1) * resident:
        parts = max(setting["parts"], min(resident // requests, setting["most"]))
        parts = min(pay, parts)
        return EACH.value, parts, requests * parts
    return ALL.value, resident, requests + resident


def _decode(
    q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, query_start: torch.Tensor,
    kv_lens: torch.Tensor,
    counts: torch.Tensor, out: torch.Tensor, scale: float, soft_cap: float,
    scales: tuple[torch.Tensor, torch.Tensor] | None, window: int, chunk: int,
    sinks: torch.Tensor | None, mixed: bool,
) -> None:  # fmt: skip
    shape = _shape(q, kv)
    tokens = min(q.shape[0], kv_lens.shape[0]) if mixed else q.shape[0]
    held = held_setting(q, kv, tokens, scales is not None)
    if held:
        tensors = q, kv, page_table, kv_lens, counts, out, sinks
        _decode_held(*tensors, scale, soft_cap, shape, window, chunk, mixed, tokens, held)
        return
    setting = setting_of("decode", dtype_name(q), shape["BLOCK_D"])
    slots = page_table.shape[1] * shape["PAGE"]
    split, wanted, parts = splitting(tokens, shape["HEADS"], slots, window or chunk, setting)
    sums = marks = arrived = out
    if split != WHOLE.value:
        each = parts * q.shape[1]
        sums = torch.empty(each * shape["BLOCK_D"], dtype=torch.float32, device=q.device)
        marks = torch.empty(each * 2, dtype=torch.float32, device=q.device)
        arrived = counters(q.device)
    launched = decode_kernel[(shape["HEADS"], parts)](
        q, kv, page_table, kv_lens, counts, out, out if sinks is None else sinks, sums, marks,
        arrived, scale, soft_cap, *(scales or (out, out)),
        q.stride(0), q.stride(1), page_table.stride(0), wanted, tokens, kv_lens.shape[0],
        MIXED=mixed, WINDOW=window, CHUNK=chunk, CAPPED=soft_cap > 0, SINKS=sinks is not None,
        SCALED=scales is not None, LEAST=setting["chunk"], MOST=setting["most"],
        FEW=setting.get("few", 0),
        BLOCK_G=power_of_2(shape["GROUP"], 16), BLOCK_N=setting["block_n"],
        BLOCK_R=power_of_2(kv_lens.shape[0], 2) if split == ALL.value else 2,
        STAGES=setting["stages"], SPLIT=split,
        AHEAD=split == ALL.value and not mixed and asks_ahead(q, kv, tokens, scales is not None),
        num_warps=setting["warps"],
        **shape, **overlap(),
    )  # fmt: skip
    carve_out(launched, setting)


def _decode_held(
    q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, kv_lens: torch.Tensor,
    counts: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None, scale: float,
    soft_cap: float, shape: dict[str, int], window: int, chunk: int, mixed: bool, tokens: int,
    setting: dict[str, int],
) -> None:  # fmt: skip
    from .held_decode_kernel import held_decode_kernel  # in a language of its own

    heads, size, page, warps = shape["HEADS"], shape["SIZE"], shape["PAGE"], setting["warps"]
    longest = page_table.shape[1] * page
    longest = min(longest, window or chunk or longest)
    resident = max(1, setting["programs"] * processors() // heads)
    wanted = min(resident, tokens * triton.cdiv(longest, 16 * warps))
    parts = wanted + tokens
    sums = marks = arrived = out
    split = longest > setting["slots"] * warps
    if split:
        each = parts * q.shape[1]
        sums = torch.empty(each * size, dtype=torch.float32, device=q.device)
        marks = torch.empty(each * 2, dtype=torch.float32, device=q.device)
        arrived = counters(q.device)
    held_decode_kernel[(heads, parts if split else tokens)](
        q, kv, page_table, kv_lens, counts, out, out if sinks is None else sinks, sums, marks,
        arrived, scale, soft_cap, q.stride(0), q.stride(1), page_table.stride(0), wanted, tokens,
        kv_lens.shape[0], MIXED=mixed, GROUP=shape["GROUP"], HEADS=heads, SIZE=size, PAGE=page,
        WINDOW=window, CHUNK=chunk, CAPPED=soft_cap > 0, SINKS=sinks is not None, SPLIT=split,
        AHEAD=not mixed, WARPS=warps, SLOTS=setting["slots"],
        ROWS=power_of_2(shape["GROUP"]), REQUESTS=power_of_2(tokens), num_warps=warps,
        **overlap(),
    )  # fmt: skip


def _prefill(
    q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, query_start: torch.Tensor,
    kv_lens: torch.Tensor,
    counts: torch.Tensor, out: torch.Tensor, scale: float, soft_cap: float,
    scales: tuple[torch.Tensor, torch.Tensor] | None, window: int, chunk: int,
    sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    shape, tokens, requests = _shape(q, kv), q.shape[0], kv_lens.shape[0]
    block_r = power_of_2(requests + 1)
    variant = {
        "WINDOW": window,
        "CHUNK": chunk,
        "SINKS": sinks is not None,
        "CAPPED": soft_cap > 0,
    }
    sinks = out if sinks is None else sinks
    if hopper() and scales is None and _fits_hopper(q, kv, shape, scale):
        tensors = q, kv, page_table, query_start, kv_lens, counts, out, sinks
        _prefill_hopper(*tensors, scale, soft_cap, shape, variant)
        return
    setting = setting_of("prefill", dtype_name(q), shape["BLOCK_D"])
    # Small blocks where large ones would not fill the GPU.
    many = tokens * q.shape[1] // setting["block_m"] >= setting["blocks"]
    block_m = max(setting["block_m" if many else "few_m"], power_of_2(shape["GROUP"]))
    blocks = triton.cdiv(tokens, block_m // shape["GROUP"]) + requests
    prefill_kernel[(shape["HEADS"], blocks)](
        q, kv, page_table, query_start, kv_lens, counts, out, sinks, scale, soft_cap,
        *(scales or (out, out)), tokens, requests,
        q.stride(0), q.stride(1), page_table.stride(0), SCALED=scales is not None,
        BLOCK_M=block_m, BLOCK_N=setting["block_n"], BLOCK_R=block_r,
        STAGES=setting["stages"], num_warps=setting["warps"], **variant, **shape, **overlap(),
    )  # fmt: skip


def _prefill_hopper(
    q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, query_start: torch.Tensor,
    kv_lens: torch.Tensor, counts: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor,
    scale: float, soft_cap: float, shape: dict[str, int], variant: dict[str, int | bool],
) -> None:  # fmt: skip
    # Gluon is there from this chip on only, and costs a start on others.
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .hopper_kernel import BLOCK_M, REGISTERS, hopper_kernel, merge_kernel

    tokens, requests, heads = q.shape[0], kv_lens.shape[0], shape["HEADS"]
    setting = config("hopper", str(shape["SIZE"]))
    rows = kv.view(kv.shape[0] * shape["PAGE"], -1)
    box = [min(shape["PAGE"], setting["block_n"]), shape["SIZE"]]
    blocks = triton.cdiv(tokens, BLOCK_M.value // shape["GROUP"])
    parts = max(1, min(setting["parts"], processors() // (blocks * heads)))
    mixed = triton.cdiv(setting["waves"] * processors(), heads)
    sums = marks = splits = out
    if parts > 1:
        sums = torch.empty((parts, *q.shape), dtype=torch.float32, device=q.device)
        marks = torch.empty((parts, *q.shape[:2], 2), dtype=torch.float32, device=q.device)
        splits = torch.empty((tokens, heads), dtype=torch.int32, device=q.device)
    lengths = {name: shape[name] for name in ("GROUP", "HEADS", "SIZE")}
    hopper_kernel[(heads, blocks + requests, parts)](
        TensorDescriptor.from_tensor(rows, box, NVMMASharedLayout(128, 16, 2)),
        q, page_table, query_start, kv_lens, counts, out, sinks, sums, marks, splits, scale,
        soft_cap, tokens, requests, rows.shape[0], mixed, q.stride(0), q.stride(1),
        page_table.stride(0), PAGE=shape["PAGE"], BLOCK_N=setting["block_n"],
        BLOCK_R=power_of_2(requests + 1), STAGES=setting["stages"], SPLITS=parts > 1,
        LEAST=setting["least"], num_warps=4, maxnreg=REGISTERS, **lengths, **variant, **overlap(),
    )  # fmt: skip
    if parts > 1:
        merge_kernel[(tokens, heads)](
            sums, marks, splits, counts, sinks, out, tokens, SINKS=variant["SINKS"],
            BLOCK_G=power_of_2(shape["GROUP"]), num_warps=4, **lengths, **overlap(),
        )  # fmt: skip


def _fits_hopper(q: torch.Tensor, kv: torch.Tensor, shape: dict[str, int], scale: float) -> bool:
    """Whether `hopper_kernel` takes a call without scales: no narrow cache, and blocks that are
    made of pages, or pages of blocks.
    """
    if shape["SIZE"] not in HOPPER_SIZES or kv.dtype != q.dtype or q.itemsize != 2 or scale <= 0:
        return False
    block_n = config("hopper", str(shape["SIZE"]))["block_n"]
    page = shape["PAGE"]
    return page % SWIZZLE == 0 and max(block_n, page) % min(block_n, page) == 0
