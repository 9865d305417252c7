"""A mixture of experts: routing, the rows of each expert, and their products.

All sizes are read on the device and the grids depend on shapes alone, so a graph can capture the
launches. With blocks of M rows, the choices of T tokens take at most choices // M + min(experts,
choices) blocks, or if each expert has one of its own experts + choices // M: a program finds the
expert of its block in `starts`, and leaves if there is none.
Few choices are not sorted (`block_of_program`).
"""

import triton
import triton.language as tl

from .arithmetic import activated, dot, exp, sigmoid
from .overlap import wait


@triton.jit
def _ordered(bits):
    """Bits of float32 as integers in the order of the numbers, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["rows"])
def route_kernel(
    logits, bias, factor, slots, weights, experts, rows, scale, row_stride, EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FACTOR: tl.constexpr, SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of ROWS rows): the best experts one after the other. SCORE sigmoid: by sigmoids
    plus bias; softmax: by shares of a softmax plus bias; else by the logits, plus bias if it
    HAS_BIAS. HAS_FACTOR: weights are multiplied by that of their expert.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside = (n < EXPERTS)[None, :] & (row < rows)[:, None]
    b = tl.zeros([BLOCK_E], tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + n, mask=n < EXPERTS, other=0.0).to(tl.float32)
    wait(OVERLAP)
    real = (tl.load(slots + row, mask=row < rows, other=-1) >= 0)[:, None]
    place = logits + row.to(tl.int64)[:, None] * row_stride + n[None, :]
    x = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORE == "":
        x += b[None, :]
    spoiled = tl.max((x != x).to(tl.int32), 1) > 0
    if SCORE == "sigmoid":
        scores = sigmoid(x)
        y = scores + b[None, :]
    elif SCORE == "softmax":
        known = tl.where(x == x, x, float("-inf"))
        e = tl.where(inside, exp(known - tl.max(known, 1)[:, None]), 0.0)
        scores = e / tl.sum(e, 1)[:, None]
        y = scores + b[None, :]
    else:
        scores = x
        y = x
    y = tl.where(x == x, y, float("-inf"))
    # As integers in the same order, whose largest of a warp is one instruction; without -0.
    order = _ordered((y + 0.0).to(tl.int32, bitcast=True))
    top = tl.zeros([ROWS], tl.float32)
    free = n[None, :] < EXPERTS + tl.zeros([ROWS, 1], tl.int32)
    values, ids = tl.zeros([ROWS, BLOCK_K], tl.float32), tl.zeros([ROWS, BLOCK_K], tl.int32)
    for choice in tl.static_range(TOP_K):
        largest = tl.max(tl.where(free, order, -2147483648), 1)
        equal = free & (order == largest[:, None])
        best = _ordered(largest).to(tl.float32, bitcast=True)
        if choice == 0:
            top = best
        found = tl.min(tl.where(equal, n[None, :], EXPERTS), 1)
        here = k[None, :] == choice
        if SCORE != "":
            best = tl.sum(tl.where(n[None, :] == found[:, None], scores, 0.0), 1)
        values = tl.where(here, best[:, None], values)
        ids = tl.where(here, found[:, None], ids)
        free = free & (n[None, :] != found[:, None])
    if SCORE != "":
        chosen = tl.where(k[None, :] < TOP_K, values, 0.0)
        lost = spoiled
        if RENORMALIZE:
            total = tl.sum(chosen, 1)
            total = total + 1e-20 if SCORE == "sigmoid" else tl.maximum(total, 1e-12)
            chosen = chosen / total[:, None]
        share = chosen * scale
    else:
        chosen = tl.where(k[None, :] < TOP_K, exp(values - top[:, None]), 0.0)
        if RENORMALIZE:
            total = tl.sum(chosen, 1)
        else:
            total = tl.sum(tl.where(inside, exp(y - top[:, None]), 0.0), 1)
        # An infinite logit has no finite distance to itself: its row is NaN, as one with a NaN.
        lost = spoiled | (tl.abs(top) == float("inf"))
        share = chosen / total[:, None]
    if HAS_FACTOR:
        chosen_ids = (k < TOP_K)[None, :] & (ids < EXPERTS)
        share *= tl.load(factor + ids, mask=chosen_ids, other=0.0).to(tl.float32)
    share = tl.where(lost[:, None], float("nan"), share)
    out = row[:, None] * TOP_K + k[None, :]
    mask = (row < rows)[:, None] & (k < TOP_K)[None, :]
    tl.store(weights + out, tl.where(real, share, 0.0), mask=mask)
    tl.store(experts + out, tl.where(real, ids, -1), mask=mask)


@triton.jit
def sorted_choices(
    experts, order, starts, choices, e, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the choices of expert e in order, from `starts[e]` on."""
    n = tl.arange(0, BLOCK)
    before, mine = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, choices, BLOCK):
        expert = tl.load(experts + first + n, mask=first + n < choices, other=-1)
        before += ((expert >= 0) & (expert < e)).to(tl.int32)
        mine += (expert == e).to(tl.int32)
    start = tl.sum(before, 0)
    tl.store(starts + e, start)
    if e == EXPERTS - 1:
        tl.store(starts + EXPERTS, start + tl.sum(mine, 0))
    for first in tl.range(0, choices, BLOCK):
        expert = tl.load(experts + first + n, mask=first + n < choices, other=-1)
        own = (expert == e).to(tl.int32)
        tl.store(order + start + tl.cumsum(own, 0) - 1, first + n, mask=own > 0)
        start += tl.sum(own, 0)


