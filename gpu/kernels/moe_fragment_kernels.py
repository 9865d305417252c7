"""The products of a mixture of experts whose weights are fp8, or e2m1 with a scale for each 32
entries of k (mxfp4), on tensor cores: as those of `moe_narrow_kernels.py`, by the means of
`fragment_kernel`.

A thread takes CHUNK neighbouring entries of a row, 16 bytes, at a time; of e2m1 they share a scale.
A step of a program is STEP entries of k for each of its warps, next to each other; k may end within
a step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import DistributedLinearLayout
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .fragment_kernel import STEP, fp4_operand, fp8_operand, step_layout, tokens_operand
from .moe_narrow_kernels import _between
from .overlap import wait


@gluon.constexpr_function
def _chunk(kind):
    """Entries of 16 bytes of a row."""
    return 32 if kind == "fp4" else 16


@gluon.constexpr_function
def _words(warps, rows, kind):
    """Which thread reads what of a step [warps, rows, chunks, 4 words]: four of a warp share a row,
    and have neighbouring chunks of it; of fp8 once more behind those of all four.
    """
    return DistributedLinearLayout(
        [
            [0, 0, 0, 1],
            [0, 0, 0, 2],
            *([0, 8 << i, 0, 0] for i in range((rows // 8).bit_length() - 1)),
            *([] if kind == "fp4" else [[0, 0, 4, 0]]),
        ],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1 << i, 0, 0, 0] for i in range(warps.bit_length() - 1)],
        [],
        [warps, rows, 4 if kind == "fp4" else 8, 4],
    )


@gluon.constexpr_function
def _tokens(warps, rows, kind):
    """Which thread reads what of a step of x [warps, rows, STEP]: what it has of a weight's row."""
    return (
        step_layout(warps, rows, 5, False) if kind == "fp4" else step_layout(warps, rows, 4, True)
    )


