"""How a comparison ends, as exit codes; see `shared/errors.py` for the tree.

0  equal within the gates
1  a numeric failure
2  wrong input
3  something was not compared
4  a backend or a device is missing
5  the surroundings failed: disk, time, network
"""

from __future__ import annotations

from pathlib import Path

from ..shared.errors import BackendUnavailable, TwinferError, UserError

EQUAL, FAILED, USAGE, NOT_COMPARED, UNAVAILABLE, INFRASTRUCTURE = range(6)


class NotComparable(TwinferError):
    """Nothing, or not everything, could be compared: a missing tap, another shape, another
    model, a damaged bundle.
    """

    exit_code = NOT_COMPARED


class InfrastructureError(TwinferError):
    """Something around the comparison failed: a file could not be written, a server did not
    answer.
    """

    exit_code = INFRASTRUCTURE


USERS = UserError, BackendUnavailable, NotComparable, InfrastructureError
"""Errors of who asks, or of what is around: they end a command. Others are a side's."""


def in_words(error: Exception) -> str:
    """Kind and message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"


def write_text(path: str | Path, text: str) -> None:
    """Write a file. Raises InfrastructureError."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InfrastructureError(f"cannot write {path}: {error.strerror}") from error