@triton.jit(do_not_specialize=["choices"])
def sort_kernel(
    experts, order, starts, choices, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (expert): its choices in order, from `starts[expert]` on."""
    wait(OVERLAP)
    sorted_choices(experts, order, starts, choices, tl.program_id(0), EXPERTS, BLOCK)


@triton.jit
def _bits(word):
    """How many bits of uint32 are set."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _own_choices(experts, expert, block, FIRST: tl.constexpr):
    """(Which of 32 choices from FIRST on are an expert's, as bits; how many; how many of them stand
    before choice `block`). A warp has a choice in each lane.
    """
    lane = tl.arange(0, 32)
    inside = FIRST + lane < tl.num_programs(1)
    own = (tl.load(experts + FIRST + lane, mask=inside, other=-1) == expert).to(tl.int32)
    before = tl.where(FIRST + lane < block, own, 0)
    word = tl.sum(own.to(tl.uint32) << lane.to(tl.uint32), 0).to(tl.uint32)
    return word, tl.sum(own, 0), tl.sum(before, 0)


@triton.jit
def _bit(words, n, WORDS: tl.constexpr):
    """Which bit of WORDS words of 32 is the n-th that is set."""
    word, place = tl.zeros(n.shape, tl.uint32) + words[0], tl.zeros(n.shape, tl.int32)
    for w in tl.static_range(1, WORDS):
        here = _bits(word)
        behind = n >= here
        n = tl.where(behind, n - here, n)
        word = tl.where(behind, words[w], word)
        place = tl.where(behind, 32 * w, place)
    for i in tl.static_range(5):
        here = _bits((word >> (place % 32).to(tl.uint32)) & ((1 << (16 >> i)) - 1))
        behind = n >= here
        n = tl.where(behind, n - here, n)
        place = tl.where(behind, place + (16 >> i), place)
    return place


@triton.jit
def block_of_program(
    order, starts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
    FOUND: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """(The expert of block program_id(1), EXPERTS if there is none; the first of its choices that
    is the block's; where they end; and if FOUND which of all choices are the expert's, as bits).

    FOUND: `order` has the experts of all choices, at most 32 FOUND. The program of every BLOCK_M-th
    choice of an expert, from the first on, has these; others have none. A warp finds that by
    itself. With FOUND 0 choices were sorted. DIRECT: the first block of expert e is block e, which
    is read off, and those behind all these are sought; else blocks of an expert are neighbours.
    """
    block = tl.program_id(1)
    if FOUND:
        expert = tl.load(order + block)
        word, stop, first = _own_choices(order, expert, block, 0)
        words = (word,)
        for w in tl.static_range(1, FOUND):
            word, own, before = _own_choices(order, expert, block, 32 * w)
            words += (word,)  # type: ignore[assignment]
            stop += own
            first += before
        leads = (expert >= 0) & (expert < EXPERTS) & (first % BLOCK_M == 0)
        return tl.where(leads, expert, EXPERTS), first, stop, words
    elif DIRECT:
        if block < EXPERTS:
            first, stop = tl.load(starts + block), tl.load(starts + 1 + block)
            expert = tl.where(first < stop, block, EXPERTS)
        else:
            expert, first, stop = _sought(starts, block - EXPERTS, 1, EXPERTS, BLOCK_M, BLOCK_E)
        return expert, first, stop, (0,)
    else:
        expert, first, stop = _sought(starts, block, 0, EXPERTS, BLOCK_M, BLOCK_E)
        return expert, first, stop, (0,)


@triton.jit
def _sought(
    starts, block, LEFT_OUT: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """(Expert, first choice, end) of a block among those of all experts, the first LEFT_OUT of each
    left out.
    """
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(starts + e, mask=e < EXPERTS, other=0)
    end = tl.load(starts + 1 + e, mask=e < EXPERTS, other=0)
    blocks = tl.maximum((end - begin + BLOCK_M - 1) // BLOCK_M - LEFT_OUT, 0)
    last = tl.cumsum(tl.where(e < EXPERTS, blocks, 0), 0)
    expert = tl.sum(((last <= block) & (e < EXPERTS)).to(tl.int32), 0)
    own = e == expert
    place = begin + (block - last + blocks + LEFT_OUT) * BLOCK_M
    return expert, tl.sum(tl.where(own, place, 0), 0), tl.sum(tl.where(own, end, 0), 0)


@triton.jit
def rows_of_block(order, first, stop, found, BLOCK_M: tl.constexpr, FOUND: tl.constexpr):
    """(Which rows those of a block are among all, which choices they are, and whether they are
    any), of what `block_of_program` gives. If FOUND a choice has its own row.
    """
    m = first + tl.arange(0, BLOCK_M)
    real = m < stop
    if FOUND:
        choice = _bit(found, m, FOUND)
        return choice, choice, real
    else:
        return m, tl.load(order + m, mask=real, other=0), real


@triton.jit
def product_kernel(
    x, weight, out, order, starts, x_stride, N: tl.constexpr, K: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of results, block of rows). GATED: rows are the tokens of choices, the weight has
    2N rows an expert, gate and up (silu of gate, or with GELU its gelu), and results stand in the
    order of experts. Else rows stand in that order, and results in that of the choices.
    """
    wait(OVERLAP)
    expert, first, stop, found = block_of_program(
        order, starts, EXPERTS, BLOCK_M, BLOCK_E, 0, False
    )  # fmt: skip
    if expert < EXPERTS:
        m, choice, real = rows_of_block(order, first, stop, found, BLOCK_M, 0)
        n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        row = (choice // TOP_K if GATED else m).to(tl.int64)
        rows = x + row[:, None] * x_stride
        own_rows = weight + tl.cast(expert, tl.int64) * (N * K * (2 if GATED else 1))
        columns = own_rows + n[None, :] * K
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        even: tl.constexpr = (K % BLOCK_K == 0) & (N % BLOCK_N == 0)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            at = start + k
            if K % BLOCK_K == 0:
                a = tl.load(rows + at[None, :], mask=real[:, None], other=0.0)
            else:
                a = tl.load(rows + at[None, :], mask=real[:, None] & (at < K)[None, :], other=0.0)
            if even:
                w = tl.load(columns + at[:, None])
            else:
                inside = (at < K)[:, None] & (n < N)[None, :]
                w = tl.load(columns + at[:, None], mask=inside, other=0.0)
            acc = dot(a, w, acc)
            if GATED:
                if even:
                    u = tl.load(columns + N * K + at[:, None])
                else:
                    inside = (at < K)[:, None] & (n < N)[None, :]
                    u = tl.load(columns + N * K + at[:, None], mask=inside, other=0.0)
                up = dot(a, u, up)
        if GATED:
            acc = activated(acc, up, GELU)
        target = (m if GATED else choice).to(tl.int64)
        place = out + target[:, None] * N + n[None, :]
        mask = real[:, None] & (n < N)[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(
    rows, weights, experts, out, N: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (token, block of entries): the results of a token's choices [choice N] by weight, added
    in the order of the choices.
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(OVERLAP)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(experts + t * TOP_K + j)
        valid = (expert >= 0) & (expert < EXPERTS)
        weight = tl.load(weights + t * TOP_K + j)
        y = tl.load(rows + (t * TOP_K + j) * N + n, mask=(n < N) & valid, other=0.0)
        total += tl.where(valid, weight * y.to(tl.float32), 0.0)
    tl.store(out + t * N + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def few_gated_kernel(
    x, weight, out, experts, x_stride, N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, GELU: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of results, choice): silu(gate) * up of one token by one expert, or with GELU
    gelu(gate) * up, summed in float32.
    """
    wait(OVERLAP)
    choice = tl.program_id(1)
    expert = tl.load(experts + choice)
    if (expert >= 0) & (expert < EXPERTS):
        n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        row = x + tl.cast(choice // TOP_K, tl.int64) * x_stride
        gate_rows = weight + tl.cast(expert, tl.int64) * (2 * N * K) + n[:, None] * K
        a = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        b = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            at = start + k
            inside = (n < N)[:, None] & (at < K)[None, :]
            y = tl.load(row + at, mask=at < K, other=0.0).to(tl.float32)[None, :]
            g = tl.load(gate_rows + at[None, :], mask=inside, other=0.0)
            u = tl.load(gate_rows + N * K + at[None, :], mask=inside, other=0.0)
            a += g.to(tl.float32) * y
            b += u.to(tl.float32) * y
        y = activated(tl.sum(a, 1), tl.sum(b, 1), GELU)
        tl.store(out + choice.to(tl.int64) * N + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def few_down_kernel(
    hidden, weight, weights, experts, out, N: tl.constexpr, K: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of results, token): the results of its choices by weight, in their order."""
    wait(OVERLAP)
    t = tl.program_id(1).to(tl.int64)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_N], tl.float32)
    for j in range(TOP_K):
        expert = tl.load(experts + t * TOP_K + j)
        valid = (expert >= 0) & (expert < EXPERTS)
        share = tl.load(weights + t * TOP_K + j)
        rows = weight + tl.cast(expert, tl.int64) * (N * K) + n[:, None] * K
        a = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            at = start + k
            inside = (n < N)[:, None] & (at < K)[None, :] & valid
            y = tl.load(hidden + (t * TOP_K + j) * K + at, mask=(at < K) & valid, other=0.0)
            w = tl.load(rows + at[None, :], mask=inside, other=0.0)
            a += w.to(tl.float32) * y.to(tl.float32)[None, :]
        total += tl.where(valid, share * tl.sum(a, 1), 0.0)
    tl.store(out + t * N + n, total.to(out.dtype.element_ty), mask=n < N)
