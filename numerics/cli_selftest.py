"""`twinfer numerics selftest`: its parser, and what it runs."""

from __future__ import annotations

import argparse
from typing import Any

from ..shared.errors import ConfigError
from .cli_flags import add_command, finish, mode_flag, output_flags, targets_flag, tell


def add_parsers(commands: Any) -> None:
    """Add the command to those of `twinfer numerics`."""
    parser = add_command(
        commands,
        "selftest",
        run_selftest,
        "plant every catalogued fault, and see whether the modes find it",
    )
    targets_flag(parser, "--backend", "jax:cpu, torch:cpu")
    parser.add_argument(
        "--fault",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="these faults only (default: all)",
    )
    mode_flag(parser, "S,X,P,I")
    parser.add_argument(
        "--seeds",
        type=int,
        default=20,
        metavar="N",
        help="clean runs of other weights and prompts, from 0",
    )
    parser.add_argument("--list", action="store_true", help="show the catalogue and stop")
    output_flags(parser)


def run_selftest(arguments: argparse.Namespace) -> int:
    """`twinfer numerics selftest`."""
    from .faults.engine import ENGINE_FAULTS
    from .faults.planting import describe
    from .judging.gates import parse_modes
    from .questions.selftest import MODES, render, selftest
    from .sides.subject import parse_target

    if arguments.list:
        print(
            "\n".join(
                [*describe(), *(f"{f.name:28} engine {f.what}" for f in ENGINE_FAULTS.values())]
            )
        )
        return 0
    if arguments.seeds < 0:
        raise ConfigError(f"seeds: got {arguments.seeds}, allowed is at least 0")
    targets = [parse_target(text) for text in arguments.backend or ("jax:cpu", "torch:cpu")]
    report = selftest(
        targets, names=arguments.fault, modes=parse_modes(arguments.mode, MODES),
        seeds=arguments.seeds, progress=tell,
    )  # fmt: skip
    return finish(report, arguments, render)
