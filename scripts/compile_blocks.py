"""What patterns of windows cost to compile: CPU seconds and size of one decode program on JAX, by
how layers alternate.

    python scripts/compile_blocks.py [--layers 24] [--requests 64] [--repeats 5]

The model is small, so that the figures are those of the compiler, not of the arrays. The best of
the repeats is shown.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from twinfer.bucketing import Descriptor
from twinfer.serving.parser import OneLineParser, whole_number
from twinfer.serving.program import run_program
from twinfer.shared.config import EngineConfig, resolve
from twinfer.shared.models.config import ModelConfig
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.shapes import SHAPES
from twinfer.tpu import compilation, ladder, programs
from twinfer.tpu.plans import make_plans
from twinfer.tpu.platforms import find_device
from twinfer.tpu.sharding import make_mesh

WINDOW = 128


def patterns(layers: int) -> Mapping[str, tuple[int, ...]]:
    """Windows of each layer, by name."""
    return {
        "uniform": (0,) * layers,
        "alternating": tuple(WINDOW * (layer % 2) for layer in range(layers)),
        "five to one": tuple(WINDOW * (layer % 6 < 5) for layer in range(layers)),
    }


def small_model(windows: tuple[int, ...]) -> ModelConfig:
    """A small Qwen2."""
    model = parse_config(SHAPES["qwen2.5-7b"])
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
    }
    return replace(model, **sizes, vocab_size=512, num_layers=len(windows), layer_windows=windows)


def decode_job(model: ModelConfig, requests: int) -> tuple[programs.Model, ladder.Job]:
    """The decode program of so many requests."""
    options = {
        "max_model_len": 512,
        "max_num_seqs": requests,
        "max_num_batched_tokens": requests,
        "num_pages": 64,
    }
    # Loops over the layers are the default on TPUs.
    engine = EngineConfig(
        model="small", backend="jax", dtype="float32", scan_layers=True, **options
    )  # type: ignore[arg-type]
    config, _ = resolve(engine, model, find_device("cpu"))
    mesh = make_mesh(jax.devices("cpu"), 1)
    # As on a TPU: on a CPU, matrices would lie apart.
    tools = replace(
        ladder.program_model(model, config, make_plans(model, config), mesh), apart=False
    )
    shapes = ladder.describe(model, config, tools.blocks, 64, mesh)
    jobs = ladder.jobs(tools, config.table(), shapes, jnp.dtype("float32"), mesh)
    return tools, jobs[Descriptor("decode", requests, requests, 1)]


def compile_seconds(job: ladder.Job, label: str) -> float:
    """CPU seconds to trace and compile a program."""
    jax.clear_caches()
    start = time.process_time()
    compilation.compile_one(job, make_mesh(jax.devices("cpu"), 1), label)
    return time.process_time() - start


def lines_of(job: ladder.Job) -> int:
    """Lines of StableHLO of a program."""
    function = programs.named("lines", job.function)
    return jax.jit(function).lower(*job.arguments).as_text().count("\n")


def main() -> None:
    """Print a line for each pattern, beside the uniform one."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=whole_number(1), default=24)
    parser.add_argument("--requests", type=whole_number(1), default=64)
    parser.add_argument("--repeats", type=whole_number(1), default=5)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    work = {
        name: decode_job(small_model(windows), arguments.requests)
        for name, windows in patterns(arguments.layers).items()
    }
    best = dict.fromkeys(work, float("inf"))
    # In turns, so that whatever else the machine does meets all of them.
    for number in range(arguments.repeats):
        for name, (_, job) in work.items():
            best[name] = min(best[name], compile_seconds(job, f"{name.replace(' ', '_')}_{number}"))
    for name, (tools, job) in work.items():
        bodies, lines = sum(block.period for block in tools.blocks), lines_of(job)
        ratio = best[name] / best["uniform"]
        print(
            f"{name:12} {bodies:3} bodies  {lines:5} lines  {best[name]:6.2f} cpu-s  "
            f"{ratio:5.2f} x",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(run_program(main))
