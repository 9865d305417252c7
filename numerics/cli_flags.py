"""What the commands of `twinfer numerics` share: flags, what they name, and how they end."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..shared.config import DTYPES, LOAD_FORMATS
from ..shared.errors import ConfigError
from ..shared.models.arguments import add_model
from .errors import InfrastructureError
from .judging.record import Report

TARGET = "BACKEND:DEVICE[:KEY=VALUE,...]"
MODES = {"S": "S: float32", "X": "X: exact probes", "P": "P: the run dtype", "I": "I: invariants"}
PLACES = "json", "junit", "out"
"""Flags that only say where results go."""
SIDES = "a", "b", "on", "backend"
"""Flags that are written out although they are the defaults: a reader asks for them first."""

AnyReport = TypeVar("AnyReport", bound=Report)


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], what: str
) -> argparse.ArgumentParser:
    """A command of `twinfer numerics`: `run` is called with its arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what)
    parser.set_defaults(run_numerics=run, numerics_parser=parser)
    return parser


def target_flag(parser: argparse.ArgumentParser, flag: str, default: str, what: str = "") -> None:
    """Where a model runs; `what` says what for."""
    parser.add_argument(flag, default=default, metavar="TARGET", help=f"{what}{TARGET}")


def targets_flag(parser: argparse.ArgumentParser, flag: str, default: str) -> None:
    """Where a model runs, once or more; `default` is for people."""
    parser.add_argument(
        flag,
        action="append",
        metavar="TARGET",
        help=f"{TARGET}, repeatable (default: {default})",
    )


def mode_flag(parser: argparse.ArgumentParser, modes: str = "S,P", **words: str) -> None:
    """The modes to look in, all of `modes` by default; `words` say what one is here."""
    told = [words.get(mode, MODES[mode]) for mode in modes.split(",")]
    parser.add_argument("--mode", default=modes, metavar=modes, help=", ".join(told))


def fault_flag(parser: argparse.ArgumentParser, where: str = "") -> None:
    """A fault to plant; `where` says in what."""
    parser.add_argument("--plant", metavar="NAME[@LAYER]", help=f"plant a fault on purpose{where}")


def faults_flag(parser: argparse.ArgumentParser) -> None:
    """Faults to plant by side."""
    parser.add_argument(
        "--plant",
        action="append",
        default=[],
        metavar="[a=|b=]FAULT[@LAYER]",
        help="plant a fault on one side (b if none is named): to see what is found; `numerics "
        "selftest --list` has all",
    )


def model_flags(
    parser: argparse.ArgumentParser, dtype: str = "the run dtype; auto is the checkpoint's"
) -> None:
    """What is run. `dtype` says of what it is."""
    add_model(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help=dtype)
    parser.add_argument(
        "--load-format", choices=LOAD_FORMATS, default="auto", help="dummy: seeded random weights"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of dummy weights; other than 0 also of the prompts",
    )
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="tokens of a step at most, from 8"
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSON lines with token_ids or prompt (default: six of its own)",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=256,
        metavar="N",
        help="tokens of a request at most, from 64; references run on the host and need scores "
        "of N x N numbers a head",
    )


def json_flag(parser: argparse.ArgumentParser) -> None:
    """Where all results go."""
    parser.add_argument(
        "--json", metavar="FILE", help="write everything that was found; - is standard output"
    )


def output_flags(parser: argparse.ArgumentParser) -> None:
    """Where results and verdicts go."""
    json_flag(parser)
    parser.add_argument("--junit", metavar="FILE", help="write the verdicts as JUnit XML")


def subject_of(arguments: argparse.Namespace) -> Any:
    """The subject that `model_flags` name. Raises ConfigError, ModelError."""
    from .sides.subject import open_subject

    if arguments.tokens < 8:
        raise ConfigError(f"tokens: got {arguments.tokens}, allowed is at least 8")
    if arguments.max_model_len < 64:
        raise ConfigError(f"max_model_len: got {arguments.max_model_len}, allowed is at least 64")
    return open_subject(
        arguments.model,
        dtype=arguments.dtype,
        load_format=arguments.load_format,
        seed=arguments.seed,
        tokens=arguments.tokens,
        max_model_len=arguments.max_model_len,
    )


def prompts_of(arguments: argparse.Namespace, subject: Any) -> Any:
    """The prompts that `model_flags` name. Raises ConfigError."""
    from .sides.steps import default_prompts, read_prompts

    given = arguments.prompts
    return read_prompts(given, subject) if given else default_prompts(subject, arguments.seed)


def fault_of(arguments: argparse.Namespace, model: Any) -> Any:
    """What `fault_flag` names, if anything. Raises ConfigError."""
    from .faults.planting import plant

    return plant(arguments.plant, model) if arguments.plant else None


def tell(text: str) -> None:
    """Progress, beside the results."""
    print(text, file=sys.stderr)


def write(path: str | None, text: Any) -> None:
    """Write what `text()` gives to a file, - is standard output. Raises InfrastructureError."""
    if path == "-":
        print(text())
    elif path:
        try:
            Path(path).write_text(text(), encoding="utf-8")
        except OSError as error:
            raise InfrastructureError(f"cannot write {path}: {error.strerror}") from error


def command(arguments: argparse.Namespace) -> str:
    """The command that asks for the same again; what only says where results go is left out."""
    words = ["twinfer", "numerics", arguments.numerics_command]
    actions = arguments.numerics_parser._actions
    for action in sorted(actions, key=_is_detail):
        value = getattr(arguments, action.dest, None)
        if action.dest in PLACES or value in (None, []):
            continue
        if value == action.default and action.dest not in SIDES:
            continue
        for one in value if isinstance(value, list) else [value]:
            words += [*action.option_strings[-1:], str(one)]
    return shlex.join(words)


def _is_detail(action: argparse.Action) -> bool:
    """Whether a flag comes after what is run, and where."""
    return bool(action.option_strings) and action.dest not in ("model", *SIDES)


def finish(
    report: AnyReport, arguments: argparse.Namespace, render: Callable[[AnyReport], str]
) -> int:
    """Show a report, write what was asked for, and give the exit code."""
    from .showing.junit import suite_xml

    report.environment["command"] = command(arguments)
    if arguments.json != "-":
        print(render(report))
    write(arguments.json, report.dumps)
    write(arguments.junit, lambda: suite_xml(report.cases(), report.missing))
    return report.exit_code
