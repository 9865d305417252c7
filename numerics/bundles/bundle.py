"""Bundles: steps and what was seen when they ran, in a folder that every backend can read. No
pickle.

    manifest.json        format, model with its fingerprint, sizes, what ran where, each other
                         file's size and SHA-256
    steps.jsonl          one `StepInput` a line, fields by name, and the taps of its ops
    start.safetensors    `kv` [layer page slot 2*kvhead hdim] before the first step; not there if
                         the cache was empty
    step-0000.safetensors ...  what step 0 brought: `embed.hidden`, `layer.3.hidden`, `.residual`,
                               `.kv_rows` (what was written, by token), `finish.rows`, `logits`,
                               `tokens`, and the taps of ops

A tap is stored as `layer.3/linear[qkv]<x` (argument x) and `layer.3/linear[qkv]>0` (output 0).
Where it is the layer's whole cache, steps.jsonl says so (`kv_in`, `kv_out`), and it is put together
again from the rows.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save

from ...shared.checkpoint import DTYPES
from ...shared.errors import ConfigError, ModelError
from ...shared.folders import make_folder
from ...shared.models.config_json import load_config
from ...shared.models.locate import model_folder
from ...shared.step import StepInput
from ..errors import InfrastructureError, NotComparable
from ..sides.environment import versions
from ..sides.subject import Subject
from .steps import Recorded, from_json, to_json

FORMAT, VERSION = "twinfer-bundle", 1
MANIFEST, STEPS, START = "manifest.json", "steps.jsonl", "start.safetensors"
FILE = re.compile(r"[a-z0-9][a-z0-9-]*\.(jsonl|safetensors)")
"""A plain name in the bundle's own folder: a manifest may come from anybody."""
MAX_MANIFEST = 64 << 20
SIZES = (
    "dtype",
    "load_format",
    "seed",
    "max_model_len",
    "max_num_seqs",
    "tokens",
    "page_size",
    "num_pages",
)


@dataclass(slots=True)
class Bundle:
    """A bundle in memory. `source` says what ran (see `environment.describe`), `start` is the
    cache before it.
    """

    subject: Subject
    steps: list[Recorded]
    source: dict[str, Any]
    start: np.ndarray | None = None

    @property
    def inputs(self) -> list[StepInput]:
        return [recorded.step for recorded in self.steps]

    @property
    def name(self) -> str:
        """What ran, as `jax:cpu`."""
        return str(self.source.get("target", "?"))


