"""Host time of a step: schedule + pack + update, without a device. One process, one core.

Steady decode: N requests of 128 prompt tokens decode side by side, two steps in flight, as in the
engine's loop. "ragged": prompts of 128 to 143 tokens, so that a sixteenth of the requests needs a
page in each step, not all in one. Admission: outputs of 1 to 64 tokens; whenever a request ends,
another one is added.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from twinfer.bucketing import Table, decode_ladder, mixed_ladder
from twinfer.serving.parser import OneLineParser, whole_number
from twinfer.serving.program import run_program
from twinfer.shared.packer import pack
from twinfer.shared.request import Request
from twinfer.shared.request_table import ScheduledStep
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.scheduler import Scheduler
from twinfer.shared.scheduler_config import SchedulerConfig
from twinfer.shared.step import StepShape

PROMPT = 128
PAGE = 16
MODEL_LEN = 4096
BUDGET = 8192
VOCABULARY = 151_936
SHORT_OUTPUT = 64
WARM_UP = 64
"""Steps before the clock starts: enough to start all prompts."""
PHASES = ("schedule", "pack", "update", "step")


@dataclass(frozen=True)
class Result:
    """Microseconds by phase, at one number of running requests."""

    workload: str
    requests: int
    steps: int
    p50: dict[str, float]
    p99: dict[str, float]
    mean: dict[str, float]


class Bench:
    """A scheduler with `requests` running, and the loop that drives it."""

    def __init__(
        self, requests: int, output: int, ragged: bool, clock: Callable[[], float]
    ) -> None:
        self.requests, self.output, self.ragged, self.clock = requests, output, ragged, clock
        config = SchedulerConfig(
            max_num_seqs=requests,
            max_num_batched_tokens=BUDGET,
            max_model_len=MODEL_LEN,
            page_size=PAGE,
            num_pages=requests * (PROMPT + output + 2 * PAGE) // PAGE,
        )
        table = Table(decode_ladder(requests), mixed_ladder(BUDGET), requests)
        self.scheduler = Scheduler(config, table)
        self.shape = StepShape(MODEL_LEN // PAGE, requests, MODEL_LEN, VOCABULARY)
        self.random = np.random.default_rng(0)
        self.tokens = self.random.integers(1000, VOCABULARY, requests).astype(np.int32)
        self.count = 0
        self.in_flight: deque[ScheduledStep] = deque()
        self.samples: list[tuple[float, float, float]] = []

    def add(self, max_tokens: int) -> None:
        """One more request with a prompt of its own."""
        prompt = self.random.integers(
            1000, VOCABULARY, PROMPT + int(self.ragged) * int(self.random.integers(PAGE))
        )
        params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=max_tokens)
        self.scheduler.add(
            Request(
                f"r{self.count}", prompt.astype(np.int32), params, seed=self.count, stop_ids=(2,)
            )
        )
        self.count += 1

    def step(self) -> int:
        """One turn of the loop: schedule and pack a step, update the one before. Returns how
        many requests ended.
        """
        clock, scheduler = self.clock, self.scheduler
        begin = clock()
        step = scheduler.schedule()
        scheduled = clock()
        if step is not None:
            pack(step, scheduler.table, self.shape, len(self.samples))
            self.in_flight.append(step)
        packed = clock()
        finished = 0
        if len(self.in_flight) == 2 or step is None:
            finished = len(scheduler.update(self.in_flight.popleft(), self.tokens).finished)
        updated = clock()
        self.samples.append((scheduled - begin, packed - scheduled, updated - packed))
        return finished

    def steady(self, steps: int) -> Result:
        """All requests decode; nobody comes or goes."""
        for _ in range(self.requests):
            self.add(self.output)
        for _ in range(WARM_UP):
            self.step()
        return self._measure("steady, ragged" if self.ragged else "steady", steps)

    def admission(self, steps: int) -> Result:
        """Short outputs of different lengths: requests end and start in every step."""
        for _ in range(self.requests):
            self.add(1 + int(self.random.integers(self.output)))
        for _ in range(2 * self.output):
            self._refill(self.step())
        return self._measure("admission", steps)

    def _refill(self, count: int) -> None:
        for _ in range(count):
            self.add(1 + int(self.random.integers(self.output)))

    def _measure(self, workload: str, steps: int) -> Result:
        self.samples.clear()
        gc.collect()
        gc.freeze()
        for _ in range(steps):
            finished = self.step()
            if workload == "admission":
                self._refill(finished)
        self.scheduler.check_integrity()
        times = np.array(self.samples) * 1e6
        times = np.concatenate((times, times.sum(axis=1, keepdims=True)), axis=1)
        numbers = {
            name: dict(zip(PHASES, (round(float(value), 1) for value in values), strict=True))
            for name, values in (
                ("p50", np.percentile(times, 50, axis=0)),
                ("p99", np.percentile(times, 99, axis=0)),
                ("mean", times.mean(axis=0)),
            )
        }
        return Result(workload, self.requests, steps, **numbers)


def main() -> None:
    """Run the benchmark and print a table or JSON."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=whole_number(1), nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--steps", type=whole_number(1), default=1000)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="time of this thread alone, for a machine that others use",
    )
    args = parser.parse_args()
    output = args.steps + WARM_UP + 2
    if output > MODEL_LEN - PROMPT - PAGE:
        parser.error(
            f"--steps: got {args.steps}, allowed is at most "
            f"{MODEL_LEN - PROMPT - PAGE - WARM_UP - 2}"
        )
    clock = time.thread_time if args.cpu_time else time.perf_counter
    results = []
    for requests in args.requests:
        results.append(Bench(requests, output, False, clock).steady(args.steps))
        results.append(Bench(requests, output, True, clock).steady(args.steps))
        results.append(Bench(requests, SHORT_OUTPUT, True, clock).admission(args.steps))
    if args.json:
        json.dump(
            {
                "machine": platform.processor() or platform.machine(),
                "python": platform.python_version(),
                "numpy": np.__version__,
                "clock": "cpu" if args.cpu_time else "wall",
                "unit": "us",
                "results": [asdict(result) for result in results],
            },
            sys.stdout,
            indent=1,
        )
        return
    print(
        f"{'us per step':15} {'running':>7} "
        + " ".join(f"{name + ' p50':>12} {'p99':>7}" for name in PHASES)
        + "    mean"
    )
    for result in results:
        cells = " ".join(f"{result.p50[name]:12.1f} {result.p99[name]:7.1f}" for name in PHASES)
        print(f"{result.workload:15} {result.requests:7} {cells} {result.mean['step']:7.1f}")


if __name__ == "__main__":
    sys.exit(run_program(main))
