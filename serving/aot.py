"""`twinfer aot`: the flags, and the call into the JAX room, which is loaded by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..shared.errors import ConfigError
from ..shared.worker import backend_module
from .progress import StartBar


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that only this command has."""
    g = parser.add_argument_group("ahead of time")
    g.add_argument("--topology", required=True, metavar="v6e:2x4", help="a slice: v4, v5e, v5p, v6e, tpu7x and sides")
    g.add_argument("--out", metavar="FOLDER", help="write the executables and their manifest there (default: nowhere)")
    g.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace, options: Callable[[argparse.Namespace], dict[str, Any]]) -> int:
    """Exit code 0, or 3 if the model does not fit."""
    if arguments.backend != "jax":
        raise ConfigError(f"backend: got {arguments.backend}, only jax compiles ahead of time")
    with StartBar("compiling", shown=not arguments.json) as bar:
        return int(
            backend_module("jax", "aot_cli").run(
                arguments.model, arguments.topology, options(arguments), arguments.out, arguments.json, bar.update
            )
        )
