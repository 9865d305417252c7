"""The command line: `twinfer generate | serve | chat | demo | plan | bench | aot | doctor |
collect-env | numerics`. Of each command the flags, and below them the call into its module, which
is imported when the command runs.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ..numerics.cli import add_parsers as add_numerics_parsers
from ..shared.config import DTYPES
from ..shared.errors import BackendUnavailable, ConfigError
from ..shared.models.arguments import WORD, add_model, settle_model
from .aot import add_flags as add_aot_flags
from .bench_cli import add_parsers as add_bench_parsers
from .chat_flags import add_chat
from .flags import add_engine, add_output, add_prompts, add_sampling
from .parser import OneLineParser, join_values, size
from .program import run_program
from .serve_flags import PORT, add_serve, model_behind_list, port_number

USAGE = "%(prog)s MODEL [options]"


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point. Returns the exit code: 0 done, 1 failed, 2 wrong input, 4 backend
    unavailable.
    """
    unread = not sys.stdout  # Python's way to say that it was closed
    _open_streams()
    words = sys.argv[1:] if argv is None else argv
    if unread and words[:1] != ["serve"]:  # whose output is no result
        print("twinfer: error: cannot write the output: it is closed", file=sys.stderr)
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character gets its escape, not an error after all the work.
        sys.stdout.reconfigure(errors="backslashreplace")
    parser, _ = _parser()
    if (code := parser.find_help(words)) is not None:
        return code
    arguments, unknown = parser.parse_known_args(join_values(words))
    if flags := [word for word in unknown if word.startswith("-")]:
        if (flag := flags[0].partition("=")[0]) in parser.flags:
            parser.error(
                f"{flag} stands before the command: twinfer {flag} ... {arguments.command}"
            )
        parser.leaf(arguments).refuse(flags[0])
    return run_program(lambda: _settle_and_run(parser, arguments, unknown), "twinfer")


def _settle_and_run(
    parser: OneLineParser, arguments: argparse.Namespace, unknown: list[str]
) -> int:
    """Run the command. `unknown` words may be its model."""
    if hasattr(arguments, WORD):
        unknown = settle_model(arguments, unknown or model_behind_list(arguments))
    if unknown:
        parser.leaf(arguments).refuse(unknown[0])
    if arguments.command is None:
        parser.print_help()
        return 0
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.coordinator is not None and arguments.command != "serve":
        from ..shared.worker import backend_module

        backend_module("jax", "hosts").join(
            arguments.coordinator, arguments.hosts, arguments.host_index
        )
        if getattr(arguments, "backend", "jax") == "auto":
            arguments.backend = "jax"  # the only one that spans hosts
    elif (arguments.hosts, arguments.host_index) != (1, 0):
        raise ConfigError(
            f"hosts, host_index: got {arguments.hosts}, {arguments.host_index}, without "
            "--coordinator allowed are 1, 0"
        )
    return int(arguments.run(arguments))


