"""Time products with narrow weights on this GPU, by shape, kind and number of rows, and try launch
configurations of them.

    python scripts/tune_narrow.py [--kinds int8,fp8,int4,tokens,quantises] [--rows 1,8,64,2048]
    [--shapes 6144x4096,4096x4096] [--json F] [--jobs 12]

Each figure is microseconds of one call inside a CUDA graph of many, over so many copies of the
weight that the L2 cache holds none. bf16 is cuBLAS (`F.linear`); `scaled_mm` is the fp8 units with
and without fast accumulation, and `error` its distance to float64 over that of one rounding.
`--jobs` processes compile all configurations before, one after the other is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from twinfer.gpu.devices import find_device
from twinfer.gpu.kernels import launch, narrow
from twinfer.serving.parser import OneLineParser, argument, output_file, some_of, whole_numbers
from twinfer.serving.program import run_program

KINDS = ("int8", "fp8", "int4", "tokens", "quantises")
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
GEMV = [
    {"block_k": k, "entries": e, "programs": p, "warps": w}
    for k, e, p, w in [
        (4096, 16384, 2, 4), (2048, 8192, 4, 4), (4096, 32768, 2, 8), (2048, 16384, 2, 4),
        (4096, 32768, 2, 4), (2048, 16384, 2, 8),
    ]
]  # fmt: skip
QUANTIZING = [
    {"rows": 2, "most_k": 8192, "entries": e, "programs": p, "warps": w}
    for e, p, w in [
        (16384, 5, 4), (16384, 10, 4), (16384, 4, 8), (8192, 8, 4), (8192, 4, 8), (32768, 3, 8),
        (8192, 10, 1), (8192, 10, 2), (16384, 5, 2), (16384, 8, 2), (32768, 4, 4),
    ]
]  # fmt: skip
FRAGMENTS = [
    {"from_rows": 1, "rows": 16, "block_n": n, "pieces": p, "warps": w, "ahead": a}
    for n, p, w, a in [
        (16, 1, 8, 4), (16, 1, 8, 6), (16, 1, 4, 8), (32, 1, 4, 6), (32, 1, 8, 4), (16, 2, 4, 4),
        (32, 2, 4, 4), (32, 4, 4, 2), (64, 8, 2, 4), (16, 2, 8, 4), (32, 2, 8, 2), (32, 4, 2, 4),
        (32, 1, 4, 4), (64, 2, 4, 3),
    ]
]  # fmt: skip
TILES = [
    {
        "programs": p, "steps": t, "stages": s, "warps": w, "registers": r,
    }
    for p, t, s, w, r in [
        (1, 4, 4, 8, 168), (1, 4, 6, 8, 168), (1, 4, 8, 8, 168),
        (2, 4, 4, 8, 112), (1, 8, 6, 8, 168), (2, 4, 4, 4, 168),
        (2, 4, 5, 4, 168), (1, 4, 8, 4, 168), (3, 4, 3, 4, 128), (2, 8, 5, 4, 168),
        (4, 4, 4, 4, 96),
    ]
]  # fmt: skip
FEW = [
    {
        "block_m": 16, "block_n": n, "block_k": k, "programs": p, "steps": 2, "warps": w,
        "stages": s,
    }
    for n, k, p, w, s in [
        (64, 128, 2, 4, 3), (64, 128, 4, 4, 4), (128, 128, 2, 8, 4), (64, 256, 2, 4, 3),
    ]
]  # fmt: skip
SOME = [
    {
        "block_m": 64, "block_n": n, "block_k": k, "programs": p, "steps": 4, "warps": w,
        "stages": s,
    }
    for n, k, p, w, s in [
        (64, 128, 1, 4, 3), (128, 128, 1, 4, 3), (64, 128, 2, 4, 4), (128, 64, 1, 8, 4)
    ]
]  # fmt: skip
MANY = [
    {
        "block_m": m, "block_n": n, "block_k": k, "programs": 1, "steps": 8, "warps": w,
        "stages": s,
    }
    for m, n, k, w, s in [
        (128, 128, 64, 8, 3), (128, 128, 128, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 4, 3),
        (64, 128, 128, 4, 3),
    ]
]  # fmt: skip


def settings(kind: str, rows: int) -> Iterator[tuple[str, dict[str, int]]]:
    """(kernel, configuration) to try for so many rows."""
    if kind == "quantises":
        yield from (("quantizing", x) for x in QUANTIZING)
        return
    if rows <= 16:
        yield from (("fragments", x) for x in FRAGMENTS)
    if kind == "int4" and 2 < rows <= 128:
        yield from (("tiles", x) for x in TILES)
    if rows <= 2:
        yield from (("gemv", x) for x in GEMV)
    if rows <= 16:
        yield from (("blocks", x) for x in FEW)
    elif rows <= 64:
        yield from (("blocks", x) for x in SOME)
    else:
        yield from (("blocks", x) for x in MANY)


def arguments(kind: str, n: int, k: int, rows: int) -> tuple[Any, ...]:
    """(x, weight, scale, zero, x_scale, bias, kind) of a product; `tokens` are fp8 by fp8, and
    `quantises` the same of tokens that each program quantises.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, k, device="cuda", generator=generator).bfloat16()
    w = torch.randn(n, k, device="cuda", generator=generator).bfloat16() * 0.02
    group = 128 if kind == "int4" else k
    if kind == "int4":
        weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scale = torch.rand(n, k // group, device="cuda") * 0.01
        return x, weight, scale, None, None, None, kind
    if kind == "int8":
        weight, scale = narrow.quantize_int8_dynamic(w, "row", 0)
        return x, weight, scale, None, None, None, kind
    weight, scale = narrow.quantize_fp8_dynamic(w, "row", 0)
    if kind in ("fp8", "quantises"):
        return x, weight, scale, None, None, None, "fp8"
    values, x_scale = narrow.quantize_fp8_dynamic(x, "row", 0)
    return values, weight, scale, None, x_scale, None, "fp8"


def microseconds(call: Callable[[int], Any], copies: int) -> float:
    """Of one call, by the median of replays of a graph of them."""
    graph, calls, stream = torch.cuda.CUDAGraph(), max(copies, 20), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(copies):
            call(i)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(i % copies)
    times = []
    for _ in range(7):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / calls)
    return statistics.median(times)


