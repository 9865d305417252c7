"""`twinfer numerics selftest`: its parser, and what it runs."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..shared.errors import ConfigError
from .cli_runs import command, write


def add_parsers(commands: Any) -> None:
    """Add the command to those of `twinfer numerics`."""
    parser = commands.add_parser(
        "selftest", help="plant every catalogued fault, and see whether the modes find it"
    )
    parser.set_defaults(run_numerics=run_selftest)
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="TARGET",
        help="BACKEND:DEVICE[:...], repeatable (default: jax:cpu, torch:cpu)",
    )
    parser.add_argument(
        "--fault",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="these faults only (default: all)",
    )
    parser.add_argument(
        "--mode",
        default="S,X,P,I",
        metavar="S,X,P,I",
        help="look in these modes only; I: invariants",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=20,
        metavar="N",
        help="clean runs of other weights and prompts, from 0",
    )
    parser.add_argument("--list", action="store_true", help="show the catalogue and stop")
    parser.add_argument(
        "--json", metavar="FILE", help="write everything that was found; - is standard output"
    )
    parser.add_argument("--junit", metavar="FILE", help="write the verdicts as JUnit XML")


def run_selftest(arguments: argparse.Namespace) -> int:
    """`twinfer numerics selftest`."""
    from .faults.engine import ENGINE_FAULTS
    from .faults.planting import describe
    from .judging.gates import parse_modes
    from .questions.selftest import MODES, render, selftest
    from .showing.junit import suite_xml
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
        seeds=arguments.seeds,
        progress=lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    report.environment["command"] = command(arguments)
    if arguments.json != "-":
        print(render(report))
    write(arguments.json, report.dumps)
    write(arguments.junit, lambda: suite_xml(report.cases(), []))
    return report.exit_code
