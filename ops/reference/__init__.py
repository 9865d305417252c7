"""The ops: one executable reference each."""

from . import activations, dense, lora, norms, paged, parallel, quantization, rotary, sampling

__all__ = ["activations", "dense", "lora", "norms", "paged", "parallel", "quantization", "rotary", "sampling"]
