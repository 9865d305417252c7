"""Rotary embedding of interleaved pairs, and tables whose base depends on the length
(arXiv:2104.09864).

Shapes: `tok` tokens, `head` heads, `hdim` head size, r rotated pairs (2r <= hdim).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..declare import Array, OpError, define


@define(
    shapes="q [tok head hdim], k [tok kvhead hdim], cos [tok r], sin [tok r] -> [tok head "
    "hdim] q, "
    "[tok kvhead hdim] k",
    shards=("head", "kvhead"),
    activations=("q", "k"),
)
def rotary_embedding_gptj(
    xp: Any, q: Array, k: Array, cos: Array, sin: Array
) -> tuple[Array, Array]:
    """Rotate the first 2r entries of each head in neighbouring pairs: q [tok head hdim], k
    likewise, cos, sin [tok r].

    The pair (a, b) = (x[2i], x[2i+1]) becomes (a cos_i - b sin_i, b cos_i + a sin_i); entries after
    2r are copied. cos and sin are float32. GPT-J, GLM, Cohere and DeepSeek rotate so;
    `rotary_embedding` pairs x[i] with x[i+r].
    """
    return _rotate_pairs(xp, q, cos, sin), _rotate_pairs(xp, k, cos, sin)


def _rotate_pairs(xp: Any, x: Array, cos: Array, sin: Array) -> Array:
    rotated = 2 * cos.shape[-1]
    y = xp.accumulate(x)
    c, s = cos[:, None, :], sin[:, None, :]
    a, b = y[..., 0:rotated:2], y[..., 1:rotated:2]
    pairs = xp.stack([a * c - b * s, b * c + a * s], axis=-1)
    turned = xp.reshape(pairs, (*x.shape[:-1], rotated))
    return xp.astype(xp.concat([turned, y[..., rotated:]], axis=-1), x.dtype)


def dynamic_ntk_inverse_frequencies(
    rotated: int, theta: float, factor: float, max_position: int, length: int
) -> np.ndarray:
    """Inverse frequencies [rotated / 2] float64 under dynamic NTK scaling, for a context of
    `length` positions.

    theta is stretched by (factor length / max_position - (factor - 1)) ^ (d / (d - 2)), d =
    `rotated`, once `length` passes `max_position`: `ROPE_INIT_FUNCTIONS["dynamic"]` of
    transformers. A table that must serve every length up to factor * max_position is made for that
    length (vLLM's). Raises OpError for sizes that the formula has no value for.
    """
    if rotated <= 2 or rotated % 2 or factor < 1.0 or max_position < 1:
        got = f"rotated={rotated}, factor={factor}, max_position={max_position}"
        raise OpError(
            f"dynamic NTK: needs an even rotated > 2, factor >= 1, max_position >= 1, got {got}"
        )
    stretch = factor * max(length, max_position) / max_position - (factor - 1.0)
    base = theta * stretch ** (rotated / (rotated - 2))
    inverse: np.ndarray = base ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    return inverse


def rotary_table(
    inverse_frequencies: np.ndarray, positions: int, scaling: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) [positions r] of position times inverse frequency, times `scaling`: float64, to
    be rounded once.
    """
    angles = np.arange(positions, dtype=np.float64)[:, None] * inverse_frequencies[None, :]
    return np.cos(angles) * scaling, np.sin(angles) * scaling
