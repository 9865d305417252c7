"""What programs of the products of experts find to do, written down."""

import triton
import triton.language as tl

from twinfer.gpu.kernels.moe_kernels import block_of_program, rows_of_block


@triton.jit
def blocks_kernel(
    order, starts, expert_of, choices_of, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr, FOUND: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Grid (1, block): its expert, EXPERTS if there is none, and its choices, behind which is -1."""
    expert, first, stop, bits = block_of_program(
        order, starts, EXPERTS, BLOCK_M, BLOCK_E, FOUND, DIRECT
    )
    block = tl.program_id(1)
    tl.store(expert_of + block, expert)
    if expert < EXPERTS:
        _, choice, real = rows_of_block(order, first, stop, bits, BLOCK_M, FOUND)
        place = choices_of + block * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(place, tl.where(real, choice, -1))
