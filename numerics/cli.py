"""`twinfer numerics`: the parser and what its commands run. Frameworks are loaded when a command
runs.
"""

from __future__ import annotations

import argparse
import traceback

from ..shared.errors import ConfigError, TwinferError
from .cli_compare import add_parsers as add_compare_parsers
from .cli_runs import add_parsers as add_run_parsers
from .cli_runs import command, model_flags, output_flags, prompts_of, subject_of, tell
from .cli_runs import write as _write
from .cli_selftest import add_parsers as add_selftest_parsers
from .errors import InfrastructureError
from .judging.gates import parse_modes


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `twinfer numerics`."""
    commands = parser.add_subparsers(dest="numerics_command", required=True, metavar="COMMAND")
    model = commands.add_parser(
        "model", help="two backends layer by layer and op by op, against both references"
    )
    model.set_defaults(run_numerics=run_model)
    model_flags(model, "of mode P; mode S is in float32")
    _common_flags(model)
    model.add_argument(
        "--mode", default="S,P", metavar="S,X,P", help="S: semantics, X: exact probes, P: precision"
    )
    model.add_argument(
        "--layers",
        metavar="0-3,last",
        help="judge these layers only, from 0; all of them run (default: all)",
    )
    ops = commands.add_parser(
        "ops", help="every implementation of every op against the reference; no model needed"
    )
    ops.set_defaults(run_numerics=run_ops)
    _common_flags(ops)
    ops.add_argument(
        "--op",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="these ops only (default: all)",
    )
    ops.add_argument(
        "--mode",
        default="S,X,P",
        metavar="S,X,P",
        help="S: float32, X: exact probes, P: narrower dtypes",
    )
    add_run_parsers(commands)
    add_compare_parsers(commands)
    add_selftest_parsers(commands)


def _common_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--a", default="jax:cpu", metavar="TARGET", help="BACKEND:DEVICE[:KEY=VALUE,...]"
    )
    parser.add_argument(
        "--b", default="torch:cpu", metavar="TARGET", help="such as torch:cuda:rms_norm=native"
    )
    output_flags(parser)
    parser.add_argument(
        "--plant", action="append", default=[], metavar="[a=|b=]FAULT[@LAYER]",
        help="plant a fault on one side (b if none is named): to see what is found; `numerics "
             "selftest --list` has all",
    )  # fmt: skip


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
    from .showing.junit import junit
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
    diff.environment["command"] = command(arguments)
    if arguments.json != "-":
        print(render(diff))
    _write(arguments.json, diff.dumps)
    _write(arguments.junit, lambda: junit(diff))
    return diff.exit_code


def run_ops(arguments: argparse.Namespace) -> int:
    """`twinfer numerics ops`."""
    from .faults.planting import plant_by_side
    from .questions.ops_check import check_ops, render
    from .showing.junit import suite_xml
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
    report.environment["command"] = command(arguments)
    if arguments.json != "-":
        print(render(report))
    _write(arguments.json, report.dumps)
    _write(arguments.junit, lambda: suite_xml(report.cases(), report.missing))
    return report.exit_code


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
