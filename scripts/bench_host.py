"""Host time of a step with its worker's part: schedule + pack + fill + update, by length of
context. No device.

N requests of one prompt length decode side by side, two steps in flight, as in the engine's loop.
`fill` is what a worker does on the host before it starts the step: gpu/inputs.py on CPU tensors,
shared/step_difference.py as numpy. One process and one core for each checkout and worker; with
`--against` the checkouts take turns, so that both see the same machine.

    scripts/bench_host.py --against before=/path/to/another/checkout
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent.parent
PAGE = 16
BUDGET = 8192
VOCABULARY = 151_936
PHASES = ("schedule", "pack", "fill", "update")
DEPTH = 2
SLACK = 64
"""Steps behind the start of the last prompt before the clock starts."""


def name_and_folder(text: str) -> tuple[str, str]:
    """A value of `--against`."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be NAME=DIR")
    if not Path(folder, "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{folder} is no checkout")
    return name, folder


def use_checkout(folder: str) -> None:
    """Import `twinfer` from a checkout, whatever is installed."""
    place = Path(folder).resolve()
    spec = importlib.util.spec_from_file_location(
        "twinfer", place / "__init__.py", submodule_search_locations=[str(place)]
    )
    if spec is None or spec.loader is None:
        raise SystemExit(f"--against: {folder} is no checkout of twinfer")
    module = importlib.util.module_from_spec(spec)
    sys.modules["twinfer"] = module
    spec.loader.exec_module(module)


def make_fill(worker: str, table: Any, shape: Any) -> Callable[[Any], Any]:
    """What a worker does with a step before it starts it."""
    if worker == "torch":
        import torch

        from twinfer.gpu.inputs import StepInputs

        torch.set_num_threads(1)
        inputs = StepInputs(table, shape, one_group(), torch.device("cpu"))

        fill_processors = make_processors_fill(inputs)

        def fill(step: Any) -> None:
            inputs.fill(step)
            if step.processors is not None:
                fill_processors(step)

        return fill
    try:
        from twinfer.shared import step_difference as state
    except ImportError:  # where that stood before workers shared it
        from twinfer.tpu import state

    # Before steps were differences, a mirror of the tables made them.
    make = state.StepBuffers if hasattr(state, "StepBuffers") else state.Mirror
    buffers, of_sampler = make(shape), make_sampler_fill(state, shape)

    def fill(step: Any) -> None:
        buffers.pack(step)
        if step.processors is not None:
            of_sampler(step)

    return fill


def make_sampler_fill(state: Any, shape: Any) -> Callable[[Any], None]:
    """What a JAX worker does with a step's processors; also before histories stayed on the
    device.
    """
    if hasattr(state, "SamplerBuffers"):
        buffers = state.SamplerBuffers(shape)

        def fill(step: Any) -> None:
            buffers.processors(step, step.processors)
            if step.sampler == "processed":
                buffers.histories(step)

        return fill

    def widen(step: Any) -> None:
        requests = step.descriptor.requests
        size = state.sampler_size(requests, shape.max_rows)
        state.wider_processors(step.processors, requests, size, shape, step.sampler)

    return widen


def make_processors_fill(inputs: Any) -> Callable[[Any], None]:
    """What a torch worker does with a step's processors; also when a buffer said all by itself."""
    if len(inspect.signature(inputs.fill_processors).parameters) == 1:
        return lambda step: inputs.fill_processors(step.processors)

    def fill(step: Any) -> None:
        inputs.fill_processors(step.descriptor.requests, step.sampler, step.processors)

    return fill


def one_group() -> Any:
    """The page groups of a cache that keeps everything; before there were any, its page size."""
    try:
        from twinfer.shared.page_groups import PageGroup
    except ImportError:
        return PAGE
    return (PageGroup(PAGE),)


def summary(samples: list[tuple[float, ...]]) -> dict[str, float]:
    """What `measure` returns, of seconds [step, phase]."""
    phases = np.array(samples) * 1e6
    sums = phases.sum(axis=1)
    medians = dict(zip(PHASES, np.median(phases, axis=0).tolist(), strict=True))
    return medians | {"step": float(np.median(sums)), "p5": float(np.percentile(sums, 5))}


