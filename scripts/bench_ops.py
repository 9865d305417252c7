"""Each op, each provider: time, achieved bytes per second, and the share of what a copy reaches on
the same device.

    python scripts/bench_ops.py --framework torch --device cpu [--ops rms_norm,linear] [--json
    out.json]

Bytes are those of the op's inputs and outputs, each counted once: caches and weights that a case
does not read whole make the figure too kind, arithmetic makes the share too low; it is a floor from
traffic, not a roofline. The last lines give the price of a call of torch: the plain function, the
planned one (unwrapped), and the one behind an operator (wrapped).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from twinfer.ops import REGISTRY, resolve
from twinfer.ops.cases import load_all
from twinfer.ops.implement import IMPLEMENTATIONS
from twinfer.ops.testing import FLOATS, TESTING
from twinfer.serving.parser import OneLineParser, output_file
from twinfer.serving.program import run_program
from twinfer.shared.option_text import words
from twinfer.shared.step import HOST_LENGTHS
from twinfer.shared.worker import backend_module

REPEATS = 7
SLOW = 1.0
ROUNDS, CALLS = 101, 200


class Device:
    """Moves arrays to a framework's device and times work there."""

    def __init__(self, framework: str, device: str) -> None:
        self.framework = framework
        if framework == "jax":
            import jax

            from twinfer.tpu.platforms import devices

            self.jax = jax
            self.where = devices(device)[0]
        else:
            import torch

            self.torch = torch
            self.where = torch.device(device)

    def put(self, value: Any) -> Any:
        """An argument on the device; what is no array stays as it is."""
        if not isinstance(value, np.ndarray):
            return value
        if self.framework == "jax":
            return self.jax.device_put(np.ascontiguousarray(value), self.where)
        from twinfer.ops.namespaces.torch_ import from_numpy

        return from_numpy(np.ascontiguousarray(value)).to(self.where)

    def seconds(self, function: Callable[[], Any]) -> float:
        """Median time of a call, many calls at a time; of one call if it takes longer than SLOW
        seconds.
        """
        self._wait(function())
        start = time.perf_counter()
        self._wait(function())
        once = time.perf_counter() - start
        if once > SLOW:
            return once
        count = max(1, min(1000, int(0.02 / max(once, 1e-7))))
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            for _ in range(count):
                result = function()
            self._wait(result)
            times.append((time.perf_counter() - start) / count)
        return statistics.median(times)

    def _wait(self, result: Any) -> None:
        if self.framework == "jax":
            self.jax.block_until_ready(result)
        elif self.where.type == "cuda":
            self.torch.cuda.synchronize()

    def copy_rate(self) -> float:
        """Bytes read and written per second by a copy of 256 MiB."""
        x = self.put(np.zeros(1 << 26, np.float32))
        if self.framework == "jax":
            copy = self.jax.jit(lambda x: x + 1)
            return 2 * x.nbytes / self.seconds(lambda: copy(x))
        y = self.torch.empty_like(x)
        return 2 * x.nbytes / self.seconds(lambda: y.copy_(x))


def size(value: Any) -> int:
    """Bytes of arrays, nested in tuples or not."""
    if isinstance(value, tuple):
        return sum(size(item) for item in value)
    return int(getattr(value, "nbytes", 0))


def bench_op(device: Device, op: str, dtype: str, limit: float) -> list[dict[str, Any]]:
    """A row for each provider and case of an op."""
    declared, rows = REGISTRY[op], []
    fallback = "composition" if declared.level == "coarse" else "native"
    providers = list(dict.fromkeys([fallback, *IMPLEMENTATIONS.get((op, device.framework), {})]))
    cases = list(TESTING[op].cases(dtype))
    cases = [case for case in cases if "bench" in case.tags] or cases[:1]
    for provider in providers:
        plan = resolve(device.framework, {op: (provider,)} if provider != "composition" else None)
        if plan[op].provider != provider:
            continue
        function = getattr(plan.bind(), op)
        for case in cases:
            static = {
                n: v
                for n, v in case.arguments.items()
                if n in declared.static_parameters or v is None
            }
            arrays = {n: device.put(v) for n, v in case.arguments.items() if n not in static}
            call = lambda f=function, s=static, **a: f(**a, **s)  # noqa: E731
            if device.framework == "jax":
                call = device.jax.jit(call)
            if plan[op].implementation.host_metadata:
                arrays |= {n: device.torch.from_numpy(case.arguments[n]) for n in HOST_LENGTHS}
            seconds = device.seconds(lambda c=call, a=arrays: c(**a))
            moved = sum(size(a) for a in arrays.values()) + size(call(**arrays))
            row = {
                "op": op,
                "provider": provider,
                "case": case.name,
                "dtype": dtype,
                "us": seconds * 1e6,
            }
            rows.append(row | {"gb_s": moved / seconds / 1e9, "share": moved / seconds / limit})
    return rows


def call_prices() -> dict[str, float]:
    """Nanoseconds of a call of `add` on 8 numbers: plain, planned (unwrapped), behind an operator
    (wrapped).

    The three take turns, so that whatever else the machine does slows all of them alike.
    """
    import torch

    from twinfer.ops.bindings.torch import bind
    from twinfer.ops.namespaces import namespace
    from twinfer.ops.reference.dense import add

    x, xp, plan = torch.ones(1, 8), namespace("torch"), resolve("torch")
    calls = {
        "plain": lambda: add(xp, x, x),
        "planned": partial(bind(plan).add, x, x),
        "wrapped": partial(bind(plan, wrap=True).add, x, x),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter_ns() - start) / CALLS)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print a table, and the price of a call."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--framework", choices=("jax", "torch"), default="torch")
    parser.add_argument("--device", choices=("cpu", "cuda", "tpu"), default="cpu")
    parser.add_argument("--dtype", choices=FLOATS, default="bfloat16")
    parser.add_argument("--ops", type=words, help="names separated by commas; all if left out")
    parser.add_argument("--json", type=output_file, help="file for the rows")
    arguments = parser.parse_args()
    load_all()
    if unknown := set(arguments.ops or ()) - TESTING.keys():
        parser.error(
            f"--ops: got {', '.join(sorted(unknown))}, allowed are {', '.join(sorted(TESTING))}"
        )
    if arguments.device != "cpu":
        backend_module(arguments.framework).find_device(arguments.device)
    device = Device(arguments.framework, arguments.device)
    limit = device.copy_rate()
    plan_hash = resolve(arguments.framework).hash
    where = f"{arguments.framework} on {arguments.device}"
    print(
        f"{where}: a copy moves {limit / 1e9:.0f} GB/s; hash of the plan of native ops {plan_hash}"
    )
    rows = []
    for op in arguments.ops or sorted(TESTING):
        dtype = arguments.dtype if arguments.dtype in TESTING[op].dtypes else TESTING[op].dtypes[0]
        for row in bench_op(device, op, dtype, limit):
            rows.append(row)
            where = (
                f"{row['op']:<22} {row['provider']:<12} {row['dtype']:<9} {row['case'][:40]:<40}"
            )
            print(
                f"{where} {row['us']:10.1f} us {row['gb_s']:8.1f} GB/s {row['share']:6.1%}",
                flush=True,
            )
    prices = call_prices() if arguments.framework == "torch" else {}
    for name, price in prices.items():
        print(f"a call of add on 8 numbers, {name}: {price:.0f} ns, {price - prices['plain']:+.0f}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(
                {"plan_hash": plan_hash, "limit": limit, "rows": rows, "call_ns": prices},
                file,
                indent=1,
            )


if __name__ == "__main__":
    sys.exit(run_program(main))