def product(kernel: str, setting: dict[str, int], given: tuple[Any, ...], out: Any) -> None:
    """One launch with a configuration."""
    narrow.config = lambda *names: setting  # type: ignore[assignment]
    if kernel == "quantizing":
        x, weight, scale = given[:3]
        if not narrow.quantises(x, weight, scale):
            raise ValueError("another kernel's")
        narrow.quantizing_gemv(x, weight, scale, None, out.dtype)
        return
    asked = narrow.Product(*given, out)
    takes = {"fragments": narrow.fragments_take, "tiles": narrow.tiles_take}
    if kernel in takes and not takes[kernel](asked):
        raise ValueError("another kernel's")
    kernels = {
        "gemv": narrow._gemv, "blocks": narrow._blocks, "fragments": narrow.fragments,
        "tiles": narrow.tiles,
    }  # fmt: skip
    kernels[kernel](asked)


def copied(given: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Copies of the arguments, 200 MB of weights in all."""
    weight = given[1]
    count = max(1, min(16, 200_000_000 // weight.numel()))
    return [(given[0], weight.clone(), given[2].clone(), *given[3:]) for _ in range(count)]


def measure(kind: str, rows: int) -> dict[str, Any]:
    """Figures by shape."""
    found: dict[str, Any] = {}
    for n, k in SHAPES:
        given = arguments(kind, n, k, rows)
        every = copied(given)
        out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
        figures: list[Any] = []
        for kernel, setting in settings(kind, rows):
            try:
                time = microseconds(
                    lambda i, a=kernel, b=setting, c=every, d=out: product(a, b, c[i], d),
                    len(every),
                )
            except Exception as why:
                figures.append((9e9, kernel, setting, str(why)[:80]))
                continue
            figures.append((round(time, 2), kernel, setting))
        figures.sort(key=lambda figure: figure[0])
        best = figures[0]
        rate = given[1].numel() / best[0] / 1e6
        key = f"{kind} {n}x{k} rows {rows}"
        found[key] = [*figures[:4], figures[-1]]
        print(
            f"{key}: {best[0]} us, {rate:.2f} TB/s, {best[1:]}; worst {figures[-1][0]}", flush=True
        )
    return found


def plain(rows: int) -> dict[str, float]:
    """What bf16 and the fp8 units take."""
    found: dict[str, float] = {}
    for n, k in SHAPES:
        x = torch.randn(rows, k, device="cuda").bfloat16()
        w = [torch.randn(n, k, device="cuda").bfloat16() * 0.02 for _ in range(4)]
        found[f"bf16 {n}x{k} rows {rows}"] = microseconds(
            lambda i, x=x, w=w: torch.nn.functional.linear(x, w[i]), len(w)
        )
        narrow_w = [narrow.quantize_fp8_dynamic(y, "row", 0) for y in w]
        values, scale = narrow.quantize_fp8_dynamic(x, "row", 0)
        exact = (values.double() * scale) @ (narrow_w[0][0].double() * narrow_w[0][1]).T
        rounding = (exact.bfloat16().double() - exact).norm()
        for fast in (False, True):

            def units(
                i: int, fast: bool = fast, a: Any = values, s: Any = scale, w: Any = narrow_w
            ) -> Any:
                weight, of = w[i]
                return torch._scaled_mm(
                    a, weight.t(), s, of.t(), out_dtype=torch.bfloat16, use_fast_accum=fast
                )

            name = f"scaled_mm fast={fast} {n}x{k} rows {rows}"
            try:
                found[name] = microseconds(units, len(narrow_w))
                error = (units(0).double() - exact).norm() / rounding
                found[f"{name} error"] = round(float(error), 4)
            except RuntimeError as why:
                print(name, str(why)[:200])
        found[f"quantize {k} rows {rows}"] = microseconds(
            lambda i, x=x: narrow.quantize_fp8_dynamic(x, "row", 0), 1
        )
    print(json.dumps(found, indent=1), flush=True)
    return found


def warm(kinds: list[str], rows: list[int], jobs: int) -> None:
    """Compile everything in processes of their own; Triton keeps it on disk."""
    todo = [
        (kind, row, i)
        for row in rows
        for kind in kinds
        for i in range(len(list(settings(kind, row))) * len(SHAPES))
    ]
    running: list[subprocess.Popen[bytes]] = []
    for index in range(jobs):
        mine = [f"{kind}:{row}:{i}" for kind, row, i in todo[index::jobs]]
        if mine:
            shapes = ",".join(f"{n}x{k}" for n, k in SHAPES)
            command = [sys.executable, __file__, "--shapes", shapes, "--compile", ",".join(mine)]
            running.append(subprocess.Popen(command))
    for process in running:
        process.wait()


def compile_only(triples: list[str]) -> None:
    """Launch each configuration once: (kind, rows, which of its shapes and configurations)."""
    for triple in triples:
        kind, rows, which = triple.split(":")
        index, shape = divmod(int(which), len(SHAPES))
        kernel, setting = list(settings(kind, int(rows)))[index]
        n, k = SHAPES[shape]
        given = arguments(kind, n, k, int(rows))
        out = torch.empty(int(rows), n, dtype=torch.bfloat16, device="cuda")
        try:
            product(kernel, setting, given, out)
        except Exception:
            continue
    torch.cuda.synchronize()


def weights(text: str) -> list[tuple[int, int]]:
    """Shapes of weights with commas between."""
    try:
        pairs = [shape.split("x") for shape in text.split(",")]
        return [(int(n), int(k)) for n, k in pairs]
    except ValueError:
        raise ValueError(f"{text!r} is not shapes such as 6144x4096,4096x4096") from None


def main() -> None:
    """See the module."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", type=some_of(KINDS), default="int8,fp8,int4,tokens")
    parser.add_argument("--rows", type=whole_numbers(1), default="1,8,64,2048")
    parser.add_argument("--shapes", type=argument(weights), help="of weights, as 6144x4096")
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--compile", default="")
    arguments_ = parser.parse_args()
    if arguments_.shapes:
        SHAPES[:] = arguments_.shapes
    if arguments_.compile:
        compile_only(arguments_.compile.split(","))
        return
    find_device("cuda")
    kinds, rows = arguments_.kinds, arguments_.rows
    if arguments_.jobs:
        warm(kinds, rows, arguments_.jobs)
    original = launch.config
    found: dict[str, Any] = {}
    for row in rows:
        for kind in kinds:
            found |= measure(kind, row)
        narrow.config = original
        found |= plain(row)
    if arguments_.json:
        with open(arguments_.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    sys.exit(run_program(main))
