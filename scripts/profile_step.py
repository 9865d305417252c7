"""Where the time of a decode step goes: host time by phase, and device time, by batch size.

    python scripts/profile_step.py --shape qwen3-0.6b --batch-sizes 1,8,64,256 --json out.json

Dummy weights. `step` is the time from one step to the next with two in flight; `device` is the time
between the ends of two steps on the device, from events; the other columns are host time: below
`device`, the device never waits.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from twinfer.serving.parser import (
    OneLineParser,
    json_object,
    output_file,
    whole_number,
    whole_numbers,
)
from twinfer.serving.program import run_program
from twinfer.shared import engine as engine_module
from twinfer.shared.config import EngineConfig
from twinfer.shared.engine import Engine
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder
from twinfer.shared.sampling_params import SamplingParams

PHASES = ("schedule", "pack", "inputs", "launch", "execute", "wait", "update")


class Clock:
    """Host seconds by phase; phases inside `execute` count for both."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def around(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[phase].append(time.perf_counter() - start)
            return result

        return timed

    def medians(self) -> dict[str, float]:
        """Microseconds by phase."""
        return {
            phase: round(statistics.median(times) * 1e6, 1)
            for phase, times in self.seconds.items()
            if times
        }


def watch(engine: Engine, clock: Clock, ends: list[Any]) -> None:
    """Time the phases of every step from now on."""
    worker: Any = engine.worker
    engine_module.pack = clock.around("pack", engine_module.pack)  # type: ignore[attr-defined]
    engine.scheduler.schedule = clock.around("schedule", engine.scheduler.schedule)  # type: ignore[method-assign]
    engine.scheduler.update = clock.around("update", engine.scheduler.update)  # type: ignore[method-assign]
    worker._inputs.fill = clock.around("inputs", worker._inputs.fill)
    worker._programs.backbone = clock.around("launch", worker._programs.backbone)
    execute = worker.execute

    def started(step: Any) -> Any:
        handle = execute(step)
        if torch.cuda.is_available():
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
        result = handle.result
        return Waited(clock.around("wait", result))

    worker.execute = clock.around("execute", started)


class Waited:
    """A handle whose result is timed."""

    def __init__(self, result: Callable[..., Any]) -> None:
        self.result = result


def measure(
    engine: Engine,
    clock: Clock,
    ends: list[Any],
    batch: int,
    penalised: int,
    prompt: int,
    steps: int,
) -> dict[str, Any]:
    """Decode `batch` requests for `steps` steps; the first `penalised` have a penalty."""
    free = SamplingParams(temperature=0.0, max_tokens=steps + 20, ignore_eos=True)
    bound = dataclasses.replace(free, presence_penalty=0.5)
    for i in range(batch):
        ids = [(7 * i + 3 * j) % 1000 + 1 for j in range(prompt)]
        engine.add(f"{batch}-{i}", ids, bound if i < penalised else free)
    for _ in range(12):
        engine.step()
    for times in clock.seconds.values():
        times.clear()
    ends.clear()
    stamps = [time.perf_counter()]
    for _ in range(steps - 10):
        engine.step()
        stamps.append(time.perf_counter())
    medians = clock.medians()
    spans = [a.elapsed_time(b) for a, b in itertools.pairwise(ends[5:-5])] if ends else []
    while engine.has_work:
        engine.step()
    host = sum(medians[phase] for phase in ("schedule", "pack", "execute", "update"))
    return {
        "batch": batch,
        "penalised": penalised,
        "step_us": round(statistics.median(b - a for a, b in itertools.pairwise(stamps)) * 1e6, 1),
        "device_us": round(statistics.median(spans) * 1e3, 1) if spans else None,
        "host_us": round(host, 1),
        **medians,
    }


def parse_arguments() -> argparse.Namespace:
    """What to run, and how."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--batch-sizes", type=whole_numbers(1), default="1,8,64,256")
    parser.add_argument(
        "--penalised",
        type=whole_numbers(0),
        default="0",
        help="how many of the requests have a penalty; of several numbers, one after another",
    )
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=whole_number(22), default=100)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--compilation-config", type=json_object, default={})
    parser.add_argument("--quantization")
    parser.add_argument("--op-priority", type=json_object, default={})
    parser.add_argument(
        "--kernels", type=int, default=0, help="list this many kernels of a step, by time"
    )
    parser.add_argument("--json", type=output_file)
    return parser.parse_args()


def load_engine(arguments: argparse.Namespace) -> Engine:
    """An engine with dummy weights of the shape."""
    folder = model_folder(arguments.shape)
    config = EngineConfig(
        model=folder,
        backend="torch",
        load_format="dummy",
        quantization=arguments.quantization,
        enable_prefix_caching=False,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        compilation_config=arguments.compilation_config,
        op_priority={op: tuple(order) for op, order in arguments.op_priority.items()},
    )
    return Engine(config, load_config(folder), folder)


def main() -> None:
    """Print a table, and write JSON if asked."""
    arguments = parse_arguments()
    start = time.perf_counter()
    engine = load_engine(arguments)
    ready = time.perf_counter() - start
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(
        f"{arguments.shape} on {device}: ready in {ready:.1f} s, {engine.report.seconds}, "
        f"plan {engine.worker.plans().hash}"
    )
    for change in engine.report.changes:
        print(" ", change)
    clock, ends = Clock(), []
    watch(engine, clock, ends)
    rows = []
    for batch, count in itertools.product(arguments.batch_sizes, arguments.penalised):
        of_engine = engine, clock, ends
        rows.append(measure(*of_engine, batch, count, arguments.prompt, arguments.steps))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        if arguments.kernels and torch.cuda.is_available():
            show_kernels(engine, batch, arguments)
    late = engine.worker.compilations_after_ready()
    print(f"compiled after ready: {late}")
    if arguments.json:
        result = {
            "shape": arguments.shape,
            "device": device,
            "ready_s": ready,
            "phases_s": engine.report.seconds,
            "plan": engine.worker.plans().hash,
            "late": late,
            "rows": rows,
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    engine.close()


def show_kernels(engine: Engine, batch: int, arguments: argparse.Namespace) -> None:
    """The kernels of some steps, by total time on the device."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for i in range(batch):
        engine.add(
            f"k{batch}-{i}", [(5 * i + j) % 1000 + 1 for j in range(arguments.prompt)], params
        )
    for _ in range(10):
        engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(8):
            engine.step()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    for event in events[: arguments.kernels]:
        count, total = event.count / 8, event.device_time_total / 8
        print(f"    {total:8.1f} us {count:6.1f} x {event.key[:90]}")
    while engine.has_work:
        engine.step()


if __name__ == "__main__":
    sys.exit(run_program(main))
