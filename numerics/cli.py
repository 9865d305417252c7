"""`twinfer numerics`: the parser. What its commands do is in `commands.py`, which is loaded when
one of them runs: an engine that starts needs none of it.
"""

from __future__ import annotations

import argparse
import traceback
from typing import Any

from ..shared import option_text
from ..shared.config import DTYPES, LOAD_FORMATS
from ..shared.errors import ConfigError, TwinferError
from ..shared.kv_config import NARROW
from ..shared.models.arguments import add_model
from ..shared.models.quantization import WHEN_LOADED
from .errors import InfrastructureError

TARGET = "BACKEND:DEVICE[:KEY=VALUE,...]"
MODES = {"S": "S: float32", "X": "X: exact probes", "P": "P: the run dtype", "I": "I: invariants"}

FILES = {"json": "json", "junit": "junit", "out": "page"}
"""Flags that name a file for results, and what they are called among the arguments: `--out` of
`capture` names a folder.
"""


def run(arguments: argparse.Namespace) -> int:
    """Run a command of `twinfer numerics`; returns the exit code (see `errors`).

    What nobody expected is no verdict: it must not look like a numeric failure, which Python's own
    exit code is.
    """
    from . import commands

    check_files(arguments)
    try:
        return int(getattr(commands, arguments.numerics_command)(arguments))
    except (TwinferError, BrokenPipeError):
        raise
    except Exception as error:
        traceback.print_exc()
        raise InfrastructureError(f"{type(error).__name__}: {error}") from error


