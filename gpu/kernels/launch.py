"""What all kernels share: where they run, their launch configurations, dtypes by name.

Nothing is tuned at run time: a configuration is looked up in `configs.json` by the chip's name,
with a default for chips that it does not name (`scripts/tune_kernels.py` measures them).
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton

from ...ops.declare import OpError, dtype_name
from ...ops.implement import Refusal, implement
from ...shared.errors import InternalError
from .overlap import EARLY, LATE

INTERPRETED = bool(triton.knobs.runtime.interpret)
FLOATS = ("float32", "bfloat16", "float16")
INTERPRETED_PROCESSORS = 4


FP8_CAPABILITY = (8, 9)
"""From Ada on there are conversions from and to float8_e4m3fn; Triton compiles none for chips
before.
"""


def capability() -> tuple[int, int]:
    """The GPU's compute capability, (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def supported() -> bool:
    """Whether the kernels run here: on an NVIDIA GPU from Ampere on, or on any CPU in Triton's
    interpreter.
    """
    return INTERPRETED or capability() >= (8, 0)


triton_kernel = partial(
    implement,
    provider="triton",
    framework="torch",
    supported=supported,
    opaque=True,
    preferred_on=("cuda",),
)
"""Registers the decorated function, which launches a kernel, as the implementation of an op that
GPUs prefer.
"""


def refused_cache(kv: Any) -> Refusal | None:
    """Why the chip cannot hold a cache of this dtype, or None if it can."""
    if INTERPRETED or dtype_name(kv) != "float8_e4m3fn" or capability() >= FP8_CAPABILITY:
        return None
    needs, has = (".".join(map(str, version)) for version in (FP8_CAPABILITY, capability()))
    return Refusal(f"a cache of float8_e4m3fn needs compute capability {needs}, this GPU has {has}")


@cache
def config(kernel: str, *variants: str) -> dict[str, int]:
    """The launch configuration of a kernel: of the first of `variants`, from the most special on,
    that has one of its own (`decode/float32`), else the kernel's.

    That of the chip comes before that of any chip, but not before one of a more special variant.
    Calls that find the same entry share it.
    """
    chip = "" if INTERPRETED or not torch.cuda.is_available() else torch.cuda.get_device_name()
    table = _table()
    for name in (*(f"{kernel}/{variant}" for variant in variants), kernel):
        for entries in (table["chips"].get(chip, {}), table["default"]):
            if name in entries:
                found: dict[str, int] = entries[name]
                return found
    raise OpError(f"kernel {kernel!r} has no launch configuration in configs.json")


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(
        Path(__file__).with_name("configs.json").read_text(encoding="utf-8")
    )
    return table


@cache
def processors() -> int:
    """Multiprocessors of the GPU."""
    if INTERPRETED:
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def shared_memory() -> int:
    """Bytes of shared memory that one program may take; in the interpreter any number."""
    if INTERPRETED:
        return 1 << 30
    properties = triton.runtime.driver.active.utils.get_device_properties(
        torch.cuda.current_device()
    )
    return int(properties["max_shared_mem"])


@cache
def hopper() -> bool:
    """Whether kernels for Hopper alone run here: its tensor cores' instructions are no other
    chip's. Triton has the language for them, as they use it, from 3.6 on.
    """
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return not INTERPRETED and capability()[0] == 9 and version >= (3, 6)


@cache
def overlap(early: bool = False) -> dict[str, int | bool]:
    """The options of a launch by which kernels overlap (see `overlap.py`), where the chip can:
    from Hopper on.
    """
    can = not INTERPRETED and capability() >= (9, 0)
    mode = EARLY if early else LATE
    return {"OVERLAP": mode.value if can else 0, "launch_pdl": can}


CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT"""
_carveouts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Percent of shared memory by compiled kernel, where it is not the driver's choice."""


def carve_out(launched: Any, setting: Mapping[str, int]) -> None:
    """Let `setting["carveout"]` percent of a processor's L1 be shared memory while the kernel runs
    that was just launched: from its next launch on, and in graphs that are captured from now on.
    Without that (-1) the driver chooses.

    The driver chooses for each kernel alone. A processor that has to divide its L1 in another way
    for the next kernel waits until it is idle, so that these two launches do not overlap.
    """
    percent = setting.get("carveout", -1)
    if launched is None or _carveouts.get(launched, -1) == percent:  # None: noted, or interpreted
        return
    given = ctypes.c_void_p(launched.function), CARVEOUT, percent
    status = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(*given)
    if status:
        raise InternalError(f"cuFuncSetAttribute failed with CUDA driver error {status}")
    _carveouts[launched] = percent


HELD_DTYPES = ("bfloat16", "float16")
HELD_SIZES = (64, 128, 256)
MOST_HELD_GROUP = 8
"""Dtypes, sizes of heads, and heads of a group that `held_decode_kernel` takes."""


def held_setting(q: Any, kv: Any, tokens: int, scaled: bool) -> dict[str, int]:
    """The launch configuration of `held_decode_kernel` for q [token head hdim] and a cache, with
    scales or without; {} for what it does not take, or more tokens than it is good for.
    """
    heads, dtype, size = kv.shape[2] // 2, dtype_name(q), kv.shape[3]
    taken = dtype in HELD_DTYPES and size in HELD_SIZES and q.shape[1] <= MOST_HELD_GROUP * heads
    if not taken or scaled or dtype_name(kv) != dtype or not hopper():
        return {}
    setting = config("held_decode", f"{dtype}/{size}")
    return setting if tokens <= setting.get("tokens", 0) else {}


def asks_ahead(q: Any, kv: Any, tokens: int, scaled: bool) -> bool:
    """Whether decode attention of a step of so many tokens asks for K and V before its wait, if all
    of them are decodes, and what writes the cache in front of it lets it come up early. Measured:
    with few tokens the programs of `decode_kernel` cost more beside the product in front of both
    than that gains.
    """
    measured = config("decode_ahead", f"{dtype_name(q)}/{kv.shape[3]}")
    if measured["from_rows"] <= tokens <= measured["rows"]:
        return True
    return bool(held_setting(q, kv, tokens, scaled))


def kind_of(kind: str) -> str:
    """What kernels are told of a kind of narrow numbers. What a start notes of launches is text, of
    which Triton makes a dtype where it is a dtype's name.
    """
    return "int8s" if kind == "int8" else kind


def head_scales(
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scales of K and V [kvhead] as the kernels load them, or None where neither is given: kernels
    for that load none.
    """
    if k_scale is None and v_scale is None:
        return None
    if k_scale is None:
        k_scale = torch.ones_like(v_scale)
    if v_scale is None:
        v_scale = torch.ones_like(k_scale)
    return k_scale.contiguous(), v_scale.contiguous()


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of 2 that is at least `n` and `least`."""
    return max(least, 1 << (n - 1).bit_length())
