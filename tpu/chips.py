"""TPU chips: what one JAX device of each generation has. The one table of them."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Chip:
    """One JAX device of a TPU generation, by the name that JAX gives its kind. Bytes, as libtpu
    0.0.42.1 has them.

    hbm   what a program may use: the compiler refuses more
    vmem  a core's vector memory
    """

    kind: str
    hbm: int
    vmem: int


CHIPS = {
    "v4": Chip("TPU v4", int(30.5 * GIB), 16 * MIB),
    "v5e": Chip("TPU v5 lite", int(15.75 * GIB), 128 * MIB),
    "v5p": Chip("TPU v5", int(95.74 * GIB), 64 * MIB),
    "v6e": Chip("TPU v6 lite", int(31.25 * GIB), 128 * MIB),
    "tpu7x": Chip("TPU7x", int(94.75 * GIB), 64 * MIB),
}
"""By the first word of a topology's name. A device is a chip (v4, v5p: its two cores as one), on
tpu7x half a one.
"""

BY_KIND = {chip.kind: chip for chip in CHIPS.values()}
