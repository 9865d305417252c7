"""Check and time blocks of the Triton attention kernels on this GPU.

    python scripts/tune_attention.py [--shapes "gemma4 full,gemma4 window"] [--only 0,1]
    [--kernels decode,prefill,hopper] [--contexts 1024,32768] [--batches 1,8,64]
    [--prompts 0+8192,24576+8192] [--json out.json]

For every candidate below: how long does each call take, what share is that of the bytes that must
be read (decode, against a copy on the same GPU), or how many TFLOP/s are they (prompts)? Beside
whole prompts stands cuDNN, with keys and values that lie in one piece. The first candidate is what
`gpu/kernels/configs.json` has; the best one must be within the op's bound. It belongs there under
the chip, as `decode/512`, `prefill/256` or `hopper/256`. Candidates that need more shared memory
than there is are said so and passed over.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from tune_kernels import copy_rate, normal, seconds

from twinfer.gpu.devices import find_device
from twinfer.gpu.kernels import attention
from twinfer.ops import resolve
from twinfer.ops.cases import load_all
from twinfer.ops.cases.attention import paged
from twinfer.ops.implement import preferred
from twinfer.ops.testing import Judge, run
from twinfer.serving.parser import OneLineParser, argument, output_file, some_of, whole_numbers
from twinfer.serving.program import run_program

KERNELS = ("decode", "prefill", "hopper")
PAGE = 64
IN_CACHE = 1 << 28
"""Bytes that are more than the L2 cache holds: smaller caches are read in turns."""


@dataclass(frozen=True)
class Shape:
    """The attention of a layer."""

    heads: int
    kv_heads: int
    size: int
    window: int = 0

    @property
    def slot(self) -> int:
        """Bytes of a slot of the cache."""
        return 2 * self.kv_heads * self.size * 2

    def seen(self, length: int) -> int:
        """Slots that the last query of a request sees."""
        return min(length, self.window) if self.window else length

    def pairs(self, length: int) -> int:
        """Pairs of a query and a slot that it sees, in a prompt."""
        full = min(length, self.window or length)
        return full * (full + 1) // 2 + (length - full) * full


SHAPES = {
    "llama3-8b": Shape(32, 8, 128),
    "qwen3-0.6b": Shape(16, 8, 128),
    "llama3.2-1b": Shape(32, 8, 64),
    "gemma4 full": Shape(32, 4, 512),
    "gemma4 window": Shape(32, 16, 256, window=1024),
    "gemma4 E2B full": Shape(8, 1, 512),
    "gemma3 full": Shape(8, 4, 256),
    "gemma3 window": Shape(8, 4, 256, window=1024),
}
CUDNN_SIZE = 128
"""The largest heads that cuDNN's attention takes here."""
SKEWED = [102_400] + [1024] * 63
"""Slots of requests, one of them long."""
NAMES = {
    "decode": ("block_n", "warps", "stages", "chunk", "programs", "parts", "most"),
    "prefill": ("block_m", "block_n", "warps", "stages"),
    "hopper": ("block_n", "stages", "waves"),
}
_NARROW_PREFILL = [
    (128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3),
    (64, 64, 4, 2), (64, 128, 4, 2), (128, 64, 4, 3), (128, 32, 4, 3),
]  # fmt: skip
_NARROW_DECODE = [
    (64, 4, 3, 64, 4), (64, 4, 2, 64, 4), (64, 2, 3, 64, 4), (64, 2, 2, 64, 8), (32, 1, 3, 32, 8),
    (32, 2, 4, 32, 4), (32, 2, 2, 32, 8), (32, 2, 3, 32, 8), (64, 4, 3, 64, 8), (128, 4, 2, 128, 4),
    (32, 4, 3, 32, 8), (16, 1, 4, 32, 8), (32, 2, 3, 32, 4, 32, 32),
    (64, 2, 3, 64, 4, 32, 32), (64, 2, 3, 64, 4, 32, 64), (64, 2, 3, 64, 4, 32, 128),
]  # fmt: skip
CANDIDATES: dict[tuple[str, int], list[tuple[int, ...]]] = {
    ("decode", 128): _NARROW_DECODE,
    ("decode", 64): _NARROW_DECODE,
    ("prefill", 128): _NARROW_PREFILL,
    ("prefill", 64): _NARROW_PREFILL,
    ("hopper", 128): [(128, 2), (128, 3), (64, 4), (128, 3, 1), (128, 3, 4), (128, 3, 999)],
    ("hopper", 64): [
        (128, 2), (128, 3), (128, 4), (64, 4), (128, 3, 1), (128, 3, 4), (128, 3, 999),
    ],
    ("hopper", 256): [(64, 2), (32, 2), (32, 4), (64, 2, 1), (64, 2, 4), (64, 2, 999)],
    ("decode", 512): [
        (32, 4, 3, 64, 4), (32, 4, 3, 32, 8), (32, 8, 3, 32, 4), (32, 8, 2, 32, 4),
        (16, 4, 3, 32, 4), (16, 4, 2, 32, 4), (16, 2, 3, 32, 4), (64, 8, 2, 64, 4),
    ],
    ("decode", 256): [
        (32, 4, 3, 32, 4), (32, 2, 2, 32, 4), (32, 2, 3, 32, 8), (32, 2, 3, 64, 8),
        (32, 4, 3, 32, 8), (64, 4, 3, 64, 4), (64, 4, 2, 64, 8), (16, 2, 3, 32, 8),
        (32, 2, 3, 32, 4, 32, 32),
    ],
    ("prefill", 512): [
        (64, 16, 8, 3), (64, 16, 8, 2), (64, 16, 4, 2), (32, 32, 8, 2), (32, 64, 8, 2),
        (64, 64, 8, 1), (64, 32, 8, 1), (128, 16, 8, 2),
    ],
    ("prefill", 256): [
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3),
        (64, 32, 4, 3), (64, 64, 8, 2), (128, 128, 8, 1),
    ],
}  # fmt: skip


