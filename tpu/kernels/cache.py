"""How kernels read the paged cache: pages by DMA into a double buffer, then K and V of one head out of it.

A page [slot 2*kvhead hdim] is copied whole, as rows [slot * 2*kvhead, hdim]. In the buffer, rows of a narrow dtype lie
packed in 32-bit words, 2 (bfloat16) or 4 (int8, float8) rows to a word, so K and V of a head share a word and a strided
load of words takes one head out of all. Head sizes above 128 are split into chunks of 128 lanes: a strided load takes
no more.

The rules that let one source be interpreted, and compiled for every TPU: flat buffers, strided `pl.ds` loads, bitcasts
of values. One view is not a value: the cache in HBM is read as words (`words_of`). The generic interpreter follows that
bitcast; TPU interpret mode does not, and gets a cache that is words already (`pack_words`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a kernel knows of the cache when it is traced. `block_pages`: pages that are read and computed at once."""

    page: int
    kv_heads: int
    hdim: int
    dtype: Any
    block_pages: int

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
        return self.page * 2 * self.kv_heads // self.packing

    @property
    def period(self) -> int:
        """Tokens after which rows stand at the same place in a word: 2 for an odd number of heads in 8 bits."""
        return self.packing // math.gcd(2 * self.kv_heads, self.packing)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(first lane, lanes) of each chunk of a head."""
        return [(i, min(LANES, self.hdim - i)) for i in range(0, self.hdim, LANES)]

    def scratch(self) -> tuple[Any, ...]:
        """The double buffer [2 chunk word lane] and a DMA semaphore for each half of it."""
        width = min(LANES, self.hdim)
        words = self.block_pages * self.page_words
        buffer = pltpu.VMEM((2, len(self.chunks), words, width), self.word_dtype)
        return buffer, pltpu.SemaphoreType.DMA((2,))

    @property
    def word_dtype(self) -> Any:
        """What the buffer holds: words, or the rows themselves if they are 32 bits wide."""
        return jnp.dtype(jnp.uint32) if self.packing > 1 else jnp.dtype(self.dtype)


def flat_pages(kv: jax.Array) -> jax.Array:
    """kv [page slot 2*kvhead hdim] as [page row hdim]: a view where XLA keeps the cache in that order."""
    pages, page, heads, hdim = kv.shape
    return kv.reshape(pages, page * heads, hdim)


