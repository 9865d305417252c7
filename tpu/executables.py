"""Compiled programs in a folder, with a manifest that says for what they were compiled and what
each file must hash to.

JAX serialises executables with pickle, and reading a pickle can run code. So nothing is read that
the manifest does not name with its SHA-256, and nothing at all from a folder that anybody but its
owner (this user, or root) can write.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from ..ops.source_hash import source_hash
from ..shared import folders
from ..shared.config import EngineConfig, ResolvedConfig
from ..shared.errors import ConfigError
from ..shared.models.config import ModelConfig
from ..shared.options import options_of
from . import ladder
from .compile_options import flags_for, options_for
from .ladder import Job

MANIFEST = "manifest.json"
NOT_SHAPING = {name for name, entry in options_of(EngineConfig).items() if not entry.shapes} | {
    "compilation",
    "demand",
}
"""The options that change no program, or that something else in the key stands for. Every other
one counts.
"""

NOT_SIZES = ("raw_hash", "eos_token_ids", "image_token_ids", "left_out")
"""Fields of a model that change no program."""

OPTIONS_OF = {
    "plan_hash": "op_priority, enable_ops, row_invariant",
    "model": "config.json, quantization",
    "sources": "this release",
    "num_pages": "kv_cache_memory, memory_utilization, what else holds memory",
    "devices": "device, tensor_parallel_size, the machine",
    "places": "device, tensor_parallel_size, the machine",
    "streams": "comparisons",
    "flags": "XLA_FLAGS, LIBTPU_INIT_ARGS",
}
"""What the parts of a key come from, where their names do not say it."""
LINE = 60
"""Letters of a value in an error."""


def key(
    model: ModelConfig, config: ResolvedConfig, plan_hash: str, mesh: Mesh, num_pages: int
) -> dict[str, Any]:
    """Everything that a program depends on."""
    sizes = {name: value for name, value in asdict(model).items() if name not in NOT_SIZES}
    platform = mesh.devices.flat[0].platform
    return {
        "plan_hash": plan_hash,
        "sources": source_hash(ladder.jobs, "jax"),
        "versions": {name: _version(name) for name in ("jax", "jaxlib", "libtpu")},
        "compiler": options_for(platform),
        "flags": flags_for(platform),
        "devices": [device.device_kind for device in mesh.devices.flat],
        "places": [_place(device) for device in mesh.devices.flat],
        "num_pages": num_pages,
        "streams": config.demand.streams,
        "config": {
            f.name: getattr(config, f.name) for f in fields(config) if f.name not in NOT_SHAPING
        },
        "model": hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest(),
    }


def _place(device: Any) -> list[int]:
    """Where a device is: its id, by which an executable knows it, its chip, and its core there."""
    core = getattr(device, "core_on_chip", None)
    return [device.id, *getattr(device, "coords", ()), *(() if core is None else (core,))]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def make_folder(folder: str) -> Path:
    """The folder that executables are written to. Raises ConfigError if it cannot be had, or
    others can write there.
    """
    path = folders.make_folder("out", folder, 0o700)
    _check_owner("out", path)
    return path


class Writer:
    """Collects executables into a folder; the manifest is written last, so a half-written folder
    is none.
    """

    def __init__(self, folder: str, key: dict[str, Any]) -> None:
        self._folder = make_folder(folder)
        (self._folder / MANIFEST).unlink(missing_ok=True)
        self._key = key
        self._files: dict[str, str] = {}

    def add(self, name: str, compiled: Any) -> None:
        """Write one executable."""
        payload, _, _ = serialize_executable.serialize(compiled)
        self._files[name] = hashlib.sha256(payload).hexdigest()
        _write(self._folder / f"{name}.bin", payload)

    def finish(self) -> str:
        """Write the manifest; returns the folder."""
        manifest = {"key": self._key, "sha256": self._files}
        _write(self._folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        return str(self._folder)


def _write(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


class Reader:
    """The executables of a folder. Raises ConfigError if it, or a file in it, may be another
    user's work.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise ConfigError(f"aot_folder: got {folder}, which is not a folder")
        _check_owner("aot_folder", self._folder)
        try:
            manifest = json.loads(self._read(MANIFEST))
            self._key, self._files = dict(manifest["key"]), dict(manifest["sha256"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"aot_folder: {self._folder / MANIFEST} is not a manifest ({error})"
            ) from None

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache that the executables were compiled for. Raises ConfigError."""
        number = self._key.get("num_pages")
        if type(number) is not int or number < 1:
            raise ConfigError(
                f"aot_folder: {self._folder / MANIFEST} has num_pages {number!r}, must be an "
                "integer"
            )
        return number

    def check(self, key: dict[str, Any], names: Iterable[str]) -> None:
        """Raise ConfigError unless the executables were compiled for `key`, and those of all
        `names` are there.
        """
        if different := self.differences(key):
            raise ConfigError(
                f"aot_folder: {self._folder} was compiled for another {'; '.join(different)}"
            )
        needed = list(names)
        if missing := [name for name in needed if name not in self._files]:
            raise ConfigError(
                f"aot_folder: {self._folder} has no program {', '.join(missing)}, of the "
                f"{len(needed)} that this start needs; `twinfer aot --out` writes all"
            )

    def differences(self, key: dict[str, Any]) -> list[str]:
        """What of `key` the executables were not compiled for, with both values; empty if they
        fit.
        """
        return _differences(json.loads(json.dumps(key)), self._key)

    def load(self, job: Job, devices: list[Any]) -> Any:
        """The executable of a job, on `devices`. Raises ConfigError if it is missing or not the
        one of the manifest.
        """
        if job.name not in self._files:
            raise ConfigError(f"aot_folder: {self._folder} has no program {job.name}")
        payload = self._read(f"{job.name}.bin")
        if hashlib.sha256(payload).hexdigest() != self._files[job.name]:
            raise ConfigError(
                f"aot_folder: {self._folder / job.name}.bin is not the file that the manifest names"
            )
        inputs = jax.tree.structure((job.arguments, {}))
        results = jax.tree.structure(jax.eval_shape(job.function, *job.arguments))
        try:
            return serialize_executable.deserialize_and_load(
                payload, inputs, results, devices[0].client, devices
            )
        except Exception as error:  # of several kinds, by what the runtime says
            why = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"aot_folder: {self._folder / job.name}.bin cannot be loaded here "
                f"({type(error).__name__}: {why}); without aot_folder programs are compiled"
            ) from error

    def _read(self, name: str) -> bytes:
        path = self._folder / name
        try:
            _check_owner("aot_folder", path)
            return path.read_bytes()
        except OSError as error:
            raise ConfigError(f"aot_folder: cannot read {path}: {error.strerror}") from None


def _differences(here: dict[str, Any], there: dict[str, Any], within: str = "") -> list[str]:
    found = []
    for name in sorted(here.keys() | there.keys()):
        own, other = here.get(name), there.get(name)
        if own == other:
            continue
        if isinstance(own, dict) and isinstance(other, dict):
            found += _differences(own, other, f"{within}{name}.")
            continue
        of = f" (of {OPTIONS_OF[name]})" if name in OPTIONS_OF else ""
        found.append(f"{within}{name}{of}: {_short(other, own)} there, {_short(own, other)} here")
    return found


def _short(value: Any, other: Any) -> str:
    """A value of a key for a line: of a long one, what is around its first difference from
    `other`.
    """
    words = json.dumps(value)
    if len(words) <= LINE:
        return words
    pairs = enumerate(zip_longest(words, json.dumps(other)))
    start = max(0, next(place for place, (own, its) in pairs if own != its) - LINE // 2)
    before, after = "..." if start else "", "..." if start + LINE < len(words) else ""
    return f"{before}{words[start : start + LINE]}{after}"


def _check_owner(option: str, path: Path) -> None:
    status = path.lstat()
    foreign = status.st_uid not in (0, os.getuid())
    if stat.S_ISLNK(status.st_mode) or foreign or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{option}: {path} must belong to this user or root, be no link, and be writable "
            "by no "
            "other"
        )
