"""Host time of a decode step through the executor: ranks whose workers compute nothing.

    python scripts/bench_ranks.py --requests 256 --ranks 2,4

`send` is what the engine's thread spends on a step before it goes on, `round trip` lasts until
the tokens are there, `pair` is a step's share of a loop with two steps in flight. Medians, in
microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from twinfer.bucketing import Descriptor
from twinfer.serving.parser import OneLineParser, whole_number, whole_numbers
from twinfer.serving.program import run_program
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.executor.driver import Ranks, Subprocesses
from twinfer.shared.executor.messages import encode
from twinfer.shared.executor.worker import RanksWorker
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder
from twinfer.shared.packer import padding
from twinfer.shared.step import NewPages, StepInput, StepShape, sampling_layout

FAKE = Path(__file__).resolve().parents[1] / "tests" / "unit" / "fake_rank.py"
STEPS = 400


def step_of(number: int, requests: int) -> StepInput:
    """A decode step as the scheduler of an engine with contexts of 128 Ki tokens packs it."""
    shape = StepShape(131072 // 16, requests, 131072, 128256)
    made = padding(Descriptor("decode", requests, requests, 1), shape)
    new = np.zeros(requests // 16, np.int32)
    return StepInput(
        number, made.descriptor, shape, "filtered", made.batch,
        sampling_layout(requests).allocate(), new_pages=NewPages(number, new, new, new, new),
    )  # fmt: skip


def measure(count: int, requests: int) -> dict[str, float]:
    """Microseconds by what is measured."""
    model = load_config(model_folder("demo"))
    asked = EngineConfig(model="demo", backend="torch", device="cpu", tensor_parallel_size=count)
    config = resolve(asked, model, DeviceInfo("cpu", "cpu", 1 << 40))[0]
    ranks = Ranks("torch", "cpu", count, Subprocesses((sys.executable, str(FAKE))))
    try:
        worker = RanksWorker(ranks, model, config, model_folder("demo"))
        send, trip = [], []
        for number in range(STEPS):
            step = step_of(number, requests)
            begin = time.perf_counter()
            handle = worker.execute(step)
            send.append(time.perf_counter() - begin)
            handle.result()
            trip.append(time.perf_counter() - begin)
        steps = [step_of(number, requests) for number in range(STEPS)]
        begin, before = time.perf_counter(), worker.execute(steps[0])
        for step in steps[1:]:
            handle = worker.execute(step)
            before.result()
            before = handle
        before.result()
        pair = (time.perf_counter() - begin) / STEPS
    finally:
        ranks.close()
    found = {"send": statistics.median(send), "round trip": statistics.median(trip), "pair": pair}
    return {name: round(value * 1e6, 1) for name, value in found.items()}


def main() -> None:
    """Print a line for each number of ranks."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=whole_number(1), default=256)
    parser.add_argument("--ranks", type=whole_numbers(1), default="2,4")
    arguments = parser.parse_args()
    print(f"{len(encode(step_of(1, arguments.requests)))} bytes a step")
    for count in arguments.ranks:
        print(f"{count} ranks: {measure(count, arguments.requests)} us")


if __name__ == "__main__":
    sys.exit(run_program(main))