def pack_words(rows: jax.Array) -> jax.Array:
    """rows [page row hdim] of 8 or 16 bits as words [page row/packing hdim] uint32: what a TPU's memory holds."""
    bits = jnp.dtype(rows.dtype).itemsize * 8
    if bits == 32:
        return rows
    packing = 32 // bits
    pages, count, hdim = rows.shape
    raw = lax.bitcast_convert_type(rows, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)
    raw = raw.reshape(pages, count // packing, packing, hdim)
    shifts = jnp.arange(packing, dtype=jnp.uint32)[None, None, :, None] * jnp.uint32(bits)
    return jnp.bitwise_or.reduce(raw << shifts, axis=2)


def words_of(kv_hbm: Any, cache: CacheShape) -> Any:
    """The cache's ref as 32-bit words."""
    return kv_hbm if jnp.dtype(kv_hbm.dtype).itemsize == 4 else kv_hbm.bitcast(jnp.uint32)


@dataclass(frozen=True, slots=True)
class Pages:
    """Reads blocks of one cache. `table` is the page table, flat in SMEM, with `width` entries for a request.

    Of block j of a request, the pages are read that hold a slot from `first` up to `length`; the rest of the buffer
    keeps what it held. What is started must be waited for with the same numbers.
    """

    cache: CacheShape
    table: Any
    width: int
    kv: Any
    buffer: Any
    sems: Any

    def start(self, request: Any, j: Any, first: Any, length: Any, half: Any) -> None:
        """Start the copies of block j of a request into a half of the buffer. A `length` of 0 starts none."""
        base = request * self.width + j * self.cache.block_pages
        self._each(j, first, length, half, lambda i: self.table[base + i], lambda copy: copy.start())

    def wait(self, j: Any, first: Any, length: Any, half: Any) -> None:
        """Wait for them."""
        self._each(j, first, length, half, lambda i: 0, lambda copy: copy.wait())

    def _each(self, j: Any, first: Any, length: Any, half: Any, page_of: Callable[..., Any], act: Any) -> None:
        cache, size = self.cache, self.cache.page_words
        low = jnp.maximum(lax.div(first, cache.page) - j * cache.block_pages, 0)
        high = jnp.minimum(lax.div(length + cache.page - 1, cache.page) - j * cache.block_pages, cache.block_pages)

        def one(i: Any, carry: None) -> None:
            page = page_of(i)
            for c, (lane, width) in enumerate(cache.chunks):
                whole = len(cache.chunks) == 1
                source = self.kv.at[page] if whole else self.kv.at[page, :, pl.ds(lane, width)]
                rows = pl.ds(pl.multiple_of(i * size, size), size)
                target = self.buffer.at[half, c, rows, :] if whole else self.buffer.at[half, c, rows, pl.ds(0, width)]
                act(pltpu.make_async_copy(source, target, self.sems.at[half]))

        lax.fori_loop(low, high, one, None)

    def clear(self, half: Any, low: Any, high: Any) -> None:
        """Zero what is outside tokens low..high of a block: it may hold NaN, and 0 * NaN is NaN."""
        cache, words = self.cache, self.cache.block_pages * self.cache.page_words
        rows = 2 * cache.kv_heads
        tile = math.gcd(words, 8)

        def clean(k: Any, carry: None) -> None:
            place = pl.ds(pl.multiple_of(k * tile, tile), tile)
            for c in range(len(cache.chunks)):
                old = self.buffer[half, c, place, :]
                word = k * tile + lax.broadcasted_iota(jnp.int32, old.shape, 0)
                self.buffer[half, c, place, :] = _keep(old, word, low * rows, high * rows, cache.packing)

        inside = lax.div(low * rows, tile * cache.packing)
        outside = lax.div(high * rows, tile * cache.packing)
        lax.fori_loop(0, jnp.where(low > 0, inside + 1, 0), clean, None)
        lax.fori_loop(outside, words // tile, clean, None)

    def head(self, half: Any, h: int, chunk: int, tokens: tuple[int, int], which: int, dtype: Any) -> jax.Array:
        """K (`which` 0) or V (1) of head h, lanes of one chunk, of tokens (start, stop) of the buffer -> [token lane].

        Tokens come in the order of `token_order`.
        """
        cache = self.cache
        start, stop = tokens
        period, rows, packing = cache.period, 2 * cache.kv_heads, cache.packing
        stride, width = period * rows // packing, cache.chunks[chunk][1]
        lanes = slice(None) if len(cache.chunks) == 1 else pl.ds(0, width)
        parts = []
        for phase in range(period):
            row = phase * rows + 2 * h + which
            first = start // period * stride + row // packing
            place = pl.ds(first, (stop - start) // period, stride=stride)
            parts.append(_unpack(self.buffer.at[half, chunk][place, lanes], row % packing, cache.dtype, dtype))
        return parts[0] if period == 1 else jnp.concatenate(parts, axis=0)


def token_order(cache: CacheShape, shape: tuple[int, int], tokens: tuple[int, int]) -> jax.Array:
    """For columns [_, stop - start] of scores: the token of the block that each stands for."""
    start, stop = tokens
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    if cache.period == 1:
        return start + column
    part = (stop - start) // cache.period
    return start + lax.rem(column, part) * cache.period + lax.div(column, part)


def _keep(old: jax.Array, word: jax.Array, low: Any, high: Any, packing: int) -> jax.Array:
    """`old` with zeros where a word's rows are not in low..high."""
    if packing == 1:
        return jnp.where((word >= low) & (word < high), old, jnp.zeros((), old.dtype))
    bits, row = 32 // packing, word * packing
    mask = _below(high - row, packing, bits) & ~_below(low - row, packing, bits)
    return old & mask


def _below(count: jax.Array, packing: int, bits: int) -> jax.Array:
    """A mask of the first `count` rows of a word."""
    partial = (jnp.uint32(1) << (jnp.clip(count, 0, packing - 1) * bits).astype(jnp.uint32)) - jnp.uint32(1)
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
