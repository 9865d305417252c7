"""moe_experts_narrow: experts whose weights are narrow or have biases, by the kernels that
`moe.py` has for plain ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ...ops.declare import Array, dtype_name
from ...ops.implement import Refusal
from .gemv import block_rows
from .launch import (
    FLOATS,
    INTERPRETED,
    carve_out,
    config,
    hopper,
    kind_of,
    overlap,
    power_of_2,
    processors,
    triton_kernel,
)
from .moe import MAX_CHOSEN, MAX_EXPERTS, combined, rows_of_block, sort_buffers, sorted_by_expert
from .moe_narrow_kernels import (
    narrow_few_down_kernel,
    narrow_few_gated_kernel,
    narrow_product_kernel,
    sort_and_order_kernel,
)
from .narrow import refused_groups


class _Weight(NamedTuple):
    """A weight of all experts [expert n k], as kernels take it."""

    values: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    bias: torch.Tensor | None
    k: int
    kind: str

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        """Its arrays; what it does not have is stood in for."""
        return tuple(self.values if x is None else x.contiguous() for x in self[:4])

    @property
    def group(self) -> int:
        """Entries along k that share a scale."""
        return self.k if self.scale is None else self.k // self.scale.shape[2]

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        return {
            "KIND": kind_of(self.kind),
            "GROUP": self.group,
            "HAS_ZERO": self.zero is not None,
            "HAS_BIAS": self.bias is not None,
        }

    def block_k(self, most: int) -> int:
        """Entries along k that a program takes at a time: whole groups, or parts of one."""
        block = min(most, power_of_2(self.k))
        # Up to an eighth more than there is costs less than shorter blocks.
        while triton.cdiv(self.k, block) * block > 9 * self.k // 8 and block > max(32, self.group):
            block //= 2
        return min(block, self.group) if block < self.group < self.k else block

    def few_block_k(self, most: int) -> int:
        """The same where all of a row at once is better than no lane without an entry."""
        return min(most, power_of_2(self.k)) if self.group == self.k else self.block_k(most)


class _Between(NamedTuple):
    """What is between gate and up, and down: as the op has it."""

    alpha: float
    limit: float
    gelu: bool

    @property
    def clamped(self) -> bool:
        """Whether it is the activation that `alpha` and `limit` belong to."""
        return self.alpha > 0

    @property
    def constants(self) -> dict[str, bool]:
        """What kernels are compiled for."""
        return {"CLAMPED": self.clamped, "GELU": self.gelu}


def _takes(
    x: Array, weights: Array, experts: Array, gate_up: Array, gate_up_scale: Array | None,
    gate_up_zero: Array | None, gate_up_bias: Array | None, down: Array,
    down_scale: Array | None, down_zero: Array | None, down_bias: Array | None, kind: str,
    alpha: float, limit: float, gelu: bool = False,
) -> bool | Refusal:  # fmt: skip
    if alpha and gelu:
        return Refusal(f"gelu and alpha {alpha}: experts have one activation")
    inter = gate_up.shape[1] // 2
    for k, scale in ((x.shape[1], gate_up_scale), (inter, down_scale)):
        refusal = None if scale is None else refused_groups(k, scale.shape[2])
        if refusal is not None:
            return refusal
    small = gate_up.shape[0] <= MAX_EXPERTS and experts.shape[1] <= MAX_CHOSEN
    return dtype_name(x) in FLOATS and x.ndim == 2 and small


@triton_kernel("moe_experts_narrow", supports_args=_takes)
def moe_experts_narrow(
    x: Array, weights: Array, experts: Array, gate_up: Array, gate_up_scale: Array | None,
    gate_up_zero: Array | None, gate_up_bias: Array | None, down: Array,
    down_scale: Array | None, down_zero: Array | None, down_bias: Array | None, kind: str,
    alpha: float, limit: float, gelu: bool = False,
) -> Array:  # fmt: skip
    """See the op. Gate and up are not rounded; for few tokens no result of an expert is."""
    x = x if x.stride(1) == 1 else x.contiguous()
    weights, experts = weights.contiguous(), experts.contiguous()
    inter = gate_up.shape[1] // 2
    up = _Weight(gate_up.contiguous(), gate_up_scale, gate_up_zero, gate_up_bias, x.shape[1], kind)
    out = _Weight(down.contiguous(), down_scale, down_zero, down_bias, inter, kind)
    few = x.shape[0] <= config("moe_narrow", dtype_name(x))["few"]
    act = _Between(alpha, limit, gelu)
    product = _few if few else _many
    fragments = _fragments_take(x, up, act) and _fragments_take(x, out, act)
    if few and experts.shape[1] <= 16 and fragments:
        product = _few_fragments
    return product(x, weights, experts, up, out, act)


def _mxfp4(x: torch.Tensor, weight: _Weight) -> bool:
    """Whether it is a product in bfloat16 with a weight in mxfp4: scales are powers of two, which
    bfloat16 has.
    """
    powers = weight.scale is not None and weight.scale.dtype == torch.bfloat16
    return powers and (weight.kind, weight.group, dtype_name(x)) == ("fp4", 32, "bfloat16")


def _fragments_take(x: torch.Tensor, weight: _Weight, act: _Between, rows: int = 1) -> bool:
    """Whether `expert_kernel`, which knows no gelu, takes a product whose experts have so many rows
    on average.
    """
    taken = _mxfp4(x, weight) and not act.gelu
    return taken and hopper() and rows <= config("moe_fragments")["rows"]


def _fragments(
    x: torch.Tensor, weight: _Weight, out: torch.Tensor, experts: torch.Tensor,
    order: torch.Tensor | None, starts: torch.Tensor | None, act: _Between, *, gated: bool,
) -> None:  # fmt: skip
    """Rows by the weights of their experts: of each choice, or of choices as they are sorted."""
    from .moe_fragment_kernels import expert_kernel  # in a language of its own

    (tokens, top_k), count, n = experts.shape, weight.values.shape[0], out.shape[1]
    choices = tokens * top_k
    if starts is None:
        m, blocks, setting = 8, choices, config("moe_fragments", "few")
    else:
        # Experts that have twice as many rows as others on average still have one block.
        most = next((rows for rows in (2, 4, 8, 16) if 2 * choices <= rows * count), 32)
        m = max(8, most)
        blocks = choices // m + min(count, choices)
        setting = config("moe_fragments", str(most), str(m))
    block_n, warps = setting["block_n"], setting["warps"]
    values, scale, _, bias = weight.arrays
    launched = expert_kernel[(triton.cdiv(2 * n if gated else n, block_n), blocks)](
        x, values.view(torch.int32), scale, bias, out, experts,
        experts if order is None else order, experts if starts is None else starts, act.alpha,
        act.limit, x.stride(0), N=n, K=weight.k, EXPERTS=count, TOP_K=top_k, GATED=gated,
        SORTED=starts is not None, HAS_BIAS=weight.bias is not None, CLAMPED=act.clamped, M=m,
        BLOCK_N=block_n, WARPS=warps, AHEAD=setting["ahead"], BLOCK_E=power_of_2(count),
        num_warps=warps, maxnreg=setting.get("registers"), **overlap(early=True),
    )  # fmt: skip
    carve_out(launched, setting)


def _few_fragments(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, up: _Weight, down: _Weight,
    act: _Between,
) -> torch.Tensor:  # fmt: skip
    from .moe_fragment_kernels import token_down_kernel

    (tokens, top_k), (count, dim, _) = experts.shape, down.values.shape
    hidden = torch.empty((tokens * top_k, down.k), dtype=x.dtype, device=x.device)
    _fragments(x, up, hidden, experts, None, None, act, gated=True)
    out = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    setting = config("moe_fragments", "few_down")
    block_n, slots = setting["block_n"], power_of_2(top_k)
    warps = max(setting["warps"], slots)
    values, scale, _, bias = down.arrays
    token_down_kernel[(triton.cdiv(dim, block_n), tokens)](
        hidden, values.view(torch.int32), scale, bias, weights, experts, out,
        N=dim, K=down.k, EXPERTS=count, TOP_K=top_k, HAS_BIAS=down.bias is not None,
        BLOCK_N=block_n, WARPS=warps, PARTS=warps // slots, AHEAD=setting["ahead"],
        num_warps=warps, **overlap(early=True),
    )  # fmt: skip
    return out


def _few(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, up: _Weight, down: _Weight,
    act: _Between,
) -> torch.Tensor:  # fmt: skip
    (tokens, top_k), (count, dim, _) = experts.shape, down.values.shape
    setting, inter = config("moe_narrow_few", up.kind), down.k
    hidden = torch.empty((tokens * top_k, inter), dtype=x.dtype, device=x.device)
    block_k = up.few_block_k(setting["block_k"])
    wanted = setting["programs"] * processors()
    block_n = block_rows(inter, setting["entries"] // (2 * block_k), wanted // (tokens * top_k))
    narrow_few_gated_kernel[(triton.cdiv(inter, block_n), tokens * top_k)](
        x, *up.arrays, hidden, experts, act.alpha, act.limit, x.stride(0),
        N=inter, K=dim, EXPERTS=count, TOP_K=top_k, **up.constants, **act.constants,
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=setting["warps"],
        maxnreg=setting.get("registers"),
        # LATE: what comes behind reads the choices before its wait.
        **overlap(),
    )  # fmt: skip
    out = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    choices = power_of_2(top_k)
    entries = setting["down_entries"]
    block_k = down.few_block_k(max(32, min(setting["down_k"], entries // choices)))
    block_n = block_rows(dim, entries // (block_k * choices), wanted // tokens)
    narrow_few_down_kernel[(triton.cdiv(dim, block_n), tokens)](
        hidden, *down.arrays, weights, experts, out,
        N=dim, K=inter, EXPERTS=count, TOP_K=top_k, **down.constants, BLOCK_C=choices,
        BLOCK_N=block_n, BLOCK_K=block_k, AHEAD=setting["down_ahead"],
        num_warps=setting["warps"], maxnreg=setting.get("registers"), **overlap(early=True),
    )  # fmt: skip
    return out


def _many(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, up: _Weight, down: _Weight,
    act: _Between,
) -> torch.Tensor:  # fmt: skip
    (tokens, top_k), (count, dim, _) = experts.shape, down.values.shape
    choices = tokens * top_k
    hidden = torch.empty((choices, down.k), dtype=x.dtype, device=x.device)
    rows = torch.empty((choices, dim), dtype=x.dtype, device=x.device)
    rows_each = triton.cdiv(choices, count)
    fragments = all(_fragments_take(x, weight, act, rows_each) for weight in (up, down))
    found = 0 if fragments else words_of(choices, config("moe_narrow", dtype_name(x))["found"])
    if fragments:
        order, starts, x = _sorted_and_ordered(experts, count, x)
    elif found:
        order, starts = experts, experts
    else:
        order, starts = sorted_by_expert(experts, count)
    products = (x, up, hidden, True), (hidden, down, rows, False)
    for source, weight, target, gated in products:
        if fragments:
            _fragments(source, weight, target, experts, order, starts, act, gated=gated)
        else:
            _product(source, weight, target, order, starts, top_k, act, gated, found)
    return combined(rows, weights, experts, count, x)


def _sorted_and_ordered(
    experts: torch.Tensor, count: int, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `sorted_by_expert` gives, and x in the order of `operand_place`."""
    tokens, k = x.shape
    order, starts, block = sort_buffers(experts, count)
    out = torch.empty((tokens, k), dtype=x.dtype, device=x.device)
    sort_and_order_kernel[(count + tokens,)](
        experts, order, starts, len(order), x, out, x.stride(0), K=k, EXPERTS=count, BLOCK=block,
        BLOCK_K=power_of_2(k), num_warps=8, **overlap(early=True),
    )  # fmt: skip
    return order, starts, out


