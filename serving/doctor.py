"""What this machine can run, and what is in the way: `twinfer doctor` judges it, `twinfer
collect-env` tells it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from ..shared.backends import find_backend, has_nvidia, has_tpu
from ..shared.cache_folder import default_root
from ..shared.config import BACKENDS, host_memory
from ..shared.errors import TwinferError
from ..shared.models import decoder
from ..shared.models.config_json import load_config
from ..shared.models.locate import model_folder
from ..shared.models.table import parameter_count
from ..shared.worker import backend_module, is_installed

PACKAGE = "twinfer"
FRAMEWORKS = ("torch", "triton", "torch_xla", "jax", "jaxlib", "libtpu")
"""What runs depends on, with what frameworks bring."""
NO_EXTRAS = (*BACKENDS, "tpu", "cuda", "dev")
"""Extras that are no more than a backend, which is looked at by itself; and that of who works on
this package.
"""
VARIABLES = ("TWINFER_", "JAX_", "XLA_", "TPU_", "LIBTPU_", "CUDA_", "NVIDIA_", "TORCH", "TRITON_",
             "OMP_", "XDG_CACHE_HOME")  # fmt: skip
"""How the names of environment variables begin that change what runs."""
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
LEAST_DISK = 2 << 30
"""Bytes that compiled code of a large model may need."""

Verdict = Literal["ok", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `bad`: what the user wants cannot work so."""

    name: str
    verdict: Verdict
    text: str


def run_doctor(arguments: argparse.Namespace) -> int:
    """`twinfer doctor`. Exit code 0, or 1 if something is bad."""
    checks = list(_checks(arguments.model, arguments.port))
    if arguments.json:
        print(json.dumps([{"name": c.name, "verdict": c.verdict, "text": c.text} for c in checks]))
    else:
        width = max(len(check.name) for check in checks)
        styles = {"ok": "green", "note": "yellow", "bad": "red"}
        console = Console(highlight=False, soft_wrap=True)
        for check in checks:
            console.print(f"{check.verdict:<5}", style=styles[check.verdict], end="")
            console.print(f"{check.name:<{width}}  {check.text}", markup=False)
    return 1 if any(check.verdict == "bad" for check in checks) else 0


def run_collect_env(arguments: argparse.Namespace) -> int:
    """`twinfer collect-env`: one JSON object, for a report of an issue."""
    print(json.dumps(environment(), indent=1))
    return 0


def environment() -> dict[str, Any]:
    """Versions, machine, devices, and variables that change what runs; none that holds a secret."""
    needed = {name for names in _extras().values() for name in names}
    names = (PACKAGE, *sorted({"numpy", *_required(), *needed, *FRAMEWORKS}))
    found = {name: text for name in names if (text := _version(name)) is not None}
    named = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    hidden = {
        name: "(not shown)" if any(word in name for word in SECRET) else value
        for name, value in sorted(named.items())
    }
    return {
        "versions": {"python": platform.python_version(), **found},
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "memory": host_memory(),
        "backends": {name: _device(name)[1] for name in BACKENDS},
        "variables": hidden,
    }


def _required(extra: str = "") -> set[str]:
    """The distributions that this package requires in any case, or for an extra. Those that only
    some systems need are left out.
    """
    found: set[str] = set()
    for line in _requirements():
        requirement, _, marker = line.partition(";")
        if marker.strip().replace("'", '"') != (f'extra == "{extra}"' if extra else ""):
            continue
        named = re.match(r"([\w.-]+)(?:\[(.*?)\])?", requirement)
        if named is None:
            continue
        if named[1] != PACKAGE:
            found.add(named[1])
        elif named[2]:  # other extras of its own
            found |= {name for one in named[2].split(",") for name in _required(one.strip())}
    return found


def _requirements() -> list[str]:
    try:
        return requires(PACKAGE) or []
    except PackageNotFoundError:  # sources that nobody has installed
        return []


def _extras() -> dict[str, set[str]]:
    """What each extra of this package requires, but for those that bring a backend."""
    marked = (re.search(r"""extra == ["']([\w.-]+)["']""", line) for line in _requirements())
    names = dict.fromkeys(extra[1] for extra in marked if extra is not None)
    return {name: _required(name) for name in names if name not in NO_EXTRAS}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device(backend: str) -> tuple[bool, str]:
    """Whether a backend runs here, and on what, or why not."""
    if not is_installed(backend):
        return False, "not installed"
    try:
        device = backend_module(backend).find_device("auto")
    except TwinferError as error:
        return False, str(error)
    memory = f"{device.memory / (1 << 30):.1f} GiB"
    return True, f"{device.platform} ({device.name}), {memory}"


def _checks(model: str | None, port: int) -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.machine()}")
    found = {name: _device(name) for name in BACKENDS}
    for name, (runs, text) in found.items():
        yield Check(f"backend {name}", "ok" if runs else "note", text)
    yield from _accelerators([text for runs, text in found.values() if runs])
    memory = None
    try:
        backend, device, changes = find_backend("auto", "auto")
        memory = device.memory
        why = f": {changes[0].why}" if changes else ""
        yield Check("chosen", "ok", f"{backend} on {device.platform}{why}")
    except TwinferError as error:
        yield Check("chosen", "bad", str(error))
    if not _requirements():
        yield Check("extras", "note", f"are not known: {PACKAGE} is not installed, its sources are")
    for extra, names in _extras().items():
        missing = sorted(name for name in names if _version(name) is None)
        what = f"misses {', '.join(missing)}: pip install 'twinfer[{extra}]'"
        yield Check(f"extra {extra}", "note" if missing else "ok", what if missing else "is there")
    yield _check_cache()
    yield _check_port(port)
    if model is not None:
        yield _check_model(model, memory)


def _accelerators(running: list[str]) -> Iterator[Check]:
    """Devices that are there, and that none of the `running` ones, as `_device` has them, is."""
    for kind, there, extra in (("tpu", has_tpu(), "tpu"), ("cuda", has_nvidia(), "torch")):
        if there and not any(text.startswith(f"{kind} (") for text in running):
            text = f"is there, and no backend runs it: pip install 'twinfer[{extra}]'"
            yield Check(f"device {kind}", "bad", text)


def _check_cache() -> Check:
    folder = default_root("torch").parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("cache", "note", f"{folder} cannot be written ({error}): starts stay cold")
    text = f"{folder}, {free / (1 << 30):.1f} GiB free"
    return Check("cache", "ok" if free >= LEAST_DISK else "note", text)


def _check_port(port: int) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Check(f"port {port}", "note", f"cannot be had: {error.strerror}")
    return Check(f"port {port}", "ok", "is free")


def _check_model(name: str, memory: int | None) -> Check:
    try:
        folder = model_folder(name)
        model = load_config(folder)
    except TwinferError as error:
        return Check("model", "bad", str(error))
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    size = size or 2 * parameter_count(decoder.parameters_of(model))
    text = f"{model.architecture}, {size / (1 << 30):.2f} GiB of weights"
    if memory is not None and size > memory:
        what = "more than the device has: needs --tensor-parallel-size, or another device"
        return Check("model", "bad", f"{text}, {what}")
    return Check("model", "ok", text)
