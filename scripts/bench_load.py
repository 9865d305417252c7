"""How long weights take from files to a device, in seconds and bytes a second.

    python scripts/bench_load.py --shape qwen3-0.6b --folder checkpoint --backend torch,jax

Where the folder is empty a checkpoint of random bfloat16 in this shape is written into it first.
So its files are in the system's cache; with `--cold` the system forgets them before each load, for
which Linux wants root. Only the load is timed: what it imports is there, and the weights have their
memory on torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from twinfer.serving.parser import OneLineParser, whole_number
from twinfer.serving.program import run_program
from twinfer.shared.checkpoint import INDEX, has_weights
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.decoder import parameters_of
from twinfer.shared.models.locate import model_folder, shape_names
from twinfer.shared.models.table import TOP, keys, weight_bytes
from twinfer.shared.progress import silent

BACKENDS = ("torch", "jax")
FORGET = Path("/proc/sys/vm/drop_caches")


def write_checkpoint(shape: str, folder: Path) -> None:
    """A file for each layer, and one for what belongs to none."""
    source = Path(model_folder(shape))
    model = load_config(str(source))
    table, random = parameters_of(model), np.random.default_rng(0)
    if any(":" in part.key for parameter in table for part in parameter.parts):
        raise ConfigError(f"--shape: got {shape}, all experts of which are one tensor")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as why:
        raise ConfigError(f"--folder: cannot make {folder}: {why.strerror}") from None
    files: dict[str, str] = {}
    for layer in range(TOP, model.num_layers):
        tensors = {}
        for parameter in (table.top if layer == TOP else table.layer(layer)).values():
            for part, key in zip(parameter.parts, keys(parameter.parts, layer), strict=True):
                values = random.random(parameter.part_shape(part), np.float32) * 0.04 - 0.02
                tensors[key] = values.astype(ml_dtypes.bfloat16)
        file = f"model-{layer - TOP + 1:05}.safetensors"
        save_file(tensors, folder / file)
        files |= dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    shutil.copy(source / "config.json", folder)


def check_shape(shape: str, folder: Path) -> None:
    """Raise ConfigError where the folder has a model of another shape."""
    if load_config(str(folder)) != load_config(model_folder(shape)):
        raise ConfigError(f"--shape: got {shape}, and {folder} has weights of another model")


def load(folder: str, backend: str) -> dict[str, Any]:
    """Load once, on the first device; what was measured."""
    model = load_config(folder)
    table = parameters_of(model)
    if backend == "torch":
        import torch

        from twinfer.gpu.module import Decoder
        from twinfer.gpu.weights import load_weights as load_torch

        where = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        module = Decoder(model, table, None, torch.bfloat16, where)
        start = time.perf_counter()
        load_torch(module, folder, "auto", table, 0, silent, model)
        if where.type == "cuda":
            torch.cuda.synchronize()
        device = torch.cuda.get_device_name() if where.type == "cuda" else "cpu"
    else:
        import jax

        from twinfer.shared.models.decoder import model_of
        from twinfer.tpu.layers import blocks_of
        from twinfer.tpu.sharding import make_mesh
        from twinfer.tpu.weights import load_weights as load_jax

        first = jax.devices()[0]
        blocks = blocks_of(model_of(model), first.platform != "gpu")
        mesh, dtype = make_mesh([first], 1), jax.numpy.dtype("bfloat16")
        start = time.perf_counter()
        jax.block_until_ready(
            load_jax(folder, "auto", model, table, blocks, dtype, 0, mesh, silent)
        )
        device = first.device_kind
    seconds = time.perf_counter() - start
    size = weight_bytes(table, 2)
    return {
        "backend": backend,
        "device": device,
        "seconds": round(seconds, 3),
        "GB/s": round(size / seconds / 1e9, 2),
    }


def backends(text: str) -> list[str]:
    """Names of backends."""
    names = text.split(",")
    if wrong := [name for name in names if name not in BACKENDS]:
        raise argparse.ArgumentTypeError(f"got {wrong[0]}, allowed are {', '.join(BACKENDS)}")
    return names


def parse_arguments() -> argparse.Namespace:
    """What to load, and how often."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shape", choices=shape_names(), metavar="SHAPE")
    parser.add_argument("--backend", type=backends, default=["torch"])
    parser.add_argument("--repeats", type=whole_number(1), default=2)
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    if arguments.cold and not os.access(FORGET, os.W_OK):
        parser.error(f"--cold: nobody but root of a Linux may write to {FORGET}")
    if arguments.shape is None and not has_weights(arguments.folder):
        parser.error(f"--folder: {arguments.folder} has no weights, and no --shape was given")
    return arguments


def main() -> None:
    """Print a line for each load."""
    arguments = parse_arguments()
    folder = arguments.folder
    if not has_weights(folder):
        write_checkpoint(arguments.shape, folder)
    elif arguments.shape is not None:
        check_shape(arguments.shape, folder)
    for backend in arguments.backend:
        for _ in range(arguments.repeats):
            if arguments.cold:
                os.sync()
                FORGET.write_text("3")
            print(json.dumps(load(str(folder), backend)), flush=True)


if __name__ == "__main__":
    sys.exit(run_program(main))
