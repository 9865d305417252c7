"""How kernels read the paged cache: pages by DMA into a double buffer, then K and V of one head out
of it.

A page [slot 2*kvhead hdim] is copied whole, as rows of at most 128 lanes (`slot_form`): a head of
256 is two rows of 128, and K and V of a head of 64 share one. In the buffer, rows of a narrow dtype
lie packed in 32-bit words, 2 (bfloat16) or 4 (int8, float8) rows to a word, and a strided load of
words takes one row of each slot.

The rules that let one source be interpreted, and compiled for every TPU: flat buffers, strided
`pl.ds` loads, bitcasts of values. One view is not a value: the cache in HBM is read as words
(`words_of`). The generic interpreter follows that bitcast; TPU interpret mode does not, and gets a
cache that is words already (`pack_words`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
UNROLLED = 8
"""Pages of a block whose copies stand one by one in a kernel's text: more are a loop, which
takes longer a page.
"""


def slot_form(kv_heads: int, hdim: int, dtype: Any) -> tuple[int, int]:
    """(rows, lanes) in which a slot's 2*kvhead*hdim entries are held, in their order.

    Lanes of a TPU come by 128: other rows take that space too. Heads of 64 are held two to a row (K
    and V of a head), if a slot is then still made of whole 32-bit words, without which it could not
    be written alone.
    """
    if hdim % LANES == 0:
        return 2 * kv_heads * hdim // LANES, LANES
    if 2 * hdim == LANES and kv_heads * jnp.dtype(dtype).itemsize % 4 == 0:
        return kv_heads, LANES
    return 2 * kv_heads, hdim


def slot_dims(kv_heads: int, hdim: int, dtype: Any) -> tuple[int, int, int]:
    """(words, rows in a word, lanes) of a slot: the last two are a tile of a TPU's memory: no
    padding.
    """
    rows, lanes = slot_form(kv_heads, hdim, dtype)
    packing = math.gcd(rows, 4 // jnp.dtype(dtype).itemsize)
    return rows // packing, packing, lanes


def typical_length(pages: int, page: int, window: int) -> int:
    """Tokens of the cache that a query sees, for cost estimates: an eighth of what the table holds,
    or the window.

    XLA hides transfers between devices behind kernels by these estimates. With full tables it would
    take attention for so long that any transfer fits behind it.
    """
    typical = max(page, pages * page // 8)
    return min(typical, window) if window else typical


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a kernel knows of the cache when it is traced. `block_pages`: pages that are read and
    computed at once.

    `rows` and `lanes` are a slot's, `hdim` what a kernel takes for the size of a head: where K and
    V share a row, it multiplies both with queries that are 0 in V's lanes, and both with the
    weights.
    """

    page: int
    kv_heads: int
    rows: int
    lanes: int
    dtype: Any
    block_pages: int

    @property
    def joint(self) -> bool:
        """Whether K and V of a head share a row."""
        return self.rows == self.kv_heads

    @property
    def hdim(self) -> int:
        """Lanes of a head's queries and results."""
        return self.lanes if self.joint else self.rows // (2 * self.kv_heads) * self.lanes

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.page * self.block_pages

    @property
    def packing(self) -> int:
        """Rows in a 32-bit word."""
        return 4 // jnp.dtype(self.dtype).itemsize

    @property
    def page_words(self) -> int:
        """Words of a page in each lane."""
        return self.page * self.rows // self.packing

    @property
    def period(self) -> int:
        """Tokens after which rows stand at the same place in a word: 2 for an odd number of
        heads in 8 bits.
        """
        return self.packing // math.gcd(self.rows, self.packing)

    @property
    def chunks(self) -> list[int]:
        """The first lane of each of a head's rows."""
        return list(range(0, self.hdim, self.lanes))

    def row(self, h: int, chunk: int, which: int) -> int:
        """The row of a slot with a chunk of K (`which` 0) or V (1) of head h."""
        return h if self.joint else (2 * h + which) * len(self.chunks) + chunk

    def scratch(self) -> tuple[Any, ...]:
        """The double buffer [2 word lane] and a DMA semaphore for each half of it."""
        buffer = pltpu.VMEM((2, self.block_pages * self.page_words, self.lanes), self.word_dtype)
        return buffer, pltpu.SemaphoreType.DMA((2,))

    @property
    def word_dtype(self) -> Any:
        """What the buffer holds: words, or the rows themselves if they are 32 bits wide."""
        return jnp.dtype(jnp.uint32) if self.packing > 1 else jnp.dtype(self.dtype)