def _open_streams() -> None:
    """What was closed leads to nowhere: else the next file or socket would take its number, and get
    what is written to it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)  # processes that are started need it too
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _parser() -> tuple[OneLineParser, dict[str, OneLineParser]]:
    """The parser, and those of the commands by name."""
    parser = OneLineParser(
        prog="twinfer", description="One LLM engine for TPUs and GPUs; both compute the same thing."
    )
    from .. import __version__

    parser.add_argument("--version", action="version", version=f"twinfer {__version__}")
    _add_hosts(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=OneLineParser)
    for add in (
        _add_generate,
        _add_serve,
        _add_chat,
        _add_demo,
        _add_plan,
        _add_bench,
        _add_aot,
        _add_doctor,
        _add_numerics,
    ):
        add(commands)
    return parser, commands.choices


def _add_hosts(parser: OneLineParser) -> None:
    g = parser.add_argument_group(
        "several hosts", "the same command on each; the first has the results"
    )
    g.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="JAX: the first host, whose next two ports are used too; auto: by the variables of "
        "LeaderWorkerSet or GKE, or a TPU VM's metadata",
    )
    g.add_argument(
        "--hosts",
        type=size,
        default=1,
        metavar="N",
        help="how many there are (default: %(default)s)",
    )
    g.add_argument(
        "--host-index",
        type=size,
        default=0,
        metavar="I",
        help="this one's, from 0 (default: %(default)s)",
    )


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser("generate", help="complete prompts and leave", usage=USAGE)
    generate.set_defaults(run=run_generate)
    for add in (add_model, add_prompts, add_sampling, add_output, add_engine):
        add(generate)


def run_generate(arguments: argparse.Namespace) -> int:
    """`twinfer generate`."""
    from .generate import run

    return run(arguments)


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve", help="answer requests over HTTP, as OpenAI's API does", usage=USAGE
    )
    serve.set_defaults(run=run_serve)
    for add in (add_model, add_serve, add_engine):
        add(serve)


def run_serve(arguments: argparse.Namespace) -> int:
    """`twinfer serve`: the engine runs in a process of its own."""
    if arguments.coordinator is not None:
        raise ConfigError("coordinator: a server runs on one host")
    return int(_needing_extra("server.run").run(arguments))


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser("chat", help="talk with a running server in the terminal")
    chat.set_defaults(run=run_chat)
    add_chat(chat)


def run_chat(arguments: argparse.Namespace) -> int:
    """`twinfer chat`."""
    return int(_needing_extra("chat").run(arguments))


def _needing_extra(module: str) -> Any:
    """A module that needs what the extra `serve` brings. Raises BackendUnavailable."""
    try:
        return import_module(f".{module}", __package__)
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"{error.name} is not installed: pip install 'twinfer[serve]'"
        ) from error


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="the bundled model on several workers, tokens compared")
    demo.set_defaults(run=run_demo)
    demo.add_argument("--dtype", choices=DTYPES[1:], default="float32", help="default: %(default)s")
    demo.add_argument(
        "--max-tokens",
        type=size,
        default=48,
        metavar="N",
        help="of each text, from 1 (default: %(default)s)",
    )
    demo.add_argument(
        "--backends",
        default="jax,torch",
        metavar="B,B,...",
        help="two or more of jax, torch, torch-xla (default: %(default)s)",
    )


def run_demo(arguments: argparse.Namespace) -> int:
    """`twinfer demo`."""
    from .demo import run

    return run(arguments.dtype, arguments.max_tokens, arguments.backends)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan", help="which implementation of each op a backend runs, and why", usage=USAGE
    )
    plan.set_defaults(run=run_plan)
    add_model(plan)
    add_engine(plan)
    plan.add_argument("--json", action="store_true", help="one JSON object")
    plan.add_argument(
        "--all", action="store_true", help="also the ops that the model does not call"
    )


def run_plan(arguments: argparse.Namespace) -> int:
    """`twinfer plan`."""
    from .plan import run

    return run(arguments)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench", help="measure speed: offline workloads, latency by percentile, or a server"
    )
    bench.set_defaults(run=run_bench)
    add_bench_parsers(bench)


def run_bench(arguments: argparse.Namespace) -> int:
    """`twinfer bench`."""
    if arguments.bench == "serve":
        return int(_needing_extra("bench_serve").run(arguments))
    from .bench_cli import run

    return run(arguments)


def _add_aot(commands: Any) -> None:
    what = "compile for a TPU slice without one: does it fit, what does it cost"
    aot = commands.add_parser("aot", help=what, usage=USAGE)
    aot.set_defaults(run=run_aot)
    add_model(aot)
    add_aot_flags(aot)
    add_engine(aot, without=["torch"])


def run_aot(arguments: argparse.Namespace) -> int:
    """`twinfer aot`: needs libtpu and no TPU."""
    from .aot import run

    return run(arguments)


def _add_doctor(commands: Any) -> None:
    """`doctor`, and `collect-env` beside it."""
    doctor = commands.add_parser("doctor", help="what this machine can run, and what is in the way")
    doctor.set_defaults(run=run_doctor)
    doctor.add_argument(
        "model", nargs="?", metavar="MODEL", help="whether it can be read and fits (default: none)"
    )
    doctor.add_argument(
        "--port",
        type=port_number,
        default=PORT,
        metavar="P",
        help="that a server would take, 0 to 65535 (default: %(default)s)",
    )
    doctor.add_argument("--json", action="store_true", help="a JSON list")
    collect = commands.add_parser(
        "collect-env", help="versions, devices and variables, for a report"
    )
    collect.set_defaults(run=run_collect_env)


def run_doctor(arguments: argparse.Namespace) -> int:
    """`twinfer doctor`."""
    from .doctor import run_doctor as run

    return run(arguments)


def run_collect_env(arguments: argparse.Namespace) -> int:
    """`twinfer collect-env`."""
    from .doctor import run_collect_env as run

    return run(arguments)


def _add_numerics(commands: Any) -> None:
    numerics = commands.add_parser(
        "numerics", help="compare backends numerically: which op, in which layer, and why"
    )
    numerics.set_defaults(run=run_numerics)
    add_numerics_parsers(numerics)


def run_numerics(arguments: argparse.Namespace) -> int:
    """`twinfer numerics`: both backends in one process."""
    from ..numerics.cli import run

    return run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
