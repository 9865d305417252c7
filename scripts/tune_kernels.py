"""Time the Triton kernels on this GPU against what they stand in for, and find their best launch
configurations.

    python scripts/tune_kernels.py [--kernels decode,prefill,gemv,skinny,rows,sample,step] [--sweep]
    [--json best.json]

Each figure is the time of one call inside a CUDA graph of many, over so many copies of the
arguments that the L2 cache holds none of them; "share" is the bytes that must be read over that
time, against a copy on the same GPU. `step` is all layers of a decode step in a row, which is where
kernels overlap: what counts for those of one token. With --sweep the configurations below are
tried; the best of each kernel belongs into `gpu/kernels/configs.json` under the chip.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from twinfer.gpu.devices import find_device
from twinfer.gpu.kernels import launch
from twinfer.ops import resolve
from twinfer.serving.parser import OneLineParser, output_file, some_of
from twinfer.serving.program import run_program
from twinfer.shared.models import decoder
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.shapes import SHAPES as SHAPE_FILES

SHAPES = {"0.6B": (16, 8, 128, 1024, 3072, 151936), "8B": (32, 8, 128, 4096, 14336, 128256)}
"""Query heads, KV heads, head size, width, MLP width, words."""
SWEEPS = {
    "decode": {
        "block_n": (32, 64),
        "chunk": (32, 64),
        "parts": (32,),
        "programs": (4, 8),
        "warps": (2, 4),
        "stages": (1, 3),
    },
    "prefill": {"block_n": (64, 128), "stages": (2, 3)},
    "gemv": {
        "block_k": (2048, 4096),
        "entries": (8192, 16384),
        "programs": (2, 4),
        "warps": (4, 8),
    },
    "skinny": {
        "block_n": (32, 64),
        "block_k": (128, 256),
        "programs": (2,),
        "stages": (3,),
        "warps": (4,),
    },
}
CONFIGS = {"decode": ("decode", "bfloat16"), "prefill": ("hopper", "128")}
"""The configuration that a sweep is about, where it is not that of the kernel's name."""
Work = tuple[str, float, dict[str, Callable[[int], Any]]]
"""A name, bytes or operations of a call, and by provider a call on the i-th copy of its
arguments.
"""


def seconds(call: Callable[[int], Any], calls: int = 32, repeats: int = 5) -> float:
    """Median time of a call in a graph of `calls`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(2):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # whose launches have run on it: counters are a stream's
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(i)
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls / 1e3)
    return statistics.median(times)


def copies(*shape: int, wanted: int = 1 << 27, most: int = 32) -> list[torch.Tensor]:
    """Tensors of a shape that together are larger than any cache, bfloat16."""
    return [normal(*shape) for _ in range(max(1, min(most, wanted // math.prod(shape))))]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Small normal numbers."""
    return (torch.randn(*shape, device="cuda") * 0.05).to(dtype)


