"""Each op, each provider: time, achieved bytes per second, and the share of what a copy reaches on the same device.

    python scripts/bench_ops.py --framework torch --device cpu [--ops rms_norm,linear] [--json out.json]

Bytes are those of the op's inputs and outputs, each counted once: caches and weights that a case does not read whole
make the figure too kind, arithmetic makes the share too low; it is a floor from traffic, not a roofline. The last lines
give the price of a call: the plain function, the planned one, and the one behind a torch operator.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from twinfer.ops import REGISTRY, resolve
from twinfer.ops.cases import load_all
from twinfer.ops.implement import IMPLEMENTATIONS
from twinfer.ops.testing import TESTING

REPEATS = 7


class Device:
    """Moves arrays to a framework's device and times work there."""

    def __init__(self, framework: str, device: str) -> None:
        self.framework = framework
        if framework == "jax":
            import jax

            self.jax = jax
            self.where = jax.devices({"cuda": "gpu"}.get(device, device))[0]
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
        """Median time of a call, many calls at a time."""
        self._wait(function())
        start = time.perf_counter()
        self._wait(function())
        count = max(1, min(1000, int(0.02 / max(time.perf_counter() - start, 1e-7))))
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
            static = {n: v for n, v in case.arguments.items() if n in declared.static_parameters or v is None}
            arrays = {n: device.put(v) for n, v in case.arguments.items() if n not in static}
            call = lambda f=function, s=static, **a: f(**a, **s)  # noqa: E731
            if device.framework == "jax":
                call = device.jax.jit(call)
            if plan[op].implementation.host_metadata:
                host = ("query_start", "kv_lens", "counts")
                arrays |= {n: device.torch.from_numpy(case.arguments[n]) for n in host}
            seconds = device.seconds(lambda c=call, a=arrays: c(**a))
            moved = sum(size(a) for a in arrays.values()) + size(call(**arrays))
            row = {"op": op, "provider": provider, "case": case.name, "dtype": dtype, "us": seconds * 1e6}
            rows.append(row | {"gb_s": moved / seconds / 1e9, "share": moved / seconds / limit})
    return rows


def call_prices() -> dict[str, float]:
    """Nanoseconds of one call on a tensor of 8 numbers, above nothing: plain, planned, behind an operator."""
    import torch

    from twinfer.ops.bindings.torch import bind
    from twinfer.ops.namespaces import namespace
    from twinfer.ops.reference.dense import silu_and_mul

    device, x, xp = Device("torch", "cpu"), torch.ones(1, 8), namespace("torch")
    plan = resolve("torch")
    prices = {"plain": device.seconds(lambda: silu_and_mul(xp, x)) * 1e9}
    planned = plan.bind().silu_and_mul
    prices["planned"] = device.seconds(lambda: planned(x)) * 1e9
    wrapped = bind(plan, wrap=True, compiling=False).silu_and_mul
    prices["wrapped"] = device.seconds(lambda: wrapped(x)) * 1e9
    return prices


def main() -> None:
    """Print a table, and the price of a call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("jax", "torch"), default="torch")
    parser.add_argument("--device", choices=("cpu", "cuda", "tpu"), default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ops", help="names separated by commas; all if left out")
    parser.add_argument("--json", help="file for the rows")
    arguments = parser.parse_args()
    load_all()
    device = Device(arguments.framework, arguments.device)
    limit = device.copy_rate()
    print(f"{arguments.framework} on {arguments.device}: a copy moves {limit / 1e9:.0f} GB/s")
    rows = []
    for op in arguments.ops.split(",") if arguments.ops else sorted(TESTING):
        dtype = arguments.dtype if arguments.dtype in TESTING[op].dtypes else TESTING[op].dtypes[0]
        for row in bench_op(device, op, dtype, limit):
            rows.append(row)
            where = f"{row['op']:<22} {row['provider']:<12} {row['dtype']:<9} {row['case'][:40]:<40}"
            print(f"{where} {row['us']:10.1f} us {row['gb_s']:8.1f} GB/s {row['share']:6.1%}", flush=True)
    prices = call_prices() if arguments.framework == "torch" else {}
    for name, price in prices.items():
        print(f"a call on a tensor of 8 numbers, {name}: {price:.0f} ns")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"limit": limit, "rows": rows, "call_ns": prices}, file, indent=1)


if __name__ == "__main__":
    main()
