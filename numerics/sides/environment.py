"""What a comparison ran on: versions, devices, plans. Two results differ for a reason that
stands here, or for none.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ...shared.config import DeviceInfo
from ...shared.step import StepInput
from .side import Side
from .steps import real_tokens
from .subject import Subject

PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "torch",
    "torch_xla",
    "triton",
    "numpy",
    "ml_dtypes",
    "transformers",
)


def versions() -> dict[str, str]:
    """Versions of what computes, as installed."""
    from ... import __version__

    found = {"twinfer": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def steps_hash(steps: Sequence[StepInput]) -> str:
    """Hex digest of the steps' inputs."""
    digest = hashlib.sha256()
    for step in steps:
        digest.update(str(step.descriptor).encode())
        digest.update(step.batch.tobytes())
    return digest.hexdigest()[:16]


def describe(
    subject: Subject, sides: Mapping[str, Side], steps: Sequence[StepInput]
) -> dict[str, Any]:
    """The environment of a comparison, fit for JSON."""
    return {
        "model": subject.name,
        "model_hash": subject.identity,
        "architecture": subject.model.architecture,
        "layers": subject.model.num_layers,
        "dtype": subject.dtype,
        "load_format": subject.load_format,
        "seed": subject.seed,
        "steps": len(steps),
        "steps_hash": steps_hash(steps),
        "tokens": sum(real_tokens(step) for step in steps),
        "machine": platform.machine(),
        "versions": versions(),
        "sides": {name: describe_side(s.target, s.device, s.plans) for name, s in sides.items()},
    }


def describe_side(target: Any, device: DeviceInfo, plans: Any) -> dict[str, Any]:
    """What ran where, fit for JSON."""
    return {
        "target": str(target),
        "device": f"{device.platform} {device.name}",
        "plan": plans.hash,
        "implementations": {
            title: {op: choice.provider for op, choice in plan.choices.items()}
            for title, plan in plans.titled()
        },
        "layer_plans": plans.layer_titles(),
    }