def words_of(choices: int, most: int) -> int:
    """How many words of 32 bits have one for each of up to `most` choices, 0 for more of them."""
    return power_of_2(triton.cdiv(choices, 32)) if choices <= most else 0


def blocks_of(choices: int, experts: int, block_m: int, found: int) -> tuple[int, bool]:
    """(How many blocks of rows there may be, whether the first of an expert has its number).

    That finds an expert soonest, but other blocks of it come late: too late for a weight to be in
    the L2 still, where most experts have several.
    """
    if found:
        return choices, False
    direct = experts <= choices <= experts * block_m
    return choices // block_m + min(experts, choices), direct


def _product(
    x: torch.Tensor, weight: _Weight, out: torch.Tensor, order: torch.Tensor,
    starts: torch.Tensor, top_k: int, act: _Between, gated: bool, found: int,
) -> None:  # fmt: skip
    """Rows by the weights of their experts, of choices as they were sorted or, if they are `found`,
    as each program finds them.
    """
    (choices, n), count = out.shape, weight.values.shape[0]
    most = rows_of_block(choices, count)
    of_kind, role = f"{weight.kind}/{most}", "up" if gated else "down"
    variants = dtype_name(x), f"{of_kind}/{role}", of_kind, most
    setting = config("moe_narrow_product", *variants)
    block_m, block_n = setting["block_m"], setting["block_n"]
    words = _mxfp4(x, weight) and (INTERPRETED or hopper())
    blocks, direct = blocks_of(choices, count, block_m, found)
    narrow_product_kernel[(triton.cdiv(n, block_n), blocks)](
        x, *weight.arrays, out, order, starts, act.alpha, act.limit, x.stride(0),
        N=n, K=weight.k, EXPERTS=count, TOP_K=top_k, GATED=gated, **weight.constants,
        **act.constants, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=weight.block_k(setting["block_k"]), BLOCK_E=power_of_2(count), FOUND=found,
        DIRECT=direct, STAGES=setting["stages"], LEFT=setting["left"], WORDS=words,
        num_warps=setting["warps"], maxnreg=setting.get("registers"), **overlap(early=True),
    )  # fmt: skip
