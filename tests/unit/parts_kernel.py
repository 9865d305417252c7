"""What each program of the decode kernel is told of its part, as a kernel."""

import triton
import triton.language as tl

from twinfer.gpu.kernels.decode_kernel import _part_of


@triton.jit
def parts_kernel(
    lengths, out, live, requests, wanted, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Grid (item): request, part, parts, blocks a part and the number of the request's first part,
    without windows; parts of one block or more, 128 of a request at most, none of 256 slots.
    """
    item = tl.program_id(0)
    t, split, parts, part, begin = _part_of(
        item, lengths, live, requests, wanted, 0, 0, BLOCK_N, 128, 256, BLOCK_R, BLOCK_N
    )
    out += item * 5
    tl.store(out, t)
    tl.store(out + 1, split)
    tl.store(out + 2, parts)
    tl.store(out + 3, part)
    tl.store(out + 4, begin)
