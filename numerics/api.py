"""What Python programs and tests call: whole runs by name, without the steps in between."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .bundles import bundle
from .bundles.bundle import Bundle
from .errors import write_text
from .faults.catalogue import plant_by_side
from .judging.diff import Diff
from .judging.gates import MODES, Mode
from .questions.model import compare_model
from .showing.report import page
from .sides.steps import default_prompts, encode, make_steps
from .sides.subject import Subject, open_subject, parse_target

Prompts = Sequence[str | Sequence[int] | np.ndarray] | None


def capture(
    model: str, target: str = "jax:cpu", *, prompts: Prompts = None, taps: Sequence[str] = ("*",),
    out: str | Path | None = None, **options: Any,
) -> Bundle:  # fmt: skip
    """Run a model on `target` and keep what each layer and each op call that `taps` match gave;
    written to `out`.

    `options` are those of `open_subject`: dtype, load_format, seed, tokens. `prompts` are texts or
    token ids.
    """
    from .bundles.capturing import capture_model

    if out is not None:
        bundle.check_free(str(out))
    subject = open_subject(model, **options)
    made = capture_model(
        subject, parse_target(target), make_steps(subject, _ids(subject, prompts)), taps=taps
    )
    if out is not None:
        bundle.write(made, str(out))
    return made


def compare_targets(
    model: str, a: str = "jax:cpu", b: str = "torch:cpu", *, modes: Sequence[Mode] = MODES,
    prompts: Prompts = None,
    layers: Sequence[int] | None = None, plant: Sequence[str] = (), **options: Any,
) -> Diff:  # fmt: skip
    """`twinfer numerics model`: two targets on the same steps, layer by layer and op by op.

    `options` are those of `open_subject`; `plant` names faults as `--plant` does.
    """
    subject = open_subject(model, **options)
    return compare_model(
        subject, [parse_target(a), parse_target(b)], make_steps(subject, _ids(subject, prompts)),
        modes=modes,
        layers=layers, faults=plant_by_side(list(plant), subject.model),
    )  # fmt: skip


def write_report(diff: Diff, path: str | Path) -> Path:
    """Write a comparison as one HTML file. Raises InfrastructureError."""
    write_text(path, page(json.loads(diff.dumps())))
    return Path(path)


def _ids(subject: Subject, prompts: Prompts) -> list[np.ndarray]:
    if prompts is None:
        return default_prompts(subject, subject.seed)
    return [np.asarray(encode(p, subject) if isinstance(p, str) else p, np.int32) for p in prompts]
