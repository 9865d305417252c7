"""Time the experts of gpt-oss-20b in mxfp4 on this GPU, and try launch configurations.

    python scripts/tune_experts.py [--tokens 1,8,64,256] [--json F] [--jobs 8]

Each figure is microseconds of the experts of one layer inside a CUDA graph of many, each of which
has a routing of its own. `share` is that of the time in which a copy on this GPU moves the bytes
of the experts that are chosen. The first candidate is what `gpu/kernels/configs.json` has,
`plain` are the kernels for any kind of weight; `error` is the largest difference to these, in
units of the largest result. `--jobs` processes compile all configurations before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from tune_narrow import microseconds

from twinfer.gpu.kernels import launch, moe_narrow

EXPERTS, TOP_K, DIM, INTER = 32, 4, 2880, 2880
ROUTINGS = 16
FEW = [(16, 4, 6), (16, 4, 4), (16, 4, 3), (16, 4, 2), (16, 2, 6)]
FEW_DOWN = [(16, 16, 6), (16, 16, 3), (16, 16, 2), (16, 8, 6), (16, 8, 3)]
PRODUCT = [(16, 4, 1), (16, 4, 2), (16, 4, 3), (16, 4, 6), (32, 4, 2), (16, 2, 3)]


def settings(tokens: int) -> Iterator[tuple[str, dict[str, dict[str, int]]]]:
    """(name, entries of `configs.json`) to try for so many tokens."""
    yield "configs.json", {}
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
        yield f"rows {n} {w} {a}", base | {f"moe_fragments/{m}": entry for m in (8, 16, 32)}


def weights() -> list[Any]:
    """Of gate and up, and of down: values, scales, no zeros, biases."""
    found: list[Any] = []
    for n, k in ((2 * INTER, DIM), (DIM, INTER)):
        values = torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8, device="cuda")
        scale = torch.exp2(torch.randint(-8, -5, (EXPERTS, n, k // 32), device="cuda").float())
        bias = torch.randn(EXPERTS, n, device="cuda").bfloat16()
        found += [values, scale, None, bias]
    return found


def chosen(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of tokens that choose evenly."""
    best = torch.randn(tokens, EXPERTS, device="cuda").topk(TOP_K)
    return best.values.softmax(-1), best.indices.int()


def configured(entries: dict[str, dict[str, int]]) -> None:
    """Let kernels find these entries before those of `configs.json`."""

    def config(*names: str) -> dict[str, int]:
        return entries.get("/".join(names)) or launch.config(*names)

    moe_narrow.config = config  # type: ignore[assignment]


def experts(x: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor], layer: Any) -> Any:
    """The experts of a layer."""
    return moe_narrow.moe_experts_narrow(x, *routing, *layer, "fp4", 1.702, 7.0)


def measure(tokens: int, layer: list[Any], rate: float) -> dict[str, Any]:
    """Figures by configuration."""
    x = torch.randn(tokens, DIM, device="cuda").bfloat16() * 0.1
    routings = [chosen(tokens) for _ in range(ROUTINGS)]
    distinct = sum(len(ids.unique()) for _, ids in routings) / ROUTINGS
    bytes_read = distinct * 3 * INTER * DIM * (0.5 + 4 / 32)
    found: dict[str, Any] = {}
    reference = None
    for name, entries in sorted(settings(tokens), key=lambda pair: pair[0] != "plain"):
        configured(entries)
        try:
            result = experts(x, routings[0], layer).float()
            time = microseconds(lambda i: experts(x, routings[i], layer), ROUTINGS)
        except Exception as why:
            print(f"{tokens} tokens, {name}: {str(why)[:120]}", flush=True)
            continue
        reference = result if reference is None else reference
        error = float((result - reference).abs().max() / reference.abs().max())
        share = bytes_read / rate / time * 1e6
        found[name] = {"us": round(time, 2), "share": round(share, 3), "error": round(error, 5)}
        print(f"{tokens} tokens, {name}: {found[name]}", flush=True)
    return found


def compile_only(tokens: list[int], job: int, jobs: int) -> None:
    """Launch every `jobs`-th configuration once: Triton keeps what it compiled on disk."""
    layer, every = weights(), [(n, entries) for n in tokens for _, entries in settings(n)]
    for n, entries in every[job::jobs]:
        configured(entries)
        experts(torch.zeros(n, DIM, device="cuda").bfloat16(), chosen(n), layer)
    torch.cuda.synchronize()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,8,64,256")
    parser.add_argument("--json", default="")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--compile", default="", help="JOB/JOBS: what a process of --jobs does")
    given = parser.parse_args()
    tokens = [int(n) for n in given.tokens.split(",")]
    if given.compile:
        compile_only(tokens, *map(int, given.compile.split("/")))
        return
    command = [sys.executable, __file__, "--tokens", given.tokens, "--compile"]
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
    layer = weights()
    found = {n: measure(n, layer, rate) for n in tokens}
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"copy": rate, "us": found}, file, indent=1)


if __name__ == "__main__":
    main()
