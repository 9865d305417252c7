"""The ops: one executable reference each."""

from . import (
    activations,
    dense,
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
