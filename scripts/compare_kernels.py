"""Compare the attention kernels here with JAX's ragged paged attention by what libtpu schedules, at
equal block sizes.

    python scripts/compare_kernels.py [--chips v5e,v6e] [--json out.json]

Needs libtpu and no TPU. Both are compiled for the same call and blocks of the same size; bundles
(what a core issues in one cycle) and register spills are counted, by token of a block: "kernel" is
the whole text of a kernel, "block" what is issued to compute one block of the cache, the loops over
its pages passed as often as it has pages. Within a block the kernels here go in steps of 256 tokens
or in one: what is worse in least is taken, and named. A decode step is the decode kernel here;
there it is the one kernel, with 8 requests to a block. Exit status: 1 if a kernel here costs more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from twinfer.serving.parser import OneLineParser, output_file, some_of
from twinfer.serving.program import run_program
from twinfer.tpu import static_cost
from twinfer.tpu.platforms import leave_out_libtpu, topology

CHIPS = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}


@dataclass(frozen=True)
class Call:
    """A call of paged attention and its blocks: query tokens (`queries`; 0: a decode step) and
    tokens of the cache.
    """

    name: str
    queries: int
    block: int
    heads: int = 32
    kv_heads: int = 8
    hdim: int = 128
    page: int = 128
    cache: str = "bfloat16"
    window: int = 0
    soft_cap: float = 0.0

    @property
    def arguments(self) -> tuple[Any, ...]:
        """q, kv, page table, query start, lengths, counts."""
        tokens, requests = 512 if self.queries else 64, 64

        def array(dtype: str, *dims: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))

        return (
            array("bfloat16", tokens, self.heads, self.hdim),
            # Large enough that the compiler does not keep all of it in VMEM.
            array(self.cache, 8192, self.page, 2 * self.kv_heads, self.hdim),
            array("int32", requests, 4096 // self.page),
            array("int32", requests + 1),
            array("int32", requests),
            array("int32", 2),
        )


CALLS = [
    Call("decode, 8b", 0, 512),
    Call("decode, 8b, half a block", 0, 256),
    Call("decode, 8b, pages of 16", 0, 256, page=16),
    Call("decode, 8b, a shard of 8", 0, 512, heads=4, kv_heads=1),
    Call("decode, 8b, fp8", 0, 512, cache="float8_e4m3fn"),
    Call("decode, window, soft cap", 0, 512, window=1024, soft_cap=50.0),
    Call("mixed, 8b", 32, 512),
    Call("mixed, 8b, half a block", 32, 256),
    Call("mixed, 8b, 16 queries", 16, 512),
    Call("mixed, 8b, 8 queries", 8, 512),
    Call("mixed, 8b, pages of 16", 32, 256, page=16),
    Call("mixed, 8b, a shard of 8", 32, 512, heads=4, kv_heads=1),
    Call("mixed, 8b, fp8", 32, 512, cache="float8_e4m3fn"),
    Call("mixed, window, soft cap", 32, 512, window=1024, soft_cap=50.0),
]


def ours(call: Call, kind: str, step: int) -> Any:
    """A function of the call's arguments: this package's op with those blocks, in steps of
    `step` tokens.
    """
    from twinfer.tpu.kernels.attention import attend
    from twinfer.tpu.kernels.blocks import block_sizes

    sizes = replace(
        block_sizes(kind), decode_kv=call.block, mixed_kv=call.block,
        mixed_tokens=call.queries or 8, decode_requests=8,
        decode_step=step, mixed_step=step,
    )  # fmt: skip
    scales = (None, None)
    if call.cache != "bfloat16":
        scales = tuple(jnp.full(call.kv_heads, scale, jnp.float32) for scale in (0.5, 0.25))
    rest = (
        call.hdim**-0.5,
        call.window,
        call.soft_cap,
        512 if call.queries else 1,
        *scales,
        False,
        sizes,
    )
    return lambda *given: attend(*given, *rest)


def stock(call: Call) -> Any:
    """A function of the call's arguments: JAX's kernel with those blocks."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    narrow = {"k_scale": 0.5, "v_scale": 0.25} if call.cache != "bfloat16" else {}
    attention = partial(
        ragged_paged_attention, sm_scale=call.hdim**-0.5, sliding_window=call.window or None,
        soft_cap=call.soft_cap or None, num_kv_pages_per_block=call.block // call.page,
        num_queries_per_block=call.queries or 8, vmem_limit_bytes=64 << 20, **narrow,
    )  # fmt: skip
    return lambda q, kv, table, start, lens, counts: attention(
        q, kv, lens, table, start, counts[1:]
    )


