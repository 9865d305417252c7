"""What ranks exchange of the most probable tokens and of tokens' largest entries, and what all
exchanges share.

Ranks send into each other's memory. Every value travels in a word of twice its size, whose other
half is the number of the exchange. A reader looks at its own memory until all words have that
number: no flag, and nothing that waits for writes to have arrived before a flag may say so.

Each row has a count of its exchanges, which all ranks keep alike, as they make the same calls. Its
words lie in one of two places by turns. Two are enough: who has begun the exchange after the next
one of a row has heard from all that they have ended this one.
"""

import triton
import triton.language as tl

from .arithmetic import scale_of, size_of
from .overlap import wait

SPINS = tl.constexpr(20_000_000)
"""How often a program looks for a peer that does not come: ten seconds or more. Whoever started
the ranks has ended them by then.
"""


@triton.jit
def _numbered(values, number):
    """Values of 32 bits as words of twice that, with the number above."""
    bits = values.to(tl.uint32, bitcast=True).to(tl.uint64)
    return bits | (number.to(tl.uint32).to(tl.uint64) << 32)


@triton.jit
def _behind(words, number, mask):
    """1 if any of the words is of another exchange, else 0."""
    upper = number.to(tl.uint32).to(tl.uint64) << 32
    return tl.max((mask & (((words ^ upper) >> 32) != 0)).to(tl.int32), 0)


@triton.jit
def _awaited(place, number, mask, dtype: tl.constexpr):
    """(values, 1 if they never came, else 0) of the words of exchange `number` at `place`."""
    words = tl.load(place, mask=mask, other=0, volatile=True)
    behind = _behind(words, number, mask)
    spins = 0
    while (behind > 0) & (spins < SPINS):
        words = tl.load(place, mask=mask, other=0, volatile=True)
        behind = _behind(words, number, mask)
        spins += 1
    return words.to(tl.uint32).to(dtype, bitcast=True), behind


@triton.jit
def memory_of(addresses, rank, dtype: tl.constexpr):
    """What lies at a rank's address. The compiler has to be told that wide loads may read it."""
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit(do_not_specialize=["rows", "words", "stride", "max_rows"])
def best_kernel(
    tokens, logits, out, boxes, counts, late, rows, words, stride, max_rows, RANK: tl.constexpr,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of rows). out [row]: the most probable of all words, the first of equal ones,
    from that of each shard's words, `tokens` (-1: a logit was not finite), and this shard's
    `logits` [row words]. -1 if any shard says so, or does not come.

    `boxes` [rank] int64 are addresses on each rank, of [2, rank, value or word, max_rows] words.
    `counts` [max_rows] int32: how many exchanges each row had, which wraps. `late` [1] int32 is 1
    once a peer did not come, after which nothing is exchanged any more.
    """
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = r < rows
    mine = memory_of(boxes, RANK, tl.uint64)
    wait(OVERLAP)
    number = tl.load(counts + r, mask=mask, other=0) + 1
    turn = (number & 1) * WORLD
    token = tl.load(tokens + r, mask=mask, other=0)
    # A start runs this without the kernels that are not compiled yet: tokens are anything then.
    near = tl.minimum(tl.maximum(token, 0), words - 1)
    own = tl.load(logits + r.to(tl.int64) * stride + near, mask=mask, other=0.0)
    own_word = tl.where(token < 0, -1, token + RANK * words)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            there = memory_of(boxes, peer, tl.uint64) + (turn + RANK) * 2 * max_rows + r
            tl.store(there, _numbered(own, number), mask=mask)
            tl.store(there + max_rows, _numbered(own_word, number), mask=mask)
    missing = tl.load(late)
    best_value, best = own, own_word
    failed = own_word < 0
    for peer in tl.static_range(WORLD):
        value, word = own, own_word
        if peer != RANK:
            place = mine + (turn + peer) * 2 * max_rows + r
            value, no_value = _awaited(place, number, mask, tl.float32)
            word, no_word = _awaited(place + max_rows, number, mask, tl.int32)
            missing = tl.maximum(missing, tl.maximum(no_value, no_word))
            failed = failed | (word < 0)
        if peer == 0:
            best_value, best = value, word
        else:
            better = value > best_value
            best_value, best = tl.where(better, value, best_value), tl.where(better, word, best)
    tl.store(counts + r, number, mask=mask)
    if missing > 0:
        tl.store(late, 1)
    tl.store(out + r, tl.where(failed | (missing > 0), -1, best), mask=mask)


@triton.jit(do_not_specialize=["rows", "max_rows"])
def scales_kernel(
    x, out, boxes, counts, late, rows, x_stride, max_rows, K: tl.constexpr, BLOCK_K: tl.constexpr,
    FP8: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, PLACES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (share of the rows): no more programs than run at once, as they wait for each other.
    out [row]: the scale in e4m3, or in int8, of rows of which each rank has K entries, by the
    largest on any of them. NaN if a rank does not come.

    `boxes` [rank] int64 are addresses on each rank, of [2, rank, max_rows] words; PLACES is a power
    of 2 that holds all ranks. `counts` and `late` as in `best_kernel`.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    k, peers = tl.arange(0, BLOCK_K), tl.arange(0, PLACES)
    others = (peers < WORLD) & (peers != RANK)
    mine = memory_of(boxes, RANK, tl.uint64)
    wait(OVERLAP)
    missing = tl.load(late)
    for row in range(program, rows, programs):
        number = tl.load(counts + row) + 1
        place = ((number & 1) * WORLD + RANK) * max_rows + row
        at = x + tl.cast(row, tl.int64) * x_stride + k
        largest = tl.max(size_of(tl.load(at, mask=k < K, other=0.0).to(tl.float32)), 0)
        for peer in tl.static_range(WORLD):
            if peer != RANK:
                tl.store(memory_of(boxes, peer, tl.uint64) + place, _numbered(largest, number))
        tl.store(out + row, largest)
    tl.debug_barrier()  # all threads read what one of them has written
    for row in range(program, rows, programs):
        number = tl.load(counts + row) + 1
        places = mine + ((number & 1) * WORLD + peers) * max_rows + row
        found, never = _awaited(places, number, others, tl.float32)
        missing = tl.maximum(missing, never)
        largest = tl.maximum(tl.load(out + row), tl.max(tl.where(others, found, 0.0), 0))
        scale = tl.where(missing > 0, float("nan"), scale_of(largest, FP8))
        tl.debug_barrier()  # no thread reads the row's count, or what stood for it, behind this
        tl.store(counts + row, number)
        tl.store(out + row, scale)
    if missing > 0:
        tl.store(late, 1)
