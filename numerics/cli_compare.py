"""The commands of `twinfer numerics` about ends and results: `served`, `logits`, `compare`,
`report`.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..shared.errors import ConfigError
from .cli_flags import (
    add_command,
    command,
    faults_flag,
    finish,
    json_flag,
    mode_flag,
    model_flags,
    output_flags,
    prompts_of,
    subject_of,
    target_flag,
    targets_flag,
    tell,
    write,
)


def add_parsers(commands: Any) -> None:
    """Add the commands to the sub-commands of `twinfer numerics`."""
    served = add_command(
        commands,
        "served",
        run_served,
        "what engines serve, tokens and log-probabilities, against the reference",
    )
    model_flags(served)
    targets_flag(served, "--on", "jax:cpu and torch:cpu")
    mode_flag(served)
    _definition(served)
    output_flags(served)

    check = add_command(
        commands,
        "check",
        run_check,
        "two backends and a model in every way, one verdict, one first cause",
    )
    model_flags(check)
    target_flag(check, "--a", "jax:cpu")
    target_flag(check, "--b", "torch:cpu")
    mode_flag(check)
    _definition(check)
    check.add_argument(
        "--seconds",
        type=float,
        default=900.0,
        metavar="N",
        help="no part is begun later; what was not begun is not compared (exit code 3)",
    )
    output_flags(check)

    quantization = add_command(
        commands,
        "quantization",
        run_quantization,
        "what a scheme of quantised weights costs, by layer and in logits",
    )
    model_flags(quantization, "of the checkpoint; the comparison is in float32")
    quantization.add_argument(
        "--scheme", required=True, metavar="NAME", help="as of --quantization of an engine"
    )
    json_flag(quantization)

    rollout = add_command(
        commands,
        "rollout",
        run_rollout,
        "one side draws, the other computes: importance ratios, drift, perplexity",
    )
    model_flags(rollout)
    target_flag(rollout, "--a", "torch:cpu", "who draws: ")
    target_flag(rollout, "--b", "torch:cpu", "who computes: ")
    rollout.add_argument(
        "--rollout-tokens", type=int, default=10_000, metavar="N", help="tokens drawn, from 1"
    )
    rollout.add_argument("--text", metavar="FILE", help="a text, for the perplexity of both sides")
    output_flags(rollout)

    logits = add_command(
        commands,
        "logits",
        run_logits,
        "the ends of two runs: against a backend, transformers, or a server",
    )
    model_flags(logits)
    target_flag(logits, "--a", "jax:cpu")
    logits.add_argument(
        "--b",
        default="torch:cpu",
        metavar="SIDE",
        help="the same, transformers, http://HOST:PORT of a server, or dump:FOLDER",
    )
    logits.add_argument(
        "--positions",
        type=int,
        default=8,
        metavar="N",
        help="places of a prompt to ask a server at one by one, from 1",
    )
    logits.add_argument(
        "--server-logits",
        choices=("auto", "float32"),
        default="auto",
        help="float32: a server whose logits are rounded to less fails; auto: it is noted",
    )
    faults_flag(logits)
    output_flags(logits)

    compare = add_command(
        commands, "compare", run_compare, "results or bundles of several runs, side by side"
    )
    compare.add_argument(
        "items", nargs="+", metavar="RESULT", help="a file of --json, or a folder of capture"
    )
    compare.add_argument(
        "--model",
        metavar="MODEL",
        help="its folder, if it is not where a bundle was made (default: there)",
    )
    output_flags(compare)

    report = add_command(commands, "report", run_report, "a result as one HTML file")
    report.add_argument("result", metavar="RESULT", help="a file of --json")
    report.add_argument("--out", metavar="FILE", help="the HTML file (default: RESULT with .html)")


def _definition(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--definition",
        choices=("auto", "transformers", "off"),
        default="auto",
        help="who is asked whether the reference is right; auto: transformers, if installed",
    )


def run_check(arguments: argparse.Namespace) -> int:
    """`twinfer numerics check`."""
    from .judging.gates import parse_modes
    from .questions.check import check, render
    from .sides.steps import read_prompts
    from .sides.subject import parse_target

    targets = [parse_target(arguments.a), parse_target(arguments.b)]
    subject = subject_of(arguments)
    report = check(
        subject,
        # A backend that is both sides is asked once.
        targets if str(targets[0]) != str(targets[1]) else targets[:1],
        modes=parse_modes(arguments.mode, ("S", "P")),
        prompts=read_prompts(arguments.prompts, subject) if arguments.prompts else None,
        definition=arguments.definition,
        seconds=arguments.seconds,
        progress=tell,
    )
    return finish(report, arguments, render)


def run_rollout(arguments: argparse.Namespace) -> int:
    """`twinfer numerics rollout`."""
    from .questions.rollout import check_rollout, render
    from .sides.steps import read_text
    from .sides.subject import parse_target

    subject = subject_of(arguments)
    report = check_rollout(
        subject,
        [parse_target(arguments.a), parse_target(arguments.b)],
        tokens=arguments.rollout_tokens,
        text=read_text(arguments.text, subject) if arguments.text else None,
        progress=tell,
    )
    return finish(report, arguments, render)


def run_served(arguments: argparse.Namespace) -> int:
    """`twinfer numerics served`."""
    from .judging.gates import parse_modes
    from .questions.served import check_served
    from .showing.terminal import render
    from .sides.steps import read_prompts
    from .sides.subject import parse_target

    targets = [parse_target(text) for text in arguments.on or ["jax:cpu", "torch:cpu"]]
    subject = subject_of(arguments)
    diff = check_served(
        subject,
        targets,
        modes=parse_modes(arguments.mode, ("S", "P")),
        prompts=read_prompts(arguments.prompts, subject) if arguments.prompts else None,
        definition=arguments.definition,
        progress=tell,
    )
    return finish(diff, arguments, render)


def run_logits(arguments: argparse.Namespace) -> int:
    """`twinfer numerics logits`."""
    from .faults.planting import plant_by_side
    from .questions.logits import compare_ends, parse_side
    from .showing.terminal import render

    if arguments.positions < 1:
        raise ConfigError(f"positions: got {arguments.positions}, allowed is at least 1")
    sides = [parse_side(arguments.a), parse_side(arguments.b)]
    if isinstance(sides[0], str):
        raise ConfigError(f"a: got {arguments.a!r}, must be a backend; name {arguments.a} with --b")
    subject = subject_of(arguments)
    faults = plant_by_side(arguments.plant, subject.model)
    diff = compare_ends(
        subject,
        sides,
        _end_prompts(arguments, subject, sides),
        positions=arguments.positions,
        server_logits=arguments.server_logits,
        faults=faults,
        progress=tell,
    )
    return finish(diff, arguments, render)


def _end_prompts(arguments: argparse.Namespace, subject: Any, sides: Any) -> Any:
    """The prompts; against a server one more, about as long as there may be: some faults show
    only far from the start.
    """
    from .questions.logits import is_server
    from .sides.http_server import NEW_TOKENS
    from .sides.steps import LENGTHS, default_prompts
    from .sides.steps import NEW_TOKENS as OUR_NEW_TOKENS

    if arguments.prompts or not is_server(sides[1]):
        return prompts_of(arguments, subject)
    longest = max(subject.max_model_len - NEW_TOKENS - OUR_NEW_TOKENS, 1)
    return default_prompts(subject, arguments.seed, (*LENGTHS, longest))


def run_compare(arguments: argparse.Namespace) -> int:
    """`twinfer numerics compare`."""
    from .questions.saved import compare
    from .showing.terminal import render

    if len(arguments.items) < 2:
        raise ConfigError("compare: got one result, needs two or more")
    diff = compare(*arguments.items, model=arguments.model, progress=tell)
    return finish(diff, arguments, render)


def run_report(arguments: argparse.Namespace) -> int:
    """`twinfer numerics report`. Its exit code is 0 whatever the verdict is: the file was
    written.
    """
    from pathlib import Path

    from .showing.report import page, read_record

    text = page(read_record(arguments.result))
    out = arguments.out or str(Path(arguments.result).with_suffix(".html"))
    write(out, lambda: text)
    if out != "-":
        print(f"{out}: {len(text.encode()) / 1e3:.0f} kB")
    return 0


def run_quantization(arguments: argparse.Namespace) -> int:
    """`twinfer numerics quantization`."""
    from .questions.quantization import quantization_cost, render

    subject = subject_of(arguments)
    prompts = prompts_of(arguments, subject)
    report = quantization_cost(subject, arguments.scheme, prompts, tell)
    report.environment["command"] = command(arguments)
    if arguments.json != "-":
        print(render(report))
    write(arguments.json, report.dumps)
    return 0
