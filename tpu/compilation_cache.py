"""JAX's own cache of compiled programs, switched on for this process unless the user says
otherwise.

An entry is an executable that XLA has serialised, compressed; JAX hands it back to XLA, and no
pickle is read. But it is machine code: whoever can write to the folder can run code as this user.

The folder has a largest size. Then JAX locks it for each read and write; without one it does not,
and a process that starts beside another reads entries that are only half written.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import filelock  # noqa: F401  (JAX needs it to lock the folder, and asks for it only then)
import jax
from jax.experimental.compilation_cache import compilation_cache

from ..shared.cache_folder import default_root, open_private
from ..shared.config import Change
from ..shared.errors import ConfigError
from ..shared.jax_config import NO_CACHE

OPTION = "compilation_cache_dir"
LARGEST = 16 << 30
"""Bytes. JAX then drops the entries that were not used for longest."""
CPU_INFO = Path("/proc/cpuinfo")
FEATURES = ("flags", "Features", "CPU part")
"""What Linux calls the instructions that a core has, on x86 and on ARM."""

_chosen_here: str | None = None
"""The folder that this module gave to JAX last."""


def use_cache(asked: str | None, devices: Sequence[Any]) -> Change:
    """Switch the cache on or off for this process, and say what was done.

    `asked` is a folder, `NO_CACHE`, or None: the cache that JAX has been told of already, else a
    private folder of this user. Where it cannot be had, programs are compiled as without one, and a
    warning says so. Raises ConfigError for a folder that the user named, if others may write to it.
    """
    configured = jax.config.jax_compilation_cache_dir
    if configured == _chosen_here:
        configured = None
    if asked == NO_CACHE:
        _set_folder(None)
        return Change(OPTION, asked, NO_CACHE, "compiled programs are not kept")
    if asked is None and (configured or not jax.config.jax_enable_compilation_cache):
        why = "JAX's own setting" if configured else "JAX_ENABLE_COMPILATION_CACHE is off"
        return Change(OPTION, asked, configured or NO_CACHE, why)
    try:
        root = default_root("jax") if asked is None else Path(asked)
        folder = open_private(OPTION, root, factors(devices))
    except (OSError, ValueError, RuntimeError) as error:
        return _without(asked, error)
    except ConfigError as error:
        if asked is not None:
            raise
        return _without(asked, error)
    _set_folder(str(folder))
    # JAX keeps by default what took a second; all of ours are needed again.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if jax.process_count() > 1:
        _keep_on_every_process()
    return Change(OPTION, asked, str(folder), "compiled programs are kept for later starts")


def _without(asked: str | None, error: Exception) -> Change:
    _set_folder(None)
    why = f"compiled programs are not kept: {error}"
    warnings.warn(f"{OPTION}: {why}; each start compiles them again", stacklevel=3)
    return Change(OPTION, asked, NO_CACHE, why)


def _set_folder(folder: str | None) -> None:
    global _chosen_here
    _chosen_here = folder
    if folder != jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", folder)
        if folder is not None:
            jax.config.update("jax_compilation_cache_max_size", LARGEST)
        compilation_cache.reset_cache()  # JAX opens a folder once


def _keep_on_every_process() -> None:
    """Have each of several processes keep what it compiles. JAX writes entries on the first one
    alone, as if all had one folder: the others would compile everything again at each start.
    """
    from jax._src import compiler  # this has no public name

    write = compiler._cache_write
    if write.__globals__ is vars(compiler):
        first = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
        names = vars(compiler) | {"distributed": first}
        compiler._cache_write = FunctionType(
            write.__code__, names, write.__name__, write.__defaults__, write.__closure__
        )


def factors(devices: Sequence[Any]) -> dict[str, Any]:
    """What of this machine and its JAX compiled code depends on; the rest is in JAX's key of each
    entry.

    XLA compiles for the instructions of the CPU that it runs on. On another one of them they would
    end the process.
    """
    return {
        "layout": "locked",  # entries of an unlocked folder have no time of their last use
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "devices": sorted({device.device_kind for device in devices}),
        "machine": platform.machine(),
        "cpu": cpu_features(),
    }


def cpu_features(path: Path = CPU_INFO) -> list[str]:
    """The instructions of this machine's CPU, sorted; its name where the system does not list
    them.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found: set[str] = set()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in FEATURES:
            found.update(value.split())
    return sorted(found) or [platform.processor()]
