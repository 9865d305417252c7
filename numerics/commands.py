"""What the commands of `twinfer numerics` do: a function each, of the command's name."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..shared import option_text
from ..shared.errors import ConfigError
from ..shared.models.config import ModelConfig
from ..shared.worker import backend_module
from .bundles import bundle
from .bundles.capturing import capture_model
from .errors import write_text
from .faults.catalogue import CATALOGUE, plant, plant_by_side
from .judging.gates import parse_modes
from .judging.record import Report
from .questions import bisect as bisecting
from .questions import check as checking
from .questions import invariants as relations
from .questions import logits as ends
from .questions import ops_check, saved
from .questions import quantization as quantizing
from .questions import replay as replaying
from .questions import rollout as rolling_out
from .questions import selftest as testing
from .questions import served as serving
from .questions.bisect_knobs import bisect_knobs
from .questions.model import compare_model
from .showing.junit import suite_xml
from .showing.report import page, read_record
from .showing.terminal import render
from .sides.fault import Fault
from .sides.http_server import NEW_TOKENS
from .sides.steps import LENGTHS, default_prompts, make_steps, read_prompts, read_text
from .sides.steps import NEW_TOKENS as OUR_NEW_TOKENS
from .sides.subject import Subject, Target, open_subject, parse_target

Arguments = argparse.Namespace
AnyReport = TypeVar("AnyReport", bound=Report)
MOST_TOKENS = 2**16
"""Of a step: references hold all that it computes in float64."""
PLACES = "json", "junit", "out"
"""Flags that only say where results go."""
SIDES = "a", "b", "on", "backend"
"""Flags that are written out although they are the defaults: a reader asks for them first."""


# --- the questions
# --------------------------------------------------------------------------------------------------


def model(arguments: Arguments) -> int:
    modes, targets = parse_modes(arguments.mode), _pair(arguments)
    subject = _subject(arguments)
    prompts = _prompts(arguments, subject)
    layers = None
    if arguments.layers is not None:
        layers = parse_layers(arguments.layers, subject.model.num_layers)
    faults = plant_by_side(arguments.plant, subject.model)
    diff = compare_model(
        subject, targets, make_steps(subject, prompts), modes=modes, layers=layers, faults=faults,
        progress=_tell,
    )  # fmt: skip
    return _finish(diff, arguments, render)


def ops(arguments: Arguments) -> int:
    targets, faults = _pair(arguments), plant_by_side(arguments.plant)
    modes = parse_modes(arguments.mode)
    report = ops_check.check_ops(targets, arguments.op, faults, modes, progress=_tell)
    return _finish(report, arguments, ops_check.render)


def capture(arguments: Arguments) -> int:
    subject, target = _subject(arguments), parse_target(arguments.on)
    if arguments.steps is not None:
        _check_positive("steps", arguments.steps)
    steps = make_steps(subject, _prompts(arguments, subject))[: arguments.steps]
    bundle.check_free(arguments.out)
    patterns = [] if arguments.taps == "none" else arguments.taps.split(",")
    fault = _fault(arguments, subject.model)
    made = capture_model(subject, target, steps, taps=patterns, fault=fault, progress=_tell)
    taps = sum(len(taps) for recorded in made.steps for taps in recorded.taps.values())
    if patterns and not taps:
        raise ConfigError(
            f"taps: got {arguments.taps!r}, which is the name of no op call; allowed are patterns "
            "such as paged_attention,linear* and none"
        )
    folder = bundle.write(made, arguments.out)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(
        f"{folder}: {len(steps)} steps, {taps} op calls of {subject.name} in {subject.dtype}, "
        f"{size / 1e6:.1f} MB"
    )
    other = "torch" if target.backend == "jax" else "jax"
    print(f"twinfer numerics replay {folder} --on {other}:cpu")
    return 0


def replay(arguments: Arguments) -> int:
    targets = _targets(arguments.on, "torch:cpu")
    kept = bundle.read(arguments.bundle, arguments.model)
    fault = _fault(arguments, kept.subject.model)
    faults = {"a": fault} if fault else None
    diff = replaying.replay(kept, targets, faults=faults, progress=_tell)
    return _finish(diff, arguments, render)


def invariants(arguments: Arguments) -> int:
    target = parse_target(arguments.on)
    if target.backend == "jax":
        _two_devices()
    subject = _subject(arguments)
    prompts = _prompts(arguments, subject)
    report = relations.check_invariants(
        subject, target, prompts, names=arguments.relation,
        modes=parse_modes(arguments.mode, ("S", "P")),
        fault=_fault(arguments, subject.model, between_steps=True), progress=_tell,
    )  # fmt: skip
    return _finish(report, arguments, relations.render)


def _two_devices() -> None:
    """Let JAX see two CPU devices, for two shards: possible until it has looked for devices."""
    import jax

    with suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", 2)


def bisect(arguments: Arguments) -> int:
    target, modes = parse_target(arguments.on), parse_modes(arguments.mode, ("S", "P"))
    _check_positive("steps", arguments.steps)
    if arguments.bundle and arguments.over == "knobs":
        raise ConfigError("bundle: --over knobs runs prompts, allowed is --over layers")
    kept = bundle.read(arguments.bundle, arguments.model) if arguments.bundle else None
    subject = _subject(arguments) if kept is None else kept.subject
    prompts = _prompts(arguments, subject) if kept is None else []
    fault = _fault(arguments, subject.model)
    if arguments.over == "knobs":
        report = bisect_knobs(subject, target, prompts, modes=modes, fault=fault, progress=_tell)
        return _finish(report, arguments, bisecting.render)
    steps = make_steps(subject, prompts) if kept is None else kept.inputs
    report = bisecting.bisect_model(
        subject, target, steps[: arguments.steps], modes=modes,
        start=None if kept is None else kept.start, fault=fault, planted=arguments.plant or "",
        progress=_tell,
    )  # fmt: skip
    return _finish(report, arguments, bisecting.render)


def served(arguments: Arguments) -> int:
    targets = _targets(arguments.on, "jax:cpu", "torch:cpu")
    subject = _subject(arguments)
    diff = serving.check_served(
        subject, targets, modes=parse_modes(arguments.mode, ("S", "P")),
        prompts=_named_prompts(arguments, subject), definition=arguments.definition,
        progress=_tell,
    )  # fmt: skip
    return _finish(diff, arguments, render)


def check(arguments: Arguments) -> int:
    targets = _pair(arguments)
    if str(targets[0]) == str(targets[1]):
        targets = targets[:1]  # a backend that is both sides is asked once
    subject = _subject(arguments)
    report = checking.check(
        subject, targets, modes=parse_modes(arguments.mode, ("S", "P")),
        prompts=_named_prompts(arguments, subject), definition=arguments.definition,
        seconds=arguments.seconds, progress=_tell,
    )  # fmt: skip
    return _finish(report, arguments, checking.render)


def quantization(arguments: Arguments) -> int:
    """It judges nothing, so there is no JUnit."""
    subject = _subject(arguments)
    prompts = _prompts(arguments, subject)
    report = quantizing.quantization_cost(subject, arguments.scheme, prompts, _tell)
    return _finish(report, arguments, quantizing.render)


def rollout(arguments: Arguments) -> int:
    subject = _subject(arguments)
    targets = _pair(arguments)
    text = read_text(arguments.text, subject) if arguments.text else None
    report = rolling_out.check_rollout(
        subject, targets, tokens=arguments.rollout_tokens, text=text, progress=_tell
    )
    return _finish(report, arguments, rolling_out.render)


def logits(arguments: Arguments) -> int:
    _check_positive("positions", arguments.positions)
    sides = [ends.parse_side(arguments.a), ends.parse_side(arguments.b)]
    if isinstance(sides[0], str):
        raise ConfigError(f"a: got {arguments.a!r}, must be a backend; name {arguments.a} with --b")
    _find_devices(sides)
    subject = _subject(arguments)
    faults = plant_by_side(arguments.plant, subject.model)
    if arguments.prompts and ends.is_dump(sides[1]):
        raise ConfigError(f"prompts: got {arguments.prompts}, a dump brings its own: leave it out")
    for name in ("positions", "server_logits"):
        value = getattr(arguments, name)
        asked = value != arguments.numerics_parser.get_default(name)
        if asked and not ends.is_server(sides[1]):
            raise ConfigError(
                f"{name}: got {value}, which is for servers, and {arguments.b} is none: leave it "
                "out"
            )
    if arguments.prompts or not ends.is_server(sides[1]):
        prompts = _prompts(arguments, subject)
    else:
        # One more, about as long as there may be: some faults show only far from the start.
        longest = max(subject.max_model_len - NEW_TOKENS - OUR_NEW_TOKENS, 1)
        prompts = default_prompts(subject, arguments.seed, (*LENGTHS, longest))
    diff = ends.compare_ends(
        subject, sides, prompts, positions=arguments.positions,
        server_logits=arguments.server_logits, faults=faults, progress=_tell,
    )  # fmt: skip
    return _finish(diff, arguments, render)


def compare(arguments: Arguments) -> int:
    if len(arguments.items) < 2:
        raise ConfigError("compare: got one result, needs two or more")
    diff = saved.compare(*arguments.items, model=arguments.model, progress=_tell)
    return _finish(diff, arguments, render)


def report(arguments: Arguments) -> int:
    """A page. Its exit code is 0 whatever the verdict is: the file was written."""
    record = read_record(arguments.result)
    out = arguments.page
    if out is None:
        out = str(Path(arguments.result).with_suffix(".html"))
        try:
            option_text.output_file(out)
        except ValueError as error:
            raise ConfigError(f"{error}: name the page with --out") from None
    text = page(record)
    _write(out, lambda: text)
    if out != "-":
        print(f"{out}: {len(text.encode()) / 1e3:.0f} kB")
    return 0


def selftest(arguments: Arguments) -> int:
    if arguments.list:
        print("\n".join(f"{f.name:28} {f.place:6} {f.what}" for f in CATALOGUE.values()))
        return 0
    targets = _targets(arguments.backend, "jax:cpu", "torch:cpu")
    report = testing.selftest(
        targets, names=arguments.fault, modes=parse_modes(arguments.mode, testing.MODES),
        seeds=arguments.seeds, progress=_tell,
    )  # fmt: skip
    return _finish(report, arguments, testing.render)


# --- what flags name
# --------------------------------------------------------------------------------------------------


def _subject(arguments: Arguments) -> Subject:
    if not 8 <= arguments.tokens <= MOST_TOKENS:
        raise ConfigError(f"tokens: got {arguments.tokens}, allowed is 8 to {MOST_TOKENS}")
    if not 0 <= arguments.seed < 2**64:
        raise ConfigError(f"seed: got {arguments.seed}, allowed is 0 to {2**64 - 1}")
    if arguments.max_model_len < 64:
        raise ConfigError(f"max_model_len: got {arguments.max_model_len}, allowed is at least 64")
    names = "dtype", "load_format", "seed", "tokens", "max_model_len"
    given = {name: getattr(arguments, name) for name in names}
    # Of the commands that have these flags.
    more = "quantization", "kv_cache_dtype", "kv_cache_scales"
    given |= {name: getattr(arguments, name) for name in more if hasattr(arguments, name)}
    return open_subject(arguments.model, **given)


def _pair(arguments: Arguments) -> list[Target]:
    return _targets([arguments.a, arguments.b])


def _targets(texts: list[str] | None, *defaults: str) -> list[Target]:
    """Targets whose backends and devices are all there: found out before the first of them works.
    Raises ConfigError, BackendUnavailable.
    """
    targets = [parse_target(text) for text in texts or defaults]
    _find_devices(targets)
    return targets


def _find_devices(sides: Iterable[Target | str]) -> None:
    for side in sides:
        if isinstance(side, Target):
            backend_module(side.backend).find_device(side.device)


def _named_prompts(arguments: Arguments, subject: Subject) -> list[np.ndarray] | None:
    return read_prompts(arguments.prompts, subject) if arguments.prompts else None


def _prompts(arguments: Arguments, subject: Subject) -> list[np.ndarray]:
    named = _named_prompts(arguments, subject)
    return default_prompts(subject, arguments.seed) if named is None else named


def _fault(arguments: Arguments, model: ModelConfig, between_steps: bool = False) -> Fault | None:
    return plant(arguments.plant, model, between_steps=between_steps) if arguments.plant else None


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}: got {value}, allowed is at least 1")


def parse_layers(text: str, count: int) -> list[int]:
    """Layers from `0-3,last`. Raises ConfigError."""
    layers: set[int] = set()
    for part in text.split(","):
        first, sign, last = (word.strip() for word in part.partition("-"))
        begin, end = (_layer(word, count) for word in (first, last or first))
        if not 0 <= begin <= end < count or (sign and not last):
            raise ConfigError(f"layers: got {part!r}, allowed is such as 0-3,last below {count}")
        layers.update(range(begin, end + 1))
    return sorted(layers)


def _layer(word: str, count: int) -> int:
    """The layer that `last` or a number means; -1 for any other word."""
    if word == "last":
        return count - 1
    return int(word) if word.isdecimal() else -1


# --- how a command ends
# --------------------------------------------------------------------------------------------------


def _tell(text: str) -> None:
    """Progress, beside the results."""
    print(text, file=sys.stderr)


def _write(path: str | None, text: Callable[[], str]) -> None:
    """Write what `text()` gives to a file, - is standard output. Raises InfrastructureError."""
    if path == "-":
        print(text())
    elif path:
        write_text(path, text())


def command(arguments: Arguments) -> str:
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
            words += [*action.option_strings[-1:], option_text.written(one)]
    return shlex.join(words)


def _is_detail(action: Any) -> bool:
    """Whether a flag comes after what is run, and where."""
    return bool(action.option_strings) and action.dest not in ("model", *SIDES)


def _finish(report: AnyReport, arguments: Arguments, render: Callable[[AnyReport], str]) -> int:
    """Show a report, write what was asked for, and give the exit code."""
    report.environment["command"] = command(arguments)
    if arguments.json != "-":
        print(render(report))
    _write(arguments.json, report.dumps)
    junit = getattr(arguments, "junit", None)  # what judges nothing has no such flag
    _write(junit, lambda: suite_xml(report))
    return report.exit_code