def quotient(x: Any, n: int) -> Any:
    """x // n for x >= 0: a shift where n is a power of two, and not the five instructions of a
    signed division.
    """
    return x >> (n.bit_length() - 1) if n & (n - 1) == 0 else lax.div(x, n)


def oldest_seen(position: Any, window: int, chunk: int) -> Any:
    """The first slot that a query at `position` (-1: no query) sees; the number 0 if it is always
    that.
    """
    if chunk > 0:
        return position - lax.rem(position, chunk)
    return jnp.maximum(position - (window - 1), 0) if window > 0 else 0


def since(first: Any, before: Any) -> Any:
    """max(first - before, 0); without a window `first` is the number 0, and nothing is computed."""
    return 0 if isinstance(first, int) else jnp.maximum(first - before, 0)


def either(which: Any, this: tuple[Any, Any], that: tuple[Any, Any]) -> tuple[Any, Any]:
    """One of two ranges that begin at a traced number, or both at the number 0."""
    first = 0 if isinstance(this[0], int) else jnp.where(which, this[0], that[0])
    return first, jnp.where(which, this[1], that[1])


def pack_words(rows: jax.Array) -> jax.Array:
    """rows [page row lane] of 8 or 16 bits as words [page row/packing lane] uint32: what a TPU's
    memory holds.
    """
    bits = jnp.dtype(rows.dtype).itemsize * 8
    if bits == 32:
        return rows
    packing = 32 // bits
    pages, count, lanes = rows.shape
    raw = lax.bitcast_convert_type(rows, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)
    raw = raw.reshape(pages, count // packing, packing, lanes)
    shifts = jnp.arange(packing, dtype=jnp.uint32)[None, None, :, None] * jnp.uint32(bits)
    return jnp.bitwise_or.reduce(raw << shifts, axis=2)


def words_of(kv_hbm: Any, cache: CacheShape) -> Any:
    """The cache's ref as 32-bit words."""
    return kv_hbm if jnp.dtype(kv_hbm.dtype).itemsize == 4 else kv_hbm.bitcast(jnp.uint32)


@dataclass(frozen=True, slots=True)
class Pages:
    """Reads blocks of one cache. `table` is the page table, flat in SMEM, with `width` entries for
    a request.

    Of block j of a request, the pages are read that hold a slot that is `wanted`; the rest of the
    buffer keeps what it held. What is started must be waited for with the same numbers.
    """

    cache: CacheShape
    table: Any
    width: int
    kv: Any
    buffer: Any
    sems: Any

    def wanted(self, first: Any, length: Any) -> tuple[Any, Any]:
        """The pages, counted from a request's first, that hold a slot from `first` up to
        `length`: first, last + 1.
        """
        page = self.cache.page
        return quotient(first, page), quotient(length + page - 1, page)

    def start(
        self, request: Any, j: Any, wanted: tuple[Any, Any], half: Any, *, once: bool = False
    ) -> None:
        """Start the copies of block j of a request into a half of the buffer: those of its pages
        that are `wanted`.

        `once`: as a loop, which takes longer a page and has less text.
        """
        cache, size = self.cache, self.cache.page_words
        base = request * self.width + j * cache.block_pages
        low, high = self._inside(j, wanted)

        def one(i: Any, carry: None) -> None:
            target = self.buffer.at[half, pl.ds(pl.multiple_of(i * size, size), size), :]
            pltpu.make_async_copy(
                self.kv.at[self.table[base + i]], target, self.sems.at[half]
            ).start()

        if once or cache.block_pages > UNROLLED:
            lax.fori_loop(low, high, one, None)
            return
        for i in range(cache.block_pages):
            pl.when((low <= i) & (i < high))(partial(one, i, None))

    def wait(self, j: Any, wanted: tuple[Any, Any], half: Any) -> None:
        """Wait for them, one page at least: for as many bytes, which a semaphore counts, in
        powers of two of pages.
        """
        cache = self.cache
        low, high = self._inside(j, wanted)
        for bit in range(cache.block_pages.bit_length()):

            @pl.when((high - low) & (1 << bit) != 0)
            def _(count: int = 1 << bit) -> None:
                some = self.buffer.at[half, pl.ds(0, count * cache.page_words), :]
                pltpu.make_async_copy(some, some, self.sems.at[half]).wait()

    def _inside(self, j: Any, wanted: tuple[Any, Any]) -> tuple[Any, Any]:
        """Which of block j's pages are wanted: first, last + 1; none if the last is not greater."""
        before, count = j * self.cache.block_pages, self.cache.block_pages
        return since(wanted[0], before), jnp.minimum(wanted[1] - before, count)

    def clear(self, half: Any, low: Any, high: Any) -> None:
        """Zero what is outside tokens low..high of a block: it may hold NaN, and 0 * NaN is NaN."""
        cache, words = self.cache, self.cache.block_pages * self.cache.page_words
        rows = cache.rows
        # A pass of the loop costs by itself what ten registers do, and each of its registers has a
        # place in the kernel's text: 32 at a time, of small blocks a sixteenth.
        tile = math.gcd(words, 8 * min(max(words // 128, 1), 32))

        def clean(k: Any, carry: None) -> None:
            place = pl.ds(pl.multiple_of(k * tile, tile), tile)
            old = self.buffer[half, place, :]
            word = k * tile + lax.broadcasted_iota(jnp.int32, old.shape, 0)
            self.buffer[half, place, :] = _keep(
                old, word, low * rows, high * rows, cache.packing, cache.period == 1
            )

        if not isinstance(low, int):
            inside = quotient(low * rows, tile * cache.packing)
            lax.fori_loop(0, jnp.where(low > 0, inside + 1, 0), clean, None)
        lax.fori_loop(quotient(high * rows, tile * cache.packing), words // tile, clean, None)

    def head(
        self, half: Any, h: int, tokens: tuple[int, int], dtype: Any
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """K and V of head h, of tokens (start, stop) of the buffer: each its chunks [token lane].

        Words that hold both are loaded once, which is what the kernels do most. Tokens come in the
        order of `token_order`.
        """
        cache = self.cache
        start, stop = tokens
        period, packing = cache.period, cache.packing
        stride = period * cache.rows // packing
        words: dict[int, jax.Array] = {}

        def load(chunk: int, which: int) -> jax.Array:
            parts = []
            for phase in range(period):
                row = phase * cache.rows + cache.row(h, chunk, which)
                first = start // period * stride + row // packing
                if first not in words:
                    place = pl.ds(first, (stop - start) // period, stride=stride)
                    words[first] = self.buffer.at[half][place, :]
                parts.append(_unpack(words[first], row % packing, cache.dtype, dtype))
            return parts[0] if period == 1 else jnp.concatenate(parts, axis=0)

        chunks = range(len(cache.chunks))
        return [load(c, 0) for c in chunks], [load(c, 1) for c in chunks]


def token_order(cache: CacheShape, shape: tuple[int, int], tokens: tuple[int, int]) -> jax.Array:
    """For columns [_, stop - start] of scores: the token of the block that each stands for."""
    start, stop = tokens
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    if cache.period == 1:
        return start + column
    part = (stop - start) // cache.period
    return start + lax.rem(column, part) * cache.period + lax.div(column, part)


def _keep(
    old: jax.Array, word: jax.Array, low: Any, high: Any, packing: int, whole: bool
) -> jax.Array:
    """`old` with zeros where a word's rows are not in low..high; `whole`: no word is partly in
    it.
    """
    if whole:
        inside = word < quotient(high, packing)
        if not isinstance(low, int):
            inside = inside & (word >= quotient(low, packing))
        return jnp.where(inside, old, jnp.zeros((), old.dtype))
    bits, row = 32 // packing, word * packing
    mask = _below(high - row, packing, bits) & ~_below(low - row, packing, bits)
    return old & mask


def _below(count: jax.Array, packing: int, bits: int) -> jax.Array:
    """A mask of the first `count` rows of a word."""
    partial = (
        jnp.uint32(1) << (jnp.clip(count, 0, packing - 1) * bits).astype(jnp.uint32)
    ) - jnp.uint32(1)
    return jnp.where(count >= packing, jnp.uint32(0xFFFFFFFF), partial)


def _unpack(words: jax.Array, place: int, storage: Any, dtype: Any) -> jax.Array:
    """The row at `place` of each word, as `dtype`."""
    if jnp.dtype(storage).itemsize == 4:
        return words.astype(dtype)
    if storage == jnp.bfloat16:
        high = words << 16 if place == 0 else words & jnp.uint32(0xFFFF0000)
        return pltpu.bitcast(high, jnp.float32).astype(dtype)
    if storage == jnp.int8:
        value = pltpu.bitcast(words << (24 - 8 * place), jnp.int32) >> 24
        return value.astype(jnp.float32).astype(dtype)
    byte = (words >> (8 * place)).astype(jnp.uint8)
    return pltpu.bitcast(byte, storage).astype(jnp.float32).astype(dtype)
