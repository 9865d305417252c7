"""moe_route and moe_experts: few tokens read their experts' weights choice by choice, more are
sorted by expert first, so that each expert's weight is read once a block of rows.
"""

from __future__ import annotations

import torch
import triton

from ...ops.declare import Array, dtype_name
from ...ops.implement import Refusal
from .gemv import block_columns, block_rows
from .launch import FLOATS, config, overlap, power_of_2, processors, triton_kernel
from .moe_kernels import (
    combine_kernel,
    few_down_kernel,
    few_gated_kernel,
    product_kernel,
    route_kernel,
    sort_kernel,
)

MAX_EXPERTS = 1024
MAX_CHOSEN = 64


def _takes_route(
    logits: Array, slots: Array, top_k: int, renormalize: bool, shift: Array | None = None,
    factor: Array | None = None,
) -> bool:  # fmt: skip
    return dtype_name(logits) in FLOATS and logits.shape[1] <= MAX_EXPERTS and top_k <= MAX_CHOSEN


@triton_kernel("moe_route", supports_args=_takes_route, row_invariant=True)
def moe_route(
    logits: Array, slots: Array, top_k: int, renormalize: bool, shift: Array | None = None,
    factor: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """See the op: a row is one program's, or one of a few."""
    shift, factor = (None if x is None else x.contiguous() for x in (shift, factor))
    return _route(logits, shift, slots, top_k, renormalize, 1.0, factor, score="")


def _takes_sigmoid(
    logits: Array,
    bias: Array,
    slots: Array,
    top_k: int,
    renormalize: bool,
    groups: int,
    groups_kept: int,
    scale: float,
) -> bool | Refusal:
    if groups_kept < groups:
        return Refusal(f"experts in groups, of which {groups_kept} of {groups} are kept")
    return _takes_route(logits, slots, top_k, renormalize)


@triton_kernel("moe_route_sigmoid", supports_args=_takes_sigmoid, row_invariant=True)
def moe_route_sigmoid(
    logits: Array,
    bias: Array,
    slots: Array,
    top_k: int,
    renormalize: bool,
    groups: int,
    groups_kept: int,
    scale: float,
) -> tuple[Array, Array]:
    """See the op."""
    return _route(logits, bias.contiguous(), slots, top_k, renormalize, scale, score="sigmoid")


def _takes_biased(logits: Array, bias: Array, slots: Array, top_k: int, renormalize: bool) -> bool:
    return _takes_route(logits, slots, top_k, renormalize)


@triton_kernel("moe_route_biased", supports_args=_takes_biased, row_invariant=True)
def moe_route_biased(
    logits: Array, bias: Array, slots: Array, top_k: int, renormalize: bool
) -> tuple[Array, Array]:
    """See the op."""
    return _route(logits, bias.contiguous(), slots, top_k, renormalize, 1.0, score="softmax")


def _route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    slots: torch.Tensor,
    top_k: int,
    renormalize: bool,
    scale: float,
    factor: torch.Tensor | None = None,
    *,
    score: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, times the factors of their experts, and experts; a bias is added to sigmoids, to
    shares of a softmax, or to the logits themselves, as `score` says.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, experts = logits.shape
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    setting, width = config("moe_route"), power_of_2(experts)
    # A row is one warp's: the largest of several warps' would be found behind a barrier.
    several = max(1, min(setting["entries"] // width, power_of_2(max(1, rows // processors()))))
    route_kernel[(triton.cdiv(rows, several),)](
        logits, logits if bias is None else bias, logits if factor is None else factor,
        slots.contiguous(), weights, ids, rows, scale, logits.stride(0),
        EXPERTS=experts, TOP_K=top_k, HAS_BIAS=bias is not None, HAS_FACTOR=factor is not None,
        SCORE=score, RENORMALIZE=renormalize,
        ROWS=several, BLOCK_E=width, BLOCK_K=power_of_2(top_k),
        num_warps=min(setting["warps"], several),
        **overlap(early=True),
    )  # fmt: skip
    return weights, ids


def _takes_experts(
    x: Array, weights: Array, experts: Array, gate_up: Array, down: Array, gelu: bool = False
) -> bool:
    same = dtype_name(x) == dtype_name(gate_up) == dtype_name(down)
    small = gate_up.shape[0] <= MAX_EXPERTS and experts.shape[1] <= MAX_CHOSEN
    return same and dtype_name(x) in FLOATS and x.ndim == 2 and small


@triton_kernel("moe_experts", supports_args=_takes_experts)
def moe_experts(
    x: Array, weights: Array, experts: Array, gate_up: Array, down: Array, gelu: bool = False
) -> Array:
    """See the op. Gate and up are not rounded; for few tokens no result of an expert is."""
    x = x if x.stride(1) == 1 else x.contiguous()
    gate_up, down, weights, experts = (y.contiguous() for y in (gate_up, down, weights, experts))
    if x.shape[0] <= config("moe", dtype_name(x))["few"]:
        return _few(x, weights, experts, gate_up, down, gelu)
    return _many(x, weights, experts, gate_up, down, gelu)


def _few(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gelu: bool,
) -> torch.Tensor:
    (tokens, top_k), (count, dim, inter) = experts.shape, down.shape
    setting = config("moe_few")
    hidden = torch.empty((tokens * top_k, inter), dtype=x.dtype, device=x.device)
    block_k = block_columns(dim, setting["block_k"])
    block_n = block_rows(
        inter, setting["entries"] // (2 * block_k),
        setting["programs"] * processors() // (tokens * top_k),
    )  # fmt: skip
    few_gated_kernel[(triton.cdiv(inter, block_n), tokens * top_k)](
        x, gate_up, hidden, experts, x.stride(0),
        N=inter, K=dim, EXPERTS=count, TOP_K=top_k, GELU=gelu, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=setting["warps"], **overlap(early=True),
    )  # fmt: skip
    out = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    block_k = block_columns(inter, setting["block_k"])
    block_n = block_rows(
        dim, setting["entries"] // block_k, setting["programs"] * processors() // tokens
    )
    few_down_kernel[(triton.cdiv(dim, block_n), tokens)](
        hidden, down, weights, experts, out,
        N=dim, K=inter, EXPERTS=count, TOP_K=top_k, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=setting["warps"], **overlap(early=True),
    )  # fmt: skip
    return out


def _many(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gelu: bool,
) -> torch.Tensor:
    (tokens, top_k), (count, dim, inter) = experts.shape, down.shape
    choices = tokens * top_k
    order, starts = sorted_by_expert(experts, count)
    hidden = torch.empty((choices, inter), dtype=x.dtype, device=x.device)
    rows = torch.empty((choices, dim), dtype=x.dtype, device=x.device)
    _product(x, gate_up, hidden, order, starts, top_k, gated=True, gelu=gelu)
    _product(hidden, down, rows, order, starts, top_k, gated=False)
    return combined(rows, weights, experts, count, x)


def sort_buffers(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What `sorted_choices` writes to, and how many choices it takes at a time."""
    choices = experts.numel()
    order = torch.empty(choices, dtype=torch.int32, device=experts.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=experts.device)
    return order, starts, min(config("moe_sort")["block"], power_of_2(choices))


def sorted_by_expert(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(choices sorted by their experts, where those of each begin)."""
    setting, choices = config("moe_sort"), experts.numel()
    order, starts, block = sort_buffers(experts, count)
    sort_kernel[(count,)](
        experts, order, starts, choices,
        EXPERTS=count, BLOCK=block,
        # Sums of few choices need no barriers between warps.
        num_warps=min(setting["warps"], max(1, block // 128)), **overlap(early=True),
    )  # fmt: skip
    return order, starts


def combined(
    rows: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, count: int, x: torch.Tensor
) -> torch.Tensor:
    """The results of all choices [choice dim], added up by token in the dtype of x."""
    (tokens, top_k), dim = experts.shape, rows.shape[1]
    out = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    setting = config("moe_combine")
    combine_kernel[(tokens, triton.cdiv(dim, setting["block"]))](
        rows, weights, experts, out,
        N=dim, EXPERTS=count, TOP_K=top_k, BLOCK=setting["block"], num_warps=setting["warps"],
        **overlap(early=True),
    )  # fmt: skip
    return out


def rows_of_block(choices: int, experts: int) -> str:
    """Rows of a block: where experts have about as many, some have more, which would be a second
    block that reads the weight again.
    """
    return next((str(rows) for rows in (16, 32, 64) if choices < rows * experts), "128")


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    top_k: int,
    *,
    gated: bool,
    gelu: bool = False,
) -> None:
    """Rows by the weights of their experts; which blocks they are cut into follows from shapes."""
    choices, (count, n, k) = order.shape[0], weight.shape
    n = n // 2 if gated else n
    setting = config("moe_product", dtype_name(x), rows_of_block(choices, count))
    block_m = setting["block_m"]
    blocks = choices // block_m + min(count, choices)
    product_kernel[(triton.cdiv(n, setting["block_n"]), blocks)](
        x, weight, out, order, starts, x.stride(0),
        N=n, K=k, EXPERTS=count, TOP_K=top_k, GATED=gated, GELU=gelu, BLOCK_M=block_m,
        BLOCK_N=setting["block_n"], BLOCK_K=setting["block_k"], BLOCK_E=power_of_2(count),
        STAGES=setting["stages"], num_warps=setting["warps"], **overlap(early=True),
    )  # fmt: skip
