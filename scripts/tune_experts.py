"""Time the experts of a layer on this GPU, and try launch configurations.

    python scripts/tune_experts.py [--shape gpt-oss-20b] [--kind fp4] [--routing even,zipf]
    [--tokens 1,8,64,256] [--json F] [--jobs 8]

Each figure is microseconds of the experts of one layer inside a CUDA graph of many, each of which
has a routing of its own. `share` is that of the time in which a copy on this GPU moves the bytes
of the experts that are chosen, `experts` how many these are. `even`: all are as likely; `zipf`:
the i-th is chosen 1/i as often as the first. Configurations are tried of fp4 and fp8: the first
candidate is what `gpu/kernels/configs.json` has, `plain` are the kernels for any kind of weight;
`error` is the largest difference to these, or of fp8 to the first, in units of the largest result.
`--jobs` processes compile all configurations before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from tune_narrow import microseconds

from twinfer.gpu.devices import find_device
from twinfer.gpu.kernels import launch, moe, moe_narrow
from twinfer.serving.parser import OneLineParser, output_file, some_of, whole_numbers
from twinfer.serving.program import run_program

ROUTINGS = 16
KINDS_OF_ROUTING = ("even", "zipf")


class Shape(NamedTuple):
    """Experts of a layer: how many, how many a token goes through, and their sizes."""

    experts: int
    top_k: int
    dim: int
    inter: int


SHAPES = {
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
}
BYTES = {"plain": 2.0, "fp8": 1.0, "fp4": 0.5 + 2 / 32}
"""Of an entry of a weight, with its share of a scale."""
FEW = [(16, 4, 6), (16, 4, 4), (16, 4, 2), (16, 2, 4), (32, 4, 2), (32, 2, 4)]
FEW_DOWN = [(32, 16, 3), (32, 8, 3), (16, 16, 3), (16, 16, 2), (16, 8, 6), (16, 8, 3), (16, 4, 3)]
PRODUCT = [
    *((32, 4, 1), (32, 4, 2), (32, 4, 6), (32, 2, 1), (32, 2, 2), (32, 2, 4)),
    *((16, 4, 3), (16, 4, 6), (64, 4, 2)),
]
FP8_FEW = [
    {
        "block_k": 2048, "entries": e, "programs": p, "warps": w, "down_k": k, "down_entries": d,
        "down_ahead": a,
    }
    for e, p, w, k, d, a in [
        (16384, 4, 4, 1024, 16384, 1), (16384, 8, 4, 256, 4096, 1), (16384, 8, 4, 256, 4096, 3),
        (16384, 4, 4, 256, 8192, 3), (8192, 16, 2, 256, 4096, 3), (32768, 8, 8, 256, 4096, 3),
    ]
]  # fmt: skip
TILES = {
    "fp8": [
        (16, 64, 128, 4, 3, 0), (16, 64, 128, 4, 3, 1), (16, 32, 256, 4, 3, 0),
        (16, 32, 256, 2, 3, 1), (16, 32, 128, 4, 3, 0), (16, 128, 128, 4, 3, 0),
        (128, 128, 64, 8, 3, 0), (128, 64, 64, 4, 3, 0),
        (128, 64, 64, 4, 3, 1), (128, 64, 32, 4, 4, 1), (256, 64, 64, 8, 3, 1),
    ],
    "fp4": [
        (64, 64, 64, 4, 3, 0), (64, 64, 64, 4, 3, 1), (64, 64, 128, 4, 3, 0),
        (64, 64, 128, 4, 3, 1), (64, 128, 64, 4, 3, 0), (64, 128, 64, 8, 3, 0),
        (64, 128, 64, 8, 3, 1), (64, 32, 128, 4, 3, 0), (32, 64, 128, 4, 3, 0),
        (128, 128, 64, 8, 3, 0), (128, 128, 64, 8, 3, 1), (128, 64, 64, 4, 3, 0),
        (128, 64, 64, 4, 3, 1), (128, 64, 128, 4, 3, 0), (128, 128, 128, 8, 3, 0),
        (128, 256, 64, 8, 3, 0), (256, 64, 64, 8, 3, 1), (256, 128, 64, 8, 3, 0),
    ],
}  # fmt: skip
"""Rows, results and entries of k of a block, warps, stages, whether the weight is on the left."""


def tiles(shape: Shape, kind: str, tokens: int) -> Iterator[tuple[str, dict[str, dict[str, int]]]]:
    """Those of `narrow_product_kernel`: of gate and up, and of down."""
    rows = moe.rows_of_block(tokens * shape.top_k, shape.experts)
    names = "block_m", "block_n", "block_k", "warps", "stages", "left"
    for numbers in TILES[kind]:
        if (numbers[0] > 64) == (rows == "128"):
            entry = dict(zip(names, numbers, strict=True))
            for role in ("up", "down"):
                variants = "bfloat16", f"{kind}/{rows}/{role}", f"{kind}/{rows}", rows
                name = "/".join(("moe_narrow_product", *variants))
                yield f"{role} {[*numbers]}", {name: entry}


def settings(
    shape: Shape, kind: str, tokens: int
) -> Iterator[tuple[str, dict[str, dict[str, int]]]]:
    """(name, entries of `configs.json`) to try for so many tokens."""
    yield "configs.json", {}
    if kind == "plain":
        return
    if kind == "fp8" and tokens <= 2:
        for entry in FP8_FEW:
            yield f"few {[*entry.values()]}", {"moe_narrow_few/fp8": entry}
        return
    if kind == "fp8" or tokens * shape.top_k > 16 * shape.experts:
        yield from tiles(shape, kind, tokens)
        return
    yield "plain", {"moe_fragments": {"rows": 0}}
    base = {"moe_fragments": {"rows": 64}}
    if tokens <= 2:
        for names, candidates in (("few", FEW), ("few_down", FEW_DOWN)):
            for n, w, a in candidates:
                entry = {f"moe_fragments/{names}": {"block_n": n, "warps": w, "ahead": a}}
                yield f"{names} {n} {w} {a}", base | entry
        return
    for n, w, a in PRODUCT:
        entry = {"block_n": n, "warps": w, "ahead": a}
        yield f"rows {n} {w} {a}", base | {f"moe_fragments/{m}": entry for m in (2, 4, 8, 16, 32)}


def weights(shape: Shape, kind: str) -> list[Any]:
    """Of gate and up, and of down: values, scales, no zeros, biases; of plain ones values alone."""
    found: list[Any] = []
    for n, k in ((2 * shape.inter, shape.dim), (shape.dim, shape.inter)):
        size = (shape.experts, n, k)
        if kind == "plain":
            found.append(torch.randn(size, device="cuda", dtype=torch.bfloat16) * 0.02)
        elif kind == "fp8":
            values = torch.randn(size, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
            found += [values, torch.full((shape.experts, n, 1), 0.02, device="cuda"), None, None]
        else:
            packed = (shape.experts, n, k // 2)
            values = torch.randint(0, 256, packed, dtype=torch.uint8, device="cuda")
            powers = torch.randint(-8, -5, (shape.experts, n, k // 32), device="cuda")
            bias = torch.randn(shape.experts, n, device="cuda").bfloat16()
            found += [values, torch.exp2(powers).bfloat16(), None, bias]
    return found


def chosen(shape: Shape, tokens: int, routing: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of tokens, drawn without putting back."""
    noise = -torch.rand(tokens, shape.experts, device="cuda").log().neg().log()
    if routing == "zipf":
        noise -= torch.arange(1, shape.experts + 1, device="cuda").log()[None, :]
    best = noise.topk(shape.top_k)
    return best.values.softmax(-1), best.indices.int()