def fingerprint(subject: Subject) -> str:
    """Hex digest of a model: its config and its weights, which are sampled: sizes, headers, and
    64 blocks of a file.
    """
    digest = hashlib.sha256(str(subject.model.raw_hash).encode())
    if subject.load_format == "dummy":
        digest.update(f"dummy {subject.seed}".encode())
        return digest.hexdigest()
    for path in sorted(Path(subject.folder).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            digest.update(file.read(1 << 20))
            for block in range(64):
                file.seek(size * block // 64)
                digest.update(file.read(4096))
    return digest.hexdigest()


# --- writing
# --------------------------------------------------------------------------------------------------


def check_free(folder: str) -> Path:
    """The path of a bundle to be written. Raises ConfigError if there is something, or if no
    folder can be made there.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"out: {folder} is there already; name a new folder")
    try_folder("out", target)
    return target


def try_folder(option: str, target: Path) -> None:
    """Raise ConfigError where a folder cannot be made. One that was not there is not there after
    this, but for those above it.
    """
    known = target.exists()
    make_folder(option, target)
    if not known:
        target.rmdir()


def write(bundle: Bundle, folder: str) -> Path:
    """Write a bundle to a new folder. Raises ConfigError if there is something,
    InfrastructureError if it fails.
    """
    target = check_free(folder)
    part = target.with_name(f"{target.name}.part")
    files = {STEPS: "".join(f"{_dumps(to_json(recorded))}\n" for recorded in bundle.steps).encode()}
    if bundle.start is not None:
        files[START] = save({"kv": np.ascontiguousarray(bundle.start)})
    for number, recorded in enumerate(bundle.steps):
        if recorded.arrays:
            files[_step_file(number)] = save(
                {n: np.ascontiguousarray(x) for n, x in recorded.arrays.items()}
            )
    subject = bundle.subject
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "model": subject.name,
        "fingerprint": fingerprint(subject),
        "sizes": {name: getattr(subject, name) for name in SIZES},
        "source": bundle.source,
        "versions": versions(),
        "files": {name: {"bytes": len(data), "sha256": _sha(data)} for name, data in files.items()},
    }
    manifest["sha256"] = _sha(_dumps(manifest).encode())
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for name, data in {**files, MANIFEST: json.dumps(manifest, indent=1).encode()}.items():
            (part / name).write_bytes(data)
        # Whole or not at all.
        if target.exists():
            target.rmdir()
        part.rename(target)
    except OSError as error:
        raise InfrastructureError(f"cannot write {folder}: {error.strerror}") from error
    return target


def _step_file(number: int) -> str:
    return f"step-{number:04d}.safetensors"


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


# --- reading
# --------------------------------------------------------------------------------------------------


def read(folder: str, model: str | None = None) -> Bundle:
    """Read a bundle; `model` names the model's folder if it is not the one where the bundle was
    made.

    Raises NotComparable, naming what is wrong, if it is none, damaged, or of another model.
    """
    path = Path(folder)
    manifest = _manifest(path)
    named = manifest["files"]
    if STEPS not in named:
        raise NotComparable(f"bundle {folder}: the manifest names no {STEPS}")
    files = {name: _checked(path, name, entry) for name, entry in named.items()}
    subject = _subject(folder, manifest, model)
    lines = files[STEPS].decode("utf-8", "replace").splitlines()
    if not lines:
        raise NotComparable(f"bundle {folder}: there are no steps in it")
    steps = []
    for number, line in enumerate(lines):
        where = f"bundle {folder}: {STEPS}, line {number + 1}"
        recorded = from_json(_object(line, where), where, subject)
        if _step_file(number) in files:
            recorded.arrays = read_tensors(
                files[_step_file(number)], f"bundle {folder}: {_step_file(number)}"
            )
        steps.append(recorded)
    start = None
    if START in files:
        start = read_tensors(files[START], f"bundle {folder}: {START}").get("kv")
        wanted = (subject.model.num_layers, None, *subject.layout.page_shape(0))
        if (
            start is None
            or start.ndim != 5
            or any(w not in (None, n) for w, n in zip(wanted, start.shape, strict=True))
        ):
            got = "nothing" if start is None else list(start.shape)
            raise NotComparable(
                f"bundle {folder}: {START} has kv {got}, the model's cache is {list(wanted)}"
            )
    return Bundle(subject, steps, manifest["source"], start)


def _object(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotComparable(f"{where} is not JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise NotComparable(f"{where} is not a JSON object")
    return value


def read_manifest(file: Path, format_: str, version: int) -> dict[str, Any]:
    """The manifest of such a folder, of at most MAX_MANIFEST bytes. Raises NotComparable."""
    try:
        if file.stat().st_size > MAX_MANIFEST:
            raise NotComparable(
                f"{file}: has {file.stat().st_size} bytes, allowed are {MAX_MANIFEST}"
            )
        manifest = _object(file.read_bytes(), str(file))
    except OSError as error:
        raise NotComparable(f"{file}: cannot be read: {error.strerror}") from None
    for name, wanted in (("format", format_), ("version", version)):
        if manifest.get(name) != wanted:
            raise NotComparable(
                f"{file}: {name} is {str(manifest.get(name))[:60]!r}, must be {wanted!r}"
            )
    return manifest


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    manifest = read_manifest(file, FORMAT, VERSION)
    digest = manifest.pop("sha256", None)
    if digest != _sha(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()):
        raise NotComparable(f"{file}: is damaged or was edited: its own SHA-256 does not hold")
    kinds = {"model": str, "fingerprint": str, "sizes": dict, "source": dict, "files": dict}
    for name, kind in kinds.items():
        if not isinstance(manifest.get(name), kind):
            raise NotComparable(
                f"{file}: {name} is {str(manifest.get(name))[:60]!r}, must be a {kind.__name__}"
            )
    for name, entry in manifest["files"].items():
        if not FILE.fullmatch(name):
            raise NotComparable(
                f"{file}: names the file {name[:80]!r}, which is no plain name of this folder"
            )
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("bytes"), int)
            or "sha256" not in entry
        ):
            raise NotComparable(
                f"{file}: says {str(entry)[:60]!r} of {name}, must be bytes and sha256"
            )
    return manifest


def _checked(path: Path, name: str, entry: Mapping[str, Any]) -> bytes:
    """A file's bytes, if they are those of the manifest."""
    file = path / name
    try:
        if file.is_symlink():
            raise NotComparable(f"{file}: is a link, which leads out of the bundle")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise NotComparable(
                f"{file}: has {size} bytes, the manifest says {entry['bytes']}: it is truncated"
            )
        data = file.read_bytes()
    except OSError as error:
        raise NotComparable(f"{file}: cannot be read: {error.strerror}") from None
    if _sha(data) != entry["sha256"]:
        raise NotComparable(f"{file}: is damaged: its SHA-256 is not that of the manifest")
    return data


def read_tensors(data: bytes, where: str) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file. Raises NotComparable; `where` names it."""
    from safetensors import deserialize

    try:
        found = deserialize(data)  # type: ignore[no-untyped-call]
        for name, info in found:
            if info["dtype"] not in DTYPES:
                raise NotComparable(
                    f"{where}: {name[:60]} is in {info['dtype']!r}, allowed are {', '.join(DTYPES)}"
                )
        return {name: _array(info) for name, info in found}
    except (SafetensorError, ValueError, KeyError) as error:
        raise NotComparable(f"{where} is damaged: {str(error)[:120]}") from None


def _array(info: Mapping[str, Any]) -> np.ndarray:
    # A copy: what was read lies at any byte, and belongs to the library.
    return np.frombuffer(bytes(info["data"]), DTYPES[info["dtype"]]).reshape(info["shape"]).copy()


def _subject(folder: str, manifest: Mapping[str, Any], model: str | None) -> Subject:
    name, sizes = model or manifest["model"], manifest["sizes"]
    for key in SIZES:
        wanted = str if key in ("dtype", "load_format") else int
        if not isinstance(sizes.get(key), wanted) or isinstance(sizes.get(key), bool):
            raise NotComparable(f"bundle {folder}: sizes.{key} is {str(sizes.get(key))[:40]!r}")
    try:
        where = model_folder(name)
        subject = Subject(name, where, load_config(where), **{key: sizes[key] for key in SIZES})
        found = fingerprint(subject)
    except (ModelError, OSError) as error:
        raise NotComparable(
            f"bundle {folder}: its model is not here; name its folder with --model ({error})"
        ) from None
    if found != manifest["fingerprint"]:
        raise NotComparable(
            f"bundle {folder}: is of another model: fingerprint {manifest['fingerprint'][:16]}, "
            f"{name} has {found[:16]}"
        )
    return subject


def arrays_of(names: Iterable[str]) -> str:
    """Names of arrays for a message: the first few."""
    first = sorted(names)[:3]
    return ", ".join(first) or "none"
