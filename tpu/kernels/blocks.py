"""Block sizes of the attention kernels, from `blocks.json`: by device kind and cache, else by kind,
else `default`.

`scripts/rank_blocks.py` makes the entries, by static cost: none was timed on a TPU. The entry
`none` is for interpreters, where small blocks meet more of the cases that blocks make.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("blocks.json")


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Tokens of the cache that are read at once (a page at least), and requests or query tokens of
    a grid step.

    `decode_step`, `mixed_step`: tokens of a block whose K and V are held in registers at a time.
    `vmem_mib`: the limit that the compiler is given, None for its own.
    """

    decode_kv: int
    decode_requests: int
    mixed_kv: int
    mixed_tokens: int
    vmem_mib: int | None
    decode_step: int = 256
    mixed_step: int = 256

    @property
    def vmem_bytes(self) -> int | None:
        """The limit in bytes."""
        return None if self.vmem_mib is None else self.vmem_mib << 20


def entry(kind: str, dtype: Any, kv_heads: int, hdim: int) -> str:
    """The name of the entry for a device kind such as `TPU v5 lite` and what a device holds of a
    slot of the cache.
    """
    return f"{kind}, {dtype}, {kv_heads} heads of {hdim}"


@cache
def block_sizes(kind: str, dtype: Any = "", kv_heads: int = 0, hdim: int = 0) -> BlockSizes:
    """The sizes for a device kind and cache."""
    table = json.loads(TABLE.read_text())
    known = [
        name for name in (entry(kind, dtype, kv_heads, hdim), kind, "default") if name in table
    ]
    return BlockSizes(**table[known[0]])