def call(ops: Any, shape: Shape, lengths: list[int], queries: list[int]) -> Any:
    """A call of the op; pages that no query sees are released, as page groups do."""
    need = [-(-n // PAGE) for n in lengths]
    first = [
        max(0, n - m - shape.window + 1) // PAGE if shape.window else 0
        for n, m in zip(lengths, queries, strict=True)
    ]
    table = torch.zeros(len(lengths), max(need) + 1, dtype=torch.int32)
    pages = sum(need) - sum(first)
    order, at = torch.randperm(pages).to(torch.int32) + 1, 0
    for i, (low, high) in enumerate(zip(first, need, strict=True)):
        table[i, low:high] = order[at : at + high - low]
        at += high - low
    count = max(1, min(32, IN_CACHE // (pages * PAGE * shape.slot)))
    caches = [normal(pages + 2, PAGE, 2 * shape.kv_heads, shape.size) for _ in range(count)]
    start, lens, counts = (
        torch.tensor(x, dtype=torch.int32, device="cuda")
        for x in (np.cumsum([0, *queries]), lengths, [queries.count(1), len(lengths)])
    )
    table, q = table.cuda(), normal(sum(queries), shape.heads, shape.size)
    numbers = shape.size**-0.5, shape.window, 0.0, max(queries)
    return lambda i: ops.paged_attention(
        q, caches[i % len(caches)], table, start, lens, counts, *numbers
    )


def is_right(shape: Shape, kernel: str) -> str:
    """What the op's judge says of requests of several blocks: nothing, or what is wrong."""
    rng = np.random.default_rng(0)
    lengths, queries = [1300, 40, 700], [1, 1, 1]
    if kernel != "decode":
        queries = [200, 40, 500]
    heads = shape.heads, shape.kv_heads
    arguments = paged(rng, "bfloat16", lengths, queries, heads, shape.size, PAGE)
    arguments |= {"window": shape.window}
    verdict = Judge("paged_attention", arguments)(
        run("paged_attention", "torch", "triton", arguments, "cuda")
    )
    return "" if verdict.passed else f"WRONG {verdict}"


def settings(kernel: str, size: int) -> Iterator[dict[str, int]]:
    """The configuration as it is, then the candidates."""
    current = dict(attention.setting_of(kernel, "bfloat16", size))
    yield current
    for values in CANDIDATES[kernel, size]:
        chosen = dict(zip(NAMES[kernel], values, strict=False))
        if kernel == "prefill":
            chosen |= {"few_m": chosen["block_m"], "blocks": 0}
        yield current | chosen


def replaced(kernel: str, setting: dict[str, int]) -> Callable[..., dict[str, int]]:
    """What looks up configurations, with another one of `kernel`."""
    real = attention.config
    return lambda which, *variants: setting if which == kernel else real(which, *variants)


def library(shape: Shape, tokens: int) -> Callable[[int], Any]:
    """A call of cuDNN's attention for a whole prompt: no pages, and no cache."""
    q = normal(1, shape.heads, tokens, shape.size)
    k, v = (normal(1, shape.kv_heads, tokens, shape.size) for _ in range(2))

    def run_it(i: int) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )

    return run_it


def of_prompts(
    ops: Any, shape: Shape, prompts: list[tuple[int, int]]
) -> dict[str, tuple[float, str]]:
    """By prompt (slots before the step, tokens of the step): seconds, TFLOP/s of what is seen."""
    found = {}
    for past, tokens in prompts:
        pairs = shape.pairs(past + tokens) - shape.pairs(past)
        work = 4.0 * shape.heads * shape.size * pairs
        name = f"{tokens} after {past}"
        calls = {name: call(ops, shape, [past + tokens], [tokens])}
        if not past and not shape.window and shape.size <= CUDNN_SIZE:
            calls[f"{name} by cuDNN"] = library(shape, tokens)
        for what, each in calls.items():
            time = seconds(each, calls=8, repeats=3)
            found[what] = (time, f"{work / time / 1e12:.0f} TFLOP/s")
        del calls, each
        torch.cuda.empty_cache()
    return found


def measure(
    ops: Any, shape: Shape, kernel: str, rate: float, batches: list[int], contexts: list[int],
    prompts: list[tuple[int, int]],
) -> dict[str, tuple[float, str]]:  # fmt: skip
    """By call: seconds, and what that is in words."""
    if kernel != "decode":
        return of_prompts(ops, shape, prompts)
    found = {}
    many = {f"b={n} of {length}": [length] * n for length in contexts for n in batches}
    for what, lengths in (many | {"one long": SKEWED}).items():
        time = seconds(call(ops, shape, lengths, [1] * len(lengths)), calls=16, repeats=3)
        moved = sum(map(shape.seen, lengths)) * shape.slot
        found[what] = (time, f"{moved / time / rate:.0%}")
        torch.cuda.empty_cache()
    return found


def prompts_of(text: str) -> list[tuple[int, int]]:
    """Prompts with commas between: slots before the step, and tokens of it."""
    try:
        pairs = [prompt.split("+") for prompt in text.split(",")]
        return [(int(before), int(tokens)) for before, tokens in pairs]
    except ValueError:
        raise ValueError(f"{text!r} is not prompts such as 0+8192,24576+8192") from None


def main() -> None:
    """Print a line for every candidate, then the best of each kernel and shape."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=some_of(SHAPES), default=",".join(SHAPES))
    parser.add_argument("--kernels", type=some_of(KERNELS), default=",".join(KERNELS))
    parser.add_argument(
        "--contexts", type=whole_numbers(1), default="1024,32768", help="slots of a request, decode"
    )
    parser.add_argument(
        "--batches", type=whole_numbers(1), default="1,8,64", help="requests, decode"
    )
    parser.add_argument(
        "--prompts",
        type=argument(prompts_of),
        default="0+8192,24576+8192",
        help="slots before the step + its tokens",
    )
    parser.add_argument(
        "--only",
        type=whole_numbers(0),
        default=(),
        help="numbers of candidates, 0 is the current one",
    )
    parser.add_argument("--json", type=output_file, help="file for the figures")
    options = parser.parse_args()
    find_device("cuda")
    load_all()
    ops, rate = resolve("torch", preferred("torch", "cuda")).bind(), copy_rate()
    print(f"{torch.cuda.get_device_name()}: a copy moves {rate / 1e12:.2f} TB/s")
    real, rows = attention.config, []
    for name in options.shapes:
        shape = SHAPES[name]
        for kernel in options.kernels:
            attention.hopper = lambda which=kernel: which == "hopper"
            if kernel == "hopper" and shape.size not in attention.HOPPER_SIZES:
                continue
            tried: list[tuple[float, dict[str, int]]] = []
            for number, setting in enumerate(settings(kernel, shape.size)):
                if options.only and number not in options.only:
                    continue
                attention.config = replaced(kernel, setting)
                try:
                    found = measure(
                        ops, shape, kernel, rate,
                        options.batches, options.contexts, options.prompts,
                    )  # fmt: skip
                except Exception as error:  # too much shared memory: not a candidate
                    print(f"{name} {kernel} {number} {setting}: {str(error)[:120]}", flush=True)
                    continue
                finally:
                    attention.config = real
                figures = "  ".join(
                    f"{what} {time * 1e6:.1f} us {words}" for what, (time, words) in found.items()
                )
                print(f"{name} {kernel} {number} {setting}: {figures}", flush=True)
                total = sum(math.log(time) for time, _ in found.values())
                rows.append({"shape": name, "kernel": kernel, "setting": setting, **found})
                tried.append((total, setting))
            for _, setting in sorted(tried, key=lambda each: each[0]):
                attention.config = replaced(kernel, setting)
                wrong = is_right(shape, kernel)
                attention.config = real
                print(f"{wrong or 'best'} of {name} {kernel}: {json.dumps(setting)}", flush=True)
                if not wrong:
                    break
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"copy": rate, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    sys.exit(run_program(main))
