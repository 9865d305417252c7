"""Block sizes of the attention kernels by device kind, from `blocks.json`; a kind without an entry gets `default`.

The entry `none` is for interpreters, where small blocks meet more of the cases that blocks make.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("blocks.json")


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Tokens of the cache that are computed at once (a page at least), and requests or query tokens of a grid step.

    `vmem_mib`: the limit that the compiler is given, None for its own.
    """

    decode_kv: int
    decode_requests: int
    mixed_kv: int
    mixed_tokens: int
    vmem_mib: int | None

    @property
    def vmem_bytes(self) -> int | None:
        """The limit in bytes."""
        return None if self.vmem_mib is None else self.vmem_mib << 20


@cache
def block_sizes(kind: str) -> BlockSizes:
    """The sizes for a device kind such as `TPU v5 lite`."""
    table = json.loads(TABLE.read_text())
    return BlockSizes(**table.get(kind, table["default"]))
