"""What XLA is told for every program of a platform. It is part of what a stored program was
compiled for.
"""

from __future__ import annotations

import os
from typing import Any

from .platforms import FIBERS, libtpu_is_known

OPTIONS: dict[str, bool | str] = {"xla_allow_excess_precision": False}
"""A rounding that an op's contract states must happen: XLA may otherwise keep float32 between
two ops.
"""

GRAPHS = {
    "xla_gpu_enable_command_buffer": (
        # the last two are ours
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    )
}
"""On NVIDIA GPUs: loops belong into the CUDA graphs too, or the host looks after each decode
step of a loop.
"""

STAYS = {"xla_msa_max_cross_program_prefetches": 0}
"""On TPUs: nothing is brought into vector memory before a program starts. It was the rotary table,
all of it, of which a step reads the rows of its tokens.
"""


NOT_SHAPING = ("--xla_dump_", "--xla_force_host_platform_device_count", FIBERS)
"""What flags begin with that change no program."""


def flags_for(platform: str) -> list[str]:
    """The flags of the environment that XLA compiles by beside these options."""
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if platform == "tpu" else ("XLA_FLAGS",)
    given = [flag for name in names for flag in os.environ.get(name, "").split()]
    return sorted(flag for flag in given if not flag.startswith(NOT_SHAPING))


def options_for(platform: str) -> dict[str, Any]:
    """The compiler's options for a platform of devices."""
    if platform == "gpu":
        return OPTIONS | GRAPHS
    return OPTIONS | STAYS if platform == "tpu" and libtpu_is_known() else dict(OPTIONS)
