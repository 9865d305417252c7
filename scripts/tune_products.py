"""Find the blocks of `skinny_kernel` and, on Hopper, of `tile_kernel` and `held_kernel`, the
products of 3 to 256 rows, for the weights of public shapes on this GPU.

    python scripts/tune_products.py [--shapes llama3-8b,qwen3-0.6b] [--rows 8,32,64] [--ranks 1]
    [--kernels skinny,tiles,held] [--products qkv,router] [--json best.json]

Each figure is microseconds of one product behind a norm, which is in all of them, inside a CUDA
graph of many, over so many copies of the weight that the L2 cache holds none; `floor` are the
weight's bytes at the rate of a copy on the same GPU. `now` is what the engine would run by
`configs.json`, with its activation where that is a launch of its own. Every configuration is
checked against a product in float32 before it is timed. What is at least 2 % faster than `now` is
printed as entries of `configs.json` under the chip: of `skinny_kernel` up to the most rows for
which it is, of the others for each size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tune_kernels import copy_rate
from tune_narrow import microseconds

from twinfer.gpu.devices import find_device
from twinfer.gpu.kernels import gemv, launch
from twinfer.gpu.kernels import rows as row_kernels
from twinfer.gpu.kernels.held_kernel import STEP
from twinfer.gpu.precision import pin_precision
from twinfer.gpu.precompile import compile_together, kernels_noted
from twinfer.serving.parser import OneLineParser, output_file, some_of, whole_number, whole_numbers
from twinfer.serving.program import run_program
from twinfer.shared.models import decoder
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.placement import shard_config
from twinfer.shared.models.shapes import SHAPES
from twinfer.shared.models.spec import Shard

PRODUCTS = ("qkv", "o", "gate_up", "down", "router")
FLOAT32 = ("router", "head")
"""Those whose results are not rounded."""
FEW_RESULTS = 256
"""Up to so many results, those of routers, a product has few programs unless k is divided often."""
FEW_DIVIDED = (4, 8, 11, 15, 22)
MOST_SHARED = 220_000
"""Bytes of shared memory of a processor that blocks in flight may take together."""
FEW_STEPS, MANY_PROGRAMS = 4, 2.3
"""Of `tile_kernel`: blocks of k that a program of a part takes at least, and programs a processor
beyond which k is not divided: a processor holds two with their weights on the way.
"""
REGISTERS, MOST_REGISTERS = 128, 232
"""Of a thread of `tile_kernel`, and where one instruction has 256 columns: their sums alone take
128.
"""
MOST_HELD = 13_000_000
"""Entries of a weight for `held_kernel`. It was slower for 16 millions."""
GAIN = 0.98
Setting = dict[str, int]
Weight = tuple[str, int, int]
"""What it is for, results and entries of k."""
Found = tuple[float, float, Setting] | None
"""Microseconds now, of the best configuration, and it."""


def weights_of(shape: str, ranks: int) -> list[Weight]:
    """The different products of a model, or of one of so many ranks of it."""
    config = shard_config(parse_config(SHAPES[shape]), Shard(0, ranks))
    parameters = decoder.parameters_of(config)
    found = dict.fromkeys(
        (name, *p.shape)
        for layer in range(config.num_layers)
        for name, p in parameters.layer(layer).items()
        if name in PRODUCTS and len(p.shape) == 2
    )
    return [*found, ("head", -(-config.vocab_size // ranks), config.hidden_size)]


def divisions(count: int, fit: int) -> list[int]:
    """The two best numbers of parts of k for so many blocks of results, of which a processor holds
    `fit` at once.
    """
    processors = launch.processors()

    def idle(parts: int) -> tuple[float, int]:
        """How much longer the last wave makes it, then fewer parts."""
        programs = count * parts
        return -(-programs // processors) * processors / programs, parts

    return sorted({max(1, round(processors * m / count)) for m in range(1, fit + 1)}, key=idle)[:2]


def tiles(n: int, k: int, rows: int, gated: bool, whole: bool) -> Iterator[Setting]:
    """Configurations of `tile_kernel` to try, as `skinny` has them of the other one: programs for a
    quarter of the processors and more, as few can be the fastest that read their part at once.
    """
    block_m, width, twice = launch.power_of_2(rows, 16), n // 2 if gated else n, 1 + gated
    processors = launch.processors()
    for block_n in (64, 128):
        most = MOST_SHARED // (2 * gemv.TILE_K * (block_m + block_n * twice))
        if twice * block_n * block_m > 128 * 128:  # sums that registers cannot hold
            continue
        blocks = -(-width // block_n)
        few = n <= FEW_RESULTS
        divided = (1, 2, 3, 4, 5, 6, 8, *(FEW_DIVIDED[2:] if few else ()))
        for parts in (1,) if whole else divided:
            steps = k // gemv.TILE_K // parts
            programs = blocks * parts
            if steps < (2 if few else FEW_STEPS) or (programs < processors // 4 and not few):
                continue
            if parts > 1 and programs > MANY_PROGRAMS * processors:
                continue
            for stages in sorted({min(steps, 20, most), min(steps, 20, most // 2)}):
                if stages >= 3:
                    yield {
                        "block_n": block_n, "parts": parts, "stages": stages, "warps": 4,
                        "registers": REGISTERS if block_m <= 128 else MOST_REGISTERS,
                    }  # fmt: skip


def skinny(n: int, k: int, rows: int, gated: bool, whole: bool) -> Iterator[Setting]:
    """Configurations to try. `whole` is for results in float32, whose k is not divided."""
    if rows > gemv.MAX_ROWS:
        return
    block_m = launch.power_of_2(rows, 16)
    few = n <= FEW_RESULTS
    if few:
        blocks = [(16, 128), (32, 64), (32, 128), (64, 128)]
    elif block_m == 16:
        blocks = [(16, 256), (32, 128), (32, 256), (64, 128)]
    elif block_m == 32:
        blocks = [(32, 128), (64, 64), (64, 128)]
    else:
        blocks = [(64, 64), (64, 128), (128, 64)]
    width = n // 2 if gated else n
    for block_n, block_k in blocks:
        if gated and block_n > 64:
            continue
        count = -(-width // block_n)
        tile = 2 * block_k * (block_m + block_n * (2 if gated else 1))
        for stages in (3,) if few else (3, 4, 6):
            fit = min(6, MOST_SHARED // (tile * (stages - (block_m == 16))))
            if fit < 1:
                continue
            for parts in FEW_DIVIDED if few else divisions(count, fit):
                most = FEW_DIVIDED[-1] if few else 8
                if parts > most or k // parts < 2 * block_k or (whole and parts > 1):
                    continue
                both = stages == 6 or (block_m == 16 and not few)
                for overlap in (n * k, 0) if both else (n * k,):
                    yield {
                        "block_n": block_n, "block_k": block_k, "parts": parts, "warps": 4,
                        "stages": stages, "overlap": overlap,
                    }  # fmt: skip


def held(n: int, k: int, rows: int, gated: bool, whole: bool) -> Iterator[Setting]:
    """Configurations of `held_kernel` to try: for weights that registers hold a good part of."""
    if rows > gemv.MAX_HELD_ROWS or n * k > MOST_HELD or whole:
        return
    block_m = launch.power_of_2(rows, 8)
    for block_n in (16, 32, 64):
        for warps in (2, 4, 8, 16):
            steps = k // (warps * STEP.value)
            if k % (warps * STEP.value) or block_n * block_m > 1024:
                continue
            # A step asked for ahead takes as many registers as a program has rows of the weight.
            for ahead in sorted({min(steps, most // block_n) for most in (32, 64, 96, 128)} - {0}):
                if warps * 32 * ahead * block_n > 60_000:  # registers of a processor
                    continue
                yield {"block_n": block_n, "warps": warps, "ahead": ahead}


KERNELS = {"skinny": skinny, "tiles": tiles, "held": held}


class Product:
    """A product of so many rows, and copies of its weight."""

    def __init__(self, weight: Weight, rows: int) -> None:
        name, n, k = weight
        self.gated, self.head = name == "gate_up", name == "head"
        self.exactly = name in FLOAT32
        self.dtype = torch.float32 if self.exactly else torch.bfloat16
        copies = max(2, min(12, -(-256_000_000 // (2 * n * k))))
        self.weights = [
            torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)
        ]
        self.x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        self.residual = torch.zeros_like(self.x)
        self.norm = torch.ones(k, device="cuda", dtype=torch.bfloat16)
        self.exact = self.x.float() @ self.weights[0].float().t()
        if self.gated:
            gate, up = self.exact.chunk(2, 1)
            self.exact = F.silu(gate) * up

    def now(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What the engine runs."""
        if self.exactly:
            return gemv.logits(x, weight)
        if not self.gated:
            return gemv.linear(x, weight, None)
        y = gemv._few(x, weight, None, x.dtype, act="silu")
        return row_kernels.silu_and_mul(gemv.linear(x, weight, None)) if y is None else y

    def by(self, setting: Setting) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """The kernel with a configuration."""
        act = "silu" if self.gated else ""
        if "ahead" in setting:
            return lambda weight, x: gemv._held(x, weight, None, self.dtype, setting, act=act)
        if "registers" in setting:
            return lambda weight, x: gemv._tiled(x, weight, None, self.dtype, setting, act=act)

        def run(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            known = vars(gemv)["config"]
            vars(gemv)["config"] = lambda *_: setting
            try:
                return gemv._skinny(x, weight, None, self.dtype, act=act)
            finally:
                vars(gemv)["config"] = known

        return run

    def error(self, run: Callable[..., torch.Tensor]) -> float:
        """Relative L2 to the product in float32."""
        found = run(self.weights[0], self.x).float()
        return float((found - self.exact).norm() / self.exact.norm())

    def microseconds(self, run: Callable[..., torch.Tensor] | None) -> float:
        """Of one product behind a norm; of the norm alone without one."""
        y, residual = self.x.clone(), self.residual.clone()

        def step(i: int) -> None:
            row_kernels.fused_add_rms_norm(y, residual, self.norm, 1e-5)
            if run is not None:
                run(self.weights[i], y)

        return microseconds(step, len(self.weights))


def tuned(product: Product, weight: Weight, kernel: str, rate: float) -> Found:
    """`now`, the best and its configuration, or None where there is none to try."""
    name, n, k = weight
    rows = len(product.x)
    tries = list(KERNELS[kernel](n, k, rows, product.gated, product.head))
    if not tries:
        return None
    with kernels_noted() as noted:
        product.now(product.weights[0], product.x)
        for setting in tries:
            product.by(setting)(product.weights[0], product.x)
    compile_together(noted, lambda _: None)
    norm, now = product.microseconds(None), product.microseconds(product.now)
    found: list[tuple[float, Setting]] = []
    for setting in tries:
        run = product.by(setting)
        try:
            error = product.error(run)
        except Exception as why:  # a configuration that the chip cannot hold
            print(f"  {setting}: {type(why).__name__} {str(why)[:80]}")
            continue
        if not error < 1e-2:
            raise SystemExit(f"{name} {n}x{k}, {rows} rows, {setting}: {error} off")
        found.append((product.microseconds(run), setting))
    found.sort(key=lambda pair: pair[0])
    if not found:
        return None
    # Once more: of many figures the least is also the luckiest.
    best = min(
        ((product.microseconds(product.by(setting)), setting) for _, setting in found[:4]),
        key=lambda pair: pair[0],
    )
    now = min(now, product.microseconds(product.now))
    few = "  ".join(f"{time:.1f} {list(setting.values())}" for time, setting in found[:3])
    print(
        f"{kernel} {name} {n}x{k} rows {rows}: floor {2 * n * k / rate:.1f}, norm {norm:.1f}, "
        f"now {now:.1f}, best {best[0]:.1f} {list(best[1].values())} of {len(found)}; {few}",
        flush=True,
    )
    return now, *best


def skinny_entries(weight: Weight, by_rows: dict[int, Found]) -> dict[str, Any]:
    """What belongs into `configs.json`: an entry for each size up to the largest that is faster,
    where no smaller one is slower.
    """
    name, n, k = weight
    allowed: dict[int, tuple[float, float, Setting]] = {}
    for rows, found in sorted(by_rows.items()):
        if found is None or found[1] > found[0] * 1.005:
            break
        allowed[rows] = found
    while allowed:
        rows, (now, best, _) = allowed.popitem()
        if best <= GAIN * now:
            allowed[rows] = by_rows[rows] or (now, best, {})
            break
    if not allowed:
        return {}
    gated = name == "gate_up"
    entries: dict[str, Any] = {
        f"{'gated' if gated else 'skinny'}/{n}x{k}/{launch.power_of_2(rows, 16)}": setting
        for rows, (_, _, setting) in allowed.items()
    }
    limits = dict(launch.config("linear", f"{n}x{k}"))
    limit = "gated_rows" if gated else "skinny_rows"
    limits[limit] = max(limits[limit], launch.power_of_2(max(allowed), 16))
    return entries | {f"linear/{n}x{k}": limits}


def measured_entries(
    kernel: str, least: int, weight: Weight, by_rows: dict[int, Found]
) -> dict[str, Any]:
    """An entry for each size that is faster: powers of 2 from `least` on."""
    name, n, k = weight
    what = f"gated_{kernel}" if name == "gate_up" else kernel
    return {
        f"{what}/{n}x{k}/{launch.power_of_2(rows, least)}": found[2]
        for rows, found in by_rows.items()
        if found is not None and found[1] <= GAIN * found[0]
    }


def main() -> None:
    """Print the table and the entries."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=some_of(SHAPES), default="llama3-8b")
    parser.add_argument("--rows", type=whole_numbers(1), default="8,32,64")
    parser.add_argument(
        "--ranks", type=whole_number(1), default=1, help="of a model that is divided so"
    )
    parser.add_argument("--kernels", type=some_of(KERNELS), default=",".join(KERNELS))
    every = (*PRODUCTS, "head")
    parser.add_argument("--products", type=some_of(every), default=",".join(every))
    parser.add_argument("--json", type=output_file, help="file for the entries")
    arguments = parser.parse_args()
    find_device("cuda")
    pin_precision()
    rate, kernels = copy_rate() / 1e6, arguments.kernels
    print(f"{torch.cuda.get_device_name()}: a copy moves {rate / 1e6:.2f} TB/s", flush=True)
    best: dict[str, Any] = {}
    for shape in arguments.shapes:
        print(f"## {shape}", flush=True)
        for weight in weights_of(shape, arguments.ranks):
            if weight[0] not in arguments.products:
                continue
            by_kernel: dict[str, dict[int, Found]] = {name: {} for name in kernels}
            for rows in arguments.rows:
                product = Product(weight, rows)
                for kernel in kernels:
                    by_kernel[kernel][rows] = tuned(product, weight, kernel, rate)
            if "skinny" in kernels:
                for name, entry in skinny_entries(weight, by_kernel["skinny"]).items():
                    best[name] = best.get(name, {}) | entry
            for kernel, least in (("tiles", 16), ("held", 8)):
                if kernel in kernels:
                    best |= measured_entries(kernel, least, weight, by_kernel[kernel])
            torch.cuda.empty_cache()
            if arguments.json:
                with open(arguments.json, "w") as file:
                    json.dump(best, file, indent=1)
    print(json.dumps(best), flush=True)


if __name__ == "__main__":
    sys.exit(run_program(main))