def check_files(arguments: argparse.Namespace) -> None:
    """Raise ConfigError where a result cannot be written: before the work, not after it."""
    for flag, name in FILES.items():
        place = getattr(arguments, name, None)
        if place in (None, "-"):  # - is standard output
            continue
        try:
            option_text.output_file(place)
        except ValueError as error:
            raise ConfigError(f"{flag}: {error}") from None


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `twinfer numerics`."""
    commands = parser.add_subparsers(dest="numerics_command", required=True, metavar="COMMAND")
    model = _command(
        commands, "model", "two backends layer by layer and op by op, against both references"
    )
    _model_flags(model, "of mode P; mode S is in float32")
    _storage_flags(model)
    _pair_flags(model)
    _output_flags(model)
    _faults_flag(model)
    _mode_flag(model, "S,P", S="S: semantics, X: exact probes", P="P: precision")
    model.add_argument(
        "--layers",
        metavar="0-3,last",
        help="judge these layers only, from 0; all of them run (default: all)",
    )
    ops = _command(
        commands, "ops", "every implementation of every op against the reference; no model needed"
    )
    _pair_flags(ops)
    _output_flags(ops)
    _faults_flag(ops)
    _names_flag(ops, "--op", "these ops only (default: all)")
    _mode_flag(ops, "S,X,P", P="P: narrower dtypes")

    capture = _command(
        commands, "capture", "run a model on one backend and keep steps and taps as a bundle"
    )
    _model_flags(capture)
    _target_flag(capture, "--on", "jax:cpu")
    capture.add_argument("--out", required=True, metavar="DIR", help="a new folder for the bundle")
    capture.add_argument(
        "--taps", default="*", metavar="PATTERN,...", help="op calls to keep; none: layers only"
    )
    capture.add_argument(
        "--steps", type=int, metavar="N", help="the first N steps only, from 1 (default: all)"
    )
    _fault_flag(capture)

    replay = _command(commands, "replay", "run a bundle's steps on other backends and judge both")
    replay.add_argument("bundle", metavar="BUNDLE", help="a folder that `capture` wrote")
    _targets_flag(replay, "--on", "torch:cpu")
    replay.add_argument(
        "--model", metavar="MODEL", help="its folder, if it is not where it was (default: there)"
    )
    _fault_flag(replay, " in the first target")
    _output_flags(replay)

    invariants = _command(
        commands, "invariants", "what must not change a model's logits, on one backend"
    )
    _model_flags(invariants)
    _storage_flags(invariants)
    _target_flag(invariants, "--on", "jax:cpu")
    _mode_flag(invariants)
    _names_flag(invariants, "--relation", "these relations only (default: those that apply)")
    _fault_flag(invariants)
    _output_flags(invariants)

    bisect = _command(
        commands, "bisect", "the smallest part of a backend that makes it fail: layer, op, why"
    )
    _model_flags(bisect)
    bisect.add_argument(
        "--over",
        choices=("layers", "knobs"),
        default="layers",
        help="knobs: compilation, graphs, implementations",
    )
    bisect.add_argument(
        "--bundle", metavar="DIR", help="the steps of a bundle of this model, instead of prompts"
    )
    _target_flag(bisect, "--on", "jax:cpu", "the suspect: ")
    _mode_flag(bisect)
    _number_flag(bisect, "--steps", 3, "the first N steps, from 1")
    _fault_flag(bisect)
    _output_flags(bisect)

    served = _command(
        commands,
        "served",
        "what engines serve, tokens and log-probabilities, against the reference",
    )
    _model_flags(served)
    _storage_flags(served)
    _targets_flag(served, "--on", "jax:cpu and torch:cpu")
    _mode_flag(served)
    _definition(served)
    _output_flags(served)

    check = _command(
        commands, "check", "two backends and a model in every way, one verdict, one first cause"
    )
    _model_flags(check)
    _storage_flags(check)
    _pair_flags(check)
    _mode_flag(check)
    _definition(check)
    check.add_argument(
        "--seconds",
        type=float,
        default=900.0,
        metavar="N",
        help="no part is begun later; what was not begun is not compared (exit code 3)",
    )
    _output_flags(check)

    quantization = _command(
        commands, "quantization", "what a scheme of quantised weights costs, by layer and in logits"
    )
    _model_flags(quantization, "of the checkpoint; the comparison is in float32")
    quantization.add_argument(
        "--scheme", required=True, metavar="NAME", help="as of --quantization of an engine"
    )
    _json_flag(quantization)

    rollout = _command(
        commands,
        "rollout",
        "one side draws, the other computes: importance ratios, drift, perplexity",
    )
    _model_flags(rollout)
    _target_flag(rollout, "--a", "torch:cpu", "who draws: ")
    _target_flag(rollout, "--b", "torch:cpu", "who computes: ")
    _number_flag(rollout, "--rollout-tokens", 10_000, "tokens drawn, from 1")
    rollout.add_argument("--text", metavar="FILE", help="a text, for the perplexity of both sides")
    _output_flags(rollout)

    logits = _command(
        commands, "logits", "the ends of two runs: against a backend, transformers, or a server"
    )
    _model_flags(logits)
    _target_flag(logits, "--a", "jax:cpu")
    logits.add_argument(
        "--b",
        default="torch:cpu",
        metavar="SIDE",
        help="the same, transformers, http://HOST:PORT of a server, or dump:FOLDER",
    )
    _number_flag(
        logits, "--positions", 8, "places of a prompt to ask a server at one by one, from 1"
    )
    logits.add_argument(
        "--server-logits",
        choices=("auto", "float32"),
        default="auto",
        help="float32: a server whose logits are rounded to less fails; auto: it is noted",
    )
    _faults_flag(logits)
    _output_flags(logits)

    compare = _command(commands, "compare", "results or bundles of several runs, side by side")
    compare.add_argument(
        "items", nargs="+", metavar="RESULT", help="a file of --json, or a folder of capture"
    )
    compare.add_argument(
        "--model",
        metavar="MODEL",
        help="its folder, if it is not where a bundle was made (default: there)",
    )
    _output_flags(compare)

    report = _command(commands, "report", "a result as one HTML file")
    report.add_argument("result", metavar="RESULT", help="a file of --json")
    report.add_argument(
        "--out", dest="page", metavar="FILE", help="the HTML file (default: RESULT with .html)"
    )

    selftest = _command(
        commands, "selftest", "plant faults of every kind, and see whether the modes find them"
    )
    _targets_flag(selftest, "--backend", "jax:cpu, torch:cpu")
    _names_flag(selftest, "--fault", "these faults only (default: all)")
    _mode_flag(selftest, "S,X,P,I")
    _number_flag(selftest, "--seeds", 20, "clean runs of other weights and prompts, from 0")
    selftest.add_argument("--list", action="store_true", help="show the catalogue and stop")
    _output_flags(selftest)


# --- flags
# --------------------------------------------------------------------------------------------------


def _command(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    """A command: the function of `commands.py` of this name."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what)
    parser.set_defaults(numerics_parser=parser)
    return parser