def figures(cost: static_cost.KernelCost, call: Call) -> dict[str, float]:
    """What is compared: bundles and spills by token of the cache, and memory."""
    return {
        "kernel": cost.bundles / call.block,
        "block": cost.issued(call.block // call.page) / call.block,
        "spills": (cost.spills + cost.fills) / call.block,
        "vmem_kib": cost.vmem / 1024,
    }


def measure(function: Any, call: Call, device: Any, folder: Path) -> dict[str, Any]:
    """The figures of the kernel in a function, or the first line of why it does not compile."""
    try:
        costs = static_cost.measure(function, call.arguments, device, folder)
    except Exception as error:  # the compiler raises several kinds
        return {"error": str(error).splitlines()[0]}
    # A mixed step also has the decode kernel in it, for the requests with one query.
    cost = costs[0] if len(costs) == 1 else next(c for c in costs if c.name.startswith("mixed"))
    return figures(cost, call) | {"cost": asdict(cost)}


def compare(call: Call, device: Any, folder: Path) -> dict[str, Any]:
    """Both kernels' figures: ours with the step that is worse in least, and of those issues
    least for a block.
    """
    row: dict[str, Any] = {"chip": device.device_kind, "call": call.name}
    row["stock"] = measure(stock(call), call, device, folder)
    rows = []
    for step in sorted({min(256, call.block), call.block}):
        found = measure(ours(call, device.device_kind, step), call, device, folder) | {"step": step}
        rows.append(row | {"ours": found})
    return min(rows, key=lambda row: (len(worse(row)), row["ours"].get("block", 0.0)))


def worse(row: dict[str, Any]) -> list[str]:
    """In what the kernel here costs more."""
    if "error" in row["ours"]:
        return ["kernel", "block", "spills", "does not compile"]
    if "error" in row["stock"]:
        return []
    return [
        name for name in ("kernel", "block", "spills") if row["ours"][name] > row["stock"][name]
    ]


def show(row: dict[str, Any]) -> str:
    """A line of the table."""
    cells = []
    for name in ("kernel", "block", "spills", "vmem_kib"):
        pair = [f"{row[who][name]:.2f}" if name in row[who] else "-" for who in ("ours", "stock")]
        cells.append(
            " / ".join(part.removesuffix(".00") if name == "vmem_kib" else part for part in pair)
        )
    errors = "; ".join(
        f"{who}: {row[who]['error'][:90]}" for who in ("ours", "stock") if "error" in row[who]
    )
    step = str(row["ours"].get("step", "-"))
    return " | ".join(
        ["", row["chip"], row["call"], step, *cells, errors or ", ".join(worse(row)) or "-", ""]
    ).strip()


def main() -> int:
    """Print the table; the exit status says whether a kernel here costs more."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", type=some_of(CHIPS), default="v5e,v6e")
    parser.add_argument("--calls", default="", help="only calls whose name contains this")
    parser.add_argument("--json", type=output_file, help="also write everything here")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        static_cost.dump_to(Path(name))
        leave_out_libtpu()
        print("by token of the cache, ours / stock\n")
        print(
            "| chip | call | step | kernel, bundles | block, bundles | spills and fills | VMEM, "
            "KiB | worse in |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for chip in options.chips:
            device = topology(CHIPS[chip]).devices[0]
            for call in CALLS:
                if options.calls in call.name:
                    rows.append(compare(call, device, Path(name)))
                    print(show(rows[-1]), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    return 1 if any(worse(row) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(run_program(main))
