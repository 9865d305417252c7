"""Which shapes exist: ladders, the `Descriptor` of a program, `decide()`, and what padding
costs. Pure integers.
"""

from .descriptor import Descriptor, Kind, PaddingAccount, Table
from .ladders import decode_ladder, mixed_ladder, smallest_at_least

__all__ = [
    "Descriptor",
    "Kind",
    "PaddingAccount",
    "Table",
    "decode_ladder",
    "mixed_ladder",
    "smallest_at_least",
]
