"""Ops on rows by torch's own operators: on a CPU fewer calls than the references, and the same roundings.

The references are their slow twins, and what a compiler is given on a GPU.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from ..declare import Array
from ..implement import implement
from ..namespaces import namespace
from ..reference.activations import swish
from ..reference.sampling import NO_TOKEN

aten = partial(implement, provider="aten", framework="torch", preferred_on=("cpu",))
LEAST_GATE = -80.0
"""Above it torch's silu keeps its digits: exp(-gate) is finite, and its inverse is no subnormal number."""


@aten("rms_norm", row_invariant=True)
def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """See the op."""
    return F.rms_norm(x, weight.shape, weight, eps)


@aten("rotary_embedding", row_invariant=True)
def rotary_embedding(q: Array, k: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    """See the op. Heads of q and k are rotated together."""
    half = cos.shape[-1]
    heads = torch.cat([q, k], dim=1)
    y = namespace("torch").accumulate(heads)
    c, s = cos[:, None], sin[:, None]
    a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    turned = torch.cat([torch.addcmul(a * c, b, s, value=-1), torch.addcmul(b * c, a, s), rest], dim=-1).to(q.dtype)
    return turned[:, : q.shape[1]], turned[:, q.shape[1] :]


@aten("silu_and_mul")
def silu_and_mul(x: Array) -> Array:
    """See the op. Gates too low for torch's silu go through the reference, each by itself."""
    xp = namespace("torch")
    gate, up = xp.accumulate(x).chunk(2, dim=-1)
    if type(x) is not torch.Tensor or torch.compiler.is_compiling():  # a graph cannot ask for the least gate
        return swish(xp, gate, up).to(x.dtype)
    result = F.silu(gate).mul_(up)
    if not gate.min().item() > LEAST_GATE:
        low = ~(gate > LEAST_GATE)
        result[low] = swish(xp, gate[low], up[low])
    return result.to(x.dtype)


@aten("greedy_sample", row_invariant=True)
def greedy_sample(logits: Array) -> Array:
    """See the op. 0 times what is not finite is NaN."""
    finite = (logits * 0.0).sum(dim=-1) == 0.0
    return torch.where(finite, logits.argmax(dim=-1), NO_TOKEN).to(torch.int32)
