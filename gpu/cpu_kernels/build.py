"""The C kernels of this folder: compiled once for this processor, kept with other compiled code,
loaded.

They include no header of torch, so the system's compiler makes them in seconds. They share torch's
OpenMP threads: the library is linked against no OpenMP of its own, and finds what torch has loaded.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ...ops.implement import Refusal
from ...shared.errors import ConfigError
from ..backend import open_cache

OPTIONS = ("-O3", "-march=native", "-ffp-contract=off", "-fPIC")
"""No `-ffast-math`, and no products fused with sums: what the source says is what is rounded."""
THREADS = "-fopenmp"
LIBRARY = "kernels.so"
LONGEST = 120
"""Seconds that the compiler may take."""


@cache
def library() -> ctypes.CDLL | Refusal:
    """The compiled kernels, or why there are none."""
    compiler = _compiler()
    if compiler is None:
        return Refusal("there is no C compiler (cc, gcc, clang or CC)")
    try:
        return _load(compiler)
    except (OSError, ConfigError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return Refusal(f"{compiler} made no kernels: {said.strip().splitlines()[-1][:200]}")


def supported() -> bool | Refusal:
    """Whether the kernels are there, or why not; the first call may compile them."""
    found = library()
    return found if isinstance(found, Refusal) else True


def _load(compiler: str) -> ctypes.CDLL:
    folder = open_cache(None, _factors(compiler))
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="twinfer-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = folder / LIBRARY
    if made.exists():
        return ctypes.CDLL(str(made))
    try:
        _compile(compiler, folder, THREADS)
        return ctypes.CDLL(str(made))
    except (OSError, subprocess.SubprocessError):
        # No OpenMP in this compiler, or another one than torch's.
        _compile(compiler, folder)
        return ctypes.CDLL(str(made))


def _compile(compiler: str, folder: Path, *more: str) -> None:
    """Write the library; whoever reads it sees all of it or none."""
    source = Path(__file__).with_name("kernels.c")
    with tempfile.TemporaryDirectory(dir=folder) as held:
        unlinked, linked = Path(held, "kernels.o"), Path(held, LIBRARY)
        _run(compiler, *OPTIONS, *more, "-c", str(source), "-o", str(unlinked))
        _run(compiler, "-shared", str(unlinked), "-o", str(linked), "-lm")
        os.replace(linked, folder / LIBRARY)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LONGEST)
    return done.stdout


def _compiler() -> str | None:
    names = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _factors(compiler: str) -> dict[str, Any]:
    """All that the compiled code depends on."""
    digest = hashlib.sha256()
    for path in sorted(_sources()):
        digest.update(path.read_bytes())
    return {
        "sources": digest.hexdigest(),
        "options": [*OPTIONS, THREADS],
        "compiler": [compiler, _run(compiler, "--version").splitlines()[0]],
        "processor": _processor(),
    }


def _sources() -> Iterator[Path]:
    here = Path(__file__).parent
    return (path for path in here.iterdir() if path.suffix in (".c", ".h"))


def _processor() -> list[str]:
    """What `-march=native` looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    first = lines[: lines.index("")] if "" in lines else lines
    return [platform.machine(), *(line for line in first if line.split("\t")[0] in wanted)]
