"""Turns sampling parameters into the integers that the sampler computes with (see
`ops/reference/sampling.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from .sampling_params import SamplingParams
from .step import Sampler, mask_words

ONE = 1 << 16
"""1.0 in the Q16 fixed point of the sampler."""
FAR = 1 << 22
"""A distance of 64 in log2 units: further than any noise can bridge."""


def encode_sampling(params: SamplingParams, seed: int) -> dict[str, int | float]:
    """The constant fields of `sampling_layout` for one request (not `sample_rows` and
    `position`).
    """
    bits = np.array([seed & (2**64 - 1)], np.uint64).view(np.int32)
    return {
        "seed_lo": int(bits[0]),
        "seed_hi": int(bits[1]),
        "greedy": int(params.greedy),
        "top_k": max(params.top_k, 0),
        "top_p": max(1, round(params.top_p * ONE)),
        "min_p": FAR if params.min_p == 0 else min(FAR, round(-math.log2(params.min_p) * ONE)),
        "scale": math.log2(math.e) / (params.temperature or 1.0),
    }


def sampler_of(params: SamplingParams) -> Sampler:
    """The first of the samplers that serves a request, `min_tokens` aside: those mask only its
    first steps.
    """
    if params.changes_scores:
        return "processed"
    if params.masks_always:
        return "masked"
    if params.greedy:
        return "greedy"
    return "filtered" if has_filters(encode_sampling(params, 0)) else "random"


def has_filters(encoded: Mapping[str, int | float]) -> bool:
    """Whether fields of `encode_sampling` ask for top-k, top-p or min-p. The encoded numbers
    decide: a top_p of 0.9999999 is off, as it rounds to 1.
    """
    return bool(encoded["top_k"] or encoded["top_p"] != ONE or encoded["min_p"] != FAR)


def encode_processors(params: SamplingParams) -> dict[str, int | float]:
    """The constant scalar fields of `processor_layout` for one request."""
    return {
        "presence": round(params.presence_penalty * ONE),
        "frequency": round(params.frequency_penalty * ONE),
        "repetition": params.repetition_penalty,
        "repetition_inverse": 1.0 / params.repetition_penalty,
    }


def encode_bias(params: SamplingParams) -> tuple[list[int], list[int]]:
    """Token ids and Q16 values of the logit bias."""
    return list(params.logit_bias), [round(value * ONE) for value in params.logit_bias.values()]


def encode_mask(params: SamplingParams, vocab_size: int) -> np.ndarray | None:
    """The bit mask of allowed minus banned tokens as int32 words, or None if every token may be
    sampled.
    """
    if params.allowed_token_ids is None and not params.banned_token_ids:
        return None
    allowed = np.full(32 * mask_words(vocab_size), params.allowed_token_ids is None, bool)
    if params.allowed_token_ids is not None:
        allowed[list(params.allowed_token_ids)] = True
    allowed[list(params.banned_token_ids)] = False
    return np.packbits(allowed, bitorder="little").view(np.int32)