def _target_flag(parser: argparse.ArgumentParser, flag: str, default: str, what: str = "") -> None:
    """Where a model runs; `what` says what for."""
    parser.add_argument(flag, default=default, metavar="TARGET", help=f"{what}{TARGET}")


def _pair_flags(parser: argparse.ArgumentParser) -> None:
    """The two sides of a comparison."""
    _target_flag(parser, "--a", "jax:cpu")
    _target_flag(parser, "--b", "torch:cpu")


def _targets_flag(parser: argparse.ArgumentParser, flag: str, default: str) -> None:
    """Where a model runs, once or more; `default` is for people."""
    parser.add_argument(
        flag, action="append", metavar="TARGET", help=f"{TARGET}, repeatable (default: {default})"
    )


def _mode_flag(parser: argparse.ArgumentParser, modes: str = "S,P", **words: str) -> None:
    """The modes to look in, all of `modes` by default; `words` say what one is here."""
    told = [words.get(mode, MODES[mode]) for mode in modes.split(",")]
    parser.add_argument("--mode", default=modes, metavar=modes, help=", ".join(told))


def _names_flag(parser: argparse.ArgumentParser, flag: str, what: str) -> None:
    """Some of what there is, by name."""
    parser.add_argument(flag, action="extend", nargs="+", default=[], metavar="NAME", help=what)


def _number_flag(parser: argparse.ArgumentParser, flag: str, default: int, what: str) -> None:
    parser.add_argument(flag, type=int, default=default, metavar="N", help=what)


def _fault_flag(parser: argparse.ArgumentParser, where: str = "") -> None:
    """A fault to plant; `where` says in what."""
    parser.add_argument("--plant", metavar="NAME[@LAYER]", help=f"plant a fault on purpose{where}")


def _faults_flag(parser: argparse.ArgumentParser) -> None:
    """Faults to plant by side."""
    parser.add_argument(
        "--plant",
        action="append",
        default=[],
        metavar="[a=|b=]FAULT[@LAYER]",
        help="plant a fault on one side (b if none is named): to see what is found; `numerics "
        "selftest --list` has all",
    )


def _model_flags(
    parser: argparse.ArgumentParser, dtype: str = "the run dtype; auto is the checkpoint's"
) -> None:
    """What is run. `dtype` says of what it is."""
    add_model(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help=dtype)
    parser.add_argument(
        "--load-format", choices=LOAD_FORMATS, default="auto", help="dummy: seeded random weights"
    )
    _number_flag(parser, "--seed", 0, "of dummy weights; other than 0 also of the prompts")
    _number_flag(parser, "--tokens", 64, "tokens of a step at most, from 8")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSON lines with token_ids or prompt (default: six of its own)",
    )
    _number_flag(
        parser,
        "--max-model-len",
        256,
        "tokens of a request at most, from 64; references run on the host and need scores "
        "of N x N numbers a head",
    )


def _storage_flags(parser: argparse.ArgumentParser) -> None:
    """Engine options that say what weights and cache hold, of all sides."""
    parser.add_argument(
        "--quantization",
        choices=tuple(WHEN_LOADED),
        help="hold the weights of projections so, quantised when they are loaded, on all sides",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", *NARROW),
        default="auto",
        help="what the KV cache of all sides holds; auto: as the model runs",
    )
    parser.add_argument(
        "--kv-cache-scales",
        type=_scales,
        metavar="K,V",
        help="what K and V are divided by in a narrow cache (default: the checkpoint's, else 1,1; "
        "int8 needs them)",
    )


def _scales(text: str) -> tuple[float, ...]:
    """What a flag says; how many there may be the engine's option says. Raises
    ArgumentTypeError.
    """
    try:
        return option_text.scales(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _json_flag(parser: argparse.ArgumentParser) -> None:
    """Where all results go."""
    parser.add_argument(
        "--json", metavar="FILE", help="write everything that was found; - is standard output"
    )


def _output_flags(parser: argparse.ArgumentParser) -> None:
    """Where results and verdicts go."""
    _json_flag(parser)
    parser.add_argument("--junit", metavar="FILE", help="write the verdicts as JUnit XML")


def _definition(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--definition",
        choices=("auto", "transformers", "off"),
        default="auto",
        help="who is asked whether the reference is right; auto: transformers, if installed",
    )
