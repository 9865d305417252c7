"""Time of one decode step of the whole engine, by batch size, for a model folder with dummy
weights.

    python scripts/bench_decode.py --model DIR --backend torch --batch-sizes 1,8,64 --json out.json

A figure is (time for `1 + STEPS` tokens minus time for 1) / STEPS, prompts of 128 tokens, median of
three. Beside it stands the same of processor time, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

from twinfer import LLM, SamplingParams
from twinfer.serving.parser import OneLineParser, json_object, output_file, whole_numbers
from twinfer.serving.program import run_program

STEPS = 64
PROMPT = 128


def seconds(llm: LLM, batch: int, tokens: int, rng: random.Random) -> tuple[float, float]:
    """Time and processor time to complete `batch` random prompts with `tokens` tokens each."""
    vocab = llm.engine.model.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(PROMPT)] for _ in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    start, busy = time.perf_counter(), time.process_time()
    llm.generate(prompts, params, progress=False)
    return time.perf_counter() - start, time.process_time() - busy


def main() -> None:
    """Print a line for each batch size."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--batch-sizes", type=whole_numbers(1), default="1,8,64")
    parser.add_argument("--options", type=json_object, default={}, help="engine options as JSON")
    parser.add_argument("--json", type=output_file, help="file for the results")
    arguments = parser.parse_args()
    options: dict[str, Any] = dict(
        load_format="dummy",
        max_model_len=1024,
        max_num_seqs=max(arguments.batch_sizes),
        enable_prefix_caching=False,
    )
    start = time.perf_counter()
    llm = LLM(arguments.model, backend=arguments.backend, **(options | arguments.options))
    result: dict[str, Any] = {
        "backend": arguments.backend,
        "device": llm.engine.device.name,
        "plan_hash": llm.engine.worker.plan_hash(),
        "start_s": time.perf_counter() - start,
        "decode_ms": {},
        "decode_cpu_ms": {},
    }
    print(
        f"{arguments.backend} on {result['device']}: ready in {result['start_s']:.1f} s", flush=True
    )
    rng = random.Random(0)
    seconds(llm, min(arguments.batch_sizes), 4, rng)
    for size in arguments.batch_sizes:
        runs = [(seconds(llm, size, 1 + STEPS, rng), seconds(llm, size, 1, rng)) for _ in range(3)]
        step, busy = (
            statistics.median(a[i] - b[i] for a, b in runs) / STEPS * 1e3 for i in range(2)
        )
        result["decode_ms"][size], result["decode_cpu_ms"][size] = step, busy
        print(
            f"  b={size:<4} {step:8.2f} ms a step  {size / step * 1e3:10.0f} tok/s  "
            f"{busy:8.2f} ms "
            "of processor time"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    sys.exit(run_program(main))
