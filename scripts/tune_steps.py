"""How long a decode step takes with other launch configurations, each in a CUDA graph of its own.

    python scripts/tune_steps.py --shape qwen3-0.6b --batch-sizes 8 --prompt 128,1024
        --try 'held/4096x1024/8={"carveout":[-1,28,57],"warps":[2,4]}'

A kernel that is fast by itself may be slow in a step, where launches overlap: this times all layers
of a step with one entry of `configs.json` changed at a time, to each combination of the values
given. Dummy weights. `drift` is the largest difference of the rows that leave the last layer from
those of the configuration that stands, beside their largest entry: what is wrong is not fast.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from profile_step import load_engine

from twinfer.gpu.graphs import GraphRecorder
from twinfer.gpu.kernels import launch
from twinfer.gpu.precompile import compile_together, kernels_noted
from twinfer.serving.parser import (
    OneLineParser,
    json_object,
    output_file,
    whole_number,
    whole_numbers,
)
from twinfer.serving.program import run_program
from twinfer.shared.engine import Engine
from twinfer.shared.sampling_params import SamplingParams

Setting = dict[str, int]
Variant = tuple[str, Setting]
"""An entry of `configs.json` and its values."""


def variants_of(text: str) -> list[Variant]:
    """All combinations of `ENTRY={"name": [values]}`: one entry each, changed from what stands."""
    name, _, values = text.partition("=")
    try:
        choices = json.loads(values)
        names = [
            (key, value if isinstance(value, list) else [value]) for key, value in choices.items()
        ]
    except (AttributeError, json.JSONDecodeError) as error:
        raise argparse.ArgumentTypeError(
            f'{text!r}: expected ENTRY={{"name": [values]}}: {error}'
        ) from None
    combinations = itertools.product(*(value for _, value in names))
    keys = [key for key, _ in names]
    return [(name, dict(zip(keys, each, strict=True))) for each in combinations]


def unknown(variants: list[Variant]) -> str:
    """What of the entries no kernel has, "" if there is nothing."""
    table, known = launch._table(), defaultdict(set)
    for entries in (table["default"], *table["chips"].values()):
        for name, values in entries.items():
            known[name.split("/")[0]] |= values.keys()
    for name, values in variants:
        kernel = name.split("/")[0]
        if kernel not in known:
            return f"--try: got {name}, the kernels are {', '.join(sorted(known))}"
        if more := values.keys() - known[kernel]:
            return f"--try: got {min(more)}, {kernel} has {', '.join(sorted(known[kernel]))}"
    return ""


@contextmanager
def table_with(variant: Variant | None) -> Iterator[None]:
    """`configs.json` with one entry changed, within the block."""
    if variant is None:
        yield
        return
    name, values = variant
    table = launch._table()
    chip = table["chips"].setdefault(torch.cuda.get_device_name(), {})
    before = chip.get(name)
    kernel = table["default"][name.split("/")[0]]
    chip[name] = {**(before or table["default"].get(name, kernel)), **values}
    launch.config.cache_clear()
    try:
        yield
    finally:
        if before is None:
            del chip[name]
        else:
            chip[name] = before
        launch.config.cache_clear()


class Steps:
    """The decode step of a number of requests, over and over."""

    def __init__(self, engine: Engine, requests: int, prompt: int) -> None:
        self._engine, self._requests = engine, requests
        params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        for i in range(requests):
            ids = [(7 * i + 3 * j) % 1000 + 1 for j in range(prompt)]
            engine.add(f"{requests}-{prompt}-{i}", ids, params)
        for _ in range(24):
            engine.step()
        torch.cuda.synchronize()
        worker: Any = engine.worker
        self.programs = worker._programs
        table = [d for d in self.programs._table if d.kind == "decode" and d.tokens >= requests]
        self.descriptor = min(table, key=lambda d: d.tokens)

    def note(self, variant: Variant | None) -> Any:
        """The kernels of a variant that are not compiled."""
        with table_with(variant), kernels_noted() as noted:
            self.programs._rows(self.descriptor, False)
        return noted

    def time(self, variant: Variant | None, replays: int) -> tuple[float, torch.Tensor]:
        """(Microseconds of all layers, the rows that leave the last one)."""
        mode = self.programs._compilation.cudagraph_mode.step_mode("decode")
        # A pool takes no capture any more once all graphs in it are gone.
        recorder = GraphRecorder()
        with table_with(variant), recorder.recording():
            self.programs._rows(self.descriptor)
            replay, _ = recorder.capture(
                self.descriptor, mode, lambda: self.programs._rows(self.descriptor)
            )
        times = []
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times[3:]), self.programs.rows[: self._requests].float().clone()

    def finish(self) -> None:
        """Let the requests end."""
        while self._engine.has_work:
            self._engine.step()


def parse_arguments() -> argparse.Namespace:
    """What to run, and how."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--quantization")
    parser.add_argument("--batch-sizes", type=whole_numbers(1), default="1")
    parser.add_argument("--prompt", type=whole_numbers(1), default="128")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--compilation-config", type=json_object, default={})
    parser.add_argument("--op-priority", type=json_object, default={})
    parser.add_argument("--replays", type=whole_number(10), default=60)
    parser.add_argument("--try", dest="variants", type=variants_of, action="append", default=[])
    parser.add_argument("--json", type=output_file)
    arguments = parser.parse_args()
    arguments.variants = [each for group in arguments.variants for each in group]
    if wrong := unknown(arguments.variants):
        parser.error(wrong)
    if not torch.cuda.is_available():
        parser.error("there is no GPU here, and nothing else to time steps on")
    return arguments


def main() -> None:
    """Print a line for each configuration, fastest first, and write JSON if asked."""
    arguments = parse_arguments()
    engine = load_engine(arguments)
    variants, rows = arguments.variants, []
    for requests, prompt in itertools.product(arguments.batch_sizes, arguments.prompt):
        steps = Steps(engine, requests, prompt)
        noted: Any = {}
        for variant in variants:
            noted |= steps.note(variant)
        compile_together(noted, lambda _: None)
        standing, expected = steps.time(None, arguments.replays)
        print(
            f"{arguments.shape} {requests} x {prompt}: {standing:.1f} us as it stands", flush=True
        )
        found = []
        for number, variant in enumerate(variants):
            try:
                us, got = steps.time(variant, arguments.replays)
            except Exception as error:
                print(f"  {variant}: {str(error).splitlines()[-1]:.160}", flush=True)
                continue
            drift = float((got - expected).abs().max() / expected.abs().max())
            found.append((us, drift, *variant))
            if number % 20 == 19:
                again = steps.time(None, arguments.replays)[0]
                print(f"  as it stands, again: {again:.1f}", flush=True)
        for us, drift, name, values in sorted(found, key=lambda each: each[0]):
            print(f"  {us:9.1f} us  drift {drift:.1e}  {name} {json.dumps(values)}", flush=True)
            rows.append(
                {
                    "requests": requests,
                    "prompt": prompt,
                    "us": us,
                    "drift": drift,
                    "entry": name,
                    **values,
                }
            )
        rows.append({"requests": requests, "prompt": prompt, "us": standing, "entry": ""})
        steps.finish()
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"shape": arguments.shape, "rows": rows}, file, indent=1)
    engine.close()


if __name__ == "__main__":
    sys.exit(run_program(main))
