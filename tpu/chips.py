"""TPU chips: what one JAX device of each generation has. The one table of them."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Chip:
    """One JAX device of a TPU generation, by the name that JAX gives its kind. Bytes, as libtpu
    0.0.42.1 has them.

    hbm    what a program may use: the compiler refuses more
    vmem   a core's vector memory
    read   bytes per second from memory, and
    flops  operations per second in bfloat16, as libtpu has them
    ici    bytes per second of a link to a neighbour, in one direction, as published
    """

    kind: str
    hbm: int
    vmem: int
    read: float
    flops: float
    ici: float


CHIPS = {
    "v4": Chip("TPU v4", int(30.5 * GIB), 16 * MIB, 1.23e12, 275e12, 45e9),
    "v5e": Chip("TPU v5 lite", int(15.75 * GIB), 128 * MIB, 0.82e12, 197e12, 45e9),
    "v5p": Chip("TPU v5", int(95.74 * GIB), 64 * MIB, 2.46e12, 459e12, 90e9),
    "v6e": Chip("TPU v6 lite", int(31.25 * GIB), 128 * MIB, 1.64e12, 920e12, 90e9),
    "tpu7x": Chip("TPU7x", int(94.75 * GIB), 64 * MIB, 3.7e12, 1155e12, 90e9),
}
"""By the first word of a topology's name. A device is a chip (v4, v5p: its two cores as one), on
tpu7x half a one.
"""

BY_KIND = {chip.kind: chip for chip in CHIPS.values()}
OTHER_NAMES = {"TPU v5e": "TPU v5 lite", "TPU v5p": "TPU v5", "TPU v6e": "TPU v6 lite"}
"""Kinds by the names that some releases of JAX's runtime give them instead."""
