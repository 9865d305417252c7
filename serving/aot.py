"""`twinfer aot`: the flags, and the call into the JAX room, which is loaded by name."""

from __future__ import annotations

import argparse

from ..shared.engine_config import parse_device
from ..shared.errors import ConfigError
from ..shared.worker import backend_module
from .flags import engine_options
from .progress import StartBar, print_progress


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that only this command has."""
    g = parser.add_argument_group("ahead of time")
    g.add_argument(
        "--topology",
        required=True,
        metavar="v6e:2x4",
        help="a slice: v4, v5e, v5p, v6e, tpu7x and sides",
    )
    g.add_argument("--out", metavar="FOLDER", help="write all executables and their manifest there")
    g.add_argument(
        "--programs",
        choices=("largest", "steps", "all"),
        default="largest",
        help="compile the largest of each kind, of these the steps without samplers, or all "
        "(--out does)",
    )
    g.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0, or 3 if the model does not fit."""
    if arguments.backend not in ("auto", "jax"):
        raise ConfigError(f"backend: got {arguments.backend}, only jax compiles ahead of time")
    if parse_device(arguments.device)[0] not in ("auto", "tpu"):
        raise ConfigError(
            f"device: got {arguments.device}, allowed are auto and tpu: programs are for the slice "
            "that --topology names"
        )
    what = arguments.out, arguments.programs, arguments.json
    with StartBar("compiling", shown=True) as bar:
        progress = bar.update if bar.shown else print_progress
        return int(
            backend_module("jax", "aot_cli").run(
                arguments.model, arguments.topology, engine_options(arguments), *what, progress
            )
        )
