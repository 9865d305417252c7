"""The ops: one executable reference each."""

from . import (
    activations,
    dense,
    latents,
    lora,
    moe,
    narrow,
    norms,
    paged,
    parallel,
    quantization,
    rotary,
    sampling,
    scaling,
)

__all__ = [
    "activations",
    "dense",
    "latents",
    "lora",
    "moe",
    "narrow",
    "norms",
    "paged",
    "parallel",
    "quantization",
    "rotary",
    "sampling",
    "scaling",
]
