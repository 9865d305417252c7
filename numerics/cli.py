"""`twinfer numerics`: the parser and what its commands run. Frameworks are loaded when a command
runs.
"""

from __future__ import annotations

import argparse
import traceback

from ..shared.errors import ConfigError, TwinferError
from .cli_compare import add_parsers as add_compare_parsers
from .cli_flags import (
    add_command,
    faults_flag,
    finish,
    mode_flag,
    model_flags,
    output_flags,
    prompts_of,
    subject_of,
    target_flag,
    tell,
)
from .cli_runs import add_parsers as add_run_parsers
from .cli_selftest import add_parsers as add_selftest_parsers
from .errors import InfrastructureError
from .judging.gates import parse_modes


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `twinfer numerics`."""
    commands = parser.add_subparsers(dest="numerics_command", required=True, metavar="COMMAND")
    model = add_command(
        commands,
        "model",
        run_model,
        "two backends layer by layer and op by op, against both references",
    )
    model_flags(model, "of mode P; mode S is in float32")
    _common_flags(model)
    mode_flag(model, "S,P", S="S: semantics, X: exact probes", P="P: precision")
    model.add_argument(
        "--layers",
        metavar="0-3,last",
        help="judge these layers only, from 0; all of them run (default: all)",
    )
    ops = add_command(
        commands,
        "ops",
        run_ops,
        "every implementation of every op against the reference; no model needed",
    )
    _common_flags(ops)
    ops.add_argument(
        "--op",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="these ops only (default: all)",
    )
    mode_flag(ops, "S,X,P", P="P: narrower dtypes")
    add_run_parsers(commands)
    add_compare_parsers(commands)
    add_selftest_parsers(commands)


def _common_flags(parser: argparse.ArgumentParser) -> None:
    target_flag(parser, "--a", "jax:cpu")
    target_flag(parser, "--b", "torch:cpu")
    output_flags(parser)
    faults_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run a command of `twinfer numerics`; returns the exit code (see `errors`).

    What nobody expected is no verdict: it must not look like a numeric failure, which Python's own
    exit code is.
    """
    try:
        return int(arguments.run_numerics(arguments))
    except (TwinferError, BrokenPipeError):
        raise
    except Exception as error:
        traceback.print_exc()
        raise InfrastructureError(f"{type(error).__name__}: {error}") from error


def run_model(arguments: argparse.Namespace) -> int:
    """`twinfer numerics model`."""
    from .faults.planting import plant_by_side
    from .questions.model import compare_model
    from .showing.terminal import render
    from .sides.steps import make_steps
    from .sides.subject import parse_target

    modes = parse_modes(arguments.mode)
    targets = [parse_target(arguments.a), parse_target(arguments.b)]
    subject = subject_of(arguments)
    prompts = prompts_of(arguments, subject)
    layers = parse_layers(arguments.layers, subject.model.num_layers) if arguments.layers else None
    diff = compare_model(
        subject, targets, make_steps(subject, prompts), modes=modes, layers=layers,
        faults=plant_by_side(arguments.plant, subject.model),
        progress=tell,
    )  # fmt: skip
    return finish(diff, arguments, render)


def run_ops(arguments: argparse.Namespace) -> int:
    """`twinfer numerics ops`."""
    from .faults.planting import plant_by_side
    from .questions.ops_check import check_ops, render
    from .sides.subject import parse_target

    targets = [parse_target(arguments.a), parse_target(arguments.b)]
    faults = plant_by_side(arguments.plant)
    report = check_ops(
        targets,
        arguments.op,
        faults,
        parse_modes(arguments.mode),
        progress=tell,
    )
    return finish(report, arguments, render)


def parse_layers(text: str, count: int) -> list[int]:
    """Layers from `0-3,last`. Raises ConfigError."""
    layers: set[int] = set()
    for part in text.split(","):
        first, sign, last = (word.strip() for word in part.partition("-"))
        ends = [_layer(word, count) for word in (first, last or first)]
        if min(ends) < 0 or max(ends) >= count or ends[0] > ends[1] or (sign and not last):
            raise ConfigError(f"layers: got {part!r}, allowed is such as 0-3,last below {count}")
        layers.update(range(ends[0], ends[1] + 1))
    return sorted(layers)


def _layer(word: str, count: int) -> int:
    """The layer that `last` or a number means; -1 for any other word."""
    if word == "last":
        return count - 1
    return int(word) if word.isdecimal() else -1
