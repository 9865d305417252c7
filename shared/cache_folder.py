"""Folders that keep compiled code between starts. What lies there is run, so only its owner may
write to them.

Each set of factors (all that the code depends on) has a folder of its own, so that code which was
compiled for something else is never loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError

FACTORS = "factors.json"


def default_root(backend: str) -> Path:
    """Where a backend's code is kept unless the user says otherwise:
    `$XDG_CACHE_HOME/twinfer/BACKEND`.

    A relative XDG_CACHE_HOME counts as none, as its specification says.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path.home() / ".cache"
    return base / "twinfer" / backend


def fingerprint(factors: Mapping[str, Any]) -> str:
    """A digest of factors."""
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:24]


def open_private(option: str, root: Path, factors: Mapping[str, Any]) -> Path:
    """The folder of these factors below `root`, made with mode 0700 if it is not there, and found
    to be writable.

    The factors are stored beside what is kept, and a folder whose factors differ is emptied. Raises
    OSError or ValueError where that cannot be done, ConfigError (which names `option`) where others
    may write.
    """
    folder = root / fingerprint(factors)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_private(option, root, folder)
    stored = folder / FACTORS
    if stored.exists() and json.loads(stored.read_text(encoding="utf-8")) != factors:
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    # Also where they are there: a folder that cannot be written now says so here.
    write_atomically(stored, json.dumps(factors, indent=1, sort_keys=True))
    return folder


def _check_private(option: str, root: Path, folder: Path) -> None:
    """Raise ConfigError if others may write to `folder`, or put another one in its place."""
    others = stat.S_IWGRP | stat.S_IWOTH
    held, holder = folder.stat(), root.stat()
    # In a folder with the sticky bit, such as /tmp, nobody renames what belongs to another.
    may_rename = holder.st_mode & others and not holder.st_mode & stat.S_ISVTX
    foreign = held.st_uid != os.getuid() or holder.st_uid not in (0, os.getuid())
    if foreign or held.st_mode & others or may_rename:
        raise ConfigError(
            f"{option}: got {folder}, which others may write to; code is loaded from there"
        )


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see all of it or none."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(name, path)
