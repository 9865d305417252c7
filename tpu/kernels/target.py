"""What the kernels take: by the device that is lowered for, and by arithmetic on what a core's
memories hold.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh

from ...ops.implement import Refusal
from ...shared.page_table import SCALAR_MEMORY_FOR_TABLES
from ..chips import BY_KIND, OTHER_NAMES
from .cache import slot_form

HEAD_SIZES = (64, 80, 96, 128, 256, 512)
PAGES = (16, 32, 64, 128, 256)


def target_kind() -> str:
    """The kind of device that is lowered for: the abstract mesh's, else the default device's."""
    abstract = get_abstract_mesh().abstract_device
    name = str((jax.devices()[0] if abstract is None else abstract).device_kind)
    return OTHER_NAMES.get(name, name)


def on_tpu() -> bool:
    """Whether programs are lowered for a TPU, here or ahead of time."""
    return target_kind().startswith("TPU")


def refused_size(kv: Any) -> Refusal | None:
    """Why no kernel is compiled for a cache of these sizes."""
    if kv.shape[3] not in HEAD_SIZES:
        return Refusal(f"heads of {kv.shape[3]}: compiled are {', '.join(map(str, HEAD_SIZES))}")
    if kv.shape[1] not in PAGES:
        return Refusal(f"pages of {kv.shape[1]} slots: compiled are {', '.join(map(str, PAGES))}")
    return None


def refused_words(kv: Any, slots: int, what: str) -> Refusal | None:
    """Why `slots` slots of the cache are not whole 32-bit words."""
    rows, _ = slot_form(kv.shape[2] // 2, kv.shape[3], kv.dtype)
    size = rows * jnp.dtype(kv.dtype).itemsize
    if slots * size % 4 == 0:
        return None
    return Refusal(
        f"{what} is {slots * rows} rows of {jnp.dtype(kv.dtype).itemsize} B "
        f"({kv.shape[2] // 2} KV "
        "heads of "
        f"{kv.shape[3]}), no whole number of 4 B words"
    )


def refused_scalars(what: str, hint: str, *dims: int) -> Refusal | None:
    """Why int32 `dims` do not fit the scalar memory."""
    size = prod(dims) * 4
    if size <= SCALAR_MEMORY_FOR_TABLES:
        return None
    need = f"{' * '.join(map(str, dims))} * 4 B = {size} B"
    return Refusal(
        f"{what} takes {need} of scalar memory, allowed are {SCALAR_MEMORY_FOR_TABLES} B: {hint}"
    )


def refused_memory(kind: str, need: dict[str, int]) -> Refusal | None:
    """Why `need`, bytes by what for, exceeds the vector memory of a kind of device, or that the
    kind is not known.
    """
    chip = BY_KIND.get(kind)
    if chip is None:
        return Refusal(
            f"vector memory of {kind} is not known: known are {', '.join(BY_KIND)} (tpu/chips.py)"
        )
    if sum(need.values()) <= chip.vmem:
        return None
    parts = " + ".join(f"{size} B ({name})" for name, size in need.items())
    return Refusal(
        f"vector memory of {kind}: {parts} > {chip.vmem} B: smaller blocks in kernels/blocks.json"
    )


def answer(*refusals: Refusal | bool | None) -> bool | Refusal:
    """A predicate's answer: the first refusal, or True. (A refusal is false: `or` would pass it
    over.)
    """
    return next((refusal for refusal in refusals if isinstance(refusal, Refusal)), True)