def configured(entries: dict[str, dict[str, int]]) -> None:
    """Let kernels find these entries before those of `configs.json`."""

    def config(*names: str) -> dict[str, int]:
        return entries.get("/".join(names)) or launch.config(*names)

    moe_narrow.config = config  # type: ignore[assignment]


def experts(
    kind: str, x: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor], layer: list[Any]
) -> torch.Tensor:
    """The experts of a layer."""
    if kind == "plain":
        plain: torch.Tensor = moe.moe_experts(x, *routing, *layer)
        return plain
    clamped = (1.702, 7.0) if kind == "fp4" else (0.0, 0.0)
    narrow: torch.Tensor = moe_narrow.moe_experts_narrow(x, *routing, *layer, kind, *clamped)
    return narrow


def measure(
    shape: Shape, kind: str, tokens: int, routing: str, layer: list[Any], rate: float
) -> dict[str, Any]:
    """Figures by configuration."""
    x = torch.randn(tokens, shape.dim, device="cuda").bfloat16() * 0.1
    routings = [chosen(shape, tokens, routing) for _ in range(ROUTINGS)]
    distinct = sum(len(ids.unique()) for _, ids in routings) / ROUTINGS
    bytes_read = distinct * 3 * shape.inter * shape.dim * BYTES[kind]
    found: dict[str, Any] = {}
    reference = None
    for name, entries in sorted(settings(shape, kind, tokens), key=lambda pair: pair[0] != "plain"):
        configured(entries)
        try:
            result = experts(kind, x, routings[0], layer).float()
            time = microseconds(lambda i: experts(kind, x, routings[i], layer), ROUTINGS)
        except Exception as why:
            print(f"{tokens} tokens, {name}: {str(why)[:120]}", flush=True)
            continue
        reference = result if reference is None else reference
        error = float((result - reference).abs().max() / reference.abs().max())
        share = bytes_read / rate / time * 1e6
        found[name] = {"us": round(time, 2), "share": round(share, 3), "error": round(error, 5)}
        found[name]["experts"] = round(distinct, 1)
        print(f"{kind}, {tokens} tokens, {routing}, {name}: {found[name]}", flush=True)
    return found


