"""The op `paged_attention` on NVIDIA GPUs: Pallas kernels that XLA compiles through Triton.

Nothing is read on the host, and there are one to three launches whatever the lengths, so XLA can
put a whole step into a CUDA graph. JAX 0.11 calls this road of Pallas deprecated; it is what 0.10
and 0.11 offer.
"""

from __future__ import annotations

import jax

from ...ops.declare import Array, OpError
from ...ops.implement import Refusal, implement
from .decode import decode_attention
from .launch import FLOATS, head_scales, on_gpu
from .prefill import prefill_attention

MAX_HEAD_SIZE = 256
MAX_GROUP = 32
NARROW = ("int8", "float8_e4m3fn")


def takes(
    q: Array, kv: Array, page_table: Array, query_start: Array, kv_lens: Array, counts: Array,
    scale: float,
    window: int, soft_cap: float, max_query_len: int, k_scale: Array | None = None,
    v_scale: Array | None = None,
    sinks: Array | None = None, chunk: int = 0,
) -> bool | Refusal:  # fmt: skip
    """What the kernels are for."""
    if sinks is not None or chunk > 0:
        return Refusal("it knows neither sinks nor chunks")
    heads, kv_heads = q.shape[1], kv.shape[2] // 2
    if q.shape[2] > MAX_HEAD_SIZE or heads % kv_heads or heads // kv_heads > MAX_GROUP:
        return False
    return q.dtype.name in FLOATS and kv.dtype.name in (q.dtype.name, *NARROW)


def attend(
    q: jax.Array, kv: jax.Array, page_table: jax.Array, query_start: jax.Array, kv_lens: jax.Array,
    counts: jax.Array,
    scale: float, window: int, soft_cap: float, max_query_len: int, k_scale: jax.Array | None,
    v_scale: jax.Array | None, interpret: bool,
) -> jax.Array:  # fmt: skip
    """The op."""
    pages, page, kv_heads, size = kv.shape
    # Pallas computes offsets in 32 bits up to 4 GiB, which is too few for more than 2**31 entries
    # of one byte.
    if (kv.dtype.itemsize == 1 and 1 << 31 < kv.size <= 1 << 32) or kv.size // size >= 1 << 31:
        raise OpError(
            f"paged_attention: a cache of {kv.size * kv.dtype.itemsize} bytes; choose another "
            "num_pages"
        )
    rows = kv.reshape(pages * page * kv_heads, size)
    common = {
        "page": page, "kv_heads": kv_heads // 2, "scale": scale, "window": window,
        "soft_cap": soft_cap, "scales": head_scales(k_scale, v_scale, kv_heads // 2),
        "interpret": interpret,
    }  # fmt: skip
    mixed = max_query_len > 1
    out = decode_attention(q, rows, page_table, kv_lens, counts, mixed=mixed, **common)
    if mixed:
        out = prefill_attention(q, rows, page_table, query_start, kv_lens, counts, out, **common)
    return out


@implement(
    "paged_attention",
    provider="pallas_triton",
    framework="jax",
    supported=on_gpu,
    supports_args=takes,
    preferred_on=("cuda",),
)
def paged_attention(
    q: Array, kv: Array, page_table: Array, query_start: Array, kv_lens: Array, counts: Array,
    scale: float,
    window: int, soft_cap: float, max_query_len: int, k_scale: Array | None = None,
    v_scale: Array | None = None,
    sinks: Array | None = None, chunk: int = 0,
) -> Array:  # fmt: skip
    """See the op. Scores and softmax in float32, weights not normalised and rounded to q's
    dtype, one rounding.
    """
    return attend(
        q,
        kv,
        page_table,
        query_start,
        kv_lens,
        counts,
        scale,
        window,
        soft_cap,
        max_query_len,
        k_scale,
        v_scale,
        False,
    )