@gluon.jit
def _sums(
    weight, scale, of_weight, real, of_sum, sum_real, x, of_x, x_real, K: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, PARTS: gl.constexpr, M: gl.constexpr,
    BLOCK_N: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr, OVERLAP: gl.constexpr,
    LAYOUT: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Sums [warp n m] float32 of each warp over its part of k: of rows `of_weight` [warp n 1 1]
    of the weight, in the layout of sums `of_sum` [warp n], by rows at `of_x` [warp m 1] of x. Warp
    w takes the steps w % PARTS, then every PARTS-th. With OVERLAP it waits for x when it has asked
    for AHEAD steps.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    steps: gl.constexpr = (K + PARTS * STEP - 1) // (PARTS * STEP)
    chunk: gl.constexpr = _chunk(KIND)
    chunks: gl.constexpr = STEP // chunk
    groups: gl.constexpr = K // GROUP
    fp4: gl.constexpr = KIND == "fp4"
    w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    part = w[:, None, None, None] % PARTS
    t = gl.arange(0, chunks, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    g = part * chunks + t[None, None, :, None]
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    words = weight + of_weight * (K // chunk * 4) + g * 4 + j[None, None, None, :]
    # A scale is that of a thread's chunk, or multiplies sums: of a step, or of all.
    scales = scale + of_weight * groups + g
    sum_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None]
    of_scale = scale + of_sum * groups
    x_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, TOKENS)))[:, None, None]
    i = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, TOKENS)))[None, None, :]
    at = x_w % PARTS * STEP + i
    total = gl.zeros([WARPS, BLOCK_N, M], gl.float32, layout=mma)
    asked, shares = (), ()
    for s in gl.static_range(steps + AHEAD):
        if s == AHEAD:
            wait(OVERLAP)
        if s < steps:
            inside = real & (g + s * (PARTS * chunks) < K // chunk)
            here = words + s * (PARTS * chunks * 4)
            asked += (gl.load(here, mask=inside, other=0, cache_modifier=".cg"),)  # type: ignore[assignment]
            if fp4:
                of_chunk = scales + s * (PARTS * chunks)
                shares += (gl.load(of_chunk, mask=inside, other=0.0),)  # type: ignore[assignment]
            elif (groups > 1) | (s == 0):
                first = (sum_w % PARTS + s * PARTS) * STEP
                has = sum_real & (first < K)
                shares += (gl.load(of_scale + first // GROUP, mask=has, other=0.0),)  # type: ignore[assignment]
        if s >= AHEAD:
            if fp4:
                a = fp4_operand(asked[s - AHEAD], shares[s - AHEAD], BLOCK_N, WARPS)
            else:
                a = fp8_operand(asked[s - AHEAD], BLOCK_N, WARPS, gl.bfloat16)
            a = gl.convert_layout(a, left, assert_trivial=True)
            k = at + (s - AHEAD) * (PARTS * STEP)
            b = tokens_operand(x + of_x + k, x_real & (k < K), KIND, M, WARPS)
            b = gl.convert_layout(b, right, assert_trivial=True)
            if fp4 | (groups == 1):
                total = mma_v2(a, b, total)
            else:
                now = mma_v2(a, b, gl.zeros([WARPS, BLOCK_N, M], gl.float32, layout=mma))
                total += now * shares[s - AHEAD][:, :, None]
    if (not fp4) & (groups == 1):
        total = total * shares[0][:, :, None]  # type: ignore[misc]
    return total


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _row(n, N: gl.constexpr, HALVES: gl.constexpr):
    """Which row of an expert's weight is the n-th that programs take: if it lies in two HALVES,
    each is followed by that of the other.
    """
    return n // 2 + n % 2 * N if HALVES else n


@gluon.jit
def _count(word):
    """How many bits are set."""
    return gl.inline_asm_elementwise(
        "popc.b32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _place(words, n, WORDS: gl.constexpr):
    """Which bit of WORDS words of 32 is the n-th that is set."""
    word, place = words[0] + n * 0, n * 0
    for w in gl.static_range(1, WORDS):
        behind = n >= _count(word)
        n = gl.where(behind, n - _count(word), n)
        word = gl.where(behind, words[w], word)
        place = gl.where(behind, 32 * w, place)
    for i in gl.static_range(5):
        here = _count((word >> (place % 32)) & ((1 << (16 >> i)) - 1))
        behind = n >= here
        n = gl.where(behind, n - here, n)
        place = gl.where(behind, place + (16 >> i), place)
    return place


@gluon.jit(do_not_specialize=["alpha", "limit"])
def expert_kernel(
    x, weight, scale, bias, out, experts, order, starts, alpha, limit, x_stride, N: gl.constexpr,
    K: gl.constexpr, EXPERTS: gl.constexpr, TOP_K: gl.constexpr, GATED: gl.constexpr,
    SORTED: gl.constexpr, FOUND: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr, CLAMPED: gl.constexpr, GELU: gl.constexpr, M: gl.constexpr,
    BLOCK_N: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr, HOLD: gl.constexpr,
    BLOCK_E: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid (block of rows of an expert's weight, block of rows of x if SORTED, else choice).

    Choices of an expert are SORTED, or each program finds them among all, of which there are at
    most 32 times FOUND, or a choice is a block of its own. Where they are found, the program of
    every M-th choice of an expert, from its first on, has so many; others leave.

    N results of K entries. If GATED a block of the weight has gate and up of BLOCK_N / 2 of them,
    in turns. Rows of x are those of choices if GATED, else the choices themselves, as they are
    sorted; blocks of up to M of them are one expert's.

    With HOLD words stay asked for ahead: the assembler, which puts loads to where they are used,
    takes none past a second wait, which has nothing left to wait for.
    """
    wait(OVERLAP)
    LAYOUT: gl.constexpr = _words(WARPS, BLOCK_N, KIND)
    TOKENS: gl.constexpr = _tokens(WARPS, M, KIND)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    block = gl.program_id(1)
    if SORTED:
        line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        e = gl.arange(0, BLOCK_E, layout=line)
        begin = gl.load(starts + e, mask=e < EXPERTS, other=0)
        end = gl.load(starts + 1 + e, mask=e < EXPERTS, other=0)
        blocks = (end - begin + M - 1) // M
        last = gl.associative_scan(blocks, 0, _plus)
        expert = gl.sum(((last <= block) & (e < EXPERTS)).to(gl.int32), 0)
        own = e == expert
        first = gl.sum(gl.where(own, begin + (block - last + blocks) * M, 0), 0)
        stop = gl.sum(gl.where(own, end, 0), 0)
        leads = first < stop
    elif FOUND:
        expert = gl.load(experts + block)
        # A warp has all choices of a word, in the order of its lanes.
        lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        words, first, stop = (), 0, 0
        for w in gl.static_range(FOUND):
            i = 32 * w + lane
            own = gl.load(experts + i, mask=i < gl.num_programs(1), other=-1) == expert
            words += (gl.sum(gl.where(own, 1 << lane, 0), 0),)  # type: ignore[assignment]
            first += gl.sum((own & (i < block)).to(gl.int32), 0)
            stop += gl.sum(own.to(gl.int32), 0)
        leads = first % M == 0
    else:
        expert = gl.load(experts + block)
        first = block
        stop = block + 1
        leads = first < stop
    if (expert >= 0) & (expert < EXPERTS) & leads:
        # The rows of the weight: of gate and up in turns, or in two halves.
        of_n: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
        n = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, layout=of_n)
        rows: gl.constexpr = 2 * N if GATED else N
        halves: gl.constexpr = GATED and not CLAMPED
        row = expert.to(gl.int64) * rows + _row(n, N, halves)
        of_sum: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, mma))
        sum_n = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, layout=of_sum)
        sum_row = expert.to(gl.int64) * rows + _row(sum_n, N, halves)
        m = first + gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(2, TOKENS)))
        if SORTED:
            choice = gl.load(order + m, mask=m < stop, other=0)
        elif FOUND:
            choice = _place(words, m, FOUND)
        else:
            choice = m
        of_x = choice // TOP_K if GATED else (m if SORTED else choice)
        of_x = of_x.to(gl.int64) * x_stride
        total = _sums(
            weight, scale, row[None, :, None, None], (n < rows)[None, :, None, None],
            sum_row[None, :], (sum_n < rows)[None, :], x, of_x[None, :, None],
            (m < stop)[None, :, None], K, KIND, GROUP, WARPS, M, BLOCK_N, WARPS, AHEAD,
            OVERLAP if HOLD else 0, LAYOUT, TOKENS,
        )  # fmt: skip
        # Two rows of the weight, gate and up, are one thread's.
        results: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
        end_layout: gl.constexpr = gl.BlockedLayout([2, 1], [4, 8], [WARPS, 1], [0, 1])
        y = gl.convert_layout(gl.sum(total, 0), end_layout)
        line_n = gl.program_id(0) * BLOCK_N + gl.arange(
            0, BLOCK_N, layout=gl.SliceLayout(1, end_layout)
        )
        if HAS_BIAS:
            of_bias = bias + expert.to(gl.int64) * rows + _row(line_n, N, halves)
            y += gl.load(of_bias, mask=line_n < rows, other=0.0).to(gl.float32)[:, None]
        if GATED:
            pairs = y.reshape([results, 2, M]).permute([0, 2, 1])
            gate, up = gl.split(pairs)
            y = _between(gate, up, alpha, limit, CLAMPED, GELU)
        to: gl.constexpr = y.type.layout
        out_m = first + gl.arange(0, M, layout=gl.SliceLayout(0, to))
        out_n = gl.program_id(0) * results + gl.arange(0, results, layout=gl.SliceLayout(1, to))
        target = out_m
        if SORTED and not GATED:
            target = gl.load(order + out_m, mask=out_m < stop, other=0)
        elif FOUND:
            target = _place(words, out_m, FOUND)
        place = out + target.to(gl.int64)[None, :] * N + out_n[:, None]
        mask = (out_m < stop)[None, :] & (out_n < N)[:, None]
        gl.store(place, y.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _chosen(experts, t, choice, TOP_K: gl.constexpr):
    """The experts of choices of token t, -1 where it has no such choice."""
    return gl.load(experts + t * TOP_K + choice, mask=choice < TOP_K, other=-1)


@gluon.jit
def token_down_kernel(
    hidden, weight, scale, bias, weights, experts, out, N: gl.constexpr, K: gl.constexpr,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr,
    AHEAD: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid (block of results, token): the results of its choices, each of which is PARTS warps',
    by weight. WARPS / PARTS is at least TOP_K.
    """
    wait(OVERLAP)
    M: gl.constexpr = 8
    LAYOUT: gl.constexpr = _words(WARPS, BLOCK_N, KIND)
    TOKENS: gl.constexpr = _tokens(WARPS, M, KIND)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    t = gl.program_id(1)
    of_w: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    of_n: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    w = gl.arange(0, WARPS, layout=of_w)
    n = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, layout=of_n)
    expert = _chosen(experts, t, w // PARTS, TOP_K)[:, None, None, None]
    row = expert.to(gl.int64) * N + n[None, :, None, None]
    real = (n < N)[None, :, None, None] & (expert >= 0) & (expert < EXPERTS)
    m = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(2, TOKENS)))[None, :, None]
    x_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, TOKENS)))[:, None, None]
    of_x = (t * TOP_K + x_w // PARTS).to(gl.int64) * K
    own = _chosen(experts, t, x_w // PARTS, TOP_K)
    sum_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None]
    sum_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))
    sum_n = (gl.program_id(0) * BLOCK_N + sum_n)[None, :]
    of = _chosen(experts, t, sum_w // PARTS, TOP_K)
    valid = (of >= 0) & (of < EXPERTS)
    sum_row = of.to(gl.int64) * N + sum_n
    total = _sums(
        weight, scale, row, real, sum_row, valid & (sum_n < N), hidden, of_x,
        (m < 1) & (own >= 0) & (own < EXPERTS), K, KIND, GROUP, PARTS, M, BLOCK_N, WARPS, AHEAD,
        0, LAYOUT, TOKENS,
    )  # fmt: skip
    if HAS_BIAS:
        # One warp of each choice adds it.
        has = valid & (sum_w % PARTS == 0) & (sum_n < N)
        added = gl.load(bias + sum_row, mask=has, other=0.0)
        total += added.to(gl.float32)[:, :, None]
    share = gl.load(weights + t * TOP_K + sum_w // PARTS, mask=valid, other=0.0)
    total = gl.where(valid[:, :, None], total * share[:, :, None], 0.0)
    y = gl.sum(total, 0)
    out_n = gl.program_id(0) * BLOCK_N + gl.arange(
        0, BLOCK_N, layout=gl.SliceLayout(1, gl.SliceLayout(0, mma))
    )
    out_m = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(0, mma)))
    place = out + t.to(gl.int64) * N + out_n[:, None] + out_m[None, :] * 0
    gl.store(place, y.to(out.dtype.element_ty), mask=(out_n < N)[:, None] & (out_m < 1)[None, :])
