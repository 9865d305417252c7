"""The commands of `twinfer numerics` that run a model on one backend: `capture`, `replay`,
`invariants`, `bisect`.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import Any

from ..shared.errors import ConfigError
from .cli_flags import (
    add_command,
    fault_flag,
    fault_of,
    finish,
    mode_flag,
    model_flags,
    output_flags,
    prompts_of,
    subject_of,
    target_flag,
    targets_flag,
    tell,
)
from .judging.gates import parse_modes


def add_parsers(commands: Any) -> None:
    """Add the commands to the sub-commands of `twinfer numerics`."""
    capture = add_command(
        commands,
        "capture",
        run_capture,
        "run a model on one backend and keep steps and taps as a bundle",
    )
    model_flags(capture)
    target_flag(capture, "--on", "jax:cpu")
    capture.add_argument("--out", required=True, metavar="DIR", help="a new folder for the bundle")
    capture.add_argument(
        "--taps", default="*", metavar="PATTERN,...", help="op calls to keep; none: layers only"
    )
    capture.add_argument(
        "--steps", type=int, metavar="N", help="the first N steps only, from 1 (default: all)"
    )
    fault_flag(capture)

    replay = add_command(
        commands, "replay", run_replay, "run a bundle's steps on other backends and judge both"
    )
    replay.add_argument("bundle", metavar="BUNDLE", help="a folder that `capture` wrote")
    targets_flag(replay, "--on", "torch:cpu")
    replay.add_argument(
        "--model", metavar="MODEL", help="its folder, if it is not where it was (default: there)"
    )
    fault_flag(replay, " in the first target")
    output_flags(replay)

    invariants = add_command(
        commands,
        "invariants",
        run_invariants,
        "what must not change a model's logits, on one backend",
    )
    model_flags(invariants)
    target_flag(invariants, "--on", "jax:cpu")
    mode_flag(invariants)
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
    fault_flag(invariants)
    output_flags(invariants)

    bisect = add_command(
        commands,
        "bisect",
        run_bisect,
        "the smallest part of a backend that makes it fail: layer, op, why",
    )
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
    target_flag(bisect, "--on", "jax:cpu", "the suspect: ")
    mode_flag(bisect)
    bisect.add_argument(
        "--steps", type=int, default=3, metavar="N", help="the first N steps, from 1"
    )
    fault_flag(bisect)
    output_flags(bisect)


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
        subject, target, steps, taps=patterns, fault=fault_of(arguments, subject.model),
        progress=tell,
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
    from .showing.terminal import render
    from .sides.subject import parse_target

    targets = [parse_target(text) for text in arguments.on or ["torch:cpu"]]
    bundle = read(arguments.bundle, arguments.model)
    fault = fault_of(arguments, bundle.subject.model)
    diff = replay(bundle, targets, faults={"a": fault} if fault else None, progress=tell)
    return finish(diff, arguments, render)


def run_invariants(arguments: argparse.Namespace) -> int:
    """`twinfer numerics invariants`."""
    from .questions.invariants import check_invariants, render
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
        fault=fault_of(arguments, subject.model),
        breaks=arguments.breaks,
        progress=tell,
    )
    return finish(report, arguments, render)


def run_bisect(arguments: argparse.Namespace) -> int:
    """`twinfer numerics bisect`."""
    from .bundles.bundle import read
    from .questions.bisect import bisect_model, render
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
            fault=fault_of(arguments, subject.model), progress=tell,
        )  # fmt: skip
        return finish(report, arguments, render)
    if arguments.bundle:
        bundle = read(arguments.bundle, arguments.model)
        subject, steps, start = bundle.subject, bundle.inputs, bundle.start
    else:
        subject = subject_of(arguments)
        steps, start = make_steps(subject, prompts_of(arguments, subject)), None
    report = bisect_model(
        subject, target, steps[: arguments.steps], modes=modes, start=start,
        fault=fault_of(arguments, subject.model), planted=arguments.plant or "", progress=tell,
    )  # fmt: skip
    return finish(report, arguments, render)


def _two_devices() -> None:
    """Let JAX see two CPU devices, for two shards: possible until it has looked for devices."""
    import jax

    with suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", 2)
