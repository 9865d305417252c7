"""Rank block sizes of the TPU attention kernels by what libtpu schedules for them, and write the
best to `blocks.json`.

    python scripts/rank_blocks.py --chips v5e,v6e --heads 8,2,1 --hdim 128 --dtype bfloat16 [--page
    128] [--write]

Needs libtpu and no TPU; nothing here was timed. The score of decode blocks is the bundles issued
for requests of LENGTHS tokens, by token of the cache; of mixed blocks those for a prompt of PROMPT
tokens, by pair of a query and a token that it sees. Ends that do not fill a block count as whole
blocks, so large blocks pay for what they waste. Copies are not scheduled: blocks of less than
IN_FLIGHT bytes are left out, whose copies would not hide the memory's latency.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from compare_kernels import CHIPS, Call

from twinfer.serving.parser import OneLineParser, some_of, whole_number, whole_numbers
from twinfer.serving.program import run_program
from twinfer.tpu import static_cost
from twinfer.tpu.kernels import blocks
from twinfer.tpu.kernels.attention import attend
from twinfer.tpu.platforms import leave_out_libtpu, topology

LENGTHS = (256, 1024, 4096)
PROMPT = 1024
IN_FLIGHT = 64 << 10
DECODE = [(256, 256), (512, 256), (1024, 256), (512, 512), (1024, 512), (256, 128), (1024, 1024)]
"""Tokens of a block and of a step of it."""
MIXED = [
    (256, 256, 32),
    (512, 256, 32),
    (512, 512, 32),
    (512, 512, 16),
    (256, 256, 64),
    (512, 256, 64),
    (512, 512, 64),
]
"""The same, and query tokens. Pairs of both lists share a compilation."""
ITEMSIZE = {"int8": 1, "float8_e4m3fn": 1, "float32": 4}
"""Bytes of an element of the cache, where they are not 2."""


def decode_score(cost: static_cost.KernelCost, block: int, page: int) -> float:
    """Bundles by token of the cache."""
    passes = sum(-(-length // block) for length in LENGTHS)
    return (
        passes * cost.issued(max(1, block // page)) + len(LENGTHS) * (cost.bundles - cost.block)
    ) / sum(LENGTHS)


def mixed_score(cost: static_cost.KernelCost, block: int, queries: int, page: int) -> float:
    """Bundles by query and token that it sees."""
    ends = range(queries, PROMPT + 1, queries)
    passes = sum(-(-end // block) for end in ends)
    issued = passes * cost.issued(max(1, block // page)) + len(ends) * (cost.bundles - cost.block)
    return issued / (PROMPT * (PROMPT + 1) / 2)


def candidates(
    device: Any, call: Call, folder: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Costs and scores of all decode and all mixed candidates that compile, best first."""
    base = blocks.block_sizes(device.device_kind)
    decode: list[dict[str, Any]] = []
    mixed: list[dict[str, Any]] = []
    rest = (call.hdim**-0.5, 0, 0.0, 512, None, None, False)
    smallest = IN_FLIGHT // (2 * call.kv_heads * call.hdim * ITEMSIZE.get(call.cache, 2))
    for (d_block, d_step), (m_block, m_step, queries) in zip(DECODE, MIXED, strict=True):
        chosen = {
            "decode_kv": d_block, "decode_step": d_step, "mixed_kv": m_block, "mixed_step": m_step,
            "mixed_tokens": queries,
        }  # fmt: skip
        sizes = replace(base, **chosen)
        try:
            costs = static_cost.measure(
                lambda *a, s=sizes: attend(*a, *rest, s), call.arguments, device, folder
            )
        except Exception as error:  # the compiler raises several kinds
            print(f"  {chosen}: {str(error).splitlines()[0][:100]}")
            continue
        found = {cost.name.split("_")[0]: cost for cost in costs}
        if d_block >= smallest:
            score = decode_score(found["decode"], d_block, call.page)
            decode.append(
                {
                    "decode_kv": d_block,
                    "decode_step": d_step,
                    "score": score,
                    **asdict(found["decode"]),
                }
            )
        if m_block >= smallest:
            score = mixed_score(found["mixed"], m_block, queries, call.page)
            what = {
                "mixed_kv": m_block,
                "mixed_step": m_step,
                "mixed_tokens": queries,
                "score": score,
            }
            mixed.append(what | asdict(found["mixed"]))
    return sorted(decode, key=lambda row: row["score"]), sorted(mixed, key=lambda row: row["score"])


def show(rows: list[dict[str, Any]]) -> None:
    """Candidates of one kernel, best first."""
    for row in rows:
        sizes = ", ".join(f"{name} {value}" for name, value in row.items() if "_" in name)
        print(
            f"  {row['score']:8.4f}  {sizes}: {row['bundles']} bundles, {row['spills']} spills, "
            f"{row['fills']} fills, "
            f"{row['vmem'] >> 10} KiB"
        )


def write(table: dict[str, dict[str, Any]]) -> None:
    """Put entries into `blocks.json`, one line each."""
    whole = json.loads(blocks.TABLE.read_text()) | table
    lines = [f"  {json.dumps(name)}: {json.dumps(sizes)}" for name, sizes in whole.items()]
    blocks.TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    """Rank every shape for every chip."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", type=some_of(CHIPS), default=",".join(CHIPS))
    parser.add_argument(
        "--heads", type=whole_numbers(1), default="8", help="KV heads on a device, such as 8,2,1"
    )
    parser.add_argument("--group", type=whole_number(1), default=4, help="query heads to a KV head")
    parser.add_argument("--hdim", type=whole_number(1), default=128)
    parser.add_argument("--page", type=whole_number(1), default=128)
    parser.add_argument(
        "--dtype", default="bfloat16", help="of the cache: bfloat16, int8, float8_e4m3fn"
    )
    parser.add_argument("--write", action="store_true", help="put the best into blocks.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        static_cost.dump_to(Path(name))
        leave_out_libtpu()
        for chip in options.chips:
            device = topology(CHIPS[chip]).devices[0]
            for heads in options.heads:
                call = Call(
                    "ranked", 32, 512, heads=options.group * heads, kv_heads=heads,
                    hdim=options.hdim,
                    page=options.page, cache=options.dtype,
                )  # fmt: skip
                key = blocks.entry(device.device_kind, options.dtype, heads, options.hdim)
                print(key, flush=True)
                decode, mixed = candidates(device, call, Path(name))
                show(decode)
                show(mixed)
                if not decode or not mixed:
                    continue
                best = asdict(blocks.block_sizes(device.device_kind))
                best |= {
                    name: value
                    for row in (decode[0], mixed[0])
                    for name, value in row.items()
                    if name in best
                }
                if options.write:
                    write({key: best})
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