def paged(
    ops: Any, heads: int, kv_heads: int, size: int, lengths: list[int], queries: list[int]
) -> Any:
    """A call of paged_attention for these requests, pages of 16 and room for 4096 slots a
    request.
    """
    page, requests = 16, len(lengths)
    need = [-(-n // page) for n in lengths]
    table = torch.zeros(requests, 256, dtype=torch.int32)
    order, at = torch.randperm(sum(need)).to(torch.int32), 0
    for i, n in enumerate(need):
        table[i, :n] = order[at : at + n]
        at += n
    caches = copies(sum(need) + 1, page, 2 * kv_heads, size)
    start = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device="cuda")
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    counts = torch.tensor([queries.count(1), requests], dtype=torch.int32, device="cuda")
    table, q = table.cuda(), normal(sum(queries), heads, size)
    return lambda i: ops.paged_attention(
        q, caches[i % len(caches)], table, start, lens, counts, size**-0.5, 0, 0.0, max(queries)
    )


def decode_work(ops: Any, native: Any, all_of_it: bool) -> Iterator[Work]:
    """Decode steps; beside them scaled_dot_product_attention on a contiguous cache of the same
    length.
    """
    for model, (heads, kv_heads, size, *_) in SHAPES.items():
        for batch, length in (
            (1, 200),
            (1, 4000),
            (8, 200),
            (8, 4000),
            (64, 200),
            (64, 2000),
            (256, 200),
        ):
            lengths = [length] * batch
            moved = 4.0 * kv_heads * size * sum(lengths)
            triton = paged(ops, heads, kv_heads, size, lengths, [1] * batch)
            caches = copies(2, batch, kv_heads, length, size, most=16)
            q = normal(batch, heads, 1, size)

            def plain(i: int, q: Any = q, caches: Any = caches) -> Any:
                k, v = caches[i % len(caches)]
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

            name = f"decode {model} b={batch} of {length}"
            yield name, moved, {"triton": triton, **({"sdpa": plain} if all_of_it else {})}


def prefill_work(ops: Any, native: Any, all_of_it: bool) -> Iterator[Work]:
    """Prompts of 1024 and one of 4096; beside them causal scaled_dot_product_attention."""
    for model, (heads, kv_heads, size, *_) in SHAPES.items():
        for batch, length in ((1, 1024), (8, 1024), (2, 4096)):
            work = 2.0 * batch * heads * size * length * (length + 1)
            triton = paged(ops, heads, kv_heads, size, [length] * batch, [length] * batch)
            q, k, v = (normal(batch, h, length, size) for h in (heads, kv_heads, kv_heads))

            def plain(i: int, q: Any = q, k: Any = k, v: Any = v) -> Any:
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=True
                )

            yield (
                f"prefill {model} {batch} of {length}",
                work,
                {"triton": triton, **({"sdpa": plain} if all_of_it else {})},
            )


def product_work(ops: Any, native: Any, rows: tuple[int, ...], heads_too: bool) -> Iterator[Work]:
    """The projections of both models, and their heads; beside them cuBLAS."""
    for model, (heads, kv_heads, size, dim, inter, vocab) in SHAPES.items():
        shapes = {"qkv": ((heads + 2 * kv_heads) * size, dim), "o": (dim, heads * size)}
        shapes |= {"gate_up": (2 * inter, dim), "down": (dim, inter)}
        for name, (n, k) in shapes.items():
            weights = copies(n, k)
            for m in rows:
                x = normal(m, k)
                calls = {
                    provider: lambda i, o=o, x=x, w=weights: o.linear(x, w[i % len(w)], None)
                    for provider, o in (("triton", ops), ("cuBLAS", native))
                }
                yield f"linear {model} {name} {n}x{k}, {m} rows", 2.0 * n * k, calls
        if heads_too:
            weights = copies(vocab, dim, most=2)
            for m in rows:
                x = normal(m, dim)
                calls = {
                    provider: lambda i, o=o, x=x, w=weights: o.logits(x, w[i % len(w)])
                    for provider, o in (("triton", ops), ("cuBLAS", native))
                }
                yield f"logits {model}, {m} rows", 2.0 * vocab * dim, calls


