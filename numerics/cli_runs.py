"""The commands of `twinfer numerics` that run a model on one backend: `capture`, `replay`,
`invariants`, `bisect`.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..shared.config import DTYPES, LOAD_FORMATS
from ..shared.errors import ConfigError
from ..shared.models.arguments import add_model
from .errors import InfrastructureError
from .judging.gates import parse_modes


def add_parsers(commands: Any) -> None:
    """Add the commands to the sub-commands of `twinfer numerics`."""
    capture = commands.add_parser(
        "capture", help="run a model on one backend and keep steps and taps as a bundle"
    )
    capture.set_defaults(run_numerics=run_capture)
    model_flags(capture)
    capture.add_argument(
        "--on", default="jax:cpu", metavar="TARGET", help="BACKEND:DEVICE[:KEY=VALUE,...]"
    )
    capture.add_argument("--out", required=True, metavar="DIR", help="a new folder for the bundle")
    capture.add_argument(
        "--taps", default="*", metavar="PATTERN,...", help="op calls to keep; none: layers only"
    )
    capture.add_argument(
        "--steps", type=int, metavar="N", help="the first N steps only, from 1 (default: all)"
    )
    capture.add_argument("--plant", metavar="NAME[@LAYER]", help="plant a fault on purpose")

    replay = commands.add_parser(
        "replay", help="run a bundle's steps on other backends and judge both"
    )
    replay.set_defaults(run_numerics=run_replay)
    replay.add_argument("bundle", metavar="BUNDLE", help="a folder that `capture` wrote")
    replay.add_argument(
        "--on",
        action="append",
        metavar="TARGET",
        help="BACKEND:DEVICE[:KEY=VALUE,...], repeatable (default: torch:cpu)",
    )
    replay.add_argument(
        "--model", metavar="MODEL", help="its folder, if it is not where it was (default: there)"
    )
    replay.add_argument(
        "--plant", metavar="NAME[@LAYER]", help="plant a fault on purpose in the first target"
    )
    output_flags(replay)

    invariants = commands.add_parser(
        "invariants", help="what must not change a model's logits, on one backend"
    )
    invariants.set_defaults(run_numerics=run_invariants)
    model_flags(invariants)
    invariants.add_argument(
        "--on", default="jax:cpu", metavar="TARGET", help="BACKEND:DEVICE[:KEY=VALUE,...]"
    )
    invariants.add_argument(
        "--mode", default="S,P", metavar="S,P", help="S: float32, P: the run dtype"
    )
    invariants.add_argument(
        "--relation",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="these relations only (default: those that apply)",
    )
    invariants.add_argument(
        "--break",
        dest="breaks",
        action="append",
        default=[],
        metavar="NAME",
        help="break this relation on purpose",
    )
    invariants.add_argument("--plant", metavar="NAME", help="plant a fault of an op on purpose")
    output_flags(invariants)

    bisect = commands.add_parser(
        "bisect", help="the smallest part of a backend that makes it fail: layer, op, why"
    )
    bisect.set_defaults(run_numerics=run_bisect)
    model_flags(bisect)
    bisect.add_argument(
        "--over",
        choices=("layers", "knobs"),
        default="layers",
        help="knobs: compilation, graphs, implementations",
    )
    bisect.add_argument(
        "--bundle", metavar="DIR", help="the steps of a bundle of this model, instead of prompts"
    )
    bisect.add_argument(
        "--on",
        default="jax:cpu",
        metavar="TARGET",
        help="the suspect: BACKEND:DEVICE[:KEY=VALUE,...]",
    )
    bisect.add_argument("--mode", default="S,P", metavar="S,P", help="S: float32, P: the run dtype")
    bisect.add_argument(
        "--steps", type=int, default=3, metavar="N", help="the first N steps, from 1"
    )
    bisect.add_argument("--plant", metavar="NAME[@LAYER]", help="plant a fault on purpose")
    output_flags(bisect)


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


def output_flags(parser: argparse.ArgumentParser) -> None:
    """Where the results go."""
    parser.add_argument(
        "--json", metavar="FILE", help="write everything that was found; - is standard output"
    )
    parser.add_argument("--junit", metavar="FILE", help="write the verdicts as JUnit XML")


def subject_of(arguments: argparse.Namespace, dtype: str | None = None) -> Any:
    """The subject that `model_flags` name. Raises ConfigError, ModelError."""
    from .sides.subject import open_subject

    if arguments.tokens < 8:
        raise ConfigError(f"tokens: got {arguments.tokens}, allowed is at least 8")
    if arguments.max_model_len < 64:
        raise ConfigError(f"max_model_len: got {arguments.max_model_len}, allowed is at least 64")
    return open_subject(
        arguments.model,
        dtype=dtype or arguments.dtype,
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


def _fault(text: str | None, subject: Any) -> Any:
    from .faults.planting import plant

    return plant(text, subject.model) if text else None


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


def run_capture(arguments: argparse.Namespace) -> int:
    """`twinfer numerics capture`."""
    from .bundles import bundle
    from .bundles.capturing import capture_model
    from .sides.steps import make_steps
    from .sides.subject import parse_target

    subject, target = subject_of(arguments), parse_target(arguments.on)
    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigError(f"steps: got {arguments.steps}, allowed is at least 1")
    steps = make_steps(subject, prompts_of(arguments, subject))[: arguments.steps]
    bundle.check_free(arguments.out)
    patterns = [] if arguments.taps == "none" else arguments.taps.split(",")
    made = capture_model(
        subject, target, steps, taps=patterns, fault=_fault(arguments.plant, subject), progress=tell
    )  # fmt: skip
    folder = bundle.write(made, arguments.out)
    size = sum(path.stat().st_size for path in folder.iterdir())
    taps = sum(len(taps) for recorded in made.steps for taps in recorded.taps.values())
    print(
        f"{folder}: {len(steps)} steps, {taps} op calls of {subject.name} in {subject.dtype}, "
        f"{size / 1e6:.1f} MB"
    )
    print(
        f"twinfer numerics replay {folder} --on {'torch' if target.backend == 'jax' else 'jax'}:cpu"
    )
    return 0


def run_replay(arguments: argparse.Namespace) -> int:
    """`twinfer numerics replay`."""
    from .bundles.bundle import read
    from .questions.replay import replay
    from .showing.junit import junit
    from .showing.terminal import render
    from .sides.subject import parse_target

    targets = [parse_target(text) for text in arguments.on or ["torch:cpu"]]
    bundle = read(arguments.bundle, arguments.model)
    fault = _fault(arguments.plant, bundle.subject)
    diff = replay(bundle, targets, faults={"a": fault} if fault else None, progress=tell)
    diff.environment["command"] = command(arguments)
    if arguments.json != "-":
        print(render(diff))
    write(arguments.json, diff.dumps)
    write(arguments.junit, lambda: junit(diff))
    return diff.exit_code


def run_invariants(arguments: argparse.Namespace) -> int:
    """`twinfer numerics invariants`."""
    from .questions.invariants import check_invariants, render
    from .showing.junit import suite_xml
    from .sides.subject import parse_target

    target = parse_target(arguments.on)
    if target.backend == "jax":
        _two_devices()
    subject = subject_of(arguments)
    report = check_invariants(
        subject,
        target,
        prompts_of(arguments, subject),
        names=arguments.relation,
        modes=parse_modes(arguments.mode, ("S", "P")),
        fault=_fault(arguments.plant, subject),
        breaks=arguments.breaks,
        progress=tell,
    )
    report.environment["command"] = command(arguments)
    if arguments.json != "-":
        print(render(report))
    write(arguments.json, report.dumps)
    write(arguments.junit, lambda: suite_xml(report.cases(), report.missing))
    return report.exit_code


def run_bisect(arguments: argparse.Namespace) -> int:
    """`twinfer numerics bisect`."""
    from .bundles.bundle import read
    from .questions.bisect import bisect_model
    from .questions.bisect_knobs import bisect_knobs
    from .sides.steps import make_steps
    from .sides.subject import parse_target

    target, modes = parse_target(arguments.on), parse_modes(arguments.mode, ("S", "P"))
    if arguments.steps < 1:
        raise ConfigError(f"steps: got {arguments.steps}, allowed is at least 1")
    if arguments.over == "knobs":
        subject = subject_of(arguments)
        report = bisect_knobs(
            subject, target, prompts_of(arguments, subject), modes=modes,
            fault=_fault(arguments.plant, subject), progress=tell,
        )  # fmt: skip
        return _finish_bisect(report, arguments)
    if arguments.bundle:
        bundle = read(arguments.bundle, arguments.model)
        subject, steps, start = bundle.subject, bundle.inputs, bundle.start
    else:
        subject = subject_of(arguments)
        steps, start = make_steps(subject, prompts_of(arguments, subject)), None
    report = bisect_model(
        subject, target, steps[: arguments.steps], modes=modes, start=start,
        fault=_fault(arguments.plant, subject), planted=arguments.plant or "", progress=tell,
    )  # fmt: skip
    return _finish_bisect(report, arguments)


def _finish_bisect(report: Any, arguments: argparse.Namespace) -> int:
    from .questions.bisect import render
    from .showing.junit import suite_xml

    report.environment["command"] = command(arguments)
    if arguments.json != "-":
        print(render(report))
    write(arguments.json, report.dumps)
    cases = {(report.target, culprit.name): [culprit.what] for culprit in report.culprits}
    write(arguments.junit, lambda: suite_xml(cases or {(report.target, "bisect"): []}, []))
    return report.exit_code


def _two_devices() -> None:
    """Let JAX see two CPU devices, for two shards: possible until it has looked for devices."""
    import jax

    with suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", 2)


DEFAULTS = {
    "dtype": "auto",
    "load_format": "auto",
    "seed": 0,
    "tokens": 64,
    "positions": 8,
    "max_model_len": 256,
    "definition": "auto",
    "mode": "S,P",
    "seconds": 900.0,
    "rollout_tokens": 10_000,
    "server_logits": "auto",
}
ASKED = (
    "model",
    "scheme",
    "a",
    "b",
    "on",
    "mode",
    "dtype",
    "load_format",
    "seed",
    "tokens",
    "layers",
    "prompts",
    "positions",
    "max_model_len",
    "definition",
    "seconds",
    "rollout_tokens",
    "text",
    "server_logits",
    "plant",
    "relation",
    "breaks",
    "over",
    "bundle",
    "steps",
    "op",
    "backend",
    "fault",
    "seeds",
)


def command(arguments: argparse.Namespace) -> str:
    """The command that asks for the same again; what only says where results go is left out."""
    import shlex

    words = ["twinfer", "numerics", arguments.numerics_command, *getattr(arguments, "items", [])]
    if words[2] == "replay":
        words.append(arguments.bundle)
    for name in ASKED:
        value = getattr(arguments, name, None)
        if value in (None, []) or (name == "bundle" and words[2] == "replay"):
            continue
        # Of single ops and of the self-test all modes are the default, so theirs is written out.
        if DEFAULTS.get(name) == value and (name != "mode" or words[2] not in ("ops", "selftest")):
            continue
        name = "break" if name == "breaks" else name
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name.replace('_', '-')}", str(one)]
    return shlex.join(words)
