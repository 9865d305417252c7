"""Folders that an option names, for what is written into them."""

from __future__ import annotations

from pathlib import Path

from .errors import ConfigError
from .models.fields import show


def make_folder(option: str, folder: str | Path, mode: int = 0o777) -> Path:
    """The folder, which is made if it is not there. Raises ConfigError, which names `option`."""
    path = Path(folder)
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a null character
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{option}: cannot make the folder {show(str(path))}: {why}") from None
    return path