def measure(
    worker: str,
    requests: int,
    context: int,
    steps: int,
    masked: int,
    penalised: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Microseconds of a step by phase: the medians, and of their sum the median and the 5th
    percentile, which tells most on a machine that others use. Of `masked` requests a token is
    banned, `penalised` ones have a penalty.
    """
    from twinfer.bucketing import Table, decode_ladder, mixed_ladder
    from twinfer.shared.packer import pack
    from twinfer.shared.request import Request
    from twinfer.shared.sampling_params import SamplingParams

    # where another checkout may have it
    from twinfer.shared.scheduler import Scheduler, SchedulerConfig
    from twinfer.shared.step import StepShape

    prompt = context - steps // 2
    prefill = -(-requests * prompt // (BUDGET - requests)) + SLACK
    length = -(-(prompt + prefill + steps + SLACK) // PAGE) * PAGE
    config = SchedulerConfig(
        max_num_seqs=requests,
        max_num_batched_tokens=BUDGET,
        max_model_len=length,
        page_size=PAGE,
        num_pages=requests * (length // PAGE + 2),
    )
    table = Table(decode_ladder(requests), mixed_ladder(BUDGET), requests)
    scheduler, shape = (
        Scheduler(config, table),
        StepShape(length // PAGE, requests, length, VOCABULARY),
    )
    fill, random = make_fill(worker, table, shape), np.random.default_rng(0)
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=length)
    banning = dataclasses.replace(params, banned_token_ids=(5,))
    for index in range(requests):
        # Lengths that differ, so that a sixteenth of the requests needs a page in each step, not
        # all in one.
        ids = random.integers(1000, VOCABULARY, prompt - index % PAGE).astype(np.int32)
        own = banning if index < masked else params
        if index < penalised:
            own = dataclasses.replace(own, presence_penalty=0.5)
        scheduler.add(Request(f"r{index}", ids, own, seed=index, stop_ids=(2,)))
    tokens = random.integers(1000, VOCABULARY, requests).astype(np.int32)
    in_flight: deque[Any] = deque()
    samples: list[tuple[float, ...]] = []
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        times = [clock()]
        scheduled = scheduler.schedule()
        times.append(clock())
        packed = pack(scheduled, scheduler.table, shape, number)
        times.append(clock())
        fill(packed)
        times.append(clock())
        in_flight.append(scheduled)
        if len(in_flight) == DEPTH:
            scheduler.update(in_flight.popleft(), tokens)
        times.append(clock())
        samples.append(tuple(np.diff(times).tolist()))

    while len(scheduler.requests) and any(r.row < 0 for r in scheduler.requests.values()):
        step()
    for _ in range(SLACK):
        step()
    samples.clear()
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        step()
    return summary(samples)


def run_child(folder: str, worker: str, context: int, args: argparse.Namespace) -> dict[str, float]:
    """One measurement in a process of its own."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--child",
        folder,
        "--workers",
        worker,
    ]
    command += [
        "--contexts",
        str(context),
        "--requests",
        str(args.requests),
        "--steps",
        str(args.steps),
    ]
    command += ["--masked", str(args.masked), "--penalised", str(args.penalised)]
    command += ["--cpu-time"] if args.cpu_time else []
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout
    result: dict[str, float] = json.loads(out.splitlines()[-1])
    return result


def parse_arguments() -> argparse.Namespace:
    """What to measure, and in which checkouts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256, help="requests that decode")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[256, 3000, 32000], help="tokens of each request"
    )
    parser.add_argument("--masked", type=int, default=0, help="of these, with a banned token")
    parser.add_argument("--penalised", type=int, default=0, help="of these, with a penalty")
    parser.add_argument("--workers", nargs="+", choices=("torch", "jax"), default=["torch", "jax"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="turns of each; the one with the least `step` is shown",
    )
    parser.add_argument(
        "--against",
        type=name_and_folder,
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="another checkout",
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="time of the thread, for a machine that others use"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", metavar="DIR", help=argparse.SUPPRESS)
    return parser.parse_args()


def best_result(
    checkouts: dict[str, str], worker: str, context: int, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Of each checkout the round with the least `step`; the checkouts take turns."""
    best: dict[str, dict[str, float]] = {}
    for _ in range(args.rounds):
        for name, folder in checkouts.items():
            result = run_child(folder, worker, context, args)
            if name not in best or result["step"] < best[name]["step"]:
                best[name] = result
    return best


def main() -> None:
    """Measure and print a table."""
    args = parse_arguments()
    if args.child is not None:
        use_checkout(args.child)
        clock = time.thread_time if args.cpu_time else time.perf_counter
        print(
            json.dumps(
                measure(
                    args.workers[0],
                    args.requests,
                    args.contexts[0],
                    args.steps,
                    args.masked,
                    args.penalised,
                    clock,
                )
            )
        )
        return
    checkouts = dict(args.against) | {"here": str(HERE)}
    rows = []
    for worker in args.workers:
        for context in args.contexts:
            best = best_result(checkouts, worker, context, args)
            rows += [
                {"worker": worker, "context": context, "checkout": name} | best[name]
                for name in checkouts
            ]
    if args.json:
        json.dump(rows, sys.stdout, indent=1)
        return
    print(
        f"{'worker':7}{'context':>8} {'checkout':10}"
        + "".join(f"{name:>10}" for name in (*PHASES, "step", "p5"))
    )
    for row in rows:
        cells = "".join(f"{row[name]:10.1f}" for name in (*PHASES, "step", "p5"))
        print(f"{row['worker']:7}{row['context']:8} {row['checkout']:10}{cells}")


if __name__ == "__main__":
    main()