def compile_only(shape: Shape, kind: str, tokens: list[int], job: int, jobs: int) -> None:
    """Launch every `jobs`-th configuration once: Triton keeps what it compiled on disk."""
    layer = weights(shape, kind)
    every = [(n, entries) for n in tokens for _, entries in settings(shape, kind, n)]
    for n, entries in every[job::jobs]:
        configured(entries)
        x = torch.zeros(n, shape.dim, device="cuda").bfloat16()
        experts(kind, x, chosen(shape, n, "even"), layer)
    torch.cuda.synchronize()


def main() -> None:
    """See the module."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="gpt-oss-20b")
    parser.add_argument("--kind", choices=BYTES, default="fp4")
    parser.add_argument("--routing", type=some_of(KINDS_OF_ROUTING), default="even")
    parser.add_argument("--tokens", type=whole_numbers(1), default="1,8,64,256")
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--compile", default="", help="JOB/JOBS: what a process of --jobs does")
    given = parser.parse_args()
    tokens, shape = given.tokens, SHAPES[given.shape]
    if given.compile:
        compile_only(shape, given.kind, tokens, *map(int, given.compile.split("/")))
        return
    find_device("cuda")
    command = [
        sys.executable, __file__, "--shape", given.shape, "--kind", given.kind, "--tokens",
        ",".join(map(str, tokens)), "--compile",
    ]  # fmt: skip
    running = [
        subprocess.Popen([*command, f"{job}/{given.jobs}"], stderr=subprocess.DEVNULL)
        for job in range(given.jobs)
    ]
    for process in running:
        process.wait()
    big = torch.zeros(1 << 29, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    rate = 2 * big.numel() / microseconds(lambda i: other.copy_(big), 1) * 1e6
    print(f"a copy moves {rate / 1e12:.2f} TB/s", flush=True)
    layer = weights(shape, given.kind)
    found = {
        f"{n} {routing}": measure(shape, given.kind, n, routing, layer, rate)
        for routing in given.routing
        for n in tokens
    }
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"copy": rate, "us": found}, file, indent=1)


if __name__ == "__main__":
    sys.exit(run_program(main))