def row_work(ops: Any, native: Any, all_of_it: bool) -> Iterator[Work]:
    """Norms, activation, rotation and write, greedy sampling; beside them the native ops,
    compiled by Inductor.
    """
    options = {"fullgraph": True, "dynamic": False}
    for model, (heads, kv_heads, size, dim, inter, vocab) in SHAPES.items():
        for m in (1, 8, 64, 256, 2048):
            x, residual, w, head_w = normal(m, dim), normal(m, dim), normal(dim), normal(size)
            gate, kv = normal(m, 2 * inter), normal(1024, 16, 2 * kv_heads, size)
            qkv, angles = (
                normal(m, (heads + 2 * kv_heads) * size),
                torch.rand(m, size // 2, device="cuda"),
            )
            slots = torch.randperm(1024 * 16 - 1, device="cuda")[:m].to(torch.int32)

            def rope(
                qkv: Any, kv: Any, o: Any = native, w: Any = head_w, a: Any = angles, s: Any = slots
            ) -> Any:
                return o.norm_rope_write_kv(qkv, kv, w, w, a, a, s, 1e-6)

            torch.compiler.reset()
            plain = torch.compile(lambda *a: native.fused_add_rms_norm(*a, 1e-6), **options)
            gated = torch.compile(native.silu_and_mul, **options)
            yield f"fused_add_rms_norm {model}, {m} rows", 8.0 * m * dim, {
                "triton": lambda i, x=x, r=residual, w=w: ops.fused_add_rms_norm(x, r, w, 1e-6),
                "Inductor": lambda i, x=x, r=residual, w=w, f=plain: f(x, r, w),
            }  # fmt: skip
            yield f"silu_and_mul {model}, {m} rows", 6.0 * m * inter, {
                "triton": lambda i, x=gate: ops.silu_and_mul(x),
                "Inductor": lambda i, x=gate, f=gated: f(x),
            }  # fmt: skip
            yield f"norm_rope_write_kv {model}, {m} rows", 4.0 * qkv.numel(), {
                "triton": lambda i, x=qkv, kv=kv, f=rope: f(x, kv, ops),
                "composition, eager": lambda i, x=qkv, kv=kv, f=rope: f(x, kv),
            }  # fmt: skip
            if m <= 256:
                y = normal(m, vocab, dtype=torch.float32)
                yield f"greedy_sample {model}, {m} rows", 4.0 * y.numel(), {
                    "triton": lambda i, y=y: ops.greedy_sample(y),
                    "argmax": lambda i, y=y: torch.argmax(y, -1),
                }  # fmt: skip


def sample_work(ops: Any, native: Any, all_of_it: bool) -> Iterator[Work]:
    """Drawn tokens; beside them the native ops, in a graph like all the rest."""
    for rows in (1, 8, 64, 256):
        logits = normal(rows, 151936, dtype=torch.float32) * 60
        scores = native.quantize_logits(logits)
        ints = torch.arange(5 * rows, dtype=torch.int32, device="cuda").view(5, rows)
        given = (
            ints[0],
            ints[1],
            ints[2],
            ints[3] * 0,
            torch.ones(rows, device="cuda"),
            ints[4] * 0 + 50,
        )
        given += ints[0] * 0 + 60000, ints[0] * 0 + (1 << 22)  # the 50 best, 0.92 of the mass
        for filtered in (False, True):
            what = f"sample of 151936, {rows} rows, {'filtered' if filtered else 'all'}"
            yield what, 4.0 * scores.numel(), {
                "triton": lambda i, g=given, x=logits, s=scores,
                f=filtered: ops.sample(x, s, *g, f),
                "native": lambda i, g=given, x=logits, s=scores,
                f=filtered: native.sample(x, s, *g, f),
            }  # fmt: skip


def step_work(ops: Any, native: Any, all_of_it: bool) -> Iterator[Work]:
    """All layers of a decode step, without what is before and after them."""
    for name in ("qwen3-0.6b", "llama3-8b"):
        config = parse_config(SHAPE_FILES[name])
        table = decoder.parameters_of(config).layer(0).values()
        model = decoder.model_of(config)
        layers = [{p.name: normal(*p.shape) for p in table} for _ in range(config.num_layers)]
        weights = float(config.num_layers * sum(2 * math.prod(p.shape) for p in table))
        for batch in (1, 8, 64):
            length = 200
            pages = batch * -(-length // 16)
            kv = [normal(pages + 1, 16, 2 * config.num_kv_heads, config.head_dim) for _ in layers]
            angles, ints = (
                torch.rand(batch, config.head_dim // 2, device="cuda"),
                torch.arange(batch + 1),
            )
            start, lens, counts = ints, torch.full((batch,), length), torch.tensor([batch, batch])
            pages_of = torch.zeros(batch, 256, dtype=torch.int32)
            pages_of[:, : pages // batch] = torch.randperm(pages).view(batch, -1)
            slots = pages_of[:, (length - 1) // 16] * 16 + (length - 1) % 16
            rest = (x.to(torch.int32).cuda() for x in (slots, pages_of, start, lens, counts))
            inputs = decoder.Batch(angles, angles, *rest, max_query_len=1)
            first = normal(batch, config.hidden_size)

            def step(
                i: int,
                model: Any = model,
                layers: Any = layers,
                kv: Any = kv,
                x: Any = first,
                b: Any = inputs,
            ) -> Any:
                stream = decoder.Stream(x.clone(), torch.zeros_like(x))
                for spec, layer, cache in zip(model.layers, layers, kv, strict=True):
                    stream, _ = decoder.layer(ops, spec, layer, stream, cache, b)

            read = 4.0 * config.num_layers * batch * length * config.num_kv_heads * config.head_dim
            yield (
                f"step {name}, {batch} of {length}, {config.num_layers} layers",
                weights + read,
                {"triton": step},
            )


WORK: dict[str, Callable[[Any, Any, bool], Iterator[Work]]] = {
    "decode": decode_work,
    "prefill": prefill_work,
    "gemv": lambda ops, native, all_of_it: product_work(ops, native, (1, 2), all_of_it),
    "skinny": lambda ops, native, all_of_it: product_work(ops, native, (4, 8, 16), all_of_it),
    "rows": row_work,
    "sample": sample_work,
    "step": step_work,
}
CALLS = {"step": 1, "sample": 4}
"""Calls in a graph, where it is not 32."""


def copy_rate() -> float:
    """Bytes read and written per second by a copy of 1 GiB."""
    x = torch.zeros(1 << 28, device="cuda")
    y = torch.empty_like(x)
    return 8.0 * x.numel() / seconds(lambda i: torch.add(x, 1.0, out=y), calls=4)


def sweep(kernel: str, ops: Any, native: Any) -> dict[str, int]:
    """The configuration with the smallest mean of the times, each over the best time of its
    work.
    """
    works = [(name, calls["triton"]) for name, _, calls in WORK[kernel](ops, native, False)]
    setting, tried = launch.config(*CONFIGS.get(kernel, (kernel,))), []
    for values in itertools.product(*SWEEPS[kernel].values()):
        setting.update(zip(SWEEPS[kernel], values, strict=True))
        try:
            times = [seconds(call, calls=16, repeats=3) for _, call in works]
        except Exception as error:  # too much shared memory: not a candidate
            print(f"  {setting}: {type(error).__name__}", flush=True)
            continue
        tried.append((dict(setting), times))
    best = [min(column) for column in zip(*(times for _, times in tried), strict=True)]
    tried.sort(key=lambda row: statistics.mean(t / b for t, b in zip(row[1], best, strict=True)))
    for number, (name, _) in enumerate(works):
        own = min(tried, key=lambda row: row[1][number])
        print(
            f"  {name:<44} {tried[0][1][number] * 1e6:9.1f} us, best {best[number] * 1e6:9.1f} "
            f"with {own[0]}",
            flush=True,
        )
    setting.update(tried[0][0])
    return dict(setting)


def main() -> None:
    """Sweep if asked to, then print a table."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", type=some_of(WORK), default=",".join(WORK))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument(
        "--json", type=output_file, help="file for the configurations and the figures"
    )
    arguments = parser.parse_args()
    find_device("cuda")
    from twinfer.ops.implement import preferred

    native = resolve("torch", enable=("none",)).bind()
    plan = resolve("torch", preferred("torch", "cuda"))
    ops, rate = plan.bind(), copy_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, plan {plan.hash}: "
        f"a copy moves {rate / 1e12:.2f} TB/s"
    )
    rows, best = [], {}
    for kernel in arguments.kernels:
        if arguments.sweep and kernel in SWEEPS:
            best[kernel] = sweep(kernel, ops, native)
            print(f"{kernel}: {json.dumps(best[kernel])}", flush=True)
        for name, work, calls in WORK[kernel](ops, native, True):
            times = {
                provider: seconds(call, CALLS.get(kernel, 32)) for provider, call in calls.items()
            }
            rows.append({"name": name, "work": work, **times})
            rates = {
                p: f"{work / t / 1e12:6.1f} TFLOP/s"
                if kernel == "prefill"
                else f"{work / t / rate:6.1%}"
                for p, t in times.items()
            }
            print(
                f"{name:<48} "
                + "  ".join(f"{p} {t * 1e6:9.2f} us {rates[p]}" for p, t in times.items()),
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"plan": plan.hash, "copy": rate, "best": best, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    sys.exit(run_program(main))
